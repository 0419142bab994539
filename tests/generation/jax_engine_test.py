import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.generation import decode
from scalerl_jax.generation import engine as engine_lib
from scalerl_jax.generation import jax_engine
from scalerl_jax.models import cache as cache_lib
from tests import tiny_model
from tests.generation import tiny_engine
from tests.reference import interruption as reference

pytestmark = pytest.mark.usefixtures('quick_compilation')

REQUESTS = [tiny_model.request(v) for v in range(9)]


def test_it_is_an_engine():
  assert isinstance(tiny_engine.engine(weights=None), engine_lib.Engine)


# --- What a rollout is. -----------------------------------------------------


@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('interrupt', [False, True])
def test_p01_p07_logps_are_the_trainers_token_by_token(temperature, interrupt):
  # 18 rollouts in 4 slots of a ring of 12: slots and columns are used again.
  made = tiny_engine.engine(temperature=temperature, interrupt=interrupt)
  groups = made.generate(REQUESTS)
  pairs = tiny_engine.scored(
    groups, tiny_model.params(), temperature=temperature
  )
  for rollout, logps in pairs:
    np.testing.assert_allclose(
      rollout.logps[rollout.sampled], logps[rollout.sampled], rtol=0, atol=1e-4
    )
  assert sum(len(r.token_ids) for r, _ in pairs) > 3 * 12


def test_p07_another_temperature_or_a_shift_would_be_seen():
  groups = tiny_engine.engine(temperature=0.7).generate(REQUESTS)
  shifts, others = [], []
  for rollout, logps in tiny_engine.scored(
    groups, tiny_model.params(), temperature=0.7
  ):
    shifts += list(abs(rollout.logps[1:] - logps[:-1]))
  for rollout, logps in tiny_engine.scored(groups, tiny_model.params()):
    others += list(abs(rollout.logps - logps))
  assert np.mean(shifts) > 0.1
  assert np.mean(others) > 0.05


def test_bfloat16_logps_are_near_the_trainers():
  model = tiny_model.spec(dtype='bfloat16')
  made = tiny_engine.engine(model=model)
  pairs = tiny_engine.scored(
    made.generate(REQUESTS), tiny_model.params(), model=model
  )
  worst = max(abs(r.logps - logps).max() for r, logps in pairs)
  assert worst < 0.1


def test_groups_come_in_the_order_of_the_requests_and_are_complete():
  groups = tiny_engine.engine().generate(REQUESTS)
  assert [g.request for g in groups] == REQUESTS
  for group in groups:
    assert len(group.rollouts) == 2
    assert group.admitted_version == 0
    for r in group.rollouts:
      sizes = {
        len(a) for a in (r.token_ids, r.logps, r.policy_versions, r.sampled)
      }
      assert len(sizes) == 1
      assert r.reward is None


@pytest.mark.parametrize('stop_ids', [(tiny_engine.STOP_ID,), (4, 9)])
def test_a_rollout_ends_with_a_stop_token_or_is_truncated(stop_ids):
  groups = tiny_engine.engine(stop_ids=stop_ids).generate(REQUESTS)
  reasons = set()
  for _, r in tiny_engine.rollouts(groups):
    assert not np.isin(r.token_ids[:-1], stop_ids).any()
    stopped = r.token_ids[-1] in stop_ids
    assert (r.finish_reason is records.FinishReason.STOP) == stopped
    assert r.sampled.all()
    if not stopped:
      assert r.is_truncated
      assert len(r.token_ids) == 12
    reasons.add(int(r.token_ids[-1]) if stopped else None)
  assert reasons == {*stop_ids, None}


# --- Determinism. -----------------------------------------------------------


@pytest.mark.parametrize('interrupt', [False, True])
def test_a_rollout_depends_on_its_request_only(interrupt):
  together = tiny_engine.engine(interrupt=interrupt).generate(REQUESTS)
  backwards = tiny_engine.engine(interrupt=interrupt).generate(REQUESTS[::-1])
  for a, b in zip(together, backwards[::-1], strict=True):
    tiny_engine.assert_same(a, b, atol=1e-5)
  for i in (0, 5):
    alone = tiny_engine.engine(interrupt=interrupt).generate([REQUESTS[i]])
    tiny_engine.assert_same(alone[0], together[i], atol=1e-5)


def test_more_samples_do_not_change_the_first_ones():
  two = tiny_engine.engine().generate([tiny_model.request(3, num_samples=2)])
  four = tiny_engine.engine().generate([tiny_model.request(3, num_samples=4)])
  for a, b in zip(two[0].rollouts, four[0].rollouts[:2], strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_a_group_larger_than_the_slots():
  large = tiny_model.request(4, num_samples=11)
  few, many = (
    tiny_engine.engine(num_slots=n).generate([REQUESTS[0], large, REQUESTS[1]])
    for n in (4, 12)
  )
  assert len(few[1].rollouts) == 11
  for a, b in zip(few, many, strict=True):
    tiny_engine.assert_same(a, b, atol=1e-5)


def test_samples_and_visits_and_keys_differ():
  same_prompt = [tiny_model.request(6, num_samples=4, length=5)]
  same_prompt.append(
    records.Request(
      visit=7,
      problem_id='p6',
      prompt_ids=same_prompt[0].prompt_ids,
      num_samples=4,
    )
  )
  groups = tiny_engine.engine().generate(same_prompt)
  groups += tiny_engine.engine(key=1).generate(same_prompt)
  responses = [[r.token_ids.tolist() for r in g.rollouts] for g in groups]
  for i, group in enumerate(responses):
    assert group not in responses[:i]
    assert all(r not in group[:j] for j, r in enumerate(group) if len(r) > 1)


# --- Interruption. ----------------------------------------------------------


@pytest.fixture(scope='module')
def interrupted():
  requests = [tiny_model.request(v, num_samples=4) for v in range(16)]
  groups = tiny_engine.engine(interrupt=True).generate(requests)
  return [r for _, r in tiny_engine.rollouts(groups)]


def test_k09_forced_tokens_are_flagged_and_have_no_logp(interrupted):
  phrase = list(tiny_engine.RULE.phrase_ids)
  cut = [r for r in interrupted if r.is_interrupted]
  assert len(cut) > 20
  for r in cut:
    assert r.token_ids[~r.sampled].tolist() == phrase
    where = np.flatnonzero(~r.sampled)
    assert where.tolist() == list(range(where[0], where[0] + len(phrase)))
    np.testing.assert_array_equal(r.logps[~r.sampled], 0)
  for r in interrupted:
    assert (r.logps[r.sampled] < 0).all()


def test_k09_each_rollout_replays_by_the_rule(interrupted):
  rule, budgets = tiny_engine.RULE, set()
  for r in interrupted:
    thinking = len(r.token_ids)
    if r.is_interrupted:
      thinking = int(np.flatnonzero(~r.sampled)[0])
      budgets.add(thinking)
    # Without an interruption, any budget not yet spent explains the rollout.
    budget = thinking if r.is_interrupted else rule.max_tokens + 1
    tokens, exhausted = reference.play(
      rule, budget, r.token_ids[r.sampled].tolist()
    )
    assert [t for t, _ in tokens] == r.token_ids.tolist()
    assert [forced for _, forced in tokens] == (~r.sampled).tolist()
    if r.is_truncated:
      assert exhausted
  assert budgets == set(range(rule.min_tokens, rule.max_tokens + 1))


def test_k10_a_stop_token_that_is_forced_does_not_stop(interrupted):
  for r in interrupted:
    stops = np.flatnonzero(r.token_ids == tiny_engine.STOP_ID)
    assert all(not r.sampled[i] or i == len(r.token_ids) - 1 for i in stops)
    assert r.sampled[-1]


def test_k11_the_answer_budget_ends_a_rollout(interrupted):
  answers = []
  for r in interrupted:
    ends = np.flatnonzero(r.token_ids == tiny_engine.END_THINK_ID)
    if not len(ends):
      assert not r.is_truncated  # It stopped while it thought.
      continue
    answers.append(len(r.token_ids) - 1 - ends[0])
    assert r.is_truncated == (
      answers[-1] == tiny_engine.RULE.answer_tokens
      and r.token_ids[-1] != tiny_engine.STOP_ID
    )
  assert max(answers) == tiny_engine.RULE.answer_tokens


# --- Weights that change in flight. -----------------------------------------


def swap_in_flight(*, refresh: bool):
  """One dispatch with weights 0 (version 3), the rest with weights 1."""
  made = tiny_engine.engine(weights=0, version=3)
  for request in (tiny_model.request(2), tiny_model.request(4)):
    made.submit(request)
  groups = made.step()
  made.update_weights(tiny_model.params(1), 4)
  if refresh:
    made.refresh_cache()
  assert made.version == 4
  return groups + tiny_engine.run_to_end(made)


def test_versions_are_those_of_each_token():
  groups = swap_in_flight(refresh=False)
  spans = set()
  for _, r in tiny_engine.rollouts(groups):
    expected = np.where(np.arange(len(r.token_ids)) < 5, 3, 4)
    np.testing.assert_array_equal(r.policy_versions, expected)
    spans |= set(r.policy_versions.tolist())
  assert spans == {3, 4}
  assert all(g.admitted_version == 3 for g in groups)


def test_after_a_refresh_each_span_is_scored_by_its_own_weights():
  groups = swap_in_flight(refresh=True)
  old, new = (
    tiny_engine.scored(groups, tiny_model.params(seed)) for seed in (0, 1)
  )
  num_new = 0
  for (r, by_old), (_, by_new) in zip(old, new, strict=True):
    expected = np.where(r.policy_versions == 3, by_old, by_new)
    np.testing.assert_allclose(r.logps, expected, rtol=0, atol=1e-4)
    num_new += int((r.policy_versions == 4).sum())
  assert num_new > 5


def test_without_a_refresh_the_old_cache_is_kept():
  groups = swap_in_flight(refresh=False)
  moved = []
  for prompt, r in tiny_engine.rollouts(groups):
    expected = mixed_logps(np.concatenate([prompt, r.token_ids]), len(prompt))
    np.testing.assert_allclose(r.logps, expected, rtol=0, atol=1e-4)
    fresh = tiny_model.score(
      tiny_model.params(1), [np.concatenate([prompt, r.token_ids])]
    )[0][len(prompt) :]
    moved += list(abs(expected - fresh)[5:])
  assert np.mean(moved) > 1e-2


def mixed_logps(tokens, prompt_length):
  """Scores with weights 0 until 5 tokens are sampled, then with weights 1."""
  model = tiny_model.spec()
  cache = cache_lib.empty(model, num_rows=1, num_columns=len(tokens))
  logps = []
  for t, token in enumerate(tokens[:-1]):
    weights = tiny_model.params(0 if t < prompt_length - 1 + 5 else 1)
    out = step_fn(
      weights, jnp.array([[token]], jnp.int32), jnp.array([[t]]), cache
    )
    cache = out.cache
    logits = out.hidden[0, 0] @ models.head_matrix(weights)
    logps.append(float(jax.nn.log_softmax(logits)[tokens[t + 1]]))
  return np.array(logps[prompt_length - 1 :])


@jax.jit
def step_fn(weights, token, position, cache):
  return models.forward(
    weights, tiny_model.spec(), token, position, None, cache
  )


def test_p14_w11_after_an_update_it_generates_as_a_fresh_engine_does():
  used = tiny_engine.engine(weights=0)
  used.generate(REQUESTS[:5])
  used.update_weights(tiny_model.params(1), 1)
  fresh = tiny_engine.engine(weights=1, version=1)
  # The same prompts again, under visits not seen before.
  again = [
    records.Request(
      visit=100 + r.visit,
      problem_id=r.problem_id,
      prompt_ids=r.prompt_ids,
      num_samples=2,
    )
    for r in REQUESTS[:5]
  ]
  for a, b in zip(used.generate(again), fresh.generate(again), strict=True):
    tiny_engine.assert_same(a, b, atol=1e-5)


def test_a_refresh_with_the_same_weights_changes_nothing():
  plain, refreshed = tiny_engine.engine(), tiny_engine.engine()
  for request in REQUESTS[:4]:
    plain.submit(request)
    refreshed.submit(request)
  done = []
  while refreshed.num_in_flight:
    done += refreshed.step()
    refreshed.refresh_cache()
  done.sort(key=lambda g: g.request.visit)
  for a, b in zip(tiny_engine.run_to_end(plain), done, strict=True):
    tiny_engine.assert_same(a, b, atol=1e-5)


# --- State. -----------------------------------------------------------------


@pytest.mark.parametrize('interrupt', [False, True])
@pytest.mark.parametrize('num_steps', [0, 1, 4])
def test_it_continues_from_its_state_bit_for_bit(interrupt, num_steps):
  went_on = tiny_engine.engine(interrupt=interrupt, version=2)
  for request in [*REQUESTS[:6], tiny_model.request(20, num_samples=7)]:
    went_on.submit(request)
  for _ in range(num_steps):
    went_on.step()
  went_on.update_weights(tiny_model.params(1), 3)
  went_on.refresh_cache()
  state = copy.deepcopy(went_on.state())
  resumed = tiny_engine.engine(interrupt=interrupt, weights=1, version=3)
  resumed.load_state(state)
  assert resumed.in_flight == went_on.in_flight
  assert resumed.num_in_flight == went_on.num_in_flight > 0
  expected = tiny_engine.run_to_end(went_on)
  found = tiny_engine.run_to_end(resumed)
  for a, b in zip(expected, found, strict=True):
    tiny_engine.assert_same(a, b)
    assert a.admitted_version == b.admitted_version


def test_the_state_is_a_copy():
  made = tiny_engine.engine()
  for request in REQUESTS[:4]:
    made.submit(request)
  made.step()
  state = made.state()
  before = copy.deepcopy(state['device'])
  tiny_engine.run_to_end(made)
  for name, value in before.items():
    np.testing.assert_array_equal(state['device'][name], value)


# --- The queue. -------------------------------------------------------------


def test_in_flight_and_room():
  made = tiny_engine.engine(version=5)
  assert made.has_room
  assert made.step() == []
  for request in REQUESTS[:3]:
    made.submit(request)
  assert not made.has_room  # Six samples wait for four slots.
  assert made.num_in_flight == 3
  assert made.in_flight == {0: 5, 1: 5, 2: 5}
  made.generate([])
  assert made.num_in_flight == 0
  assert made.has_room


def test_in_flight_tells_the_version_of_the_first_token():
  made = tiny_engine.engine(version=5)
  for request in (REQUESTS[0], REQUESTS[1], REQUESTS[2]):
    made.submit(request)
  made.step()
  made.update_weights(tiny_model.params(1), 6)
  assert made.in_flight[2] == 6  # It waits.
  assert {v for visit, v in made.in_flight.items() if visit < 2} <= {5}


@pytest.mark.parametrize('length', [0, 6])
def test_prompts_that_do_not_fit_are_refused(length):
  made = tiny_engine.engine()
  with pytest.raises(ValueError, match=f'prompt of {length} tokens must have'):
    made.submit(tiny_model.request(0, length=length))
  assert made.num_in_flight == 0


def test_a_visit_in_flight_is_refused_until_it_is_done():
  made = tiny_engine.engine()
  made.submit(REQUESTS[0])
  with pytest.raises(ValueError, match='visit 0 is already in flight'):
    made.submit(REQUESTS[0])
  first = made.generate([])
  assert first == []
  tiny_engine.assert_same(
    made.generate([REQUESTS[0]])[0],
    tiny_engine.engine().generate([REQUESTS[0]])[0],
    atol=1e-5,
  )


def test_it_asks_for_weights():
  made = tiny_engine.engine(weights=None)
  made.submit(REQUESTS[0])
  with pytest.raises(RuntimeError, match='update_weights'):
    made.step()


def test_m02_it_compiles_once_per_bucket():
  made = jax_engine.JaxEngine(
    tiny_engine.spec(response_tokens=3, num_slots=6),
    key=jax.random.key(0),
  )
  for version in range(3):
    made.update_weights(tiny_model.params(version), version)
    for count in (1, 2, 3):
      start = 100 * version + 10 * count
      made.generate(
        [tiny_model.request(start + i, num_samples=1 + i) for i in range(count)]
      )
    made.refresh_cache()
    made.load_state(made.state())
  # One prompt, and up to four.
  assert made.num_compiles == {'admit': 2, 'run': 1, 'refresh': 1}
  assert made.fork(key=jax.random.key(1)).num_compiles is made.num_compiles


def test_slots_that_are_free_hold_no_work():
  made = tiny_engine.engine()
  made.generate(REQUESTS[:3])
  status = made.state()['device']['status']
  assert (status != decode.RUNNING).all()
  made.close()
  with pytest.raises(RuntimeError, match='update_weights'):
    made.step()
