"""Compute-performance curves out of the logs of any trainer."""

from scalerl_jax.logs.columns import Curve as Curve
from scalerl_jax.logs.reading import read as read

__all__ = (
  'Curve',
  'read',
)
