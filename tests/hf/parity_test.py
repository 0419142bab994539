"""The same numbers as `transformers`; `record.py` wrote what is expected."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.hf import keys
from scalerl_jax.models import cache as cache_lib

pytestmark = pytest.mark.usefixtures('quick_compilation')

DATA = pathlib.Path(__file__).parents[1] / 'data' / 'hf'
FAMILIES = (
  'llama3',
  'smollm2',
  'linear',
  'qwen2',
  'qwen3',
  'qwen3_moe',
  'llama4',
)


@functools.cache
def _load(family):
  config = hf.read_config(DATA / family)
  spec = hf.spec_from_hf(config, dtype='float32')
  params = hf.load_params(DATA / family, spec)
  return spec, params, np.load(DATA / family / 'expected.npz')


# One program is compiled sooner than its operations one after the other.
@functools.partial(jax.jit, static_argnames='spec')
def _decode(params, spec, tokens, positions, cache):
  out = models.forward(params, spec, tokens, positions, None, cache)
  return out.hidden @ models.head_matrix(params), out.cache


@functools.partial(jax.jit, static_argnames='spec')
def _logits(params, spec, tokens, positions, segments):
  hidden = models.forward(params, spec, tokens, positions, segments).hidden
  return hidden @ models.head_matrix(params)


@pytest.fixture(params=FAMILIES)
def loaded(request):
  return _load(request.param)


def _count_up(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits(loaded):
  spec, params, expected = loaded
  tokens = jnp.asarray(expected['tokens'])
  ones = jnp.ones_like(tokens)
  got = _logits(params, spec, tokens, _count_up(tokens), ones)
  assert np.ptp(expected['logits']) > 2  # Or everything would agree.
  np.testing.assert_allclose(got, expected['logits'], rtol=0, atol=1e-4)


def test_log_probs(loaded):
  spec, params, expected = loaded
  tokens = jnp.asarray(expected['tokens'])
  policy = models.make_policy_fn(spec, temperature=1.0)
  got = policy(params, tokens, _count_up(tokens), jnp.ones_like(tokens))
  np.testing.assert_allclose(
    got.logp[:, 1:], expected['logps'], rtol=0, atol=1e-5
  )


def test_packed_rows_are_their_sequences(loaded):
  spec, params, expected = loaded
  tokens, positions, segments = (
    jnp.asarray(v)
    for v in (
      expected['tokens'][:1],
      expected['positions'][None],
      expected['segments'][None],
    )
  )
  got = _logits(params, spec, tokens, positions, segments)
  np.testing.assert_allclose(got, expected['packed_logits'], rtol=0, atol=1e-4)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_changes_nothing(loaded, side):
  spec, params, expected = loaded
  width = ((0, 0), (5, 0) if side == 'left' else (0, 5))
  tokens = np.pad(expected['tokens'], width)
  segments = np.pad(np.ones_like(expected['tokens']), width)
  positions = np.pad(np.asarray(_count_up(expected['tokens'])), width)
  got = _logits(params, spec, *map(jnp.asarray, (tokens, positions, segments)))
  got = got[:, 5:] if side == 'left' else got[:, :-5]
  np.testing.assert_allclose(got, expected['logits'], rtol=0, atol=1e-4)


def test_cached_decoding_is_the_whole_row(loaded):
  spec, params, expected = loaded
  tokens = jnp.asarray(expected['tokens'])
  positions = _count_up(tokens)
  cache = cache_lib.empty(spec, num_rows=2, num_columns=tokens.shape[1])
  got = []
  for start, stop in ((0, 30), (30, 31), (31, 40)):
    part = slice(start, stop)
    logits, cache = _decode(
      params, spec, tokens[:, part], positions[:, part], cache
    )
    got.append(logits)
  got = jnp.concatenate(got, 1)
  np.testing.assert_allclose(got, expected['logits'], rtol=0, atol=1e-4)


def test_gradients(loaded):
  spec, params, expected = loaded
  tokens = jnp.asarray(expected['tokens'])
  policy = models.make_policy_fn(spec, temperature=1.0)

  def loss(params):
    scores = policy(params, tokens, _count_up(tokens), jnp.ones_like(tokens))
    return -scores.logp[:, 1:].mean()

  got = jax.jit(jax.grad(loss))(params)
  for tensor in keys.tensors(spec):
    value = got
    for name in tensor.path.split('/'):
      value = value[name]
    found = tensor.to_stored(np.asarray(value[tensor.at]))
    wanted = expected[f'gradient/{tensor.name}']
    wanted = np.split(wanted, tensor.part[1], axis=-1)[tensor.part[0]]
    scale = np.abs(wanted).max()
    assert scale > 1e-4
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * scale)
