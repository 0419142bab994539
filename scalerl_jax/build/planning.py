"""What a configuration costs, from the compiler, before anything is allocated.

The real train step is lowered and compiled for the configured mesh over
simulated CPU devices. The CPU compiler's temporaries are an upper estimate of
an accelerator's, which fuses more.
"""

from collections.abc import Iterator
import contextlib
import math
import os
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np

from scalerl_jax import arrays
from scalerl_jax import config as config_lib
from scalerl_jax import models
from scalerl_jax import sharding
from scalerl_jax.build import assembly
from scalerl_jax.build import tokenization
from scalerl_jax.reporting import compute
from scalerl_jax.training import batching
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib

_REMATERIALIZED = 'Involuntary full rematerialization'


class Plan(NamedTuple):
  """Sizes are bytes of one device; FLOPs are of the whole step."""

  num_devices: int
  num_parameters: int
  weights: int
  optimizer: int
  batch: int
  arguments: int  # The compiler's: weights, optimizer and batch.
  temporaries: int  # The compiler's: gradients, activations and logits.
  rows: int
  row_tokens: int
  flops: float  # Of the model: forward and backward over full rows.
  rematerializations: int  # Involuntary ones: more than 0 is a sharding bug.

  @property
  def total(self) -> int:
    """Bytes of a device that the step needs."""
    return self.arguments + self.temporaries


def simulate_devices(count: int) -> None:
  """Makes a process see that many CPU devices, and no others.

  Without effect where the process has used a device already.

  Args:
    count: Devices.
  """
  with contextlib.suppress(RuntimeError):
    jax.config.update('jax_num_cpu_devices', count)
    jax.config.update('jax_platforms', 'cpu')


def plan(config: config_lib.RunConfig) -> Plan:
  """Compiles the train step of a configuration and reads off what it needs.

  Rows are taken to be full, and as many as rollouts: packed batches need fewer.

  Args:
    config: The configuration.

  Returns:
    The plan.

  Raises:
    config_lib.ConfigError: There are fewer devices than the mesh needs, or the
      tokenizer cannot be used.
  """
  config, tokenizer = tokenization.complete(config)
  spec = config.model.spec(vocab_size=tokenizer.vocab_size)
  mesh = assembly.make_mesh(config)
  tx = optimizer.make_optimizer(config.optimizer)
  params = models.abstract_params(spec)
  placed = sharding.param_shardings(models.logical_axes(spec), mesh)
  state = state_lib.abstract(params, tx, placed)
  rows = -(-config.batch.rows // config.row_multiple) * config.row_multiple
  batch = _batch(config, rows, mesh)
  step = assembly.make_step(config, spec, tx, mesh)
  with _stderr() as said:
    compiled = step.lower(state, batch).compile()
  memory = compiled.memory_analysis()
  T = config.batch.max_tokens
  forward = compute.forward_flops(
    spec, num_tokens=rows * T, num_pairs=rows * T * (T + 1) // 2
  )
  return Plan(
    num_devices=mesh.size,
    num_parameters=models.num_parameters(spec),
    weights=_bytes(state.params),
    optimizer=_bytes(state.opt_state),
    batch=_bytes(batch),
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    rows=rows,
    row_tokens=T,
    flops=3 * forward,
    rematerializations=sum(_REMATERIALIZED in line for line in said),
  )


def report(
  found: Plan,
  *,
  device_memory: int | float | None = None,
  device_flops: int | float | None = None,
  utilization: float = 0.4,
) -> tuple[str, bool]:
  """Makes a plan readable, and says whether it can be run.

  Args:
    found: The plan.
    device_memory: Bytes of a device; None: not said.
    device_flops: Peak FLOPs per second of a device; None: no time is estimated.
    utilization: Part of the peak that the step reaches, in (0, 1].

  Returns:
    Lines of text, and False where the step does not fit or the compiler warned.
  """
  per_device = {
    'weights': found.weights,
    'optimizer': found.optimizer,
    'batch': found.batch,
    'arguments, of the compiler': found.arguments,
    'temporaries, of the compiler': found.temporaries,
    'in all': found.total,
  }
  lines = [
    f'{found.num_parameters:,} parameters on {found.num_devices} device(s);'
    f' {found.rows} rows of {found.row_tokens} tokens',
    'bytes per device:',
    *(f'  {name:30s}{_size(v):>12s}' for name, v in per_device.items()),
    f'FLOPs per step: {found.flops:.3g},'
    f' per token: {found.flops / (found.rows * found.row_tokens):.3g}',
  ]
  if device_flops is not None:
    rate = device_flops * utilization * found.num_devices
    seconds = found.flops / rate
    hours = seconds * found.num_devices / 3600
    lines.append(
      f'at {utilization:.0%} of the peak: {seconds:.3g} s and {hours:.3g}'
      ' device-hours a step, generation apart'
    )
  left = math.inf if device_memory is None else device_memory - found.total
  if left < 0:
    lines.append(f'does not fit: {_size(-left)} too much; {_advice(found)}')
  elif device_memory is not None:
    lines.append(f'fits: {_size(left)} are left')
  if found.rematerializations:
    lines.append(
      f'{found.rematerializations} involuntary rematerialization(s): an array'
      ' is gathered whole on every device; change the mesh'
    )
  return '\n'.join(lines), left >= 0 and not found.rematerializations


def _advice(found: Plan) -> str:
  if found.temporaries > found.arguments:
    return (
      'raise batch.num_microbatches or model.remat, or lower batch.max_tokens'
    )
  return 'raise mesh.fsdp or mesh.tensor'


def _batch(
  config: config_lib.RunConfig, rows: int, mesh: jax.sharding.Mesh
) -> arrays.Batch:
  grid = sharding.placement(mesh).rows
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def describe(x: np.ndarray) -> jax.ShapeDtypeStruct:
    is_row = x.ndim == 2
    return jax.ShapeDtypeStruct(
      (rows, config.batch.max_tokens) if is_row else (config.batch.rows,),
      x.dtype,
      sharding=grid if is_row else whole,
    )

  return jax.tree.map(describe, batching.empty(1, 1, 1, pad_id=0))


def _bytes(tree: Any) -> int:
  """Of the parts of a tree that lie on one device."""
  return sum(
    x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(tree)
  )


def _size(num_bytes: int | float) -> str:
  for unit in ('B', 'KiB', 'MiB'):
    if num_bytes < 1024:
      return f'{num_bytes:.4g} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:.4g} GiB'


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
  """Lines that the compiler, which knows no Python, writes to stderr."""
  lines: list[str] = []
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield lines
    finally:
      os.dup2(saved, 2)
      os.close(saved)
      file.seek(0)
      text = file.read().decode(errors='replace')
      lines += text.splitlines()
      os.write(2, text.encode())  # It is for the user to see too.
