"""Grading of complete groups; whatever cannot be graded stays unscored."""

from collections.abc import Callable, Sequence
import dataclasses
import logging

from scalerl_jax import records
from scalerl_jax.rewards import verifiers

_log = logging.getLogger(__name__)


def grade(
  group: records.RolloutGroup,
  problem: records.Problem,
  *,
  decode: Callable[[Sequence[int]], str],
) -> records.RolloutGroup:
  """Gives every rollout of a group its reward.

  Args:
    group: A complete group.
    problem: The problem that it visited.
    decode: Token ids → text.

  Returns:
    The group with rewards; None (unscored) for aborted rollouts and where the
    verifier failed, which is logged and later counted, never taken for 0.
  """
  verifier = verifiers.VERIFIERS[problem.verifier]

  def one(rollout: records.Rollout) -> records.Rollout:
    if rollout.finish_reason is records.FinishReason.ABORTED:
      return dataclasses.replace(rollout, reward=None)
    try:
      text = decode(rollout.token_ids.tolist())
      reward = verifier.reward(text, problem.answer)
    except Exception:
      # A verifier is a user's code: whatever it raises costs one rollout.
      _log.exception('problem %s: verifier failed', problem.problem_id)
      return dataclasses.replace(rollout, reward=None)
    return dataclasses.replace(rollout, reward=reward)

  return dataclasses.replace(group, rollouts=tuple(map(one, group.rollouts)))
