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
  params: Any,
  tx: optax.GradientTransformation,
  shardings: Any,
  *,
  donate: bool = False,
) -> TrainState:
  """Starts training on a mesh, at version 0.

  Args:
    params: On any device, or sharded already.
    tx: The optimizer; its moments get the shardings of their parameters, its
      scalars are replicated.
    shardings: Tree of `NamedSharding` like `params`.
    donate: False: the parameters are copied, because the step donates its
      state. True: they are given away, and where they are sharded as wanted
      they become the state without a copy.

  Returns:
    The state, all of it on the mesh.
  """
  wanted = jax.tree.map(lambda x: x.sharding, abstract(params, tx, shardings))
  start = jax.jit(
    lambda params: init(params, tx),
    out_shardings=wanted,
    donate_argnums=0 if donate else (),
  )
  return start(jax.device_put(params, shardings))


def abstract(
  params: Any, tx: optax.GradientTransformation, shardings: Any
) -> TrainState:
  """Describes a state without allocating it.

  Args:
    params: Parameters, or their shapes and dtypes.
    tx: The optimizer.
    shardings: Tree of `NamedSharding` like `params`; None: one device.

  Returns:
    The state, its leaves `jax.ShapeDtypeStruct` with shardings.
  """
  if shardings is None:
    other: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: other, params)
  else:
    mesh = jax.tree.leaves(shardings)[0].mesh
    other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  opt_state = jax.eval_shape(tx.init, params)
  opt_shardings = optax.tree.map_params(
    tx,
    lambda _, sharding: sharding,
    opt_state,
    shardings,
    transform_non_params=lambda _: other,
  )

  def describe(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=other)
  return TrainState(
    params=jax.tree.map(describe, params, shardings),
    opt_state=jax.tree.map(describe, opt_state, opt_shardings),
    version=count,
    nonfinite_streak=count,
  )
