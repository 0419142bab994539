"""Checkpoints: all state of a run in one atomic directory.

    checkpoints/<updates>/train   arrays of the TrainState (Orbax)
    checkpoints/<updates>/host    arrays of the host state (Orbax)
    checkpoints/<updates>/tree    all else of the host state, and a checksum

A directory appears under its final name only when it is complete. A newest one
that cannot be read is passed over, with a warning, for the one before.
"""

import io
import json
import logging
import math
import pathlib
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp

_log = logging.getLogger(__name__)
_ARRAY = '__array__'


class CheckpointError(RuntimeError):
  """A checkpoint could not be saved."""


class Restored(NamedTuple):
  """A checkpoint that was read."""

  updates: int
  train_state: Any
  host: dict[str, Any]


class Checkpointer:
  """Saves and restores; the newest `keep` checkpoints stay."""

  def __init__(self, directory: pathlib.Path, *, keep: int) -> None:
    """Creates the directory if needed.

    Args:
      directory: Of the run's checkpoints.
      keep: How many to keep, at least 1.
    """
    self._directory = directory
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False
      ),
    )

  def save(
    self, updates: int, *, train_state: Any, host: dict[str, Any]
  ) -> None:
    """Saves a checkpoint under the number of updates; replaces none.

    Args:
      updates: Updates that the state contains.
      train_state: Pytree of arrays.
      host: Nested dicts and lists of JSON values and numpy arrays.

    Raises:
      TypeError: A value or array of `host` is of no type that can be stored.
      CheckpointError: It could not be written; those before it stay.
    """
    arrays: list[np.ndarray] = []
    tree = _flatten(host, arrays)
    # One buffer: a file per array would cost more than the arrays. The extra
    # byte is there because Orbax stores no empty array.
    parts = [np.ascontiguousarray(a).tobytes() for a in arrays]
    stored = {'bytes': np.frombuffer(b''.join(parts) + b'\0', np.uint8)}
    items = ocp.args.Composite(
      train=ocp.args.StandardSave(train_state),
      host=ocp.args.StandardSave(stored),
      tree=ocp.args.JsonSave(
        {'host': tree, 'checksum': _checksum(train_state, tree, arrays)}
      ),
    )
    try:
      self._manager.save(updates, args=items, force=True)
    except Exception as error:
      # Orbax and tensorstore raise many kinds for a disk that is full.
      reason = str(error).split('\n')[0]
      raise CheckpointError(
        f'checkpoint {self._directory / str(updates)} could not be written:'
        f' {reason}'
      ) from error

  def restore(self, template: Any) -> Restored | None:
    """Restores the newest checkpoint that can be read.

    Args:
      template: Train state with the shapes, dtypes and shardings wanted.

    Returns:
      The checkpoint; None where there is none at all.

    Raises:
      ValueError: There are checkpoints and none of them can be read.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for i, updates in enumerate(steps):
      try:
        restored = self._read(updates, template)
      except Exception as error:
        # Orbax and tensorstore raise many kinds for a damaged directory.
        reason = str(error).split('\n')[0][:200]
        path = self._directory / str(updates)
        _log.warning(
          'checkpoint %s cannot be read, trying the one before: %s',
          path,
          reason,
        )
        continue
      for damaged in steps[:i]:  # Else their names could not be used again.
        self._manager.delete(damaged)
      return restored
    if steps:
      raise ValueError(
        f'none of the checkpoints in {self._directory} can be read; start in'
        ' a new --workdir'
      )
    return None

  def close(self) -> None:
    """Waits for what is under way."""
    self._manager.close()

  def _read(self, updates: int, template: Any) -> Restored:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    item = self._manager.restore(
      updates,
      args=ocp.args.Composite(
        train=ocp.args.StandardRestore(abstract),
        host=ocp.args.StandardRestore(),
        tree=ocp.args.JsonRestore(),
      ),
    )
    tree = item.tree
    stored = io.BytesIO(np.asarray(item.host['bytes']).tobytes())
    arrays: list[np.ndarray] = []
    host = _unflatten(tree['host'], stored, arrays)
    checksum = _checksum(item.train, tree['host'], arrays)
    if checksum != tree['checksum']:
      raise ValueError('the checksum does not match: the files were damaged')
    return Restored(updates, item.train, host)


def _checksum(train_state: Any, tree: Any, arrays: list[np.ndarray]) -> int:
  crc = zlib.crc32(json.dumps(tree).encode('utf-8'))
  for leaf in [*jax.tree.leaves(train_state), *arrays]:
    crc = zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).tobytes(), crc)
  return crc


def _flatten(value: Any, arrays: list[np.ndarray]) -> Any:
  if isinstance(value, dict):
    return {k: _flatten(v, arrays) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_flatten(v, arrays) for v in value]
  if isinstance(value, np.ndarray):
    dtype = value.dtype
    # The name of an extension type, as bfloat16's, reads back as raw bytes.
    if dtype.hasobject or np.dtype(dtype.str) != dtype:
      raise TypeError(f'an array of {dtype} in the host state cannot be stored')
    arrays.append(value)
    return {_ARRAY: dtype.str, 'shape': list(value.shape)}
  if isinstance(value, np.generic):
    return value.item()
  return value


def _unflatten(tree: Any, stored: io.BytesIO, arrays: list[np.ndarray]) -> Any:
  """Inverts `_flatten`; arrays follow one another in the order of the tree."""
  if isinstance(tree, list):
    return [_unflatten(v, stored, arrays) for v in tree]
  if not isinstance(tree, dict):
    return tree
  if _ARRAY not in tree:
    return {k: _unflatten(v, stored, arrays) for k, v in tree.items()}
  dtype, shape = np.dtype(tree[_ARRAY]), tuple(tree['shape'])
  size = dtype.itemsize * math.prod(shape)
  data = stored.read(size)
  arrays.append(np.frombuffer(data, dtype).reshape(shape).copy())
  return arrays[-1]
