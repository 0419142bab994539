"""Compute-performance curves: the law, its fit, forecasts and verdicts."""

from scalerl_jax.curves.fit import as_dict as as_dict
from scalerl_jax.curves.fit import fit as fit
from scalerl_jax.curves.fit import SigmoidFit as SigmoidFit
from scalerl_jax.curves.forecast import Forecast as Forecast
from scalerl_jax.curves.forecast import forecast as forecast
from scalerl_jax.curves.forecast import Verdict as Verdict
from scalerl_jax.curves.forecast import verdict as verdict
from scalerl_jax.curves.sigmoid import sigmoid as sigmoid
from scalerl_jax.curves.sigmoid import SigmoidParams as SigmoidParams

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
