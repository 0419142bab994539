"""The posterior of a curve under weak priors and autocorrelated noise.

    yᵢ = R(Cᵢ) + eᵢ,   eᵢ ~ N(0, σ²/wᵢ),   corr(eᵢ, eⱼ) = ρ^|i - j|

σ and ρ are integrated out, the first in closed form and the second over a
grid. The mode is found by damped Gauss-Newton steps; importance sampling
gives draws, from a Student-t around it and, where that is a bad proposal, from
mixtures around the draws of the round before (population Monte Carlo).
Low-discrepancy points stand in for random ones, so that the same data give the
same draws.
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
_ROUNDS = 6
_EFFECTIVE = 0.5  # Part of the draws; as many are enough.
_MIN_EFFECTIVE = 0.1
_MIN_POWER = 0.01  # Most draws may be outside of what is possible.
_HELD = 1e20  # The precision of what is exact.
_PLAN = (9, NUM_DRAWS)
_NUM_KERNELS = 64
_KERNEL_WIDTH = 0.7
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
  noise_std: np.ndarray  # [draws]: of a new evaluation with weight 1.
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
  """What all posteriors are drawn with: a column each."""

  steps: np.ndarray  # [draws, 2]: of (log B, log C_mid), Student-t.
  linear: np.ndarray  # [draws, 2]: of (R0, A), Student-t.
  linear_density: np.ndarray  # [draws]: its log, up to a constant.
  a_density: np.ndarray  # [draws]: the same of A alone.
  rho: np.ndarray  # [draws], uniform: picks ρ.
  kernel: np.ndarray  # [draws]: picks a kernel of the proposal.


@functools.cache
def _plan() -> _Plan:
  plain = normals(*_PLAN)
  tails = np.stack([chi_squares(*_PLAN, c, _DOF) for c in (4, 5)])
  first, second = np.sqrt(_DOF / tails)[..., None]
  linear = plain[:, 2:4] * second
  uniform = special.ndtr(plain[:, 6:8])
  return _Plan(
    plain[:, :2] * first,
    linear,
    -0.5 * (_DOF + 2) * np.log1p(np.sum(linear**2, 1) / _DOF),
    -0.5 * (_DOF + 1) * np.log1p(linear[:, 1] ** 2 / _DOF),
    uniform[:, 0],
    (uniform[:, 1] * _NUM_KERNELS).astype(int),
  )


class _Kernels(NamedTuple):
  """A proposal: an even mixture of Student-t with the same spread."""

  centres: np.ndarray  # [kernels, coordinates].
  root: np.ndarray  # Of the spread.

  def draw(self, plan: _Plan) -> np.ndarray:
    centre = self.centres[plan.kernel % len(self.centres)]
    return centre + plan.steps @ self.root.T

  def log_density(self, z: np.ndarray) -> np.ndarray:
    """Up to a constant."""
    inverse = np.linalg.pinv(self.root)
    away = (z @ inverse.T)[:, None] - (self.centres @ inverse.T)[None]
    distance = np.sum(away**2, -1)
    power = -0.5 * (_DOF + z.shape[1])
    return np.log(np.mean((1 + distance / _DOF) ** power, 1))


def _softmax(log_w: np.ndarray) -> np.ndarray:
  w = np.exp(log_w - log_w.max())
  return w / w.sum()


def _root(matrix: np.ndarray) -> np.ndarray:
  values, vectors = np.linalg.eigh(matrix)
  return vectors * np.sqrt(np.maximum(values, 0.0))


def _effective(w: np.ndarray) -> float:
  """Number of equally weighted draws that know as much."""
  return float(1 / np.sum(w * w))


def _resampled(w: np.ndarray, num: int) -> np.ndarray:
  """Systematic resampling."""
  at = (np.arange(num) + 0.5) / num
  return np.minimum(np.searchsorted(np.cumsum(w), at), len(w) - 1)


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
  held = theta[0]
  z, hessian, rho_chance = (
    np.asarray(v) for v in _mode(theta, points, terms, free_r0=free_r0)
  )
  known = _Start(
    held if r0 is None else jnp.asarray(float(r0)),
    jnp.asarray(_r0_precision(r0, prior)),
    jnp.asarray(not free_r0),
  )
  plan = _plan()
  linear_density = plan.linear_density if free_r0 else plan.a_density
  values, vectors = np.linalg.eigh(hessian)
  root = vectors / np.sqrt(np.maximum(values, _MIN_CURVATURE))
  proposal = _Kernels(z[None, 1:3], _root((root @ root.T)[1:3, 1:3]))
  for _ in range(_ROUNDS):
    psi = proposal.draw(plan)
    found = _weigh(
      jnp.asarray(psi),
      jnp.asarray(plan.linear),
      points,
      terms,
      known,
      jnp.asarray(rho_chance),
    )
    draws, quadratic, chance, total = (np.asarray(v) for v in found)
    log_w = total - linear_density - proposal.log_density(psi)
    if not np.isfinite(log_w).any():  # Nothing is determined at all.
      draws, w = draws * np.nan, np.ones(len(log_w)) / len(log_w)
      break
    w = _softmax(log_w)
    if _effective(w) > _EFFECTIVE * len(w):
      break
    # Tempered, so that a few heavy draws do not make the next proposal.
    power = 1.0
    while (
      _effective(_softmax(power * log_w)) < _MIN_EFFECTIVE * len(w)
      and power > _MIN_POWER
    ):
      power *= 0.7
    tempered = _softmax(power * log_w)
    mean = tempered @ psi
    spread = ((psi - mean) * tempered[:, None]).T @ (psi - mean)
    # A mixture around what was found bends as a posterior does that is long.
    centres = psi[_resampled(tempered, _NUM_KERNELS)]
    proposal = _Kernels(centres, _KERNEL_WIDTH * _root(spread))
  picked = _resampled(w, len(w))  # Equally likely draws are simple to use.
  rho_at = np.cumsum(chance, 1)[picked, :-1] < plan.rho[:, None]
  chi = chi_squares(*_PLAN, 8, float(real.sum()))
  sigma = np.sqrt(quadratic[picked, rho_at.sum(1)] / chi)
  start = special.expit(z[3]) if free_r0 else float(held)
  a = start + (1 - start) * special.expit(z[0])
  mode = np.array([start, a, z[1], z[2]])
  rho = float(w @ chance @ np.array(_RHO))
  return Posterior(mode, draws[picked], sigma, rho)
