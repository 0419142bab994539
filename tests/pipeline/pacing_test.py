import dataclasses

import numpy as np
import pytest

from scalerl_jax.pipeline import pacing as pacing_lib

_NUM_UPDATES = 12
_SEEDS = range(20)


class _Simulation:
  """A generator and a trainer that take turns at random.

  The generator decodes groups token by token in few slots, and learns of new
  weights only where its turn comes; the trainer may come again and again
  between two of its turns.
  """

  def __init__(self, pacing, *, seed, generator_pacing=None):
    self.pacing = pacing
    self.generator_pacing = generator_pacing or pacing
    self.rng = np.random.default_rng(seed)
    self.num_slots = int(self.rng.integers(1, 2 * pacing.prompts + 3))
    self.trainer_share = self.rng.uniform(0.1, 0.9)
    self.version = 0  # Of the trainer.
    self.published = 0
    self.num_submitted = 0
    self.running = {}  # Visit → [version of each token], first one first.
    self.left = {}  # Visit → tokens to go.
    self.complete = {}
    self.consumed = []
    self.lags = []

  def run(self):
    while self.version < self.pacing.num_updates:
      if self.rng.random() < self.trainer_share:
        self.train()
      elif not self.generate() and not self.train():
        raise AssertionError(f'deadlock at update {self.version}')
    return self

  def limit(self, version):
    return self.generator_pacing.max_visits(version)

  def generate(self):
    version = self.published
    while len(
      self.running
    ) < self.num_slots and self.num_submitted < self.limit(version):
      self.running[self.num_submitted] = []
      self.left[self.num_submitted] = int(self.rng.geometric(0.2))
      self.num_submitted += 1
    if not self.running:
      return False
    for visit in list(self.running):
      self.running[visit].append(version)
      self.left[visit] -= 1
      if not self.left[visit]:
        self.complete[visit] = self.running.pop(visit)
    return True

  def train(self):
    chosen = self.pacing.select(
      self.version,
      complete={v: tokens[0] for v, tokens in self.complete.items()},
      incomplete={v: tokens[0] for v, tokens in self.running.items()},
      can_generate=bool(self.running)
      or self.num_submitted < self.limit(self.published),
    )
    if chosen is None:
      return False
    assert len(chosen) == self.pacing.prompts
    for visit in chosen:
      self.lags += [self.version - v for v in self.complete.pop(visit)]
    self.consumed += chosen
    self.version += 1
    if self.pacing.publishes(self.version):
      self.published = self.version
    return True


def _pacing(algorithm, k, prompts, lead=0, num_updates=_NUM_UPDATES):
  return pacing_lib.Pacing(
    algorithm=algorithm,
    max_lag=k,
    prompts=prompts,
    num_updates=num_updates,
    lead=lead,
  )


_CASES = [
  ('pipeline_rl', k, lead)
  for k in (0, 1, 2, 3, 8)
  for lead in sorted({0, k // 2, k})
] + [('ppo_off_policy', k, 0) for k in (1, 2, 3, 5, 8)]


@pytest.mark.parametrize('prompts', [1, 2, 5])
@pytest.mark.parametrize(('algorithm', 'k', 'lead'), _CASES)
def test_s01_lag_is_bounded_without_deadlock(algorithm, k, lead, prompts):
  pacing = _pacing(algorithm, k, prompts, lead)
  for seed in _SEEDS:
    done = _Simulation(pacing, seed=seed).run()
    assert max(done.lags) <= pacing.lag_bound
    assert min(done.lags) >= 0


@pytest.mark.parametrize(('algorithm', 'k', 'lead'), _CASES)
def test_s03_generator_stops_at_the_last_visit(algorithm, k, lead):
  pacing = _pacing(algorithm, k, 3, lead)
  for seed in _SEEDS:
    done = _Simulation(pacing, seed=seed).run()
    assert sorted(done.consumed) == list(range(_NUM_UPDATES * 3))
    assert done.num_submitted == _NUM_UPDATES * 3
    assert not done.generate()
    assert not done.complete


@pytest.mark.parametrize('k', [1, 2, 3])
def test_bound_is_reached(k):
  pacing = _pacing('pipeline_rl', k, 2)
  runs = [_Simulation(pacing, seed=seed).run() for seed in _SEEDS]
  assert max(max(run.lags) for run in runs) == pacing.lag_bound == k


@pytest.mark.parametrize('k', [0, 1, 2, 3])
def test_a_generator_one_batch_further_ahead_cannot_keep_the_bound(k):
  """Shows that the simulation finds what rule 1 forbids."""
  pacing = _pacing('pipeline_rl', k, 2)
  looser = dataclasses.replace(pacing, max_lag=k + 1)
  runs = [
    _Simulation(pacing, seed=seed, generator_pacing=looser) for seed in _SEEDS
  ]
  with pytest.raises(AssertionError, match='deadlock'):
    list(map(_Simulation.run, runs))


@pytest.mark.parametrize('seed', _SEEDS)
def test_k_0_is_synchronous(seed):
  pacing = _pacing('pipeline_rl', 0, 3)
  done = _Simulation(pacing, seed=seed).run()
  assert set(done.lags) == {0}
  assert done.consumed == list(range(_NUM_UPDATES * 3))


@pytest.mark.parametrize('seed', _SEEDS)
def test_ppo_phase_is_of_one_version(seed):
  pacing = _pacing('ppo_off_policy', 4, 2)
  done = _Simulation(pacing, seed=seed).run()
  assert done.consumed == list(range(_NUM_UPDATES * 2))
  assert set(done.lags) == {0, 1, 2, 3}


def test_ppo_last_phase_may_be_shorter():
  pacing = _pacing('ppo_off_policy', 8, 2, num_updates=11)
  assert [pacing.max_visits(v) for v in (0, 7, 8, 10)] == [16, 16, 22, 22]
  done = _Simulation(pacing, seed=0).run()
  assert done.num_submitted == 22


@pytest.mark.parametrize(
  ('complete', 'incomplete', 'expected'),
  [
    ({0: 5, 1: 5}, {}, [0, 1]),
    ({3: 5, 1: 4, 2: 5}, {4: 5}, [1, 2]),  # The smallest visits first.
    ({1: 5}, {}, None),  # Less than a batch.
    ({1: 4, 2: 4}, {0: 3}, None),  # 0 would be too old at the next update.
    ({1: 4, 2: 4}, {0: 4}, [1, 2]),
    # Version 4 must be consumed at update 6, which takes only two groups.
    ({1: 5, 2: 5}, {0: 4, 3: 4, 4: 4}, None),
    ({1: 5, 2: 5}, {0: 4, 3: 4, 4: 5}, [1, 2]),
  ],
)
def test_select_waits_for_what_would_grow_too_old(
  complete, incomplete, expected
):
  pacing = _pacing('pipeline_rl', 2, 2)
  got = pacing.select(
    5, complete=complete, incomplete=incomplete, can_generate=True
  )
  assert got == expected


@pytest.mark.parametrize(
  ('can_generate', 'expected'), [(True, None), (False, [0, 1])]
)
def test_lead_keeps_a_batch_in_hand_while_there_is_work(can_generate, expected):
  pacing = _pacing('pipeline_rl', 2, 2, lead=1)
  got = pacing.select(
    0,
    complete={0: 0, 1: 0, 2: 0},
    incomplete={},
    can_generate=can_generate,
  )
  assert got == expected
