"""What a tokenizer is, and one of bytes with the markers of a policy."""

from collections.abc import Sequence
import re
from typing import Protocol, runtime_checkable

_SPECIAL = {'<pad>': 256, '<think>': 257, '</think>': 258, '<end>': 259}
_NAMES = {i: name for name, i in _SPECIAL.items()}
_PATTERN = re.compile('(' + '|'.join(map(re.escape, _SPECIAL)) + ')')


@runtime_checkable
class Tokenizer(Protocol):
  """What the pipeline needs of a tokenizer.

  Attributes:
    vocab_size: One more than the largest id.
    pad_id: Of the padding, which masks of its own keep out of everything.
    stop_ids: Tokens that end a response; at least one.
  """

  vocab_size: int
  pad_id: int
  stop_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]:
    """Turns trusted text into token ids, special tokens by their names."""

  def encode_prompt(self, prompt: str) -> list[int]:
    """Renders the prompt of a problem; special tokens in it are only text."""

  def decode(self, token_ids: Sequence[int]) -> str:
    """Turns token ids into text, special tokens as their names."""


class ByteTokenizer:
  """UTF-8 bytes are ids 0 to 255; four markers follow.

  Attributes:
    vocab_size: Number of ids, 260.
    pad_id: `<pad>`.
    stop_ids: `<end>`, which stops a response.
  """

  vocab_size = 260
  pad_id = _SPECIAL['<pad>']
  stop_ids: tuple[int, ...] = (_SPECIAL['<end>'],)

  def encode(self, text: str) -> list[int]:
    """Turns text into ids; the names of markers become their ids.

    Args:
      text: Any text.

    Returns:
      Token ids.
    """
    ids: list[int] = []
    for part in _PATTERN.split(text):
      if part in _SPECIAL:
        ids.append(_SPECIAL[part])
      else:
        ids.extend(part.encode('utf-8'))
    return ids

  def encode_prompt(self, prompt: str) -> list[int]:
    """Turns the prompt of a problem into ids, all of them bytes.

    Args:
      prompt: Any text.

    Returns:
      Token ids.
    """
    return list(prompt.encode('utf-8'))

  def decode(self, token_ids: Sequence[int]) -> str:
    """Turns ids into text; bytes that are not UTF-8 become U+FFFD.

    Args:
      token_ids: Ids; those beyond the vocabulary are left out.

    Returns:
      Text, markers as their names.
    """
    parts, run = [], bytearray()
    for i in token_ids:
      if int(i) in _NAMES:
        parts += [run.decode('utf-8', errors='replace'), _NAMES[int(i)]]
        run = bytearray()
      elif int(i) < 256:
        run.append(int(i))
    return ''.join(parts) + run.decode('utf-8', errors='replace')
