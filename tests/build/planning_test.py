"""What a configuration costs, against counts by hand."""

import dataclasses
import functools
import importlib.util
import os

import jax
import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax.build import planning
from tests import tiny
from tests import tiny_model

pytestmark = pytest.mark.usefixtures('quick_compilation')
_GIB = 2**30


def _config(**mesh):
  return tiny.config(mesh=mesh)


@functools.cache
def _plan(**mesh):
  """A plan that several tests look at, and that takes seconds to compile."""
  return build.plan(_config(**mesh))


def test_arguments_are_those_of_a_hand_count():
  config = _config()
  found = _plan()
  spec = config.model.spec(vocab_size=data.ByteTokenizer.vocab_size)
  n = models.num_parameters(spec)
  assert found.num_parameters == n
  assert found.weights == 4 * n
  # Two moments of AdamW and a few counters.
  assert 8 * n <= found.optimizer <= 8 * n + 64
  T, B = config.batch.max_tokens, config.batch.rows
  assert (found.rows, found.row_tokens) == (B, T)
  # Six arrays of 4 bytes and a mask; rewards, prompts and a mask.
  assert found.batch == 25 * B * T + 9 * B
  by_hand = found.weights + found.optimizer + found.batch
  assert found.arguments == pytest.approx(by_hand, rel=0.01)
  assert found.temporaries > found.weights  # Gradients among others.
  matrices = 6 * n * B * T
  assert found.flops == pytest.approx(matrices, rel=0.35)


@pytest.mark.parametrize(
  'mesh', [{'fsdp': 4}, {'data': 2, 'fsdp': 2}, {'data': 4}]
)
def test_a_mesh_divides_what_is_sharded(mesh):
  one, many = _plan(), _plan(**mesh)
  assert many.num_devices == 4
  assert many.flops == one.flops
  parts = mesh.get('fsdp', 1) * mesh.get('tensor', 1)
  # Norms are on every device.
  assert one.weights / parts <= many.weights <= 1.1 * one.weights / parts
  by_hand = many.weights + many.optimizer + many.batch
  assert many.arguments == pytest.approx(by_hand, rel=0.01)
  assert not many.rematerializations


def test_each_device_computes_its_own_rows_only():
  config = _config()
  # Narrow and long, so that activations outweigh the weights by far.
  batch = dataclasses.replace(config.batch, prompts=64)
  one = dataclasses.replace(config, batch=batch)
  many = dataclasses.replace(
    one, mesh=dataclasses.replace(one.mesh, data=2, fsdp=4)
  )
  whole, part = build.plan(one), build.plan(many)
  assert whole.temporaries > 20 * whole.weights
  assert part.temporaries < 0.2 * whole.temporaries


def test_a_mesh_that_is_too_large_is_refused():
  with pytest.raises(config_lib.ConfigError, match='needs 16 devices'):
    build.plan(tiny.config(mesh={'data': 4, 'fsdp': 4}, batch={'prompts': 4}))


def test_report():
  found = build.Plan(
    spec=tiny_model.spec(num_layers=3),
    num_devices=4,
    weights=_GIB,
    optimizer=2 * _GIB,
    batch=1024,
    arguments=3 * _GIB,
    temporaries=5 * _GIB,
    gradients=_GIB,
    logits=2048,
    collectives={'all-gather': 3 * 2**20},
    rows=8,
    row_tokens=100,
    num_updates=1000,
    flops=4.8e15,
    rematerializations=0,
  )
  text, sound = build.report(
    found, device_memory=10 * _GIB, device_flops=1e15, utilization=0.5
  )
  assert sound
  assert 'FLOPs per step: 4.8e+15, per token: 6e+12' in text
  assert (
    'at 50% of the peak: 2.4 s and 0.00267 device-hours a step, 2.667'
    ' device-hours for 1000 updates; training only'
  ) in text
  assert text.endswith('fits: 2 GiB are left')
  lines = [' '.join(line.split()) for line in text.splitlines()]
  assert 'of these gradients 1 GiB' in lines
  assert 'of these logits of a chunk 2 KiB' in lines
  assert 'left of what is given 2 GiB' in lines
  sent = lines.index('collectives, bytes per device and step:')
  assert lines[sent + 1] == 'all-gather 3 MiB'
  for collectives, said in (({}, 'none'), (None, 'not said by the compiler')):
    text, _ = build.report(found._replace(collectives=collectives))
    assert f'per device and step: {said}\n' in text
  text, sound = build.report(found, device_memory=6 * _GIB)
  assert not sound
  assert 'does not fit: 2 GiB too much; raise batch.num_microbatches' in text
  small = found._replace(temporaries=_GIB)
  assert 'raise mesh.fsdp' in build.report(small, device_memory=_GIB)[0]
  gathered = found._replace(rematerializations=2)
  text, sound = build.report(gathered)
  assert not sound
  assert '2 involuntary rematerialization(s)' in text


def test_a_generator_holds_weights_and_cache():
  found = _plan()
  spec = found.spec
  per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
  weights = 2 * found.num_parameters
  # Two rollouts and a half.
  memory = weights + per_token * (5 * found.row_tokens // 2)
  text, _ = build.report(found, generator_memory=memory)
  tokens = 5 * found.row_tokens // 2
  assert f'holds {tokens} tokens, 2 rollouts of {found.row_tokens} ' in text
  text, _ = build.report(found, generator_memory=weights - 1)
  assert 'holds 0 tokens, 0 rollouts' in text


def test_collectives_gather_the_weights_and_reduce_the_gradients():
  assert _plan().collectives == {}
  # Two layers: the weights of a single one depend on no loop, and XLA gathers
  # them once, before the microbatches, as it does the head.
  two = build.plan(
    tiny.config(
      mesh={'fsdp': 4},
      model={'num_layers': 2},
      batch={'num_microbatches': 2},
    )
  )
  for found, parts in ((_plan(fsdp=4), 1), (two, 2)):
    spec, whole = found.spec, 4 * found.num_parameters
    table = 4 * spec.vocab_size * spec.model_dim
    norms = 4 * (2 * spec.num_layers + 1) * spec.model_dim
    # Forward and backward in each microbatch; besides the head and the tokens.
    layers = 2 * parts * (whole - table - norms)
    gathered = found.collectives['all-gather'] - layers
    assert table <= gathered <= 2 * parts * table
    reduced = found.collectives['all-reduce']
    assert parts * whole <= reduced <= 1.1 * parts * whole


def test_too_little_memory_is_said_in_one_line():
  class Lowered:
    def compile(self):
      raise jax.errors.JaxRuntimeError(
        'RESOURCE_EXHAUSTED: E1000: needed (53.96G) exceeds (31.24G).\nSee more'
      )

  with pytest.raises(
    build.DoesNotFitError, match=r'does not fit.*53.96G. exceeds .31.24G'
  ) as e:
    planning._compile(Lowered())
  assert 'See' not in str(e.value)


@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is not None, reason='libtpu is there'
)
def test_a_topology_needs_libtpu():
  with pytest.raises(
    config_lib.ConfigError, match=r"'v6e:2x2' cannot .*scalerl_jax\[tpu\]"
  ):
    build.plan(_config(), topology='v6e:2x2')


def test_a_topology_is_compiled_for():
  pytest.importorskip('libtpu')
  # Of whole tiles: smaller arrays are padded.
  model = {'model_dim': 1024, 'head_dim': 128, 'hidden_dim': 1024}
  config = tiny.config(mesh={'fsdp': 4}, model=model)
  found = build.plan(config, topology='v6e:2x2')
  by_hand = found.weights + found.optimizer + found.batch
  assert by_hand <= found.arguments <= 1.1 * by_hand
  assert found.temporaries > 0
  with pytest.raises(config_lib.ConfigError, match='needs 8 devices, 4 found'):
    build.plan(_config(fsdp=8), topology='v6e:2x2')
  with pytest.raises(config_lib.ConfigError, match="topology='v9z:2x2'"):
    build.plan(_config(), topology='v9z:2x2')


def test_warnings_of_the_compiler_are_counted_and_shown(capfd):
  with planning._stderr() as said:
    os.write(2, b'W0 [spmd] Involuntary full rematerialization. x\nelse\n')
  assert sum(planning._REMATERIALIZED in line for line in said) == 1
  assert 'else' in capfd.readouterr().err


def test_nothing_is_allocated():
  config = _config()
  wide = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, hidden_dim=2**22, num_layers=2),
  )
  before = {id(x) for x in jax.live_arrays()}
  found = build.plan(wide)
  assert found.weights > _GIB // 2
  assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 2**20
