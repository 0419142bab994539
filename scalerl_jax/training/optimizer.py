"""The optimizer of the paper: AdamW, constant rate after a linear warm-up."""

import dataclasses

import optax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
  """Settings of AdamW; defaults from arXiv:2510.13786, A.3, unless said.

  Attributes:
    learning_rate: Rate after the warm-up.
    warmup_steps: Steps of the linear warm-up; 0: none.
    b1: Decay of the first moment (MiniMax-M1's; the paper names none).
    b2: Decay of the second moment (MiniMax-M1's; the paper names none).
    eps: Added to the root of the second moment; tiny, because gradients are.
    weight_decay: Decoupled decay, times the learning rate.
    max_grad_norm: Global norm to clip at (the paper names none).
    max_nonfinite_streak: Skipped updates in a row after which a run stops.
  """

  learning_rate: float = 5e-7
  warmup_steps: int = 100
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-15
  weight_decay: float = 0.01
  max_grad_norm: float = 1.0
  max_nonfinite_streak: int = 5

  def __post_init__(self) -> None:
    """Checks every value; raises ValueError."""
    for name in ('learning_rate', 'eps', 'max_grad_norm'):
      if not getattr(self, name) > 0:  # NaN is refused, too.
        raise ValueError(f'{name}={getattr(self, name)} must be positive')
    for name in ('warmup_steps', 'weight_decay'):
      if not getattr(self, name) >= 0:
        raise ValueError(f'{name}={getattr(self, name)} must not be negative')
    for name in ('b1', 'b2'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be in [0, 1)')
    if self.max_nonfinite_streak < 1:
      raise ValueError(
        f'max_nonfinite_streak={self.max_nonfinite_streak} must be at least 1'
      )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Chains global-norm clipping and AdamW with its warm-up.

  Args:
    config: The settings.

  Returns:
    The gradient transformation. The first step of a warm-up over n steps has
    the rate 1/n of the full one, so that it is not wasted.
  """
  schedule: optax.Schedule | float = config.learning_rate
  if config.warmup_steps:
    schedule = optax.linear_schedule(
      config.learning_rate / config.warmup_steps,
      config.learning_rate,
      config.warmup_steps - 1,
    )
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      schedule,
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
    ),
  )
