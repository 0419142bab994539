"""The only place where a configuration becomes objects."""

from scalerl_jax.build.assembly import RunError as RunError
from scalerl_jax.build.assembly import run as run
from scalerl_jax.build.export import export as export

__all__ = ('RunError', 'export', 'run')
