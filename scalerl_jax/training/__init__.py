"""The train step, its optimizer, and what goes into it."""

from scalerl_jax.training.batching import assemble as assemble
from scalerl_jax.training.optimizer import OptimizerConfig as OptimizerConfig
from scalerl_jax.training.optimizer import make_optimizer as make_optimizer
from scalerl_jax.training.state import TrainState as TrainState
from scalerl_jax.training.step import StepMetrics as StepMetrics
from scalerl_jax.training.step import make_train_step as make_train_step

__all__ = (
  'OptimizerConfig',
  'StepMetrics',
  'TrainState',
  'assemble',
  'make_optimizer',
  'make_train_step',
)
