"""Importance sampling in two dimensions, without randomness.

Low-discrepancy points stand in for random ones, so that the same data give the
same draws. The first proposal is a Student-t; where it is a bad one the next is
a mixture around the draws of the round before (population Monte Carlo), which
bends as a posterior does that is long.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.stats import qmc

NUM_DRAWS = 1024
_DOF = 5.0  # Tails heavier than those of a posterior.
_ROUNDS = 6
_ENOUGH = 0.5  # Part of the draws that is effective.
_MIN_TEMPERED = 0.1
_MIN_POWER = 0.01  # Most draws may be outside of what is possible.
_NUM_KERNELS = 64
_KERNEL_WIDTH = 0.7
# Columns: 0-1 the proposal, 2-3 linear parameters, 4-5 the tails of both, 6 the
# kernel, 7 the autocorrelation, 8 the noise.
_COLUMNS = 9


class LinearSteps(NamedTuple):
  """Student-t steps of two more parameters."""

  steps: np.ndarray  # [draws, 2].
  both_density: np.ndarray  # [draws]: log, up to a constant.
  second_density: np.ndarray  # [draws]: of the second alone.


class _Kernels(NamedTuple):
  """A proposal: an even mixture of Student-t with the same spread."""

  centres: np.ndarray  # [kernels, 2].
  root: np.ndarray  # Of the spread.

  def draw(self) -> np.ndarray:
    plain = normals(_COLUMNS, NUM_DRAWS)
    kernel = (special.ndtr(plain[:, 6]) * len(self.centres)).astype(int)
    return self.centres[kernel] + _student(0, 4) @ self.root.T

  def log_density(self, psi: np.ndarray) -> np.ndarray:
    """Up to a constant."""
    inverse = np.linalg.pinv(self.root)
    away = (psi @ inverse.T)[:, None] - (self.centres @ inverse.T)[None]
    distance = np.sum(away**2, -1)
    return np.log(np.mean((1 + distance / _DOF) ** (-0.5 * (_DOF + 2)), 1))


@functools.cache
def normals(dim: int, num: int) -> np.ndarray:
  """Low-discrepancy points as standard normals.

  Args:
    dim: Dimensions.
    num: Points.

  Returns:
    [num, dim], the same at each call.
  """
  # The first point of the sequence is a corner.
  cells = qmc.Sobol(dim, scramble=False).random(2 * num)[1 : num + 1]
  return special.ndtri(np.clip(cells, 1e-9, 1 - 1e-9))


@functools.cache
def chi_squares(dim: int, num: int, column: int, dof: float) -> np.ndarray:
  """A column of `normals` as χ².

  Args:
    dim: As for `normals`.
    num: As for `normals`.
    column: Which.
    dof: Degrees of freedom.

  Returns:
    [num].
  """
  cells = special.ndtr(normals(dim, num)[:, column])
  return 2 * special.gammaincinv(dof / 2, cells)


@functools.cache
def _student(column: int, tail: int) -> np.ndarray:
  plain = normals(_COLUMNS, NUM_DRAWS)[:, column : column + 2]
  return (
    plain
    * np.sqrt(_DOF / chi_squares(_COLUMNS, NUM_DRAWS, tail, _DOF))[:, None]
  )


@functools.cache
def linear_steps() -> LinearSteps:
  """Steps of two parameters that are drawn given the two of the proposal.

  Returns:
    The same at each call.
  """
  steps = _student(2, 5)
  return LinearSteps(
    steps,
    -0.5 * (_DOF + 2) * np.log1p(np.sum(steps**2, 1) / _DOF),
    -0.5 * (_DOF + 1) * np.log1p(steps[:, 1] ** 2 / _DOF),
  )


def noise_columns(dof: float) -> tuple[np.ndarray, np.ndarray]:
  """What else is random of a draw.

  Args:
    dof: Degrees of freedom of the second.

  Returns:
    A uniform and a χ² for each draw.
  """
  uniform = special.ndtr(normals(_COLUMNS, NUM_DRAWS)[:, 7])
  return uniform, chi_squares(_COLUMNS, NUM_DRAWS, 8, dof)


def sample(
  weigh: Callable[[np.ndarray], tuple[np.ndarray, tuple[np.ndarray, ...]]],
  centre: np.ndarray,
  spread: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
  """Draws until half of the draws are effective, or six times.

  Args:
    weigh: Points [draws, 2] → log of the target (-inf: impossible), and values
      of each.
    centre: Of the first proposal.
    spread: Its covariance.

  Returns:
    Weights that sum to 1 and the values. Where no point is possible the weights
    are even and the values NaN.
  """
  proposal = _Kernels(centre[None], _root(spread))
  w: np.ndarray = np.empty(0)
  values: tuple[np.ndarray, ...] = ()
  for _ in range(_ROUNDS):
    psi = proposal.draw()
    target, values = weigh(psi)
    log_w = target - proposal.log_density(psi)
    if not np.isfinite(log_w).any():
      nothing = tuple(np.full_like(v, np.nan) for v in values)
      return np.full(len(log_w), 1 / len(log_w)), nothing
    w = _softmax(log_w)
    if effective(w) > _ENOUGH * len(w):
      break
    # Tempered, so that a few heavy draws do not make the next proposal.
    power = 1.0
    while (
      effective(_softmax(power * log_w)) < _MIN_TEMPERED * len(w)
      and power > _MIN_POWER
    ):
      power *= 0.7
    tempered = _softmax(power * log_w)
    away = psi - tempered @ psi
    root = _root((away * tempered[:, None]).T @ away)
    centres = psi[resample(tempered, _NUM_KERNELS)]
    proposal = _Kernels(centres, _KERNEL_WIDTH * root)
  return w, values


def resample(w: np.ndarray, num: int) -> np.ndarray:
  """Resamples systematically.

  Args:
    w: Weights that sum to 1.
    num: How many.

  Returns:
    Indices.
  """
  at = (np.arange(num) + 0.5) / num
  return np.minimum(np.searchsorted(np.cumsum(w), at), len(w) - 1)


def effective(w: np.ndarray) -> float:
  """How many equally weighted draws know as much.

  Args:
    w: Weights that sum to 1.

  Returns:
    From 1 to their number.
  """
  return float(1 / np.sum(w * w))


def _softmax(log_w: np.ndarray) -> np.ndarray:
  w = np.exp(log_w - log_w.max())
  return w / w.sum()


def _root(matrix: np.ndarray) -> np.ndarray:
  values, vectors = np.linalg.eigh(matrix)
  return vectors * np.sqrt(np.maximum(values, 0.0))
