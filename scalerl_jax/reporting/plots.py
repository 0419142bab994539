"""Figures of a run: the curve with its forecast, and metrics over steps.

Figures are made without pyplot, which keeps state and picks a display.
"""

from collections.abc import Mapping, Sequence
import io
import pathlib
import re
from typing import Any

import matplotlib as mpl
from matplotlib import figure as figure_lib

from scalerl_jax.reporting import run_files
from scalerl_jax.reporting import writers

_STYLE: dict[Any, Any] = {
  'svg.hashsalt': 'scalerl_jax',  # The same data give the same bytes.
  'svg.fonttype': 'path',
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.alpha': 0.3,
  'font.size': 9,
}
_AXIS_LABELS = {
  'device_hours': 'device-hours of generation and training',
  'flops': 'FLOPs of generation and training',
  'tokens': 'tokens sampled for training',
}


def write_curve_png(workdir: pathlib.Path) -> pathlib.Path | None:
  """Writes `curve.png` from the files of a run.

  Args:
    workdir: The run's directory.

  Returns:
    The file, or None where there is no evaluation to plot yet.
  """
  run = run_files.read(workdir)
  if not run.curve:
    return None
  path = workdir / 'curve.png'
  with style():
    write_png(curve_figure(run), path)
  return path


def write_png(fig: figure_lib.Figure, path: pathlib.Path) -> None:
  """Writes a figure whole or not at all.

  Args:
    fig: The figure.
    path: The file; replaced if it exists.
  """
  with writers.whole(path) as part, style():
    fig.savefig(part, format='png', dpi=150, metadata={'Software': None})


def curve_figure(run: run_files.RunFiles) -> figure_lib.Figure:
  """Draws pass rate over compute, with the fit and its band.

  Args:
    run: The files of a run, with at least one point of the curve.

  Returns:
    The figure.
  """
  fig = figure_lib.Figure(figsize=(7.0, 4.2), layout='constrained')
  axes = fig.add_subplot()
  compute = [p['compute'] for p in run.curve]
  axes.errorbar(
    compute,
    [p['pass_rate'] for p in run.curve],
    yerr=[p['stderr'] or 0.0 for p in run.curve],
    fmt='o',
    markersize=4,
    label='evaluations (± standard error)',
  )
  _draw_forecast(axes, run.fit)
  positive = [c for c in compute if c > 0]
  if positive and max(positive) > 4 * min(positive):
    # Linear below the first point, so that compute 0 has a place.
    axes.set_xscale('symlog', linthresh=min(positive))
    axes.set_xlim(left=0)
  axis = str(run.fit.get('compute_axis') or 'compute')
  axes.set_xlabel(_AXIS_LABELS.get(axis, axis))
  axes.set_ylabel('pass rate on held-out problems')
  axes.legend(loc='lower right')
  return fig


def _draw_forecast(axes: Any, fit: Mapping[str, Any]) -> None:
  band = fit.get('forecast') or {}
  rows = [
    row
    for row in zip(
      *(band.get(k) or [] for k in ('compute', 'mean', 'low', 'high')),
      strict=False,
    )
    if None not in row
  ]
  if not rows:
    return
  compute, mean, low, high = zip(*rows, strict=True)
  sure = bool(fit.get('identifiable'))
  label = 'fit and forecast' if sure else 'fit (not identifiable)'
  axes.plot(compute, mean, '-' if sure else '--', color='C1', label=label)
  percent = 100 * float(fit.get('level') or 0.9)
  axes.fill_between(
    compute,
    low,
    high,
    color='C1',
    alpha=0.15,
    linewidth=0,
    label=f'{percent:.0f} % interval',
  )


def series_figure(
  rows: Sequence[Mapping[str, Any]],
  names: Mapping[str, str],
  *,
  x: str = 'step',
  log: bool = False,
) -> figure_lib.Figure | None:
  """Draws columns over steps.

  Args:
    rows: Rows of a JSONL file; a missing or null value is a gap.
    names: Column → label; columns that no row has are left out.
    x: Column of the horizontal axis.
    log: Logarithmic vertical axis.

  Returns:
    The figure, or None where no row has any of the columns.
  """
  lines = {
    label: [
      (row[x], row[name])
      for row in rows
      if _is_number(row.get(x)) and _is_number(row.get(name))
    ]
    for name, label in names.items()
  }
  lines = {label: points for label, points in lines.items() if points}
  if not lines:
    return None
  fig = figure_lib.Figure(figsize=(4.6, 2.8), layout='constrained')
  axes = fig.add_subplot()
  for label, points in lines.items():
    marker = 'o' if len(points) < 40 else ''
    axes.plot(*zip(*points, strict=True), marker=marker, ms=3, label=label)
  # Matplotlib warns where a logarithmic axis would show nothing.
  if log and any(y > 0 for points in lines.values() for _, y in points):
    axes.set_yscale('log', nonpositive='mask')
  axes.set_xlabel(x)
  axes.legend(fontsize=8)
  return fig


def lag_figure(rows: Sequence[Mapping[str, Any]]) -> figure_lib.Figure | None:
  """Draws the distribution of the lag of trained tokens, summed over steps.

  Args:
    rows: Rows of `metrics.jsonl`.

  Returns:
    The figure, or None where no row has `lag_histogram`.
  """
  total: list[float] = []
  for row in rows:
    bins = row.get('lag_histogram')
    if not isinstance(bins, list):
      continue
    total += [0.0] * (len(bins) - len(total))
    for i, count in enumerate(bins):
      total[i] += count or 0.0
  if not sum(total):
    return None
  fig = figure_lib.Figure(figsize=(4.6, 2.8), layout='constrained')
  axes = fig.add_subplot()
  axes.bar(range(len(total)), [t / sum(total) for t in total])
  axes.set_xlabel('lag in updates')
  axes.set_ylabel('fraction of tokens')
  return fig


def to_svg(fig: figure_lib.Figure, *, title: str, prefix: str) -> str:
  """Renders a figure for inclusion in HTML.

  Args:
    fig: The figure.
    title: Read out to those who cannot see it; already escaped.
    prefix: Makes the ids of this figure unique in the page.

  Returns:
    An `<svg>` element, without links to anything outside the page.
  """
  out = io.StringIO()
  with mpl.rc_context(_STYLE):
    fig.savefig(out, format='svg', metadata=_NO_METADATA)
  svg = out.getvalue()
  svg = svg[svg.index('<svg') :]
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  # HTML knows the SVG namespaces; the declarations would be dead URLs.
  svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', '', svg)
  svg = svg.replace('xlink:href', 'href')
  svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
  svg = svg.replace('href="#', f'href="#{prefix}-')
  svg = svg.replace('url(#', f'url(#{prefix}-')
  return svg.replace('<svg', f'<svg role="img" aria-label="{title}"', 1)


_NO_METADATA = dict.fromkeys(('Date', 'Creator', 'Format', 'Type'))


def style() -> Any:
  """The style of all figures, as a context: axes take it when created."""
  return mpl.rc_context(_STYLE)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
