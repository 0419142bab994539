import dataclasses
import json
import math

import numpy as np
import pytest

from scalerl_jax import evaluation
from scalerl_jax import records


def _group(visit, rewards, *, version=3, truncated=0, interrupted=0):
  rollouts = []
  for i, reward in enumerate(rewards):
    stop, length = records.FinishReason.STOP, records.FinishReason.LENGTH
    rollouts.append(
      records.Rollout(
        token_ids=np.array([1, 2, 3], np.int32),
        logps=np.zeros(3, np.float32),
        policy_versions=np.full(3, version, np.int32),
        sampled=np.array([True, i >= interrupted, True]),
        finish_reason=length if i < truncated else stop,
        reward=reward,
      )
    )
  request = records.Request(
    visit=visit,
    problem_id=str(visit),
    prompt_ids=np.array([1], np.int32),
    num_samples=len(rewards),
  )
  return records.RolloutGroup(
    request=request, rollouts=tuple(rollouts), admitted_version=version
  )


def _summarize(*groups):
  return evaluation.summarize(
    groups, step=3, policy_version=3, device_hours=0.5, flops=2e9, tokens=10
  )


def test_hand_values():
  point = _summarize(
    _group(0, [1.0, 1.0, 1.0, -1.0], truncated=1, interrupted=2),
    _group(1, [-1.0, -1.0, -1.0, 1.0]),
  )
  assert point.pass_rate == pytest.approx(0.5)
  # The problems' means are 3/4 and 1/4: std √(1/8), over √2.
  assert point.pass_rate_stderr == pytest.approx(0.25)
  assert point.truncated_fraction == pytest.approx(1 / 8)
  assert point.interrupted_fraction == pytest.approx(2 / 8)
  assert point.mean_tokens == pytest.approx((2 * 2 + 6 * 3) / 8)
  assert (point.num_problems, point.samples_per_problem) == (2, 4)
  assert (point.step, point.device_hours, point.tokens) == (3, 0.5, 10)


def test_error_is_clustered_by_problem():
  # Identical samples of a problem add no information.
  few = _summarize(_group(0, [1.0]), _group(1, [-1.0]))
  many = _summarize(_group(0, [1.0] * 16), _group(1, [-1.0] * 16))
  assert few.pass_rate_stderr == pytest.approx(many.pass_rate_stderr)


def test_unscored_samples_are_counted_and_excluded():
  point = _summarize(
    _group(0, [1.0, None]), _group(1, [None, None]), _group(2, [-1.0, 1.0])
  )
  assert point.pass_rate == pytest.approx(0.75)
  assert (point.num_problems, point.num_unscored) == (2, 3)


def test_one_problem_has_no_error_estimate():
  point = _summarize(_group(0, [1.0, -1.0]))
  assert point.pass_rate_stderr is None
  row = json.loads(json.dumps(dataclasses.asdict(point)))
  assert row['pass_rate_stderr'] is None
  assert not any(isinstance(v, float) and math.isnan(v) for v in row.values())


def test_tokens_of_another_version_are_refused():
  with pytest.raises(ValueError, match=r'version 3 .* \[2\]'):
    _summarize(_group(0, [1.0, 1.0], version=2))


def test_nothing_scored_is_refused():
  with pytest.raises(ValueError, match='scored'):
    _summarize(_group(0, [None, None]))
