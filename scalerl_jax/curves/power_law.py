"""A power law with a ceiling, to compare the sigmoid with."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.curves import fitting


class PowerLawFit(NamedTuple):
  """R = A - D / C^B."""

  a: float  # Ceiling, A <= 1.
  d: float
  b: float
  residual_std: float
  num_points: int


def fit_power_law(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  min_compute: float = 0.0,
) -> PowerLawFit:
  """Fits R = A - D / C^B by least squares.

  For each B of a grid, A and D are a linear least-squares problem; the grid is
  then refined around its best cell.

  See "The Art of Scaling Reinforcement Learning Compute for LLMs"
  (arXiv:2510.13786), App. A.4.

  Args:
    compute: C of each evaluation; those at 0 are left out.
    pass_rate: A fraction in [0, 1].
    min_compute: Evaluations with less compute are left out.

  Returns:
    The fit. Where the ceiling is at 1 the data do not bound it.

  Raises:
    ValueError: As for `fit`, or fewer than 4 points left.
  """
  x, y, _ = fitting.checked(compute, pass_rate, None, min_compute)
  x, y = x[x > 0], y[x > 0]
  if len(x) < 4:
    raise ValueError(f'{len(x)} points with positive compute; 4 are needed')
  # Of the smallest, so that no power overflows.
  log_x = np.log(x) - np.log(x[0])
  low, high = np.log(0.01), np.log(10.0)
  for _ in range(8):
    grid = np.linspace(low, high, 41)
    best = int(np.argmin([_solve(log_x, y, np.exp(g))[2] for g in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
  b = float(np.exp((low + high) / 2))
  a, d, loss = _solve(log_x, y, b)
  with np.errstate(over='ignore'):
    d *= float(np.exp(b * np.log(x[0])))
  return PowerLawFit(a, d, b, (loss / (len(x) - 3)) ** 0.5, len(x))


def _solve(
  log_x: np.ndarray, y: np.ndarray, b: float
) -> tuple[float, float, float]:
  falling = np.exp(-b * log_x)
  centred = falling - falling.mean()
  d = -float(centred @ y) / max(float(centred @ centred), 1e-300)
  a = float(y.mean()) + d * float(falling.mean())
  if a > 1:  # The best under A <= 1 lies on the bound.
    a, d = 1.0, float(falling @ (1 - y)) / float(falling @ falling)
  return a, d, float(np.sum((a - d * falling - y) ** 2))
