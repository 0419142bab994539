"""Compute-performance curves: the law, its fit, forecasts and verdicts."""

from scalerl_jax.curves.fitting import as_dict as as_dict
from scalerl_jax.curves.fitting import fit as fit
from scalerl_jax.curves.fitting import SigmoidFit as SigmoidFit
from scalerl_jax.curves.forecasting import Forecast as Forecast
from scalerl_jax.curves.forecasting import forecast as forecast
from scalerl_jax.curves.forecasting import Verdict as Verdict
from scalerl_jax.curves.forecasting import verdict as verdict
from scalerl_jax.curves.law import sigmoid as sigmoid
from scalerl_jax.curves.law import SigmoidParams as SigmoidParams

__all__ = (
  'Forecast',
  'SigmoidFit',
  'SigmoidParams',
  'Verdict',
  'as_dict',
  'fit',
  'forecast',
  'sigmoid',
  'verdict',
)
