import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIG = """
import ml_collections


def get_config(variant='scalerl'):
  if variant not in ('scalerl', 'grpo'):
    raise ValueError(f'variant {variant!r} must be one of scalerl, grpo')
  return ml_collections.ConfigDict({
    'seed': 0,
    'num_updates': 4,
    'recipe': variant,
    'model': {'num_layers': 1, 'model_dim': 16, 'num_heads': 2,
              'num_kv_heads': 1, 'head_dim': 8, 'hidden_dim': 32},
    'data': {'train_path': '', 'max_prompt_tokens': 16,
             'toy': {'num_train': 20, 'num_eval': 10}},
    'batch': {'prompts': 4, 'group_size': 4, 'max_tokens': 64},
    'engine': {'num_slots': 8},
    'length': {'interrupt': False},
    'pipeline': {'max_lag': 2, 'deadline_s': 60.0},
    'evaluation': {'every': 1, 'num_problems': 5},
    'checkpoint': {'every': 2},
    'reporting': {'plots': True},
  })
"""


def _run(tmp_path, *args, variant=''):
  (tmp_path / 'tiny.py').write_text(_CONFIG)
  return subprocess.run(
    [
      sys.executable,
      _ROOT / 'launch' / 'run.py',
      f'--config=tiny.py{variant}',
      *args,
    ],
    cwd=tmp_path,
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


_PLANNED = ('--dry_run', '--device_tflops=100')


def test_dry_run_prints_what_fits_and_leaves_no_trace(tmp_path):
  flags = (*_PLANNED, '--config.seed=7', '--device_memory_gib=1')
  done = _run(tmp_path, *flags, variant=':grpo')
  assert done.returncode == 0, done.stderr
  assert '"recipe": "grpo"' in done.stdout
  assert done.stdout.endswith('would run in runs/tiny-grpo-seed7\n')
  assert not (tmp_path / 'runs').exists()
  assert 'parameters on 1 device(s)' in done.stdout
  assert '\nfits: ' in done.stdout
  assert 'device-hours a step' in done.stdout


def test_dry_run_says_that_it_does_not_fit(tmp_path):
  done = _run(tmp_path, *_PLANNED, '--device_memory_gib=1e-6')
  assert done.returncode == 1, done.stderr
  assert '\ndoes not fit: ' in done.stdout
  assert 'device-hours a step' in done.stdout


@pytest.mark.parametrize(
  ('variant', 'args', 'message'),
  [
    ('', ['--config.batch.promts=1'], "no field 'promts'. Did you mean"),
    ('', ['--config.num_updates=many'], '--config.num_updates=many'),
    (':foo', [], "variant 'foo' must be one of scalerl, grpo"),
    ('.missing', [], "No such file or directory: 'tiny.py.missing'"),
    ('', ['--config.batch.prompts=0'], 'batch.prompts=0 must be at least 1'),
    ('', ['--dry_run', '--config.data.train_path=x'], 'x: cannot be read'),
    ('', ['--process_id=0'], '--coordinator is missing beside the others'),
    ('', ['--distributed', '--num_processes=2'], '--distributed finds out'),
    ('', ['--dry_run', '--distributed'], '--dry_run plans for all processes'),
    (
      '',
      ['--coordinator=x:1', '--num_processes=2', '--process_id=2'],
      '--process_id=2 must be below --num_processes=2',
    ),
  ],
)
def test_bad_input_is_one_line(tmp_path, variant, args, message):
  done = _run(tmp_path, *args, variant=variant)
  assert done.returncode == 2
  assert done.stderr.startswith('error: ')
  assert message in done.stderr
  assert done.stderr.count('\n') == 1


def test_a_run_that_fails_on_the_way_ends_in_one_line(tmp_path):
  done = _run(
    tmp_path,
    '--config.pipeline.deadline_s=1e-9',
    '--config.reporting.plots=False',
    '--workdir=run',
  )
  assert done.returncode == 1
  *_, last = done.stderr.splitlines()
  assert last.startswith('error: update 0 waited 1e-09 s for a batch')
  assert last.endswith(
    '(what was checkpointed in run is kept, and the same'
    ' command goes on from there)'
  )
  assert 'Traceback' not in done.stderr
