"""Comparison of runs by their fitted curves."""

from collections.abc import Mapping
import itertools
from typing import NamedTuple

import numpy as np

from scalerl_jax.curves import fitting
from scalerl_jax.curves import law


class Slope(NamedTuple):
  """A run in the coordinates in which the law is a straight line."""

  b: float  # Its slope.
  c_mid: float
  log_compute: np.ndarray  # Natural logarithms.
  log_f: np.ndarray
  num_dropped: int  # Evaluations at or below R0, or at or above A.


class Comparison(NamedTuple):
  """Runs in order of preference."""

  ranking: tuple[str, ...]  # Best first.
  reasons: tuple[str, ...]  # Of each neighbouring pair: `A` or `B`.
  crossings: dict[tuple[str, str], float | None]  # None: never from below.
  warnings: tuple[str, ...]


def compare(
  fits: Mapping[str, fitting.SigmoidFit], *, margin: float = 0.02
) -> Comparison:
  """Ranks runs: the higher ceiling first, then the steeper curve.

  Ceilings within `margin` of each other are equal up to the variation between
  repeated runs; those curves are refitted with the mean of their A held, and
  the higher B wins. "Within the margin" is not transitive, so that runs are
  grouped from the top: each group holds the runs within `margin` of its best.

  See "The Art of Scaling Reinforcement Learning Compute for LLMs"
  (arXiv:2510.13786), Sec. 4.

  Args:
    fits: Name → fit; the same evaluation and unit of compute for all.
    margin: Difference of A that counts as none, not negative.

  Returns:
    The ranking, the reason between neighbours, and for each pair, in order of
    rank, the compute at which the better one overtakes for good.

  Raises:
    ValueError: Fewer than two fits, or a negative margin.
  """
  if len(fits) < 2:
    raise ValueError(f'{len(fits)} fits were given; at least 2 are needed')
  if not margin >= 0:
    raise ValueError(f'margin={margin} must not be negative')
  ranking: list[str] = []
  reasons: list[str] = []
  for group in _groups(fits, margin):
    reasons += ['A'] if ranking else []
    reasons += ['B'] * (len(group) - 1)
    ranking += _by_steepness(fits, group)
  crossings = {
    (p, q): _crossing(fits[p].params, fits[q].params)
    for p, q in itertools.combinations(ranking, 2)
  }
  unsure = tuple(
    f'{name}: the curve is not identifiable, so its rank is a guess'
    for name in ranking
    if not fits[name].identifiable
  )
  return Comparison(tuple(ranking), tuple(reasons), crossings, unsure)


def slopes(
  fits: Mapping[str, fitting.SigmoidFit], *, a: float | None = None
) -> dict[str, Slope]:
  """Straightens runs around one ceiling, to compare their B.

      log F = log [C_mid^B / ((A - R0) / (R - R0) - 1)] = B · log C

  Each curve is refitted with the shared A. See "The Art of Scaling
  Reinforcement Learning Compute for LLMs" (arXiv:2510.13786), Fig. 7.

  Args:
    fits: Name → fit; the same evaluation and unit of compute for all.
    a: The ceiling; None: the mean of those of the fits.

  Returns:
    Name → points and slope.

  Raises:
    ValueError: No fit, or a ceiling that is not in (R0, 1] of every run.
  """
  if not fits:
    raise ValueError('no fit was given')
  shared = float(
    np.mean([f.params.a for f in fits.values()]) if a is None else a
  )
  found = {}
  for name, fit in fits.items():
    p = fitting.refit(fit, a=shared)
    x, y, _ = fit.points
    kept = (x > 0) & (y > p.r0) & (y < shared)
    odds = (shared - p.r0) / (y[kept] - p.r0) - 1
    log_f = p.b * np.log(p.c_mid) - np.log(odds)
    dropped = int(np.sum(~kept))
    found[name] = Slope(p.b, p.c_mid, np.log(x[kept]), log_f, dropped)
  return found


def _groups(
  fits: Mapping[str, fitting.SigmoidFit], margin: float
) -> list[list[str]]:
  groups: list[list[str]] = []
  for name in sorted(fits, key=lambda n: -fits[n].params.a):
    # Ceilings are decimals of a grid: 0.61 - 0.59 must be within 0.02.
    limit = margin + 1e-9
    if groups and fits[groups[-1][0]].params.a - fits[name].params.a <= limit:
      groups[-1].append(name)
    else:
      groups.append([name])
  return groups


def _by_steepness(
  fits: Mapping[str, fitting.SigmoidFit], group: list[str]
) -> list[str]:
  if len(group) == 1:
    return group
  shared = float(np.mean([fits[n].params.a for n in group]))

  def steepness(name: str) -> float:
    fit = fits[name]
    x, *_ = fit.points
    first, last = law.evaluate(x[[0, -1]], fit.params)
    # A run that has not risen, or starts above the shared ceiling, is last.
    if last - first < 1e-6 or fit.params.r0 >= shared:
      return 0.0
    return fitting.refit(fit, a=shared).b

  return sorted(group, key=lambda n: -steepness(n))


def _crossing(
  better: law.SigmoidParams, worse: law.SigmoidParams
) -> float | None:
  """Last sign change of the difference, by bisection in log compute."""
  mids = np.log([better.c_mid, worse.c_mid])
  low, high = mids.min() - 12.0, mids.max() + 12.0
  # Each pass narrows the bracket of the last change a thousandfold.
  for _ in range(4):
    grid = np.linspace(low, high, 2001)
    ahead = _value(better, grid) > _value(worse, grid)
    changes = np.flatnonzero(np.diff(ahead))
    if not len(changes) or not ahead[-1]:
      return None
    low, high = grid[changes[-1]], grid[changes[-1] + 1]
  return float(np.exp(high))


def _value(p: law.SigmoidParams, log_c: np.ndarray) -> np.ndarray:
  return law.evaluate(np.exp(log_c), p)
