"""Filters: which rollouts of a batch take part in the update."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def zero_variance(
  rewards: Float[Array, ' R'],
  prompt_index: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  *,
  num_prompts: int,
  tolerance: float = 1e-6,
) -> Bool[Array, ' R']:
  """Keeps prompts whose valid rollouts differ in reward.

      keep ⇔ max_j rⱼ - min_j rⱼ > tolerance   over the prompt's valid rollouts

  See arXiv:2510.13786, §3.2: identical rewards carry no gradient; the prompt
  leaves the loss and every denominator, and is not replaced. It is a property
  of the group, whatever the rest of the batch does. NaN is not a reward: such
  a rollout is treated as not valid.

  Args:
    rewards: Reward of each rollout; anything where not valid.
    prompt_index: Prompt of each rollout, in [0, num_prompts).
    valid: False: takes no part.
    num_prompts: P (static).
    tolerance: Largest spread that counts as none, in units of reward.

  Returns:
    True where the rollout is valid and its prompt is kept.
  """
  valid &= ~jnp.isnan(rewards)
  high = jax.ops.segment_max(
    jnp.where(valid, rewards, -jnp.inf), prompt_index, num_segments=num_prompts
  )
  low = jax.ops.segment_min(
    jnp.where(valid, rewards, jnp.inf), prompt_index, num_segments=num_prompts
  )
  # A prompt without valid rollouts has high < low and is dropped too.
  return valid & (high - low > tolerance)[prompt_index]
