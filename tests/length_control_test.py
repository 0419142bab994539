import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import length_control
from tests.reference import interruption as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')

END = 9
RULE = length_control.Interruption(
  min_tokens=2, max_tokens=4, phrase_ids=(7, 8, END), answer_tokens=3
)


def play(rule, budgets, samples):
  """Plays N slots in step; returns per slot (tokens, ran out of budget)."""
  state = rule.init(jnp.asarray(budgets, jnp.int32))
  slots = [([], iter(s)) for s in samples]
  done = [None] * len(slots)
  advance = jax.jit(rule.advance)
  while any(d is None for d in done):
    token, is_forced = rule.forced_token(state)
    out = np.array(token)
    for i, (tokens, source) in enumerate(slots):
      if not is_forced[i]:
        sample = next(source, None)
        if sample is None and done[i] is None:
          done[i] = (tokens, False)
        out[i] = 0 if sample is None else sample
      if done[i] is None:
        tokens.append((int(out[i]), bool(is_forced[i])))
    state = advance(state, jnp.asarray(out), is_forced)
    for i, over in enumerate(rule.exhausted(state).tolist()):
      if over and done[i] is None:
        done[i] = (slots[i][0], True)
  return done


def plain(*tokens):
  return [(t, False) for t in tokens]


PHRASE = [(7, True), (8, True), (END, True)]


def test_interruption_by_hand():
  ended, interrupted, unfinished = play(
    RULE, [4, 2, 3], [[1, END, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2]]
  )
  # The policy ends its thinking itself, then has 3 tokens.
  assert ended == (plain(1, END, 2, 3, 4), True)
  # Two tokens of thinking, the phrase, 3 tokens of answer.
  assert interrupted == ([*plain(1, 2), *PHRASE, *plain(3, 4, 5)], True)
  # It stopped before any budget ran out.
  assert unfinished == (plain(1, 2), False)


def test_thinking_that_ends_on_the_last_token_of_the_budget_is_not_forced():
  (result,) = play(RULE, [3], [[1, 2, END, 4]])
  assert result == (plain(1, 2, END, 4), False)


def test_phrase_tokens_in_the_sample_are_not_the_end_of_thinking():
  (result,) = play(RULE, [4], [[7, 8, 7, 8, 1]])
  assert result == ([*plain(7, 8, 7, 8), *PHRASE, *plain(1)], False)


def test_end_of_thinking_within_the_answer_changes_nothing():
  (result,) = play(RULE, [2], [[END, END, END, 5, 6]])
  assert result == (plain(END, END, END, 5), True)


@pytest.mark.parametrize('budget', [2, 3, 4])
def test_every_short_rollout_equals_reference(budget):
  # All strings over {other, part of the phrase, end} up to 6 tokens.
  samples = [
    list(s)
    for size in (0, 1, 3, 6)
    for s in itertools.product((1, 7, END), repeat=size)
  ]
  actual = play(RULE, [budget] * len(samples), samples)
  expected = [reference.play(RULE, budget, s) for s in samples]
  assert actual == expected


@pytest.mark.parametrize('phrase', [(END,), (7, END), (END, END)])
def test_phrases_of_other_lengths_equal_reference(phrase):
  rule = length_control.Interruption(1, 2, phrase, 1)
  samples = [list(s) for s in itertools.product((1, END), repeat=4)]
  for budget in (1, 2):
    assert play(rule, [budget] * 16, samples) == [
      reference.play(rule, budget, s) for s in samples
    ]


def test_an_end_of_several_tokens_equals_reference():
  ends = ((8, 7), (9,), (END,))
  rule = length_control.Interruption(2, 4, (7, 8), 2, end_ids=ends)
  samples = [
    list(s)
    for size in (3, 5)
    for s in itertools.product((7, 8, 9, END), repeat=size)
  ]
  actual = play(rule, [4] * len(samples), samples)
  assert actual == [reference.play(rule, 4, s) for s in samples]
  for begin in (7, 8):
    sample = [8, begin, 9, END, 1]
    assert play(rule, [4], [sample])[0][0] == plain(*sample)


def test_slots_do_not_depend_on_one_another():
  samples = [[1, END, 2], [1, 2, 3, 4], [END], [1, 1, 1, 1, 1]]
  budgets = [4, 2, 3, 2]
  together = play(RULE, budgets, samples)
  alone = [
    play(RULE, [b], [s])[0] for b, s in zip(budgets, samples, strict=True)
  ]
  assert together == alone


def test_k09_forced_tokens_are_marked_and_counted_apart():
  ((tokens, _),) = play(RULE, [2], [[1, 2, 3, 4, 5]])
  sampled = [t for t, is_forced in tokens if not is_forced]
  assert sampled == [1, 2, 3, 4, 5]


def test_k11_answer_budget_holds_after_a_forced_end():
  # The policy goes on thinking in its answer; it gets 3 tokens and no more.
  ((tokens, is_over),) = play(RULE, [2], [[1] * 100])
  assert is_over
  assert len(tokens) == 2 + 3 + 3


def test_max_response_tokens_is_reached_and_never_exceeded():
  samples = [[1] * 100, [1, END] + [1] * 100, [1] * 3 + [END] + [1] * 100]
  lengths = [len(t) for t, _ in play(RULE, [4, 4, 4], samples)]
  assert max(lengths) == RULE.max_response_tokens == 4 + 3 + 3


def test_rule_compiles_once_whatever_the_state():
  state = RULE.init(jnp.asarray([2, 3], jnp.int32))
  advance = jax.jit(RULE.advance)
  for _ in range(10):
    token, is_forced = RULE.forced_token(state)
    state = advance(state, token, is_forced)
  assert advance._cache_size() == 1


def test_state_works_in_a_scan():
  def step(state, sample):
    token, is_forced = RULE.forced_token(state)
    token = jnp.where(is_forced, token, sample)
    return RULE.advance(state, token, is_forced), token

  state = RULE.init(jnp.asarray([2], jnp.int32))
  samples = jnp.ones((8, 1), jnp.int32)
  _, tokens = jax.lax.scan(step, state, samples)
  assert tokens[:, 0].tolist() == [1, 1, 7, 8, END, 1, 1, 1]


def test_budgets_are_uniform_over_the_inclusive_range():
  uniform = (jnp.arange(3000, dtype=jnp.float32) + 0.5) / 3000
  budget = RULE.draw_budget(uniform)
  assert budget.dtype == jnp.int32
  values, counts = np.unique(np.asarray(budget), return_counts=True)
  assert values.tolist() == [2, 3, 4]
  assert counts.tolist() == [1000, 1000, 1000]


def test_budgets_stay_in_range_at_the_ends_of_the_unit_interval():
  rule = length_control.Interruption(10240, 12288, (END,), 2048)
  ends = jnp.asarray([0.0, np.nextafter(np.float32(1), np.float32(0))])
  assert rule.draw_budget(ends).tolist() == [10240, 12288]
  fixed = length_control.Interruption(5, 5, (END,), 1)
  assert fixed.draw_budget(ends).tolist() == [5, 5]


def test_interruption_is_hashable_and_static_under_jit():
  same = length_control.Interruption(2, 4, (7, 8, END), 3)
  assert hash(same) == hash(RULE)
  assert same == RULE
  init = jax.jit(lambda rule, b: rule.init(b), static_argnums=0)
  init(RULE, jnp.ones(2, jnp.int32))
  init(same, jnp.ones(2, jnp.int32))
  assert init._cache_size() == 1


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'min_tokens': 0}, 'min_tokens=0'),
    ({'min_tokens': 5}, 'min_tokens=5'),
    ({'phrase_ids': ()}, 'phrase_ids='),
    ({'phrase_ids': [7, END]}, 'must be a tuple'),
    ({'phrase_ids': (7, -1)}, 'not be negative'),
    ({'answer_tokens': 0}, 'answer_tokens=0'),
    ({'end_ids': ((3, 5), (4, 5))}, 'end_ids='),
  ],
)
def test_interruption_of_impossible_budgets_is_an_error(change, message):
  args = {
    'min_tokens': 2,
    'max_tokens': 4,
    'phrase_ids': (7, END),
    'answer_tokens': 3,
  }
  with pytest.raises(ValueError, match=message):
    length_control.Interruption(**{**args, **change})


# The overlong penalty.


def penalty(*num_tokens, max_tokens=14, tolerance_tokens=2):
  return length_control.overlong_penalty(
    jnp.asarray(num_tokens, jnp.int32),
    max_tokens=max_tokens,
    tolerance_tokens=tolerance_tokens,
  )


def test_overlong_penalty_by_hand():
  # The paper's numbers in thousands: 0 up to 12, -1 from 14 on.
  np.testing.assert_allclose(
    penalty(0, 11, 12, 13, 14, 15, 99), [0, 0, 0, -0.5, -1, -1, -1]
  )


def test_overlong_penalty_equals_reference():
  tokens = range(0, 200, 3)
  expected = [min(max((120 - n) / 40 - 1, -1.0), 0.0) for n in tokens]
  actual = penalty(*tokens, max_tokens=120, tolerance_tokens=40)
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_overlong_penalty_never_grows_with_length():
  values = np.asarray(penalty(*range(40), max_tokens=30, tolerance_tokens=7))
  assert (np.diff(values) <= 0).all()
  assert values.dtype == np.float32


@pytest.mark.parametrize('tolerance_tokens', [0, -1, 15])
def test_overlong_penalty_of_an_impossible_slope_is_an_error(tolerance_tokens):
  with pytest.raises(ValueError, match='tolerance_tokens='):
    penalty(1, tolerance_tokens=tolerance_tokens)
