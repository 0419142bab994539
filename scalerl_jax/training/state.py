"""What a train step reads and replaces."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import optax


class TrainState(NamedTuple):
  """Parameters, optimizer state and counters; a pytree, donated by the step."""

  params: Any
  opt_state: Any
  version: Int[Array, '']  # Updates done, skipped ones included.
  nonfinite_streak: Int[Array, '']  # Updates skipped in a row.


def init(params: Any, tx: optax.GradientTransformation) -> TrainState:
  """Starts training from parameters, at version 0.

  Args:
    params: Copied, because the step donates its state.
    tx: The optimizer.

  Returns:
    The state.
  """
  params = jax.tree.map(jnp.array, params)
  return TrainState(
    params=params,
    opt_state=tx.init(params),
    version=jnp.zeros((), jnp.int32),
    nonfinite_streak=jnp.zeros((), jnp.int32),
  )
