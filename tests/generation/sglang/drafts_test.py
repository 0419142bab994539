"""Rollouts that are put together from answers, against the plain loop."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax import length_control
from scalerl_jax import records
from scalerl_jax.generation.sglang import drafts
from tests.reference import interruption as reference

STOP = 1
RULE = length_control.Interruption(
  min_tokens=1, max_tokens=8, phrase_ids=(7, STOP, 3), answer_tokens=4
)
# The thinking ends with 4 or 5, and then 6.
LONG_END = dataclasses.replace(RULE, end_ids=((4, 5), (6,)))


def append(draft, tokens, *, version=0):
  n = len(tokens)
  # The experts of a token are its number in the response.
  read = range(draft.num_routed, len(draft.token_ids) + n)
  draft.append(
    np.array(tokens, np.int32),
    np.full(n, -0.5, np.float32),
    [version] * n,
    np.array([[[i, i]] for i in read], np.int32),
  )


def played(rule, budget, policy, *, chunk=100, max_tokens=20):
  """Serves a draft from what the policy would sample, `chunk` at a time."""
  draft = drafts.RolloutDraft(
    stop_ids=(STOP,),
    max_tokens=max_tokens,
    rule=rule,
    budget=budget,
    routing=(1, 2),
  )
  sampled = 0  # Of the policy's tokens: those that are kept.
  asked = []
  while draft.num_wanted:
    asked.append(draft.num_wanted)
    given = policy[sampled : sampled + min(draft.num_wanted, chunk)]
    if STOP in given:
      given = given[: given.index(STOP) + 1]
    assert given, 'it asked for more than the policy has'
    append(draft, given, version=len(asked))
    sampled = sum(draft._sampled)
  return draft.rollout(), asked


@pytest.mark.parametrize('rule', [RULE, LONG_END])
@pytest.mark.parametrize('chunk', [1, 3, 100])
def test_it_is_the_rollout_of_one_token_at_a_time(rule, chunk):
  rng = np.random.default_rng(0)
  reasons = set()
  for _ in range(300):
    budget = int(rng.integers(1, 9))
    policy = rng.choice([2, 3, 4, 5, 6, 9], 20).tolist()
    if rng.random() < 0.5:
      policy[int(rng.integers(0, 12))] = STOP
    tokens, exhausted = reference.play(rule, budget, policy)
    if (STOP, False) in tokens:  # Which the loop knows nothing of.
      tokens = tokens[: tokens.index((STOP, False)) + 1]
    found, _ = played(rule, budget, policy, chunk=chunk)
    assert found.token_ids.tolist() == [t for t, _ in tokens]
    experts = [[[i, i]] for i in range(len(tokens))]
    assert found.routed_experts.tolist() == experts
    assert found.sampled.tolist() == [not forced for _, forced in tokens]
    stopped = found.sampled[-1] and found.token_ids[-1] == STOP
    assert stopped or exhausted
    assert (found.finish_reason is records.FinishReason.STOP) == stopped
    reasons.add((found.finish_reason, found.is_interrupted))
  assert len(reasons) == 4


def test_k09_the_phrase_has_no_logp_and_the_version_before_it():
  found, asked = played(RULE, 2, [2, 2, 9, 9, STOP])
  assert asked == [2, 4]
  assert found.token_ids.tolist() == [2, 2, 7, STOP, 3, 9, 9, STOP]
  np.testing.assert_array_equal(
    found.logps, np.float32([-0.5] * 2 + [0] * 3 + [-0.5] * 3)
  )
  assert found.policy_versions.tolist() == [1, 1, 1, 1, 1, 2, 2, 2]
  assert found.finish_reason is records.FinishReason.STOP


def test_what_is_sampled_beyond_the_answer_is_cut_off():
  # The thinking ends at once; six of the eight tokens are no longer wanted.
  found, asked = played(RULE, 8, [2, 3, 9, 9, 9, 9, 9, 9])
  assert asked == [8]
  assert found.token_ids.tolist() == [2, 3, 9, 9, 9, 9]
  assert found.is_truncated
  assert not found.is_interrupted


def test_k08_what_was_aborted_goes_on_with_what_it_has():
  found, asked = played(None, 0, [2, 2, 2, 2, 9, 9], chunk=2, max_tokens=6)
  assert asked == [6, 4, 2]
  assert found.policy_versions.tolist() == [1, 1, 2, 2, 3, 3]
  assert found.is_truncated


def test_an_abandoned_rollout_keeps_what_it_has():
  draft = drafts.RolloutDraft(stop_ids=(STOP,), max_tokens=6)
  append(draft, [2, 4])
  draft.abandon()
  assert draft.num_wanted == 0
  assert draft.rollout().finish_reason is records.FinishReason.ABORTED
  assert draft.rollout().token_ids.tolist() == [2, 4]


def test_more_tokens_than_were_asked_for_are_refused():
  draft = drafts.RolloutDraft(stop_ids=(STOP,), max_tokens=2)
  with pytest.raises(ValueError, match='3 tokens came where 2'):
    append(draft, [2, 2, 2])


def test_m04_experts_that_are_not_told_are_unknown():
  draft = drafts.RolloutDraft(
    stop_ids=(STOP,), max_tokens=9, rule=RULE, budget=2, routing=(1, 2)
  )
  append(draft, [4, 5])  # The phrase follows.
  assert draft.num_routed == 2
  logps = np.zeros(1, np.float32)
  draft.append(np.array([2], np.int32), logps, [0], None)
  assert draft.num_routed == 2 + 3 + 1
  append(draft, [2])
  draft.abandon()
  found = draft.rollout().routed_experts[:, 0, 0]
  assert found.tolist() == [0, 1, -1, -1, -1, -1, 6]


def test_m04_experts_of_too_few_tokens_are_refused():
  draft = drafts.RolloutDraft(stop_ids=(STOP,), max_tokens=9, routing=(1, 2))
  one = np.zeros((1, 1, 2), np.int32)
  logps = np.zeros(2, np.float32)
  with pytest.raises(ValueError, match='of 1 tokens came where 2 were asked'):
    draft.append(np.array([4, 5], np.int32), logps, [0, 0], one)
