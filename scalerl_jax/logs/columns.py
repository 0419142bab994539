"""Columns of a table to curves: choice, conversion, order; nothing silently."""

from collections.abc import Iterator, Sequence
import itertools
import re
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.logs import tables

_STEPS = (
  *('step', '_step', 'Step', 'global_step'),
  *('train/global_step', 'training/global_step'),
)
# Kept in seconds, or in seconds since 1970, by those who write them.
_TIMES = re.compile(
  r'wall[ _]time|_runtime|_timestamp|relative time( \(.*\))?', re.I
)
_OTHER_UNIT = re.compile(
  r'(.*[_ /])?(ms|milli\w*|min|mins|minutes?|days?|epochs?)', re.I
)
_COMPUTE = ('compute', 'device_hours', 'gpu_hours', 'flops', 'tokens')
# The last part of the name, in lower case; earlier ones come first.
_RATES = (
  'pass[_ ]rate',
  r'(mean|avg|acc)@\d+|pass@1',
  'acc|accuracy',
  'score',
  'rewards?',
  'value',
)
_GROUPS = ('run', 'run_id', 'run_name', 'name', 'seed', 'series', 'experiment')
_EMPTY = ('', '-', 'nan', 'none', 'null', 'na', 'n/a')
_THOUSANDS = re.compile(r'[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?(e[+-]?\d+)?', re.I)
_HELD_OUT = re.compile(r'(^|[_/])(eval|val|test)[_/]', re.I)
_PERCENT = 'divided by 100'
_EPOCH = 1e8  # Seconds: more than three years of run time.
_MAX_CANDIDATES = 50


class Curve(NamedTuple):
  """Evaluations of one run, in the order of their compute."""

  name: str
  compute: np.ndarray  # float64, not negative, ascending; may repeat.
  pass_rate: np.ndarray  # float64, in [0, 1].
  stderr: np.ndarray | None  # Of the pass rate; NaN where it is not known.
  x: str  # What the compute is: its column, and how that was converted.
  y: str  # Column of the pass rate.


class Options(NamedTuple):
  """What `logs.read` was asked for."""

  x: str | None
  y: str | None
  group: str | None
  stderr: str | None
  percent: bool
  devices: float | None
  compute_per_step: float | None


def pick_y(
  source: str, columns: Sequence[str], y: str | None, default: str | None = None
) -> str:
  """Chooses the column of the pass rate.

  Args:
    source: For messages.
    columns: Those there are.
    y: The one that is asked for; None: guessed by name.
    default: Taken where no name is known.

  Returns:
    The column.

  Raises:
    NoCurveError: It is not there.
    ValueError: Several are as likely.
  """
  if y is not None:
    return _present(source, columns, y, 'y')
  for pattern in _RATES:
    found = [c for c in columns if _is_rate(c, pattern)]
    held_out = [c for c in found if _HELD_OUT.search(c)]
    if len(held_out) == 1:
      found = held_out
    if len(found) > 1:
      raise ValueError(
        f'{source}: the pass rate may be any of {tables.listed(found)}; choose'
        ' with y (--y)'
      )
    if found:
      return found[0]
  if default is not None:
    return default
  raise tables.NoCurveError(
    f'{source}: no column is known as a pass rate; give y (--y), one of'
    f' {tables.listed(columns)}'
  )


def curves(
  table: tables.Table, options: Options, notes: list[str]
) -> list[Curve]:
  """Makes the curves of a table.

  Args:
    table: A log.
    options: What was asked for.
    notes: Gets a line for each kind of row that was dropped or converted.

  Returns:
    A curve for each group, named by the group, else by the table.

  Raises:
    NoCurveError: A column is missing, or no row has both values.
    ValueError: A column is ambiguous or holds something that does not belong.
  """
  notes.extend(table.notes)
  y = pick_y(table.source, table.columns, options.y, table.default_y)
  x = _pick_x(table, options)
  if x == y:
    raise ValueError(f'{table.source}: x and y are both {x!r}; give another')
  stderr = _pick_stderr(table, y, options.stderr)
  groups = _pick_groups(table, options.group)
  tally = _Tally(table)
  xs = _numbers(table, x, tally)
  ys = _numbers(table, y, tally, percent=options.percent)
  _check_ranges(table, x, xs, y, ys)
  if options.y is None and not any(_is_rate(y, p) for p in _RATES):
    notes.append(f'{table.source}: y is {y!r}, the only metric there is')
  if options.percent and np.nanmax(ys, initial=0.0) <= 0.01:
    notes.append(
      f'{table.source}: {y!r} is at most 1 %; if it holds fractions, drop'
      ' percent (--percent)'
    )
  errors = np.full_like(xs, np.nan)
  if stderr:
    errors = _numbers(table, stderr, tally, percent=options.percent)
    _refuse(
      table, stderr, errors, (errors < 0) | (errors > 1), 'must be in [0, 1]'
    )
  factor, label, conversion = _factor(table, x, options)
  tally.add(f'rows without {x!r} dropped', np.isnan(xs))
  tally.add(f'rows without {y!r} dropped', ~np.isnan(xs) & np.isnan(ys))
  made, hints = [], []
  for name, rows in _members(table, groups):
    start = np.nanmin(xs[rows], initial=np.inf)
    if _TIMES.fullmatch(x) and _EPOCH < start < np.inf:
      xs[rows] -= start
    kept = _tidy(rows, xs, ys, tally)
    if not len(kept):
      hints.append(f'{table.source}: group {name!r} has no point: skipped')
      continue
    if not groups:
      hints += _hint_groups(table, {x, y, stderr}, kept, xs)
    known = not np.isnan(errors[kept]).all()
    points = (xs[kept] * factor, ys[kept], errors[kept] if known else None)
    made.append(Curve(name or table.name, *points, label, y))
  if not made:
    raise tables.NoCurveError(
      f'{table.source}: no row has both {x!r} and {y!r}; choose with x (--x)'
      ' and y (--y)'
    )
  notes.extend([*tally.lines(), *conversion, *hints])
  return made


def _is_rate(name: str, pattern: str) -> bool:
  known = rf'(.*/)?((eval|val|test)_)?({pattern})'
  return re.fullmatch(known, name, re.I | re.S) is not None


class _Tally:
  """Counts what happens to the rows of a table."""

  def __init__(self, table: tables.Table) -> None:
    self._table = table
    self._found: dict[str, list[int]] = {}

  def add(self, kind: str, rows: np.ndarray) -> None:
    """Counts rows, given as a mask or by their indices."""
    if rows.dtype == bool:
      rows = np.flatnonzero(rows)
    if len(rows):
      self._found.setdefault(kind, []).extend(rows.tolist())

  def lines(self) -> Iterator[str]:
    """One note for each kind."""
    source, unit = self._table.source, self._table.unit
    for kind, rows in self._found.items():
      first = self._table.rows[min(rows)]
      yield f'{source}: {kind}: {len(rows)} (first: {unit} {first})'


def _present(source: str, columns: Sequence[str], name: str, flag: str) -> str:
  if name in columns:
    return name
  raise tables.NoCurveError(
    f'{source}: has no column {flag}={name!r} (--{flag}); there are'
    f' {tables.listed(columns)}'
  )


def _pick_x(table: tables.Table, options: Options) -> str:
  if options.x is not None:
    return _present(table.source, table.columns, options.x, 'x')
  times = [c for c in table.columns if _TIMES.fullmatch(c)]
  default = table.default_x
  if options.devices is not None:
    kind, found = 'wall time', [t for t in times if t == default] or times
  elif options.compute_per_step is not None:
    kind = 'steps'
    found = _known(table, _STEPS)
    if default is not None and default not in (*times, *_COMPUTE):
      found = [default]
  else:
    kind = 'compute'
    found = [default] if default else _known(table, (*_COMPUTE, *_STEPS))
  if found:
    return found[0]
  raise tables.NoCurveError(
    f'{table.source}: no column is known as {kind}; give x (--x), one of'
    f' {tables.listed(table.columns)}'
  )


def _known(table: tables.Table, names: Sequence[str]) -> list[str]:
  """Columns with these names, in their order; as written or in lower case."""
  lower = {c.lower(): c for c in reversed(table.columns)}
  found = [n for n in names if n in table.columns]
  return [*found, *(lower[n.lower()] for n in names if n.lower() in lower)]


def _pick_stderr(table: tables.Table, y: str, asked: str | None) -> str | None:
  if asked == y:
    raise ValueError(
      f'{table.source}: y and stderr are both {y!r}; give another'
    )
  if asked is not None:
    return _present(table.source, table.columns, asked, 'stderr')
  known = (name for name in (f'{y}_stderr', 'stderr') if name in table.columns)
  return next(known, None)


def _pick_groups(table: tables.Table, group: str | None) -> list[str]:
  if group is None:
    return []
  # A name may itself hold a comma.
  names = [group] if group in table.columns else group.split(',')
  return [
    _present(table.source, table.columns, name.strip(), 'group')
    for name in names
  ]


def _factor(
  table: tables.Table, x: str, options: Options
) -> tuple[float, str, list[str]]:
  """What x is multiplied by, what that is, and the note that says so."""
  devices, per_step = options.devices, options.compute_per_step
  for field, value, others in (
    ('devices', devices, (*_COMPUTE, *_STEPS)),
    ('compute_per_step', per_step, _COMPUTE),
  ):
    wrong = x.lower() in others or (field != 'devices' and _TIMES.fullmatch(x))
    if value is not None and wrong:
      raise ValueError(
        f'{table.source}: {field}={value} must not multiply x={x!r}; leave it'
        ' out or choose another x (--x)'
      )
  if per_step is not None:
    note = f'{table.source}: {x!r} multiplied by {per_step:g}'
    return per_step, f'{x} x {per_step:g}', [note]
  if devices is None and not _TIMES.fullmatch(x):
    return 1.0, x, []
  if _OTHER_UNIT.fullmatch(x):
    raise ValueError(
      f'{table.source}: x={x!r} is not in seconds; convert it or choose'
      ' another (--x)'
    )
  label = f'{"hours" if devices is None else "device-hours"} of {x}'
  unit = 'hours' if devices is None else f'device-hours on {devices:g} devices'
  is_hours = 'hour' in x.lower()
  found = 'hours' if is_hours else 'seconds'
  note = f'{table.source}: {x!r} converted from {found} to {unit}'
  return (devices or 1.0) / (1 if is_hours else 3600), label, [note]


def _numbers(
  table: tables.Table, name: str, tally: _Tally, *, percent: bool = False
) -> np.ndarray:
  """Values of a column; NaN where there is none."""
  cells = table.cells(name)
  values = np.empty(len(cells))
  converted: dict[str, list[int]] = {}
  for i, cell in enumerate(cells):
    try:
      value, how = _number(cell)
    except (TypeError, ValueError):
      raise ValueError(
        f'{table.source}: {name!r} is {cell!r:.60} on {table.unit}'
        f' {table.rows[i]}, which is not a number; choose another column or'
        ' correct it'
      ) from None
    if percent and how != _PERCENT and value == value:
      how = _PERCENT
      value /= 100
    values[i] = value
    if how:
      converted.setdefault(how, []).append(i)
  for how, rows in converted.items():
    tally.add(f'values of {name!r} {how}', np.array(rows))
  _refuse(table, name, values, np.isinf(values), 'must be finite')
  return values


def _number(cell: Any) -> tuple[float, str]:
  """The value, and how it was converted if that needs saying."""
  if cell is None:
    return np.nan, ''
  if isinstance(cell, bool):
    raise TypeError
  if not isinstance(cell, str):
    try:
      return float(cell), ''
    except OverflowError:
      return np.inf, ''
  text, how, scale = cell.strip(), '', 1
  if text.lower() in _EMPTY:
    return np.nan, ''
  if text.endswith('%'):
    text, how, scale = text[:-1], _PERCENT, 100
  if _THOUSANDS.fullmatch(text.strip()):
    text = text.replace(',', '')
    how = how or 'read without thousands separators'
  if '_' in text:
    raise ValueError  # Python would take it for a separator.
  return float(text) / scale, how


def _refuse(
  table: tables.Table, name: str, values: np.ndarray, bad: np.ndarray, why: str
) -> None:
  if bad.any():
    i = int(np.argmax(bad))
    raise ValueError(
      f'{table.source}: {name!r} is {values[i]:g} on {table.unit}'
      f' {table.rows[i]}; it {why}'
    )


def _check_ranges(
  table: tables.Table, x: str, xs: np.ndarray, y: str, ys: np.ndarray
) -> None:
  _refuse(table, x, xs, xs < 0, 'must not be negative; choose x (--x)')
  why = 'must be a fraction; give percent=True (--percent) if it is in percent'
  if ((ys < 0) | (ys > 100)).any():
    why = 'must be in [0, 1]; choose the pass rate with y (--y)'
  _refuse(table, y, ys, (ys < 0) | (ys > 1), why)


def _members(
  table: tables.Table, groups: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
  """Name and rows of each group; the whole table has an empty name."""
  found: dict[tuple[str, ...], list[int]] = {}
  for i, key in enumerate(zip(*map(table.cells, groups), strict=True)):
    texts = ('' if v is None else str(v).strip() for v in key)
    found.setdefault(tuple(texts), []).append(i)
  if not groups:
    found[()] = list(range(len(table.rows)))
  for key, rows in found.items():
    # A bare number would not say what it is.
    parts = [
      value if any(map(str.isalpha, value)) else f'{name}={value}'
      for name, value in zip(groups, key, strict=True)
    ]
    yield ','.join(parts), np.array(rows, np.int64)


def _tidy(
  rows: np.ndarray, xs: np.ndarray, ys: np.ndarray, tally: _Tally
) -> np.ndarray:
  """Rows with both values, sorted by x, without repetitions."""
  rows = rows[~np.isnan(xs[rows]) & ~np.isnan(ys[rows])]
  tally.add(
    'rows below the one before, sorted by x', rows[1:][np.diff(xs[rows]) < 0]
  )
  rows = rows[np.argsort(xs[rows], kind='stable')]
  pairs = np.stack([xs[rows], ys[rows]], axis=1)
  first = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
  tally.add('repeated rows (same x and y) dropped', np.delete(rows, first))
  rows = rows[first]
  again = rows[1:][np.diff(xs[rows]) == 0]
  tally.add('rows whose x has another y already, both kept', again)
  return rows


def _hint_groups(
  table: tables.Table,
  used: set[str | None],
  rows: np.ndarray,
  xs: np.ndarray,
) -> list[str]:
  """A note with the columns that may tell runs apart, if there are any."""
  x = xs[rows].tolist()
  repeats = len(set(x)) < len(x)
  candidates = []
  for name in itertools.islice(table.columns, _MAX_CANDIDATES):
    if name in used:
      continue
    cells = table.cells(name)
    values = [str(cells[i]) for i in rows]
    several = 1 < len(set(values)) <= max(len(values) // 2, 1)
    known = name.lower() in _GROUPS and len(set(values)) > 1
    tells = repeats and len(set(zip(values, x, strict=True))) == len(x)
    if known or (several and tells):
      candidates.append(name)
  if not candidates:
    return []
  return [
    f'{table.source}: read as one curve; if it holds several runs, split it'
    f' with group (--group): {tables.listed(candidates)}'
  ]
