"""Tests of the comparison of runs."""

import numpy as np
import pytest

from scalerl_jax import curves
from tests.curves import paper_data

_X = np.geomspace(100.0, 1e5, 40)


def _fit(a, b, c_mid, r0=0.2):
  return curves.fit(_X, paper_data.law(_X, r0, a, b, c_mid), r0=r0)


def test_higher_ceiling_wins_though_it_is_slower():
  fits = {'fast': _fit(0.6, 3.0, 1e3), 'slow': _fit(0.7, 1.0, 5e3)}
  got = curves.compare(fits)
  assert got.ranking == ('slow', 'fast')
  assert got.reasons == ('A',)
  crossing = got.crossings['slow', 'fast']
  before, after = (
    paper_data.law(c, *fits['slow'].params)
    - paper_data.law(c, *fits['fast'].params)
    for c in (0.99 * crossing, 1.01 * crossing)
  )
  assert before < 0 < after


def test_steeper_curve_wins_within_the_margin():
  fits = {'flat': _fit(0.61, 1.2, 3e3), 'steep': _fit(0.6, 2.0, 3e3)}
  got = curves.compare(fits)
  assert got.ranking == ('steep', 'flat')
  assert got.reasons == ('B',)


def test_margin_is_inclusive_and_can_be_zero():
  fits = {'flat': _fit(0.62, 1.2, 3e3), 'steep': _fit(0.6, 2.0, 3e3)}
  assert curves.compare(fits).ranking == ('steep', 'flat')
  assert curves.compare(fits, margin=0.0).ranking == ('flat', 'steep')


def test_a_curve_that_is_always_ahead_never_overtakes():
  fits = {'high': _fit(0.7, 1.5, 1e3), 'low': _fit(0.5, 1.5, 1e3)}
  assert curves.compare(fits).crossings['high', 'low'] is None


def test_chains_of_close_ceilings_are_grouped_from_the_top():
  fits = {
    'x': _fit(0.6, 1.0, 3e3),
    'y': _fit(0.585, 3.0, 3e3),
    'z': _fit(0.57, 5.0, 3e3),
  }
  got = curves.compare(fits)
  assert got.ranking == ('y', 'x', 'z')
  assert got.reasons == ('B', 'A')


def test_paper_recipes_come_out_in_its_order():
  fits = {
    series: curves.fit(
      *paper_data.points(series),
      r0=paper_data.params()[series]['r0'],
      min_compute=1500.0,
    )
    for series in ('recipe_grpo', 'recipe_minimax', 'recipe_scalerl')
  }
  got = curves.compare(fits)
  assert got.ranking == ('recipe_scalerl', 'recipe_minimax', 'recipe_grpo')
  assert got.reasons == ('B', 'A')


def test_runs_that_are_not_identifiable_are_named():
  short = curves.fit([1.0, 2.0, 3.0], [0.1, 0.2, 0.3])
  got = curves.compare({'long': _fit(0.7, 1.5, 1e3), 'short': short})
  assert any('short' in w for w in got.warnings)


def test_runs_that_do_not_rise_come_last_within_the_margin():
  plain = {'method': 'least_squares'}
  flat = curves.fit(_X, np.full(len(_X), 0.6), r0=None, **plain)
  falling = curves.fit(_X, np.linspace(0.62, 0.58, len(_X)), r0=0.62, **plain)
  rising = _fit(0.6, 1.5, 1e3)
  got = curves.compare({'flat': flat, 'falling': falling, 'rising': rising})
  assert got.ranking.index('rising') < got.ranking.index('flat')
  assert len(got.warnings) == 2


@pytest.mark.parametrize('margin', [-0.1, float('nan')])
def test_malformed_margin_is_refused(margin):
  fits = {'p': _fit(0.7, 1.5, 1e3), 'q': _fit(0.5, 1.5, 1e3)}
  with pytest.raises(ValueError, match='margin'):
    curves.compare(fits, margin=margin)


def test_a_single_run_is_refused():
  with pytest.raises(ValueError, match='at least 2'):
    curves.compare({'p': _fit(0.7, 1.5, 1e3)})


def test_slopes_are_straight_lines_of_slope_b():
  fits = {'p': _fit(0.6, 1.2, 3e3), 'q': _fit(0.6, 2.0, 2e3)}
  got = curves.slopes(fits)
  for name, b, c_mid in (('p', 1.2, 3e3), ('q', 2.0, 2e3)):
    line = got[name]
    assert line.b == pytest.approx(b, rel=1e-5)
    assert line.c_mid == pytest.approx(c_mid, rel=1e-5)
    slopes = np.diff(line.log_f) / np.diff(line.log_compute)
    np.testing.assert_allclose(slopes, b, rtol=1e-2)
    assert line.num_dropped == 0


def test_slopes_count_what_has_no_logarithm():
  got = curves.slopes({'p': _fit(0.6, 1.2, 3e3)}, a=0.58)['p']
  y = paper_data.law(_X, 0.2, 0.6, 1.2, 3e3)
  assert got.num_dropped == np.sum(y >= 0.58) > 0
  assert len(got.log_f) == len(_X) - got.num_dropped


def test_slopes_need_a_ceiling_above_every_start():
  with pytest.raises(ValueError, match=r'a=0\.1'):
    curves.slopes({'p': _fit(0.6, 1.2, 3e3)}, a=0.1)
  with pytest.raises(ValueError, match='no fit'):
    curves.slopes({})
