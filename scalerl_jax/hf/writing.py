"""Checkpoints out: a directory that `transformers` and SGLang load as it is."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.hf import configs
from scalerl_jax.hf import errors
from scalerl_jax.hf import keys
from scalerl_jax.hf import reading

_STORED = {'float32': 'F32', 'bfloat16': 'BF16'}
_MAX_FILE_BYTES = 5 * 10**9
_AHEAD = 2
# What an SGLang server on a CPU says of its weights.
_CHECKSUM_DIGITS = 16
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

_Put = Callable[[memoryview], object]
OpenFile = Callable[[str, int], contextlib.AbstractContextManager[_Put]]


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

  Tensors are fetched from the devices one after another, a few at a time.

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
  origin = pathlib.Path(source or '')

  def copy(part: pathlib.Path) -> None:
    for name in _COPIED:
      if source is not None and (origin / name).is_file():
        shutil.copyfile(origin / name, part / name)

  write(
    directory,
    _fetcher(params, dtype),
    spec,
    dtype=dtype,
    more=_more(source),
    finish=copy,
    max_file_bytes=max_file_bytes,
  )


def write_params(
  open_file: OpenFile,
  params: Any,
  spec: models.ModelSpec,
  *,
  dtype: str = 'bfloat16',
  source: str | os.PathLike[str] | None = None,
  checksums: bool = True,
  max_file_bytes: int = _MAX_FILE_BYTES,
) -> list[records.StoredTensor]:
  """Writes weights and `config.json` into files that the caller opens.

  Tensors are cast and laid out as they are stored on the devices, and fetched
  one after another: while one is written, the next two are fetched and their
  checksums taken. The host never holds more of the model than these three.

  Args:
    open_file: Opens a file of a name that will get so many bytes; what its
      context gives takes them in order.
    params: The parameter pytree, blocks stacked; not donated before this
      returns.
    spec: The model.
    dtype: `float32` or `bfloat16`, of the stored weights.
    source: A checkpoint whose `config.json` says what no specification does, of
      the context and of special tokens; None: that is left out.
    checksums: Whether they are taken; SHA-256 is slower than the rest.
    max_file_bytes: Weights of a file; a larger model is written in several,
      with an index.

  Returns:
    The tensors, in the order of the files.

  Raises:
    HfError: The dtype or the model cannot be stored.
    OSError: A file cannot be written.
  """
  config = _config(spec, dtype, _more(source))
  written = _write_weights(
    open_file,
    _fetcher(params, dtype),
    spec,
    dtype=dtype,
    checksums=checksums,
    max_file_bytes=max_file_bytes,
  )
  _write_json(open_file, 'config.json', config)
  return written


def write(
  directory: str | os.PathLike[str],
  stored: Callable[[keys.Tensor], np.ndarray | jax.Array],
  spec: models.ModelSpec,
  *,
  dtype: str,
  more: Mapping[str, Any],
  finish: Callable[[pathlib.Path], None],
  max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
  """Writes a checkpoint from tensors that are fetched one after another.

  Args:
    directory: Does not exist yet.
    stored: Fetches a tensor, or its part, as it is stored, in any floating
      dtype; or starts to, where it gives an array of a device.
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
  config = _config(spec, dtype, more)
  part = target.with_name(f'{target.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)

  @contextlib.contextmanager
  def open_file(name: str, num_bytes: int) -> Iterator[_Put]:
    del num_bytes
    with (part / name).open('wb') as file:
      yield file.write
      file.flush()
      os.fsync(file.fileno())

  try:
    _write_weights(
      open_file,
      stored,
      spec,
      dtype=dtype,
      checksums=False,
      max_file_bytes=max_file_bytes,
    )
    _write_json(open_file, 'config.json', config)
    finish(part)
    part.rename(target)
  except BaseException:
    shutil.rmtree(part, ignore_errors=True)
    raise


def _config(
  spec: models.ModelSpec, dtype: str, more: Mapping[str, Any]
) -> dict[str, Any]:
  if dtype not in _STORED:
    raise errors.HfError(f'dtype={dtype!r} must be one of {tuple(_STORED)}')
  return {**more, **configs.config_from_spec(spec, dtype=dtype)}


def _more(source: str | os.PathLike[str] | None) -> dict[str, Any]:
  """What a checkpoint's `config.json` says that no specification does."""
  origin = pathlib.Path(source or '')
  if source is None or not (origin / 'config.json').is_file():
    return {}
  config = reading.read_config(origin)
  config = {**config.get('text_config', {}), **config}
  return {name: config[name] for name in _KEPT if name in config}


@functools.partial(jax.jit, static_argnames=('tensor', 'dtype'))
def _stored(
  array: jax.Array,
  at: tuple[jax.Array, ...],
  *,
  tensor: keys.Tensor,
  dtype: str,
) -> jax.Array:
  if at:
    array = array[at[0]]
  for expert in at[1:]:
    # They are cut over devices. A slice would gather all of them; this sends
    # one, as a sum with the zeros of the others, where only bits keep -0.
    bits = jax.lax.bitcast_convert_type(
      array, jnp.dtype(f'uint{8 * array.dtype.itemsize}')
    )
    bits = jnp.take(bits, expert[None], axis=0, mode='clip')[0]
    array = jax.lax.bitcast_convert_type(bits, array.dtype)
  return jnp.asarray(tensor.to_stored(array.astype(dtype)))


def _fetcher(params: Any, dtype: str) -> Callable[[keys.Tensor], jax.Array]:
  def fetch(tensor: keys.Tensor) -> jax.Array:
    value = params
    for name in tensor.path.split('/'):
      value = value[name]
    if isinstance(value, np.ndarray):  # Nothing else of it is sent to a device.
      for i in tensor.at:
        value = value[int(i)]
      tensor = tensor._replace(at=())
    # One program for all layers and experts.
    kind = tensor._replace(at=(), name='', path='')
    array = _stored(value, tensor.at, tensor=kind, dtype=dtype)
    array.copy_to_host_async()
    return array

  return fetch


def _write_weights(
  open_file: OpenFile,
  stored: Callable[[keys.Tensor], np.ndarray | jax.Array],
  spec: models.ModelSpec,
  *,
  dtype: str,
  checksums: bool,
  max_file_bytes: int,
) -> list[records.StoredTensor]:
  itemsize = jnp.dtype(dtype).itemsize
  # A tensor of the file is one or more parts.
  files: list[list[list[keys.Tensor]]] = [[]]
  room = max_file_bytes
  for _, group in itertools.groupby(keys.tensors(spec), lambda t: t.name):
    parts = list(group)
    size = itemsize * math.prod(parts[0].stored_shape)
    if files[-1] and size > room:
      files.append([])
      room = max_file_bytes
    files[-1].append(parts)
    room -= size
  written = []
  for i, tensors in enumerate(files, start=1):
    name = 'model.safetensors'
    if len(files) > 1:
      name = f'model-{i:05d}-of-{len(files):05d}.safetensors'
    header, num_bytes = _header(tensors, dtype)
    with open_file(name, len(header) + num_bytes) as put:
      put(memoryview(header))
      bytes_of = _fetched(tensors, stored, dtype, checksums)
      for parts, (data, checksum) in zip(tensors, bytes_of, strict=True):
        put(data)
        written.append(
          records.StoredTensor(
            name=parts[0].name,
            file=name,
            dtype=_STORED[dtype],
            shape=parts[0].stored_shape,
            checksum=checksum,
          )
        )
  if len(files) > 1:
    total = itemsize * models.num_parameters(spec)
    _write_json(
      open_file,
      'model.safetensors.index.json',
      {
        'metadata': {'total_size': total},
        'weight_map': {t.name: t.file for t in written},
      },
    )
  return written


def _header(
  tensors: Sequence[Sequence[keys.Tensor]], dtype: str
) -> tuple[bytes, int]:
  """The head of a file, and the bytes that follow it."""
  # The library's own writer holds all tensors of a file at once.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for tensor, *_ in tensors:
    start = end
    end += jnp.dtype(dtype).itemsize * math.prod(tensor.stored_shape)
    header[tensor.name] = {
      'dtype': _STORED[dtype],
      'shape': list(tensor.stored_shape),
      'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text, end


def _fetched(
  tensors: Iterable[Sequence[keys.Tensor]],
  stored: Callable[[keys.Tensor], np.ndarray | jax.Array],
  dtype: str,
  checksums: bool,
) -> Iterator[tuple[memoryview, str | None]]:
  """Bytes and checksum of each tensor; two are on their way meanwhile."""

  def finish(
    arrays: list[np.ndarray | jax.Array],
  ) -> tuple[memoryview, str | None]:
    values = [np.asarray(a).astype(dtype, copy=False) for a in arrays]
    value = values[0] if len(values) == 1 else np.concatenate(values, axis=-1)
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    if not checksums:
      return data, None
    return data, hashlib.sha256(data).hexdigest()[:_CHECKSUM_DIGITS]

  with futures.ThreadPoolExecutor(max_workers=_AHEAD) as pool:
    waiting: collections.deque[futures.Future] = collections.deque()
    for parts in tensors:
      # Programs of several devices are started by one thread, else two may
      # wait for one another.
      waiting.append(pool.submit(finish, [stored(part) for part in parts]))
      if len(waiting) > _AHEAD:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()


def _write_json(open_file: OpenFile, name: str, value: Any) -> None:
  text = json.dumps(value, indent=2).encode()
  with open_file(name, len(text)) as put:
    put(memoryview(text))
