"""Checkpoints out: a directory that `transformers` and SGLang load as it is."""

from collections.abc import Callable, Mapping
import json
import math
import os
import pathlib
import shutil
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import models
from scalerl_jax.hf import configs
from scalerl_jax.hf import errors
from scalerl_jax.hf import keys
from scalerl_jax.hf import reading

_STORED = {'float32': 'F32', 'bfloat16': 'BF16'}
_MAX_FILE_BYTES = 5 * 10**9
# Of a tokenizer and of generation, which no training changes.
_COPIED = (
  'tokenizer.json',
  'tokenizer_config.json',
  'tokenizer.model',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)

# Fields of `config.json` that no specification holds.
_KEPT = (
  'max_position_embeddings',
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
)


def save_params(
  directory: str | os.PathLike[str],
  params: Any,
  spec: models.ModelSpec,
  *,
  dtype: str = 'bfloat16',
  source: str | os.PathLike[str] | None = None,
  max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
  """Writes a checkpoint; the directory appears whole or not at all.

  Tensors are fetched from the devices one at a time.

  Args:
    directory: Does not exist yet.
    params: The parameter pytree, blocks stacked.
    spec: The model.
    dtype: `float32` or `bfloat16`, of the stored weights.
    source: A checkpoint whose tokenizer files are copied, and what its
      `config.json` says of the context and of special tokens; None: none is.
    max_file_bytes: Weights of a file; a larger model is written in several,
      with an index.

  Raises:
    HfError: The directory exists, or the dtype or the model cannot be stored.
    OSError: It cannot be written; nothing is left of it.
  """

  def stored(tensor: keys.Tensor) -> np.ndarray:
    value = params
    for name in tensor.path.split('/'):
      value = value[name]
    if tensor.layer is not None:
      value = value[tensor.layer]
    return tensor.to_stored(np.asarray(jax.device_get(value)))

  more, origin = {}, pathlib.Path(source or '')
  if source is not None and (origin / 'config.json').is_file():
    config = reading.read_config(origin)
    more = {name: config[name] for name in _KEPT if name in config}

  def copy(part: pathlib.Path) -> None:
    for name in _COPIED:
      if source is not None and (origin / name).is_file():
        shutil.copyfile(origin / name, part / name)

  write(
    directory,
    stored,
    spec,
    dtype=dtype,
    more=more,
    finish=copy,
    max_file_bytes=max_file_bytes,
  )


def write(
  directory: str | os.PathLike[str],
  stored: Callable[[keys.Tensor], np.ndarray],
  spec: models.ModelSpec,
  *,
  dtype: str,
  more: Mapping[str, Any],
  finish: Callable[[pathlib.Path], None],
  max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
  """Writes a checkpoint from tensors that are fetched one at a time.

  Args:
    directory: Does not exist yet.
    stored: Fetches a tensor as it is stored, in any floating dtype.
    spec: The model.
    dtype: `float32` or `bfloat16`, of the stored weights.
    more: Fields of `config.json` beside those of the specification.
    finish: Writes the other files into the directory it is given.
    max_file_bytes: Weights of a file.

  Raises:
    HfError: As of `save_params`.
    OSError: As of `save_params`.
  """
  target = pathlib.Path(directory)
  if target.exists():
    raise errors.HfError(f'{target}: exists; give a new directory')
  if dtype not in _STORED:
    raise errors.HfError(f'dtype={dtype!r} must be one of {tuple(_STORED)}')
  config = {**more, **configs.config_from_spec(spec, dtype=dtype)}
  part = target.with_name(f'{target.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  try:
    _write_weights(part, stored, spec, dtype, max_file_bytes)
    _write_json(part / 'config.json', config)
    finish(part)
    part.rename(target)
  except BaseException:
    shutil.rmtree(part, ignore_errors=True)
    raise


def _write_weights(
  directory: pathlib.Path,
  stored: Callable[[keys.Tensor], np.ndarray],
  spec: models.ModelSpec,
  dtype: str,
  max_file_bytes: int,
) -> None:
  itemsize = jnp.dtype(dtype).itemsize
  files: list[list[keys.Tensor]] = [[]]
  room = max_file_bytes
  for tensor in keys.tensors(spec):
    size = itemsize * math.prod(tensor.shape)
    if files[-1] and size > room:
      files.append([])
      room = max_file_bytes
    files[-1].append(tensor)
    room -= size
  weight_map: dict[str, str] = {}
  for i, tensors in enumerate(files, start=1):
    name = 'model.safetensors'
    if len(files) > 1:
      name = f'model-{i:05d}-of-{len(files):05d}.safetensors'
    weight_map |= {t.name: name for t in tensors}
    with (directory / name).open('wb') as file:
      _write_file(file, tensors, stored, dtype)
      file.flush()
      os.fsync(file.fileno())
  if len(files) > 1:
    total = itemsize * models.num_parameters(spec)
    _write_json(
      directory / 'model.safetensors.index.json',
      {'metadata': {'total_size': total}, 'weight_map': weight_map},
    )


def _write_file(
  file: BinaryIO,
  tensors: list[keys.Tensor],
  stored: Callable[[keys.Tensor], np.ndarray],
  dtype: str,
) -> None:
  # The library's own writer holds all tensors of a file at once.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for tensor in tensors:
    start = end
    end += jnp.dtype(dtype).itemsize * math.prod(tensor.shape)
    header[tensor.name] = {
      'dtype': _STORED[dtype],
      'shape': list(tensor.stored_shape),
      'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  file.write(len(text).to_bytes(8, 'little') + text)
  for tensor in tensors:
    value = stored(tensor).astype(dtype, copy=False)
    file.write(value.reshape(-1).view(np.uint8).data)


def _write_json(path: pathlib.Path, value: Any) -> None:
  with path.open('w', encoding='utf-8') as file:
    json.dump(value, file, indent=2)
    file.flush()
    os.fsync(file.fileno())
