import json

import pytest

from scalerl_jax import models
from scalerl_jax.reporting import compute


def spec(**changes):
  # By hand: a block has q 4·2·2, k and v 4·1·2 each, o 2·2·4 and three
  # matrices 4·3 of the feed-forward, 84 in all; two blocks 168. The head is
  # 4·11.
  fields = {
    'vocab_size': 11,
    'num_layers': 2,
    'model_dim': 4,
    'num_heads': 2,
    'num_kv_heads': 1,
    'head_dim': 2,
    'hidden_dim': 3,
  }
  return models.ModelSpec(**(fields | changes))


METER = compute.ComputeMeter(
  generation_seconds=1800.0,
  training_seconds=5400.0,
  evaluation_seconds=7e7,
  generation_flops=2e15,
  training_flops=6e15,
  evaluation_flops=7e18,
  tokens=1234,
  evaluation_tokens=77777,
)


# --- FLOPs. -----------------------------------------------------------------


@pytest.mark.parametrize('tied_head', [False, True])
def test_flops_of_a_forward_pass_by_hand(tied_head):
  # A multiply-add is 2; scores and their use are 2 of N · H each, per layer.
  flops = compute.forward_flops(
    spec(tied_head=tied_head), num_tokens=5, num_pairs=15
  )
  assert flops == 2 * (168 + 44) * 5 + 4 * (2 * 2 * 2) * 15 == 2600


def test_tokens_and_pairs_count_apart():
  flops = [
    compute.forward_flops(spec(), num_tokens=n, num_pairs=p)
    for n, p in ((0, 0), (1, 0), (0, 1))
  ]
  assert flops == [0, 424, 32]


def test_a_lookup_norms_and_biases_are_free():
  plain = compute.forward_flops(spec(), num_tokens=3, num_pairs=6)
  for changes in ({'qkv_bias': True}, {'qk_norm': True}):
    assert plain == compute.forward_flops(
      spec(**changes), num_tokens=3, num_pairs=6
    )


def test_flops_of_a_known_size():
  # Qwen2.5-0.5B: 24 layers of 896·(896 + 2·128) + 896² + 3·896·4864, and a
  # tied head of 151,936·896.
  model = spec(
    vocab_size=151_936,
    num_layers=24,
    model_dim=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=4864,
    qkv_bias=True,
  )
  assert compute.forward_flops(model, num_tokens=1, num_pairs=0) == 2 * (
    24 * (896 * 1152 + 802_816 + 13_074_432) + 136_134_656
  )


# --- The meter. -------------------------------------------------------------


def test_axes_by_hand():
  assert METER.on_axis('device_hours') == METER.device_hours == 2
  assert METER.on_axis('flops') == METER.flops == 8e15
  assert METER.on_axis('tokens') == 1234
  assert set(compute.AXES) == {'device_hours', 'flops', 'tokens'}


@pytest.mark.parametrize('axis', compute.AXES)
def test_evaluation_is_on_no_axis(axis):
  evaluated = METER.add(
    evaluation_seconds=3600.0, evaluation_flops=1e15, evaluation_tokens=99
  )
  assert evaluated != METER
  assert evaluated.on_axis(axis) == METER.on_axis(axis)


@pytest.mark.parametrize(
  ('amounts', 'axis', 'more'),
  [
    ({'generation_seconds': 360}, 'device_hours', 0.1),
    ({'training_seconds': 360}, 'device_hours', 0.1),
    ({'generation_flops': 1e15}, 'flops', 1e15),
    ({'training_flops': 1e15}, 'flops', 1e15),
    ({'tokens': 6}, 'tokens', 6),
  ],
)
def test_what_is_spent_is_on_its_axis_only(amounts, axis, more):
  spent = METER.add(**amounts)
  for name in compute.AXES:
    expected = METER.on_axis(name) + (more if name == axis else 0)
    assert spent.on_axis(name) == pytest.approx(expected, rel=1e-12)


def test_adding_replaces_the_meter():
  meter = compute.ComputeMeter()
  assert meter.add(tokens=2).add(tokens=3).tokens == 5
  assert meter == compute.ComputeMeter()
  assert meter.add() == meter


def test_meters_add_field_by_field():
  total = METER.add(**METER._asdict())
  assert total == tuple(2 * v for v in METER)


def test_state_survives_json():
  state = json.loads(json.dumps(METER.add(training_seconds=0.1)._asdict()))
  assert compute.ComputeMeter(**state) == METER.add(training_seconds=0.1)
  assert isinstance(state['tokens'], int)


def test_an_unknown_field_or_axis_is_refused():
  with pytest.raises(AttributeError, match='seconds_of_training'):
    METER.add(seconds_of_training=1)
  with pytest.raises(ValueError, match="axis='evaluation_flops' must be one"):
    METER.on_axis('evaluation_flops')
