"""The toy task: chains of digit arithmetic modulo 10, worked line by line.

A problem is a digit and some operations with one digit each, done from left to
right, of which only the last digit is kept (a difference is modulo 10 too):

    prompt    4+8*3-9=
    solution  <think>4+8=2
              2*3=6
              6-9=7
              </think>7<end>

Difficulty is the number of operations, and multiplications are harder than the
rest. Problems are split by a hash of their prompt, so that the warm start, the
training problems and the held-out problems are disjoint by construction.
"""

import dataclasses
import enum
import hashlib
import json
import pathlib

import numpy as np

from scalerl_jax import records

_MODULUS = 10
_OPERATORS = '+-*'


class Split(enum.Enum):
  """Which residues of the prompt's hash (mod 10) belong to which use."""

  HELD_OUT = (0,)
  TRAIN = (1, 2, 3)
  WARM_START = (4, 5, 6, 7, 8, 9)


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
  """One problem.

  Attributes:
    start: First digit.
    operations: (operator, digit) pairs, applied from left to right.
  """

  start: int
  operations: tuple[tuple[str, int], ...]

  @property
  def prompt(self) -> str:
    """What the policy is shown."""
    tail = ''.join(f'{op}{digit}' for op, digit in self.operations)
    return f'{self.start}{tail}='

  def lines(self) -> list[str]:
    """The worked lines; the last one ends in the answer."""
    value, lines = self.start, []
    for op, digit in self.operations:
      result = _apply(value, op, digit)
      lines.append(f'{value}{op}{digit}={result}\n')
      value = result
    return lines

  @property
  def answer(self) -> str:
    """The final digit."""
    return self.lines()[-1][-2]


def split_of(prompt: str) -> Split:
  """Tells which split a prompt belongs to, by its hash.

  Args:
    prompt: A prompt.

  Returns:
    The one split that contains it.
  """
  residue = hashlib.sha256(prompt.encode()).digest()[0] % 10
  return next(s for s in Split if residue in s.value)


def draw(
  rng: np.random.Generator, split: Split, *, num_operations: int
) -> Chain:
  """Draws a problem of one split.

  Args:
    rng: Advanced.
    split: Problems of other splits are drawn again.
    num_operations: Length of the chain, at least 1.

  Returns:
    The problem.
  """
  while True:
    operations = tuple(
      (_OPERATORS[rng.integers(3)], int(rng.integers(2, 10)))
      for _ in range(num_operations)
    )
    chain = Chain(int(rng.integers(_MODULUS)), operations)
    if split_of(chain.prompt) is split:
      return chain


def problems(
  split: Split,
  *,
  num_problems: int,
  min_operations: int,
  max_operations: int,
  seed: int,
) -> list[records.Problem]:
  """Generates distinct problems, every difficulty equally often.

  Args:
    split: Which split they come from.
    num_problems: How many.
    min_operations: Shortest chain.
    max_operations: Longest chain.
    seed: Seed of the generator.

  Returns:
    Problems, difficulties interleaved.

  Raises:
    ValueError: min_operations is below 2 (too few distinct chains) or above
      max_operations.
  """
  if not 2 <= min_operations <= max_operations:
    raise ValueError(
      f'min_operations={min_operations} must be in [2, max_operations='
      f'{max_operations}]'
    )
  rng = np.random.default_rng([seed, list(Split).index(split)])
  lengths = range(min_operations, max_operations + 1)
  found: dict[str, records.Problem] = {}
  while len(found) < num_problems:
    length = lengths[len(found) % len(lengths)]
    chain = draw(rng, split, num_operations=length)
    found[chain.prompt] = records.Problem(
      problem_id=f'{split.name.lower()}/{chain.prompt}',
      prompt=chain.prompt,
      answer=chain.answer,
      verifier='integer',
    )
  return list(found.values())


def worked_solution(
  rng: np.random.Generator,
  chain: Chain,
  *,
  phrase: str | None,
  error_rate: float = 0.0,
) -> tuple[str, str, str]:
  """Writes the solution that the warm start imitates.

  The demonstrator is fallible: a line has a wrong result with probability
  `error_rate`, and the later lines go on from it. A policy that imitates it
  knows the facts but does not rely on them, which leaves room for RL.

  Args:
    rng: Advanced.
    chain: The problem.
    phrase: None: worked to the end. Else the work breaks off at a random
      character and the phrase, which closes the thinking, is inserted.
    error_rate: Probability of a wrong result, line by line.

  Returns:
    (text before the inserted phrase, the phrase or '', text after it).
  """
  lines = _demonstrate(rng, chain, error_rate)
  work, answer = '<think>' + ''.join(lines), lines[-1][-2]
  if phrase is None:
    return f'{work}</think>{answer}<end>', '', ''
  cut = int(rng.integers(len('<think>'), len(work) - 3))
  return work[:cut], phrase, f'{answer}<end>'


def write_jsonl(path: pathlib.Path, rows: list[records.Problem]) -> None:
  """Writes a problem file, whole or not at all.

  Args:
    path: Where; replaced if it exists.
    rows: The problems.
  """
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows]
  part = path.with_suffix('.part')
  part.write_text(''.join(lines), encoding='utf-8')
  part.replace(path)


def _demonstrate(
  rng: np.random.Generator, chain: Chain, error_rate: float
) -> list[str]:
  value, lines = chain.start, []
  for op, digit in chain.operations:
    result = _apply(value, op, digit)
    if rng.random() < error_rate:
      result = (result + int(rng.integers(1, _MODULUS))) % _MODULUS
    lines.append(f'{value}{op}{digit}={result}\n')
    value = result
  return lines


def _apply(value: int, op: str, digit: int) -> int:
  if op == '+':
    return (value + digit) % _MODULUS
  if op == '-':
    return (value - digit) % _MODULUS
  return (value * digit) % _MODULUS
