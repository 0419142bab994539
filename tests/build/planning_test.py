"""What a configuration costs, against counts by hand."""

import dataclasses
import os

import jax
import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax.build import planning
from tests import tiny

_GIB = 2**30


def _config(**mesh):
  return tiny.config(mesh=mesh)


def test_arguments_are_those_of_a_hand_count():
  config = _config()
  found = build.plan(config)
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
  one, many = build.plan(_config()), build.plan(_config(**mesh))
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
    build.plan(_config(data=4, fsdp=2, expert=2))


def test_report():
  found = build.Plan(
    num_devices=4,
    num_parameters=10**9,
    weights=_GIB,
    optimizer=2 * _GIB,
    batch=1024,
    arguments=3 * _GIB,
    temporaries=5 * _GIB,
    rows=8,
    row_tokens=100,
    flops=4.8e15,
    rematerializations=0,
  )
  text, sound = build.report(
    found, device_memory=10 * _GIB, device_flops=1e15, utilization=0.5
  )
  assert sound
  assert 'FLOPs per step: 4.8e+15, per token: 6e+12' in text
  assert 'at 50% of the peak: 2.4 s and 0.00267 device-hours a step' in text
  assert text.endswith('fits: 2 GiB are left')
  text, sound = build.report(found, device_memory=6 * _GIB)
  assert not sound
  assert 'does not fit: 2 GiB too much; raise batch.num_microbatches' in text
  small = found._replace(temporaries=_GIB)
  assert 'raise mesh.fsdp' in build.report(small, device_memory=_GIB)[0]
  gathered = found._replace(rematerializations=2)
  text, sound = build.report(gathered)
  assert not sound
  assert '2 involuntary rematerialization(s)' in text


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
