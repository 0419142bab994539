"""Least squares for the law: starts on a grid, then damped Gauss-Newton steps.

Everything here works on padded float64 arrays (`Points`) and is jitted; padding
has weight 0. A parameter vector is θ = (R0, A, log B, log C_mid).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_ITERATIONS = 200  # A bound; most fits stop after about ten.
_TOLERANCE = 1e-13
# Of θ; log C_mid is relative to the scale of the data.
BOUNDS = ((0.0, 0.999), (0.0, 1.0), (-3.0, 4.0), (-60.0, 60.0))
# Small steps of B and C_mid: the valley of a curve that has not bent is narrow.
_START_B = (0.5, 0.8, 1.2, 1.8, 2.7, 4.0, 8.0)
_START_C = (-0.3, 1.6, 24)  # As fractions of the range of log compute.
_NUM_STARTS = 3
_GRID_B = (0.1, 20.0, 28)
_GRID_STEPS = 8


class Points(NamedTuple):
  """Evaluations in the order of compute, padded at the end."""

  log_c: jax.Array  # Very negative at compute 0.
  y: jax.Array
  weight: jax.Array  # 0: padding.


def model(theta: jax.Array, log_c: jax.Array) -> jax.Array:
  """The law in the coordinates of the fit.

  Args:
    theta: (R0, A, log B, log C_mid).
    log_c: Log compute.

  Returns:
    Pass rate.
  """
  r0, a, log_b, log_mid = theta
  return r0 + (a - r0) * jax.nn.sigmoid(jnp.exp(log_b) * (log_c - log_mid))


def jacobian(theta: jax.Array, log_c: jax.Array) -> jax.Array:
  """Differentiates R by θ.

  Args:
    theta: (R0, A, log B, log C_mid).
    log_c: Log compute.

  Returns:
    One row per parameter.
  """
  r0, a, log_b, log_mid = theta
  b = jnp.exp(log_b)
  gained = jax.nn.sigmoid(b * (log_c - log_mid))
  slope = (a - r0) * gained * (1 - gained) * b
  return jnp.stack([1 - gained, gained, slope * (log_c - log_mid), -slope])


def sum_squares(theta: jax.Array, points: Points) -> jax.Array:
  """Σ w (R - y)².

  Args:
    theta: (R0, A, log B, log C_mid).
    points: The evaluations.

  Returns:
    The sum.
  """
  return jnp.sum(points.weight * (model(theta, points.log_c) - points.y) ** 2)


def _clipped(theta: jax.Array, free: jax.Array) -> jax.Array:
  r0, a, log_b, log_mid = theta
  r0 = jnp.where(free[0], jnp.clip(r0, *BOUNDS[0]), r0)
  a = jnp.where(free[1], jnp.clip(a, r0, 1.0), a)
  return jnp.stack(
    [r0, a, jnp.clip(log_b, *BOUNDS[2]), jnp.clip(log_mid, *BOUNDS[3])]
  )


@jax.jit
def descend(
  theta: jax.Array, points: Points, free: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Minimises the sum of squares from one start, inside the bounds.

  Levenberg-Marquardt with Marquardt's scaling. A parameter on its bound whose
  gradient points outwards is held, so that the others still move freely.

  Args:
    theta: The start.
    points: The evaluations.
    free: bool[4]; the other parameters are held.

  Returns:
    θ and its sum of squares.
  """

  def step(carry: tuple) -> tuple:
    theta, loss, damping, count, _ = carry
    rows = jacobian(theta, points.log_c)
    residual = model(theta, points.log_c) - points.y
    gradient = rows @ (points.weight * residual)
    r0, a = theta[0], theta[1]
    out = jnp.stack([gradient > 0, gradient < 0])  # Which way a step goes.
    held = jnp.array([(r0 <= 0) & out[0, 0], (a >= 1) & out[1, 1]])
    held |= jnp.array([False, (a <= r0) & out[0, 1]])
    moves = free & ~jnp.pad(held, (0, 2))
    rows = rows * moves[:, None]
    normal = (rows * points.weight[None, :]) @ rows.T
    diagonal = jnp.maximum(jnp.diag(normal), 1e-14)
    matrix = normal + jnp.diag(damping * diagonal + ~moves)
    move = jnp.linalg.solve(matrix, gradient * moves)
    proposal = _clipped(theta - move, free)
    new_loss = sum_squares(proposal, points)
    better = new_loss <= loss
    small = jnp.abs(proposal - theta) <= _TOLERANCE * (1 + jnp.abs(theta))
    # A step that was refused says nothing unless damping made it tiny.
    done = jnp.all(small)
    theta = jnp.where(better, proposal, theta)
    damping = jnp.clip(jnp.where(better, damping / 8, damping * 5), 1e-12, 1e9)
    return theta, jnp.where(better, new_loss, loss), damping, count + 1, done

  def unfinished(carry: tuple) -> jax.Array:
    return (carry[3] < _ITERATIONS) & ~carry[4]

  start = (theta, sum_squares(theta, points), jnp.asarray(1e-3, theta.dtype))
  theta, loss, *_ = jax.lax.while_loop(
    unfinished, step, (*start, jnp.asarray(0), jnp.asarray(False))
  )
  return theta, loss


def log_range(points: Points) -> tuple[jax.Array, jax.Array]:
  """Log of the smallest and of the largest positive compute.

  Args:
    points: The evaluations.

  Returns:
    Both.
  """
  real = (points.weight > 0) & (points.log_c > -1e20)
  low = jnp.min(jnp.where(real, points.log_c, jnp.inf))
  return low, jnp.max(jnp.where(real, points.log_c, -jnp.inf))


@functools.partial(jax.jit, static_argnames='free_r0')
def starts(points: Points, r0: jax.Array, *, free_r0: bool) -> jax.Array:
  """Picks the best starts of a grid over (B, C_mid).

  R is linear in R0 and A, which are solved for in each cell.

  Args:
    points: The evaluations.
    r0: R0, or a guess of it where it is free.
    free_r0: Whether R0 is solved for.

  Returns:
    θ of each start, best first.
  """
  low, high = log_range(points)
  first, last, num = _START_C
  mids = low + jnp.maximum(high - low, 1.0) * jnp.linspace(first, last, num)
  cells_b, cells_c = (
    v.reshape(-1) for v in jnp.meshgrid(jnp.log(jnp.array(_START_B)), mids)
  )
  w = points.weight

  def cell(log_b: jax.Array, mid: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = jax.nn.sigmoid(jnp.exp(log_b) * (points.log_c - mid))
    start = r0
    if free_r0:
      mean_g, mean_y = jnp.sum(w * g), jnp.sum(w * points.y)
      mean_g, mean_y = mean_g / jnp.sum(w), mean_y / jnp.sum(w)
      slope = jnp.sum(w * (g - mean_g) * (points.y - mean_y))
      slope = slope / jnp.maximum(jnp.sum(w * (g - mean_g) ** 2), 1e-12)
      start = jnp.clip(mean_y - slope * mean_g, 0.0, 0.99)
    rise = jnp.sum(w * g * (points.y - start)) / jnp.maximum(
      jnp.sum(w * g * g), 1e-12
    )
    a = jnp.clip(start + rise, start + 1e-3 * (1 - start), 1.0)
    theta = jnp.stack([start, a, log_b, mid])
    return theta, sum_squares(theta, points)

  thetas, losses = jax.vmap(cell)(cells_b, cells_c)
  _, best = jax.lax.top_k(-losses, _NUM_STARTS)
  return thetas[best]


def solve(
  points: Points, r0: jax.Array, *, free_r0: bool
) -> tuple[jax.Array, jax.Array]:
  """Finds the least squares over (A, B, C_mid), and R0 where it is free.

  Args:
    points: The evaluations.
    r0: R0, or a guess of it where it is free.
    free_r0: Whether R0 is fitted.

  Returns:
    θ and its sum of squares.
  """
  free = jnp.array([free_r0, True, True, True])
  # One at a time: the compiled descent from one start has other uses.
  begin = np.asarray(starts(points, r0, free_r0=free_r0))
  found = [descend(jnp.asarray(t), points, free) for t in begin]
  return min(found, key=lambda pair: float(pair[1]))


@jax.jit
def solve_grid(
  points: Points, r0: jax.Array, a_grid: jax.Array, log_c_grid: jax.Array
) -> jax.Array:
  """Searches a grid over A and C_mid, with B by least squares in each cell.

  Args:
    points: The evaluations.
    r0: R0.
    a_grid: Ceilings above R0.
    log_c_grid: Logs of C_mid.

  Returns:
    θ of the cell with the least sum of squares.
  """
  w, rise = points.weight, points.y - r0
  log_b = jnp.log(jnp.geomspace(*_GRID_B))

  def sums(log_b: jax.Array, mid: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = jax.nn.sigmoid(jnp.exp(log_b) * (points.log_c - mid))
    return jnp.sum(w * g * g), jnp.sum(w * g * rise)

  over_mids = jax.vmap(sums, (None, 0))
  squares, products = jax.vmap(over_mids, (0, None))(log_b, log_c_grid)
  gain = (a_grid - r0)[:, None, None]
  coarse = gain**2 * squares[None] - 2 * gain * products[None]
  begin = log_b[jnp.argmin(coarse, 1)]  # Of [A, B, C_mid].

  def cell(
    a: jax.Array, mid: jax.Array, log_b: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    def step(_: Any, carry: tuple) -> tuple:
      log_b, loss, damping = carry
      theta = jnp.stack([r0, a, log_b, mid])
      row = jacobian(theta, points.log_c)[2]
      residual = model(theta, points.log_c) - points.y
      curvature = jnp.sum(w * row * row) * (1 + damping) + 1e-14
      moved = log_b - jnp.sum(w * row * residual) / curvature
      moved = jnp.clip(moved, *BOUNDS[2])
      new = sum_squares(theta.at[2].set(moved), points)
      better = new <= loss
      return (
        jnp.where(better, moved, log_b),
        jnp.where(better, new, loss),
        jnp.where(better, damping / 8, damping * 8 + 1e-2),
      )

    theta = jnp.stack([r0, a, log_b, mid])
    carry = (log_b, sum_squares(theta, points), jnp.asarray(0.0, a.dtype))
    log_b, loss, _ = jax.lax.fori_loop(0, _GRID_STEPS, step, carry)
    return theta.at[2].set(log_b), loss

  inner = jax.vmap(cell, (None, 0, 0))
  thetas, losses = jax.vmap(inner, (0, None, 0))(a_grid, log_c_grid, begin)
  return thetas.reshape(-1, 4)[jnp.argmin(losses)]
