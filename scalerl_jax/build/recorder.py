"""What a run writes: metrics, evaluations, the curve and its fit."""

from collections.abc import Callable, Sequence
import dataclasses
import logging
import pathlib
from typing import Any

import numpy as np

from scalerl_jax import config as config_lib
from scalerl_jax import curves
from scalerl_jax import evaluation
from scalerl_jax import records
from scalerl_jax.reporting import compute
from scalerl_jax.reporting import plots
from scalerl_jax.reporting import report
from scalerl_jax.reporting import writers

_log = logging.getLogger(__name__)
_JSONL = ('metrics', 'evals', 'samples')
# The paper, A.15: runs in which more than 10 to 15 % of rollouts are truncated
# become unstable, and do not recover.
_MAX_TRUNCATED = 0.15
_TRUNCATED_UPDATES = 10  # In a row, before it is said.
# Gain that makes twice the compute worth it: the paper's margin on A.
_WORTHWHILE_GAIN = 0.02


class Recorder:
  """Writes the files of a run's directory."""

  def __init__(
    self,
    workdir: pathlib.Path,
    config: config_lib.RunConfig,
    *,
    decode: Callable[[Sequence[int]], str],
  ) -> None:
    """Opens the files; rows are appended.

    Args:
      workdir: The run's directory.
      config: The configuration.
      decode: Token ids → text.
    """
    self._workdir = workdir
    self._config = config
    self._decode = decode
    self._rows = {
      name: writers.JsonlWriter(workdir / f'{name}.jsonl') for name in _JSONL
    }
    self._board: writers.TensorBoardWriter | None = None
    self._points: list[evaluation.EvalPoint] = []
    self._fit: curves.SigmoidFit | None = None
    self._num_truncated = 0  # Updates in a row with too many.

  def start(self, updates: int) -> None:
    """Begins at an update: 0 or that of a checkpoint."""
    if self._config.reporting.tensorboard:
      # A checkpoint is made after its update has been written.
      start_step = updates + 1 if updates else 0
      self._board = writers.TensorBoardWriter(
        self._workdir / 'tensorboard', start_step=start_step
      )

  def state(self) -> dict[str, Any]:
    """Where every file stands."""
    return {
      'offsets': {name: w.offset() for name, w in self._rows.items()},
      'points': [dataclasses.asdict(p) for p in self._points],
    }

  def load_state(self, state: dict[str, Any]) -> None:
    """Cuts every file back to `state()`."""
    for name, offset in state['offsets'].items():
      self._rows[name].truncate(offset)
    self._points = [evaluation.EvalPoint(**p) for p in state['points']]

  def reset(self) -> None:
    """Cuts every file to nothing: a run that has no checkpoint starts anew."""
    for writer in self._rows.values():
      writer.truncate(0)

  def on_update(self, row: dict[str, Any]) -> None:
    """Writes the metrics of one update and shows a line of them."""
    self._rows['metrics'].write(row)
    if self._board is not None:
      self._board.write(row['step'], row)
    ceiling = f'{self._fit.params.a:.2f}' if self._fit is not None else '-'
    _log.info(
      'update %d/%d  train pass %.2f  %.0f tok/s  lag %.1f  truncated %.0f%%'
      '  interrupted %.0f%%  A %s',
      row['step'],
      self._config.num_updates,
      row['pass_rate_train'],
      row['tokens_per_s'],
      row['lag_mean'],
      100 * row['truncated_fraction'],
      100 * row['interrupted_fraction'],
      ceiling,
    )
    self._watch_truncation(row['truncated_fraction'])

  def on_evaluation(
    self,
    point: evaluation.EvalPoint,
    groups: Sequence[records.RolloutGroup],
    problems: Sequence[records.Problem],
  ) -> None:
    """Writes an evaluation, some of its samples, the curve and the fit."""
    self._points.append(point)
    row = dataclasses.asdict(point)
    self._rows['evals'].write(row)
    if self._board is not None:
      self._board.write(
        point.step, {f'evaluation/{k}': v for k, v in row.items()}
      )
    for group, problem in list(zip(groups, problems, strict=True))[
      : self._config.reporting.num_samples
    ]:
      self._rows['samples'].write(self._sample(point.step, group, problem))
    self.write_curve()
    _log.info(
      'evaluation at %d: pass rate %.3f ± %.3f',
      point.step,
      point.pass_rate,
      float('nan')
      if point.pass_rate_stderr is None
      else point.pass_rate_stderr,
    )

  def write_curve(self) -> None:
    """Writes `curve.csv` and `fit.json` from the evaluations so far."""
    axis = self._config.curve.compute_axis
    lines = ['compute,pass_rate,stderr,step']
    for p in self._points:
      stderr = '' if p.pass_rate_stderr is None else repr(p.pass_rate_stderr)
      lines.append(f'{_on_axis(p, axis)!r},{p.pass_rate!r},{stderr},{p.step}')
    writers.write_text(self._workdir / 'curve.csv', '\n'.join(lines) + '\n')
    writers.write_json(self._workdir / 'fit.json', self._fit_points(axis))

  def finish(self) -> str:
    """Writes plots and report, and sums the run up."""
    if self._config.reporting.plots:
      plots.write_curve_png(self._workdir)
      report.write_report(self._workdir)
    if not self._points:
      return 'no evaluation was made'
    first, last = self._points[0], self._points[-1]
    text = f'pass rate {first.pass_rate:.3f} -> {last.pass_rate:.3f}'
    if self._fit is not None:
      text += f', fitted ceiling A = {self._fit.params.a:.3f}'
      text += ''.join(f' ({w})' for w in self._fit.warnings)
    return text

  def close(self) -> None:
    """Closes the files."""
    for writer in self._rows.values():
      writer.close()
    if self._board is not None:
      self._board.close()

  def _watch_truncation(self, fraction: float) -> None:
    self._num_truncated = (
      self._num_truncated + 1 if fraction > _MAX_TRUNCATED else 0
    )
    if self._num_truncated == _TRUNCATED_UPDATES:
      _log.warning(
        'more than %.0f%% of the rollouts were truncated in each of the last %d'
        ' updates: such runs tend to become unstable. Give answers more room'
        ' (batch.max_tokens, length.answer_tokens), or thinking less',
        100 * _MAX_TRUNCATED,
        _TRUNCATED_UPDATES,
      )

  def _sample(
    self, step: int, group: records.RolloutGroup, problem: records.Problem
  ) -> dict[str, Any]:
    rollout = group.rollouts[0]
    return {
      'step': step,
      'problem_id': problem.problem_id,
      'prompt': problem.prompt,
      'response': self._decode(rollout.token_ids.tolist()),
      'answer': problem.answer,
      'reward': rollout.reward,
      'finish_reason': str(rollout.finish_reason),
      'interrupted': rollout.is_interrupted,
    }

  def _fit_points(self, axis: str) -> dict[str, Any]:
    x = np.array([_on_axis(p, axis) for p in self._points])
    y = np.array([p.pass_rate for p in self._points])
    result: dict[str, Any] = {'compute_axis': axis, 'num_points': len(x)}
    if len(x) < 4 or x.max() <= 0:
      return result | {'warnings': ['too few evaluations to fit a curve']}
    start = self._config.curve.min_compute
    self._fit = curves.fit(x, y, r0=min(float(y[0]), 0.99), min_compute=start)
    budget = float(x.max()) * self._config.curve.forecast_multiple
    grid = np.geomspace(float(x[x > 0].min()), budget, 60)
    band = curves.forecast(self._fit, grid)
    target = min(float(y[-1]) + _WORTHWHILE_GAIN, 1.0)
    verdict = curves.verdict(self._fit, target=target, budget=budget)
    result |= curves.as_dict(self._fit)
    result['forecast'] = {'compute': grid, **band._asdict()}
    result['verdict'] = {
      'target': target,
      'budget': budget,
      **verdict._asdict(),
    }
    return result


def _on_axis(point: evaluation.EvalPoint, axis: str) -> float:
  assert axis in compute.AXES
  return float(getattr(point, axis))
