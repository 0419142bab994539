"""A run over two processes, each started as a user would."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import hf
from scalerl_jax.build import base_policy
from tests import tiny

_ROOT = pathlib.Path(__file__).parents[2]
_DEADLINE_S = 240  # It takes a tenth of it, alone.
_CONFIG = """
import json
import pathlib

import ml_collections


def get_config():
  text = pathlib.Path(__file__).with_suffix('.json').read_text()
  return ml_collections.ConfigDict(json.loads(text))
"""


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """Directory of a policy some of whose answers are right, and its cache."""
  directory = tmp_path_factory.mktemp('base')
  config, tokenizer = tiny.config(), data.ByteTokenizer()
  spec = config.model.spec(vocab_size=tokenizer.vocab_size)
  with tiny.compiled_once(tmp_path_factory.mktemp('compiled')):
    params = base_policy.base_params(
      config, spec, tokenizer, directory, jax.random.key(0)
    )
  hf.save_params(directory / 'model', params, spec, dtype='float32')
  return directory / 'model'


def _config(base, *, num_updates=4, train_path='', **sections):
  return tiny.config(
    num_updates=num_updates,
    data={'tokenizer': 'bytes', 'train_path': train_path},
    model={'path': str(base)},
    warm_start={'num_steps': 0},
    mesh={'data': 2, 'fsdp': 2},
    **sections,
  )


class _Run:
  """Two processes of two devices each."""

  def __init__(self, directory, config, *, stack):
    directory.mkdir(exist_ok=True)
    (directory / 'tiny.py').write_text(_CONFIG)
    fields = json.dumps(config_lib.to_dict(config))
    (directory / 'tiny.json').write_text(fields)
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      port = probe.getsockname()[1]
    self.logs = [directory / f'process{i}.log' for i in range(2)]
    self.processes = []
    for i in range(2):
      log = stack.enter_context(self.logs[i].open('wb'))
      process = subprocess.Popen(
        [
          *(sys.executable, _ROOT / 'launch' / 'run.py'),
          *('--config=tiny.py', '--workdir=run'),
          f'--coordinator=127.0.0.1:{port}',
          *('--num_processes=2', f'--process_id={i}'),
        ],
        cwd=directory,
        env=os.environ
        | {
          'PYTHONPATH': str(_ROOT),
          'JAX_PLATFORMS': 'cpu',
          'JAX_NUM_CPU_DEVICES': '2',
          'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # Compiles faster.
        },
        stdout=log,
        stderr=subprocess.STDOUT,
      )
      stack.callback(process.wait)
      stack.callback(process.kill)
      self.processes.append(process)

  def codes(self):
    return [process.wait(_DEADLINE_S) for process in self.processes]

  def text(self, process):
    return self.logs[process].read_text(errors='replace')

  def wait_for(self, words):
    deadline = time.monotonic() + _DEADLINE_S
    while words not in self.text(0):
      assert time.monotonic() < deadline, self.text(0)
      assert self.processes[0].poll() is None, self.text(0)
      time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
  with contextlib.ExitStack() as stack:
    yield lambda config: _Run(tmp_path, config, stack=stack)


def _assert_alike(found, expected):
  """Asserts that rows are equal, floats to a relative 1e-4."""
  assert len(found) == len(expected)
  for row, other in zip(found, expected, strict=True):
    assert row.keys() == other.keys()
    for key, value in other.items():
      if isinstance(value, float):
        np.testing.assert_allclose(
          row[key], value, rtol=1e-4, atol=1e-6, err_msg=key
        )
      else:
        assert row[key] == value, key


def test_w17_two_processes_make_the_run_of_one(start, base, tmp_path):
  config = _config(base)
  run = start(config)
  run.wait_for('update 1/4')
  for process in run.processes:  # As a terminal does.
    process.send_signal(signal.SIGINT)
  assert run.codes() == [0, 0], run.text(0) + run.text(1)
  assert 'interrupted; run the same command' in run.text(0)
  run = start(config)
  assert run.codes() == [0, 0], run.text(0) + run.text(1)
  assert 'process 1 followed to the end' in run.text(1)
  with tiny.compiled_once(tmp_path / 'compiled'):
    build.run(config, tmp_path / 'one')
  for name in ('evals', 'metrics', 'samples'):
    found = tiny.rows(tmp_path / 'run', name)
    _assert_alike(found, tiny.rows(tmp_path / 'one', name))
  assert {r['pass_rate'] for r in tiny.rows(tmp_path / 'one', 'evals')} != {0.0}
  assert max(r['lag_max'] for r in tiny.rows(tmp_path / 'one', 'metrics')) > 0


def test_the_others_end_where_the_first_is_killed(start, base):
  run = start(_config(base))
  run.wait_for('update 1/4')
  run.processes[0].kill()
  assert run.codes()[1] not in (0, None)


def test_the_others_end_where_the_first_fails(start, base):
  run = start(_config(base, train_path='nowhere.jsonl'))
  assert run.codes() == [2, 1], run.text(0) + run.text(1)
  assert 'error: nowhere.jsonl' in run.text(0)
  assert 'error: process 0 ended: nowhere.jsonl' in run.text(1)


def test_servers_get_the_weights_of_both(start, base, sglang_python, tmp_path):
  config = _config(
    base,
    num_updates=4,
    engine=tiny.sglang(sglang_python),
    pipeline={'schedule': 'threads', 'lockstep_lead': 0, 'deadline_s': 300.0},
  )
  run = start(config)
  assert run.codes() == [0, 0], run.text(0) + run.text(1)
  metrics = tiny.rows(tmp_path / 'run', 'metrics')
  assert [row['step'] for row in metrics] == [1, 2, 3, 4]
  assert metrics[0]['lag_max'] == 0
  assert metrics[0]['logp_diff_max'] < 1e-4
  assert metrics[-1]['sglang/pushes'] >= 2
  evals = tiny.rows(tmp_path / 'run', 'evals')
  assert [row['policy_version'] for row in evals] == [0, 2, 4]
