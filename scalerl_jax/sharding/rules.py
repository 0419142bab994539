"""Sharding rules: which mesh axis each named axis of a parameter lies on.

Rows of a batch lie on (data, fsdp, expert), parameters on fsdp, tensor and
expert; parameters are replicated over data. Arrays of experts are cut into
experts along `expert`, all others into columns, as along `fsdp`.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

MESH_AXES = ('data', 'fsdp', 'tensor', 'expert')

# Where rows lie.
ROW_AXES = ('data', 'fsdp', 'expert')

RULES: Mapping[str, str | tuple[str, ...] | None] = {
  'layers': None,
  'vocab': 'tensor',
  'embed': ('fsdp', 'expert'),
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': None,
  'mlp': 'tensor',
  'expert': 'expert',
  'expert_embed': 'fsdp',
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

  # As looked up: a table whose columns are cut gives columns that are. From
  # here to `rows` is one all-to-all, and back for the gradient; without this
  # step the compiler would gather all rows on every device.
  embedded: jax.sharding.NamedSharding
  rows: jax.sharding.NamedSharding  # Spread over `ROW_AXES`; all of D.


def placement(mesh: jax.sharding.Mesh) -> Placement:
  """Places activations so that each device computes its own rows only.

  Args:
    mesh: A mesh of `MESH_AXES`.

  Returns:
    The placement; `rows` also fits [B, T].
  """
  specs = (('data', None, RULES['embed']), (ROW_AXES,))
  return Placement(
    *(
      jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
      for spec in specs
    )
  )


def num_row_shards(mesh: jax.sharding.Mesh) -> int:
  """Counts the parts that the rows of a batch are spread over.

  Args:
    mesh: A mesh of `MESH_AXES`.

  Returns:
    Product of the sizes of `ROW_AXES`.
  """
  return math.prod(mesh.shape[name] for name in ROW_AXES)


def partition_spec(names: Sequence[str | None]) -> jax.sharding.PartitionSpec:
  """Resolves the logical axes of one array.

  Args:
    names: Logical names (None: not sharded).

  Returns:
    The mesh axes of each dimension.

  Raises:
    ValueError: An axis has no rule, or two dimensions land on the same mesh
      axis.
  """
  unknown = [n for n in names if n is not None and n not in RULES]
  if unknown:
    raise ValueError(f'logical axes {unknown} have no rule in {list(RULES)}')
  used = [axis for n in names for axis in mesh_axes(n)]
  if len(set(used)) != len(used):
    raise ValueError(f'axes {names} put two dimensions on one of {used}')
  return jax.sharding.PartitionSpec(
    *(None if n is None else RULES[n] for n in names)
  )


def mesh_axes(name: str | None) -> tuple[str, ...]:
  """Lists the mesh axes that a logical axis is cut along.

  Args:
    name: A key of `RULES`; None: an axis that is never sharded.

  Returns:
    Mesh axes; none where it is not sharded.
  """
  axes = None if name is None else RULES[name]
  if axes is None:
    return ()
  return (axes,) if isinstance(axes, str) else axes


def batch_shardings(batch: Any, mesh: jax.sharding.Mesh) -> Any:
  """Spreads the rows of a batch over `ROW_AXES`.

  Args:
    batch: Tree of arrays or of their shapes; [B, T, ...] are rows.
    mesh: A mesh of `MESH_AXES`.

  Returns:
    Tree of `NamedSharding`; what is not rows is on every device.
  """
  rows = placement(mesh).rows
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.tree.map(lambda x: rows if len(x.shape) > 1 else whole, batch)


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
    ValueError: As of `partition_spec`.
  """
  return jax.tree.map(
    lambda names: jax.sharding.NamedSharding(mesh, partition_spec(names)),
    axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
