"""Where the law begins: the early regime and what leaving it out changes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from scalerl_jax.curves import fitting
from scalerl_jax.curves import law
from scalerl_jax.curves import least_squares

_MAX_PART = 1 / 3  # Of the evaluations that may be left out.
_MAX_CANDIDATES = 24
_MIN_LEFT = 8
_SIGNIFICANCE = 0.01


class WindowFit(NamedTuple):
  """The fit of a window of compute."""

  min_compute: float
  max_compute: float
  num_points: int
  params: law.SigmoidParams
  intervals: law.SigmoidParams
  identifiable: bool


def window_start(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  r0: float | None = None,
) -> float:
  """Finds the compute from which on the law holds.

  The first epoch rises faster than the law (arXiv:2510.13786, A.7). For each
  number k of early evaluations, up to a third, Chow's test asks whether they
  belong to the curve of the others:

      F = ((S₀ - S_k) / k) / (S_k / (n - k - p)) · (1 - ρ) / (1 + ρ)

  with S_k the sum of squares without them and ρ the autocorrelation of what is
  left. The most significant k is taken where its p-value, times the number of
  k tried, is below 0.01.

  Args:
    compute: As for `fit`.
    pass_rate: As for `fit`.
    r0: As for `fit`.

  Returns:
    A `min_compute` for `fit`; 0.0 where nothing is to be left out, or fewer
    than 8 evaluations would be left.

  Raises:
    ValueError: As for `fit`.
  """
  x, y, w = fitting.checked(compute, pass_rate, None, 0.0)
  n, num_free = len(x), 3 + (r0 is None)
  most = min(int(n * _MAX_PART), n - _MIN_LEFT)
  if most < 1:
    return 0.0
  tried = np.unique(np.linspace(1, most, _MAX_CANDIDATES).astype(int))
  # Evaluations at the same compute stay together.
  tried = tried[x[tried] > x[tried - 1]]
  if not len(tried):
    return 0.0
  masks = np.arange(n) >= np.concatenate([[0], tried])[:, None]
  scale = fitting.scale_of(x)
  with jax.enable_x64(True):
    start = jnp.asarray(min(float(y[0]), 0.99) if r0 is None else r0)
    points = fitting.padded(x / scale, y, w)
    weights = np.pad(masks * 1.0, ((0, 0), (0, len(points.y) - n)))
    fits = [
      least_squares.solve(
        points._replace(weight=jnp.asarray(weight)), start, free_r0=r0 is None
      )
      for weight in weights
    ]
    log_c = jnp.asarray(points.log_c)
    rates = [np.asarray(least_squares.model(t, log_c)) for t, _ in fits]
    losses = [float(loss) for _, loss in fits]
  best, least = 0.0, _SIGNIFICANCE
  for k, loss, rate in zip(tried, losses[1:], rates[1:], strict=True):
    e = rate[k:n] - y[k:]
    rho = float(np.clip(e[1:] @ e[:-1] / max(float(e @ e), 1e-300), 0, 0.9))
    dof = n - k - num_free
    ratio = (losses[0] - loss) / k / max(loss / dof, 1e-20)
    p = stats.f.sf(ratio * (1 - rho) / (1 + rho), k, dof) * len(tried)
    if p < least:
      best, least = float(x[k]), p
  return best


def window_sensitivity(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  windows: Sequence[tuple[float, float]],
  weights: Sequence[float] | np.ndarray | None = None,
  **fit_args: Any,
) -> tuple[WindowFit, ...]:
  """Fits several windows of the same run, as arXiv:2510.13786, A.7.

  Args:
    compute: As for `fit`.
    pass_rate: As for `fit`.
    windows: (smallest, largest) compute of each.
    weights: As for `fit`.
    **fit_args: More arguments of `fit`, but for `min_compute`.

  Returns:
    The fit of each window.

  Raises:
    ValueError: As for `fit`; a window that holds no point.
  """
  x = np.asarray(compute, np.float64)
  y = np.asarray(pass_rate, np.float64)
  found = []
  for low, high in windows:
    kept = (x >= low) & (x <= high)
    if not kept.any():
      raise ValueError(f'the window {low} to {high} holds no point')
    w = None if weights is None else np.asarray(weights)[kept]
    got = fitting.fit(x[kept], y[kept], weights=w, **fit_args)
    found.append(
      WindowFit(
        low, high, got.num_points, got.params, got.intervals, got.identifiable
      )
    )
  return tuple(found)
