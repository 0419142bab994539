"""Fitting of the law, in float64 whatever the caller's precision is.

Many starts of a damped Gauss-Newton method run in one `vmap`; the best one
wins. Points are padded to a multiple of 32 with weight 0, so that a curve that
grows during a run does not compile again at each evaluation.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from scalerl_jax.curves import law

METHODS = ('least_squares', 'paper_grid')
LEVEL = 0.9  # Of the intervals.
_PAD = 32
_ITERATIONS = 60
# A sigmoid in log compute bends at C_mid: before about 1.6 C_mid the ceiling
# and the midpoint trade off against each other.
_MIN_BEND = 1.6
_MIN_POINTS = 5  # One more than the parameters.


class SigmoidFit(NamedTuple):
  """A fitted curve and how far it can be trusted."""

  params: law.SigmoidParams
  intervals: law.SigmoidParams  # Of (low, high) pairs, level 0.9.
  residual_std: float  # Corrected for the number of parameters.
  identifiable: bool  # False: the data cannot bound A.
  warnings: tuple[str, ...]  # In plain language.
  covariance: np.ndarray  # Of (r0, a, log b, log c_mid).
  num_points: int
  num_free: int
  max_compute: float
  points: tuple[np.ndarray, np.ndarray, np.ndarray]  # Compute, rate, weight.


def fit(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  r0: float | None = None,
  min_compute: float = 0.0,
  weights: Sequence[float] | np.ndarray | None = None,
  method: str = 'least_squares',
) -> SigmoidFit:
  """Fits the law to evaluations of one run.

      min Σᵢ wᵢ · (R(Cᵢ) - yᵢ)²   over A in [R0, 1], B > 0, C_mid > 0 (and R0)

  Args:
    compute: C of each evaluation, not negative, any order.
    pass_rate: y of each evaluation, a fraction in [0, 1].
    r0: Pass rate at zero compute; None: fitted too.
    min_compute: Evaluations with less compute are left out.
    weights: wᵢ, not negative; None: all 1.
    method: `least_squares`, or `paper_grid`: A and C_mid on the grid of
      arXiv:2510.13786, A.5 (C_mid log-spaced over the data), B by least
      squares in each cell. The grid needs `r0`.

  Returns:
    The fit. Data that cannot determine the curve gives `identifiable=False`
    and warnings that say why.

  Raises:
    ValueError: Shapes that differ, values that are not finite or out of range,
      an unknown method, or fewer than 2 points left.
  """
  x, y, w = checked(compute, pass_rate, weights, min_compute)
  if method not in METHODS:
    raise ValueError(f'method={method!r} must be one of {METHODS}')
  if r0 is not None and not 0 <= r0 < 1:
    raise ValueError(f'r0={r0} must be in [0, 1)')
  if method == 'paper_grid' and r0 is None:
    raise ValueError('paper_grid needs r0, the pass rate at zero compute')
  scale = float(np.exp(np.mean(np.log(x[x > 0])))) if (x > 0).any() else 1.0
  pad = -len(x) % _PAD
  padded = [np.pad(v, (0, pad)) for v in (x / scale, y, w)]
  free_r0 = r0 is None
  start_r0 = float(y[np.argmin(x)]) if r0 is None else r0
  with jax.enable_x64(True):
    args = [jnp.asarray(v, jnp.float64) for v in padded]
    if method == 'paper_grid':
      theta = _grid_search(*args, jnp.float64(start_r0))
    else:
      theta = _multi_start(*args, jnp.float64(start_r0), free_r0=free_r0)
    jacobian = np.asarray(_jacobian(theta, args[0]))[: len(x)]
    theta = np.asarray(theta)
  return _summarize(theta, jacobian, x, y, w, scale, free_r0)


def refit(result: SigmoidFit, *, a: float) -> law.SigmoidParams:
  """Refits B and C_mid with the ceiling held.

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
  pad = -len(x) % _PAD
  with jax.enable_x64(True):
    theta = _held_descent(
      jnp.array([p.r0, a, np.log(p.b), 0.0]),
      *(jnp.asarray(np.pad(v, (0, pad))) for v in (x / p.c_mid, y, w)),
    )
  log_b, log_c = np.asarray(theta)[2:]
  return law.SigmoidParams(
    p.r0, a, float(np.exp(log_b)), float(np.exp(log_c)) * p.c_mid
  )


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
    'identifiable': result.identifiable,
    'warnings': list(result.warnings),
    'num_points': result.num_points,
    'max_compute': result.max_compute,
  }


def model(theta: jax.Array, x: jax.Array) -> jax.Array:
  """The law in the coordinates of the fit.

  Args:
    theta: (r0, a, log b, log c_mid).
    x: Compute.

  Returns:
    Pass rate.
  """
  params = (theta[0], theta[1], jnp.exp(theta[2]), jnp.exp(theta[3]))
  return law.sigmoid(x, law.SigmoidParams._make(params))


_jacobian = jax.jit(jax.jacfwd(model))


@functools.partial(jax.jit, static_argnames='free_r0')
def _multi_start(
  x: jax.Array, y: jax.Array, w: jax.Array, r0: jax.Array, *, free_r0: bool
) -> jax.Array:
  positive = (x > 0) & (w > 0)
  low = jnp.log(jnp.min(jnp.where(positive, x, jnp.inf)))
  high = jnp.log(jnp.max(jnp.where(positive, x, 0.0)))
  log_c = low + (high - low) * jnp.linspace(-0.2, 1.4, 9)
  log_b = jnp.log(jnp.array([0.7, 1.4, 2.8, 5.6]))
  starts_b, starts_c = (g.reshape(-1) for g in jnp.meshgrid(log_b, log_c))

  def start(b: jax.Array, c: jax.Array) -> jax.Array:
    gained = model(jnp.array([0.0, 1.0, b, c]), x)
    rise = jnp.sum(w * gained * (y - r0)) / jnp.maximum(
      jnp.sum(w * gained**2), 1e-12
    )
    return jnp.array([r0, jnp.clip(r0 + rise, r0 + 1e-3, 1.0), b, c])

  free = jnp.array([1.0 if free_r0 else 0.0, 1.0, 1.0, 1.0])
  starts = jax.vmap(start)(starts_b, starts_c)
  solve = functools.partial(_descend, x=x, y=y, w=w, free=free)
  thetas, losses = jax.vmap(solve)(starts)
  return thetas[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]


@jax.jit
def _grid_search(
  x: jax.Array, y: jax.Array, w: jax.Array, r0: jax.Array
) -> jax.Array:
  positive = (x > 0) & (w > 0)
  low = jnp.log(jnp.min(jnp.where(positive, x, jnp.inf)) / 4)
  high = jnp.log(jnp.max(jnp.where(positive, x, 0.0)) * 4)
  a_grid = jnp.linspace(0.45, 0.8, 71)
  c_grid = jnp.linspace(low, high, 200)
  free = jnp.array([0.0, 0.0, 1.0, 0.0])

  def cell(a: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    start = jnp.array([r0, a, jnp.log(1.5), c])
    return _descend(start, x=x, y=y, w=w, free=free, iterations=20)

  thetas, losses = jax.vmap(jax.vmap(cell, (None, 0)), (0, None))(
    a_grid, c_grid
  )
  losses = jnp.where(jnp.isfinite(losses), losses, jnp.inf).reshape(-1)
  return thetas.reshape(-1, 4)[jnp.argmin(losses)]


@jax.jit
def _held_descent(
  theta: jax.Array, x: jax.Array, y: jax.Array, w: jax.Array
) -> jax.Array:
  free = jnp.array([0.0, 0.0, 1.0, 1.0])
  return _descend(theta, x=x, y=y, w=w, free=free)[0]


def _descend(
  theta: jax.Array,
  *,
  x: jax.Array,
  y: jax.Array,
  w: jax.Array,
  free: jax.Array,
  iterations: int = _ITERATIONS,
) -> tuple[jax.Array, jax.Array]:
  """Levenberg-Marquardt with Marquardt's scaling, inside the bounds."""

  def loss_of(theta: jax.Array) -> jax.Array:
    return jnp.sum(w * (model(theta, x) - y) ** 2)

  def project(theta: jax.Array) -> jax.Array:
    r0 = jnp.where(free[0] > 0, jnp.clip(theta[0], 0.0, 0.999), theta[0])
    a = jnp.where(free[1] > 0, jnp.clip(theta[1], r0, 1.0), theta[1])
    b = jnp.clip(theta[2], jnp.log(0.05), jnp.log(50.0))
    return jnp.stack([r0, a, b, jnp.clip(theta[3], -30.0, 30.0)])

  def body(_: jax.Array, carry: Any) -> Any:
    theta, loss, damping = carry
    jacobian = jax.jacfwd(model)(theta, x) * free[None, :]
    residual = model(theta, x) - y
    normal = jacobian.T @ (w[:, None] * jacobian)
    gradient = jacobian.T @ (w * residual)
    diagonal = jnp.maximum(jnp.diag(normal), 1e-12)
    matrix = normal + jnp.diag(damping * diagonal + (1 - free))
    proposal = project(theta - jnp.linalg.solve(matrix, gradient))
    new_loss = loss_of(proposal)
    better = new_loss <= loss
    theta = jnp.where(better, proposal, theta)
    damping = jnp.clip(jnp.where(better, damping / 5, damping * 4), 1e-12, 1e8)
    return theta, jnp.where(better, new_loss, loss), damping

  carry = (theta, loss_of(theta), jnp.asarray(1e-2, theta.dtype))
  theta, loss, _ = jax.lax.fori_loop(0, iterations, body, carry)
  return theta, loss


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
    Compute, pass rate and weight of the points that are left, as float64.

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
  if kept.sum() < 2:
    raise ValueError(
      f'{kept.sum()} points have compute >= min_compute={min_compute} and a'
      ' positive weight; at least 2 are needed'
    )
  return x[kept], y[kept], w[kept]


def _summarize(
  theta: np.ndarray,
  jacobian: np.ndarray,
  x: np.ndarray,
  y: np.ndarray,
  w: np.ndarray,
  scale: float,
  free_r0: bool,
) -> SigmoidFit:
  r0, a, log_b, log_c = (float(t) for t in theta)
  log_c += np.log(scale)
  params = law.SigmoidParams(r0, a, float(np.exp(log_b)), float(np.exp(log_c)))
  free = [0, 1, 2, 3] if free_r0 else [1, 2, 3]
  n, k = len(x), len(free)
  predicted = r0 + (a - r0) * law.gained(x, params)
  sum_squares = float(np.sum(w * (predicted - y) ** 2))
  dof = n - k
  variance = sum_squares / dof if dof > 0 else np.nan
  normal = jacobian[:, free].T @ (w[:, None] * jacobian[:, free])
  covariance = np.zeros((4, 4))
  conditioned = np.linalg.cond(normal) < 1e14 and dof > 0
  block = (
    np.linalg.inv(normal) * variance if conditioned else np.full((k, k), np.inf)
  )
  covariance[np.ix_(free, free)] = block
  t = float(stats.t.ppf(0.5 + LEVEL / 2, dof)) if dof > 0 else np.inf
  half = [
    0.0 if i not in free else t * float(np.sqrt(max(covariance[i, i], 0.0)))
    for i in range(4)
  ]
  intervals = law.SigmoidParams._make(
    (
      (max(r0 - half[0], 0.0), min(r0 + half[0], 1.0)),
      (max(a - half[1], 0.0), min(a + half[1], 1.0)),
      _log_interval(log_b, half[2]),
      _log_interval(log_c, half[3]),
    )
  )
  warnings = _warnings(params, half[1], x, y)
  return SigmoidFit(
    params=params,
    intervals=intervals,
    residual_std=float(np.sqrt(variance)),
    identifiable=not warnings,
    warnings=warnings,
    covariance=covariance,
    num_points=n,
    num_free=k,
    max_compute=float(x.max()),
    points=(x, y, w),
  )


def _log_interval(log_value: float, half: float) -> tuple[float, float]:
  with np.errstate(over='ignore'):
    return float(np.exp(log_value - half)), float(np.exp(log_value + half))


def _warnings(
  params: law.SigmoidParams,
  half_width: float,
  x: np.ndarray,
  y: np.ndarray,
) -> tuple[str, ...]:
  if len(x) < _MIN_POINTS:
    return (f'{len(x)} evaluations are too few to fit this curve',)
  if np.ptp(y) == 0:
    return ('the pass rate did not change',)
  rank = stats.spearmanr(x, y).statistic if np.ptp(x) > 0 else 0.0
  if rank <= 0:
    return ('the pass rate does not rise with compute',)
  found = []
  reached = float(x.max()) / params.c_mid
  if reached < _MIN_BEND:
    found.append(
      f'the curve has not bent yet: compute so far is {reached:.2g} x C_mid'
    )
  if params.a >= 1.0:
    found.append('the fitted ceiling is at its bound of 1')
  if not half_width < 0.25:
    found.append('the interval of A is wider than 0.5')
  return tuple(found)
