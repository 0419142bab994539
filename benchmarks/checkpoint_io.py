"""Host memory and time of a checkpoint in and out.

    python benchmarks/checkpoint_io.py [--dtype=float32]

writes a checkpoint with the sizes of SmolLM2-135M (538 MB in float32) to a
temporary directory, and reads it in a process of its own. On a CPU the loaded
parameters count as host memory too. Linux only.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

import jax

from scalerl_jax import hf
from scalerl_jax import models

SPEC = models.ModelSpec(
  vocab_size=49152,
  num_layers=30,
  model_dim=576,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  hidden_dim=1536,
  rope_theta=1e5,
  norm_eps=1e-5,
)


def _status(field: str) -> float:
  """MB of a field of /proc/self/status."""
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  (line,) = (line for line in lines if line.startswith(field))
  return int(line.split()[1]) * 1024 / 1e6


def measure(what: str, size: float, action) -> object:
  pathlib.Path('/proc/self/clear_refs').write_text('5')  # Resets the peak.
  before, start = _status('VmRSS'), time.perf_counter()
  result = jax.block_until_ready(action())
  seconds = time.perf_counter() - start
  extra = _status('VmHWM') - before
  print(
    f'{what}: {extra:.0f} MB more at the peak, {extra / size:.2f} of the'
    f' {size:.0f} MB stored; {seconds:.1f} s'
  )
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--directory', help=argparse.SUPPRESS)
  args = parser.parse_args()
  size = models.num_parameters(SPEC) * jax.numpy.dtype(args.dtype).itemsize
  if args.directory is None:
    with tempfile.TemporaryDirectory() as root:
      params = jax.jit(lambda key: models.init_params(SPEC, key))(
        jax.random.key(0)
      )
      hf.save_params(f'{root}/in', params, SPEC, dtype=args.dtype)
      flags = [f'--dtype={args.dtype}', f'--directory={root}']
      subprocess.run([sys.executable, __file__, *flags], check=True)
    return
  # What any process pays, before anything is measured.
  jax.block_until_ready(jax.numpy.zeros(1) + 1)
  hf.read_config(f'{args.directory}/in')
  params = measure(
    'in',
    size / 1e6,
    lambda: hf.load_params(f'{args.directory}/in', SPEC, dtype=args.dtype),
  )
  measure(
    'out',
    size / 1e6,
    lambda: hf.save_params(
      f'{args.directory}/out', params, SPEC, dtype=args.dtype
    ),
  )


if __name__ == '__main__':
  main()
