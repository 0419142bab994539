"""From complete groups to one padded batch."""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from scalerl_jax import arrays
from scalerl_jax import records

TRUNCATED_POLICIES = ('mask', 'keep')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
  """What was put into a batch and what was masked, in rollouts and tokens.

  Attributes:
    num_rollouts: Rollouts of the groups.
    num_truncated: Ended on a token budget.
    num_interrupted: Had the phrase forced.
    num_unscored: Without a finite reward; masked.
    num_aborted: Given up by the engine; masked.
    num_nonfinite: Had a sampled token without a finite log-prob; masked.
    num_sampled_tokens: Sampled response tokens.
    num_forced_tokens: Forced response tokens.
    num_tokens: All tokens in the rows, prompts included.
    padding_fraction: Padding, as a fraction of the batch's area.
    num_correct: Rollouts with a positive reward.
  """

  num_rollouts: int
  num_truncated: int
  num_interrupted: int
  num_unscored: int
  num_aborted: int
  num_nonfinite: int
  num_sampled_tokens: int
  num_forced_tokens: int
  num_tokens: int
  padding_fraction: float
  num_correct: int


def bucket(length: int, *, multiple: int, limit: int) -> int:
  """Rounds a row length up, so that few shapes are ever compiled.

  Args:
    length: Longest row, in tokens.
    multiple: Granularity of the buckets.
    limit: Longest row allowed.

  Returns:
    The smallest multiple that holds `length`, at most `limit`.

  Raises:
    ValueError: length exceeds limit.
  """
  if length > limit:
    raise ValueError(f'a row of {length} tokens exceeds the limit of {limit}')
  return min(_round_up(length, multiple), limit)


def assemble(
  groups: Sequence[records.RolloutGroup],
  *,
  num_rows: int | None,
  row_tokens: int,
  truncated: str = 'mask',
  packed: bool = False,
  row_multiple: int = 1,
  pad_id: int = 0,
) -> tuple[arrays.Batch, BatchStats]:
  """Lays groups out in rows; nothing is dropped, masked rollouts are counted.

  Args:
    groups: Complete groups, of distinct visits.
    num_rows: B; rows that are not needed are padding. None: as few as are
      needed, rounded up to a multiple of `row_multiple`.
    row_tokens: T.
    truncated: `mask`: a truncated rollout takes no part, neither in the loss
      nor in its group's mean; `keep`: it counts with its reward.
    packed: False: one rollout per row. True: first-fit decreasing.
    row_multiple: Granularity of B where num_rows is None.
    pad_id: Token of the padding.

  Returns:
    (batch with numpy leaves, stats). R is the number of rollouts, rounded up
    to B where rows hold one rollout each.

  Raises:
    ValueError: Unknown policy, a visit given twice, arrays of a rollout that
      differ in length, a rollout longer than a row, or too many for the rows.
  """
  if truncated not in TRUNCATED_POLICIES:
    raise ValueError(
      f'truncated={truncated!r} must be one of {TRUNCATED_POLICIES}'
    )
  visits = [g.request.visit for g in groups]
  if len(set(visits)) != len(visits):
    raise ValueError(f'a visit is given twice: {sorted(visits)}')
  rollouts = [
    (p, g.request, r) for p, g in enumerate(groups) for r in g.rollouts
  ]
  rows = _place(
    [_length(request, r) for _, request, r in rollouts],
    num_rows=num_rows,
    row_tokens=row_tokens,
    packed=packed,
  )
  if num_rows is None:
    needed = 1 + max((row for row, _, _ in rows), default=0)
    num_rows = _round_up(needed, row_multiple)
  R = len(rollouts) if packed else num_rows
  choices = next(
    (
      r.routed_experts.shape[1:]
      for _, _, r in rollouts
      if r.routed_experts is not None
    ),
    None,
  )
  batch = empty(num_rows, row_tokens, R, pad_id=pad_id, choices=choices)
  for i, (prompt, request, rollout) in enumerate(rollouts):
    row, start, segment = rows[i]
    _write(batch, i, row, start, segment, request, rollout)
    batch.prompt_index[i] = prompt
    batch.rewards[i] = 0.0 if _is_unscored(rollout) else rollout.reward
    batch.valid[i] = _is_valid(rollout, truncated)
  return batch, _stats([r for _, _, r in rollouts], batch)


def empty(
  B: int,
  T: int,
  R: int,
  *,
  pad_id: int,
  choices: tuple[int, ...] | None = None,
) -> arrays.Batch:
  """Makes a batch that is all padding.

  Args:
    B: Rows.
    T: Tokens of a row.
    R: Rollouts.
    pad_id: Token of the padding.
    choices: (L, k) of routing to be replayed; None: there is none.

  Returns:
    The batch, its leaves numpy arrays.
  """
  fields: dict[str, Any] = dict(
    tokens=np.full((B, T), pad_id, np.int32),
    positions=np.zeros((B, T), np.int32),
    segment_ids=np.zeros((B, T), np.int32),
    loss_mask=np.zeros((B, T), bool),
    behavior_logp=np.zeros((B, T), np.float32),
    policy_version=np.full((B, T), -1, np.int32),
    rollout_index=np.full((B, T), -1, np.int32),
    rewards=np.zeros(R, np.float32),
    valid=np.zeros(R, bool),
    # Padding rollouts share the last prompt; they are never valid.
    prompt_index=np.full(R, R - 1, np.int32),
    routed_experts=None
    if choices is None
    else np.full((B, T, *choices), -1, np.int32),
  )
  return arrays.Batch(**fields)


def _round_up(count: int, multiple: int) -> int:
  return -(-count // multiple) * multiple


def _is_unscored(rollout: records.Rollout) -> bool:
  return rollout.reward is None or not math.isfinite(rollout.reward)


def _is_nonfinite(rollout: records.Rollout) -> bool:
  return not bool(np.isfinite(rollout.logps[rollout.sampled]).all())


def _is_valid(rollout: records.Rollout, truncated: str) -> bool:
  return not (
    _is_unscored(rollout)
    or rollout.finish_reason is records.FinishReason.ABORTED
    or _is_nonfinite(rollout)
    or (truncated == 'mask' and rollout.is_truncated)
  )


def _length(request: records.Request, rollout: records.Rollout) -> int:
  n = len(rollout.token_ids)
  names = ['logps', 'policy_versions', 'sampled']
  if rollout.routed_experts is not None:
    names.append('routed_experts')
  for name in names:
    if len(getattr(rollout, name)) != n:
      raise ValueError(
        f'visit {request.visit}: {name} has {len(getattr(rollout, name))}'
        f' entries for {n} tokens'
      )
  return len(request.prompt_ids) + n


def _place(
  lengths: Sequence[int],
  *,
  num_rows: int | None,
  row_tokens: int,
  packed: bool,
) -> list[tuple[int, int, int]]:
  """Chooses (row, first column, segment id) of each rollout."""
  if lengths and max(lengths) > row_tokens:
    raise ValueError(
      f'a rollout of {max(lengths)} tokens does not fit a row of {row_tokens}'
    )
  limit = math.inf if num_rows is None else num_rows
  if not packed:
    if len(lengths) > limit:
      raise ValueError(f'{len(lengths)} rollouts for {num_rows} rows')
    return [(i, 0, 1) for i in range(len(lengths))]
  used: list[int] = []
  segments: list[int] = []
  placed: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    fits = (b for b, u in enumerate(used) if u + lengths[i] <= row_tokens)
    row = next(fits, len(used))
    if row == limit:
      raise ValueError(
        f'{sum(lengths)} tokens do not pack into {num_rows} rows of'
        f' {row_tokens}'
      )
    if row == len(used):
      used.append(0)
      segments.append(0)
    segments[row] += 1
    placed[i] = (row, used[row], segments[row])
    used[row] += lengths[i]
  return placed


def _write(
  batch: arrays.Batch,
  index: int,
  row: int,
  start: int,
  segment: int,
  request: records.Request,
  rollout: records.Rollout,
) -> None:
  p, n = len(request.prompt_ids), len(rollout.token_ids)
  whole = (row, slice(start, start + p + n))
  response = (row, slice(start + p, start + p + n))
  batch.tokens[row, start : start + p] = request.prompt_ids
  batch.tokens[response] = rollout.token_ids
  batch.positions[whole] = np.arange(p + n)
  batch.segment_ids[whole] = segment
  batch.rollout_index[whole] = index
  batch.loss_mask[response] = rollout.sampled
  batch.behavior_logp[response] = rollout.logps
  batch.policy_version[response] = rollout.policy_versions
  if rollout.routed_experts is not None and batch.routed_experts is not None:
    fed = (row, slice(start + p - 1, start + p + n - 1))
    batch.routed_experts[fed] = rollout.routed_experts


def _stats(
  rollouts: Sequence[records.Rollout], batch: arrays.Batch
) -> BatchStats:
  def count(flags: Iterator[bool]) -> int:
    return sum(map(bool, flags))

  sampled = sum(int(r.sampled.sum()) for r in rollouts)
  num_tokens = int((batch.segment_ids > 0).sum())
  aborted = records.FinishReason.ABORTED
  return BatchStats(
    num_rollouts=len(rollouts),
    num_truncated=count(r.is_truncated for r in rollouts),
    num_interrupted=count(r.is_interrupted for r in rollouts),
    num_unscored=count(_is_unscored(r) for r in rollouts),
    num_aborted=count(r.finish_reason is aborted for r in rollouts),
    num_nonfinite=count(_is_nonfinite(r) for r in rollouts),
    num_sampled_tokens=sampled,
    num_forced_tokens=sum(len(r.token_ids) for r in rollouts) - sampled,
    num_tokens=num_tokens,
    padding_fraction=1 - num_tokens / batch.tokens.size,
    num_correct=count(
      (r.reward or 0) > 0 for r in rollouts if not _is_unscored(r)
    ),
  )
