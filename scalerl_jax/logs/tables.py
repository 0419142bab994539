"""Logs that are tables: CSV, TSV, JSON and Parquet files to named columns."""

import collections
from collections.abc import Callable, Sequence
import csv
import functools
import io
import json
import pathlib
import re
from typing import Any, NamedTuple

_OWN_STEMS = ('curve', 'evals')  # The run's name is its directory's.
_DECIMAL_COMMA = re.compile(r'\s*[+-]?\d*,\d+(e[+-]?\d+)?\s*', re.I)
_MAX_LISTED = 1500  # Characters of an error that lists columns.


class NoCurveError(ValueError):
  """A table without a curve; its neighbours may have one."""


class Table(NamedTuple):
  """Named columns of one log; cells are text or numbers as they were found."""

  source: str  # For messages.
  name: str
  columns: tuple[str, ...]
  cells: Callable[[str], Sequence[Any]]  # Of a column; None: no value.
  rows: Sequence[int]  # Where each row stands, in `unit`.
  unit: str = 'row'
  notes: tuple[str, ...] = ()
  default_x: str | None = None
  default_y: str | None = None


def read(path: pathlib.Path) -> Table:
  """Reads a table, recognised by its content; `.csv` and `.tsv` by name.

  Args:
    path: CSV with a header, separated by comma, tab or semicolon; JSONL; a JSON
      array of objects, also as `log_history` of an object; or Parquet.

  Returns:
    The table, with at least one row.

  Raises:
    ValueError: The file cannot be read, is none of these, or has no row.
  """
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error.strerror}') from None
  if data.startswith(b'PAR1'):
    return _parquet(path, data)
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError:
    text = '\0'
  if '\0' in text:
    raise ValueError(
      f'{path}: is neither UTF-8 text nor Parquet nor an event file of'
      ' TensorBoard (tfevents in its name); export it as CSV'
    )
  if not text.strip():
    raise NoCurveError(f'{path}: is empty')
  is_json = text.lstrip()[0] in '[{' and path.suffix not in ('.csv', '.tsv')
  return _json(path, text) if is_json else _csv(path, text)


def split_runs(table: Table, *, y: str | None) -> list[Table]:
  """Splits a wide Weights & Biases export, `run - metric`, into its runs.

  Args:
    table: Any table.
    y: The column that is asked for; if it is there as it is, nothing is split.

  Returns:
    A table for each run, with the metrics as columns; or the table itself.
  """
  wide = dict.fromkeys(c for c in table.columns if ' - ' in c)
  marked = any({f'{c}__MIN', f'{c}__MAX'} <= wide.keys() for c in wide)
  others_are_wide = bool(wide) and tuple(wide) == table.columns[1:]
  if y in table.columns or not (marked or others_are_wide):
    return [table]
  runs: dict[str, dict[str, str]] = {}
  for column in wide:
    if not column.endswith(('__MIN', '__MAX')):
      run, _, metric = column.rpartition(' - ')
      runs.setdefault(run, {})[metric] = column
  shared = {c: c for c in table.columns if c not in wide}
  made: list[Table] = []
  for run, own in runs.items():
    names = {**shared, **own}
    metrics = [m for m in own if m != '_step']
    made.append(
      table._replace(
        source=f'{table.source} ({run})',
        name=run,
        columns=tuple(names),
        cells=functools.partial(_renamed, table, names),
        # The file's notes would else come once for each run.
        notes=() if made else table.notes,
        default_x=next(iter(shared)) if len(shared) == 1 else None,
        default_y=metrics[0] if len(metrics) == 1 else None,
      )
    )
  return made


def listed(columns: Sequence[str]) -> str:
  """Lists columns for an error.

  Args:
    columns: Their names.

  Returns:
    One line of bounded length.
  """
  text = ', '.join(map(repr, columns))
  return text if len(text) <= _MAX_LISTED else text[:_MAX_LISTED] + ' ...'


def _renamed(table: Table, names: dict[str, str], name: str) -> Sequence[Any]:
  return table.cells(names[name])


def _table(
  path: pathlib.Path,
  columns: Sequence[str],
  cells: Callable[[str], Sequence[Any]],
  rows: Sequence[int],
  **others: Any,
) -> Table:
  counts = collections.Counter(columns)
  if repeated := [name for name, n in counts.items() if n > 1]:
    raise ValueError(
      f'{path}: the header repeats {listed(repeated)}; rename one of them'
    )
  own = path.stem in _OWN_STEMS
  name = path.resolve().parent.name if own else path.stem
  return Table(str(path), name, tuple(columns), cells, rows, **others)


def _csv(path: pathlib.Path, text: str) -> Table:
  # A comment is no header, but a header may be marked as a comment.
  head = next(
    (
      line
      for line in text.splitlines()
      if line.strip() and (line[0] != '#' or set(line) & set(',\t;'))
    ),
    '',
  )
  delimiter = '\t' if path.suffix == '.tsv' else max(',\t;', key=head.count)
  reader = csv.reader(
    io.StringIO(text, newline=''), delimiter=delimiter, strict=True
  )
  names: list[str] = []
  records, rows, ragged = [], [], []
  try:
    for record in reader:
      if not record or (
        not names and len(record) == 1 and record[0].startswith('#')
      ):
        continue
      if delimiter == ';':  # Where the comma is that of decimals.
        record = [
          c.replace(',', '.') if _DECIMAL_COMMA.fullmatch(c) else c
          for c in record
        ]
      if not names:
        record[0] = record[0].removeprefix('#')
        names = [n.strip() or f'column {i}' for i, n in enumerate(record, 1)]
      elif len(record) != len(names):
        ragged.append(reader.line_num)
      else:
        records.append(record)
        rows.append(reader.line_num)
  except csv.Error as error:
    raise ValueError(f'{path}:{reader.line_num}: not CSV: {error}') from None
  note = (
    f'{path}: rows whose number of fields is not the {len(names)} of the header'
    f' dropped: {len(ragged)} (first: line {ragged[0] if ragged else 0})'
  )
  if not records:
    raise NoCurveError(note if ragged else f'{path}: has a header but no row')
  index = {name: i for i, name in enumerate(names)}
  return _table(
    path,
    names,
    lambda name: [r[index[name]] for r in records],
    rows,
    unit='line',
    notes=(note,) if ragged else (),
  )


def _json(path: pathlib.Path, text: str) -> Table:
  unit = 'row'
  # JSONL begins with a whole object; one that is printed over lines does not.
  head = text.lstrip().partition('\n')[0].strip()
  if head.startswith('[') or head == '{':
    value = _loads(path, text, 1)
    records = value if isinstance(value, list) else [value]
  else:
    numbered = enumerate(text.split('\n'), start=1)
    lines = [(n, line) for n, line in numbered if line.strip()]
    records = [_loads(path, line, n) for n, line in lines]
    unit = 'line'
  rows = [n for n, _ in lines] if unit == 'line' else []
  if len(records) == 1 and isinstance(records[0], dict):
    history = records[0].get('log_history')
    if isinstance(history, list):
      records, unit = history, 'row'
  if unit == 'row':
    rows = list(range(1, len(records) + 1))
  if not records:
    raise NoCurveError(f'{path}: has no row')
  for number, record in zip(rows, records, strict=True):
    if not isinstance(record, dict):
      raise ValueError(
        f'{path}: {unit} {number} must be a JSON object, got'
        f' {type(record).__name__}'
      )
  records = [_flat(record) for record in records]
  columns = list(dict.fromkeys(name for record in records for name in record))
  return _table(
    path, columns, lambda name: [r.get(name) for r in records], rows, unit=unit
  )


def _flat(record: dict[str, Any]) -> dict[str, Any]:
  """Objects inside an object become columns 'outer/inner'."""
  if not any(isinstance(v, dict) for v in record.values()):
    return record
  flat: dict[str, Any] = {}
  for name, value in record.items():
    if isinstance(value, dict):
      flat |= {f'{name}/{k}': v for k, v in _flat(value).items()}
    else:
      flat[name] = value
  return flat


def _loads(path: pathlib.Path, text: str, line: int) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    line += getattr(error, 'lineno', 1) - 1
    why = getattr(error, 'msg', error)
    raise ValueError(f'{path}:{line}: not valid JSON: {why}') from None


def _parquet(path: pathlib.Path, data: bytes) -> Table:
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise ValueError(
      f'{path}: reading Parquet needs pyarrow: pip install'
      " 'scalerl_jax[parquet]'"
    ) from None
  try:
    table = parquet.ParquetFile(pyarrow.BufferReader(data)).read()
  except (pyarrow.ArrowException, OSError) as error:
    line = ' '.join(str(error).split())
    raise ValueError(f'{path}: damaged Parquet: {line}') from None
  if not table.num_rows:
    raise NoCurveError(f'{path}: has no row')
  return _table(
    path,
    table.column_names,
    lambda name: table.column(name).to_pylist(),
    range(1, table.num_rows + 1),
  )
