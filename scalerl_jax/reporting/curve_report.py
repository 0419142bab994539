"""Files about the curves of some runs, drawn from a `curve_summary` alone."""

from collections.abc import Mapping, Sequence
import html
import pathlib
from typing import Any

import matplotlib as mpl
from matplotlib import figure as figure_lib
import numpy as np

from scalerl_jax.reporting import curve_summary
from scalerl_jax.reporting import pages
from scalerl_jax.reporting import plots
from scalerl_jax.reporting import writers

_MARKERS = {'early': 'x', 'fitted': 'o', 'held out': 'D'}
_MAX_NAME = 40  # Characters of a legend.
_MAX_LEGEND = 30  # Runs; the table names all.
_CYCLE = 10  # Colours that are told apart.
_MAX_VECTORS = 2000  # Points; more are drawn as pixels, also in the page.


def write(out: pathlib.Path, document: Mapping[str, Any]) -> None:
  """Writes `fit.json`, `curve.png`, `curve_linear.png` and `report.html`.

  Args:
    out: The directory.
    document: Of `curve_summary.summarize`.

  Raises:
    OSError: A file cannot be written.
  """
  with plots.style():
    figures = {
      name: _curves_figure(document, log=log)
      for name, log in (('curve.png', True), ('curve_linear.png', False))
    }
    page = pages.page('Compute-performance curves', _sections(document))
    for name, figure in figures.items():
      plots.write_png(figure, out / name)
  writers.write_text(out / 'report.html', page)
  writers.write_json(out / 'fit.json', document)


def _sections(document: Mapping[str, Any]) -> list[str]:
  runs = document['runs']
  sections = [
    pages.warnings(document['notes']),
    f'<p>{html.escape(curve_summary.headline(document))}</p>',
  ]
  if len(runs) > 1:
    sections += [
      _svg(_curves_figure(document, log=log), title, title.split()[-1])
      for title, log in (('All runs, log', True), ('All runs, linear', False))
    ]
  for table in curve_summary.tables(document):
    remarks = ''.join(f'<p>{html.escape(line)}</p>' for line in table.remarks)
    sections.append(
      f'<h2>{html.escape(table.title)}</h2>'
      f'{pages.table(table.header, table.rows)}{remarks}'
    )
  for i, (name, run) in enumerate(runs.items()):
    drawn = _svg(_run_figure(run, document), name, f'run{i}')
    sections.append(
      f'<h2>{html.escape(name)}</h2>{pages.warnings(run["warnings"])}{drawn}'
    )
  return [*sections, _slopes_section(document['comparison'])]


def _slopes_section(comparison: Mapping[str, Any] | None) -> str:
  if not comparison:
    return ''
  title = '<h2>Slopes around the mean ceiling</h2>'
  if not comparison['slopes']:
    return f'{title}<p>{html.escape(str(comparison["slopes_error"]))}</p>'
  return title + _svg(_slopes_figure(comparison['slopes']), 'Slopes', 'slopes')


def _svg(fig: figure_lib.Figure, title: str, prefix: str) -> str:
  return plots.to_svg(fig, title=html.escape(title), prefix=prefix)


def _curves_figure(
  document: Mapping[str, Any], *, log: bool
) -> figure_lib.Figure:
  fig = figure_lib.Figure(figsize=(8.0, 5.0), layout='constrained')
  axes = fig.add_subplot()
  runs = document['runs']
  for color, (name, run) in zip(_colors(len(runs)), runs.items(), strict=True):
    alone = len(runs) == 1
    _draw(axes, run, color, label=_label(name), observations=alone)
  _label_axes(axes, runs.values(), document, log=log)
  if len(runs) > 1:
    text = 'filled: fitted; hollow: held out; dashed: not identifiable'
    axes.set_title(text, fontsize=8)
  _legend(fig, len(runs))
  return fig


def _run_figure(
  run: Mapping[str, Any], document: Mapping[str, Any]
) -> figure_lib.Figure:
  fig = figure_lib.Figure(figsize=(10.0, 6.4), layout='constrained')
  grid = fig.add_gridspec(2, 2, height_ratios=(2, 1))
  for column, log in enumerate((True, False)):
    axes = fig.add_subplot(grid[0, column])
    _draw(axes, run, 'C0', label='fit', observations=True)
    _label_axes(axes, [run], document, log=log)
  handles, labels = axes.get_legend_handles_labels()
  fig.legend(handles, labels, loc='outside lower center', ncols=6, fontsize=8)
  axes = fig.add_subplot(grid[1, :])
  points = _points(run)
  for role, marker in _MARKERS.items():
    is_role = points['role'] == role
    residual = (points['pass_rate'] - points['predicted'])[is_role]
    face = 'C0' if role == 'fitted' else 'none'
    compute = points['compute'][is_role]
    many = len(compute) > _MAX_VECTORS
    axes.plot(
      compute, residual, marker, color='C0', mfc=face, ms=4, rasterized=many
    )
  axes.axhline(0, color='0.4', linewidth=1)
  _label_axes(axes, [run], document, log=True)
  axes.set_ylabel('evaluation - fit')
  return fig


def _draw(
  axes: Any,
  run: Mapping[str, Any],
  color: Any,
  *,
  label: str,
  observations: bool,
) -> None:
  points, band = _points(run), run['forecast']
  for role, marker in _MARKERS.items():
    is_role = points['role'] == role
    if is_role.any():
      axes.errorbar(
        points['compute'][is_role],
        points['pass_rate'][is_role],
        yerr=points['stderr'][is_role],
        fmt=marker,
        color=color,
        markerfacecolor=color if role == 'fitted' else 'none',
        markersize=4,
        elinewidth=0.8,
        label=role if observations else None,
        rasterized=is_role.sum() > _MAX_VECTORS,
      )
  style = '-' if run['identifiable'] else '--'
  axes.plot(band['compute'], band['mean'], style, color=color, label=label)
  shades = [('', 0.25, '90 % of the curve')]
  if observations:
    shades.append(('observation_', 0.1, '90 % of an evaluation'))
  for prefix, alpha, name in shades:
    low, high = band[f'{prefix}low'], band[f'{prefix}high']
    if min(high) - max(low) == 1:
      continue  # Nothing is known: the whole range would hide the others.
    axes.fill_between(
      band['compute'],
      low,
      high,
      color=color,
      alpha=alpha,
      linewidth=0,
      label=name if observations else None,
    )


def _label_axes(
  axes: Any,
  runs: Any,
  document: Mapping[str, Any],
  *,
  log: bool,
) -> None:
  if log:
    compute = np.concatenate([_points(run)['compute'] for run in runs])
    if (compute > 0).all():
      axes.set_xscale('log')
    else:
      # Linear below the first point, so that compute 0 has a place.
      axes.set_xscale('symlog', linthresh=compute[compute > 0].min())
    axes.tick_params(axis='x', which='minor', labelsize=6)
  axes.set_xlabel(_label(document['x']))
  axes.set_ylabel(_label(document['y']))


def _slopes_figure(slopes: Mapping[str, Any]) -> figure_lib.Figure:
  fig = figure_lib.Figure(figsize=(8.0, 5.0), layout='constrained')
  axes = fig.add_subplot()
  colors = _colors(len(slopes))
  for color, (name, slope) in zip(colors, slopes.items(), strict=True):
    x = np.array(slope['log_compute'])
    label = f'{_label(name)}: B = {pages.number(slope["b"])}'
    axes.plot(x, slope['b'] * x, color=color, label=label)
    axes.plot(x, slope['log_f'], 'o', color=color, markersize=3)
  axes.set_xlabel('log C')
  axes.set_ylabel('log F')
  _legend(fig, len(slopes))
  return fig


def _legend(fig: figure_lib.Figure, num: int) -> None:
  if num <= _MAX_LEGEND:  # More would leave no room for the curves.
    fig.legend(loc='outside lower center', ncols=3, fontsize=7)


def _points(run: Mapping[str, Any]) -> dict[str, np.ndarray]:
  points = dict(run['points'])
  points['stderr'] = points['stderr'] or [None] * len(points['compute'])
  found = {k: np.array(v, float) for k, v in points.items() if k != 'role'}
  return found | {'role': np.array(points['role'])}


def _colors(num: int) -> Sequence[Any]:
  if num <= _CYCLE:
    return [f'C{i}' for i in range(num)]
  return list(mpl.colormaps['turbo'](np.linspace(0, 1, num)))


def _label(name: str) -> str:
  """A name of the data as it is: no formula, and in every legend."""
  text = pages.shortened(name, _MAX_NAME)
  # Fonts lack most of what is not ASCII.
  text = ''.join(c if c.isascii() and c.isprintable() else '?' for c in text)
  return ' ' * text.startswith('_') + text.replace('$', r'\$')
