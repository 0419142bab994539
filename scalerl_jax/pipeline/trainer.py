"""The trainer's side: groups in, one update and its metrics out."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import numpy as np

from scalerl_jax import arrays
from scalerl_jax import records
from scalerl_jax.models import spec as spec_lib
from scalerl_jax.pipeline import rollouts
from scalerl_jax.reporting import compute
from scalerl_jax.training import batching
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

# Row lengths are rounded up to this, so that few shapes are compiled.
_BUCKET = 16


class TrainingDivergedError(RuntimeError):
  """Too many updates in a row were skipped for not being finite."""


class Trainer:
  """Owns the train state."""

  def __init__(
    self,
    state: state_lib.TrainState,
    step_fn: Callable[
      [state_lib.TrainState, arrays.Batch],
      tuple[state_lib.TrainState, step_lib.StepMetrics],
    ],
    *,
    spec: spec_lib.ModelSpec,
    row_multiple: int,
    max_tokens: int,
    truncated: str,
    packed: bool,
    pad_id: int,
    max_nonfinite_streak: int,
    num_devices: int = 1,
  ) -> None:
    """Takes over the state.

    Args:
      state: Donated to the first update.
      step_fn: From `training.make_train_step`.
      spec: The model, for the FLOP count.
      row_multiple: Rows of a batch are padded to a multiple of it.
      max_tokens: Longest row.
      truncated: `mask` or `keep`; see `batching.assemble`.
      packed: True: rows of `max_tokens` with several rollouts each.
      pad_id: Token of the padding.
      max_nonfinite_streak: Skipped updates in a row that are endured.
      num_devices: Devices that train, for device-hours.
    """
    self.state = state
    self._step_fn = step_fn
    self._spec = spec
    self._row_multiple = row_multiple
    self._max_tokens = max_tokens
    self._truncated = truncated
    self._packed = packed
    self._pad_id = pad_id
    self._max_streak = max_nonfinite_streak
    self._num_devices = num_devices
    self.meter = compute.ComputeMeter()

  @property
  def version(self) -> int:
    """Updates done."""
    return int(self.state.version)

  def update(
    self, groups: Sequence[records.RolloutGroup]
  ) -> dict[str, float | list[float]]:
    """Trains on the groups of one update.

    Args:
      groups: Graded groups.

    Returns:
      Metrics by name.
    """
    start = time.monotonic()
    batch, stats = batching.assemble(
      groups,
      num_rows=None,
      row_multiple=self._row_multiple,
      row_tokens=self._row_tokens(groups),
      packed=self._packed,
      truncated=self._truncated,
      pad_id=self._pad_id,
    )
    self.state, metrics = self._step_fn(self.state, batch)
    row = _to_row(metrics) | _stats_row(stats)
    seconds = time.monotonic() - start
    self.meter = self.meter.add(
      training_seconds=seconds * self._num_devices,
      training_flops=3
      * sum(
        rollouts.group_flops(self._spec, g, shares_prompt=False) for g in groups
      ),
    )
    row['training_s'] = seconds
    return row

  def _row_tokens(self, groups: Sequence[records.RolloutGroup]) -> int:
    if self._packed:
      return self._max_tokens
    longest = max(
      len(g.request.prompt_ids) + len(r.token_ids)
      for g in groups
      for r in g.rollouts
    )
    return batching.bucket(longest, multiple=_BUCKET, limit=self._max_tokens)

  @property
  def has_diverged(self) -> bool:
    """Whether the limit of skipped updates in a row is reached."""
    return int(self.state.nonfinite_streak) >= self._max_streak

  def check(self) -> None:
    """Checks that the run is worth going on with.

    Raises:
      TrainingDivergedError: The limit of skipped updates is reached.
    """
    if self.has_diverged:
      raise TrainingDivergedError(
        f'{self._max_streak} updates in a row had a loss or gradient that is'
        ' not finite; lower optimizer.learning_rate'
      )


def _to_row(metrics: step_lib.StepMetrics) -> dict[str, Any]:
  found = {
    k: np.asarray(v) for k, v in metrics._asdict().items() if v is not None
  }
  return {k: v.tolist() if v.ndim else float(v) for k, v in found.items()}


def _stats_row(stats: batching.BatchStats) -> dict[str, Any]:
  row: dict[str, Any] = dataclasses.asdict(stats)
  row['num_batch_tokens'] = row.pop('num_tokens')  # In the loss or not.
  n = max(stats.num_rollouts, 1)
  row['pass_rate_train'] = stats.num_correct / n
  row['truncated_fraction'] = stats.num_truncated / n
  row['interrupted_fraction'] = stats.num_interrupted / n
  return row
