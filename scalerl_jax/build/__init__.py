"""The only place where a configuration becomes objects."""

from scalerl_jax.build.assembly import RunError as RunError
from scalerl_jax.build.assembly import run as run
from scalerl_jax.build.export import export as export
from scalerl_jax.build.planning import DoesNotFitError as DoesNotFitError
from scalerl_jax.build.planning import Plan as Plan
from scalerl_jax.build.planning import plan as plan
from scalerl_jax.build.planning import report as report
from scalerl_jax.build.planning import simulate_devices as simulate_devices
from scalerl_jax.build.serving import server_specs as server_specs
from scalerl_jax.build.tokenization import complete as complete

__all__ = (
  'DoesNotFitError',
  'Plan',
  'RunError',
  'complete',
  'export',
  'plan',
  'report',
  'run',
  'server_specs',
  'simulate_devices',
)
