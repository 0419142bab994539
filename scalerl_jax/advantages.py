"""Advantages of rollouts from their rewards, prompt by prompt.

All functions group by explicit prompt index, never by position, and look only
at `valid` rollouts: an unscored or masked rollout takes no part in a mean or a
deviation, and its advantage is 0. A prompt with one valid rollout has nothing
to compare with: advantage 0.

See "The Art of Scaling Reinforcement Learning Compute for LLMs"
(arXiv:2510.13786), §3.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def centered(
  rewards: Float[Array, ' R'],
  prompt_index: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  *,
  num_prompts: int,
) -> Float[Array, ' R']:
  """Subtracts the mean reward of the prompt: Âᵢ = rᵢ - mean_j rⱼ (Dr. GRPO).

  Args:
    rewards: Reward of each rollout; anything where not valid.
    prompt_index: Prompt of each rollout, in [0, num_prompts).
    valid: False: takes no part.
    num_prompts: P (static).

  Returns:
    Advantage of each rollout; 0 where not valid.
  """
  mean, _ = _group_mean(rewards, prompt_index, valid, num_prompts)
  return jnp.where(valid, rewards - mean[prompt_index], 0.0)


def group_normalized(
  rewards: Float[Array, ' R'],
  prompt_index: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  *,
  num_prompts: int,
  eps: float = 1e-6,
) -> Float[Array, ' R']:
  """Divides by the deviation of the prompt: Âᵢ = (rᵢ - mean) / (std + ε).

  See "DeepSeekMath" (arXiv:2402.03300), §4.1.2 (GRPO). The deviation is the
  population's (divided by n), so that one rollout gives 0 and not NaN.

  Args:
    rewards: Reward of each rollout; anything where not valid.
    prompt_index: Prompt of each rollout, in [0, num_prompts).
    valid: False: takes no part.
    num_prompts: P (static).
    eps: ε, keeps the quotient finite.

  Returns:
    Advantage of each rollout; 0 where not valid.
  """
  difference = centered(rewards, prompt_index, valid, num_prompts=num_prompts)
  variance, _ = _group_mean(
    jnp.square(difference), prompt_index, valid, num_prompts
  )
  return difference / (jnp.sqrt(variance) + eps)[prompt_index]


def batch_normalized(
  rewards: Float[Array, ' R'],
  prompt_index: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  *,
  num_prompts: int,
) -> Float[Array, ' R']:
  """Divides by the deviation over the kept batch (ScaleRL).

      Âᵢ = (rᵢ - mean of its prompt) / std over all valid rollouts of (r - mean)

  See arXiv:2510.13786, §4. `valid` must be False for filtered prompts: their
  zeros would shrink the deviation by the root of the kept fraction.

  Args:
    rewards: Reward of each rollout; anything where not valid.
    prompt_index: Prompt of each rollout, in [0, num_prompts).
    valid: False: takes no part, neither in means nor in the deviation.
    num_prompts: P (static).

  Returns:
    Advantage of each rollout; 0 where not valid, and everywhere if the
    deviation is 0.
  """
  difference = centered(rewards, prompt_index, valid, num_prompts=num_prompts)
  count = jnp.maximum(jnp.sum(valid), 1).astype(difference.dtype)
  # Centered values have mean 0 over valid rollouts, so this is the variance.
  std = jnp.sqrt(jnp.sum(jnp.square(difference)) / count)
  # Below this only the rounding of the means is left of identical rewards.
  tiny = 1e-6 * jnp.max(jnp.where(valid, jnp.abs(rewards), 0.0), initial=0.0)
  has_spread = std > tiny
  return jnp.where(
    has_spread, difference / jnp.where(has_spread, std, 1.0), 0.0
  )


def leave_one_out(
  rewards: Float[Array, ' R'],
  prompt_index: Int[Array, ' R'],
  valid: Bool[Array, ' R'],
  *,
  num_prompts: int,
) -> Float[Array, ' R']:
  """Subtracts the mean of the prompt's other rollouts (RLOO).

      Âᵢ = rᵢ - mean_{j ≠ i} rⱼ

  See "Back to Basics" (arXiv:2402.14740), Eq. 8.

  Args:
    rewards: Reward of each rollout; anything where not valid.
    prompt_index: Prompt of each rollout, in [0, num_prompts).
    valid: False: takes no part.
    num_prompts: P (static).

  Returns:
    Advantage of each rollout; 0 where not valid or alone.
  """
  mean, count = _group_mean(rewards, prompt_index, valid, num_prompts)
  n = count[prompt_index]
  scale = n / jnp.maximum(n - 1, 1.0)
  return jnp.where(valid, scale * (rewards - mean[prompt_index]), 0.0)


def _group_mean(
  values: jax.Array, prompt_index: jax.Array, valid: jax.Array, num_prompts: int
) -> tuple[jax.Array, jax.Array]:
  masked = jnp.where(valid, values, 0.0)
  total = jax.ops.segment_sum(masked, prompt_index, num_segments=num_prompts)
  count = jax.ops.segment_sum(
    valid.astype(masked.dtype), prompt_index, num_segments=num_prompts
  )
  return total / jnp.maximum(count, 1.0), count
