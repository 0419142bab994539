"""The posterior of a curve under weak priors and autocorrelated noise.

    yᵢ = R(Cᵢ) + eᵢ,   eᵢ ~ N(0, σ²/wᵢ),   corr(eᵢ, eⱼ) = ρ^|i - j|

σ and ρ are integrated out, the first in closed form and the second over a
grid. The mode is found by damped Gauss-Newton steps. Given B and C_mid the law
is linear in R0 and A, which are drawn from that linear problem, so that only
(log B, log C_mid) need importance sampling.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from scalerl_jax.curves import importance
from scalerl_jax.curves import least_squares

_HELD = 1e20  # The precision of what is exact.
# Evaluations of a run are correlated. Without negative values independent ones
# would seem so too, as half of all samples of them are.
_RHO = (-0.2, 0.0, 0.2, 0.4, 0.6, 0.8)
_RHO_PRIOR = (2.0, 2.0, 2.0, 1.0, 1.0, 1.0)
_STEPS = 60
_TOLERANCE = 1e-10
_SIGMA_FLOOR = 1e-9  # Noise-free data have a posterior too.
_MAX_STEP = 2.0
_MIN_START = 1e-3  # Of R0, which has a logit.
_MIN_CURVATURE = 0.02  # Where the data say nothing the proposal is wide.


class Prior(NamedTuple):
  """Weak priors; each has its reason.

      u = (A - R0) / (1 - R0) ~ Beta(α, β),   log B ~ N,   log C_mid ~ N,
      R0 ~ N around what was measured

  Half of the published ceilings of arXiv:2510.13786 (its tables and figure
  legends) gained less than 0.3 of the headroom, and none was 1; Beta(1/2, 2)
  has mean 0.2 and a standard deviation of 0.21, thrice theirs. Of 45 published
  B the geometric mean is 2.2, the median 2.05 and the standard deviation of the
  log 0.36. C_mid is centred on the largest compute and left free over decades:
  a run is planned to see its midpoint. A measured R0 has the standard error of
  an evaluation on a thousand problems, and the first epoch does not follow the
  law; an `r0_std` of 0 holds it.
  """

  gain_alpha: float = 0.5
  gain_beta: float = 2.0
  log_b_mean: float = math.log(2.0)
  log_b_std: float = 0.5
  log_c_mid_std: float = 3.0
  r0_std: float = 0.015


DEFAULT_PRIOR = Prior()


def check(prior: Prior) -> None:
  """Refuses a prior that is none.

  Args:
    prior: The prior.

  Raises:
    ValueError: A value that is not finite, or a shape or spread that is not
      positive (`r0_std` may be 0).
  """
  for name, value in prior._asdict().items():
    free = name == 'log_b_mean' or (name == 'r0_std' and value == 0)
    if not np.isfinite(value) or not (free or value > 0):
      raise ValueError(f'prior.{name}={value} must be positive and finite')


class Posterior(NamedTuple):
  """A mode and equally likely curves."""

  mode: np.ndarray  # [4]: (R0, A, log B, log C_mid).
  draws: np.ndarray  # [draws, 4].
  noise_std: np.ndarray  # [draws]: of a new evaluation with weight 1.
  rho: float  # Posterior mean of the autocorrelation.
  effective: float  # Draws of the last round that count.


def _to_theta(z: jax.Array, r0: jax.Array) -> jax.Array:
  """Unconstrained (logit u, log B, log C_mid, logit R0 where free) → θ."""
  start = jax.nn.sigmoid(z[3]) if len(z) == 4 else r0
  a = start + (1 - start) * jax.nn.sigmoid(z[0])
  return jnp.stack([start, a, z[1], z[2]])


def _from_theta(theta: jax.Array, *, free_r0: bool) -> jax.Array:
  r0, a, log_b, log_mid = theta
  u = jnp.clip((a - r0) / (1 - r0), 1e-3, 0.98)
  z = [jnp.log(u) - jnp.log1p(-u), log_b, log_mid]
  if free_r0:
    r0 = jnp.clip(r0, _MIN_START, 1 - _MIN_START)
    z.append(jnp.log(r0) - jnp.log1p(-r0))
  return jnp.stack(z)


class _PriorTerms(NamedTuple):
  """Of z: a Beta of each logit and a normal of each; precision 0 is flat."""

  shapes: jax.Array  # [2, 2]: α and β of u and of R0.
  means: jax.Array  # [4].
  precisions: jax.Array  # [4].


def _prior_terms(
  prior: Prior | None, log_max: float, r0: float | None
) -> _PriorTerms:
  shapes, means, stds = np.ones((2, 2)), np.zeros(4), np.full(4, np.inf)
  if prior is not None:
    shapes[0] = prior.gain_alpha, prior.gain_beta
    means[1:3] = prior.log_b_mean, log_max
    stds[1:3] = prior.log_b_std, prior.log_c_mid_std
    if r0 is not None and prior.r0_std:
      shapes[1] = 0.0
      start = np.clip(r0, _MIN_START, 1 - _MIN_START)
      means[3] = special.logit(start)
      stds[3] = prior.r0_std / (start * (1 - start))
  # Host arrays: they go to the device with the call that uses them.
  return _PriorTerms._make((shapes, means, stds**-2))


class _Start(NamedTuple):
  """What is known of R0 before the fit, for the proposal."""

  mean: jax.Array
  precision: jax.Array
  is_held: jax.Array


def _log_prior(z: jax.Array, terms: _PriorTerms) -> jax.Array:
  """Up to a constant, with the derivative of the logits."""
  logits = z[::3]  # Of u and, where it is a coordinate, of R0.
  logs = jnp.stack([jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)], 1)
  value = jnp.sum(terms.shapes[: len(logits)] * logs)
  away = z - terms.means[: len(z)]
  return value - 0.5 * jnp.sum(terms.precisions[: len(z)] * away**2)


def _prior_derivatives(
  z: jax.Array, terms: _PriorTerms
) -> tuple[jax.Array, jax.Array]:
  """Gradient and the diagonal of the Hessian, which has nothing else."""
  rate = jax.nn.sigmoid(z[::3])
  shapes = terms.shapes[: len(rate)]
  total = jnp.sum(shapes, 1)
  precisions = terms.precisions[: len(z)]
  slope = -precisions * (z - terms.means[: len(z)])
  slope = slope.at[::3].add(shapes[:, 0] - total * rate)
  return slope, -precisions.at[::3].add(total * rate * (1 - rate))


def _jacobian(z: jax.Array, r0: jax.Array, log_c: jax.Array) -> jax.Array:
  """∂R/∂z, one row per coordinate."""
  theta = _to_theta(z, r0)
  start, u = theta[0], jax.nn.sigmoid(z[0])
  rows = least_squares.jacobian(theta, log_c)
  out = [rows[1] * (1 - start) * u * (1 - u), rows[2], rows[3]]
  if len(z) == 4:  # A moves with R0, as u is held.
    out.append((rows[0] + rows[1] * (1 - u)) * start * (1 - start))
  return jnp.stack(out)


class _Precision(NamedTuple):
  """Ω(ρ), the inverse of an AR(1) correlation: three bands of constants."""

  ends: jax.Array  # [ρ] on the diagonal,
  inner: jax.Array  # [ρ] more on it but for the first and the last point,
  beside: jax.Array  # [ρ] on both sides of it.
  is_inner: jax.Array  # bool[points].
  log_det: jax.Array  # [ρ] of the correlation.
  num: jax.Array  # Points.


def _precision(points: least_squares.Points) -> _Precision:
  rho = jnp.array(_RHO)
  rest = 1 - rho**2
  num = jnp.sum(points.weight > 0)
  order = jnp.arange(len(points.y))
  return _Precision(
    1 / rest,
    rho**2 / rest,
    -rho / rest,
    (order > 0) & (order < num - 1),
    (num - 1) * jnp.log(rest),
    num,
  )


def _bands(rows: jax.Array, inner: jax.Array) -> tuple[jax.Array, ...]:
  """Products of the rows on the diagonal, on its inner part, and beside it."""
  beside = rows[:, 1:] @ rows[:, :-1].T
  return rows @ rows.T, (rows * inner[None, :]) @ rows.T, beside + beside.T


def _weighted(
  omega: _Precision, total: jax.Array, inner: jax.Array, beside: jax.Array
) -> jax.Array:
  value = omega.ends * total + omega.inner * inner + omega.beside * beside
  return value + omega.num * _SIGMA_FLOOR**2


def _quadratic(
  theta: jax.Array, points: least_squares.Points, omega: _Precision
) -> jax.Array:
  """eᵀ Ω(ρ) e for each ρ."""
  e = least_squares.model(theta, points.log_c) - points.y
  e = e * jnp.sqrt(points.weight)
  beside = 2 * jnp.sum(e[1:] * e[:-1])
  inner = jnp.sum(jnp.where(omega.is_inner, e * e, 0.0))
  return _weighted(omega, jnp.sum(e * e), inner, beside)


def _log_likelihood(quadratic: jax.Array, omega: _Precision) -> jax.Array:
  """Of each ρ, with σ integrated out under the prior 1/σ."""
  value = -0.5 * (omega.num * jnp.log(quadratic) + omega.log_det)
  return value + jnp.log(jnp.array(_RHO_PRIOR))


@functools.partial(jax.jit, static_argnames='free_r0')
def _mode(
  theta: jax.Array,
  points: least_squares.Points,
  terms: _PriorTerms,
  *,
  free_r0: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A mode, the Hessian of minus the log posterior and the chance of each ρ."""
  r0 = theta[0]
  omega = _precision(points)
  root_w = jnp.sqrt(points.weight)

  def evaluate(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Minus the log posterior, its gradient and its Hessian."""
    e = least_squares.model(_to_theta(z, r0), points.log_c) - points.y
    both = jnp.vstack([_jacobian(z, r0, points.log_c), e[None]])
    bands = _bands(both * root_w[None], omega.is_inner)
    quadratic = _weighted(omega, *(b[-1, -1] for b in bands))
    by_rho = _log_likelihood(quadratic, omega)
    scale = jax.nn.softmax(by_rho) * omega.num / quadratic
    of_band = (omega.ends, omega.inner, omega.beside)
    ends, inner, beside = (
      jnp.sum(scale * c) * b for c, b in zip(of_band, bands, strict=True)
    )
    joint = ends + inner + beside
    slope, bend = _prior_derivatives(z, terms)
    loss = -jax.nn.logsumexp(by_rho) - _log_prior(z, terms)
    return loss, joint[-1, :-1] - slope, joint[:-1, :-1] - jnp.diag(bend)

  def step(carry: tuple) -> tuple:
    # The start is the first proposal, so that `evaluate` is compiled once.
    z, loss, gradient, hessian, proposal, damping, count, _ = carry
    new_loss, new_gradient, new_hessian = evaluate(proposal)
    better = new_loss <= loss
    z = jnp.where(better, proposal, z)
    gradient = jnp.where(better, new_gradient, gradient)
    hessian = jnp.where(better, new_hessian, hessian)
    damping = jnp.where(better, damping / 8, damping * 5)
    diagonal = jnp.diag(jnp.diag(hessian) + 1e-3)
    move = jnp.linalg.solve(hessian + damping * diagonal, gradient)
    move = move * jnp.minimum(1.0, _MAX_STEP / jnp.max(jnp.abs(move)))
    done = jnp.max(jnp.abs(move)) < _TOLERANCE
    loss = jnp.minimum(loss, new_loss)
    return z, loss, gradient, hessian, z - move, damping, count + 1, done

  def unfinished(carry: tuple) -> jax.Array:
    return (carry[-2] < _STEPS) & ~carry[-1]

  z = _from_theta(theta, free_r0=free_r0)
  nothing = jnp.zeros_like(z)
  start = (z, jnp.inf, nothing, jnp.diag(nothing), z, 8e-3, 0, False)
  start = jax.tree.map(jnp.asarray, start)
  z, _, _, hessian, *_ = jax.lax.while_loop(unfinished, step, start)
  quadratic = _quadratic(_to_theta(z, r0), points, omega)
  return z, hessian, jax.nn.softmax(_log_likelihood(quadratic, omega))


@jax.jit
def _weigh(
  psi: jax.Array,
  steps: jax.Array,
  points: least_squares.Points,
  terms: _PriorTerms,
  start: _Start,
  chance: jax.Array,
) -> tuple[jax.Array, ...]:
  """Draws (R0, A) for each (log B, log C_mid), in which R is linear in them.

  Returns θ, eᵀ Ω e and the chance of each ρ, and the log of the posterior of θ
  over the density of the drawn (R0, A). The draw is a Student-t with the
  moments of the linear problem, for Ω averaged with `chance`.
  """
  omega = _precision(points)
  root_w = jnp.sqrt(points.weight)
  diagonal = omega.ends @ chance + omega.inner @ chance * omega.is_inner
  beside = omega.beside @ chance

  def one(psi: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
    g = jax.nn.sigmoid(jnp.exp(psi[0]) * (points.log_c - psi[1]))
    rows = jnp.stack([1 - g, g, points.y]) * root_w[None]
    side = jnp.pad(rows, ((0, 0), (1, 1)))
    weighted = rows * diagonal[None] + beside * (side[:, 2:] + side[:, :-2])
    # A reduction, as many products of small matrices are slow.
    joint = jnp.sum(rows[:, None] * weighted[None], -1)
    normal, product = joint[:2, :2], joint[:2, 2]
    normal += 1e-12 * jnp.trace(normal) * jnp.eye(2)
    squares = joint[2, 2] - product @ _solve_pair(normal, product)
    variance = jnp.maximum(squares / omega.num, _SIGMA_FLOOR**2)
    normal = normal / variance + jnp.diag(jnp.stack([start.precision, 0.0]))
    product = product / variance
    product = product.at[0].add(start.precision * start.mean)
    # Of the upper Cholesky factor: R0 by itself, then A given it.
    own = jnp.sqrt(normal[0, 0] - normal[0, 1] ** 2 / normal[1, 1])
    given = jnp.sqrt(normal[1, 1])
    centre = _solve_pair(normal, product)
    r0 = jnp.where(start.is_held, start.mean, centre[0] + step[0] / own)
    a = centre[1] - normal[0, 1] / normal[1, 1] * (r0 - centre[0])
    a += step[1] / given
    theta = jnp.stack([r0, a, psi[0], psi[1]])
    u = (a - r0) / (1 - r0)
    valid = (u > 0) & (u < 1) & (r0 >= 0) & (r0 < 1)
    u = jnp.where(valid, u, 0.5)
    inside = jnp.clip(jnp.where(valid, r0, 0.5), 1e-12, 1.0)
    z = jnp.stack([_logit(u), psi[0], psi[1], _logit(inside)])
    quadratic = _quadratic(theta, points, omega)
    by_rho = _log_likelihood(quadratic, omega)
    total = jax.nn.logsumexp(by_rho) - jnp.log((1 - r0) * u * (1 - u))
    # R0 that is held has neither prior nor density.
    moving = jnp.log(own) + jnp.log(inside * (1 - inside))
    prior = jnp.where(
      start.is_held, _log_prior(z[:3], terms), _log_prior(z, terms)
    )
    total += prior - jnp.log(given) - jnp.where(start.is_held, 0.0, moving)
    total = jnp.where(valid & jnp.isfinite(total), total, -jnp.inf)
    return theta, quadratic, jax.nn.softmax(by_rho), total

  return jax.vmap(one)(psi, steps)


def _logit(p: jax.Array) -> jax.Array:
  return jnp.log(p) - jnp.log1p(-p)


def _solve_pair(matrix: jax.Array, vector: jax.Array) -> jax.Array:
  (p, q), (_, r) = matrix
  swapped = jnp.stack(
    [r * vector[0] - q * vector[1], p * vector[1] - q * vector[0]]
  )
  return swapped / jnp.maximum(p * r - q * q, 1e-300)


def _r0_precision(r0: float | None, prior: Prior | None) -> float:
  if r0 is None:
    return 0.0
  return _HELD if prior is None or not prior.r0_std else prior.r0_std**-2


def sample(
  theta: jax.Array,
  points: least_squares.Points,
  *,
  r0: float | None,
  prior: Prior | None,
) -> Posterior:
  """Finds the mode of the posterior and draws curves from it.

  Args:
    theta: Where the search of the mode starts.
    points: The evaluations.
    r0: Measured pass rate at zero compute; None: unknown.
    prior: The prior; None: flat in A, log B, log C_mid, and in R0
      where it is unknown.

  Returns:
    The posterior.
  """
  real = np.asarray(points.weight) > 0
  log_max = float(np.asarray(points.log_c)[real].max())
  terms = _prior_terms(prior, log_max, r0)
  free_r0 = r0 is None or (prior is not None and prior.r0_std > 0)
  held = float(np.asarray(theta)[0])
  z, hessian, rho_chance = (
    np.asarray(v) for v in _mode(theta, points, terms, free_r0=free_r0)
  )
  known = _Start._make(
    (
      np.float64(held if r0 is None else r0),
      np.float64(_r0_precision(r0, prior)),
      np.bool_(not free_r0),
    )
  )
  linear = importance.linear_steps()
  density = linear.both_density if free_r0 else linear.second_density

  def weigh(psi: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    *drawn, total = _weigh(
      jnp.asarray(psi),
      jnp.asarray(linear.steps),
      points,
      terms,
      known,
      jnp.asarray(rho_chance),
    )
    return np.asarray(total) - density, tuple(np.asarray(v) for v in drawn)

  values, vectors = np.linalg.eigh(hessian)
  root = vectors / np.sqrt(np.maximum(values, _MIN_CURVATURE))
  w, (draws, quadratic, chance) = importance.sample(
    weigh, z[1:3], (root @ root.T)[1:3, 1:3]
  )
  picked = importance.resample(w, len(w))  # Equal weights are simple to use.
  uniform, chi = importance.noise_columns(float(real.sum()))
  which = np.sum(np.cumsum(chance, 1)[picked, :-1] < uniform[:, None], 1)
  sigma = np.sqrt(quadratic[picked, which] / chi)
  start = special.expit(z[3]) if free_r0 else held
  a = start + (1 - start) * special.expit(z[0])
  mode = np.array([start, a, z[1], z[2]])
  rho = float(w @ chance @ np.array(_RHO))
  effective = importance.effective(w)
  return Posterior(mode, draws[picked], sigma, rho, effective)
