"""Meshes, and the one table from logical to mesh axes."""

from scalerl_jax.sharding.rules import MESH_AXES as MESH_AXES
from scalerl_jax.sharding.rules import RULES as RULES
from scalerl_jax.sharding.rules import make_mesh as make_mesh
from scalerl_jax.sharding.rules import param_shardings as param_shardings

__all__ = ('MESH_AXES', 'RULES', 'make_mesh', 'param_shardings')
