import os
import pathlib
import signal
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIG = """
import ml_collections


def get_config(kind='sglang'):
  return ml_collections.ConfigDict({
    'seed': 0,
    'num_updates': 1,
    'recipe': 'scalerl',
    'model': {'num_layers': 1, 'model_dim': 32, 'num_heads': 4,
              'num_kv_heads': 2, 'head_dim': 8, 'hidden_dim': 48},
    'data': {'train_path': '', 'max_prompt_tokens': 16,
             'toy': {'num_train': 20, 'num_eval': 10}},
    'batch': {'prompts': 4, 'group_size': 4, 'max_tokens': 64},
    'engine': {'kind': kind, 'num_slots': 8, 'start_servers': kind == 'sglang',
               'sglang': {'device': 'cpu', 'python': 'python',
                          'max_total_tokens': 20000}},
    'length': {'interrupt': False},
    'pipeline': {'max_lag': 2},
    'evaluation': {'every': 1, 'num_problems': 5},
    'checkpoint': {'every': 2},
  })
"""


def _start(tmp_path, *args):
  (tmp_path / 'tiny.py').write_text(_CONFIG)
  return subprocess.Popen(
    [sys.executable, _ROOT / 'launch' / 'serve.py', *args],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ('args', 'code', 'message'),
  [
    ([], 2, '--config is missing'),
    (['--config=tiny.py', 'x'], 2, "unexpected ['x']"),
    (['--config=tiny.py:jax'], 2, "engine.kind='jax' needs no servers"),
    (
      ['--config=tiny.py', '--config.engine.sglang.python=none'],
      2,
      'engine.sglang.python=none is no program',
    ),
    (['--config=tiny.py', '--host=0.0.0.0'], 2, 'which needs an api_key'),
    (['--install_cpu=.'], 1, 'not made here; give another directory'),
  ],
)
def test_bad_input_is_one_line(tmp_path, args, code, message):
  process = _start(tmp_path, *args)
  out, error = process.communicate(timeout=60)
  assert process.returncode == code
  assert not out
  assert error.startswith('error: ')
  assert message in error
  assert error.count('\n') == 1


def test_serves_until_it_is_told_to_stop(tmp_path, sglang_python):
  process = _start(
    tmp_path,
    '--config=tiny.py',
    f'--config.engine.sglang.python={sglang_python}',
  )
  try:
    line = process.stdout.readline()
    assert line.startswith('ready: http://127.0.0.1:'), process.stderr.read()
  finally:
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=60)
  assert process.returncode == 0, error
  assert not out
