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


def init_sharded(
  params: Any, tx: optax.GradientTransformation, shardings: Any
) -> TrainState:
  """Starts training on a mesh, at version 0.

  Args:
    params: On any device.
    tx: The optimizer; its moments get the shardings of their parameters, its
      scalars are replicated.
    shardings: Tree of `NamedSharding` like `params`.

  Returns:
    The state, all of it on the mesh.
  """
  mesh = jax.tree.leaves(shardings)[0].mesh
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  placed = jax.device_put(jax.tree.map(jnp.copy, params), shardings)
  abstract = jax.eval_shape(tx.init, placed)
  opt_shardings = optax.tree.map_params(
    tx,
    lambda _, sharding: sharding,
    abstract,
    shardings,
    transform_non_params=lambda _: replicated,
  )
  zero = jax.device_put(jnp.zeros((2,), jnp.int32), replicated)
  return TrainState(
    params=placed,
    opt_state=jax.jit(tx.init, out_shardings=opt_shardings)(placed),
    version=zero[0],
    nonfinite_streak=zero[1],
  )
