"""Servers that all tests of this folder share."""

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
