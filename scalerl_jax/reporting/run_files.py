"""Reading of a run's directory, complete or still being written."""

from collections.abc import Iterator
import csv
import json
import math
import pathlib
from typing import Any, NamedTuple


class RunFiles(NamedTuple):
  """What a run has written so far; empty where a file is missing."""

  config: dict[str, Any]
  fit: dict[str, Any]
  curve: list[dict[str, Any]]  # compute, pass_rate, stderr, step.
  evals: list[dict[str, Any]]
  metrics: list[dict[str, Any]]
  samples: list[dict[str, Any]]


def read(workdir: pathlib.Path) -> RunFiles:
  """Reads the files of a run.

  Args:
    workdir: The run's directory.

  Returns:
    Their content.

  Raises:
    NotADirectoryError: There is no such directory.
    ValueError: A file is damaged, other than by a last line cut short, which a
      run that is being written may have.
  """
  if not workdir.is_dir():
    raise NotADirectoryError(f'{workdir} is not the directory of a run')
  return RunFiles(
    config=_json(workdir / 'config.json'),
    fit=_json(workdir / 'fit.json'),
    curve=list(_curve(workdir / 'curve.csv')),
    evals=list(_jsonl(workdir / 'evals.jsonl')),
    metrics=list(_jsonl(workdir / 'metrics.jsonl')),
    samples=list(_jsonl(workdir / 'samples.jsonl')),
  )


def _json(path: pathlib.Path) -> dict[str, Any]:
  if not path.exists():
    return {}
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: {type(value).__name__} where an object belongs')
  return value


def _jsonl(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  if not path.exists():
    return
  lines = path.read_bytes().split(b'\n')
  for i, line in enumerate(lines):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError as error:
      if i == len(lines) - 1:
        return
      raise ValueError(f'{path}:{i + 1}: not JSON: {error}') from error
    if not isinstance(row, dict):
      raise ValueError(f'{path}:{i + 1}: a row must be a JSON object')
    yield row


def _curve(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  if not path.exists():
    return
  with path.open(encoding='utf-8', newline='') as file:
    for row in csv.DictReader(file):
      try:
        point = {
          'compute': float(row['compute']),
          'pass_rate': float(row['pass_rate']),
        }
        rest = {k: _optional(row.get(k)) for k in ('stderr', 'step')}
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f'{path}: row {row} needs numbers compute and pass_rate'
        ) from error
      yield {**point, **rest}


def _optional(text: str | None) -> float | None:
  value = float(text) if text else math.nan
  return value if math.isfinite(value) else None
