"""One page about a run, which can be mailed: no script, no link outside."""

from collections.abc import Mapping, Sequence
import html
import json
import pathlib
from typing import Any

from scalerl_jax.reporting import pages
from scalerl_jax.reporting import plots
from scalerl_jax.reporting import run_files
from scalerl_jax.reporting import writers

_PANELS: tuple[tuple[str, Mapping[str, str], bool], ...] = (
  (
    'Training pass rate and reward',
    {'pass_rate_train': 'pass rate', 'reward_mean': 'mean reward'},
    False,
  ),
  (
    'Truncated and interrupted rollouts',
    {
      'truncated_fraction': 'truncated',
      'interrupted_fraction': 'interrupted',
    },
    False,
  ),
  ('Policy entropy', {'policy_entropy': 'entropy [nat]'}, False),
  (
    'Lag of trained tokens',
    {'lag_mean': 'mean lag [updates]', 'lag_max': 'largest lag [updates]'},
    False,
  ),
  (
    'Largest importance ratio',
    {'ratio_max': 'largest ratio', 'ratio_mean': 'mean ratio'},
    True,
  ),
  ('Capped ratios', {'ratio_capped_fraction': 'fraction of tokens'}, False),
  (
    'Prompts without a signal',
    {'zero_variance_fraction': 'zero-variance fraction'},
    False,
  ),
  ('Throughput', {'tokens_per_s': 'tokens per second'}, False),
)
_EVAL_COLUMNS = (
  'step',
  'policy_version',
  'device_hours',
  'flops',
  'tokens',
  'pass_rate',
  'pass_rate_stderr',
  'truncated_fraction',
  'interrupted_fraction',
)
_NAMES = {'r0': 'R₀', 'a': 'A', 'b': 'B', 'c_mid': 'C_mid'}


def write_report(
  workdir: pathlib.Path, *, num_samples: int = 8
) -> pathlib.Path:
  """Writes `report.html` from the files of a run, and from nothing else.

  Args:
    workdir: The run's directory; files that are missing leave their section
      out.
    num_samples: Rollouts shown, the latest ones.

  Returns:
    The file.

  Raises:
    NotADirectoryError: There is no such directory.
    ValueError: A file of the run is damaged.
  """
  run = run_files.read(workdir)
  with plots.style():
    sections = [
      _curve_section(run),
      _evals_section(run.evals),
      _metrics_section(run),
      _samples_section(run.samples, num_samples),
      _config_section(run.config),
    ]
  path = workdir / 'report.html'
  writers.write_text(path, pages.page(workdir.resolve().name, sections))
  return path


def _curve_section(run: run_files.RunFiles) -> str:
  if not run.curve:
    return '<h2>Curve</h2><p>No evaluation has finished yet.</p>'
  drawn = plots.to_svg(
    plots.curve_figure(run), title='Pass rate over compute', prefix='curve'
  )
  return f'<h2>Curve</h2>{_verdict(run.fit)}{drawn}{_fit_table(run.fit)}'


def _verdict(fit: Mapping[str, Any]) -> str:
  parts = [pages.warnings(fit.get('warnings') or ())]
  verdict = fit.get('verdict')
  if isinstance(verdict, Mapping):
    rows = ', '.join(f'{k}: {pages.number(v)}' for k, v in verdict.items())
    parts.append(f'<p><b>Verdict.</b> {html.escape(rows)}</p>')
  elif verdict:
    parts.append(f'<p><b>Verdict.</b> {html.escape(str(verdict))}</p>')
  return ''.join(parts)


def _fit_table(fit: Mapping[str, Any]) -> str:
  params = fit.get('params') or {}
  if not params:
    return '<p>No fit yet.</p>'
  intervals = fit.get('intervals') or {}
  rows = []
  for key, value in params.items():
    low, high = intervals.get(key) or (None, None)
    cells = (
      _NAMES.get(key, key),
      pages.number(value),
      pages.number(low),
      pages.number(high),
    )
    rows.append(cells)
  percent = f'{100 * float(fit.get("level") or 0.9):.0f} %'
  return pages.table(('', 'fit', f'{percent} low', f'{percent} high'), rows)


def _evals_section(evals: Sequence[Mapping[str, Any]]) -> str:
  if not evals:
    return ''
  columns = [c for c in _EVAL_COLUMNS if any(c in row for row in evals)]
  rows = [[pages.number(row.get(c)) for c in columns] for row in evals]
  fig = plots.series_figure(
    evals,
    {
      'truncated_fraction': 'truncated',
      'interrupted_fraction': 'interrupted',
    },
  )
  drawn = _figure('Held-out samples', fig, 'evals')
  return f'<h2>Evaluations</h2>{pages.table(columns, rows)}{drawn}'


def _metrics_section(run: run_files.RunFiles) -> str:
  drawn = [
    _figure(title, plots.series_figure(run.metrics, names, log=log), f'm{i}')
    for i, (title, names, log) in enumerate(_PANELS)
  ]
  lag = plots.lag_figure(run.metrics)
  drawn.append(_figure('Distribution of the lag', lag, 'lag'))
  drawn = [d for d in drawn if d]
  if not drawn:
    return ''
  return f'<h2>Training</h2><div class="grid">{"".join(drawn)}</div>'


def _figure(title: str, fig: Any, prefix: str) -> str:
  if fig is None:
    return ''
  svg = plots.to_svg(fig, title=title, prefix=prefix)
  return f'<figure><figcaption>{title}</figcaption>{svg}</figure>'


def _samples_section(samples: Sequence[Mapping[str, Any]], limit: int) -> str:
  latest = list(reversed(samples))[:limit]
  if not latest:
    return ''
  return '<h2>Samples</h2>' + ''.join(_sample(s) for s in latest)


def _sample(sample: Mapping[str, Any]) -> str:
  keys = ('step', 'problem_id', 'reward', 'finish_reason')
  head = ', '.join(f'{k}: {pages.number(sample.get(k))}' for k in keys)
  texts = ''.join(
    f'<pre>{html.escape(str(sample.get(k) or ""))}</pre>'
    for k in ('prompt', 'response')
  )
  return f'<details><summary>{html.escape(head)}</summary>{texts}</details>'


def _config_section(config: Mapping[str, Any]) -> str:
  if not config:
    return ''
  text = html.escape(json.dumps(config, indent=2, ensure_ascii=False))
  return (
    '<h2>Configuration</h2><details><summary>config.json</summary>'
    f'<pre>{text}</pre></details>'
  )
