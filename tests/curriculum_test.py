import numpy as np
import pytest

from scalerl_jax import curriculum


def visited(*visits, num_problems=3):
  """`visits`: (problem, correct, scored, epoch)."""
  state = curriculum.init(num_problems)
  for problem, correct, scored, epoch in visits:
    state = curriculum.update(
      state,
      problem,
      num_correct=correct,
      num_scored=scored,
      epoch=epoch,
    )
  return state


def active(state, epoch, **kwargs):
  return curriculum.active(state, epoch=epoch, **kwargs).tolist()


def test_unvisited_problems_are_active():
  state = curriculum.init(3)
  assert np.isnan(state.last_pass_rate).all()
  assert active(state, 0) == [True] * 3
  assert active(state, 5) == [True] * 3


@pytest.mark.parametrize(
  ('correct', 'scored', 'leaves'),
  [
    (16, 16, True),
    (15, 16, True),  # .9375
    (14, 16, False),  # .875
    (9, 10, True),  # Exactly .9: at least is enough.
    (0, 16, False),
    (1, 1, True),
  ],
)
def test_solved_problems_leave_by_hand(correct, scored, leaves):
  state = visited((1, correct, scored, 0))
  assert active(state, 1) == [True, not leaves, True]


def test_problems_leave_from_the_next_epoch_on_and_stay_out():
  state = visited((0, 16, 16, 2))
  assert active(state, 2) == [True, True, True]
  assert active(state, 3) == [False, True, True]
  assert active(state, 100) == [False, True, True]


def test_last_visit_counts_and_not_the_history():
  state = visited((0, 4, 16, 0), (0, 16, 16, 1), (1, 16, 16, 0), (1, 4, 16, 1))
  assert active(state, 2) == [False, True, True]


def test_visits_that_complete_out_of_order_do_not_bring_a_problem_back():
  # The visit of epoch 0 was slow; that of epoch 1 is the last one.
  state = visited((0, 16, 16, 1), (0, 4, 16, 0))
  assert state.last_visit_epoch[0] == 1
  assert active(state, 2) == [False, True, True]


def test_visit_without_scored_rollouts_teaches_nothing():
  before = visited((0, 16, 16, 0))
  after = curriculum.update(before, 0, num_correct=0, num_scored=0, epoch=1)
  assert after is before


def test_only_scored_rollouts_count():
  # 9 of the 10 that were scored, whatever the group size was.
  assert active(visited((0, 9, 10, 0)), 1)[0] is False


def test_update_is_pure():
  before = curriculum.init(2)
  after = curriculum.update(before, 1, num_correct=1, num_scored=2, epoch=0)
  assert np.isnan(before.last_pass_rate).all()
  assert after.last_pass_rate[1] == 0.5
  assert after.last_visit_epoch.tolist() == [-1, 0]


def test_threshold():
  state = visited((0, 8, 16, 0), (1, 16, 16, 0))
  assert active(state, 1, threshold=0.5) == [False, False, True]
  assert active(state, 1, threshold=1.0) == [True, False, True]


def test_threshold_above_one_disables():
  assert active(visited((0, 16, 16, 0)), 1, threshold=1.01) == [True] * 3


def test_active_equals_a_loop_over_the_visits():
  rng = np.random.default_rng(0)
  visits, last = [], {}
  for epoch in range(4):
    for problem in rng.permutation(30)[:20].tolist():
      correct = int(rng.integers(0, 17))
      visits.append((problem, correct, 16, epoch))
      last[problem] = correct / 16
  expected = [last.get(p, 0.0) < 0.9 for p in range(30)]
  assert active(visited(*visits, num_problems=30), 4) == expected
  assert not all(expected)


@pytest.mark.parametrize('problem', [-1, 3])
def test_unknown_problem_is_an_error(problem):
  with pytest.raises(ValueError, match=r'problem_index=.* \[0, 3\)'):
    visited((problem, 1, 2, 0))


@pytest.mark.parametrize(('correct', 'scored'), [(3, 2), (-1, 2), (1, 0)])
def test_counts_that_cannot_be_are_an_error(correct, scored):
  with pytest.raises(ValueError, match='num_correct='):
    visited((0, correct, scored, 0))
