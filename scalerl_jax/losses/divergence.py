"""Estimators of KL(π ‖ reference) from samples of π, per token.

See "Approximating KL Divergence" (Schulman, 2020). With
r = π_ref(y) / π(y), y sampled from π: k1 is unbiased with high variance, k2 is
biased with low variance, k3 is unbiased and never negative.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

# A token more than exp(30) times likelier under the reference is as bad as
# can be told; the bound keeps k3 and its gradient finite.
_MAX_LOG_RATIO = 30.0


def kl_k1(
  policy_logp: Float[Array, '*B'], reference_logp: Float[Array, '*B']
) -> Float[Array, '*B']:
  """Estimates KL by k1 = -log r = log π - log π_ref.

  Args:
    policy_logp: log π of each token, nats.
    reference_logp: log π_ref of each token, nats.

  Returns:
    Estimate of each token, nats; may be negative.

  Raises:
    ValueError: The shapes differ.
  """
  _check_shapes(policy_logp, reference_logp)
  return policy_logp - reference_logp


def kl_k2(
  policy_logp: Float[Array, '*B'], reference_logp: Float[Array, '*B']
) -> Float[Array, '*B']:
  """Estimates KL by k2 = (log r)² / 2.

  Args:
    policy_logp: log π of each token, nats.
    reference_logp: log π_ref of each token, nats.

  Returns:
    Estimate of each token, nats; not negative.

  Raises:
    ValueError: The shapes differ.
  """
  _check_shapes(policy_logp, reference_logp)
  return 0.5 * jnp.square(policy_logp - reference_logp)


def kl_k3(
  policy_logp: Float[Array, '*B'], reference_logp: Float[Array, '*B']
) -> Float[Array, '*B']:
  """Estimates KL by k3 = r - 1 - log r.

  Args:
    policy_logp: log π of each token, nats.
    reference_logp: log π_ref of each token, nats.

  Returns:
    Estimate of each token, nats; not negative. log r is bounded to ±30.

  Raises:
    ValueError: The shapes differ.
  """
  _check_shapes(policy_logp, reference_logp)
  log_ratio = reference_logp - policy_logp
  log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return jnp.expm1(log_ratio) - log_ratio


def _check_shapes(policy_logp: jax.Array, reference_logp: jax.Array) -> None:
  if policy_logp.shape != reference_logp.shape:
    raise ValueError(
      f'policy_logp {policy_logp.shape} and reference_logp'
      f' {reference_logp.shape} must have the same shape: one value per token'
    )
