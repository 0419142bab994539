import contextlib

import pytest
from tensorboard.backend.event_processing import event_accumulator

from scalerl_jax.build import recorder as recorder_lib
from tests import tiny


def life(workdir, steps, *, state=None, truncated=lambda step: 0.0):
  """Writes updates as a run does; returns the state after each."""
  recorder = recorder_lib.Recorder(
    workdir, tiny.config(reporting={'tensorboard': True}), decode=str
  )
  with contextlib.closing(recorder):
    if state is None:
      recorder.reset()
    else:
      recorder.load_state(state)
    recorder.start(steps[0] - 1)
    states = []
    for step in steps:
      recorder.on_update(
        {
          'step': step,
          'pass_rate_train': step / 8,
          'tokens_per_s': 1.0,
          'lag_mean': 0.0,
          'truncated_fraction': truncated(step),
          'interrupted_fraction': 0.0,
        }
      )
      states.append(recorder.state())
  return states


@pytest.mark.parametrize('saved', [1, 2, 3])
def test_a_resumed_run_leaves_no_gap_and_no_double(tmp_path, saved):
  states = life(tmp_path, [1, 2, 3, 4])
  life(tmp_path, range(saved + 1, 7), state=states[saved - 1])
  rows = tiny.rows(tmp_path, 'metrics')
  assert [row['step'] for row in rows] == [1, 2, 3, 4, 5, 6]
  board = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  shown = board.Reload().Scalars('pass_rate_train')
  assert [(e.step, e.value) for e in shown] == [
    (step, step / 8) for step in range(1, 7)
  ]


def test_a_run_without_a_checkpoint_starts_anew(tmp_path):
  life(tmp_path, [1, 2, 3])
  life(tmp_path, [1, 2])
  assert [r['step'] for r in tiny.rows(tmp_path, 'metrics')] == [1, 2]
  board = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  shown = board.Reload().Scalars('pass_rate_train')
  assert [e.step for e in shown] == [1, 2]


@pytest.mark.parametrize(
  ('truncated', 'told'),
  [
    (lambda step: 0.2, 1),
    (lambda step: 0.15, 0),
    (lambda step: 0.2 if step % 10 else 0.0, 0),
  ],
)
def test_k13_many_truncated_rollouts_are_warned_of(
  tmp_path, caplog, truncated, told
):
  life(tmp_path, range(1, 31), truncated=truncated)
  warnings = [r for r in caplog.records if r.levelname == 'WARNING']
  assert len(warnings) == told
  assert all('15% of the rollouts' in r.getMessage() for r in warnings)
