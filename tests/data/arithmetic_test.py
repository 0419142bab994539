import numpy as np
import pytest

from scalerl_jax import data
from scalerl_jax.data import arithmetic
from scalerl_jax.rewards import verifiers

_CHAIN = arithmetic.Chain(4, (('+', 8), ('*', 3), ('-', 9)))


def _problems(split, *, seed=0, num_problems=90):
  return arithmetic.problems(
    split,
    num_problems=num_problems,
    min_operations=2,
    max_operations=4,
    seed=seed,
  )


def _is_worked_right(line):
  left, right = line.split('=')
  value = {
    '+': int(left[0]) + int(left[2:]),
    '-': int(left[0]) - int(left[2:]),
    '*': int(left[0]) * int(left[2:]),
  }[left[1]]
  return value % 10 == int(right)


def test_worked_example():
  assert _CHAIN.prompt == '4+8*3-9='
  assert _CHAIN.lines() == ['4+8=2\n', '2*3=6\n', '6-9=7\n']
  assert _CHAIN.answer == '7'


@pytest.mark.parametrize('num_operations', [2, 5])
def test_solutions_are_right_and_are_rewarded(num_operations):
  rng = np.random.default_rng(0)
  split = arithmetic.Split.WARM_START
  for _ in range(20):
    chain = arithmetic.draw(rng, split, num_operations=num_operations)
    text = ''.join(arithmetic.worked_solution(rng, chain, phrase=None))
    assert all(map(_is_worked_right, map(str.strip, chain.lines())))
    assert len(chain.lines()) == num_operations
    assert verifiers.VERIFIERS['integer'].reward(text, chain.answer) == 1


def test_interrupted_solution_still_answers():
  rng = np.random.default_rng(0)
  for _ in range(20):
    head, phrase, tail = arithmetic.worked_solution(
      rng, _CHAIN, phrase='stop</think>'
    )
    full = '<think>' + ''.join(_CHAIN.lines())
    assert full.startswith(head)
    assert '<think>' in head
    assert len(head) < len(full)
    assert (phrase, tail) == ('stop</think>', '7<end>')


def test_splits_are_disjoint_and_exhaustive():
  assert sorted(r for s in arithmetic.Split for r in s.value) == list(range(10))
  train, held_out = (
    _problems(arithmetic.Split.TRAIN),
    _problems(arithmetic.Split.HELD_OUT, seed=1),
  )
  data.check_disjoint(train, held_out)
  for p in held_out:
    assert arithmetic.split_of(p.prompt) is arithmetic.Split.HELD_OUT


def test_warm_start_never_draws_a_held_out_problem():
  rng = np.random.default_rng(0)
  held_out = {p.prompt for p in _problems(arithmetic.Split.HELD_OUT)}
  drawn = {
    arithmetic.draw(
      rng, arithmetic.Split.WARM_START, num_operations=2 + i % 3
    ).prompt
    for i in range(300)
  }
  assert not held_out & drawn


def test_problems_are_distinct_interleaved_and_reproducible():
  problems = _problems(arithmetic.Split.TRAIN)
  assert len({p.prompt for p in problems}) == len(problems) == 90
  lengths = [sum(c in '+-*' for c in p.prompt) for p in problems]
  assert lengths == [2, 3, 4] * 30
  assert problems == _problems(arithmetic.Split.TRAIN)
  assert problems != _problems(arithmetic.Split.TRAIN, seed=1)


def test_written_file_is_read_back(tmp_path):
  problems = _problems(arithmetic.Split.TRAIN, num_problems=9)
  arithmetic.write_jsonl(tmp_path / 'train.jsonl', problems)
  assert data.read_problems(tmp_path / 'train.jsonl') == problems
  assert [p.name for p in tmp_path.iterdir()] == ['train.jsonl']


@pytest.mark.parametrize(('low', 'high'), [(1, 3), (4, 3)])
def test_bad_difficulties_are_refused(low, high):
  with pytest.raises(ValueError, match='min_operations'):
    arithmetic.problems(
      arithmetic.Split.TRAIN,
      num_problems=1,
      min_operations=low,
      max_operations=high,
      seed=0,
    )
