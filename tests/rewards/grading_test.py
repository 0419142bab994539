import numpy as np

from scalerl_jax import data
from scalerl_jax import records
from scalerl_jax import rewards

_TOKENIZER = data.ByteTokenizer()
_PROBLEM = records.Problem(
  problem_id='a', prompt='3+4=', answer='7', verifier='integer'
)


def _rollout(text, reason=records.FinishReason.STOP):
  ids = np.array(_TOKENIZER.encode(text), np.int32)
  return records.Rollout(
    token_ids=ids,
    logps=np.zeros(len(ids), np.float32),
    policy_versions=np.zeros(len(ids), np.int32),
    sampled=np.ones(len(ids), bool),
    finish_reason=reason,
  )


def _group(*rollouts):
  request = records.Request(
    visit=0,
    problem_id='a',
    prompt_ids=np.array(_TOKENIZER.encode('3+4='), np.int32),
    num_samples=len(rollouts),
  )
  return records.RolloutGroup(
    request=request, rollouts=rollouts, admitted_version=0
  )


def _rewards(group, *, problem=_PROBLEM, decode=_TOKENIZER.decode):
  graded = rewards.grade(group, problem, decode=decode)
  return [r.reward for r in graded.rollouts]


def test_rewards_in_sample_order():
  group = _group(
    _rollout('</think>7<end>'), _rollout('</think>8<end>'), _rollout('7')
  )
  assert _rewards(group) == [1, -1, -1]
  assert [r.reward for r in group.rollouts] == [None] * 3


def test_aborted_is_unscored_and_truncated_is_graded():
  group = _group(
    _rollout('</think>7<end>', records.FinishReason.ABORTED),
    _rollout('</think>7', records.FinishReason.LENGTH),
  )
  assert _rewards(group) == [None, 1]


def test_v04_exception_costs_one_rollout_and_is_logged(caplog):
  def decode(ids):
    if len(ids) == 1:
      raise RuntimeError('broken')
    return _TOKENIZER.decode(ids)

  group = _group(_rollout('7'), _rollout('</think>7<end>'))
  assert _rewards(group, decode=decode) == [None, 1]
  assert 'problem a: verifier failed' in caplog.text
