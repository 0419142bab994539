"""Held-out evaluation: one point of the compute-performance curve."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from scalerl_jax import records

__all__ = ('EvalPoint', 'summarize')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
  """One evaluation, as a row of `evals.jsonl`.

  Attributes:
    step: Updates done.
    policy_version: Version of the weights that generated.
    device_hours: Devices × wall time of generation and training so far.
    flops: FLOPs of generation and training so far.
    tokens: Tokens sampled for training so far.
    pass_rate: Mean over problems of the fraction of correct samples.
    pass_rate_stderr: Standard error, clustered by problem; None for one.
    num_problems: Problems with at least one scored sample.
    samples_per_problem: Samples drawn per problem.
    truncated_fraction: Samples that ended on a token budget.
    interrupted_fraction: Samples that had the phrase forced.
    num_unscored: Samples without a reward; they are in no other figure.
    mean_tokens: Mean sampled tokens of a sample.
  """

  step: int
  policy_version: int
  device_hours: float
  flops: float
  tokens: int
  pass_rate: float
  pass_rate_stderr: float | None
  num_problems: int
  samples_per_problem: int
  truncated_fraction: float
  interrupted_fraction: float
  num_unscored: int
  mean_tokens: float


def summarize(
  groups: Sequence[records.RolloutGroup],
  *,
  step: int,
  policy_version: int,
  device_hours: float,
  flops: float,
  tokens: int,
) -> EvalPoint:
  """Summarizes graded groups of held-out problems.

      pass rate = mean_i pᵢ,   stderr = std(pᵢ, ddof=1) / √n

  Samples of a problem are not independent, so the error is that of the n
  problems' means pᵢ.

  Args:
    groups: Graded groups, one per problem.
    step: Updates done.
    policy_version: Version that generated; all tokens must have it.
    device_hours: Spent so far, evaluation excluded.
    flops: Spent so far, evaluation excluded.
    tokens: Spent so far, evaluation excluded.

  Returns:
    The point.

  Raises:
    ValueError: A token has another version, or nothing was scored.
  """
  rollouts = [r for g in groups for r in g.rollouts]
  for r in rollouts:
    if (r.policy_versions != policy_version).any():
      raise ValueError(
        f'evaluation of version {policy_version} holds tokens of versions'
        f' {sorted(set(r.policy_versions.tolist()))}'
      )
  per_problem = [
    [r.reward > 0 for r in g.rollouts if r.reward is not None] for g in groups
  ]
  means = [float(np.mean(p)) for p in per_problem if p]
  scored = [r for r in rollouts if r.reward is not None]
  if not scored:
    raise ValueError('no sample of the evaluation was scored')
  n = len(means)
  return EvalPoint(
    step=step,
    policy_version=policy_version,
    device_hours=device_hours,
    flops=flops,
    tokens=tokens,
    pass_rate=float(np.mean(means)),
    pass_rate_stderr=float(np.std(means, ddof=1)) / math.sqrt(n)
    if n > 1
    else None,
    num_problems=n,
    samples_per_problem=groups[0].request.num_samples,
    truncated_fraction=float(np.mean([r.is_truncated for r in scored])),
    interrupted_fraction=float(np.mean([r.is_interrupted for r in scored])),
    num_unscored=len(rollouts) - len(scored),
    mean_tokens=float(np.mean([r.sampled.sum() for r in scored])),
  )
