"""From paths to curves."""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
import os
import pathlib

from scalerl_jax.logs import columns
from scalerl_jax.logs import events
from scalerl_jax.logs import tables

_MARK = 'tfevents'  # Of event files, as TensorBoard finds them itself.
# Opened one by one, so that one without a curve does not hide the others.
_Source = Callable[[], tables.Table]


def read(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  *,
  x: str | None = None,
  y: str | None = None,
  group: str | None = None,
  stderr: str | None = None,
  percent: bool = False,
  devices: float | None = None,
  compute_per_step: float | None = None,
) -> tuple[list[columns.Curve], list[str]]:
  """Reads compute-performance curves out of logs.

  Args:
    paths: Files: CSV, TSV, JSONL, JSON, Parquet, exports of Weights & Biases
      (each run of a wide one is a curve), event files of TensorBoard. Or
      directories, searched for `curve.csv` of runs and for event files.
    x: Column or tag of the compute; None: the first of `compute`,
      `device_hours`, `gpu_hours`, `flops`, `tokens`, `step`, `_step`,
      `global_step`, `train/global_step`, `training/global_step`, in any case.
      The first column of a wide export of Weights & Biases is its x.
      TensorBoard has `step` and `wall_time` besides its tags; `step` is the
      default. `wall_time`, `_runtime`, `_timestamp` and `Relative Time (...)`
      are taken for seconds and become hours since the start.
    y: Column or tag of the pass rate; None: the one whose name, after the last
      slash and without `eval_`, `val_` or `test_`, is `pass_rate`, such as
      `mean@16`, `accuracy` or `acc`, `score`, `reward`, `value`.
    group: Columns, separated by commas, whose values tell runs apart.
    stderr: Column of the standard error of y; None: `<y>_stderr` or `stderr`
      if there is one.
    percent: y and its standard error are in percent. A value with its own
      percent sign needs no such word.
    devices: x is wall time, in hours if its name says so, else in seconds;
      makes it device-hours.
    compute_per_step: x is steps; makes it compute.

  Returns:
    The curves, with different names, and a line about each kind of row that was
    dropped or converted: `<source>: <what>: <count> (first: line <n>)`.

  Raises:
    ValueError: Nothing can be read, a column is missing or ambiguous, or a
      value does not belong. The message is one line.
  """
  for field, value in (
    ('devices', devices),
    ('compute_per_step', compute_per_step),
  ):
    if value is not None and not 0 < value < math.inf:
      raise ValueError(f'{field}={value} must be positive and finite')
  if devices is not None and compute_per_step is not None:
    raise ValueError(
      'devices and compute_per_step exclude each other: drop one'
    )
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  if not paths:
    raise ValueError('paths is empty; give at least one file or directory')
  known = [pathlib.Path(path).resolve() for path in paths]
  if repeated := [p for p in known if known.count(p) > 1]:
    raise ValueError(f'{repeated[0]}: is given twice; give it once')
  options = columns.Options(
    x, y, group, stderr, percent, devices, compute_per_step
  )
  found: list[tuple[columns.Curve, str]] = []
  notes: list[str] = []
  for path in paths:
    made, failed = [], []
    for load in _sources(pathlib.Path(path), y):
      try:
        table = load()
        curves = columns.curves(table, options, notes)
      except tables.NoCurveError as error:
        failed.append(error)
      else:
        made += [(curve, table.source) for curve in curves]
    if not made:
      raise ValueError(str(failed[0]))
    found += made
    notes += [f'{error}: skipped' for error in failed]
  return _named_apart(found), notes


def _sources(path: pathlib.Path, y: str | None) -> Iterator[_Source]:
  if not path.is_dir():
    if _MARK in path.name:
      yield functools.partial(
        events.read, path.parent, [path], name=path.parent.name, y=y
      )
      return
    for table in tables.split_runs(tables.read(path), y=y):
      yield functools.partial(_same, table)
    return
  empty = True
  for folder, inner, names in os.walk(path):
    inner.sort()
    here = pathlib.Path(folder)
    files = [here / name for name in sorted(names) if _MARK in name]
    if 'curve.csv' in names:
      # The run's own event files tell the same evaluations again.
      inner.clear()
      yield functools.partial(tables.read, here / 'curve.csv')
    elif files:
      name = here.resolve().name
      if here != path:
        name = here.relative_to(path).as_posix()
      yield functools.partial(events.read, here, files, name=name, y=y)
    empty = empty and not files and 'curve.csv' not in names
  if empty:
    raise ValueError(
      f'{path}: holds neither curve.csv nor event files (tfevents in'
      ' their names); give other logs file by file'
    )


def _same(table: tables.Table) -> tables.Table:
  return table


def _named_apart(
  found: Sequence[tuple[columns.Curve, str]],
) -> list[columns.Curve]:
  """Names that several curves share get their source, then a number."""
  short = [curve.name for curve, _ in found]
  names: list[str] = []
  for curve, source in found:
    name = curve.name
    if short.count(name) > 1:
      name = f'{source}: {name}'
    base, number = name, 1
    while name in names:
      number += 1
      name = f'{base} #{number}'
    names.append(name)
  return [c._replace(name=n) for (c, _), n in zip(found, names, strict=True)]
