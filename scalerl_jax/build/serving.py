"""The SGLang servers of a configuration."""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax import hf
from scalerl_jax.build import tokenization
from scalerl_jax.generation.sglang import client
from scalerl_jax.generation.sglang import servers

# Not a field of the configuration, which is written to the run's directory.
API_KEY = 'SCALERL_SGLANG_API_KEY'


def server_specs(
  config: config_lib.RunConfig,
  directory: pathlib.Path,
  *,
  host: str = '127.0.0.1',
) -> list[servers.ServerSpec]:
  """Says which servers a run needs, and writes the model that they load.

  A server gets a `config.json` and no weights: those are pushed. On a machine
  with several GPUs each server takes the next ones, as many as `--tp-size` in
  `engine.sglang.args` says.

  Args:
    config: The configuration.
    directory: For the model and the logs of the servers.
    host: Address that they listen on; another than a loopback address needs an
      API key in the environment variable SCALERL_SGLANG_API_KEY.

  Returns:
    One specification for each of `engine.sglang.num_servers`.

  Raises:
    config_lib.ConfigError: SGLang is not to be found, the model is of no family
      that it knows, or a value cannot be used.
    OSError: The directory cannot be written.
  """
  config, tokenizer = tokenization.complete(config)
  wanted = config.engine.sglang
  model = config.model.spec(vocab_size=tokenizer.vocab_size)
  python = _python(wanted.python)
  try:
    content = {
      **hf.config_from_spec(model, dtype=model.dtype),
      'eos_token_id': list(tokenizer.stop_ids),
    }
    tensor = _tensor_parallel(wanted.args) if wanted.device == 'cuda' else 0
    ports = [wanted.first_port + i for i in range(wanted.num_servers)]
    if not wanted.first_port:
      ports = servers.free_ports(wanted.num_servers)
    common: dict[str, Any] = {
      'python': python,
      'model_path': directory / 'model',
      'host': host,
      'device': wanted.device,
      'dtype': model.dtype,
      'context_tokens': config.batch.max_tokens + client.SPARE_TOKENS,
      'max_running_requests': config.engine.num_slots,
      'max_total_tokens': wanted.max_total_tokens or None,
      'tell_experts': config.engine.replay_routing,
      'api_key': os.environ.get(API_KEY),
    }
    specs = [
      servers.ServerSpec(
        port=port,
        log_path=directory / f'server{i}.log',
        args=(
          *(('--base-gpu-id', str(i * tensor)) if tensor else ()),
          *wanted.args,
        ),
        **common,
      )
      for i, port in enumerate(ports)
    ]
  except (hf.HfError, ValueError) as error:
    raise config_lib.ConfigError(f'engine.sglang: {error}') from None
  path = directory / 'model' / 'config.json'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(content, indent=2))
  return specs


def _python(name: str) -> str:
  if not name:
    if importlib.util.find_spec('sglang') is None:
      raise config_lib.ConfigError(
        "engine.sglang.python='' is this interpreter, which has no SGLang: pip"
        " install 'scalerl_jax[sglang]', or python launch/serve.py"
        ' --install_cpu=DIR and engine.sglang.python=DIR/bin/python'
      )
    return sys.executable
  found = shutil.which(name)
  if found is None:
    raise config_lib.ConfigError(
      f'engine.sglang.python={name} is no program; give the python of an'
      ' environment with SGLang'
    )
  return found


def _tensor_parallel(args: tuple[str, ...]) -> int:
  """Devices that a server takes."""
  words = [word for arg in args for word in arg.split('=', 1)]
  for flag in ('--tp-size', '--tp', '--tensor-parallel-size'):
    if flag in words[:-1]:
      return int(words[words.index(flag) + 1])
  return 1
