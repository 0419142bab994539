"""The embedded engine and the train step on a model with all that Scout has."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax import records
from scalerl_jax import training
from scalerl_jax.generation import decode
from scalerl_jax.generation import jax_engine
from scalerl_jax.training import batching
from scalerl_jax.training import state as state_lib
from tests import tiny_model

pytestmark = pytest.mark.usefixtures('quick_compilation')

SPEC = tiny_model.moe_spec()
# Prompts of up to 5 tokens and 10 more cross a chunk of 5 twice.
LOOP = decode.DecodeSpec(
  model=SPEC,
  num_slots=3,
  prompt_tokens=5,
  response_tokens=10,
  steps_per_dispatch=4,
  temperature=1.0,
  stop_ids=(1,),
  interruption=None,
  record_routing=True,
)
REQUESTS = [tiny_model.request(visit) for visit in range(5)]
TX = optax.sgd(0.0)


@functools.cache
def _prototype():
  return jax_engine.JaxEngine(LOOP, key=jax.random.key(0), prefill_rows=(3,))


def _engine(weights=0, version=0):
  made = _prototype().fork(key=jax.random.key(0))
  made.update_weights(tiny_model.params(weights, SPEC), version)
  return made


@functools.cache
def _groups():
  return tuple(_engine().generate(REQUESTS))


def _sequences():
  return [(g.request.prompt_ids, r) for g in _groups() for r in g.rollouts]


def test_logps_are_the_trainers():
  pairs = _sequences()
  ids = [np.concatenate([p, r.token_ids]) for p, r in pairs]
  assert max(map(len, ids)) > 10
  scored = tiny_model.score(tiny_model.params(0, SPEC), ids, model=SPEC)
  for (prompt, rollout), logps in zip(pairs, scored, strict=True):
    np.testing.assert_allclose(
      rollout.logps, logps[len(prompt) :], rtol=0, atol=1e-4
    )


def test_it_continues_from_its_state():
  went_on = _engine()
  for request in REQUESTS:
    went_on.submit(request)
  for _ in range(2):  # Into the second chunk.
    went_on.step()
  went_on.refresh_cache()
  state = copy.deepcopy(went_on.state())
  resumed = _engine()
  resumed.load_state(state)
  while went_on.num_in_flight:
    for a, b in zip(went_on.step(), resumed.step(), strict=True):
      for x, y in zip(a.rollouts, b.rollouts, strict=True):
        np.testing.assert_array_equal(x.token_ids, y.token_ids)
        np.testing.assert_array_equal(x.routed_experts, y.routed_experts)
        np.testing.assert_allclose(x.logps, y.logps, atol=1e-5)


def test_a_refresh_with_the_same_weights_changes_nothing():
  made = _engine()
  for request in REQUESTS:
    made.submit(request)
  done = []
  while made.num_in_flight:
    done += made.step()
    made.refresh_cache()
  done.sort(key=lambda g: g.request.visit)
  for a, b in zip(_groups(), done, strict=True):
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
      np.testing.assert_array_equal(x.token_ids, y.token_ids)
      np.testing.assert_allclose(x.logps, y.logps, atol=1e-5)


def test_m04_recorded_experts_are_those_of_the_tokens_fed():
  prompt, rollout = _sequences()[0]
  tokens = np.concatenate([prompt, rollout.token_ids])[None]
  positions = np.arange(tokens.size)[None]
  out = models.forward(
    tiny_model.params(0, SPEC),
    SPEC,
    *map(jnp.asarray, (tokens, positions, np.ones_like(tokens))),
  )
  wanted = np.asarray(out.routing.experts)[:, 0, len(prompt) - 1 : -1]
  np.testing.assert_array_equal(rollout.routed_experts, wanted.swapaxes(0, 1))
  assert len(np.unique(wanted)) > 1


def test_records_keep_them():
  group = _groups()[0]
  again = records.group_from_state(records.group_to_state(group))
  np.testing.assert_array_equal(
    again.rollouts[1].routed_experts, group.rollouts[1].routed_experts
  )


@functools.cache
def _step_fn(num_microbatches):
  policy = models.make_policy_fn(SPEC, temperature=1.0)
  return training.make_train_step(
    policy, TX, recipes.scalerl(), num_microbatches=num_microbatches
  )


def _metrics(weights, *, num_microbatches=1, row_tokens=15):
  groups = [
    dataclasses.replace(
      g,
      rollouts=tuple(
        dataclasses.replace(r, reward=float(i))
        for i, r in enumerate(g.rollouts)
      ),
    )
    for g in _groups()
  ]
  batch, _ = batching.assemble(groups, num_rows=10, row_tokens=row_tokens)
  state = state_lib.init(tiny_model.params(weights, SPEC), TX)
  step = _step_fn(num_microbatches)
  return step(state, jax.tree.map(jnp.asarray, batch))[1], batch


def test_m04_the_step_takes_the_recorded_experts():
  metrics, batch = _metrics(0)
  known = batch.routed_experts[..., 0, 0] >= 0
  assert known.sum() == sum(len(r.token_ids) for _, r in _sequences())
  # The engine's weights: the same choices, and ratios of 1.
  assert float(metrics.router_agreement) == 1.0
  np.testing.assert_allclose(metrics.ratio_max, 1.0, atol=1e-4)
  other, _ = _metrics(1)
  assert 0.1 < float(other.router_agreement) < 0.95
  assert float(metrics.router_load_max) >= 1 >= float(metrics.router_load_min)
  assert 0 < float(metrics.router_entropy) < np.log(4)


def test_router_metrics_do_not_depend_on_microbatches_or_padding():
  whole, _ = _metrics(1)
  parts, _ = _metrics(1, num_microbatches=5, row_tokens=17)
  for name in ('loss', 'router_entropy', 'router_load_max', 'router_agreement'):
    np.testing.assert_allclose(
      getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures('unchecked_signatures')
def test_recorded_experts_of_another_length_are_refused():
  group = _groups()[0]
  experts = group.rollouts[0].routed_experts
  damaged = dataclasses.replace(
    group.rollouts[0], routed_experts=np.concatenate([experts, experts[:1]])
  )
  broken = dataclasses.replace(group, rollouts=(damaged,))
  with pytest.raises(ValueError, match='routed_experts has'):
    batching.assemble([broken], num_rows=1, row_tokens=15)


def test_a_dense_model_has_no_routing_to_record():
  spec = LOOP._replace(model=tiny_model.spec())
  with pytest.raises(ValueError, match='record_routing'):
    decode.init_state(spec)
