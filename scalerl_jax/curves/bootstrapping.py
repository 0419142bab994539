"""Intervals by resampling, an independent check of those of a fit."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.curves import fitting
from scalerl_jax.curves import law
from scalerl_jax.curves import least_squares

_MIN_RESAMPLES = 10


class Bootstrap(NamedTuple):
  """Refitted parameters of each resample and their percentile intervals."""

  params: law.SigmoidParams  # Of arrays [num_resamples].
  intervals: law.SigmoidParams  # Of (low, high) pairs.
  level: float
  block_size: int
  fit: fitting.SigmoidFit  # Of least squares, with these draws: `forecast` it.


def bootstrap(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  key: jax.Array,
  num_resamples: int = 1000,
  r0: float | None = None,
  min_compute: float = 0.0,
  level: float = 0.9,
  block_size: int | None = 1,
) -> Bootstrap:
  """Refits resampled residuals around the fitted curve by least squares.

      yᵢ* = R̂(Cᵢ) + εᵢ*,   ε* drawn with replacement from the residuals

  Residuals are centred, and scaled by √(n / (n - k)) as a fit of k parameters
  shrinks them. The compute of the evaluations is fixed by the run and is not
  resampled. Evaluations of one run are correlated: blocks of neighbours keep
  that (circular block bootstrap).

  Args:
    compute: As for `fit`.
    pass_rate: As for `fit`.
    key: Randomness.
    num_resamples: Refits, at least 10.
    r0: As for `fit`.
    min_compute: As for `fit`.
    level: Probability that an interval covers, in (0, 1).
    block_size: Neighbouring residuals drawn together, from 1 (independent) to
      all; None: n^(1/3), rounded up.

  Returns:
    The parameters of all refits and their percentile intervals.

  Raises:
    ValueError: As for `fit`, too few resamples, no more points than
      parameters, or a block that does not fit.
  """
  if num_resamples < _MIN_RESAMPLES or not 0 < level < 1:
    raise ValueError(
      f'num_resamples={num_resamples} must be at least {_MIN_RESAMPLES} and'
      f' level={level} in (0, 1)'
    )
  base = fitting.fit(
    compute, pass_rate, r0=r0, min_compute=min_compute, method='least_squares'
  )
  x, y, _ = base.points
  n, num_free = len(x), 3 + (r0 is None)
  if n <= num_free:
    raise ValueError(f'{n} points must be more than the {num_free} parameters')
  size = int(np.ceil(n ** (1 / 3))) if block_size is None else block_size
  if not 1 <= size <= n:
    raise ValueError(f'block_size={block_size} must be from 1 to {n} points')
  predicted = law.evaluate(x, base.params)
  residual = y - predicted
  residual = (residual - residual.mean()) * np.sqrt(n / (n - num_free))
  starts = np.asarray(
    jax.random.randint(key, (num_resamples, -(-n // size)), 0, n)
  )
  drawn = (starts[:, :, None] + np.arange(size)) % n
  noise = residual[drawn.reshape(num_resamples, -1)[:, :n]]
  resampled = np.clip(predicted + noise, 0.0, 1.0)
  scale = fitting.scale_of(x)
  p = base.params
  with jax.enable_x64(True):
    points = fitting.padded(x / scale, y, np.ones(n))
    pad = np.zeros((num_resamples, len(points.y) - n))
    thetas = np.array(
      _refits(
        jnp.array([p.r0, p.a, np.log(p.b), np.log(p.c_mid / scale)]),
        points,
        jnp.asarray(np.concatenate([resampled, pad], 1)),
        jnp.array([r0 is None, True, True, True]),
      )
    )
  thetas[:, 2:] = np.exp(thetas[:, 2:])
  thetas[:, 3] *= scale
  tails = [0.5 - level / 2, 0.5 + level / 2]
  bounds = np.quantile(thetas, tails, axis=0).T
  pairs = [(float(low), float(high)) for low, high in bounds]
  intervals = law.SigmoidParams._make(pairs)
  params = law.SigmoidParams(*thetas.T)
  drawn_fit = base._replace(
    draws=params,
    noise_std=np.full(num_resamples, residual.std()),
    intervals=intervals,
  )
  return Bootstrap(params, intervals, level, size, drawn_fit)


@jax.jit
def _refits(
  theta: jax.Array,
  points: least_squares.Points,
  resampled: jax.Array,
  free: jax.Array,
) -> jax.Array:
  def refit(y: jax.Array) -> jax.Array:
    return least_squares.descend(theta, points._replace(y=y), free)[0]

  return jax.vmap(refit)(resampled)
