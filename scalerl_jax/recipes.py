"""Recipes: which loss, advantage, aggregation and filters make an algorithm.

A recipe is a composition of pure functions; the train step takes one and does
not know its name. A new ablation is `recipe._replace(...)`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalerl_jax import advantages
from scalerl_jax import aggregation
from scalerl_jax import filters
from scalerl_jax import losses

# (policy_logp, behavior_logp, advantages, loss_mask, rollout_index,
#  *, num_rollouts) -> loss per token.
PolicyLoss = Callable[..., jax.Array]
# (rewards, prompt_index, valid, *, num_prompts) -> [R].
Advantage = Callable[..., jax.Array]
Filter = Callable[..., jax.Array]
# (loss_mask, rollout_index, prompt_of_rollout,
#  *, num_rollouts, num_prompts) -> weights.
Aggregation = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLoss:
  """A `PolicyLoss` in which a token's loss depends on its own log π alone.

  Being of this type, it lets the train step take the loss and its gradients
  from one pass over the logits (`losses.fused_loss`).
  """

  fn: Callable[..., jax.Array]  # (policy_logp, behavior_logp, advantages).

  def __call__(
    self,
    policy_logp: jax.Array,
    behavior_logp: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    rollout_index: jax.Array,
    *,
    num_rollouts: int,
  ) -> jax.Array:
    """Returns the loss per token; what it does not look at is not needed."""
    del loss_mask, rollout_index, num_rollouts
    return self.fn(policy_logp, behavior_logp, advantages)


class Recipe(NamedTuple):
  """One algorithm, as the functions it is made of."""

  policy_loss: PolicyLoss
  advantage: Advantage
  aggregation: Aggregation
  filters: tuple[Filter, ...] = ()
  kl: Callable[..., jax.Array] = losses.kl_k3  # Of each token by itself.
  kl_weight: float = 0.0  # Of the KL to the reference policy, per token.
  max_ratio: float | None = None  # Ratios above it are bounded; for metrics.


def scalerl(*, max_ratio: float = 5.0) -> Recipe:
  """CISPO, prompt mean, batch-normalised advantages, zero-variance filter.

  See arXiv:2510.13786, §4.

  Args:
    max_ratio: Cap on the importance ratio, at least 1.

  Returns:
    The recipe.

  Raises:
    ValueError: max_ratio is below 1.
  """
  return Recipe(
    policy_loss=TokenLoss(
      functools.partial(losses.cispo, max_ratio=_checked_cap(max_ratio))
    ),
    advantage=advantages.batch_normalized,
    aggregation=aggregation.prompt_mean,
    filters=(filters.zero_variance,),
    max_ratio=max_ratio,
  )


def grpo(*, clip: float = 0.2) -> Recipe:
  """Symmetric clipping, sequence mean, group-normalised advantages.

  See "DeepSeekMath" (arXiv:2402.03300); without a KL term, as in
  arXiv:2510.13786, A.16.

  Args:
    clip: Clip range on both sides, in [0, 1).

  Returns:
    The recipe.

  Raises:
    ValueError: clip is out of its range.
  """
  return _clipped(clip, clip, aggregation.sequence_mean, ())


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.26) -> Recipe:
  """Asymmetric clipping, prompt mean, zero-variance prompts dropped.

  See "DAPO" (arXiv:2503.14476), with the aggregation and clip range of
  arXiv:2510.13786, A.16; dropped prompts are not refilled.

  Args:
    clip_low: Lower clip range, in [0, 1).
    clip_high: Upper clip range.

  Returns:
    The recipe.

  Raises:
    ValueError: A clip range is out of its bounds.
  """
  keep = (filters.zero_variance,)
  return _clipped(clip_low, clip_high, aggregation.prompt_mean, keep)


def magistral(*, clip_low: float = 0.2, clip_high: float = 0.26) -> Recipe:
  """The DAPO composition, to be run under the PipelineRL schedule.

  See arXiv:2510.13786, A.16: Magistral differs from DAPO in its schedule.

  Args:
    clip_low: Lower clip range, in [0, 1).
    clip_high: Upper clip range.

  Returns:
    The recipe.

  Raises:
    ValueError: A clip range is out of its bounds.
  """
  return dapo(clip_low=clip_low, clip_high=clip_high)


def minimax_m1(*, max_ratio: float = 5.0) -> Recipe:
  """CISPO, prompt mean, group-normalised advantages, zero-variance filter.

  See "MiniMax-M1" (arXiv:2506.13585) as run in arXiv:2510.13786, A.16.

  Args:
    max_ratio: Cap on the importance ratio, at least 1.

  Returns:
    The recipe.

  Raises:
    ValueError: max_ratio is below 1.
  """
  base = scalerl(max_ratio=max_ratio)
  return base._replace(advantage=advantages.group_normalized)


def dr_grpo(*, length: int, clip: float = 0.2) -> Recipe:
  """Clipping without length or deviation bias: centered, fixed length.

  See "Understanding R1-Zero-Like Training" (arXiv:2503.20783), §3.2.

  Args:
    length: Constant divisor of a rollout's sum, in tokens.
    clip: Clip range on both sides, in [0, 1).

  Returns:
    The recipe.

  Raises:
    ValueError: clip or length is out of its range.
  """
  if length < 1:
    raise ValueError(f'length={length} must be at least 1 token')
  aggregate = functools.partial(aggregation.fixed_length, length=length)
  recipe = _clipped(clip, clip, aggregate, ())
  return recipe._replace(advantage=advantages.centered)


def gspo(*, clip_low: float = 3e-3, clip_high: float = 4e-3) -> Recipe:
  """One clipped ratio per rollout, sequence mean.

  See "Group Sequence Policy Optimization" (arXiv:2507.18071).

  Args:
    clip_low: Lower clip range, in [0, 1).
    clip_high: Upper clip range.

  Returns:
    The recipe.

  Raises:
    ValueError: A clip range is out of its bounds.
  """
  _checked_clips(clip_low, clip_high)
  return Recipe(
    policy_loss=functools.partial(
      losses.gspo, clip_low=clip_low, clip_high=clip_high
    ),
    advantage=advantages.group_normalized,
    aggregation=aggregation.sequence_mean,
    filters=(filters.zero_variance,),
  )


def supervised() -> Recipe:
  """Maximum likelihood of given responses, through the same train step.

  Returns:
    The recipe: REINFORCE with advantage 1 and the mean over tokens.
  """
  return Recipe(
    policy_loss=TokenLoss(_reinforce),
    advantage=_ones,
    aggregation=aggregation.token_mean,
  )


RECIPES: Mapping[str, Callable[..., Recipe]] = {
  'scalerl': scalerl,
  'grpo': grpo,
  'dapo': dapo,
  'magistral': magistral,
  'minimax_m1': minimax_m1,
  'dr_grpo': dr_grpo,
  'gspo': gspo,
}


def make(name: str, **args: Any) -> Recipe:
  """Makes a recipe by name.

  Args:
    name: One of `RECIPES`.
    **args: Its keyword arguments.

  Returns:
    The recipe.

  Raises:
    ValueError: Unknown name, unknown or missing argument, or a value out of
      its range.
  """
  if name not in RECIPES:
    raise ValueError(f'recipe={name!r} must be one of {sorted(RECIPES)}')
  try:
    inspect.signature(RECIPES[name]).bind(**args)
  except TypeError as error:
    valid = list(inspect.signature(RECIPES[name]).parameters)
    raise ValueError(f'recipe {name!r} takes {valid}: {error}') from None
  for argument, value in args.items():
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise ValueError(f'recipe {name!r}: {argument}={value!r} is not a number')
  return RECIPES[name](**args)


def _reinforce(
  policy_logp: jax.Array, behavior_logp: jax.Array, advantages: jax.Array
) -> jax.Array:
  del behavior_logp
  return losses.reinforce(policy_logp, advantages)


def _ones(
  rewards: jax.Array,
  prompt_index: jax.Array,
  valid: jax.Array,
  *,
  num_prompts: int,
) -> jax.Array:
  del prompt_index, num_prompts
  return jnp.where(valid, jnp.ones_like(rewards), 0.0)


def _clipped(
  low: float, high: float, aggregate: Aggregation, keep: tuple[Filter, ...]
) -> Recipe:
  _checked_clips(low, high)
  return Recipe(
    policy_loss=TokenLoss(
      functools.partial(losses.clipped_surrogate, clip_low=low, clip_high=high)
    ),
    advantage=advantages.group_normalized,
    aggregation=aggregate,
    filters=keep,
    max_ratio=1 + high,
  )


def _checked_cap(max_ratio: float) -> float:
  if not max_ratio >= 1:
    raise ValueError(
      f'max_ratio={max_ratio} caps the ratio itself and must be at least 1'
    )
  return max_ratio


def _checked_clips(low: float, high: float) -> None:
  if not (0 <= low < 1 and high >= 0):
    raise ValueError(
      f'clip_low={low} must be in [0, 1) and clip_high={high} not negative'
    )
