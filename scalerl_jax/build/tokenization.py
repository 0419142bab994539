"""The one place where a configuration becomes a tokenizer.

What depends on the tokenizer is checked here, not when the configuration is
read: the length of the phrase and the size of the vocabulary.
"""

import dataclasses

from scalerl_jax import config as config_lib
from scalerl_jax import data

_END_OF_THINKING = '</think>'


def complete(
  config: config_lib.RunConfig,
) -> tuple[config_lib.RunConfig, data.Tokenizer]:
  """Makes the tokenizer of a configuration, and checks what depends on it.

  Args:
    config: The configuration.

  Returns:
    (configuration whose `model.vocab_size` is known, tokenizer).

  Raises:
    config_lib.ConfigError: The tokenizer cannot be used, or contradicts a
      field.
  """
  try:
    tokenizer = _make(config)
    if config.length.interrupt:
      _check_phrase(config, tokenizer)
    size = config.model.vocab_size or tokenizer.vocab_size
    if size < tokenizer.vocab_size:
      raise ValueError(
        f'model.vocab_size={size} must be at least {tokenizer.vocab_size}, the'
        ' ids of the tokenizer; give another data.tokenizer'
      )
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model), tokenizer
  except ValueError as error:
    raise config_lib.ConfigError(' '.join(str(error).split())) from None


def end_of_thinking(tokenizer: data.Tokenizer) -> tuple[tuple[int, ...], ...]:
  """Tells by which tokens in a row a policy ends its thinking.

  Args:
    tokenizer: The tokenizer.

  Returns:
    The alternatives of each. `</think>` as one token is that token. Of several,
    the first may be merged with what goes before, and the last, which is left
    out, with what follows.
  """
  ids = tokenizer.encode(_END_OF_THINKING)
  if len(ids) == 1:
    return (tuple(ids),)
  begin = tokenizer.decode(ids[:1])
  merged = (
    i
    for i in range(tokenizer.vocab_size)
    if tokenizer.decode([i]).endswith(begin)
  )
  return (tuple(merged), *((i,) for i in ids[1:-1]))


def directory(config: config_lib.RunConfig) -> str | None:
  """Tells where the files of the tokenizer lie.

  Args:
    config: The configuration.

  Returns:
    The directory; None for the tokenizer of bytes, which has no files.
  """
  name = config.data.tokenizer or config.model.path or 'bytes'
  return None if name == 'bytes' else name


def _make(config: config_lib.RunConfig) -> data.Tokenizer:
  place = directory(config)
  if place is None:
    if config.data.chat:
      raise ValueError(
        'data.chat=True needs a tokenizer with a chat template, and that of'
        ' bytes has none; give data.tokenizer or model.path'
      )
    return data.ByteTokenizer()
  if config.warm_start.num_steps:
    raise ValueError(
      f'warm_start.num_steps={config.warm_start.num_steps} must be 0 with the'
      f' tokenizer of {place!r}: worked solutions are written for that of bytes'
    )
  return data.HfTokenizer(place, chat=config.data.chat)


def _check_phrase(
  config: config_lib.RunConfig, tokenizer: data.Tokenizer
) -> None:
  ids = tokenizer.encode(config.length.phrase)
  prompt, thinking, answer, limit = (
    config.data.max_prompt_tokens,
    config.length.max_thinking_tokens,
    config.length.answer_tokens,
    config.batch.max_tokens,
  )
  if (total := prompt + thinking + len(ids) + answer) > limit:
    raise ValueError(
      f'data.max_prompt_tokens={prompt} + length.max_thinking_tokens='
      f'{thinking} + phrase of {len(ids)} + length.answer_tokens={answer} ='
      f' {total} tokens exceed batch.max_tokens={limit}'
    )
