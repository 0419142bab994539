"""What a configuration costs, from the compiler, before anything is allocated.

The real train step is lowered and compiled for the configured mesh, over
simulated CPU devices or for a TPU that need not be there. The CPU compiler's
temporaries are an upper estimate of an accelerator's, which fuses more, and it
computes and sends in float32 what others do in bfloat16.
"""

from collections.abc import Iterator, Mapping
import contextlib
import math
import os
import sys
import tempfile
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
import numpy as np

from scalerl_jax import arrays
from scalerl_jax import config as config_lib
from scalerl_jax import models
from scalerl_jax import sharding
from scalerl_jax.build import collectives
from scalerl_jax.build import learner
from scalerl_jax.build import tokenization
from scalerl_jax.reporting import compute
from scalerl_jax.training import batching
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib

_REMATERIALIZED = 'Involuntary full rematerialization'


# What libtpu needs to be told where there is no TPU that it could ask, and
# where another process may be using it: nothing is run.
_TPU_SETTINGS = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v6e-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


class DoesNotFitError(RuntimeError):
  """The compiler found too little memory on the devices it compiled for."""


class Plan(NamedTuple):
  """Sizes are bytes of one device; FLOPs are of the whole step."""

  spec: models.ModelSpec
  num_devices: int
  weights: int
  optimizer: int
  batch: int
  arguments: int  # The compiler's: weights, optimizer and batch.
  temporaries: int  # The compiler's: gradients, activations and logits.
  gradients: int  # Part of the temporaries, by count.
  logits: int  # Part of the temporaries, by count: those of one chunk.
  collectives: dict[str, int] | None  # By kind; None: the text is not given.
  rows: int
  row_tokens: int
  num_updates: int
  flops: float  # Of the model: forward and backward over full rows.
  rematerializations: int  # Involuntary ones: more than 0 is a sharding bug.

  @property
  def num_parameters(self) -> int:
    """Scalars in all arrays of the model."""
    return models.num_parameters(self.spec)

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


def plan(config: config_lib.RunConfig, *, topology: str | None = None) -> Plan:
  """Compiles the train step of a configuration and reads off what it needs.

  Rows are taken to be full, and as many as rollouts: packed batches need fewer.

  Args:
    config: The configuration.
    topology: TPU to compile for, 'v6e:16x16' for example, which need not be
      there; None: the devices of this process.

  Returns:
    The plan.

  Raises:
    config_lib.ConfigError: There are fewer devices than the mesh needs, or the
      topology is unknown or libtpu is missing, or the tokenizer cannot be
      used.
    DoesNotFitError: The compiler for a topology says so.
  """
  config, tokenizer = tokenization.complete(config)
  spec = config.model.spec(vocab_size=tokenizer.vocab_size)
  mesh = learner.make_mesh(
    config, devices=None if topology is None else _tpu_devices(topology)
  )
  tx = optimizer.make_optimizer(config.optimizer)
  params = models.abstract_params(spec)
  placed = sharding.param_shardings(models.logical_axes(spec), mesh)
  state = state_lib.abstract(params, tx, placed)
  rows = -(-config.batch.rows // config.row_multiple) * config.row_multiple
  batch = _batch(config, rows, mesh)
  step = learner.make_step(config, spec, tx, mesh)
  with _stderr() as said:
    compiled = _compile(step.lower(state, batch))
  memory = compiled.memory_analysis()
  T = config.batch.max_tokens
  forward = compute.forward_flops(
    spec, num_tokens=rows * T, num_pairs=rows * T * (T + 1) // 2
  )
  tokens = rows * T // config.batch.num_microbatches
  chunk = min(
    models.chunk_tokens(spec, mesh), tokens // sharding.num_row_shards(mesh)
  )
  return Plan(
    spec=spec,
    num_devices=mesh.size,
    weights=_bytes(state.params),
    optimizer=_bytes(state.opt_state),
    batch=_bytes(batch),
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    gradients=_bytes(state.params),
    logits=4 * chunk * spec.vocab_size // mesh.shape['tensor'],
    collectives=_collectives(compiled),
    rows=rows,
    row_tokens=T,
    num_updates=config.num_updates,
    flops=3 * forward,
    rematerializations=sum(_REMATERIALIZED in line for line in said),
  )


def report(
  found: Plan,
  *,
  device_memory: int | float | None = None,
  device_flops: int | float | None = None,
  generator_memory: int | float | None = None,
  utilization: float = 0.4,
) -> tuple[str, bool]:
  """Makes a plan readable, and says whether it can be run.

  Args:
    found: The plan.
    device_memory: Bytes of a device; None: not said.
    device_flops: Peak FLOPs per second of a device; None: no time is estimated.
    generator_memory: Bytes of all devices of one server that generates; None:
      nothing is said of generators. Counted are its weights and its cache, of
      2 (keys, values) · L · K · H · 2 bytes a token.
    utilization: Part of the peak that the step reaches, in (0, 1].

  Returns:
    Lines of text, and False where the step does not fit or the compiler warned.
  """
  per_device: dict[str, int | float] = {
    'weights': found.weights,
    'optimizer': found.optimizer,
    'batch': found.batch,
    'arguments, of the compiler': found.arguments,
    'temporaries, of the compiler': found.temporaries,
    '  of these gradients': found.gradients,
    '  of these logits of a chunk': found.logits,
    'in all': found.total,
  }
  if device_memory is not None:
    per_device['left of what is given'] = device_memory - found.total
  sent = 'collectives, bytes per device and step:'
  if not found.collectives:
    sent += ' none' if found.collectives == {} else ' not said by the compiler'
  active = ''
  if found.spec.moe is not None:
    count = models.num_parameters(found.spec, active=True)
    active = f', {count:,} active,'
  lines = [
    f'{found.num_parameters:,} parameters{active} on {found.num_devices}'
    ' device(s);'
    f' {found.rows} rows of {found.row_tokens} tokens',
    'bytes per device:',
    *_table(per_device),
    sent,
    *_table(found.collectives or {}),
    f'FLOPs per step: {found.flops:.3g},'
    f' per token: {found.flops / (found.rows * found.row_tokens):.3g}',
  ]
  if device_flops is not None:
    rate = device_flops * utilization * found.num_devices
    seconds = found.flops / rate
    hours = seconds * found.num_devices / 3600
    lines.append(
      f'at {utilization:.0%} of the peak: {seconds:.3g} s and {hours:.3g}'
      f' device-hours a step, {hours * found.num_updates:.4g} device-hours for'
      f' {found.num_updates} updates; training only, generation apart'
    )
  if generator_memory is not None:
    lines += _generator(found, generator_memory)
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


def _generator(found: Plan, memory: int | float) -> list[str]:
  spec = found.spec
  weights = 2 * found.num_parameters
  per_token = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
  tokens = max(int(memory) - weights, 0) // per_token
  return [
    f'a generator of {_size(memory)}, in bfloat16:',
    *_table({'weights': weights, 'cache of a token': per_token}),
    f'  the rest holds {tokens:,} tokens, {tokens // found.row_tokens} rollouts'
    f' of {found.row_tokens} tokens at a time',
  ]


def _tpu_devices(topology: str) -> list[Any]:
  for name, value in _TPU_SETTINGS.items():
    os.environ.setdefault(name, value)
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=topology)
  except RuntimeError as error:
    raise config_lib.ConfigError(
      f'topology={topology!r} cannot be compiled for: {error}; give a name such'
      " as v6e:16x16, and pip install 'scalerl_jax[tpu]'"
    ) from None
  return list(found.devices)


def _compile(lowered: Any) -> Any:
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    text = str(error)
    if 'RESOURCE_EXHAUSTED' not in text:
      raise
    # The figures are in the first sentences, a list of buffers comes after.
    raise DoesNotFitError(
      f'does not fit, says the compiler: {text.strip().splitlines()[0]}'
    ) from None


def _collectives(compiled: Any) -> dict[str, int] | None:
  try:
    with _stderr(shown=False):
      text = compiled.as_text()
  except jax.errors.JaxRuntimeError:
    return None  # Some versions of libtpu write what jaxlib cannot read.
  return collectives.collective_bytes(text)


def _table(sizes: Mapping[str, int | float]) -> list[str]:
  return [f'  {name:30s}{_size(v):>12s}' for name, v in sizes.items()]


def _advice(found: Plan) -> str:
  if found.temporaries > found.arguments:
    return (
      'raise batch.num_microbatches or model.remat, or lower batch.max_tokens'
    )
  return 'raise mesh.fsdp or mesh.tensor'


def _batch(
  config: config_lib.RunConfig, rows: int, mesh: jax.sharding.Mesh
) -> arrays.Batch:
  def describe(x: np.ndarray) -> jax.ShapeDtypeStruct:
    shape = (rows, config.batch.max_tokens, *x.shape[2:])[: x.ndim]
    return jax.ShapeDtypeStruct(shape, x.dtype)

  model, choices = config.model, None
  if config.engine.replay_routing and model.moe is not None:
    choices = (model.num_layers, model.moe.experts_per_token)
  batch = jax.tree.map(
    describe, batching.empty(1, 1, 1, pad_id=0, choices=choices)
  )
  return jax.tree.map(
    lambda x, placed: x.update(sharding=placed),
    batch,
    sharding.batch_shardings(batch, mesh),
  )


def _bytes(tree: Any) -> int:
  """Of the parts of a tree that lie on one device."""
  return sum(
    x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(tree)
  )


def _size(num_bytes: int | float) -> str:
  for unit in ('B', 'KiB', 'MiB'):
    if abs(num_bytes) < 1024:
      return f'{num_bytes:.4g} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:.4g} GiB'


@contextlib.contextmanager
def _stderr(*, shown: bool = True) -> Iterator[list[str]]:
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
      if shown:  # It is for the user to see too.
        os.write(2, text.encode())
