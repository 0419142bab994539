"""The compute-performance law of reinforcement learning.

See "The Art of Scaling Reinforcement Learning Compute for LLMs"
(arXiv:2510.13786), Eq. 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special


class SigmoidParams(NamedTuple):
  """Parameters of the law: floats, or arrays of one shape."""

  r0: Any  # Pass rate at zero compute.
  a: Any  # Ceiling, A.
  b: Any  # Steepness, B > 0.
  c_mid: Any  # Compute at which half of A - R0 is gained.


def sigmoid(compute: jax.typing.ArrayLike, params: SigmoidParams) -> jax.Array:
  """Evaluates the law.

      R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

  Args:
    compute: C, not negative, in any unit (that of `c_mid`); R(0) = R0.
    params: The parameters, scalars or arrays that broadcast.

  Returns:
    Pass rate at each compute.
  """
  compute = jnp.asarray(compute, dtype=jnp.result_type(float))
  positive = compute > 0
  # log C at 0 is replaced, so that gradients there are finite too.
  log_c = jnp.log(jnp.where(positive, compute, 1.0))
  gained = jax.nn.sigmoid(params.b * (log_c - jnp.log(params.c_mid)))
  gained = jnp.where(positive, gained, 0.0)
  return params.r0 + (params.a - params.r0) * gained


def evaluate(compute: np.ndarray, params: SigmoidParams) -> np.ndarray:
  """Evaluates the law on the host, in float64.

  Args:
    compute: C, not negative.
    params: The parameters, scalars or arrays that broadcast.

  Returns:
    Pass rate at each compute.
  """
  with np.errstate(divide='ignore'):
    log_c = np.log(compute)
  gained = special.expit(params.b * (log_c - np.log(params.c_mid)))
  return params.r0 + (params.a - params.r0) * gained


def compute_at(
  fraction: float, params: SigmoidParams
) -> np.ndarray | np.floating:
  """Inverts the law.

      C = C_mid · (f / (1 - f))^(1/B)

  Args:
    fraction: f, the gained part of A - R0, in (0, 1).
    params: The parameters, scalars or arrays.

  Returns:
    Compute.
  """
  with np.errstate(over='ignore'):
    odds = fraction / (1 - fraction)
    return params.c_mid * np.exp(np.log(odds) / np.asarray(params.b))
