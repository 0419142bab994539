"""Tests of the summary of curves against the curves themselves."""

import json
import math

import numpy as np
import pytest

from scalerl_jax import curves
from scalerl_jax.reporting import curve_summary
from tests.curves import paper_data


def _run(name='loss_cispo'):
  return curve_summary.Run(name, *paper_data.points(name))


def _summarize(*runs, **options):
  options = curve_summary.Options(**options)
  return curve_summary.summarize(runs or [_run()], options)


def _tables(document):
  return {table.title: table for table in curve_summary.tables(document)}


def test_numbers_are_those_of_the_curves():
  x, y = paper_data.points('loss_cispo')
  document = _summarize(budget=20000.0, target=0.58, price=2.0)
  run = document['runs']['loss_cispo']
  fit = curves.fit(x, y)
  assert run.items() >= curves.as_dict(fit).items()
  assert run['r0_rule'] == 'free'
  verdict = curves.verdict(fit, target=0.58, budget=20000.0, price=2.0)
  assert run['verdict'].items() >= verdict._asdict().items()
  found = [m._asdict() for m in curves.milestones(fit)]
  assert run['milestones'] == found
  at = run['at_horizon']
  for of, prefix in (('curve', ''), ('observation', 'observation_')):
    band = curves.forecast(fit, [20000.0], of=of)
    assert at['mean'] == band.mean[0]
    assert (at[f'{prefix}low'], at[f'{prefix}high']) == (band.low, band.high)
  assert run['forecast']['compute'][-1] == pytest.approx(20000.0)
  assert run['power_law'] == curves.fit_power_law(x, y)._asdict()
  assert run['held_out'] is document['held_out'] is None


def test_windows_are_those_of_the_curves():
  x, y = paper_data.points('loss_cispo')
  run = _summarize(min_compute=2000.0)['runs']['loss_cispo']
  assert run['params'] == curves.fit(x, y, min_compute=2000.0).params._asdict()
  assert run['points']['role'].count('early') == np.sum(x < 2000)
  for window in run['window_sensitivity']:
    fit = curves.fit(x, y, min_compute=window['min_compute'])
    assert window['a'] == fit.params.a
    assert window['num_points'] == fit.num_points
  sizes = [w['num_points'] for w in run['window_sensitivity']]
  assert len(set(sizes)) == len(sizes) >= 4


def test_the_early_regime_is_found():
  x, y = paper_data.points('batch_2048')
  document = _summarize(_run('batch_2048'), min_compute='auto')
  start = curves.window_start(x, y)
  assert start > 0
  assert document['runs']['batch_2048']['min_compute'] == start
  text = curve_summary.to_text(document)
  assert f'{np.sum(x < start)} evaluations before compute' in text


def test_held_out_evaluations_score_the_fit():
  names = ('recipe_scalerl', 'loss_cispo')
  document = _summarize(*map(_run, names), fit_until=5000.0)
  errors, hits = [], []
  for name in names:
    x, y = paper_data.points(name)
    late = x > 5000
    band = curves.forecast(
      curves.fit(x[~late], y[~late]), x[late], of='observation'
    )
    error = band.mean - y[late]
    hit = (y[late] >= band.low) & (y[late] <= band.high)
    assert document['runs'][name]['held_out'] == pytest.approx(
      {
        'num_points': late.sum(),
        'rmse': math.sqrt(np.mean(error**2)),
        'mean_error': error.mean(),
        'coverage': hit.mean(),
      }
    )
    errors, hits = [*errors, *error], [*hits, *hit]
  assert document['held_out']['num_points'] == len(errors)
  assert document['held_out']['coverage'] == pytest.approx(np.mean(hits))
  table = _tables(document)['Held out: compute above 5000']
  assert [row[0] for row in table.rows] == [*names, 'all runs']


@pytest.mark.parametrize(
  ('r0', 'rule', 'value'),
  [
    (None, 'compute_0', 0.2),
    (0.1, 'given', 0.1),
    (0, 'given', 0.0),
    (0.2, 'given', 0.2),
    ('first', 'first', 0.2),
    ('free', 'free', None),
  ],
)
def test_r0_is_taken_as_it_is_said(r0, rule, value):
  x = np.array([0.0, *np.geomspace(1, 50, 10)])
  y = np.array([0.2, *paper_data.law(x[1:], 0.2, 0.6, 1.5, 8.0)])
  for method in ('posterior', 'least_squares'):
    document = _summarize(curve_summary.Run('run', x, y), r0=r0, method=method)
    run = document['runs']['run']
    assert run['r0_rule'] == rule
    assert (
      run['params']
      == curves.fit(x, y, r0=value, method=method).params._asdict()
    )
    assert f'  R0 ({rule}): ' in curve_summary.to_text(document)


def test_without_a_target_it_is_a_little_more_than_what_is_reached():
  run = _run()
  broken = run._replace(pass_rate=np.append(run.pass_rate[:-1], 0.0))
  for given in (run, broken):
    document = _summarize(given, budget=20000.0)
    found = document['runs']['loss_cispo']
    reached = paper_data.law(run.compute[-1], **found['params'])
    target = found['verdict']['target']
    assert target == pytest.approx(reached + 0.02)
    assert target == pytest.approx(run.pass_rate[-1] + 0.02, abs=0.01)
  assert 'target: the curve at its last' in curve_summary.to_text(document)


def test_an_evaluation_far_off_the_curve_is_named():
  run = _run()
  assert 'far off' not in curve_summary.to_text(_summarize(run))
  rate = run.pass_rate.copy()
  rate[7] = 0.01
  document = _summarize(run._replace(pass_rate=rate))
  (found,) = document['runs'].values()
  assert found['far_off'] == {'compute': [run.compute[7]], 'pass_rate': [0.01]}
  assert 'far off the curve: 1 (first: 0.01' in curve_summary.to_text(document)


def test_many_runs_stay_readable():
  runs = [
    curve_summary.Run(f'{i}-' + 'x' * 500, *paper_data.points('loss_cispo'))
    for i in range(9)
  ]
  runs = [
    r._replace(
      compute=r.compute * (1 + i), pass_rate=r.pass_rate * (1 - i / 99)
    )
    for i, r in enumerate(runs)
  ]
  text = curve_summary.to_text(_summarize(*runs))
  assert text.count(' overtakes ') <= 20
  table = text[: text.index('Comparison')]
  assert max(map(len, table.splitlines())) < 300


def test_a_budget_that_is_spent_is_named():
  text = curve_summary.to_text(_summarize(budget=100.0))
  assert 'was spent, so that the budget leaves nothing' in text


def test_runs_are_compared():
  runs = [_run(n) for n in ('recipe_grpo', 'batch_2048', 'loss_cispo')]
  document = _summarize(*runs, r0='first')
  fits = {r.name: curves.fit(r[1], r[2], r0=r.pass_rate[0]) for r in runs}
  found = curves.compare(fits)
  comparison = document['comparison']
  assert comparison['ranking'] == list(found.ranking)
  assert comparison['reasons'] == list(found.reasons)
  assert {
    (c['better'], c['worse']): c['compute'] for c in comparison['crossings']
  } == found.crossings
  slopes = {k: v.b for k, v in curves.slopes(fits).items()}
  assert {k: v['b'] for k, v in comparison['slopes'].items()} == slopes
  assert _tables(document)['Comparison'].rows[0][0] == found.ranking[0]


@pytest.mark.parametrize(
  ('x', 'y'),
  [
    ([5.0], [0.3]),
    ([0.0], [0.3]),
    ([5.0, 9.0], [0.3, 0.4]),
    (np.arange(1.0, 12), np.full(11, 0.4)),
    (np.arange(1.0, 12), np.linspace(0.6, 0.2, 11)),
    (np.full(6, 3.0), np.linspace(0.2, 0.6, 6)),
    (np.arange(12.0), np.zeros(12)),
    (np.arange(12.0), np.ones(12)),
  ],
)
def test_what_cannot_be_fitted_is_said(x, y):
  run = curve_summary.Run('bad', np.array(x), np.array(y))
  document = _summarize(run, _run(), budget=100.0)
  json.dumps(document, allow_nan=False)
  text = curve_summary.to_text(document)
  assert 'nan' not in text
  if 'bad' in document['failed']:
    assert x == [0.0]
    assert 'compute is 0 in every point' in text
  else:
    assert not document['runs']['bad']['identifiable']
    assert document['runs']['bad']['verdict']['decision'] == 'not enough data'


def test_few_points_have_no_power_law_and_say_why():
  run = _summarize(
    curve_summary.Run('two', np.array([1.0, 2.0]), np.array([0.1, 0.2]))
  )
  assert '4 are needed' in run['runs']['two']['power_law']['error']
  assert '4 are needed' in curve_summary.to_text(run)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'budget': -1.0}, r'budget=-1\.0 must be positive'),
    ({'budget': math.nan}, 'budget=nan must be positive'),
    ({'fit_until': 0.0}, r'fit_until=0\.0 must be positive'),
    ({'price': -1.0, 'budget': 1.0}, r'price=-1\.0 must be finite'),
    ({'margin': -0.1}, r'margin=-0\.1 must be finite'),
    ({'min_compute': -1.0}, r'min_compute=-1\.0 must be finite'),
    ({'min_compute': 1e9}, 'leaves nothing to fit'),
    ({'r0': 2.0}, r'r0=2\.0 must be in'),
    ({'target': 1.5, 'budget': 1.0}, r'target=1\.5 must be in'),
    ({'target': 0.5}, 'target says nothing without a budget: give --budget'),
    ({'price': 0.5}, 'price says nothing without a budget'),
    ({'fit_until': 10.0}, 'leaves nothing to fit: the first compute is'),
    ({'fit_until': 1e6}, 'leaves nothing to score: the last compute is'),
    ({'method': 'paper_grid'}, 'paper_grid needs R0'),
    ({'method': 'guess'}, "method='guess' must be one of"),
  ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    _summarize(**options)


def test_all_errors_are_told_where_no_run_is_fitted():
  with pytest.raises(ValueError, match='none of 2 runs was fitted: loss_cispo'):
    _summarize(_run(), _run('recipe_grpo'), fit_until=1.0)


@pytest.mark.parametrize('method', ['least_squares', 'paper_grid'])
def test_other_methods(method):
  document = _summarize(method=method, r0='first', fit_until=5000.0)
  json.dumps(document, allow_nan=False)
  assert document['runs']['loss_cispo']['method'] == method
  assert f'method {method}' in curve_summary.to_text(document)


def test_order_of_the_evaluations_does_not_matter():
  run = _run()
  back = curve_summary.Run(run.name, run.compute[::-1], run.pass_rate[::-1])
  assert _summarize(back) == _summarize(run)


def test_text_of_the_data_does_not_steer_the_terminal():
  run = _run()._replace(name='a\x1b[31m\nb\ud800')
  document = curve_summary.summarize(
    [run], curve_summary.Options(), notes=['first\nsecond']
  )
  text = curve_summary.to_text(document)
  assert text.startswith('note: first?second\n')
  assert 'a?[31m?b?  ' in text
  text.encode('utf-8')
