"""Meshes, and the one table from logical to mesh axes."""

from scalerl_jax.sharding.rules import MESH_AXES as MESH_AXES
from scalerl_jax.sharding.rules import ROW_AXES as ROW_AXES
from scalerl_jax.sharding.rules import RULES as RULES
from scalerl_jax.sharding.rules import Placement as Placement
from scalerl_jax.sharding.rules import batch_shardings as batch_shardings
from scalerl_jax.sharding.rules import make_mesh as make_mesh
from scalerl_jax.sharding.rules import mesh_axes as mesh_axes
from scalerl_jax.sharding.rules import num_row_shards as num_row_shards
from scalerl_jax.sharding.rules import param_shardings as param_shardings
from scalerl_jax.sharding.rules import partition_spec as partition_spec
from scalerl_jax.sharding.rules import placement as placement
from scalerl_jax.sharding.rules import put as put

__all__ = (
  'MESH_AXES',
  'ROW_AXES',
  'RULES',
  'Placement',
  'batch_shardings',
  'make_mesh',
  'mesh_axes',
  'num_row_shards',
  'param_shardings',
  'partition_spec',
  'placement',
  'put',
)
