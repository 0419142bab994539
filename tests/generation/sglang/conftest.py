"""Servers that all tests of this folder share."""

import subprocess

import pytest

from scalerl_jax.generation.sglang import servers as servers_lib
from tests.generation.sglang import tiny_servers


@pytest.fixture(scope='session')
def servers(sglang_python, tmp_path_factory):
  """Two servers of the tiny model, ready; a test leaves them as they were."""
  specs = tiny_servers.specs(tmp_path_factory.mktemp('sglang'), sglang_python)
  with servers_lib.Supervisor(specs) as supervisor:
    supervisor.wait_ready(tiny_servers.READY_S)
    yield supervisor


@pytest.fixture
def small_disk(tmp_path):
  """A RAM disk of 1 MB."""
  path = tmp_path / 'disk'
  path.mkdir()
  options = ['-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(path)]
  try:
    subprocess.run(['mount', *options], check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f'no RAM disk can be mounted here: {error}')
  yield path
  if subprocess.run(['umount', str(path)], check=False).returncode:
    subprocess.run(['umount', '-l', str(path)], check=True)
    pytest.fail('files of the disk are still mapped')
