"""A step over two processes of four devices each, against one device."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from scalerl_jax.training import state as state_lib
from tests import tiny_model
from tests.training import worker

pytestmark = pytest.mark.usefixtures('quick_compilation')

_ROOT = pathlib.Path(__file__).parents[2]
_DEADLINE_S = 240  # It takes a tenth of it, alone.


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """Runs both processes to their end."""
  out = tmp_path_factory.mktemp('processes')
  coordinator = f'127.0.0.1:{_free_port()}'
  started = []
  for i in range(2):
    with (out / f'{i}.log').open('wb') as log:
      started.append(
        subprocess.Popen(
          [
            *(sys.executable, '-m', 'tests.training.worker'),
            *(coordinator, '2', str(i), str(out)),
          ],
          cwd=_ROOT,
          env=os.environ
          | {
            'PYTHONPATH': str(_ROOT),
            'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # Compiles faster.
          },
          stdout=log,
          stderr=subprocess.STDOUT,
        )
      )
  try:
    codes = [process.wait(_DEADLINE_S) for process in started]
  except subprocess.TimeoutExpired:
    codes = 'none in time'
  finally:
    for process in started:
      process.kill()
      process.wait()
  if codes != [0, 0]:
    logs = [(out / f'{i}.log').read_text()[-3000:] for i in range(2)]
    pytest.fail(f'exit codes: {codes}\n' + '\n--- other ---\n'.join(logs))
  return out


@functools.cache
def _one_device(spec):
  state = state_lib.init(tiny_model.params(0, spec), worker.TX)
  step, found = worker.step_fn(spec), {}
  for i, batch in enumerate(worker.batches()):
    state, metrics = step(state, batch)
    found |= {f'loss{i}': metrics.loss, f'norm{i}': metrics.grad_norm}
  leaves = jax.tree.leaves(state.params)
  return found | {f'param{i}': leaf for i, leaf in enumerate(leaves)}


@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize('shape', worker.SPECS)
def test_two_processes_give_the_updates_of_one_device(
  directory, shape, process
):
  name = 'x'.join(map(str, shape))
  with np.load(directory / name / f'{process}.npz') as found:
    expected = _one_device(worker.SPECS[shape])
    assert set(found) == set(expected)
    for key, value in expected.items():
      np.testing.assert_allclose(
        found[key], value, rtol=0, atol=1e-5, err_msg=key
      )
