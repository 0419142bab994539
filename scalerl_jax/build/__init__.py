"""The only place where a configuration becomes objects."""

from scalerl_jax.build.assembly import RunError as RunError
from scalerl_jax.build.assembly import run as run

__all__ = ('RunError', 'run')
