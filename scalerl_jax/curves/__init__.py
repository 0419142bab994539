"""Compute-performance curves: the law, its fit, forecasts and verdicts."""

from scalerl_jax.curves.bootstrapping import Bootstrap as Bootstrap
from scalerl_jax.curves.bootstrapping import bootstrap as bootstrap
from scalerl_jax.curves.comparison import Comparison as Comparison
from scalerl_jax.curves.comparison import Slope as Slope
from scalerl_jax.curves.comparison import compare as compare
from scalerl_jax.curves.comparison import slopes as slopes
from scalerl_jax.curves.fitting import Grid as Grid
from scalerl_jax.curves.fitting import SigmoidFit as SigmoidFit
from scalerl_jax.curves.fitting import as_dict as as_dict
from scalerl_jax.curves.fitting import fit as fit
from scalerl_jax.curves.forecasting import Forecast as Forecast
from scalerl_jax.curves.forecasting import Milestone as Milestone
from scalerl_jax.curves.forecasting import Verdict as Verdict
from scalerl_jax.curves.forecasting import forecast as forecast
from scalerl_jax.curves.forecasting import milestones as milestones
from scalerl_jax.curves.forecasting import verdict as verdict
from scalerl_jax.curves.law import SigmoidParams as SigmoidParams
from scalerl_jax.curves.law import sigmoid as sigmoid
from scalerl_jax.curves.posterior import Prior as Prior
from scalerl_jax.curves.power_law import PowerLawFit as PowerLawFit
from scalerl_jax.curves.power_law import fit_power_law as fit_power_law
from scalerl_jax.curves.windows import WindowFit as WindowFit
from scalerl_jax.curves.windows import window_sensitivity as window_sensitivity
from scalerl_jax.curves.windows import window_start as window_start

__all__ = (
  'Bootstrap',
  'Comparison',
  'Forecast',
  'Grid',
  'Milestone',
  'PowerLawFit',
  'Prior',
  'SigmoidFit',
  'SigmoidParams',
  'Slope',
  'Verdict',
  'WindowFit',
  'as_dict',
  'bootstrap',
  'compare',
  'fit',
  'fit_power_law',
  'forecast',
  'milestones',
  'sigmoid',
  'slopes',
  'verdict',
  'window_sensitivity',
  'window_start',
)
