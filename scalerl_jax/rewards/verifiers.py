"""Verifiers: +1 for a correct response, -1 for any other.

A verifier first parses the reference answer, when problems are read, so that
an item nobody can get right (or that anything gets right) never enters a run.
Responses are untrusted text: they are compared, never evaluated.
"""

from collections.abc import Callable, Mapping
import re
from typing import NamedTuple

_END_OF_THINKING = '</think>'
_END = '<end>'
_INTEGER = re.compile(r'\s*([+-]?\d{1,100})\s*')
_NUMBER = re.compile(r'(?<!\d)[+-]?\d+(?:[.,]\d+)*')
_BOX = '\\boxed{'


class Verifier(NamedTuple):
  """One way to grade.

  `parse` raises ValueError for a reference answer that it cannot grade
  against; `extract` returns the response's answer in the same form, or None
  where the response gives none.
  """

  parse: Callable[[str], object]
  extract: Callable[[str], object | None]

  def reward(self, response: str, answer: str) -> float:
    """Grades a response.

    Args:
      response: The decoded response, its thinking included.
      answer: The reference answer.

    Returns:
      1.0 where the extracted answer equals the reference, else -1.0.

    Raises:
      ValueError: The reference cannot be parsed.
    """
    found = self.extract(response)
    return 1.0 if found is not None and found == self.parse(answer) else -1.0


def final_text(response: str) -> str | None:
  """Cuts out what follows the thinking, up to the end marker.

  Args:
    response: The decoded response.

  Returns:
    The text, or None where the thinking never ended.
  """
  if _END_OF_THINKING not in response:
    return None
  return response.rsplit(_END_OF_THINKING, 1)[1].split(_END, 1)[0]


def _integer(text: str) -> int:
  match = _INTEGER.fullmatch(text)
  if match is None:
    raise ValueError(f'{text!r} is not an integer')
  return int(match[1])


def _extract_integer(response: str) -> int | None:
  text = final_text(response)
  if text is None or _INTEGER.fullmatch(text) is None:
    return None
  return _integer(text)


def _extract_last_integer(response: str) -> int | None:
  text = final_text(response)
  numbers = _NUMBER.findall(response if text is None else text)
  if not numbers or _INTEGER.fullmatch(numbers[-1]) is None:
    return None
  return _integer(numbers[-1])


def _nonempty(text: str) -> str:
  if not text.strip():
    raise ValueError('the answer is empty')
  return text.strip()


def _extract_text(response: str) -> str | None:
  text = final_text(response)
  return None if text is None or not text.strip() else text.strip()


def last_box(text: str) -> str | None:
  r"""Finds the content of the last `\boxed{...}` with balanced braces.

  Args:
    text: Any text.

  Returns:
    The content without outer spaces; None where no box is complete.
  """
  start = text.rfind(_BOX)
  while start >= 0:
    depth, begin = 1, start + len(_BOX)
    for i in range(begin, len(text)):
      depth += {'{': 1, '}': -1}.get(text[i], 0)
      if depth == 0:
        return text[begin:i].strip()
    start = text.rfind(_BOX, 0, start)
  return None


VERIFIERS: Mapping[str, Verifier] = {
  # One integer and nothing else after the thinking.
  'integer': Verifier(_integer, _extract_integer),
  # The last number of the response, which must be an integer.
  'last_integer': Verifier(_integer, _extract_last_integer),
  # The same text after the thinking, outer spaces apart.
  'exact': Verifier(_nonempty, _extract_text),
  # The content of the last box; a response without a box is wrong.
  'boxed': Verifier(_nonempty, lambda r: last_box(r) or None),
}
