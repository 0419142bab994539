"""Policy-gradient losses, one value per token, to be minimised.

Nothing here reduces, masks or normalises: `aggregation` makes the weights and
the loss is `sum(where(mask, weights * per_token, 0))`. Values behind the mask
may be anything in the forward pass; callers that differentiate replace them
first (the double-where trick), because 0 · NaN is NaN in a gradient.

All ratios are ρ = π(token) / μ(token): the trainer's policy over the engine's
own behaviour policy, so that one ratio covers staleness and the mismatch of
the two implementations.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

# exp(±20) is far beyond any clip range, and its square is still finite.
_MAX_LOG_RATIO = 20.0


def cispo(
  policy_logp: Float[Array, 'B T'],
  behavior_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B A'],
  *,
  max_ratio: float = 5.0,
) -> Float[Array, 'B T']:
  """Weights REINFORCE by a capped, detached importance ratio (CISPO).

      ℓₜ = -sg(min(ρₜ, ε)) · Âₜ · log π(yₜ),   ρₜ = exp(log π - log μ)

  See "The Art of Scaling Reinforcement Learning Compute for LLMs"
  (arXiv:2510.13786), Eq. 4, and "MiniMax-M1" (arXiv:2506.13585). Unlike a
  clipped surrogate it never drops a token's gradient; it only bounds its
  weight. There is no lower floor.

  Args:
    policy_logp: log π of each token, nats; the only differentiated input.
    behavior_logp: log μ of each token, as the engine sampled it.
    advantages: Â per token, or [B, 1] per row.
    max_ratio: ε, the cap on ρ itself (not on ρ - 1); at least 1. The paper
      finds 4, 5 and 8 equally good.

  Returns:
    Loss of each token.

  Raises:
    ValueError: max_ratio is below 1, or the shapes do not fit.
  """
  if not max_ratio >= 1:
    raise ValueError(
      f'max_ratio={max_ratio} caps the ratio itself and must be at least 1;'
      ' a clip range such as 0.2 belongs to clipped_surrogate'
    )
  _check_shapes(policy_logp, behavior_logp, advantages)
  ratio = jnp.exp(policy_logp - behavior_logp)
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, max_ratio))
  return -weight * advantages * policy_logp


def clipped_surrogate(
  policy_logp: Float[Array, 'B T'],
  behavior_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B A'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, 'B T']:
  """Clips the importance ratio on both sides (PPO, GRPO; DAPO if asymmetric).

      ℓₜ = -min(ρₜ·Âₜ, clip(ρₜ, 1 - ε⁻, 1 + ε⁺)·Âₜ)

  See "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), Eq. 7, and
  "DAPO" (arXiv:2503.14476), Eq. 8.

  Args:
    policy_logp: log π of each token, nats; differentiated.
    behavior_logp: log μ of each token.
    advantages: Â per token, or [B, 1] per row.
    clip_low: ε⁻, in [0, 1).
    clip_high: ε⁺, not negative.

  Returns:
    Loss of each token.

  Raises:
    ValueError: A clip range is out of its bounds, or the shapes do not fit.
  """
  _check_clips(clip_low, clip_high)
  _check_shapes(policy_logp, behavior_logp, advantages)
  return _clipped(policy_logp - behavior_logp, advantages, clip_low, clip_high)


def gspo(
  policy_logp: Float[Array, 'B T'],
  behavior_logp: Float[Array, 'B T'],
  advantages: Float[Array, 'B A'],
  loss_mask: Bool[Array, 'B T'],
  rollout_index: Int[Array, 'B T'],
  *,
  num_rollouts: int,
  clip_low: float = 3e-3,
  clip_high: float = 4e-3,
) -> Float[Array, 'B T']:
  """Clips one ratio per rollout: the geometric mean of its tokens' ratios.

      s = exp(1/|y| Σₜ (log πₜ - log μₜ)),   sₜ = sg(s) · πₜ / sg(πₜ)
      ℓₜ = -min(sₜ·Âₜ, clip(sₜ, 1 - ε⁻, 1 + ε⁺)·Âₜ)

  See "Group Sequence Policy Optimization" (arXiv:2507.18071), Eq. 7 and 14:
  the token form, whose gradient equals the sequence form's when a rollout's
  tokens share one advantage and one weight.

  Args:
    policy_logp: log π of each token, nats; differentiated.
    behavior_logp: log μ of each token.
    advantages: Â per token, or [B, 1] per row.
    loss_mask: True for the tokens that count in |y| and the mean.
    rollout_index: Rollout of each token; -1: none. All tokens of a rollout
      must be in these arrays.
    num_rollouts: R (static).
    clip_low: ε⁻, in [0, 1).
    clip_high: ε⁺, not negative.

  Returns:
    Loss of each token.

  Raises:
    ValueError: A clip range is out of its bounds, or the shapes do not fit.
  """
  _check_clips(clip_low, clip_high)
  _check_shapes(policy_logp, behavior_logp, advantages)
  _check_shapes(policy_logp, loss_mask, rollout_index)
  counts = loss_mask & (rollout_index >= 0)
  log_ratio = jnp.where(counts, policy_logp - behavior_logp, 0.0)
  # Tokens of no rollout are collected in a segment of their own.
  segment = jnp.where(counts, rollout_index, num_rollouts)
  totals = jax.ops.segment_sum(
    jnp.stack([log_ratio, counts.astype(log_ratio.dtype)], -1).reshape(-1, 2),
    segment.reshape(-1),
    num_segments=num_rollouts + 1,
  )
  mean = totals[:, 0] / jnp.maximum(totals[:, 1], 1.0)
  sequence = jax.lax.stop_gradient(mean[segment])
  token = sequence + policy_logp - jax.lax.stop_gradient(policy_logp)
  return _clipped(token, advantages, clip_low, clip_high)


def reinforce(
  policy_logp: Float[Array, 'B T'], advantages: Float[Array, 'B A']
) -> Float[Array, 'B T']:
  """Plain policy gradient: ℓₜ = -Âₜ · log π(yₜ).

  See "Simple statistical gradient-following algorithms for connectionist
  reinforcement learning" (Williams, 1992), Eq. 5. With Â = 1 it is the
  negative log-likelihood of supervised training.

  Args:
    policy_logp: log π of each token, nats; differentiated.
    advantages: Â per token, or [B, 1] per row.

  Returns:
    Loss of each token.

  Raises:
    ValueError: The shapes do not fit.
  """
  _check_shapes(policy_logp, policy_logp, advantages)
  return -advantages * policy_logp


def _clipped(
  log_ratio: jax.Array, advantages: jax.Array, low: float, high: float
) -> jax.Array:
  # Bounded so that a huge ratio times a zero advantage is 0, not NaN.
  bounded = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  ratio = jnp.exp(bounded)
  clipped = jnp.clip(ratio, 1 - low, 1 + high)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


def _check_clips(clip_low: float, clip_high: float) -> None:
  if not (0 <= clip_low < 1 and clip_high >= 0):
    raise ValueError(
      f'clip_low={clip_low} must be in [0, 1) and clip_high={clip_high} must'
      ' not be negative'
    )


def _check_shapes(
  policy_logp: jax.Array, other: jax.Array, advantages: jax.Array
) -> None:
  shape = policy_logp.shape
  if other.shape != shape:
    raise ValueError(f'shapes differ: {other.shape} against {shape}')
  if advantages.shape not in (shape, (shape[0], 1)):
    raise ValueError(
      f'advantages of shape {advantages.shape} must have one value per token'
      f' {shape} or per row {(shape[0], 1)}; gather them by rollout_index'
    )
