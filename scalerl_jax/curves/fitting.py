"""Fitting of the law, in float64 whatever the caller's precision is.

Points are padded, so that a curve that grows during a run does not compile
again at each evaluation, and evaluations beyond a few hundred are averaged with
their neighbours before anything is drawn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special
from scipy import stats

from scalerl_jax.curves import importance
from scalerl_jax.curves import law
from scalerl_jax.curves import least_squares
from scalerl_jax.curves import posterior

METHODS = ('posterior', 'least_squares', 'paper_grid')
LEVEL = 0.9  # Of the intervals.
_PAD = 32
_MAX_POINTS = 512
# A sigmoid in log compute bends at C_mid: before about 1.6 C_mid the ceiling
# and the midpoint trade off against each other.
_MIN_BEND = 1.6
_MIN_BENT_CHANCE = 0.8
_MAX_WIDTH = 0.25  # Of the interval of A.
_MIN_POINTS = 5  # One more than the parameters.
# Neighbouring residuals of correlated noise differ by √(1 - ρ) of their size;
# those of a curve that goes elsewhere than the evaluations differ by less.
_MAX_CORRELATION = 0.9
_MIN_MISFIT = 0.01  # Of the pass rate: less does no harm.
_MIN_EFFECTIVE = 10.0  # Draws.
_EXACT = 1e-6  # Noise of the pass rate.
_GRID_MIDS = 400
# Standard deviations; a residual beyond them counts as if it were this large.
_OUTLIER = 3.0
_REWEIGHTINGS = 3


class Grid(NamedTuple):
  """The cells of `paper_grid`; the default is arXiv:2510.13786, A.5.

  Its printed C_mid do not lie on the grid it describes, hence a finer one in
  log compute, placed around the data where None is given.
  """

  a: tuple[float, ...] = tuple(np.linspace(0.45, 0.8, 71).tolist())
  c_mid: tuple[float, ...] | None = None


DEFAULT_GRID = Grid()


class SigmoidFit(NamedTuple):
  """A fitted curve and how far it can be trusted."""

  params: law.SigmoidParams
  intervals: law.SigmoidParams  # Of (low, high) pairs, level 0.9.
  residual_std: float  # Of an evaluation, corrected for the parameters.
  identifiable: bool  # False: the data cannot bound A.
  warnings: tuple[str, ...]  # In plain language.
  draws: law.SigmoidParams  # Of arrays [draws]: curves that are as likely.
  noise_std: np.ndarray  # [draws]: of a new evaluation around each of them.
  autocorrelation: float  # Of neighbouring residuals.
  method: str
  num_points: int
  max_compute: float
  points: tuple[np.ndarray, np.ndarray, np.ndarray]  # Compute, rate, weight.


def fit(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  r0: float | None = None,
  min_compute: float = 0.0,
  weights: Sequence[float] | np.ndarray | None = None,
  method: str = 'posterior',
  prior: posterior.Prior | None = posterior.DEFAULT_PRIOR,
  grid: Grid = DEFAULT_GRID,
  polish: bool = False,
) -> SigmoidFit:
  """Fits the law to evaluations of one run.

  `posterior`, the default, takes the mode of the posterior under weak priors
  (`Prior` has the reasons) with noise that is correlated from one evaluation to
  the next, has the variance of a binomial, R(1 - R), and outliers whose weight
  falls with their distance. Its intervals are quantiles of draws. The priors
  move A by about `∂ log p/∂A` times its variance, so by nothing as the noise
  vanishes.

  `least_squares` is Σᵢ wᵢ (R(Cᵢ) - yᵢ)² over A in [R0, 1], B and C_mid, and R0
  where it is None. `paper_grid` searches A and C_mid on a grid, B by least
  squares in each cell, as arXiv:2510.13786, A.5. Both have the intervals of the
  linearised problem, for independent noise.

  Args:
    compute: C of each evaluation, not negative, any order.
    pass_rate: y of each evaluation, a fraction in [0, 1].
    r0: Pass rate at zero compute as measured; `posterior` moves it within the
      error of a measurement, the other methods hold it. None: fitted freely.
    min_compute: Evaluations with less compute are left out; `window_start`
      proposes a value.
    weights: wᵢ, inverse variances up to a factor, not negative; None: those of
      a binomial for `posterior`, else 1.
    method: `posterior`, `least_squares` or `paper_grid`, which needs `r0`.
    prior: Of `posterior`; None: flat in A, log B and log C_mid, and R0
      is held.
    grid: Of `paper_grid`.
    polish: Go on from the best cell of the grid by least squares.

  Returns:
    The fit. Data that cannot determine the curve give `identifiable=False` and
    warnings that say why.

  Raises:
    ValueError: Shapes that differ, values that are not finite or out of range,
      an unknown method, or no point left.
  """
  x, y, w = checked(compute, pass_rate, weights, min_compute)
  if method not in METHODS:
    raise ValueError(f'method={method!r} must be one of {METHODS}')
  if r0 is not None and not 0 <= r0 < 1:
    raise ValueError(f'r0={r0} must be in [0, 1)')
  if prior is not None:
    posterior.check(prior)
  if method == 'paper_grid' and r0 is None:
    raise ValueError('paper_grid needs r0, the pass rate at zero compute')
  scale = scale_of(x)
  free_r0 = r0 is None
  with jax.enable_x64(True):
    pts = padded(x / scale, y, w)
    start = jnp.asarray(min(float(y[0]), 0.99) if r0 is None else r0)
    if method == 'paper_grid':
      found = _on_grid(pts, start, grid, scale, polish)
    else:
      found, _ = least_squares.solve(pts, start, free_r0=free_r0)
    if method == 'posterior':
      some = _averaged(x / scale, y, w)
      found, few = _reweighted(
        found,
        padded(*some),
        len(some[0]),
        free_r0=free_r0,
        binomial=weights is None,
      )
      theta, draws, noise_std, rho, effective = posterior.sample(
        found, few, r0=r0, prior=prior
      )
      # Without width, or drawn in vain, it is no posterior; that of exact data
      # is a point, which hardly any draw hits.
      missed = effective < _MIN_EFFECTIVE and np.median(noise_std) > _EXACT
      if len(x) < _MIN_POINTS or missed:
        draws, noise_std = draws * np.nan, noise_std * np.nan
    else:
      theta = np.asarray(found)
      draws, noise_std = _linearised(theta, x / scale, y, w, free_r0)
      rho = 0.0
  result = SigmoidFit(
    params=_params(theta, scale, float),
    intervals=_intervals(draws, scale),
    residual_std=_residual_std(theta, x / scale, y, w, 3 + free_r0),
    identifiable=True,
    warnings=(),
    draws=_params(draws.T, scale, np.asarray),
    noise_std=noise_std,
    autocorrelation=rho,
    method=method,
    num_points=len(x),
    max_compute=float(x.max()),
    points=(x, y, w),
  )
  warnings = _warnings(result)
  return result._replace(identifiable=not warnings, warnings=warnings)


def refit(result: SigmoidFit, *, a: float) -> law.SigmoidParams:
  """Refits B and C_mid by least squares with the ceiling held.

  Args:
    result: A fit; its R0 and its points are kept.
    a: The ceiling, in (R0, 1].

  Returns:
    The parameters.

  Raises:
    ValueError: `a` is not above R0, or above 1.
  """
  p = result.params
  if not p.r0 < a <= 1:
    raise ValueError(f'a={a} must be in (r0, 1] = ({p.r0}, 1]')
  x, y, w = result.points
  with jax.enable_x64(True):
    theta, _ = least_squares.descend(
      jnp.array([p.r0, a, np.log(p.b), 0.0]),
      padded(x / p.c_mid, y, w),
      jnp.array([False, False, True, True]),
    )
    return _params(np.asarray(theta), p.c_mid, float)


def as_dict(result: SigmoidFit) -> dict[str, Any]:
  """Turns a fit into JSON values, as in `fit.json`.

  Args:
    result: A fit.

  Returns:
    Nested dicts of numbers, booleans and strings; infinite bounds are None.
  """

  def finite(v: float) -> float | None:
    return float(v) if np.isfinite(v) else None

  return {
    'params': {k: finite(v) for k, v in result.params._asdict().items()},
    'intervals': {
      k: [finite(v) for v in pair]
      for k, pair in result.intervals._asdict().items()
    },
    'level': LEVEL,
    'residual_std': finite(result.residual_std),
    'autocorrelation': finite(result.autocorrelation),
    'identifiable': result.identifiable,
    'warnings': list(result.warnings),
    'method': result.method,
    'num_points': result.num_points,
    'max_compute': result.max_compute,
  }


def scale_of(x: np.ndarray) -> float:
  """The unit in which a fit works.

  Args:
    x: Compute.

  Returns:
    Geometric mean of what is positive.
  """
  positive = x[x > 0]
  return float(np.exp(np.mean(np.log(positive)))) if len(positive) else 1.0


def padded(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> least_squares.Points:
  """Pads evaluations to a multiple of 32.

  Args:
    x: Compute in the unit of the fit.
    y: Pass rate.
    w: Weight.

  Returns:
    Host arrays: they go to the device with the call that uses them.
  """
  with np.errstate(divide='ignore'):
    log_c = np.maximum(np.log(x), -1e30)
  pad = -len(x) % _PAD
  return least_squares.Points._make(np.pad(v, (0, pad)) for v in (log_c, y, w))


def checked(
  compute: Any, pass_rate: Any, weights: Any, min_compute: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Validates the points and drops those that do not count.

  Args:
    compute: As for `fit`.
    pass_rate: As for `fit`.
    weights: As for `fit`.
    min_compute: As for `fit`.

  Returns:
    Compute, pass rate and weight of the points that are left, as float64, in
    the order of compute.

  Raises:
    ValueError: As for `fit`.
  """
  x = np.asarray(compute, np.float64)
  y = np.asarray(pass_rate, np.float64)
  w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64)
  if x.ndim != 1 or x.shape != y.shape or x.shape != w.shape:
    raise ValueError(
      f'compute {x.shape}, pass_rate {y.shape} and weights {w.shape} must be'
      ' one-dimensional and equally long'
    )
  for name, v in (('compute', x), ('pass_rate', y), ('weights', w)):
    if not np.isfinite(v).all():
      raise ValueError(f'{name} holds a value that is not finite: drop it')
    if (v < 0).any():
      raise ValueError(f'{name}={v.min()} must not be negative')
  if (y > 1).any():
    raise ValueError(
      f'pass_rate={y.max()} must be a fraction in [0, 1]; divide percent by 100'
    )
  kept = (x >= min_compute) & (w > 0)
  if not kept.any():
    raise ValueError(
      f'no point has compute >= min_compute={min_compute} and a positive weight'
    )
  if not (x[kept] > 0).any():
    raise ValueError('compute is 0 in every point: nothing was trained')
  order = np.argsort(x[kept], kind='stable')
  return x[kept][order], y[kept][order], w[kept][order]


def _averaged(
  x: np.ndarray, y: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Joins neighbours where there are more points than a posterior needs."""
  if len(x) <= _MAX_POINTS:
    return x, y, w
  edges = np.linspace(0, len(x), _MAX_POINTS + 1).astype(int)[:-1]
  total = np.add.reduceat(w, edges)
  means = [np.add.reduceat(w * v, edges) / total for v in (x, y)]
  return means[0], means[1], total


def _on_grid(
  pts: least_squares.Points,
  r0: jax.Array,
  grid: Grid,
  scale: float,
  polish: bool,
) -> jax.Array:
  a = np.asarray(grid.a, np.float64)
  a = a[(a > float(r0)) & (a <= 1)]
  if not len(a):
    ends = f'{min(grid.a)} to {max(grid.a)}' if grid.a else 'empty'
    raise ValueError(
      f'grid.a ({ends}) must hold a ceiling in (r0, 1] = ({r0:g}, 1]'
    )
  if grid.c_mid is None:
    low, high = (float(v) for v in least_squares.log_range(pts))
    log_c = np.linspace(low - np.log(4), high + np.log(4), _GRID_MIDS)
  elif not grid.c_mid or not min(grid.c_mid) > 0:
    raise ValueError(f'grid.c_mid={grid.c_mid} must hold positive compute')
  else:
    log_c = np.log(np.asarray(grid.c_mid, np.float64) / scale)
  theta = least_squares.solve_grid(pts, r0, jnp.asarray(a), jnp.asarray(log_c))
  if polish:
    free = jnp.array([False, True, True, True])
    theta, _ = least_squares.descend(theta, pts, free)
  return theta


def _reweighted(
  theta: jax.Array,
  pts: least_squares.Points,
  num: int,
  *,
  free_r0: bool,
  binomial: bool,
) -> tuple[jax.Array, least_squares.Points]:
  """Weights by the variance at the curve and by the size of the residual."""
  free = jnp.array([free_r0, True, True, True])
  log_c, y, base = (np.asarray(v)[:num] for v in pts)
  for _ in range(_REWEIGHTINGS):
    r0, a, log_b, log_mid = np.asarray(theta)
    rate = r0 + (a - r0) * special.expit(np.exp(log_b) * (log_c - log_mid))
    weight = base
    if binomial:
      # At a rate of 0 or 1 a binomial would be exact; an evaluation is not.
      variance = np.clip(rate * (1 - rate), 0.02, 1.0)
      weight = weight * variance.mean() / variance
    size = np.abs(rate - y) * np.sqrt(weight)
    limit = _OUTLIER * (1.4826 * np.median(size) + 1e-9)
    weight = weight * np.minimum(1.0, limit / np.maximum(size, 1e-12)) ** 2
    weight = np.pad(weight, (0, len(pts.y) - num))
    pts = least_squares.Points._make((pts.log_c, pts.y, weight))
    theta, _ = least_squares.descend(theta, pts, free)
  return theta, pts


def _linearised(
  theta: np.ndarray,
  x: np.ndarray,
  y: np.ndarray,
  w: np.ndarray,
  free_r0: bool,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws from a Student-t with the covariance of the linearised problem."""
  p = _params(theta, 1.0, float)
  log_ratio = np.log(np.maximum(x / p.c_mid, 1e-300))
  gained = special.expit(p.b * log_ratio)
  slope = (p.a - p.r0) * gained * (1 - gained) * p.b
  rows = np.stack([1 - gained, gained, slope * log_ratio, -slope])
  free = [0, 1, 2, 3] if free_r0 else [1, 2, 3]
  dof = len(x) - len(free)
  normal = (rows[free] * w) @ rows[free].T
  num = importance.NUM_DRAWS
  draws = np.tile(theta, (num, 1))
  if dof <= 0 or not np.linalg.cond(normal) < 1e14:
    return draws * np.nan, np.full(num, np.nan)
  residual = p.r0 + (p.a - p.r0) * gained - y
  size = (len(free) + 1, num)
  plain = importance.normals(*size)
  chi = importance.chi_squares(*size, len(free), float(dof))
  sigma = np.sqrt(np.sum(w * residual**2) / chi)
  root = np.linalg.cholesky(np.linalg.inv(normal))
  draws[:, free] += sigma[:, None] * (plain[:, : len(free)] @ root.T)
  low, high = zip(*least_squares.BOUNDS, strict=True)
  return np.clip(draws, low, high), sigma


def _params(theta: np.ndarray, scale: float, kind: Any) -> law.SigmoidParams:
  r0, a, log_b, log_c = theta
  with np.errstate(over='ignore'):
    values = (r0, a, np.exp(log_b), np.exp(log_c) * scale)
  return law.SigmoidParams._make(kind(v) for v in values)


def _intervals(draws: np.ndarray, scale: float) -> law.SigmoidParams:
  if not np.isfinite(draws).all():
    whole, positive = (0.0, 1.0), (0.0, np.inf)
    return law.SigmoidParams._make((whole, whole, positive, positive))
  tails = [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]
  bounds = np.quantile(draws, tails, axis=0)
  low, high = (_params(b, scale, float) for b in bounds)
  return law.SigmoidParams._make(zip(low, high, strict=True))


def _residual_std(
  theta: np.ndarray, x: np.ndarray, y: np.ndarray, w: np.ndarray, num_free: int
) -> float:
  p = _params(theta, 1.0, float)
  residual = law.evaluate(x, p) - y
  dof = len(x) - num_free
  return float(np.sqrt(np.sum(w * residual**2) / dof)) if dof > 0 else np.nan


def _misfit(result: SigmoidFit) -> float:
  """Root mean square of residuals that are no noise; else 0."""
  x, y, w = result.points
  residual = np.sqrt(w / w.mean()) * (law.evaluate(x, result.params) - y)
  square = float(np.mean(residual**2))
  beside = float(np.mean(np.diff(residual) ** 2)) / 2
  is_noise = beside > (1 - _MAX_CORRELATION) * square
  return 0.0 if is_noise or square < _MIN_MISFIT**2 else square**0.5


def _warnings(result: SigmoidFit) -> tuple[str, ...]:
  x, y, _ = result.points
  if len(x) < _MIN_POINTS:
    return (f'only {len(x)} of the {_MIN_POINTS} evaluations that a fit needs',)
  if np.ptp(y) == 0:
    return ('the pass rate did not change',)
  ranks = np.stack([stats.rankdata(x), stats.rankdata(y)])
  if np.ptp(x) == 0 or np.cov(ranks)[0, 1] <= 0:
    return ('the pass rate does not rise with compute',)
  found = []
  if misfit := _misfit(result):
    found.append(
      f'the curve misses the evaluations by {misfit:.2g}, and neighbours on the'
      ' same side: they do not follow the law, or R0 ='
      f' {result.params.r0:.2g} is wrong'
    )
  reached = result.max_compute / result.params.c_mid
  # Draws that are not finite are no reason to believe in a bend.
  bent = np.mean(result.max_compute > _MIN_BEND * result.draws.c_mid)
  if bent < _MIN_BENT_CHANCE:
    found.append(
      f'the curve has not bent yet: compute so far is {reached:.2g} x C_mid,'
      f' and beyond {_MIN_BEND} x C_mid with probability {bent:.2f} only'
    )
  if result.params.a >= 1.0:
    found.append('the fitted ceiling is at its bound of 1')
  low, high = result.intervals.a
  if not high - low < _MAX_WIDTH:
    found.append(
      f'the data do not bound A: its {LEVEL:.0%} interval is'
      f' {low:.2f} to {high:.2f}'
    )
  return tuple(found)
