"""Hand-over of weights from the trainer to a generator in the same process."""

import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Weights(NamedTuple):
  """Published weights; never donated, never written."""

  params: Any
  version: int


class WeightStore:
  """Holds the newest published weights."""

  def __init__(self, device: Any) -> None:
    """Starts empty.

    Args:
      device: Where generators want the weights.
    """
    self._device = device
    self._lock = threading.Lock()
    self._latest: Weights | None = None

  def publish(self, params: Any, version: int) -> None:
    """Publishes a copy: the train step donates the original.

    Args:
      params: The trainer's parameters, on any devices.
      version: Updates that they contain.
    """
    copy = jax.tree.map(jnp.copy, params)
    weights = Weights(jax.device_put(copy, self._device), version)
    with self._lock:
      self._latest = weights

  def latest(self) -> Weights:
    """Returns the newest weights.

    Raises:
      RuntimeError: Nothing was published.
    """
    with self._lock:
      if self._latest is None:
        raise RuntimeError('no weights were published')
      return self._latest
