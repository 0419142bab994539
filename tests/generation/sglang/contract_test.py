"""What every engine must do: the embedded one and real SGLang servers alike."""

import contextlib
import time

import numpy as np
import pytest

from scalerl_jax import records
from scalerl_jax.generation import engine as engine_lib
from tests import tiny_model
from tests.generation import tiny_engine
from tests.generation.sglang import tiny_fleet
from tests.reference import interruption as reference

pytestmark = pytest.mark.usefixtures('quick_compilation')

WIDTH = tiny_fleet.WIDTH
REQUESTS = [tiny_model.request(v) for v in range(9)]
# Never sampled, so that rollouts are long enough to be met on their way.
LONG = {'response_tokens': 200, 'stop_ids': (18,)}


@pytest.fixture(params=['jax', 'sglang'])
def make(request, tmp_path):
  """Makes engines of one kind; see `tiny_engine.engine`."""
  if request.param == 'jax':
    yield lambda *, options=None, **kind: tiny_engine.engine(**kind)
    return
  urls = request.getfixturevalue('servers').urls
  with contextlib.ExitStack() as stack:
    count = iter(range(100))

    def engine(**kind):
      directory = tmp_path / str(next(count))
      return stack.enter_context(tiny_fleet.engine(urls, directory, **kind))

    yield engine


def assert_scored_alike(groups, *, weights, **kwargs):
  """Each token's log-prob is the trainer's with the weights of its version."""
  by_version = {
    version: tiny_engine.scored(
      groups,
      tiny_model.params(seed, kwargs.get('model')),
      width=WIDTH,
      **kwargs,
    )
    for version, seed in weights.items()
  }
  num_tokens = 0
  for i, (_, r) in enumerate(tiny_engine.rollouts(groups)):
    assert set(r.policy_versions.tolist()) <= weights.keys()
    for version, scored in by_version.items():
      which = r.sampled & (r.policy_versions == version)
      num_tokens += int(which.sum())
      np.testing.assert_allclose(
        r.logps[which], scored[i][1][which], rtol=0, atol=1e-4
      )
  return num_tokens


def test_it_is_an_engine(make):
  made = make()
  assert isinstance(made, engine_lib.Engine)
  assert made.version == 0
  assert made.num_devices >= 1
  assert all(isinstance(v, (int, float)) for v in made.metrics().values())


@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('interrupt', [False, True])
def test_p01_p07_logps_are_the_trainers(make, temperature, interrupt):
  made = make(temperature=temperature, interrupt=interrupt)
  groups = made.generate(REQUESTS)
  assert [g.request for g in groups] == REQUESTS
  assert all(len(g.rollouts) == 2 for g in groups)
  assert all(g.admitted_version == 0 for g in groups)
  n = assert_scored_alike(groups, weights={0: 0}, temperature=temperature)
  assert n > 36


@pytest.mark.parametrize('stop_ids', [(tiny_engine.STOP_ID,), (4, 9)])
def test_a_rollout_ends_with_a_stop_token_or_is_truncated(make, stop_ids):
  reasons = set()
  for _, r in tiny_engine.rollouts(make(stop_ids=stop_ids).generate(REQUESTS)):
    assert not np.isin(r.token_ids[:-1], stop_ids).any()
    stopped = r.token_ids[-1] in stop_ids
    assert (r.finish_reason is records.FinishReason.STOP) == stopped
    assert stopped or len(r.token_ids) == 12
    assert stopped != r.is_truncated
    assert r.sampled.all()
    reasons.add(stopped)
  assert reasons == {True, False}


def test_k09_k10_k11_an_interruption_follows_its_rule(make):
  rule, budgets = tiny_engine.RULE, set()
  requests = [tiny_model.request(v, num_samples=4) for v in range(16)]
  groups = make(interrupt=True).generate(requests)
  for _, r in tiny_engine.rollouts(groups):
    budget = rule.max_tokens + 1
    if r.is_interrupted:
      budget = int(np.flatnonzero(~r.sampled)[0])
      budgets.add(budget)
    tokens, exhausted = reference.play(
      rule, budget, r.token_ids[r.sampled].tolist()
    )
    assert [t for t, _ in tokens] == r.token_ids.tolist()
    assert [forced for _, forced in tokens] == (~r.sampled).tolist()
    assert not r.logps[~r.sampled].any()
    assert exhausted or not r.is_truncated
  assert budgets == set(range(rule.min_tokens, rule.max_tokens + 1))


def submit_and_begin(made, *, count=2):
  """Long rollouts, some tokens of which were sampled when it returns."""
  for visit in range(2, 2 + count):
    made.submit(tiny_model.request(visit))
  assert made.step() == []
  return made


@pytest.mark.parametrize('refresh', [False, True])
def test_w10_versions_are_those_of_each_token(make, refresh):
  # Servers do not wait for a refresh after an update.
  options = {'update': 'retract'} if refresh else None
  made = make(**LONG, weights=1, version=3, options=options)
  # When a server samples is its own affair: until an update met rollouts.
  for version in range(3, 13):
    submit_and_begin(made)
    made.update_weights(tiny_model.params((version + 1) % 2), version + 1)
    assert made.version == version + 1
    if refresh:
      made.refresh_cache()
    assert set(made.in_flight.values()) == {version}
    groups = tiny_engine.run_to_end(made)
    assert all(g.admitted_version == version for g in groups)
    spans = [r.policy_versions for _, r in tiny_engine.rollouts(groups)]
    for span in spans:
      assert len(span) == 200
      assert (np.diff(span) >= 0).all()
      assert set(span.tolist()) <= {version, version + 1}
    if all(len(set(span.tolist())) == 2 for span in spans):
      break
  else:
    raise AssertionError('no update met the rollouts')
  weights = {version: version % 2, version + 1: (version + 1) % 2}
  if refresh:
    assert assert_scored_alike(groups, weights=weights) == 800
  else:  # Of the first span there is no cache of other weights.
    old = tiny_model.params(weights[version])
    for r, logps in tiny_engine.scored(groups, old, width=WIDTH):
      first = r.policy_versions == version
      np.testing.assert_allclose(
        r.logps[first], logps[first], rtol=0, atol=1e-4
      )
      assert np.mean(abs(r.logps - logps)[~first]) > 0.1


def test_w11_after_an_update_no_prefix_is_remembered(make):
  made = make(weights=0)
  made.generate(REQUESTS)
  made.update_weights(tiny_model.params(1), 1)
  again = [tiny_model.request(v) for v in range(9)]
  assert_scored_alike(made.generate(again), weights={1: 1})


def test_s12_the_state_holds_what_is_in_flight(make):
  made = submit_and_begin(make(**LONG, version=2), count=3)
  state = made.state()
  resumed = make(**LONG, version=2)
  resumed.load_state(state)
  assert resumed.in_flight.keys() == made.in_flight.keys() == {2, 3, 4}
  groups = tiny_engine.run_to_end(resumed)
  assert [g.request.visit for g in groups] == [2, 3, 4]
  assert assert_scored_alike(groups, weights={2: 0}) == 6 * 200


def test_in_flight_and_room(make):
  made = make(**LONG, version=5)
  assert made.has_room
  assert made.step() == []
  visits = iter(range(100))
  while made.has_room:
    made.submit(tiny_model.request(next(visits)))
  n = next(visits)
  assert made.num_in_flight == n > 1
  assert made.in_flight == dict.fromkeys(range(n), 5)
  assert len(tiny_engine.run_to_end(made)) == n
  assert made.num_in_flight == 0
  assert made.has_room


@pytest.mark.parametrize('length', [0, 6])
def test_prompts_that_do_not_fit_are_refused(make, length):
  made = make()
  with pytest.raises(ValueError, match=f'prompt of {length} tokens must have'):
    made.submit(tiny_model.request(0, length=length))
  assert made.num_in_flight == 0


def test_a_visit_in_flight_is_refused(make):
  made = make()
  made.submit(REQUESTS[0])
  with pytest.raises(ValueError, match='visit 0 is already in flight'):
    made.submit(REQUESTS[0])
  tiny_engine.run_to_end(made)


def test_it_asks_for_weights(make):
  made = make(weights=None)
  with pytest.raises(RuntimeError, match='update_weights'):
    made.step()


def test_a_fork_has_requests_of_its_own(make):
  made = submit_and_begin(make(**LONG))
  if hasattr(made, 'spec') and hasattr(made.spec, 'vocab_size'):
    other = made.fork(seed=1)
    assert other.version == made.version
    assert other.num_in_flight == 0
    groups = other.generate([tiny_model.request(2, num_samples=1)])
    assert_scored_alike(groups, weights={0: 0})
    assert made.num_in_flight == 2
  tiny_engine.run_to_end(made)


def test_closing_ends_what_is_in_flight(make):
  made = submit_and_begin(make(**LONG))
  start = time.monotonic()
  made.close()
  made.close()
  assert time.monotonic() - start < 20
