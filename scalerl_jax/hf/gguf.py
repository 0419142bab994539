"""GGUF files of the llama architecture, as llama.cpp runs them, to checkpoints.

Weights are dequantized one tensor at a time. llama.cpp rotates neighbouring
entries of a head and Hugging Face those half a head apart, so that the rows of
the q and k projections come in another order.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
from typing import Any

import numpy as np

from scalerl_jax import models
from scalerl_jax.hf import errors
from scalerl_jax.hf import keys
from scalerl_jax.hf import writing

_CONTROL = 3  # Of tokenizer.ggml.token_type.
_SPECIAL = {
  'bos': 'bos_token_id',
  'eos': 'eos_token_id',
  'unk': 'unknown_token_id',
  'pad': 'padding_token_id',
}


def convert_gguf(
  path: str | os.PathLike[str],
  directory: str | os.PathLike[str],
  *,
  dtype: str = 'bfloat16',
) -> models.ModelSpec:
  """Writes a GGUF file as a checkpoint: weights, tokenizer, chat template.

  Args:
    path: The file; llama architecture, byte-level BPE as in SmolLM2.
    directory: Does not exist yet; appears whole or not at all.
    dtype: `float32` or `bfloat16`, of the stored weights. Dequantized weights
      are float32, which bfloat16 rounds once more.

  Returns:
    The model.

  Raises:
    HfError: The file is not GGUF, is damaged, or holds what is not implemented;
      or the directory exists, or a library is not installed.
    OSError: The directory cannot be written; nothing is left of it.
  """
  file = _File(pathlib.Path(path))
  spec = file.spec()
  context = file.integer('llama.context_length')
  # What cannot be done is said before anything is written.
  finish = _tokenizer_writer(file)
  writing.write(
    directory,
    file.reader_of(spec),
    spec,
    dtype=dtype,
    more={'max_position_embeddings': context},
    finish=finish,
  )
  return spec


class _File:
  """Fields and tensors of a file."""

  def __init__(self, path: pathlib.Path) -> None:
    try:
      import gguf
    except ImportError:
      raise errors.HfError(
        "needs the library gguf: pip install 'scalerl_jax[gguf]'"
      ) from None
    self.path = path
    try:
      reader = gguf.GGUFReader(path)
      self.fields = {k: f.contents() for k, f in reader.fields.items()}
    except Exception as error:
      # The library lets whatever numpy meets in a damaged file through.
      raise self.error(f'cannot be read as GGUF: {error}') from None
    self.tensors = {t.name: t for t in reader.tensors}

  def error(self, text: str) -> errors.HfError:
    return errors.HfError(f'{self.path}: {text}')

  def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A field; where it is missing the default, unless that is `...`."""
    value = self.fields.get(name, default)
    if value is ... or (name in self.fields and not isinstance(value, kind)):
      raise self.error(f'field {name!r} is missing or of the wrong type')
    return value

  def integer(self, name: str, default: Any = ...) -> int:
    return int(self.get(name, int, default))

  def spec(self) -> models.ModelSpec:
    found = self.fields.get('general.architecture')
    if found != 'llama':
      raise self.error(f'architecture {found!r} is not implemented, llama is')
    scaling = self.fields.get('llama.rope.scaling.type', 'none')
    experts = self.fields.get('llama.expert_count', 0)
    if scaling != 'none' or experts:
      raise self.error(
        f'rope scaling {scaling!r} and {experts} experts are not implemented,'
        " only 'none' and 0 are"
      )
    width = self.integer('llama.embedding_length')
    heads = self.integer('llama.attention.head_count')
    head_dim = self.integer('llama.rope.dimension_count', width // heads)
    if self.integer('llama.attention.key_length', head_dim) != head_dim:
      raise self.error('a rotary embedding of a part of the head')
    numbers: dict[str, Any] = {
      # Stored as float32, in which 1e-5 is 9.999999747378752e-06.
      ours: float(
        str(np.float32(self.get(f'llama.{theirs}', (int, float), default)))
      )
      for ours, theirs, default in (
        ('rope_theta', 'rope.freq_base', 10_000.0),
        ('norm_eps', 'attention.layer_norm_rms_epsilon', ...),
      )
    }
    try:
      return models.ModelSpec(
        vocab_size=len(self.get('tokenizer.ggml.tokens', list, ...)),
        num_layers=self.integer('llama.block_count'),
        model_dim=width,
        num_heads=heads,
        num_kv_heads=self.integer('llama.attention.head_count_kv', heads),
        head_dim=head_dim,
        hidden_dim=self.integer('llama.feed_forward_length'),
        tied_head='output.weight' not in self.tensors,
        **numbers,
      )
    except ValueError as error:
      raise self.error(str(error)) from None

  def reader_of(
    self, spec: models.ModelSpec
  ) -> Callable[[keys.Tensor], np.ndarray]:
    """Checks that every tensor is there; returns what reads one."""
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    names = {
      t.name: str(table.get_name(t.name, try_suffixes=('.weight',)))
      for t in keys.tensors(spec)
    }
    wanted, found = set(names.values()), set(self.tensors)
    if wanted != found:
      raise self.error(
        f'lacks the tensors {sorted(wanted - found)} and has'
        f' {sorted(found - wanted)} that are not implemented'
      )
    for tensor in keys.tensors(spec):
      shape = tuple(map(int, self.tensors[names[tensor.name]].shape[::-1]))
      if shape != tensor.stored_shape:
        raise self.error(
          f'{names[tensor.name]!r} has shape {shape}, its fields say'
          f' {tensor.stored_shape}'
        )
    heads = {'q': spec.num_heads, 'k': spec.num_kv_heads}

    def read(tensor: keys.Tensor) -> np.ndarray:
      raw = self.tensors[names[tensor.name]]
      try:
        value = gguf.quants.dequantize(raw.data, raw.tensor_type)
      except NotImplementedError:
        raise self.error(
          f'{raw.name!r} is stored as {raw.tensor_type.name}, which gguf cannot'
          ' dequantize'
        ) from None
      count = heads.get(tensor.path.rpartition('/')[2])
      if count is not None:
        value = value.reshape(count, spec.head_dim // 2, 2, -1).swapaxes(1, 2)
      return value.reshape(tensor.stored_shape)

    return read


def _tokenizer_writer(file: _File) -> Callable[[pathlib.Path], None]:
  """Makes the tokenizer; returns what writes its files into a directory."""
  tokens = file.get('tokenizer.ggml.tokens', list, ...)
  kinds = file.get('tokenizer.ggml.token_type', list, ...)
  model = file.fields.get('tokenizer.ggml.model')
  split = file.fields.get('tokenizer.ggml.pre')
  begins = file.fields.get('tokenizer.ggml.add_bos_token', False)
  if (model, split, begins) != ('gpt2', 'smollm', False):
    raise file.error(
      f'tokenizer model={model!r} with pre={split!r} and add_bos_token={begins}'
      " is not implemented, only 'gpt2', 'smollm' and False are"
    )
  special = [t for t, kind in zip(tokens, kinds, strict=True) if kind != 1]
  if set(kinds) - {1, _CONTROL}:
    raise file.error(
      'has tokens that are neither normal nor control tokens, which is not'
      ' implemented'
    )
  merges = file.get('tokenizer.ggml.merges', list, ...)
  made = _byte_level_bpe(tokens, merges, special)
  ids = {
    name: file.integer(f'tokenizer.ggml.{field}')
    for name, field in _SPECIAL.items()
    if f'tokenizer.ggml.{field}' in file.fields
  }
  if any(i not in range(len(tokens)) for i in ids.values()):
    raise file.error(f'names tokens {ids}, but has only {len(tokens)}')
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': file.integer('llama.context_length'),
    'clean_up_tokenization_spaces': False,
    **{f'{name}_token': tokens[i] for name, i in ids.items()},
  }
  if 'tokenizer.chat_template' in file.fields:
    settings['chat_template'] = file.fields['tokenizer.chat_template']
  generation = {
    f'{name}_token_id': i for name, i in ids.items() if name != 'unk'
  }

  def write(directory: pathlib.Path) -> None:
    made.save(str(directory / 'tokenizer.json'))
    for name, fields in (
      ('tokenizer_config.json', settings),
      ('generation_config.json', generation),
    ):
      (directory / name).write_text(json.dumps(fields, indent=2))

  return write


def _byte_level_bpe(
  tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]
) -> Any:
  try:
    import tokenizers
    from tokenizers import decoders
    from tokenizers import models as tokenizer_models
    from tokenizers import pre_tokenizers
  except ImportError:
    raise errors.HfError(
      "needs the library tokenizers: pip install 'scalerl_jax[gguf]'"
    ) from None
  bpe = tokenizer_models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[(a, b) for a, _, b in (merge.partition(' ') for merge in merges)],
  )
  made = tokenizers.Tokenizer(bpe)
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(
    [tokenizers.AddedToken(t, normalized=False, special=True) for t in special]
  )
  return made
