import signal
import threading
import time
import types

import jax
import numpy as np
import pytest

from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.pipeline import loop as loop_lib
from scalerl_jax.pipeline import pacing as pacing_lib
from scalerl_jax.pipeline import rollouts
from scalerl_jax.pipeline import trainer as trainer_lib
from scalerl_jax.pipeline import weights as weights_lib
from tests import fakes

_PROMPTS, _GROUP_SIZE = 2, 2
_NUM_PROBLEMS = 5
_SCHEDULES = ('lockstep', 'threads')


class _Run:
  """A loop with its parts in reach."""

  def __init__(
    self,
    schedule,
    *,
    algorithm='pipeline_rl',
    max_lag=2,
    lead=0,
    num_updates=6,
    checkpoint_every=100,
    deadline_s=20.0,
    diverges_at=None,
  ):
    spec = models.ModelSpec(
      vocab_size=4,
      num_layers=1,
      model_dim=4,
      num_heads=1,
      num_kv_heads=1,
      head_dim=4,
      hidden_dim=4,
    )
    self.engine = fakes.FakeEngine()
    self.observer = fakes.FakeObserver()
    self.step = fakes.FakeStep(diverges_at=diverges_at)
    self.trainer = trainer_lib.Trainer(
      fakes.train_state(),
      self.step,
      spec=spec,
      row_multiple=1,
      packed=False,
      max_tokens=64,
      truncated='mask',
      pad_id=0,
      max_nonfinite_streak=2,
    )
    pacing = pacing_lib.Pacing(
      algorithm=algorithm,
      max_lag=max_lag,
      prompts=_PROMPTS,
      num_updates=num_updates,
      lead=lead,
    )
    store = weights_lib.WeightStore(jax.devices()[0])
    store.publish(self.trainer.state.params, 0)
    problems = [
      records.Problem(
        problem_id=str(i), prompt=str(i), answer='', verifier='exact'
      )
      for i in range(_NUM_PROBLEMS)
    ]
    self.producer = rollouts.RolloutProducer(
      self.engine,
      data.PromptSampler(problems, seed=0, max_pass_rate=2.0),
      prompts=[np.array([i], np.int32) for i in range(_NUM_PROBLEMS)],
      problem_ids=[p.problem_id for p in problems],
      group_size=_GROUP_SIZE,
      grade=lambda group, _: group,
      pacing=pacing,
      store=store,
      spec=spec,
    )
    self.loop = loop_lib.Loop(
      producer=self.producer,
      trainer=self.trainer,
      store=store,
      pacing=pacing,
      observer=self.observer,
      schedule=schedule,
      checkpoint_every=checkpoint_every,
      deadline_s=deadline_s,
    )

  def run(self):
    self.loop.run()
    return self


def _generators():
  return [t for t in threading.enumerate() if t.name == 'generator']


@pytest.mark.parametrize(
  ('schedule', 'algorithm', 'max_lag', 'lead'),
  [
    ('lockstep', 'pipeline_rl', 0, 0),
    ('lockstep', 'pipeline_rl', 3, 2),
    ('lockstep', 'ppo_off_policy', 3, 0),
    ('threads', 'pipeline_rl', 0, 0),
    ('threads', 'pipeline_rl', 1, 0),
    ('threads', 'pipeline_rl', 8, 0),
    ('threads', 'ppo_off_policy', 4, 0),
  ],
)
def test_s03_runs_to_the_last_update_and_no_visit_more(
  schedule, algorithm, max_lag, lead
):
  run = _Run(
    schedule, algorithm=algorithm, max_lag=max_lag, lead=lead, num_updates=10
  ).run()
  assert run.trainer.version == 10
  assert run.producer.sampler.num_visits == 10 * _PROMPTS
  assert run.producer.num_buffered == 0
  assert run.engine.num_in_flight == 0
  assert max(row['lag_max'] for row in run.observer.rows) <= max_lag
  assert not _generators()


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_rollouts_that_the_engine_gave_up_cost_only_themselves(schedule):
  run = _Run(schedule, num_updates=4)
  run.engine.gives_up = {0, *range(_PROMPTS, 2 * _PROMPTS)}
  run.run()
  assert run.trainer.version == 4
  lost = [row['num_aborted'] for row in run.observer.rows]
  assert lost[0] == 1
  assert sum(lost) == 1 + _PROMPTS


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_s10_tells_of_every_version_in_order_and_of_0_first(schedule):
  run = _Run(schedule, num_updates=3, checkpoint_every=2).run()
  assert run.observer.events == [
    ('version', 0),
    ('update', 1),
    ('version', 1),
    ('update', 2),
    ('version', 2),
    ('checkpoint', 2),
    ('update', 3),
    ('version', 3),
    ('checkpoint', 3),
  ]
  assert run.engine.num_refreshes == 2


def test_lockstep_is_deterministic():
  one, other = (_Run('lockstep', max_lag=3, lead=1).run() for _ in range(2))
  for a, b in zip(one.step.batches, other.step.batches, strict=True):
    for x, y in zip(a[:-1], b[:-1], strict=True):
      np.testing.assert_array_equal(x, y)


def test_lockstep_lead_makes_lag():
  lags = {
    lead: [
      row['lag_max']
      for row in _Run('lockstep', max_lag=3, lead=lead, num_updates=12)
      .run()
      .observer.rows
    ]
    for lead in (0, 3)
  }
  assert max(lags[3]) > max(lags[0])


def test_failure_of_the_generator_reaches_the_trainer():
  run = _Run('threads')
  run.engine.fails_at = 4
  with pytest.raises(
    loop_lib.GeneratorError, match='the generator failed: the engine broke'
  ) as caught:
    run.run()
  assert isinstance(caught.value.__cause__, RuntimeError)
  assert not _generators()


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_w02_w03_no_batch_within_the_deadline(schedule):
  run = _Run(schedule, deadline_s=0.2)
  run.engine.stalls = True
  with pytest.raises(
    loop_lib.GeneratorError,
    match=r'update 0 waited 0\.2 s for a batch \(0 groups are complete\)',
  ):
    run.run()
  assert not _generators()


def test_w02_w03_generator_that_hangs():
  run = _Run('threads', deadline_s=0.2)
  run.engine.gate.clear()
  start = time.monotonic()
  with pytest.raises(loop_lib.GeneratorError, match='did not return'):
    run.run()
  assert time.monotonic() - start < 5
  run.engine.gate.set()
  for thread in _generators():
    thread.join(5)
  assert not _generators()


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_failure_of_the_observer_stops_the_generator(schedule):
  def fail():
    raise OSError('disk full')

  run = _Run(schedule)
  run.observer.actions['update', 2] = fail
  with pytest.raises(OSError, match='disk full'):
    run.run()
  assert not _generators()


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_ctrl_c_takes_effect_after_the_update_with_a_checkpoint(schedule):
  before = signal.getsignal(signal.SIGINT)
  run = _Run(schedule)
  run.observer.actions['update', 3] = lambda: signal.raise_signal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    run.run()
  assert run.observer.events[-3:] == [
    ('update', 3),
    ('version', 3),
    ('checkpoint', 3),
  ]
  assert signal.getsignal(signal.SIGINT) is before
  assert not _generators()


@pytest.mark.parametrize('schedule', _SCHEDULES)
def test_divergence_stops_with_a_checkpoint(schedule):
  run = _Run(schedule, diverges_at=3)
  with pytest.raises(
    trainer_lib.TrainingDivergedError, match='2 updates in a row'
  ):
    run.run()
  assert run.trainer.version == 4
  assert run.observer.events[-1] == ('checkpoint', 4)
  assert not _generators()


def test_runs_outside_of_the_main_thread():
  run = _Run('threads')
  thread = threading.Thread(target=run.run)
  thread.start()
  thread.join(20)
  assert run.trainer.version == 6


def test_weights_must_be_published_before_they_are_read():
  store = weights_lib.WeightStore(jax.devices()[0])
  with pytest.raises(RuntimeError, match='no weights were published'):
    store.latest()


def test_published_weights_outlive_the_donation_of_the_originals():
  store = weights_lib.WeightStore(jax.devices()[0])
  params = {'w': jax.numpy.arange(3.0)}
  store.publish(params, 1)
  params['w'].delete()
  np.testing.assert_array_equal(store.latest().params['w'], [0.0, 1.0, 2.0])


@pytest.mark.parametrize('is_concurrent', [False, True])
def test_what_a_concurrent_engine_does_between_calls_is_metered(
  monkeypatch, is_concurrent
):
  now = 0.0

  def pump(*, seconds):
    nonlocal now
    step = run.engine.step

    def slow():
      nonlocal now
      now += seconds
      return step()

    run.engine.step = slow
    assert run.producer.pump()
    run.engine.step = step

  run = _Run('lockstep', max_lag=0)
  run.engine.is_concurrent = is_concurrent
  run.engine.stalls = True
  clock = types.SimpleNamespace(monotonic=lambda: now)
  monkeypatch.setattr(rollouts, 'time', clock)
  pump(seconds=1.0)
  now += 10.0  # The trainer is at work,
  now += 100.0  # And an evaluation.
  run.producer.leave_out(100.0)
  pump(seconds=2.0)
  expected = 13.0 if is_concurrent else 3.0
  assert run.producer.meter.generation_seconds == expected
  run.engine.stalls = False
  while run.engine.num_in_flight:
    pump(seconds=0.0)
  now += 1000.0  # There is nothing to generate.
  run.producer.leave_out(0.0)
  assert not run.producer.pump()
  assert run.producer.meter.generation_seconds == expected
