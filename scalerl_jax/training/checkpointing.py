"""Checkpoints: all state of a run in one atomic directory.

    checkpoints/<updates>/train          arrays of the TrainState (Orbax)
    checkpoints/<updates>/host           arrays of the host state (Orbax)
    checkpoints/<updates>/tree           all else of the host state
    checkpoints/<updates>/digests.json   SHA-256 of every file above

The digests are written last: a checkpoint without them was never finished, and
one whose files differ from them is damaged. Either is passed over, with a
warning, for the one before.
"""

import hashlib
import io
import json
import logging
import math
import pathlib
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

_log = logging.getLogger(__name__)
_ARRAY = '__array__'
_DIGESTS = 'digests.json'


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read, though none is damaged."""


class UnusableCheckpointError(ValueError):
  """No checkpoint of a directory can be resumed from, now or later."""


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
    self._keep = keep
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, cleanup_tmp_directories=True
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
      tree=ocp.args.JsonSave({'host': tree, 'form': _form(train_state)}),
    )
    path = self._path(updates)
    try:
      self._manager.save(updates, args=items, force=True)
      if jax.process_index() == 0:
        (path / _DIGESTS).write_text(json.dumps(_digests(path)))
      # Else another process might find a checkpoint without digests.
      multihost_utils.sync_global_devices(f'digests of {updates}')
    except Exception as error:
      # Orbax and tensorstore raise many kinds for a disk that is full.
      raise CheckpointError(
        f'checkpoint {path} could not be written: {_first_line(error)}'
      ) from error
    # Not left to Orbax, which would delete before the digests are there.
    self._delete(sorted(self._manager.all_steps())[: -self._keep])

  def restore(self, template: Any) -> Restored | None:
    """Restores the newest checkpoint that is whole; deletes those after it.

    Args:
      template: Train state with the shapes, dtypes and shardings wanted.

    Returns:
      The checkpoint; None where none was finished.

    Raises:
      UnusableCheckpointError: All checkpoints are damaged, or the newest whole
        one holds a train state of another form than the template.
      CheckpointError: A file could not be read, which may pass.
    """
    passed: list[int] = []
    for updates in sorted(self._manager.all_steps(), reverse=True):
      path = self._path(updates)
      try:
        damage = _damage(path)
        if damage is None:
          restored = self._read(updates, template)
          self._delete(passed)  # Else their names could not be used again.
          return restored
      except (OSError, RuntimeError) as error:
        raise CheckpointError(
          f'checkpoint {path} could not be read: {_first_line(error)}'
        ) from error
      _log.warning('checkpoint %s is passed over: %s', path, damage)
      passed.append(updates)
    # Else another process might still look for what is deleted here.
    multihost_utils.sync_global_devices('no whole checkpoint')
    if any((self._path(updates) / _DIGESTS).exists() for updates in passed):
      raise UnusableCheckpointError(
        f'all checkpoints in {self._directory} are damaged; start in a new'
        ' --workdir'
      )
    self._delete(passed)
    return None

  def close(self) -> None:
    """Waits for what is under way."""
    self._manager.close()

  def _delete(self, steps: list[int]) -> None:
    for updates in steps:
      self._manager.delete(updates)

  def _path(self, updates: int) -> pathlib.Path:
    return self._directory / str(updates)

  def _read(self, updates: int, template: Any) -> Restored:
    args = ocp.args.Composite(tree=ocp.args.JsonRestore())
    tree = self._manager.restore(updates, args=args).tree
    if tree['form'] != _form(template):
      raise UnusableCheckpointError(
        f'checkpoint {self._path(updates)} holds other arrays'
        f' ({_first_difference(tree["form"], _form(template))}); start in a new'
        ' --workdir'
      )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    item = self._manager.restore(
      updates,
      args=ocp.args.Composite(
        train=ocp.args.StandardRestore(abstract),
        host=ocp.args.StandardRestore(),
      ),
    )
    stored = io.BytesIO(np.asarray(item.host['bytes']).tobytes())
    return Restored(updates, item.train, _unflatten(tree['host'], stored))


def read_params(
  directory: pathlib.Path, template: Any, *, updates: int | None = None
) -> tuple[int, Any]:
  """Reads the parameters alone, and changes nothing in the directory.

  Args:
    directory: Of the run's checkpoints.
    template: Parameters, or their shapes, dtypes and shardings.
    updates: Which checkpoint; None: the newest that is whole.

  Returns:
    (updates, parameters).

  Raises:
    UnusableCheckpointError: There is no such checkpoint, it is damaged, or its
      parameters have another form than the template.
    CheckpointError: A file could not be read, which may pass.
  """
  names = [p.name for p in directory.glob('*') if p.name.isdecimal()]
  wanted = sorted(map(int, names), reverse=True)
  if updates is not None:
    wanted = [n for n in wanted if n == updates]
  found = f'has no checkpoint {"" if updates is None else updates}'.rstrip()
  for number in wanted:
    path = directory / str(number)
    try:
      if damage := _damage(path):
        found = f'{number}: {damage}'
        continue
      tree = json.loads((path / 'tree' / 'metadata').read_text('utf-8'))
      stored = {
        k.removeprefix('.params'): v
        for k, v in tree['form'].items()
        if k.startswith('.params')
      }
      if stored != _form(template):
        raise UnusableCheckpointError(
          f'checkpoint {path} holds other parameters'
          f' ({_first_difference(stored, _form(template))})'
        )
      abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
      with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        restored = reader.restore(
          (path / 'train').absolute(),
          args=ocp.args.PyTreeRestore(
            item={'params': abstract},
            restore_args={
              'params': ocp.checkpoint_utils.construct_restore_args(abstract)
            },
            partial_restore=True,
          ),
        )
      return number, restored['params']
    except (OSError, RuntimeError) as error:
      raise CheckpointError(
        f'checkpoint {path} could not be read: {_first_line(error)}'
      ) from error
  raise UnusableCheckpointError(f'{directory} {found}')


def _first_line(error: Exception) -> str:
  return str(error).split('\n')[0]


def _form(state: Any) -> dict[str, str]:
  """Shape and dtype of every array of a state, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {
    jax.tree_util.keystr(path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
  }


def _first_difference(stored: dict[str, str], wanted: dict[str, str]) -> str:
  path = next(k for k in {**wanted, **stored} if stored.get(k) != wanted.get(k))
  return f'{path}: {stored.get(path)} stored, {wanted.get(path)} wanted'


def _digests(directory: pathlib.Path) -> dict[str, str]:
  """SHA-256 of every file, by its path below the directory."""
  digests = {}
  for path in sorted(p for p in directory.rglob('*') if p.is_file()):
    if path.name != _DIGESTS:
      with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
      digests[path.relative_to(directory).as_posix()] = digest
  return digests


def _damage(directory: pathlib.Path) -> str | None:
  """What is wrong with the files of a checkpoint; None for nothing."""
  try:
    stored = json.loads((directory / _DIGESTS).read_text(encoding='utf-8'))
  except FileNotFoundError:
    return 'it was not finished'
  except ValueError:
    return f'{_DIGESTS} cannot be parsed'
  found = _digests(directory)
  return next(
    (
      f'{name} is missing or has changed'
      for name, digest in stored.items()
      if found.get(name) != digest
    ),
    None,
  )


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
  if not isinstance(value, str | int | float | None):
    raise TypeError(f'{value!r} in the host state is not serializable')
  return value


def _unflatten(tree: Any, stored: io.BytesIO) -> Any:
  """Inverts `_flatten`; arrays follow one another in the order of the tree."""
  if isinstance(tree, list):
    return [_unflatten(v, stored) for v in tree]
  if not isinstance(tree, dict):
    return tree
  if _ARRAY not in tree:
    return {k: _unflatten(v, stored) for k, v in tree.items()}
  dtype, shape = np.dtype(tree[_ARRAY]), tuple(tree['shape'])
  data = stored.read(dtype.itemsize * math.prod(shape))
  return np.frombuffer(data, dtype).reshape(shape).copy()
