"""From a checkpoint of Hugging Face through a run to another one."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from scalerl_jax import hf
from tests import tiny
from tests import tiny_checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
# Sizes of the model are not written: they are those of the checkpoint.
_CONFIG = """
import ml_collections


def get_config():
  return ml_collections.ConfigDict({
    'seed': 0,
    'num_updates': 2,
    'model': {'path': 'tiny'},
    'data': {'train_path': 'train.jsonl', 'eval_path': 'eval.jsonl',
             'chat': True, 'max_prompt_tokens': 40, 'toy': {}},
    'batch': {'prompts': 2, 'group_size': 4, 'max_tokens': 48,
              'truncated': 'keep'},
    'engine': {'num_slots': 8, 'steps_per_dispatch': 4},
    'length': {'interrupt': False},
    'optimizer': {'learning_rate': 1e-2, 'warmup_steps': 1},
    'pipeline': {'max_lag': 1, 'deadline_s': 60.0},
    'evaluation': {'every': 2, 'num_problems': 1, 'samples_per_problem': 1},
    'checkpoint': {'every': 1},
    'reporting': {'plots': False, 'tensorboard': False},
  })
"""


def _launch(where, name, *args):
  return subprocess.run(
    [sys.executable, _ROOT / 'launch' / name, *args],
    cwd=where,
    env=os.environ
    | {
      'PYTHONPATH': str(_ROOT),
      'JAX_PLATFORMS': 'cpu',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # Compiles faster.
    },
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def _write_problems(path, prompts):
  rows = [
    {'problem_id': p, 'prompt': p, 'answer': 'hello', 'verifier': 'boxed'}
    for p in prompts
  ]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A directory with a config, a checkpoint and problems."""
  where = tmp_path_factory.mktemp('place')
  (where / 'config.py').write_text(_CONFIG)
  tiny_checkpoint.write(where / 'tiny')
  _write_problems(where / 'train.jsonl', ['hello', 'hello<|im_end|>'])
  _write_problems(where / 'eval.jsonl', ['1'])
  return where


def test_dry_run_shows_what_the_checkpoint_says(place):
  done = _launch(place, 'run.py', '--config=config.py', '--dry_run')
  assert done.returncode == 0, done.stderr
  shown, _ = json.JSONDecoder().raw_decode(done.stdout)
  assert shown['model']['num_layers'] == 1
  assert shown['model']['vocab_size'] == 272
  assert shown['model']['rope_theta'] == 1e5


def test_from_a_checkpoint_to_another(place):
  run = ('run.py', '--config=config.py', '--workdir=run')
  done = _launch(place, *run)
  assert done.returncode == 0, done.stderr
  assert [r['step'] for r in tiny.rows(place / 'run', 'metrics')] == [1, 2]
  # Resumed: nothing is left to do, and nothing is done again.
  done = _launch(place, *run)
  assert done.returncode == 0, done.stderr
  assert [r['step'] for r in tiny.rows(place / 'run', 'metrics')] == [1, 2]
  done = _launch(
    place, 'convert.py', 'run', 'out', '--updates=1', '--dtype=float32'
  )
  assert done.returncode == 0, done.stderr
  for path in (place / 'tiny').glob('*_config.json'):
    assert (place / 'out' / path.name).read_bytes() == path.read_bytes()
  assert (place / 'out' / 'tokenizer.json').exists()
  spec = hf.spec_from_hf(hf.read_config(place / 'out'), dtype='float32')
  assert spec == tiny_checkpoint.spec()
  before, after = (
    hf.load_params(place / name, spec) for name in ('tiny', 'out')
  )
  # One step of Adam moves no weight by more than its rate, whatever happened.
  for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1.1e-2)
