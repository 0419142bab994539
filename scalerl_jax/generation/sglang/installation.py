"""The environment of servers on a machine without an accelerator.

What SGLang asks for is 10 GB that only an accelerator has a use for. This is
the part of it that `cpu_platform` needs, 2.7 GB, with this package beside it.
"""

import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import sys

from scalerl_jax.generation.sglang import cpu_platform

_log = logging.getLogger(__name__)

_REQUIREMENTS = pathlib.Path(__file__).with_name('requirements_cpu.txt')
# What these ask for is for accelerators, and left out.
_ALONE = ('sglang==0.5.23', 'xgrammar==0.2.7', 'apache-tvm-ffi==0.1.11')
_STAMP = 'scalerl.stamp'
_LOG = 'scalerl.log'
_VERSION = (3, 11)  # For which SGLang, xgrammar and PyTorch have builds.


class InstallError(RuntimeError):
  """The environment could not be made; the message is one line."""


def install_cpu(directory: pathlib.Path, source: pathlib.Path) -> bool:
  """Makes an environment with SGLang and this package.

  Args:
    directory: Of the environment; one that an earlier call has finished, with
      the same requirements, is left as it is.
    source: Checkout of this package, which the environment then refers to.

  Returns:
    Whether there was anything to do.

  Raises:
    InstallError: The directory is another's, Python 3.11 is missing, or a
      package cannot be installed.
  """
  stamp = directory / _STAMP
  wanted = _digest(source)
  if stamp.exists() and stamp.read_text() == wanted:
    return False
  if not (source / 'setup.cfg').exists():
    raise InstallError(f'{source} is no checkout of scalerl_jax; give one')
  if directory.exists() and any(directory.iterdir()) and not stamp.exists():
    raise InstallError(
      f'{directory} is not empty and was not made here; give another directory'
    )
  python = _python()
  # A package that is no longer named must go.
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  stamp.touch()
  _run(directory, [python, '-m', 'venv', str(directory)])
  python = str(directory / 'bin' / 'python')
  pip = [python, '-m', 'pip', 'install', '--no-input']
  _run(directory, [*pip, '-r', str(_REQUIREMENTS)])
  _run(directory, [*pip, '--no-deps', *_ALONE])
  _run(directory, [*pip, '--no-deps', '-e', str(source)])
  # Imports all of it.
  module = 'scalerl_jax.generation.sglang.cpu_server'
  _run(directory, [python, '-m', module, '--help'])
  stamp.write_text(wanted)
  return True


def is_finished(directory: pathlib.Path) -> bool:
  """Tells whether `install_cpu` made an environment there to its end.

  Args:
    directory: Of the environment.

  Returns:
    Whether it can be used.
  """
  stamp = directory / _STAMP
  return stamp.exists() and bool(stamp.read_text())


def _digest(source: pathlib.Path) -> str:
  parts = (_REQUIREMENTS.read_text(), *_ALONE, str(source.resolve()))
  return hashlib.sha256('\n'.join(parts).encode()).hexdigest()


def _python() -> str:
  if sys.version_info[:2] == _VERSION:
    return sys.executable
  name = f'python{_VERSION[0]}.{_VERSION[1]}'
  found = shutil.which(name)
  if found is None:
    raise InstallError(f'{name} is needed, and is not on the PATH')
  return found


def _run(directory: pathlib.Path, argv: list[str]) -> None:
  """Runs a command, what it says goes to a log file."""
  _log.info('+ %s', ' '.join(argv))
  path = directory / _LOG
  environment = {**os.environ, cpu_platform.VARIABLE: cpu_platform.NAME}
  # Packages found there would not be installed.
  environment.pop('PYTHONPATH', None)
  with open(path, 'ab') as log:
    done = subprocess.run(
      argv, env=environment, stdout=log, stderr=log, check=False
    )
  if done.returncode:
    lines = path.read_text(errors='replace').splitlines()
    end = next((line for line in reversed(lines) if line.strip()), '')
    raise InstallError(f'{" ".join(argv)} failed: {end}; more in {path}')
