"""Sharding rules: which mesh axis each named axis of a parameter lies on.

Rows of a batch lie on (data, fsdp), parameters on fsdp and tensor; parameters
are replicated over data.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

MESH_AXES = ('data', 'fsdp', 'tensor', 'expert')

RULES: Mapping[str, str | None] = {
  'layers': None,
  'vocab': 'tensor',
  'embed': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': None,
  'mlp': 'tensor',
}


def make_mesh(
  shape: Sequence[int], *, devices: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
  """Arranges devices in a mesh of `MESH_AXES`.

  Args:
    shape: Devices along data, fsdp, tensor and expert.
    devices: Which; None: the first of all.

  Returns:
    The mesh, its axes automatic.

  Raises:
    ValueError: There are fewer devices than the mesh needs.
  """
  found = list(jax.devices() if devices is None else devices)
  needed = math.prod(shape)
  if needed > len(found):
    raise ValueError(
      f'mesh {dict(zip(MESH_AXES, shape, strict=True))} needs {needed} devices,'
      f' {len(found)} found'
    )
  grid = np.array(found[:needed]).reshape(tuple(shape))
  return jax.sharding.Mesh(grid, MESH_AXES)


class Placement(NamedTuple):
  """Where activations [B, T, D] lie."""

  # As looked up: a table whose columns are on fsdp gives columns there. From
  # here to `rows` is one all-to-all over fsdp, and back for the gradient;
  # without this step the compiler would gather all rows on every device.
  embedded: jax.sharding.NamedSharding
  rows: jax.sharding.NamedSharding  # Spread over data and fsdp; all of D.


def placement(mesh: jax.sharding.Mesh) -> Placement:
  """Places activations so that each device computes its own rows only.

  Args:
    mesh: A mesh of `MESH_AXES`.

  Returns:
    The placement; `rows` also fits [B, T].
  """
  specs = (('data', None, RULES['embed']), (('data', 'fsdp'),))
  return Placement(
    *(
      jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
      for spec in specs
    )
  )


def batch_shardings(batch: Any, mesh: jax.sharding.Mesh) -> Any:
  """Spreads the rows of a batch over (data, fsdp).

  Args:
    batch: Tree of arrays or of their shapes; [B, T] are rows.
    mesh: A mesh of `MESH_AXES`.

  Returns:
    Tree of `NamedSharding`; what is not rows is on every device.
  """
  rows = placement(mesh).rows
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.tree.map(lambda x: rows if len(x.shape) == 2 else whole, batch)


def put(arrays: Any, shardings: Any) -> Any:
  """Puts host arrays on a mesh, which may span several processes.

  Args:
    arrays: Tree of arrays, whole and the same in every process, each of which
      uploads the parts of its own devices. Arrays that lie as wanted are kept.
    shardings: Tree of `NamedSharding` like `arrays`.

  Returns:
    Tree of arrays on the mesh.
  """

  def place(x: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.sharding == sharding:
      return x
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

  return jax.tree.map(place, arrays, shardings)


def param_shardings(axes: Any, mesh: jax.sharding.Mesh) -> Any:
  """Resolves the logical axes of parameters.

  Args:
    axes: Tree of tuples of logical names (None: not sharded).
    mesh: A mesh of `MESH_AXES`.

  Returns:
    Tree of `NamedSharding`.

  Raises:
    ValueError: An axis has no rule, or two dimensions of one array land on the
      same mesh axis.
  """

  def resolve(names: tuple[str | None, ...]) -> jax.sharding.NamedSharding:
    unknown = [n for n in names if n is not None and n not in RULES]
    if unknown:
      raise ValueError(f'logical axes {unknown} have no rule in {list(RULES)}')
    spec = [None if n is None else RULES[n] for n in names]
    used = [s for s in spec if s is not None]
    if len(set(used)) != len(used):
      raise ValueError(f'axes {names} put two dimensions on one of {used}')
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  return jax.tree.map(resolve, axes, is_leaf=lambda x: isinstance(x, tuple))
