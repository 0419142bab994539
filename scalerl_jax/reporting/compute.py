"""Metering of compute where it is spent: device time, FLOPs and tokens."""

import math
from typing import Any, NamedTuple

from scalerl_jax.models import spec as spec_lib

AXES = ('device_hours', 'flops', 'tokens')
_SECONDS_PER_HOUR = 3600.0


def forward_flops(
  spec: spec_lib.ModelSpec, *, num_tokens: int, num_pairs: int
) -> float:
  """Counts the FLOPs of a forward pass, two per multiply-add.

      2 · (matrix parameters, head included) · tokens + 4 · L · N · H · pairs

  Of a mixture, the experts that a token takes count; layers that see a part of
  the sequence count as if they saw it all. Norms, rotations and the embedding
  lookup are left out, as usual. A backward pass costs twice as much again.

  Args:
    spec: The model.
    num_tokens: Tokens that pass through.
    num_pairs: (query, key) pairs attended, summed over sequences; a causal
      sequence of n tokens has n(n + 1)/2.

  Returns:
    FLOPs.
  """
  table = spec_lib.parameter_table(spec)
  skipped = {'embed'} if not spec.tied_head else set()
  matrices = 0.0
  for path, info in table.items():
    per_layer = info.shape[1:] if path.startswith('layers/') else info.shape
    is_matrix = len(per_layer) > 1 and not path.endswith('_bias')
    if is_matrix and path not in skipped:
      active = spec_lib.active_fraction(spec, path)
      matrices += active * math.prod(info.shape)
  heads = spec.num_layers * spec.num_heads * spec.head_dim
  return 2.0 * matrices * num_tokens + 4.0 * heads * num_pairs


class ComputeMeter(NamedTuple):
  """Compute spent so far; replaced, never written.

  Evaluation is metered apart and is on no axis: a curve must not depend on how
  often it is looked at.
  """

  generation_seconds: float = 0.0  # Device-seconds.
  training_seconds: float = 0.0
  evaluation_seconds: float = 0.0
  generation_flops: float = 0.0
  training_flops: float = 0.0
  evaluation_flops: float = 0.0
  tokens: int = 0  # Sampled for training.
  evaluation_tokens: int = 0

  def add(self, **amounts: int | float) -> 'ComputeMeter':
    """Adds amounts to fields of the same name.

    Args:
      **amounts: Field name → amount.

    Returns:
      The new meter.
    """
    return self._replace(
      **{name: getattr(self, name) + v for name, v in amounts.items()}
    )

  @property
  def device_hours(self) -> float:
    """Device-hours of generation and training."""
    return (self.generation_seconds + self.training_seconds) / _SECONDS_PER_HOUR

  @property
  def flops(self) -> float:
    """FLOPs of generation and training."""
    return self.generation_flops + self.training_flops

  def on_axis(self, axis: str) -> float:
    """Reads the compute axis of the curve.

    Args:
      axis: One of `AXES`.

    Returns:
      Compute so far.
    """
    if axis not in AXES:
      raise ValueError(f'axis={axis!r} must be one of {AXES}')
    value: Any = getattr(self, axis)
    return float(value)
