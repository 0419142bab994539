"""Real servers of the tiny model, on the CPU."""

import json
import pathlib

from scalerl_jax import hf
from scalerl_jax.generation.sglang import servers
from tests import tiny_model

# Two cores start three processes a server, and others run beside them.
READY_S = 300.0


def specs(
  directory: pathlib.Path, python: str, *, count: int = 2, model=None, **changes
) -> list[servers.ServerSpec]:
  """Servers of a tiny model in float32, their files in a directory."""
  model_path = directory / 'model'
  model_path.mkdir(exist_ok=True)
  model = model or tiny_model.spec()
  content = hf.config_from_spec(model, dtype='float32')
  (model_path / 'config.json').write_text(json.dumps(content))
  fields = {
    'python': python,
    'model_path': model_path,
    'device': 'cpu',
    'dtype': 'float32',
    'context_tokens': 256,
    'max_running_requests': 16,
    'max_total_tokens': 20_000,
  }
  return [
    servers.ServerSpec(
      **(fields | changes), port=port, log_path=directory / f'server{i}.log'
    )
    for i, port in enumerate(servers.free_ports(count))
  ]
