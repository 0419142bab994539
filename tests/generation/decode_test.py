import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax.generation import decode
from tests import tiny_model
from tests.generation import tiny_engine

pytestmark = pytest.mark.usefixtures('quick_compilation')

SPEC = tiny_engine.spec(stop_ids=())  # No rollout ends early.
N, P, R = SPEC.num_slots, SPEC.prompt_tokens, SPEC.response_tokens
admit, run, refresh = (
  jax.jit(fn, static_argnums=1)
  for fn in (decode.admit, decode.run, decode.refresh)
)


def admission(rows, prompts):
  """`rows`: slot → index into `prompts`."""
  padded = np.zeros((N, P), np.int32)
  lengths = np.ones(N, np.int32)
  for i, ids in enumerate(prompts):
    padded[i, : len(ids)], lengths[i] = ids, len(ids)
  row = np.full(N, -1, np.int32)
  for slot, i in rows.items():
    row[slot] = i
  slots = jnp.arange(N, dtype=jnp.int32)
  return decode.Admission(
    jnp.asarray(padded), jnp.asarray(lengths), jnp.asarray(row), slots, slots
  )


def start(state, rows, prompts, weights=0, key=0):
  return admit(
    tiny_model.params(weights),
    SPEC,
    state,
    admission(rows, prompts),
    jax.random.key(key),
  )


def decode_once(state, weights=0, version=0):
  return run(
    tiny_model.params(weights), SPEC, state, jnp.asarray(version, jnp.int32)
  )


@functools.cache
def busy():
  """Three slots that started at different steps; the ring has wrapped."""
  state = start(decode.init_state(SPEC), {0: 0}, [[2, 3, 4]])
  for _ in range(2):
    state = decode_once(state)
  assert int(state.step) == 10
  state = start(state, {0: 0, 1: 1, 3: 1}, [[5, 6], [7, 8, 9, 10, 11]], key=3)
  state = decode_once(state)
  return start(state, {2: 0}, [[12]], key=4)


def response(state, slot):
  return np.asarray(state.tokens)[slot, : int(state.num_tokens[slot])]


def test_a_new_state_has_free_slots_only():
  state = decode.init_state(SPEC)
  assert (np.asarray(state.status) == decode.STOPPED).all()
  after = decode_once(state)
  assert int(after.step) == 0  # Nothing to do.
  jax.tree.map(np.testing.assert_array_equal, state, after)


def test_admission_touches_its_own_slots_only():
  before = busy()
  after = start(before, {2: 1}, [[2], [3, 4, 5]], key=9)
  others = np.array([0, 1, 3])
  for name in decode.DecodeState._fields:
    if name in ('cache', 'limits', 'step', 'experts'):
      continue
    a, b = (np.asarray(getattr(s, name)) for s in (before, after))
    np.testing.assert_array_equal(a[others], b[others])
  for a, b in zip(before.cache.keys, after.cache.keys, strict=True):
    np.testing.assert_array_equal(a[others], b[others])
    np.testing.assert_array_equal(a[:, :, P:], b[:, :, P:])
  assert int(after.status[2]) == decode.RUNNING
  assert int(after.prompt_length[2]) == 3
  assert int(after.last_token[2]) == 5
  assert int(after.start_step[2]) == int(before.step)


def test_free_slots_do_not_change_while_others_run():
  before = start(decode.init_state(SPEC), {1: 0}, [[2, 3]])
  after = decode_once(before)
  free = np.array([0, 2, 3])
  for name in ('tokens', 'logps', 'versions', 'sampled', 'num_tokens'):
    a, b = (np.asarray(getattr(s, name)) for s in (before, after))
    np.testing.assert_array_equal(a[free], b[free])
  assert int(after.num_tokens[1]) == int(after.step)


def test_a_dispatch_ends_when_all_slots_are_done():
  spec = tiny_engine.spec(steps_per_dispatch=100)
  state = start(decode.init_state(SPEC), {0: 0, 2: 1}, [[2, 3], [4]])
  state = run(tiny_model.params(), spec, state, jnp.asarray(0, jnp.int32))
  assert (np.asarray(state.status) != decode.RUNNING).all()
  assert int(state.step) == int(np.asarray(state.num_tokens).max()) <= R


def test_the_version_is_recorded_per_token():
  state = start(decode.init_state(SPEC), {0: 0}, [[2, 3, 4]])
  state = decode_once(state, version=4)
  state = decode_once(state, weights=1, version=6)
  assert np.asarray(state.versions)[0].tolist() == [4] * 5 + [6] * 5 + [0] * 2


def test_prompt_padding_does_not_matter():
  # What lies behind the end of a prompt must be invisible.
  clean = admission({0: 0, 1: 1}, [[2, 3], [4]])
  prompts = np.asarray(clean.prompts).copy()
  prompts[0, 2:], prompts[1, 1:] = 16, 15
  states = []
  for work in (clean, clean._replace(prompts=jnp.asarray(prompts))):
    state = admit(
      tiny_model.params(),
      SPEC,
      decode.init_state(SPEC),
      work,
      jax.random.key(0),
    )
    states.append(decode_once(decode_once(state)))
  for name in ('tokens', 'logps', 'num_tokens'):
    a, b = (np.asarray(getattr(s, name)) for s in states)
    np.testing.assert_array_equal(a[:2], b[:2])


def test_stale_columns_do_not_matter():
  # The ring holds tokens of earlier tenants; a slot must not see them.
  state = start(decode.init_state(SPEC), {0: 0, 1: 1}, [[2, 3], [4]])
  keys, values = jax.tree.map(
    lambda x: x.at[:, :, P:].set(1e3), (state.cache.keys, state.cache.values)
  )
  junk = state.cache._replace(keys=keys, values=values)
  dirty = state._replace(cache=junk)
  clean, dirty = (decode_once(decode_once(s)) for s in (state, dirty))
  for name in ('tokens', 'logps', 'num_tokens'):
    np.testing.assert_array_equal(getattr(clean, name), getattr(dirty, name))


@pytest.mark.parametrize('slot', range(N))
def test_w11_a_refreshed_cache_is_that_of_a_prefill(slot):
  # Weights 1 read what weights 0 wrote, as a fresh engine would read it.
  state = refresh(tiny_model.params(1), SPEC, busy())
  prompt = np.asarray(state.prompts)[slot, : int(state.prompt_length[slot])]
  tokens = np.concatenate([prompt, response(state, slot)])[:-1]
  if len(tokens) == 0:
    return  # A prompt of one token, not fed yet: no column is visible.
  expected = prefill(tiny_model.params(1), tokens)
  columns = list(range(len(prompt) - 1))
  first = int(state.start_step[slot])
  columns += [P + (first + j) % R for j in range(len(response(state, slot)))]
  for cached, fresh in zip(state.cache.keys, expected.keys, strict=True):
    np.testing.assert_allclose(
      np.asarray(cached)[slot][:, columns].swapaxes(0, 1),
      np.asarray(fresh)[0],
      rtol=0,
      atol=1e-5,
    )
  for cached, fresh in zip(state.cache.values, expected.values, strict=True):
    np.testing.assert_allclose(
      np.asarray(cached)[slot][:, columns].swapaxes(0, 1),
      np.asarray(fresh)[0],
      rtol=0,
      atol=1e-5,
    )


def prefill(weights, tokens):
  T = len(tokens)
  return models.forward(
    weights,
    SPEC.model,
    jnp.asarray(tokens)[None],
    jnp.arange(T)[None],
    jnp.ones((1, T), jnp.int32),
    collect_kv=True,
  ).kv


def test_w11_a_refresh_replaces_what_other_weights_wrote():
  before = busy()
  same, other = (
    refresh(tiny_model.params(seed), SPEC, before) for seed in (0, 1)
  )
  # Slot 1 runs; its prompt has five tokens, four of them in the cache.
  old, kept, new = (
    np.asarray(s.cache.keys[0])[1, :, :4] for s in (before, same, other)
  )
  np.testing.assert_allclose(old, kept, rtol=0, atol=1e-5)
  assert abs(old - new).max() > 0.1


def test_a_refresh_keeps_everything_but_the_cache():
  before = busy()
  after = refresh(tiny_model.params(1), SPEC, before)
  jax.tree.map(
    np.testing.assert_array_equal,
    before._replace(cache=None),
    after._replace(cache=None),
  )
