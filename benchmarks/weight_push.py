"""Weights into a RAM disk, against a copy in memory and against new files.

    python benchmarks/weight_push.py [--dtype=bfloat16] [--directory=DIR]

publishes a model with the sizes of SmolLM2-135M (538 MB in float32): bytes that
lie ready, which is the transport alone, and parameters, which are cast and
transposed on the device and fetched first. All take turns. Linux only.
"""

import checkpoint_io  # isort: skip  # First: it sits beside this script.

import argparse
from collections.abc import Callable
import contextlib
import io
import itertools
import os
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.generation.sglang import transport

_SPEC = checkpoint_io.SPEC
_PIECE = 1 << 22


def _stored(params, dtype: str) -> dict[str, np.ndarray]:
  """The files of a version, in memory."""
  files = {}

  @contextlib.contextmanager
  def open_file(name, num_bytes):
    file = io.BytesIO()
    yield file.write
    files[name] = np.frombuffer(file.getvalue(), np.uint8)

  hf.write_params(open_file, params, _SPEC, dtype=dtype, checksums=False)
  return files


def _pieces(data: np.ndarray) -> list[np.ndarray]:
  return [data[i : i + _PIECE] for i in range(0, data.size, _PIECE)]


def _write_ready(open_file, files) -> list:
  for name, data in files.items():
    with open_file(name, data.size) as put:
      for piece in _pieces(data):
        put(piece.data)
  return []


def _new_file(directory: pathlib.Path, files) -> Callable[[], None]:
  """Writes new files, then removes those before; two are there at a time."""
  last: list[pathlib.Path] = []
  count = itertools.count()

  def write() -> None:
    path = directory / f'new-{next(count)}'
    with path.open('wb') as file:
      for data in files.values():
        for piece in _pieces(data):
          file.write(piece.data)
      file.flush()
      os.fsync(file.fileno())
    last.append(path)
    if len(last) == 2:
      last.pop(0).unlink()

  return write


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--directory', default='/dev/shm')
  parser.add_argument('--rounds', type=int, default=9)
  args = parser.parse_args()
  params = jax.jit(lambda key: models.init_params(_SPEC, key))(
    jax.random.key(0)
  )
  files = _stored(params, args.dtype)
  size = sum(data.size for data in files.values())
  pairs = [(data, np.zeros_like(data)) for data in files.values()]

  def memcpy() -> None:
    for source, target in pairs:
      for a, b in zip(_pieces(source), _pieces(target), strict=True):
        np.copyto(b, a)

  def write_params(checksums):
    return lambda open_file, params: hf.write_params(
      open_file, params, _SPEC, dtype=args.dtype, checksums=checksums
    )

  with tempfile.TemporaryDirectory(dir=args.directory) as root:
    slots, plain, summed = (
      transport.DiskTransport(f'{root}/{i}', write)
      for i, write in enumerate(
        [_write_ready, write_params(False), write_params(True)]
      )
    )
    actions = {
      'copy in memory': memcpy,
      'two slots': lambda: slots.publish(files, 0),
      'new file': _new_file(pathlib.Path(root), files),
      'two slots, from parameters': lambda: plain.publish(params, 0),
      'the same with checksums': lambda: summed.publish(params, 0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():  # Compiles, and fills both slots.
      action()
      action()
    for _ in range(args.rounds):
      for name, action in actions.items():
        start = time.perf_counter()
        action()
        seconds[name].append(time.perf_counter() - start)
    print(f'{size / 1e6:.0f} MB on {args.directory}, {args.rounds} rounds')
    ours = statistics.median(seconds['two slots'])
    for name, times in seconds.items():
      median = statistics.median(times)
      print(
        f'{name}: {median:.3f} s ({min(times):.3f} to {max(times):.3f}),'
        f' {size / median / 1e9:.2f} GB/s; two slots are {median / ours:.2f}'
        ' times as fast'
      )
    checkpoint_io.measure(
      'host memory of a publication from parameters, slots full',
      size / 1e6,
      lambda: summed.publish(params, 0).num_bytes,
    )
    for disk in (slots, plain, summed):
      disk.close()


if __name__ == '__main__':
  main()
