"""A checkpoint of Hugging Face that fits in a test: model, tokenizer, chat."""

import json
import pathlib

import jax
import tokenizers
from tokenizers import decoders
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

from scalerl_jax import hf
from scalerl_jax import models

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '</think>')
TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content"
  " + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (('h', 'e'), ('l', 'l'), ('he', 'll'), ('hell', 'o'), ('Ġ', 'hello'))


def tokens() -> list[str]:
  """The vocabulary, by id."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  return [*SPECIAL, *letters, *map(''.join, MERGES)]


def write_tokenizer(directory: pathlib.Path, **changes) -> pathlib.Path:
  """Writes a byte-level BPE: special tokens, 256 bytes, five merges.

  Args:
    directory: Made if needed.
    **changes: File name without `.json` → fields added to it; None removes it.

  Returns:
    The directory.
  """
  directory.mkdir(parents=True, exist_ok=True)
  vocab = {token: i for i, token in enumerate(tokens())}
  made = tokenizers.Tokenizer(
    tokenizer_models.BPE(vocab=vocab, merges=list(MERGES))
  )
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(list(SPECIAL))
  made.save(str(directory / 'tokenizer.json'))
  files = {
    'tokenizer_config': {
      'chat_template': TEMPLATE,
      'eos_token': {'content': '<|im_end|>'},
      'pad_token': '<|endoftext|>',
    },
    'generation_config': {'eos_token_id': [2, 0]},
  }
  for name, fields in files.items():
    if changes.get(name, {}) is not None:
      text = json.dumps(fields | changes.get(name, {}))
      (directory / f'{name}.json').write_text(text)
  return directory


def spec() -> models.ModelSpec:
  """The model: with more rows than there are tokens."""
  return models.ModelSpec(
    vocab_size=272,
    num_layers=1,
    model_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    hidden_dim=16,
    rope_theta=1e5,
    norm_eps=1e-5,
  )


def write(directory: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
  """Writes a checkpoint with the tokenizer of `write_tokenizer`."""
  params = models.init_params(spec(), jax.random.key(seed))
  hf.save_params(directory, params, spec(), dtype='float32')
  return write_tokenizer(directory)
