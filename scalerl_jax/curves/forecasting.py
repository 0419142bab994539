"""Forecasts and verdicts from a fitted curve."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from scalerl_jax.curves import fitting

OF = ('curve', 'observation')
_FAIL = 0.1


class Forecast(NamedTuple):
  """A forecast at each compute; low and high bound the chosen level."""

  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Verdict(NamedTuple):
  """What to do with a run."""

  decision: str  # `continue`, `stop` or `not enough data`.
  probability: float  # That the target is reached within the budget.
  expected: float  # Pass rate expected at the budget.
  gain_per_compute: float  # Expected further gain per unit of compute.


def forecast(
  fit: fitting.SigmoidFit,
  compute: Sequence[float] | np.ndarray,
  *,
  level: float = 0.9,
  of: str = 'curve',
) -> Forecast:
  """Forecasts the pass rate, with an interval by the delta method.

      Var R(C) = gᵀ Σ g,   g = ∂R/∂θ;   plus σ² for a new observation

  The interval holds for independent noise around a run that follows the law.
  Evaluations of one run are correlated and a run can leave its law, so that
  beyond the data it is too narrow: of 47 later evaluations of six published
  runs the 90 % interval of an observation covers 34.

  Args:
    fit: A fit.
    compute: Where, in the unit of the fit.
    level: Probability that the interval covers, in (0, 1).
    of: `curve`: the true pass rate; `observation`: a new evaluation, with the
      noise of the fitted ones.

  Returns:
    The forecast, bounds clipped to [0, 1]; the whole range where the fit has
    no finite covariance.

  Raises:
    ValueError: level or `of` is not valid.
  """
  if not 0 < level < 1:
    raise ValueError(f'level={level} must be in (0, 1)')
  if of not in OF:
    raise ValueError(f'of={of!r} must be one of {OF}')
  mean, std = _moments(fit, compute, of)
  dof = max(fit.num_points - fit.num_free, 1)
  half = stats.t.ppf(0.5 + level / 2, dof) * std
  return Forecast(
    mean, np.clip(mean - half, 0.0, 1.0), np.clip(mean + half, 0.0, 1.0)
  )


def verdict(
  fit: fitting.SigmoidFit, *, target: float, budget: float
) -> Verdict:
  """Decides whether more compute is worth it.

  Args:
    fit: A fit of the run so far.
    target: Pass rate that is wanted, in [0, 1].
    budget: Total compute that may be spent, in the unit of the fit.

  Returns:
    `continue` where the target is reached with probability 0.1 or more, `stop`
    below that, `not enough data` where the fit is not identifiable.
  """
  mean, std = _moments(fit, [budget], 'curve')
  dof = max(fit.num_points - fit.num_free, 1)
  if np.isfinite(std[0]) and std[0] > 0:
    z = (target - mean[0]) / std[0]
    probability = float(stats.t.sf(z, dof))
  else:
    probability = float(mean[0] >= target) if std[0] == 0 else 0.5
  now, _ = _moments(fit, [fit.max_compute], 'curve')
  extra = budget - fit.max_compute
  gain = float(mean[0] - now[0]) / extra if extra > 0 else 0.0
  decision = 'continue' if probability >= _FAIL else 'stop'
  if not fit.identifiable:
    decision = 'not enough data'
  return Verdict(decision, probability, float(mean[0]), gain)


def _moments(
  fit: fitting.SigmoidFit, compute: Sequence[float] | np.ndarray, of: str
) -> tuple[np.ndarray, np.ndarray]:
  p = fit.params
  with jax.enable_x64(True):
    theta = jax.numpy.array([p.r0, p.a, np.log(p.b), np.log(p.c_mid)])
    x = jax.numpy.asarray(compute, jax.numpy.float64)
    mean = np.asarray(fitting.model(theta, x))
    gradient = np.asarray(jax.jacfwd(fitting.model)(theta, x))
  if not np.isfinite(fit.covariance).all():
    return mean, np.full(mean.shape, np.inf)
  variance = np.einsum('ci,ij,cj->c', gradient, fit.covariance, gradient)
  variance = np.maximum(variance, 0.0)
  if of == 'observation':
    variance = variance + fit.residual_std**2
  return mean, np.sqrt(variance)
