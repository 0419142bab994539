"""Checkpoints in: from safetensors files straight into sharded arrays.

Each device shard is filled from the parts of the tensors that it needs, one
tensor at a time, so that the host never holds the model.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import models
from scalerl_jax.hf import errors
from scalerl_jax.hf import keys

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
# Written by some exporters; they follow from the configuration.
_DERIVED = '.rotary_emb.inv_freq'
# Of a model that reads images too, the text; all else is left out.
_TEXT = 'language_model.'
_MAX_LISTED = 5
_ALIGNMENT = 64  # Bytes.
_MAX_JSON = 64 << 20  # Bytes.


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads the `config.json` of a checkpoint.

  Args:
    directory: Of the checkpoint.

  Returns:
    Its content.

  Raises:
    HfError: It is missing or is not a JSON object.
  """
  return _read_json(pathlib.Path(directory) / 'config.json')


def load_params(
  directory: str | os.PathLike[str],
  spec: models.ModelSpec,
  *,
  shardings: Any = None,
  dtype: str = 'float32',
) -> Any:
  """Loads the parameters of a model, each part straight to its device.

  Every tensor is checked before the first one is read. Tensors may be stored as
  float32, bfloat16 or float16. Of a model that reads images too, those of its
  text are loaded.

  Args:
    directory: Holds `model.safetensors`, or its index and the shards.
    spec: The model, as from `spec_from_hf`.
    shardings: Tree like the parameters, as from `sharding.param_shardings`;
      None: all on the default device.
    dtype: Of the parameters.

  Returns:
    The parameter pytree, blocks stacked.

  Raises:
    HfError: A file or a tensor is missing, damaged, of another shape or dtype,
      or one is there that the model does not have.
  """
  files = _locate(pathlib.Path(directory))
  prefix = _TEXT if f'{_TEXT}{keys.EMBED}' in files else ''
  files = {name: v for name, v in files.items() if name.startswith(prefix)}
  grouped: dict[str, list[keys.Tensor]] = {}
  for tensor in keys.tensors(spec):
    tensor = tensor._replace(name=prefix + tensor.name)
    grouped.setdefault(tensor.path, []).append(tensor)
  _check(pathlib.Path(directory), files, spec, grouped, prefix)
  params: dict[str, Any] = {}
  for path, tensors in grouped.items():
    *parents, name = path.split('/')
    tree, placed = params, shardings
    for parent in parents:
      tree = tree.setdefault(parent, {})
      placed = None if placed is None else placed[parent]
    placed = None if placed is None else placed[name]
    tree[name] = _load(files, tensors, placed, dtype)
  return params


def _locate(directory: pathlib.Path) -> dict[str, pathlib.Path]:
  """The file of each tensor, by the names in the files themselves."""
  if not directory.is_dir():
    raise errors.HfError(f'{directory}: is not a directory')
  index_path, single = directory / _INDEX, directory / _SINGLE
  if single.exists():
    return dict.fromkeys(_names(single), single)
  if not index_path.exists():
    pickles = sorted(p.name for p in directory.glob('*.bin'))
    why = (
      f'; {pickles[0]} is a pickle, which may run code when it is opened:'
      ' convert it to safetensors'
      if pickles
      else ''
    )
    raise errors.HfError(
      f'{directory}: holds neither {_SINGLE} nor {_INDEX}{why}'
    )
  weight_map = _read_json(index_path).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise errors.HfError(f'{index_path}: has no weight_map')
  found: dict[str, pathlib.Path] = {}
  for file_name in sorted({str(v) for v in weight_map.values()}):
    if pathlib.PurePath(file_name).name != file_name or '\\' in file_name:
      raise errors.HfError(
        f'{index_path}: names {file_name!r}, which is not a file beside it'
      )
    path = directory / file_name
    if path.suffix != '.safetensors':
      raise errors.HfError(
        f'{index_path}: names {file_name!r}, which is not a safetensors file'
      )
    if not path.exists():
      raise errors.HfError(f'{index_path}: names {file_name!r}, not there')
    for name in _names(path):
      if name in found:
        raise errors.HfError(
          f'{directory}: {name!r} is in {found[name].name} and in {file_name}'
        )
      found[name] = path
  for name, file_name in weight_map.items():
    if name not in found or found[name].name != file_name:
      raise errors.HfError(
        f'{index_path}: says that {name!r} is in {file_name!r}, which does not'
        ' hold it'
      )
  return found


def _check(
  directory: pathlib.Path,
  files: Mapping[str, pathlib.Path],
  spec: models.ModelSpec,
  grouped: Mapping[str, Sequence[keys.Tensor]],
  prefix: str,
) -> None:
  wanted = {t.name: t for tensors in grouped.values() for t in tensors}
  if missing := [name for name in wanted if name not in files]:
    raise errors.HfError(
      f'{directory}: lacks {len(missing)} tensors: {_listed(missing)}'
    )
  extra = [n for n in files if n not in wanted and not n.endswith(_DERIVED)]
  if spec.tied_head and (head := prefix + keys.HEAD) in extra:
    extra.remove(head)
    _check_tied(directory, files, head, prefix + keys.EMBED)
  if extra:
    raise errors.HfError(
      f'{directory}: holds {len(extra)} tensors that the model of its'
      f' config.json does not have: {_listed(extra)}'
    )
  by_file: dict[pathlib.Path, list[keys.Tensor]] = {}
  for name, tensor in wanted.items():
    by_file.setdefault(files[name], []).append(tensor)
  for path, tensors in by_file.items():
    with _open(path) as file:
      for tensor in tensors:
        part = file.get_slice(tensor.name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if shape != tensor.stored_shape:
          raise errors.HfError(
            f'{path}: {tensor.name!r} has shape {shape}, the config.json says'
            f' {tensor.stored_shape}'
          )
        if dtype not in _DTYPES:
          raise errors.HfError(
            f'{path}: {tensor.name!r} is stored as {dtype}; only'
            f' {", ".join(_DTYPES)} are implemented'
          )


def _check_tied(
  directory: pathlib.Path,
  files: Mapping[str, pathlib.Path],
  head: str,
  embed: str,
) -> None:
  """A head that is stored beside a tied embedding must be the same."""
  pair = []
  for name in (head, embed):
    with _open(files[name]) as file:
      pair.append(file.get_tensor(name))
  if not np.array_equal(*pair):
    raise errors.HfError(
      f'{directory}: {head!r} differs from the embedding although'
      ' tie_word_embeddings is true'
    )


def _load(
  files: Mapping[str, pathlib.Path],
  tensors: Sequence[keys.Tensor],
  sharding: Any,
  dtype: str,
) -> jax.Array:
  # Of the leading axes, the last part has the last index of each.
  leading = tuple(i + 1 for i in tensors[-1].at)
  shape = (*leading, *tensors[0].shape)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def shard(index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None  # Only of shapes without axes.
    ranges = [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    out = _aligned([len(r) for r in ranges], dtype)
    outer, inner = ranges[: len(leading)], index[len(leading) :]
    for tensor in tensors:
      place = list(zip(tensor.at, outer, strict=True))
      if not all(i in r for i, r in place):
        continue
      into = out[tuple(i - r.start for i, r in place)]
      # Opened for each: what was read stays in memory until it is closed.
      with _open(files[tensor.name]) as file:
        part = file.get_slice(tensor.name)[tensor.stored_slice(inner)]
        into[...] = tensor.to_ours(part, into.shape)
    return out

  return jax.make_array_from_callback(shape, sharding, shard)


def _aligned(shape: Sequence[int], dtype: str) -> np.ndarray:
  """An array that XLA takes as it is on a CPU, without a copy."""
  num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
  raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _open(path: pathlib.Path) -> Any:
  import safetensors

  try:
    return safetensors.safe_open(str(path), 'numpy')
  except (safetensors.SafetensorError, OSError) as error:
    raise errors.HfError(f'{path}: cannot be read: {error}') from None


def _names(path: pathlib.Path) -> list[str]:
  with _open(path) as file:
    return list(file.keys())


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    if path.stat().st_size > _MAX_JSON:
      raise errors.HfError(f'{path}: is larger than any such file')
    value = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise errors.HfError(f'{path}: cannot be read: {error.strerror}') from None
  except (ValueError, RecursionError) as error:
    raise errors.HfError(f'{path}: is not JSON: {error}') from None
  if not isinstance(value, dict):
    raise errors.HfError(f'{path}: must hold a JSON object')
  return value


def _listed(names: Sequence[str]) -> str:
  more = f' and {len(names) - _MAX_LISTED} more' * (len(names) > _MAX_LISTED)
  return ', '.join(map(repr, names[:_MAX_LISTED])) + more
