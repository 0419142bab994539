"""Intervals by resampling, where the delta method is too optimistic."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from scalerl_jax.curves import fitting
from scalerl_jax.curves import law


class Bootstrap(NamedTuple):
  """Refitted parameters of each resample and their percentile intervals."""

  params: law.SigmoidParams  # Of arrays [num_resamples].
  intervals: law.SigmoidParams  # Of (low, high) pairs.
  level: float


def bootstrap(
  compute: Sequence[float] | np.ndarray,
  pass_rate: Sequence[float] | np.ndarray,
  *,
  key: jax.Array,
  num_resamples: int = 200,
  r0: float | None = None,
  min_compute: float = 0.0,
  level: float = 0.9,
) -> Bootstrap:
  """Refits resampled residuals around the fitted curve.

      yᵢ* = R̂(Cᵢ) + εᵢ*,   ε* drawn with replacement from the residuals

  Residuals are centred, and scaled by √(n / (n - k)) as a fit of k parameters
  shrinks them. The compute of the evaluations is fixed by the run and is not
  resampled.

  Args:
    compute: As for `fit`.
    pass_rate: As for `fit`.
    key: Randomness.
    num_resamples: Refits, at least 10.
    r0: As for `fit`.
    min_compute: As for `fit`.
    level: Probability that an interval covers, in (0, 1).

  Returns:
    The parameters of all refits and their percentile intervals.

  Raises:
    ValueError: As for `fit`, too few resamples, or no more points than
      parameters.
  """
  if num_resamples < 10 or not 0 < level < 1:
    raise ValueError(
      f'num_resamples={num_resamples} must be at least 10 and level={level} in'
      ' (0, 1)'
    )
  base = fitting.fit(compute, pass_rate, r0=r0, min_compute=min_compute)
  x, y, _ = base.points
  if len(x) <= base.num_free:
    raise ValueError(
      f'{len(x)} points must be more than the {base.num_free} parameters'
    )
  predicted = base.params.r0 + (base.params.a - base.params.r0) * (
    law.gained(x, base.params)
  )
  residual = y - predicted
  residual = (residual - residual.mean()) * np.sqrt(
    len(x) / (len(x) - base.num_free)
  )
  shape = (num_resamples, len(x))
  drawn = np.asarray(jax.random.randint(key, shape, 0, len(x)))
  resampled = np.clip(predicted + residual[drawn], 0.0, 1.0)
  thetas = np.array([fitting.fit(x, s, r0=r0).params for s in resampled])
  tails = [0.5 - level / 2, 0.5 + level / 2]
  bounds = np.quantile(thetas, tails, axis=0).T
  pairs = [(float(low), float(high)) for low, high in bounds]
  intervals = law.SigmoidParams._make(pairs)
  return Bootstrap(law.SigmoidParams(*thetas.T), intervals, level)
