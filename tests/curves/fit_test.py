"""Tests of the law and its fit."""

import json

import jax
import numpy as np
import pytest
from scipy import optimize

from scalerl_jax import curves
from tests.curves import paper_data

_SERIES = tuple(paper_data.params())
_X = np.geomspace(100.0, 1e5, 40)
_TRUTHS = (
  (0.2, 0.8, 1.2, 3e3),
  (0.4, 0.61, 1.97, 2555.0),
  (0.05, 0.95, 0.8, 2e4),
)


def test_law_is_r0_at_zero_and_half_way_at_c_mid():
  params = curves.SigmoidParams(0.2, 0.8, 1.5, 50.0)
  got = curves.sigmoid(np.array([0.0, 50.0, 1e12]), params)
  np.testing.assert_allclose(got, [0.2, 0.5, 0.8], rtol=1e-6)


def test_law_has_finite_gradients_at_zero():
  def value(b):
    return curves.sigmoid(0.0, curves.SigmoidParams(0.2, 0.8, b, 50.0))

  assert float(jax.grad(value)(1.5)) == 0.0


@pytest.mark.parametrize('truth', _TRUTHS)
@pytest.mark.parametrize('free_r0', [False, True])
def test_exact_points_give_back_the_parameters(truth, free_r0):
  y = paper_data.law(_X, *truth)
  got = curves.fit(_X, y, r0=None if free_r0 else truth[0])
  np.testing.assert_allclose(got.params, truth, rtol=1e-5)
  assert got.residual_std < 1e-8


@pytest.mark.parametrize('series', _SERIES)
def test_least_squares_agrees_with_scipy(series):
  x, y = paper_data.points(series)
  r0 = paper_data.params()[series]['r0']
  kept = x >= 1500
  expected, _ = optimize.curve_fit(
    lambda c, a, b, c_mid: paper_data.law(c, r0, a, b, c_mid),
    x[kept],
    y[kept],
    p0=[0.6, 1.5, np.median(x)],
    bounds=([r0, 0.05, 1.0], [1.0, 50.0, 1e7]),
    ftol=1e-12,
    xtol=1e-12,
  )
  got = curves.fit(x, y, r0=r0, min_compute=1500.0)
  loss = np.sum((paper_data.law(x[kept], *got.params) - y[kept]) ** 2)
  best = np.sum((paper_data.law(x[kept], r0, *expected) - y[kept]) ** 2)
  assert loss <= best * (1 + 1e-6)
  np.testing.assert_allclose(got.params[1:], expected, rtol=2e-3)


def test_paper_grid_gives_the_printed_parameters():
  # The printed values come out of the points in and beyond the fitted range;
  # those in range alone give A = 0.635.
  x, y = paper_data.points('batch_2048')
  got = curves.fit(x, y, r0=0.4017, min_compute=1500.0, method='paper_grid')
  assert got.params.a == pytest.approx(0.645, abs=0.005)
  assert got.params.b == pytest.approx(1.69, rel=0.03)
  assert got.params.c_mid == pytest.approx(10909, rel=0.03)


def test_paper_grid_is_close_to_least_squares():
  x, y = paper_data.points('recipe_scalerl')
  grid = curves.fit(x, y, r0=0.4001, min_compute=1500.0, method='paper_grid')
  free = curves.fit(x, y, r0=0.4001, min_compute=1500.0)
  assert grid.params.a == pytest.approx(free.params.a, abs=0.005)
  assert grid.residual_std <= free.residual_std * 1.1


def test_intervals_cover_the_truth_at_their_level():
  truth = (0.3, 0.7, 1.5, 2e3)
  rng = np.random.default_rng(0)
  covered = np.zeros(3)
  for _ in range(200):
    y = paper_data.law(_X, *truth) + 0.01 * rng.standard_normal(len(_X))
    found = curves.fit(_X, y, r0=truth[0]).intervals[1:]
    covered += [p <= t <= q for t, (p, q) in zip(truth[1:], found, strict=True)]
  # Three standard errors of a fraction of 200 around 0.9.
  np.testing.assert_array_less(np.abs(covered / 200 - 0.9), 0.064)


def test_bootstrap_agrees_with_the_delta_method():
  rng = np.random.default_rng(1)
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3)
  y += 0.01 * rng.standard_normal(len(_X))
  result = curves.fit(_X, y, r0=0.3)
  key = jax.random.key(0)
  got = curves.bootstrap(_X, y, key=key, num_resamples=100, r0=0.3)
  again = curves.bootstrap(_X, y, key=key, num_resamples=100, r0=0.3)
  assert got.intervals == again.intervals
  widths = [np.ptp(f.a) for f in (got.intervals, result.intervals)]
  assert widths[0] == pytest.approx(widths[1], rel=0.3)


@pytest.mark.parametrize(
  ('compute', 'pass_rate', 'warning'),
  [
    ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.35], 'too few'),
    (range(1, 9), [0.3] * 8, 'did not change'),
    (range(1, 9), np.linspace(0.5, 0.1, 8), 'does not rise'),
    ([5.0] * 8, np.linspace(0.1, 0.5, 8), 'does not rise'),
    (range(1, 9), np.linspace(0.1, 0.3, 8) ** 1.5, 'not bent'),
  ],
)
@pytest.mark.parametrize('r0', [None, 0.02])
def test_data_that_cannot_determine_a_curve_is_said_so(
  compute, pass_rate, warning, r0
):
  got = curves.fit(np.array(compute, float), np.array(pass_rate), r0=r0)
  assert not got.identifiable
  assert any(warning in w for w in got.warnings)
  json.dumps(curves.as_dict(got), allow_nan=False)


def test_half_of_a_curve_is_not_identifiable():
  x, y = paper_data.points('batch_2048')
  early = x < 11000
  got = curves.fit(x[early], y[early], r0=0.4017)
  assert not got.identifiable


def test_exactly_four_points_are_too_few_even_without_noise():
  x = np.array([500.0, 2e3, 8e3, 3e4])
  y = paper_data.law(x, 0.2, 0.8, 1.2, 3e3)
  assert not curves.fit(x, y, r0=0.2).identifiable


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'compute': [1.0, 2.0, float('nan')]}, 'compute.*not finite'),
    ({'pass_rate': [0.1, 0.2, float('inf')]}, 'pass_rate.*not finite'),
    ({'compute': [-1.0, 2.0, 3.0]}, 'compute=-1.0'),
    ({'pass_rate': [10.0, 20.0, 30.0]}, 'percent'),
    ({'pass_rate': [-0.1, 0.2, 0.3]}, 'pass_rate=-0.1'),
    ({'compute': [1.0, 2.0]}, r'\(2,\)'),
    ({'weights': [1.0, 2.0]}, 'weights'),
    ({'weights': [1.0, 1.0, -1.0]}, 'weights=-1.0'),
    ({'min_compute': 100.0}, 'min_compute=100.0'),
    ({'r0': 1.5}, 'r0=1.5'),
    ({'method': 'guess'}, "method='guess'"),
    ({'method': 'paper_grid'}, 'needs r0'),
  ],
)
def test_malformed_input_is_refused(changed, message):
  args = {'compute': [1.0, 2.0, 3.0], 'pass_rate': [0.1, 0.2, 0.3], **changed}
  with pytest.raises(ValueError, match=message):
    curves.fit(args.pop('compute'), args.pop('pass_rate'), **args)


def test_precision_of_the_caller_is_left_alone():
  before = jax.config.jax_enable_x64
  got = curves.fit(_X, paper_data.law(_X, *_TRUTHS[0]))
  assert jax.config.jax_enable_x64 == before
  assert all(type(p) is float for p in got.params)


def test_order_and_padding_and_units_do_not_matter():
  x, y = paper_data.points('batch_2048')
  order = np.random.default_rng(0).permutation(len(x))
  got = curves.fit(x, y, r0=0.4017)
  shuffled = curves.fit(x[order], y[order], r0=0.4017)
  scaled = curves.fit(x * 1e15, y, r0=0.4017)
  np.testing.assert_allclose(shuffled.params, got.params, rtol=1e-5)
  np.testing.assert_allclose(scaled.params[:3], got.params[:3], rtol=1e-5)
  assert scaled.params.c_mid == pytest.approx(1e15 * got.params.c_mid, rel=1e-5)


def test_weight_two_is_the_same_as_a_repeated_point():
  x, y = paper_data.points('recipe_scalerl')
  weights = np.ones(len(x))
  weights[3] = 2
  got = curves.fit(x, y, r0=0.4, weights=weights)
  twice = curves.fit(np.append(x, x[3]), np.append(y, y[3]), r0=0.4)
  np.testing.assert_allclose(got.params, twice.params, rtol=1e-5)


def test_power_law_gives_back_its_parameters():
  y = 0.7 - 2.0 / _X**0.4
  y = np.clip(y, 0, 1)
  got = curves.fit_power_law(_X, y)
  np.testing.assert_allclose(got[:3], (0.7, 2.0, 0.4), rtol=1e-3)


def test_power_law_fits_the_paper_curve_worse_than_the_sigmoid():
  x, y = paper_data.points('batch_2048')
  power = curves.fit_power_law(x, y, min_compute=1500.0)
  sigmoid = curves.fit(x, y, r0=0.4017, min_compute=1500.0)
  assert power.a > 0.7
  assert power.residual_std > 1.5 * sigmoid.residual_std
