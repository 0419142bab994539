"""Several processes as one run: the first leads, the others follow it.

Parameters and optimizer state lie on the devices of all processes, so what
touches them all must do, in the same order. Those operations have names here.
All else, generation, evaluation, files, is done by process 0 alone, as if there
were no other: it tells the others what comes, and does it with them.

Who waits asks the coordination service of JAX, not a device: a collective that
waits for minutes is taken for dead.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import json
import math
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

_ASK_S = 60
_WORDS = np.int32  # What arrays are sent as: sums with zeros keep them.
_END = 'end'

Operation = Callable[[Mapping[str, np.ndarray]], Any]


class FollowError(RuntimeError):
  """Process 0 ended before the run did; the message is one line."""


class Processes:
  """The processes of a run; with one, operations are plain calls."""

  def __init__(self) -> None:
    """Knows no operation yet."""
    self._operations: dict[str, Operation] = {}
    self._num_sent = 0  # Or received.

  @property
  def leads(self) -> bool:
    """Whether this process is the one that decides."""
    return jax.process_index() == 0

  @property
  def count(self) -> int:
    """Processes of the run."""
    return jax.process_count()

  def register(self, name: str, operation: Operation) -> None:
    """Names what all processes do together.

    Args:
      name: Its name, the same in all.
      operation: Takes what process 0 gives to `call`.
    """
    self._operations[name] = operation

  def call(
    self, name: str, arrays: Mapping[str, np.ndarray] | None = None
  ) -> Any:
    """Does an operation in all processes; for process 0.

    Args:
      name: Of the operation.
      arrays: What it works on, of numbers or bools, by name; None: nothing.

    Returns:
      What it returned here.
    """
    arrays = arrays or {}
    if self.count > 1:
      self._send(name, arrays)
    return self._operations[name](arrays)

  def follow(self) -> None:
    """Does what process 0 says until it ends; for the others.

    Raises:
      FollowError: It ended for an error, or does not answer.
    """
    with _interrupts_ignored():  # That is for process 0 to decide on.
      while True:
        name, arrays, error = self._receive()
        if error:
          raise FollowError(f'process 0 ended: {error}')
        if name == _END:
          return
        self._operations[name](arrays)

  @contextlib.contextmanager
  def leading(self) -> Iterator[None]:
    """Lets the others go at the end, and tells them of an error.

    Yields:
      Nothing.
    """
    try:
      yield
    except BaseException as error:
      self._end(' '.join(str(error).split()) or type(error).__name__)
      raise
    self._end('')

  def _end(self, error: str) -> None:
    if self.count > 1 and self.leads:
      self._send(_END, {}, error=error)

  def _send(
    self, name: str, arrays: Mapping[str, np.ndarray], *, error: str = ''
  ) -> None:
    fields = [[k, a.dtype.str, list(a.shape)] for k, a in arrays.items()]
    parts = [np.ascontiguousarray(a).tobytes() for a in arrays.values()]
    data = b''.join(parts)
    data += bytes(-len(data) % np.dtype(_WORDS).itemsize)
    words = np.frombuffer(data, _WORDS)
    message = {
      'name': name,
      'fields': fields,
      'num_words': words.size,
      'error': error,
    }
    store = _key_value_store()
    store.key_value_set(_key(self._num_sent), json.dumps(message))
    if self._num_sent:  # All have read it: they did what it says.
      store.key_value_delete(_key(self._num_sent - 1))
    self._num_sent += 1
    if words.size:
      multihost_utils.broadcast_one_to_all(words)

  def _receive(self) -> tuple[str, dict[str, np.ndarray], str]:
    message = json.loads(_wait_for(_key(self._num_sent)))
    self._num_sent += 1
    arrays = {}
    if message['num_words']:
      words = multihost_utils.broadcast_one_to_all(
        np.zeros(message['num_words'], _WORDS)
      )
      data, start = np.asarray(words).tobytes(), 0
      for name, dtype, shape in message['fields']:
        array = np.frombuffer(data, dtype, math.prod(shape), start)
        array = array.reshape(shape)
        start += array.nbytes
        arrays[name] = array
    return message['name'], arrays, message['error']


def gather(params: Any, *, dtype: str | None, limit: int = 2**28) -> Any:
  """Brings parameters from the devices of all processes to process 0.

  Each array comes in pieces, so that no device ever holds much more than its
  shards.

  Args:
    params: Arrays over the devices of all processes.
    dtype: What they are cast to first; None: they are left as they are.
    limit: Bytes of a piece, of what is sent, unless one entry of the first axis
      is larger.

  Returns:
    Numpy arrays; in the other processes, None in their place.
  """
  return jax.tree.map(
    lambda x: _gather_array(x, np.dtype(dtype or x.dtype), limit), params
  )


def _gather_array(
  x: jax.Array, dtype: np.dtype, limit: int
) -> np.ndarray | None:
  assert isinstance(x.sharding, jax.sharding.NamedSharding)
  everywhere = jax.sharding.NamedSharding(
    x.sharding.mesh, jax.sharding.PartitionSpec()
  )
  out = np.empty(x.shape, dtype) if jax.process_index() == 0 else None
  bytes_of_entry = dtype.itemsize * math.prod(x.shape[1:])
  size = max(limit // bytes_of_entry, 1)
  for start in range(0, x.shape[0], size):
    stop = min(start + size, x.shape[0])
    piece = _piece(x, np.int32(start), stop - start, dtype, everywhere)
    if out is not None:
      out[start:stop] = np.asarray(piece)
  return out


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _piece(
  x: jax.Array,
  start: jax.Array,
  size: int,
  dtype: np.dtype,
  everywhere: jax.sharding.NamedSharding,
) -> jax.Array:
  piece = jax.lax.dynamic_slice_in_dim(x, start, size).astype(dtype)
  return jax.lax.with_sharding_constraint(piece, everywhere)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
  if threading.current_thread() is not threading.main_thread():
    yield  # Signals reach the main thread only.
    return
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)


def _key(number: int) -> str:
  return f'scalerl_jax/{number}'


def _key_value_store() -> Any:
  # JAX has no public name for it.
  from jax._src import distributed

  return distributed.global_state.client


def _wait_for(key: str) -> str:
  while True:
    try:
      return _key_value_store().blocking_key_value_get(key, _ASK_S * 1000)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        reason = str(error).split('\n')[0]
        raise FollowError(f'process 0 does not answer: {reason}') from None
