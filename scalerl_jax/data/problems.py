"""Reading of problem files: one JSON object a line.

    {"problem_id": "a1", "prompt": "4+8=", "answer": "2", "verifier": "integer"}

Every fault is an error that names the file, the line and the fix.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from scalerl_jax import records
from scalerl_jax.data import tokenizer as tokenizer_lib
from scalerl_jax.rewards import verifiers

_FIELDS = ('problem_id', 'prompt', 'answer', 'verifier')


class DataError(ValueError):
  """A problem file that cannot be used as it is; the message is one line."""


def read_problems(
  path: str | pathlib.Path,
  *,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  max_prompt_tokens: int | None = None,
) -> list[records.Problem]:
  """Reads and checks a problem file.

  Args:
    path: A JSONL file in UTF-8. Blank lines are skipped; fields other than the
      four are ignored.
    tokenizer: Used with `max_prompt_tokens`.
    max_prompt_tokens: Longest prompt; None: not checked.

  Returns:
    The problems, in the order of the file; at least one.

  Raises:
    DataError: The file is missing or empty, or a line is not a JSON object,
      lacks a field, repeats an id, names an unknown verifier, has an answer
      that its verifier cannot parse, or a prompt that is too long.
  """
  path = pathlib.Path(path)
  try:
    text = path.read_text(encoding='utf-8-sig')
  except OSError as error:
    raise DataError(f'{path}: cannot be read: {error.strerror}') from None
  except UnicodeDecodeError as error:
    raise DataError(f'{path}: is not UTF-8 (byte {error.start})') from None
  problems: list[records.Problem] = []
  seen: dict[str, int] = {}
  for number, line in enumerate(text.split('\n'), start=1):
    if not line.strip():
      continue
    where = f'{path}:{number}'
    problem = _parse(line, where)
    if problem.problem_id in seen:
      raise DataError(
        f'{where}: problem_id {problem.problem_id!r} is already on line'
        f' {seen[problem.problem_id]}; ids must be unique'
      )
    seen[problem.problem_id] = number
    if tokenizer is not None and max_prompt_tokens is not None:
      try:
        length = len(tokenizer.encode_prompt(problem.prompt))
      except ValueError as error:
        raise DataError(f'{where}: {error}') from None
      if length > max_prompt_tokens:
        raise DataError(
          f'{where}: prompt of {length} tokens exceeds max_prompt_tokens='
          f'{max_prompt_tokens}; raise data.max_prompt_tokens or drop the line'
        )
    problems.append(problem)
  if not problems:
    raise DataError(f'{path}: holds no problem; one JSON object a line')
  return problems


def fingerprint(problems: Sequence[records.Problem]) -> str:
  """Hashes problems and their order, to notice a file that changed.

  Args:
    problems: The problems.

  Returns:
    A hexadecimal SHA-256 digest.
  """
  rows = [dataclasses.astuple(p) for p in problems]
  return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_disjoint(
  train: Sequence[records.Problem], held_out: Sequence[records.Problem]
) -> None:
  """Makes sure that no held-out problem is trained on.

  Args:
    train: Training problems.
    held_out: Held-out problems.

  Raises:
    DataError: An id or a prompt is in both.
  """
  for field in ('problem_id', 'prompt'):
    common = {getattr(p, field) for p in train} & {
      getattr(p, field) for p in held_out
    }
    if common:
      raise DataError(
        f'{len(common)} held-out problems are also training problems (same'
        f' {field}), such as {min(common)!r}; remove them from data.train_path'
      )


def _parse(line: str, where: str) -> records.Problem:
  try:
    row: Any = json.loads(line)
  except (json.JSONDecodeError, RecursionError) as error:
    raise DataError(f'{where}: not valid JSON: {error}') from None
  if not isinstance(row, dict):
    raise DataError(f'{where}: must be a JSON object, got {type(row).__name__}')
  for field in _FIELDS:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
      raise DataError(
        f'{where}: field {field!r} must be a non-empty string, got {value!r}'
      )
  problem = records.Problem(**{field: row[field] for field in _FIELDS})
  verifier = verifiers.VERIFIERS.get(problem.verifier)
  if verifier is None:
    raise DataError(
      f'{where}: verifier {problem.verifier!r} must be one of'
      f' {sorted(verifiers.VERIFIERS)}'
    )
  try:
    verifier.parse(problem.answer)
  except ValueError as error:
    raise DataError(
      f'{where}: verifier {problem.verifier!r} cannot parse the answer: {error}'
    ) from None
  return problem
