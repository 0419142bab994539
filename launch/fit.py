"""Fits the curve of a log of any trainer, and forecasts it.

    python launch/fit.py FILE... [--x=COLUMN] [--y=COLUMN] [--group=COLUMN]
        [--stderr=COLUMN] [--percent] [--devices=N] [--compute_per_step=F]
        [--r0=VALUE|free|first] [--min_compute=VALUE|auto]
        [--fit_until=COMPUTE] [--budget=COMPUTE] [--target=PASS_RATE]
        [--price=F] [--method=posterior|least_squares|paper_grid]
        [--margin=0.02] [--json] [--out=DIR]

FILE is CSV, TSV, JSON, JSONL, Parquet, an export of Weights & Biases, an event
file of TensorBoard, or a directory of runs.

    --x, --y            columns of the compute and of the pass rate; default:
                        guessed by name
    --group             columns, separated by commas, that tell runs apart
    --stderr            column of the standard error, for the error bars
    --percent           the pass rate is in percent
    --devices           x is wall time; makes it device-hours
    --compute_per_step  x is steps; makes it compute
    --r0                pass rate at zero compute as measured: a value or
                        `first`, that of the first evaluation; or `free`, which
                        fits it; default: that at compute 0 if there is one,
                        else free. The posterior moves what was measured within
                        its error, the other methods hold it
    --min_compute       evaluations with less compute are left out; `auto`
                        finds where the law begins; default: 0
    --fit_until         evaluations beyond it score the fit instead
    --budget            total compute that may be spent, for forecast and
                        verdict
    --target            pass rate that is wanted there; default: that of the
                        curve at its last compute + 0.02
    --price             of a unit of compute
    --method            default: posterior
    --margin            difference of A that counts as none
    --json              print one JSON document and nothing else
    --out               write fit.json, curve.png, curve_linear.png and
                        report.html there

Bad input ends with one line on stderr and exit code 2, what cannot be written
with one line and exit code 1. A run that cannot be fitted does not stop the
others.
"""

from collections.abc import Sequence
import importlib.util
import io
import json
import os
import pathlib
import sys
from typing import Any

from absl import flags

from scalerl_jax import compilation
from scalerl_jax import logs
from scalerl_jax.reporting import curve_summary

_METHODS = ('posterior', 'least_squares', 'paper_grid')


def main(argv: Sequence[str]) -> int:
  """Runs one command line.

  Args:
    argv: Arguments, the program's name first.

  Returns:
    The exit code.
  """
  try:
    if any(a in ('--help', '-help', '-h') for a in argv[1:]):
      return _print(__doc__)
    values, files = _parse_flags(argv)
    document = _summarize(files, values)
  except ValueError as error:
    return _fail(error, 2)
  code = 0
  if values.out is not None:
    try:
      _write(pathlib.Path(values.out), document)
    except OSError as error:
      code = _fail(f'--out={values.out}: cannot be written: {error}', 1)
  if values.json:
    for note in document['notes']:
      print(f'note: {note}', file=sys.stderr)
    return _print(json.dumps(document, indent=2, allow_nan=False)) or code
  return _print(curve_summary.to_text(document).rstrip('\n')) or code


def _parse_flags(
  argv: Sequence[str],
) -> tuple[flags.FlagValues, list[str]]:
  # Not the global ones: those of one command line must not reach the next.
  found = flags.FlagValues()
  found.set_gnu_getopt(True)
  for name in ('x', 'y', 'group', 'stderr', 'r0', 'out'):
    flags.DEFINE_string(name, None, '', flag_values=found)
  for name in (
    *('devices', 'compute_per_step', 'fit_until', 'budget', 'target', 'price'),
  ):
    flags.DEFINE_float(name, None, '', flag_values=found)
  flags.DEFINE_string('min_compute', '0', '', flag_values=found)
  flags.DEFINE_float('margin', 0.02, '', flag_values=found)
  flags.DEFINE_enum('method', _METHODS[0], _METHODS, '', flag_values=found)
  for name in ('percent', 'json'):
    flags.DEFINE_bool(name, False, '', flag_values=found)
  try:
    files = found(list(argv))[1:]
  except flags.Error as error:
    raise ValueError(str(error)) from None
  if not files:
    raise ValueError('no FILE is given; --help tells more')
  if found.out is not None and (
    not found.out
    or (os.path.exists(found.out) and not os.path.isdir(found.out))
  ):
    raise ValueError(f'--out={found.out} is not a directory; give a new one')
  if found.out is not None and importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      "--out draws with matplotlib: pip install 'scalerl_jax[plots]'"
    )
  return found, files


def _summarize(
  files: Sequence[str], values: flags.FlagValues
) -> dict[str, Any]:
  options = curve_summary.Options(
    r0=_value('r0', values.r0, ('free', 'first')),
    min_compute=_value('min_compute', values.min_compute, ('auto',)),
    fit_until=values.fit_until,
    budget=values.budget,
    target=values.target,
    price=values.price,
    method=values.method,
    margin=values.margin,
  )
  curve_summary.check(options)
  found, notes = logs.read(
    files,
    x=values.x,
    y=values.y,
    group=values.group,
    stderr=values.stderr,
    percent=values.percent,
    devices=values.devices,
    compute_per_step=values.compute_per_step,
  )
  x, y = (
    ', '.join(dict.fromkeys(getattr(c, axis) for c in found)) for axis in 'xy'
  )
  if ', ' in x:
    notes.append(f'{x}: runs can be compared only if these are in one unit')
  compilation.use_cache(min_seconds=0.0)  # A fit is many small programs.
  runs = [curve_summary.Run(*curve[:4]) for curve in found]
  return curve_summary.summarize(runs, options, x=x, y=y, notes=notes)


def _value(name: str, text: str | None, words: Sequence[str]) -> Any:
  if text is None or text in words:
    return text
  try:
    return float(text)
  except ValueError:
    raise ValueError(
      f'{name}={text!r} must be a number or {" or ".join(words)}'
    ) from None


def _print(text: str) -> int:
  """Prints; returns the exit code."""
  try:
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='replace')  # Names hold any character.
    print(text, flush=True)
  except OSError as error:
    # What is left in its buffer would be written at exit, in vain again.
    sys.stdout = io.StringIO()
    return _fail(f'the output cannot be written: {error.strerror}', 1)
  return 0


def _write(out: pathlib.Path, document: dict[str, Any]) -> None:
  from scalerl_jax.reporting import curve_report

  out.mkdir(parents=True, exist_ok=True)
  curve_report.write(out, document)


def _fail(error: object, code: int) -> int:
  print('error:', ' '.join(str(error).split()), file=sys.stderr)
  return code


if __name__ == '__main__':
  try:
    sys.exit(main(sys.argv))
  except KeyboardInterrupt:
    sys.exit(_fail('interrupted', 130))
