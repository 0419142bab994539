"""Forecasts, milestones and verdicts from a fitted curve."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from scalerl_jax.curves import fitting
from scalerl_jax.curves import law

OF = ('curve', 'observation')
_FAIL = 0.1
_BLOCK = 512  # Points whose draws are in memory together.
# A normal by its quantiles, which leave less to chance than draws would.
_NORMAL = stats.norm.ppf((np.arange(16) + 0.5) / 16)
_NORMAL /= _NORMAL.std()


class Forecast(NamedTuple):
  """A forecast at each compute; low and high bound the chosen level."""

  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Milestone(NamedTuple):
  """Where a part of the rise is done."""

  fraction: float  # Of A - R0.
  compute: float
  low: float  # Of the interval at level 0.9.
  high: float


class Verdict(NamedTuple):
  """What to do with a run."""

  decision: str  # `continue`, `stop` or `not enough data`.
  probability: float  # That the target is reached within the budget.
  expected: float  # Pass rate expected at the budget.
  gain_per_compute: float  # Expected further gain per unit of compute.
  compute_to_target: float | None  # Total; None: the fitted curve never does.
  cost: float | None  # Of the rest of the budget; None without a price.
  gain_per_cost: float | None  # Expected further gain per unit of cost.


def forecast(
  fit: fitting.SigmoidFit,
  compute: Sequence[float] | np.ndarray,
  *,
  level: float = 0.9,
  of: str = 'curve',
) -> Forecast:
  """Forecasts the pass rate.

  The forecast is the fitted curve, its interval the quantiles of the draws of
  the fit. It holds where the run goes on to follow the law: a collapse is not
  foreseen.

  Args:
    fit: A fit, or that of a `bootstrap`.
    compute: Where, in the unit of the fit, not negative.
    level: Probability that the interval covers, in (0, 1).
    of: `curve`: the true pass rate; `observation`: a new evaluation, with the
      noise of the fitted ones.

  Returns:
    The forecast, bounds clipped to [0, 1]; the whole range where the data do
    not determine a curve at all.

  Raises:
    ValueError: level, `of` or a compute is not valid.
  """
  if not 0 < level < 1:
    raise ValueError(f'level={level} must be in (0, 1)')
  if of not in OF:
    raise ValueError(f'of={of!r} must be one of {OF}')
  x = np.atleast_1d(np.asarray(compute, np.float64))
  if not (x >= 0).all():
    raise ValueError(f'compute={compute} must not be negative')
  mean = law.evaluate(x, fit.params)
  blocks = range(0, max(len(x), 1), _BLOCK)
  bounds = [_bounds(fit, x[i : i + _BLOCK], level, of) for i in blocks]
  low, high = np.concatenate(bounds, axis=1)
  # The mode of a skewed posterior can lie outside a narrow interval.
  return Forecast(mean, np.minimum(low, mean), np.maximum(high, mean))


def milestones(
  fit: fitting.SigmoidFit,
  *,
  fractions: Sequence[float] = (0.9, 0.95, 0.99),
) -> tuple[Milestone, ...]:
  """Finds the compute at which a part of A - R0 is gained.

      C = C_mid · (f / (1 - f))^(1/B)

  Args:
    fit: A fit.
    fractions: f of each, in (0, 1).

  Returns:
    One for each, with infinite bounds where the data determine nothing.

  Raises:
    ValueError: A fraction is not in (0, 1).
  """
  found = []
  for f in fractions:
    if not 0 < f < 1:
      raise ValueError(f'fractions={tuple(fractions)} must be in (0, 1)')
    at = law.compute_at(f, fit.params)
    drawn = law.compute_at(f, fit.draws)
    low, high = 0.0, np.inf
    if np.isfinite(drawn).all():
      low, high = np.quantile(drawn, [0.05, 0.95])
    found.append(Milestone(f, float(at), float(low), float(high)))
  return tuple(found)


def verdict(
  fit: fitting.SigmoidFit,
  *,
  target: float,
  budget: float,
  price: float | None = None,
) -> Verdict:
  """Decides whether more compute is worth it.

  Args:
    fit: A fit of the run so far.
    target: Pass rate that is wanted, in [0, 1].
    budget: Total compute that may be spent, what was spent included, in the
      unit of the fit.
    price: Of a unit of compute, in any currency; None: no cost is computed.

  Returns:
    `continue` where the target is reached with probability 0.1 or more, `stop`
    below that, `not enough data` where the fit is not identifiable.

  Raises:
    ValueError: target, budget or price is out of range.
  """
  if not 0 <= target <= 1:
    raise ValueError(f'target={target} must be a pass rate in [0, 1]')
  if not 0 < budget < np.inf:
    raise ValueError(f'budget={budget} must be positive and finite')
  if price is not None and not 0 <= price < np.inf:
    raise ValueError(f'price={price} must not be negative')
  at = np.array([fit.max_compute, budget])
  now, expected = law.evaluate(at, fit.params)
  drawn = _draws_at(fit, at)[:, 1]
  probability = 0.5
  if np.isfinite(drawn).all():
    probability = float(np.mean(drawn >= target))
  extra = max(budget - fit.max_compute, 0.0)
  gain = float(expected - now) if extra else 0.0
  p = fit.params
  reach: float | None = None
  if target <= p.r0:
    reach = 0.0
  elif target < p.a:
    reach = float(law.compute_at((target - p.r0) / (p.a - p.r0), p))
  cost = None if price is None else price * extra
  decision = 'continue' if probability >= _FAIL else 'stop'
  if not fit.identifiable:
    decision = 'not enough data'
  return Verdict(
    decision=decision,
    probability=probability,
    expected=float(expected),
    gain_per_compute=gain / extra if extra else 0.0,
    compute_to_target=reach,
    cost=cost,
    gain_per_cost=gain / cost if cost else None,
  )


def _bounds(
  fit: fitting.SigmoidFit, x: np.ndarray, level: float, of: str
) -> np.ndarray:
  """[2, compute]: quantiles of the draws, in [0, 1]."""
  curves = np.ascontiguousarray(_draws_at(fit, x).T)
  if of == 'observation':
    noise = _NORMAL[:, None] * fit.noise_std[None]
    curves = (curves[:, None] + noise).reshape(len(x), noise.size)
  if not np.isfinite(curves).all():
    return np.repeat([[0.0], [1.0]], len(x), axis=1)
  tails = [0.5 - level / 2, 0.5 + level / 2]
  return np.clip(np.quantile(curves, tails, axis=1), 0.0, 1.0)


def _draws_at(fit: fitting.SigmoidFit, compute: np.ndarray) -> np.ndarray:
  """[draws, compute]."""
  columns = law.SigmoidParams._make(v[:, None] for v in fit.draws)
  return law.evaluate(compute, columns)
