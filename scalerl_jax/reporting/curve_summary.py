"""What is known about the curves of some runs: one JSON document, and as text.

The document is all that `curve_report` draws from.
"""

from collections.abc import Iterator, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax import curves
from scalerl_jax.curves import law
from scalerl_jax.reporting import pages
from scalerl_jax.reporting import writers

# Gain that makes more compute worth it: the paper's margin on A.
_WORTHWHILE_GAIN = 0.02
_FORECAST_MULTIPLE = 4.0
_GRID = 60
_FAR = 6.0  # Standard deviations of the other evaluations.
_MAX_CROSSINGS = 20
_MAX_NAME = 60  # Characters in a table of text.
_QUANTILES = (0.1, 0.2, 0.3)  # Of the evaluations, for other windows.
_VERDICT = (
  *('decision', 'target', 'probability', 'expected', 'gain_per_compute'),
  *('compute_to_target', 'cost', 'gain_per_cost'),
)
_R0_RULES = {
  'given': 'as given',
  'first': 'the pass rate of the first evaluation',
  'compute_0': 'the pass rate at compute 0',
  'free': 'fitted freely',
}


class Run(NamedTuple):
  """Evaluations of one run."""

  name: str
  compute: np.ndarray
  pass_rate: np.ndarray
  stderr: np.ndarray | None = None  # NaN where it is not known.


class Options(NamedTuple):
  """What is asked for; the flags of `launch/fit.py` say what each means."""

  r0: float | str | None = None  # Or `free` or `first`.
  min_compute: float | str = 0.0  # Or `auto`.
  fit_until: float | None = None
  budget: float | None = None
  target: float | None = None
  price: float | None = None
  method: str = 'posterior'
  margin: float = 0.02


class Table(NamedTuple):
  """A table of text."""

  title: str
  header: tuple[str, ...]
  rows: Sequence[Sequence[str]]
  remarks: tuple[str, ...] = ()


def summarize(
  runs: Sequence[Run],
  options: Options,
  *,
  x: str = 'compute',
  y: str = 'pass rate',
  notes: Sequence[str] = (),
) -> dict[str, Any]:
  """Fits every run and says what follows.

  Args:
    runs: With different names.
    options: What is asked for.
    x: What the compute is.
    y: What the pass rate is.
    notes: Anything that must be known about the data.

  Returns:
    The document: `runs` by name, `failed` with the error of those that could
    not be fitted, `held_out` over all, `comparison`; None where there is none
    and for numbers that are not finite.

  Raises:
    ValueError: An option is out of range, or no run could be fitted.
  """
  check(options)
  done: dict[str, dict[str, Any]] = {}
  fits: dict[str, curves.SigmoidFit] = {}
  failed: dict[str, str] = {}
  held: list[np.ndarray] = []
  for run in runs:
    try:
      done[run.name], fits[run.name], scored = _summarize_run(run, options)
      held.append(scored)
    except ValueError as error:
      failed[run.name] = str(error)
  if not done:
    errors = [f'{name}: {error}' for name, error in failed.items()]
    prefix = f'none of {len(errors)} runs was fitted: ' * (len(errors) > 1)
    raise ValueError(prefix + '; '.join(errors))
  document = {
    'x': x,
    'y': y,
    'notes': list(notes),
    **options._asdict(),
    'runs': done,
    'failed': failed,
    'held_out': _scores(np.concatenate(held, axis=1)),
    'comparison': _compare(fits, options.margin) if len(fits) > 1 else None,
  }
  return writers.jsonable(document)


def check(options: Options) -> None:
  """Refuses what cannot be asked for.

  Args:
    options: What is asked for.

  Raises:
    ValueError: An option is out of range, or makes no sense alone.
  """
  for name in ('fit_until', 'budget'):
    value = getattr(options, name)
    if value is not None and not 0 < value < math.inf:
      raise ValueError(f'{name}={value} must be positive and finite')
  for name in ('price', 'margin', 'min_compute'):
    value = getattr(options, name)
    if isinstance(value, float | int) and not 0 <= value < math.inf:
      raise ValueError(f'{name}={value} must be finite and not negative')
  if isinstance(options.r0, float | int) and not 0 <= options.r0 < 1:
    raise ValueError(f'r0={options.r0} must be in [0, 1)')
  if options.target is not None and not 0 <= options.target <= 1:
    raise ValueError(f'target={options.target} must be in [0, 1]')
  if options.budget is None:
    for name in ('target', 'price'):
      if getattr(options, name) is not None:
        raise ValueError(
          f'{name} says nothing without a budget: give --budget=COMPUTE, the'
          ' total compute that may be spent'
        )


def _summarize_run(
  run: Run, options: Options
) -> tuple[dict[str, Any], curves.SigmoidFit, np.ndarray]:
  """The summary, the fit, and error and coverage of what is held out."""
  order = np.argsort(run.compute, kind='stable')
  x, y = run.compute[order], run.pass_rate[order]
  until = math.inf if options.fit_until is None else options.fit_until
  early = x <= until
  if not early.any():
    raise ValueError(
      f'fit_until={until:g} leaves nothing to fit: the first compute is'
      f' {x[0]:g}'
    )
  if early.all() and until < math.inf:
    raise ValueError(
      f'fit_until={until:g} leaves nothing to score: the last compute is'
      f' {x[-1]:g}'
    )
  r0, rule = _r0(x, y, options)
  start = options.min_compute
  if isinstance(start, str):
    start = curves.window_start(x[early], y[early], r0=r0)
  fitted = early & (x >= start)
  if not fitted.any():
    raise ValueError(f'min_compute={start:g} leaves nothing to fit')
  fit = curves.fit(x[fitted], y[fitted], r0=r0, method=options.method)
  seen = curves.forecast(fit, x[~early], of='observation')
  inside = (y[~early] >= seen.low) & (y[~early] <= seen.high)
  held = np.stack([seen.mean - y[~early], inside])
  horizon = options.budget or _FORECAST_MULTIPLE * float(x[-1])
  grid = np.geomspace(x[x > 0].min(), max(horizon, x[-1]), _GRID)
  others = np.quantile(x[early], (0.0, *_QUANTILES), method='lower')
  windows = curves.window_sensitivity(
    x[early],
    y[early],
    windows=[(low, x[early][-1]) for low in sorted({start, *others})],
    r0=r0,
    method=options.method,
  )
  # `start` may leave out what another window leaves out too.
  by_size = {w.num_points: w for w in windows}
  predicted = law.evaluate(x, fit.params)
  size = np.abs(y - predicted)
  far = _FAR * 1.4826 * np.median(size[fitted])
  broken = fitted & (size > max(far, _WORTHWHILE_GAIN))
  summary = curves.as_dict(fit) | {
    'r0_rule': rule,
    'min_compute': start,
    'forecast': _forecast(fit, grid),
    'at_horizon': {k: v[0] for k, v in _forecast(fit, [horizon]).items()},
    'milestones': [m._asdict() for m in curves.milestones(fit)],
    'verdict': _verdict(fit, options),
    'held_out': _scores(held),
    'far_off': {'compute': x[broken], 'pass_rate': y[broken]},
    'power_law': _power_law(x[fitted], y[fitted]),
    'window_sensitivity': [_window(w) for w in by_size.values()],
    'points': {
      'compute': x,
      'pass_rate': y,
      'stderr': None if run.stderr is None else run.stderr[order],
      'predicted': predicted,
      'role': np.where(fitted, 'fitted', np.where(early, 'early', 'held out')),
    },
  }
  return summary, fit, held


def _r0(
  x: np.ndarray, y: np.ndarray, options: Options
) -> tuple[float | None, str]:
  """R0, None to fit it, and why."""
  if isinstance(options.r0, float | int):
    return float(options.r0), 'given'
  # A run that starts at 1 has no curve, but is no reason to fail.
  if options.r0 == 'first':
    return min(float(y[0]), 0.99), 'first'
  if options.r0 is None and x[0] == 0:
    return min(float(y[x == 0].mean()), 0.99), 'compute_0'
  if options.method == 'paper_grid':
    raise ValueError('paper_grid needs R0: give --r0=VALUE or --r0=first')
  return None, 'free'


def _forecast(
  fit: curves.SigmoidFit, compute: Sequence[float] | np.ndarray
) -> dict[str, Any]:
  band = curves.forecast(fit, compute)
  around = curves.forecast(fit, compute, of='observation')
  return {
    'compute': compute,
    **band._asdict(),
    'observation_low': around.low,
    'observation_high': around.high,
  }


def _verdict(fit: curves.SigmoidFit, options: Options) -> dict[str, Any] | None:
  if options.budget is None:
    return None
  target = options.target
  if target is None:
    # Of the curve: the last evaluation alone may be anything.
    reached = law.evaluate(np.array([fit.max_compute]), fit.params)[0]
    target = min(float(reached) + _WORTHWHILE_GAIN, 1.0)
  found = curves.verdict(
    fit, target=target, budget=options.budget, price=options.price
  )
  return {'target': target, 'budget': options.budget} | found._asdict()


def _scores(held: np.ndarray) -> dict[str, Any] | None:
  if not held.size:
    return None
  return {
    'num_points': held.shape[1],
    'rmse': np.sqrt(np.mean(held[0] ** 2)),
    'mean_error': held[0].mean(),  # Positive: forecast too high.
    'coverage': held[1].mean(),
  }


def _power_law(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
  try:
    return curves.fit_power_law(x, y)._asdict()
  except ValueError as error:
    return {'error': str(error)}


def _window(found: curves.WindowFit) -> dict[str, Any]:
  return {
    'min_compute': found.min_compute,
    'num_points': found.num_points,
    'a': found.params.a,
    'interval': found.intervals.a,
    'identifiable': found.identifiable,
  }


def _compare(
  fits: Mapping[str, curves.SigmoidFit], margin: float
) -> dict[str, Any]:
  found = curves.compare(fits, margin=margin)
  crossings = [
    {'better': better, 'worse': worse, 'compute': compute}
    for (better, worse), compute in found.crossings.items()
  ]
  try:
    slopes = {k: v._asdict() for k, v in curves.slopes(fits).items()}
    error = None
  except ValueError as caught:
    slopes, error = {}, str(caught)
  return found._asdict() | {
    'crossings': crossings,
    'slopes': slopes,
    'slopes_error': error,
  }


def tables(document: Mapping[str, Any]) -> list[Table]:
  """Makes the tables of a document.

  Args:
    document: Of `summarize`.

  Returns:
    Those that have a row.
  """
  runs = document['runs']
  budget, until = (pages.number(document[k]) for k in ('budget', 'fit_until'))
  remarks = [line for name, run in runs.items() for line in _remarks(name, run)]
  if document['min_compute'] == 'auto':
    remarks.append('from: chosen by min_compute=auto; 0 leaves nothing out')
  for rule in dict.fromkeys(run['r0_rule'] for run in runs.values()):
    is_moved = rule != 'free' and document['method'] == 'posterior'
    moved = ', moved within the error of a measurement' * is_moved
    remarks.append(f'R0 ({rule}): {_R0_RULES[rule]}{moved}')
  horizon = '' if document['budget'] else 'at 4 x the last compute: no budget'
  guessed = document['budget'] and document['target'] is None
  target = f'target: the curve at its last compute + {_WORTHWHILE_GAIN}'

  def of_runs(title: str, header: str, cells: Any, *remarks: str) -> Table:
    """A row for each run that has cells."""
    rows = [(name, *found) for name, r in runs.items() if (found := cells(r))]
    return Table(title, ('run', *header.split('|')), rows, remarks)

  made = [
    of_runs(
      'Fit',
      'n|from|R0|A|B|C_mid|residual std|autocorrelation|identifiable',
      _fit_cells,
      *remarks,
    ),
    of_runs(
      'Forecast',
      'compute|pass rate|of the curve|of an evaluation',
      _forecast_cells,
      *filter(None, [horizon]),
    ),
    of_runs(
      f'Verdict at a budget of {budget}',
      '|'.join(_VERDICT).replace('_', ' '),
      lambda run: _numbers(run['verdict'], _VERDICT),
      *[target] * bool(guessed),
    ),
    _held_out_table(document, until),
    of_runs(
      'Compute at a part of A - R0',
      '90 %|95 %|99 %',
      lambda run: [
        _between(m['compute'], (m['low'], m['high'])) for m in run['milestones']
      ],
    ),
    Table(
      'A of other windows',
      ('run', 'from', 'n', 'A', 'identifiable'),
      [
        (name, *_window_cells(window))
        for name, run in runs.items()
        for window in run['window_sensitivity']
      ],
    ),
    of_runs(
      'Sigmoid and power law',
      'A|residual std|power law: A|residual std',
      _power_law_cells,
    ),
    _comparison_table(document),
    Table('Not fitted', ('run', 'error'), list(document['failed'].items())),
  ]
  return [table for table in made if table.rows]


def to_text(document: Mapping[str, Any]) -> str:
  """Makes a document readable in a terminal.

  Args:
    document: Of `summarize`.

  Returns:
    Lines, notes first.
  """
  lines = [*(f'note: {n}' for n in document['notes']), headline(document)]
  for table in tables(document):
    rows = (
      (pages.shortened(name, _MAX_NAME), *others)
      for name, *others in (table.header, *table.rows)
    )
    cells = [[_printable(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ['', table.title]
    for row in cells:
      padded = (c.ljust(w) for c, w in zip(row, widths, strict=True))
      lines.append('  ' + '  '.join(padded).rstrip())
    lines += [f'  {remark}' for remark in table.remarks]
  return '\n'.join(map(_printable, lines)) + '\n'


def headline(document: Mapping[str, Any]) -> str:
  """Says what was fitted.

  Args:
    document: Of `summarize`.

  Returns:
    One line.
  """
  return (
    f'{document["y"]} over {document["x"]}; method {document["method"]};'
    ' intervals at 90 %'
  )


def _fit_cells(run: Mapping[str, Any]) -> list[str]:
  p, i = run['params'], run['intervals']
  r0, *others = (_between(p[k], i[k]) for k in ('r0', 'a', 'b', 'c_mid'))
  return [
    *_numbers(run, ('num_points', 'min_compute')),
    f'{r0} ({run["r0_rule"]})',
    *others,
    *_numbers(run, ('residual_std', 'autocorrelation')),
    _yes(run),
  ]


def _remarks(name: str, run: Mapping[str, Any]) -> Iterator[str]:
  if early := run['points']['role'].count('early'):
    start = pages.number(run['min_compute'])
    yield f'{name}: {early} evaluations before compute {start} are left out'
  if compute := run['far_off']['compute']:
    first, rate = (pages.number(v[0]) for v in run['far_off'].values())
    yield (
      f'{name}: far off the curve: {len(compute)} (first: {rate} at compute'
      f' {first})'
    )
  for warning in run['warnings']:
    yield f'{name}: {warning}'
  if run['verdict'] and run['verdict']['budget'] <= run['max_compute']:
    spent = pages.number(run['max_compute'])
    yield f'{name}: {spent} was spent, so that the budget leaves nothing'


def _forecast_cells(run: Mapping[str, Any]) -> list[str]:
  at = run['at_horizon']
  return [
    *_numbers(at, ('compute', 'mean')),
    _interval((at['low'], at['high'])),
    _interval((at['observation_low'], at['observation_high'])),
  ]


def _window_cells(window: Mapping[str, Any]) -> list[str]:
  a = _between(window['a'], window['interval'])
  return [*_numbers(window, ('min_compute', 'num_points')), a, _yes(window)]


def _power_law_cells(run: Mapping[str, Any]) -> list[str]:
  law = run['power_law']
  a = law.get('error') or pages.number(law['a'])
  std = (run['residual_std'], law.get('residual_std'))
  ours, theirs = map(pages.number, std)
  return [pages.number(run['params']['a']), ours, a, theirs]


def _held_out_table(document: Mapping[str, Any], until: str) -> Table:
  keys = ('num_points', 'rmse', 'mean_error', 'coverage')
  scored = [(name, run['held_out']) for name, run in document['runs'].items()]
  if len(scored) > 1:
    scored.append(('all runs', document['held_out']))
  return Table(
    f'Held out: compute above {until}',
    ('run', 'n', 'RMSE', 'mean error', 'coverage'),
    [(name, *_numbers(score, keys)) for name, score in scored if score],
    (
      'mean error: forecast - evaluation',
      'coverage: of the 90 % interval of an evaluation',
    ),
  )


def _comparison_table(document: Mapping[str, Any]) -> Table:
  found = document['comparison']
  if not found:
    return Table('Comparison', (), ())
  reasons = [*(f'higher {reason}' for reason in found['reasons']), '']
  ranked = zip(found['ranking'], reasons, strict=True)
  rows = [
    (name, str(rank), pages.number(document['runs'][name]['params']['a']), why)
    for rank, (name, why) in enumerate(ranked, start=1)
  ]
  crossed = [c for c in found['crossings'] if c['compute'] is not None]
  remarks = [
    f'{c["better"]} overtakes {c["worse"]} at {pages.number(c["compute"])}'
    for c in crossed[:_MAX_CROSSINGS]
  ]
  if more := len(crossed) - len(remarks):
    remarks.append(f'and {more} more, which fit.json and --json list')
  if len(crossed) < len(found['crossings']):
    remarks.append('pairs not named: the better one does not come from below')
  header = ('run', 'rank', 'A', 'better than the next by')
  return Table('Comparison', header, rows, (*remarks, *found['warnings']))


def _numbers(
  values: Mapping[str, Any] | None, keys: Sequence[str]
) -> list[str]:
  return [pages.number(values[k]) for k in keys] if values else []


def _yes(found: Mapping[str, Any]) -> str:
  return 'yes' if found['identifiable'] else 'no'


def _between(value: float | None, interval: Sequence[float | None]) -> str:
  return f'{pages.number(value)} {_interval(interval)}'


def _interval(interval: Sequence[float | None]) -> str:
  low, high = map(pages.number, interval)
  return f'[{low}, {high}]'


def _printable(text: str) -> str:
  """Text of the data must not steer a terminal or break a line."""
  return ''.join(c if c.isprintable() else '?' for c in text)
