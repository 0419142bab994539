"""Hand-over of weights from the trainer to the generator's side."""

from collections.abc import Callable
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

  def __init__(
    self,
    device: Any,
    *,
    dtype: Any = None,
    gather: Callable[[], Any] | None = None,
  ) -> None:
    """Starts empty.

    Args:
      device: Where generators want the weights; None: where they are.
      dtype: What they are cast to; None: they are left as they are.
      gather: Copies the trainer's parameters to this host from the devices of
        all processes; None: they are all here.
    """
    self._device = device
    self._dtype = dtype
    self._gather = gather
    self._lock = threading.Lock()
    self._latest: Weights | None = None

  def publish(self, params: Any, version: int) -> None:
    """Publishes a copy: the train step donates the original.

    Args:
      params: The trainer's parameters, on any devices.
      version: Updates that they contain.
    """
    if self._gather is not None:
      copy = self._gather()
    else:
      copy = jax.tree.map(
        lambda x: jnp.copy(x).astype(self._dtype or x.dtype), params
      )
    if self._device is not None:
      copy = jax.device_put(copy, self._device)
    weights = Weights(copy, version)
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
