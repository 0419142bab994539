"""The compute-performance law of reinforcement learning.

See "The Art of Scaling Reinforcement Learning Compute for LLMs"
(arXiv:2510.13786), Eq. 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special


class SigmoidParams(NamedTuple):
  """Parameters of the law."""

  r0: float  # Pass rate at zero compute.
  a: float  # Ceiling, A.
  b: float  # Steepness, B > 0.
  c_mid: float  # Compute at which half of A - R0 is gained.


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


def gained(compute: np.ndarray, params: SigmoidParams) -> np.ndarray:
  """Evaluates the gained fraction of A - R0 on the host, in float64.

  Args:
    compute: C, not negative.
    params: The parameters, scalars.

  Returns:
    1 / (1 + (C_mid / C)^B), in [0, 1].
  """
  with np.errstate(divide='ignore'):
    log_c = np.log(compute)
  return special.expit(params.b * (log_c - np.log(params.c_mid)))
