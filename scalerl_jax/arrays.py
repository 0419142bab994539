"""Device-side tuples that cross a `jit` boundary, and the shape glossary.

Letters in shape annotations, here and everywhere in the package:

    B rows          T tokens of a row      R rollouts       P prompts
    G rollouts per prompt                  V vocabulary     D model width
    N query heads   K key-value heads      H head dim       F hidden width
    L layers        S cache length         C compute points E experts
    k experts per token

Column t of every [B, T] array is about token t of the row: `behavior_logp` and
`loss_mask` at t belong to the token *at* t (predicted from the tokens before
it), never to the token after it.
"""

from typing import NamedTuple

import jax
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


class RouterStats(NamedTuple):
  """What routers chose, summed over tokens; those of parts of a batch add up.

  Padding does not count. A choice is one token's in one layer.
  """

  load: Float[jax.Array, 'L E']  # Choices that an expert is part of.
  num_choices: Float[jax.Array, '']
  num_replayed: Float[jax.Array, '']  # Choices that were given.
  num_agreed: Float[jax.Array, '']  # Given = own, as sets of experts.
  entropy: Float[jax.Array, '']  # Of the router's softmax, nats.


class TokenScores(NamedTuple):
  """What a policy says of given tokens; column t is about token t."""

  logp: Float[jax.Array, 'B T']  # log π(token t | tokens before t), nats.
  entropy: Float[jax.Array, 'B T']  # Entropy of that distribution, nats.


class RoutedScores(NamedTuple):
  """`TokenScores` of a policy with experts, and what its routers chose."""

  logp: Float[jax.Array, 'B T']
  entropy: Float[jax.Array, 'B T']
  router: RouterStats


class Batch(NamedTuple):
  """One gradient step's worth of rollouts, padded to a fixed shape.

  Padding rows and columns have `segment_ids` 0, `rollout_index` -1 and
  `loss_mask` False. Padding rollouts have `valid` False. The tokens of one
  rollout lie in one row; a row may hold several rollouts (packed).
  """

  tokens: Int[jax.Array, 'B T']
  positions: Int[jax.Array, 'B T']  # From 0 in each segment.
  segment_ids: Int[jax.Array, 'B T']  # From 1 in each row; 0 is padding.
  loss_mask: Bool[jax.Array, 'B T']  # True: a token the policy sampled.
  behavior_logp: Float[jax.Array, 'B T']  # The engine's own, per token.
  policy_version: Int[jax.Array, 'B T']  # That sampled the token; -1: none.
  rollout_index: Int[jax.Array, 'B T']  # Into the arrays below; -1: none.
  rewards: Float[jax.Array, ' R']
  valid: Bool[jax.Array, ' R']  # False: unscored, masked or padding.
  prompt_index: Int[jax.Array, ' R']  # Prompt of each rollout, in [0, P).
  reference_logp: Float[jax.Array, 'B T'] | None = None  # Only for a KL term.
  # That the engine passed token t through, to be taken again; -1: not known,
  # the policy chooses. None: it chooses for all.
  routed_experts: Int[jax.Array, 'B T L k'] | None = None
