"""The 8B run, planned for the devices that it is meant for."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax import models

_ROOT = pathlib.Path(__file__).parents[2]
_PATH = _ROOT / 'configs' / 'dense_8b.py'
_GIB = 2**30


def _config(*variant):
  loader = importlib.util.spec_from_file_location('dense_8b', _PATH)
  module = importlib.util.module_from_spec(loader)
  loader.loader.exec_module(module)
  return config_lib.from_config_dict(module.get_config(*variant))


@pytest.mark.parametrize('variant', [(), ('14k',), ('32k',)])
def test_the_values_of_the_paper(variant):
  config = _config(*variant)
  long = variant == ('32k',)
  assert models.num_parameters(config.model.spec(vocab_size=1)) == 8_030_261_248
  assert config.batch.rows == 768
  assert config.batch.max_tokens == (36_864 if long else 16_384)
  assert config.length.max_thinking_tokens == (32_000 if long else 12_000)
  assert config.mesh.fsdp * config.mesh.tensor == 16
  assert config.pipeline.max_lag == 8
  assert (config.optimizer.learning_rate, config.optimizer.eps) == (5e-7, 1e-15)


def test_an_unknown_variant_is_refused():
  with pytest.raises(ValueError, match=r"variant '8k' must be one of .*'32k'"):
    _config('8k')


# A process that is forked begins with the memory of its parent: of a small one.
_WITH_PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def test_dry_run_on_sixteen_devices():
  done = subprocess.run(
    [
      *(sys.executable, '-c', _WITH_PEAK),
      *(sys.executable, _ROOT / 'launch' / 'run.py'),
      *(f'--config={_PATH}', '--dry_run', '--device_memory_gib=180'),
    ],
    env=os.environ
    | {
      'PYTHONPATH': str(_ROOT),
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # Compiles faster.
    },
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  # 1 where it does not fit or an array is gathered whole.
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert int(done.stdout.splitlines()[-1]) * 1024 < 4 * _GIB
  found = re.search(r'arguments, of the compiler +([\d.]+) GiB', done.stdout)
  # Weights and two moments, and six arrays of 4 bytes and a mask of a token.
  tokens = 768 * 16_384 / 16
  by_hand = 12 * 8_030_261_248 / 16 + 25 * tokens
  assert float(found[1]) * _GIB == pytest.approx(by_hand, rel=0.01)
