import copy

import pytest

from scalerl_jax import data
from scalerl_jax import records


def _problems(n, prefix='p'):
  return [
    records.Problem(
      problem_id=f'{prefix}{i}',
      prompt=f'{prefix}{i}=',
      answer='1',
      verifier='integer',
    )
    for i in range(n)
  ]


def _sampler(n=7, *, seed=3, max_pass_rate=0.9, prefix='p'):
  return data.PromptSampler(
    _problems(n, prefix), seed=seed, max_pass_rate=max_pass_rate
  )


def _draw(sampler, n, *, solved=()):
  """Draws and records visits; problems in `solved` are always right."""
  visits = []
  for _ in range(n):
    visits.append(visit := sampler.next())
    right = 4 if visit.problem_index in solved else 1
    sampler.record(visit, num_correct=right, num_scored=4)
  return visits


def test_every_epoch_visits_every_problem_once_in_its_own_order():
  visits = _draw(_sampler(), 14)
  orders = [[v.problem_index for v in visits if v.epoch == e] for e in (0, 1)]
  assert [sorted(o) for o in orders] == [list(range(7))] * 2
  assert orders[0] != orders[1]
  assert [v.number for v in visits] == list(range(14))


def test_order_depends_on_the_seed_alone():
  assert _draw(_sampler(), 20) == _draw(_sampler(), 20)
  assert _draw(_sampler(), 20) != _draw(_sampler(seed=4), 20)


def test_solved_problems_leave_the_later_epochs():
  visits = _draw(_sampler(), 7 + 5, solved={2, 5})
  assert {v.problem_index for v in visits[:7]} == set(range(7))
  assert {v.problem_index for v in visits[7:]} == {0, 1, 3, 4, 6}


def test_nothing_left_is_a_clear_error():
  sampler = _sampler(2)
  _draw(sampler, 2, solved={0, 1})
  with pytest.raises(data.DataError, match='all 2 training problems'):
    sampler.next()


@pytest.mark.parametrize('cut', [0, 1, 5, 7, 8, 13])
def test_r04_position_is_counted_in_prompts(cut):
  # Cuts fall inside and at the end of epochs, whatever the batch.
  whole = _draw(_sampler(), 20, solved={1})
  first, second = _sampler(), _sampler()
  head = _draw(first, cut, solved={1})
  second.load_state(copy.deepcopy(first.state()))
  assert head + _draw(second, 20 - cut, solved={1}) == whole


def test_r02_state_is_restored_before_the_first_visit():
  first, second = _sampler(), _sampler()
  _draw(first, 9)
  second.load_state(first.state())
  assert second.num_visits == 9
  assert second.next().number == 9


def test_r10_pass_rates_are_restored_with_the_position():
  first = _sampler()
  _draw(first, 7, solved={0, 4})
  second = _sampler()
  second.load_state(copy.deepcopy(first.state()))
  second.next()
  assert second.num_active == 5


def test_state_does_not_change_with_the_sampler():
  sampler = _sampler()
  _draw(sampler, 3)
  state = sampler.state()
  before = copy.deepcopy(state)
  _draw(sampler, 11, solved={0})
  assert str(state) == str(before)


def test_r03_other_problems_are_refused():
  state = _sampler().state()
  with pytest.raises(data.DataError, match='problems changed'):
    _sampler(prefix='q').load_state(state)


def test_late_result_of_an_earlier_epoch_changes_nothing():
  sampler = _sampler(1, max_pass_rate=0.9)
  early, late = sampler.next(), sampler.next()
  assert (early.epoch, late.epoch) == (0, 1)
  sampler.record(late, num_correct=0, num_scored=4)
  sampler.record(early, num_correct=4, num_scored=4)
  assert sampler.next().epoch == 2
