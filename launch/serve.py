"""Starts the SGLang servers of an experiment and keeps them alive.

    python launch/serve.py --config=FILE[:VARIANT] [--workdir=DIR]
        [--host=ADDRESS] [--config.FIELD=VALUE ...]
    python launch/serve.py --install_cpu=DIR

The first prints a line for each server that is ready, starts one again that
ended, and stops them all on Ctrl-C or SIGTERM. They are what
`engine.sglang` says, whether or not it names addresses; the run that uses them
names what is printed here in `engine.sglang.addresses`. The weights of a server
are drawn until a run pushes its own.

The second makes an environment for servers on a machine without a GPU, 2.7 GB,
for `engine.sglang.python=DIR/bin/python`. It needs Python 3.11.

Bad input ends with one line on stderr and exit code 2, what fails on the way
with one line and exit code 1.
"""

from collections.abc import Sequence
import logging
import pathlib
import signal
import socket
import sys
import time

from absl import flags
from ml_collections import config_flags

from scalerl_jax import config as config_lib
from scalerl_jax.generation.sglang import installation
from scalerl_jax.generation.sglang import servers

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file, as FILE or FILE:VARIANT.', lock_config=True
)
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/servers', 'For the logs of the servers.'
)
_HOST = flags.DEFINE_string(
  'host',
  '127.0.0.1',
  'Address to listen on; another than a loopback address needs an API key in'
  ' the environment variable SCALERL_SGLANG_API_KEY.',
)
_INSTALL_CPU = flags.DEFINE_string(
  'install_cpu', None, 'Make an environment here, and stop.'
)
_ROOT = pathlib.Path(__file__).parents[1]
_READY_S = 1800.0
_CHECK_S = 1.0


def main(argv: Sequence[str]) -> int:
  """Runs one command line.

  Args:
    argv: Arguments, the program's name first.

  Returns:
    The exit code.
  """
  logging.basicConfig(level=logging.WARNING, format='%(message)s')
  logging.getLogger('scalerl_jax').setLevel(logging.INFO)
  if any(a.lstrip('-') in ('help', 'h') for a in argv[1:]):
    print(__doc__)
    return 0
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    # The config file is a user's program: whatever it raises is about it.
    try:
      rest = flags.FLAGS(list(argv))
      if rest[1:]:
        raise ValueError(f'unexpected {rest[1:]}; flags are --NAME=VALUE')
      if _INSTALL_CPU.value is not None:
        return _install(pathlib.Path(_INSTALL_CPU.value))
      if flags.FLAGS['config'].value is None:
        raise ValueError('--config is missing')
      config = config_lib.from_config_dict(_CONFIG.value.to_dict())
    except Exception as error:
      return _fail(config_lib.one_line(error), 2)
    return _serve(config)
  except KeyboardInterrupt:
    return 0


def _install(directory: pathlib.Path) -> int:
  try:
    is_new = installation.install_cpu(directory, _ROOT)
  except (installation.InstallError, OSError) as error:
    return _fail(error, 1)
  print(f'{directory}: {"installed" if is_new else "is there"}')
  return 0


def _serve(config: config_lib.RunConfig) -> int:
  from scalerl_jax import build

  if config.engine.kind != 'sglang':
    return _fail(f'engine.kind={config.engine.kind!r} needs no servers', 2)
  directory = pathlib.Path(_WORKDIR.value)
  try:
    specs = build.server_specs(config, directory, host=_HOST.value)
    with servers.Supervisor(specs) as supervisor:
      supervisor.wait_ready(
        _READY_S, on_ready=lambda s: print(f'ready: {_url(s)}', flush=True)
      )
      while True:
        supervisor.check()
        time.sleep(_CHECK_S)
  except config_lib.ConfigError as error:
    return _fail(error, 2)
  except (servers.ServerError, OSError) as error:
    return _fail(error, 1)


def _url(spec: servers.ServerSpec) -> str:
  """Address that others can use, where it listens on all of its own."""
  if spec.host in ('0.0.0.0', '::'):
    return f'http://{socket.gethostname()}:{spec.port}'
  return spec.url


def _fail(error: object, code: int) -> int:
  print('error:', ' '.join(str(error).split()), file=sys.stderr)
  return code


if __name__ == '__main__':
  sys.exit(main(sys.argv))
