"""The posterior of a curve under weak priors and autocorrelated noise.

    yᵢ = R(Cᵢ) + eᵢ,   eᵢ ~ N(0, σ²/wᵢ),   corr(eᵢ, eⱼ) = ρ^|i - j|

σ and ρ are integrated out, the first in closed form and the second over a
grid. The mode is found by damped Gauss-Newton steps; importance sampling from a
Student-t around it gives draws, in two rounds, the second with the moments of
the first. Low-discrepancy points stand in for random ones, so that the same
data give the same draws.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special
from scipy.stats import qmc

from scalerl_jax.curves import least_squares

NUM_DRAWS = 1024
_DOF = 5.0  # Of the proposal: tails heavier than the posterior's.
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


class Posterior(NamedTuple):
  """A mode and equally likely curves."""

  mode: np.ndarray  # [4]: (R0, A, log B, log C_mid).
  draws: np.ndarray  # [draws, 4].
  noise: np.ndarray  # [draws]: of a new evaluation with weight 1.
  rho: float  # Posterior mean of the autocorrelation.


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
  return _PriorTerms(*(jnp.asarray(v) for v in (shapes, means, stds**-2)))


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
) -> tuple[jax.Array, jax.Array]:
  """A mode and the Gauss-Newton Hessian of minus the log posterior there."""
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
  return z, hessian


@jax.jit
def _weigh(
  z: jax.Array,
  points: least_squares.Points,
  terms: _PriorTerms,
  r0: jax.Array,
) -> tuple[jax.Array, ...]:
  """θ of each z, eᵀ Ω e and the chance of each ρ, log posterior of z."""
  omega = _precision(points)
  theta = jax.vmap(_to_theta, (0, None))(z, r0)
  quadratic = jax.vmap(_quadratic, (0, None, None))(theta, points, omega)
  by_rho = jax.vmap(_log_likelihood, (0, None))(quadratic, omega)
  log_prior = jax.vmap(_log_prior, (0, None))(z, terms)
  total = jax.nn.logsumexp(by_rho, axis=1) + log_prior
  return theta, quadratic, jax.nn.softmax(by_rho), total


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


class _Plan(NamedTuple):
  """What all posteriors of as many coordinates are drawn with."""

  steps: np.ndarray  # [draws, coordinates]: Student-t.
  log_density: np.ndarray  # [draws], up to a constant.
  uniform: np.ndarray  # [draws]: picks ρ.
  normal: np.ndarray  # [draws]: of a new evaluation.


@functools.cache
def _plan(dim: int) -> _Plan:
  plain = normals(dim + 4, NUM_DRAWS)
  tails = chi_squares(dim + 4, NUM_DRAWS, dim, _DOF)
  steps = plain[:, :dim] * np.sqrt(_DOF / tails)[:, None]
  log_density = -0.5 * (_DOF + dim) * np.log1p(np.sum(steps**2, 1) / _DOF)
  uniform = special.ndtr(plain[:, dim + 1])
  return _Plan(steps, log_density, uniform, plain[:, -1])


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
  held = theta[0]
  z, hessian = (
    np.asarray(v) for v in _mode(theta, points, terms, free_r0=free_r0)
  )
  dim = len(z)
  plan = _plan(dim)

  def weigh(
    centre: np.ndarray, root: np.ndarray
  ) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    z = centre + plan.steps @ root.T
    *found, total = (
      np.asarray(v) for v in _weigh(jnp.asarray(z), points, terms, held)
    )
    log_w = total - plan.log_density
    w = np.exp(log_w - log_w.max())
    return z, tuple(found), w / w.sum()

  values, vectors = np.linalg.eigh(hessian)
  root = vectors / np.sqrt(np.maximum(values, _MIN_CURVATURE))
  first, _, w = weigh(z, root)
  mean = w @ first
  spread = ((first - mean) * w[:, None]).T @ (first - mean)
  # Few effective draws know their moments badly: keep some of the first guess.
  trust = 1 / (1 + 20 * np.sum(w * w))
  spread = trust * spread + (1 - trust) * root @ root.T
  values, vectors = np.linalg.eigh(spread)
  root = vectors * np.sqrt(1.2 * np.maximum(values, 0.0))
  centre = trust * mean + (1 - trust) * z
  _, (draws, quadratic, chance), w = weigh(centre, root)
  # Systematic resampling: equally likely draws are simple to use.
  at = (np.arange(len(w)) + 0.5) / len(w)
  picked = np.minimum(np.searchsorted(np.cumsum(w), at), len(w) - 1)
  rho_at = np.cumsum(chance, 1)[picked, :-1] < plan.uniform[:, None]
  chi = chi_squares(dim + 4, NUM_DRAWS, dim + 2, float(real.sum()))
  sigma = np.sqrt(quadratic[picked, rho_at.sum(1)] / chi)
  start = special.expit(z[3]) if free_r0 else float(held)
  a = start + (1 - start) * special.expit(z[0])
  mode = np.array([start, a, z[1], z[2]])
  rho = float(w @ chance @ np.array(_RHO))
  return Posterior(mode, draws[picked], sigma * plan.normal, rho)
