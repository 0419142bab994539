"""Tests of the law and its fit."""

import json

import jax
import numpy as np
import pytest
from scipy import optimize

from scalerl_jax import curves
from scalerl_jax.curves import importance
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
@pytest.mark.parametrize('method', ['posterior', 'least_squares'])
def test_exact_points_give_back_the_parameters(truth, free_r0, method):
  y = paper_data.law(_X, *truth)
  got = curves.fit(_X, y, r0=None if free_r0 else truth[0], method=method)
  np.testing.assert_allclose(got.params, truth, rtol=1e-6)
  assert got.residual_std < 1e-8


_EXACT = {
  'posterior': {'method': 'posterior', 'prior': None},
  'least_squares': {'method': 'least_squares'},
  'paper_grid': {
    'method': 'paper_grid',
    'grid': curves.Grid(
      a=tuple(np.linspace(0.4, 1.0, 13)),
      c_mid=tuple(np.geomspace(300, 3e3, 25)),
    ),
    'polish': True,
  },
}


@pytest.mark.parametrize('name', _EXACT)
def test_a_thousand_random_curves_are_found_exactly(monkeypatch, name):
  # Draws, which exact points make six rounds of, do not move the parameters.
  monkeypatch.setattr(importance, '_ROUNDS', 1)
  rng = np.random.default_rng(5)
  for _ in range(1000):
    r0, a = rng.uniform(0.0, 0.35), rng.uniform(0.4, 0.98)
    b, c_mid = np.exp(rng.uniform(np.log(0.8), np.log(4))), 1e3
    x = np.linspace(0.0, rng.uniform(1.6, 6.0) * c_mid, 40)[1:]
    truth = (r0, a, b, c_mid)
    got = curves.fit(x, paper_data.law(x, *truth), r0=r0, **_EXACT[name])
    np.testing.assert_allclose(got.params, truth, rtol=1e-6)


def test_pull_of_the_prior_vanishes_with_the_noise():
  """The shift of A falls as its variance, a hundredfold per decade."""
  rng = np.random.default_rng(6)
  y, noise = paper_data.law(_X, *_TRUTHS[0]), rng.standard_normal(len(_X))
  shifts = []
  for size in (1e-2, 1e-3, 1e-4):
    with_prior, without = (
      curves.fit(_X, y + size * noise, r0=0.2, **kwargs).params.a
      for kwargs in ({'prior': curves.Prior(r0_std=0.0)}, {'prior': None})
    )
    shifts.append(abs(with_prior - without))
  assert shifts[0] < 0.01
  np.testing.assert_allclose(np.divide(shifts[:-1], shifts[1:]), 100, rtol=0.5)


def test_measured_r0_moves_within_its_error():
  rng = np.random.default_rng(11)
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3) + 0.005 * rng.standard_normal(40)
  got = curves.fit(_X, y, r0=0.31)
  assert got.params.r0 == pytest.approx(0.3, abs=0.005)
  assert got.params.a == pytest.approx(0.7, abs=0.01)
  held = curves.fit(_X, y, r0=0.31, prior=curves.Prior(r0_std=0.0))
  assert held.params.r0 == 0.31
  assert held.intervals.r0 == (0.31, 0.31)


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
  got = curves.fit(x, y, r0=r0, min_compute=1500.0, method='least_squares')
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
  free = curves.fit(x, y, r0=0.4001, min_compute=1500.0, method='least_squares')
  assert grid.params.a == pytest.approx(free.params.a, abs=0.005)
  assert grid.residual_std <= free.residual_std * 1.1


def test_paper_grid_is_the_best_cell_of_a_slow_search():
  x, y = paper_data.points('recipe_minimax')
  a_grid, c_grid = (0.55, 0.6, 0.62, 0.7), (2e3, 4e3, 4.5e3, 9e3)
  best = min(
    (
      optimize.minimize_scalar(
        lambda b, a=a, c=c: np.sum(
          (paper_data.law(x, 0.398, a, b, c) - y) ** 2
        ),
        bounds=(0.2, 10.0),
        options={'xatol': 1e-10},
        method='bounded',
      ).fun,
      a,
      c,
    )
    for a in a_grid
    for c in c_grid
  )
  grid = curves.Grid(a=a_grid, c_mid=c_grid)
  got = curves.fit(x, y, r0=0.398, method='paper_grid', grid=grid)
  assert (got.params.a, round(got.params.c_mid)) == best[1:]
  loss = np.sum((paper_data.law(x, *got.params) - y) ** 2)
  assert loss == pytest.approx(best[0], rel=1e-6)


def _brute_density(x, y, r0, a, b, c):
  """Posterior density of (A, log B, log C_mid) on a grid for one R0."""
  a_, b_, c_ = np.meshgrid(a, b, c, indexing='ij')
  e = paper_data.law(x, r0, a_[..., None], b_[..., None], c_[..., None]) - y
  total, beside = np.sum(e * e, -1), np.sum(e[..., 1:] * e[..., :-1], -1)
  inner = np.sum(e[..., 1:-1] ** 2, -1)
  likelihood = np.zeros_like(a_)
  rhos = (-0.2, 0, 0.2, 0.4, 0.6, 0.8)
  for rho, chance in zip(rhos, (2, 2, 2, 1, 1, 1), strict=True):
    rest = 1 - rho**2
    quadratic = (total + rho**2 * inner - 2 * rho * beside) / rest
    power = -0.5 * len(x)
    likelihood += chance * rest ** (power + 0.5) * (quadratic / 0.002) ** power
  u = (a_ - r0) / (1 - r0)
  density = likelihood * u**-0.5 * (1 - u) / (1 - r0)
  density *= np.exp(-0.5 * (np.log(b_ / 2) / 0.5) ** 2)
  return density * np.exp(-0.5 * (np.log(c_ / x.max()) / 3) ** 2)


@pytest.mark.parametrize(
  ('x', 'r0_std'),
  [
    (np.linspace(500.0, 8e3, 24), 0.0),
    (np.linspace(500.0, 3.5e3, 24), 0.0),
    (np.linspace(500.0, 1.5e3, 24), 0.0),  # Needs several rounds of proposals.
    (np.linspace(500.0, 8e3, 24), 0.03),
    (np.geomspace(50.0, 8e3, 24), 0.005),
  ],
)
def test_posterior_agrees_with_brute_force(x, r0_std):
  """Quantiles and mode against sums over a fine grid, written independently."""
  rng = np.random.default_rng(3)
  # Uniform noise has no outliers, whose weights would differ.
  y = paper_data.law(x, 0.3, 0.6, 1.7, 2.5e3) + rng.uniform(-0.015, 0.015, 24)
  prior = curves.Prior(r0_std=r0_std)
  got = curves.fit(x, y, r0=0.3, weights=np.ones(24), prior=prior)
  fineness = 1 if r0_std else 2
  starts = 0.3 + np.linspace(-3.5, 3.5, 15) * r0_std if r0_std else [0.3]
  a = np.linspace(starts[-1] + 0.01, 0.995, 60 * fineness)
  b = np.exp(np.linspace(np.log(0.4), np.log(12.0), 50 * fineness))
  c = np.geomspace(300.0, 4e5 if x[-1] < 2e3 else 4e4, 80 * fineness)
  density = np.array([_brute_density(x, y, r, a, b, c) for r in starts])
  grid = np.ix_(starts, a, b, c)
  if r0_std:  # Normal in the logit, with the spread that is asked for in R0.
    logit = np.log(grid[0] / (1 - grid[0])) - np.log(0.3 / 0.7)
    density *= np.exp(-0.5 * (logit * 0.21 / r0_std) ** 2)
    density /= grid[0] * (1 - grid[0])
  values = (starts, a, b, c)
  for axis in range(r0_std == 0, 4):
    others = tuple(i for i in range(4) if i != axis)
    cells = density.sum(others) / density.sum()
    middle = np.cumsum(cells) - cells / 2
    expected = np.interp([0.05, 0.95], middle, values[axis])
    # Quantiles of 1,024 draws, and of a grid that is coarse.
    np.testing.assert_allclose(
      got.intervals[axis], expected, rtol=0, atol=0.105 * np.ptp(expected)
    )
  # The mode is that of log B, log C_mid and the logits of u and R0.
  u = (grid[1] - grid[0]) / (1 - grid[0])
  best = density * u * (1 - u) * grid[0] * (1 - grid[0])
  where = np.unravel_index(np.argmax(best), best.shape)
  mode = [v[i] for v, i in zip(values, where, strict=True)]
  np.testing.assert_allclose(got.params, mode, rtol=0.1)


def test_autocorrelated_noise_is_noticed_and_widens_the_intervals():
  rng = np.random.default_rng(4)
  white = rng.standard_normal(len(_X))
  red = np.zeros(len(_X))
  for i in range(len(_X)):
    red[i] = 0.7 * red[max(i - 1, 0)] + np.sqrt(1 - 0.49) * white[i]
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3)
  found = [
    curves.fit(_X, y + 0.01 * noise / noise.std(), r0=0.3)
    for noise in (white, red)
  ]
  assert found[0].autocorrelation < 0.25
  assert found[1].autocorrelation > 0.35
  assert np.ptp(found[1].intervals.a) > 1.2 * np.ptp(found[0].intervals.a)


def test_one_broken_evaluation_hardly_moves_the_curve():
  rng = np.random.default_rng(7)
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3) + 0.005 * rng.standard_normal(40)
  broken = y.copy()
  broken[30] = 0.2
  good, robust = (curves.fit(_X, v, r0=0.3).params.a for v in (y, broken))
  plain = curves.fit(_X, broken, r0=0.3, method='least_squares').params.a
  assert abs(robust - good) < 0.005 < abs(plain - good)


@pytest.mark.parametrize('value', [0.0, 1.0])
def test_broken_evaluations_leave_the_intervals_alone(value):
  truth = (0.3, 0.65, 2.0, 1e3)
  rng = np.random.default_rng(1)
  x = np.linspace(50.0, 5000.0, 40)
  covered, widths = 0, []
  for i in range(40):
    y = paper_data.law(x, *truth) + 0.005 * rng.standard_normal(40)
    clean = curves.fit(x, y).intervals.a
    y[[i or 39, 20]] = value  # The first is where R0 is fitted.
    low, high = curves.fit(x, y).intervals.a
    covered += low <= 0.65 <= high
    widths.append((high - low) / np.ptp(clean))
  assert covered >= 33
  assert 1.0 < np.median(widths) < 2.0


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
  result = curves.fit(_X, y, r0=0.3, method='least_squares')
  key = jax.random.key(0)
  got = curves.bootstrap(_X, y, key=key, r0=0.3)
  again = curves.bootstrap(_X, y, key=key, r0=0.3)
  assert got.intervals == again.intervals
  widths = [np.ptp(f.a) for f in (got.intervals, result.intervals)]
  assert widths[0] == pytest.approx(widths[1], rel=0.3)
  at = np.array([5e4])
  drawn = curves.forecast(got.fit, at)
  assert drawn.mean == curves.forecast(result, at).mean
  expected = np.quantile(curves.sigmoid(5e4, got.params), [0.05, 0.95])
  np.testing.assert_allclose((drawn.low[0], drawn.high[0]), expected, rtol=1e-5)


@pytest.mark.parametrize('block_size', [1, 8])
def test_bootstrap_refits_are_those_of_scipy(block_size):
  rng = np.random.default_rng(2)
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3)
  y += 0.01 * rng.standard_normal(len(_X))
  got = curves.bootstrap(
    _X, y, key=jax.random.key(1), r0=0.3, block_size=block_size
  )
  base = curves.fit(_X, y, r0=0.3, method='least_squares').params
  predicted = paper_data.law(_X, *base)
  residual = (y - predicted - np.mean(y - predicted)) * np.sqrt(40 / 37)
  shape = (1000, 40 // block_size)
  firsts = np.asarray(jax.random.randint(jax.random.key(1), shape, 0, 40))
  for i in range(3):
    # Circular: a block that passes the end goes on at the beginning.
    drawn = [(s + j) % 40 for s in firsts[i] for j in range(block_size)]
    expected, _ = optimize.curve_fit(
      lambda c, a, b, c_mid: paper_data.law(c, 0.3, a, b, c_mid),
      _X,
      predicted + residual[drawn],
      p0=base[1:],
      xtol=1e-12,
      ftol=1e-12,
    )
    found = [v[i] for v in got.params[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_blocks_widen_the_intervals_of_autocorrelated_evaluations():
  rng = np.random.default_rng(8)
  noise = np.convolve(rng.standard_normal(len(_X) + 4), np.ones(5) / 5, 'valid')
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3) + 0.02 * noise
  widths = [
    np.ptp(
      curves.bootstrap(
        _X, y, key=jax.random.key(0), r0=0.3, block_size=size
      ).intervals.a
    )
    for size in (1, None, 8)
  ]
  assert widths[1] > 1.2 * widths[0]
  assert widths[2] > 1.2 * widths[0]


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'num_resamples': 3}, 'num_resamples=3'),
    ({'block_size': 0}, 'block_size=0'),
    ({'block_size': 41}, 'block_size=41'),
    ({'level': 1.0}, 'level=1.0'),
    ({'min_compute': 7e4}, '3 points'),
  ],
)
def test_malformed_bootstrap_is_refused(changed, message):
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3)
  with pytest.raises(ValueError, match=message):
    curves.bootstrap(_X, y, key=jax.random.key(0), r0=0.3, **changed)


@pytest.mark.parametrize(
  ('compute', 'pass_rate', 'warning'),
  [
    ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.35], 'of the 5'),
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


@pytest.mark.parametrize('method', ['posterior', 'least_squares'])
@pytest.mark.parametrize('num', [1, 2])
def test_one_or_two_points_give_a_result_that_says_so(method, num):
  got = curves.fit([1.0, 2.0][:num], [0.1, 0.2][:num], r0=0.05, method=method)
  assert not got.identifiable
  assert got.warnings == (f'only {num} of the 5 evaluations that a fit needs',)
  json.dumps(curves.as_dict(got), allow_nan=False)


def test_a_hundred_thousand_points_are_fitted():
  rng = np.random.default_rng(9)
  x = np.sort(rng.uniform(0.0, 1e4, 100_000))
  y = paper_data.law(x, 0.3, 0.7, 1.5, 2e3) + 0.05 * rng.standard_normal(len(x))
  got = curves.fit(x, np.clip(y, 0, 1), r0=0.3)
  assert got.params.a == pytest.approx(0.7, abs=0.005)
  low, high = got.intervals.a
  assert low < 0.7 < high
  assert high - low < 0.02
  assert got.residual_std == pytest.approx(0.05, rel=0.02)


def test_reason_says_how_far_the_curve_has_come():
  rng = np.random.default_rng(10)
  x = np.linspace(50.0, 800.0, 30)
  y = paper_data.law(x, 0.3, 0.7, 1.5, 2e3) + 0.005 * rng.standard_normal(30)
  got = curves.fit(x, y, r0=0.3)
  reached = 800.0 / got.params.c_mid
  assert f'compute so far is {reached:.2g} x C_mid' in got.warnings[0]


def test_r0_that_the_evaluations_contradict_is_said_so():
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 2e3)
  y += 0.005 * np.random.default_rng(0).standard_normal(len(_X))
  for method in ('posterior', 'least_squares'):
    for r0, is_right in ((0.3, True), (0.32, True), (0.6, False), (0.9, False)):
      got = curves.fit(_X, y, r0=r0, method=method)
      said = any('R0 = ' in w for w in got.warnings)
      assert (got.identifiable, said) == (is_right, not is_right)


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
    ({'compute': [0.0, 0.0, 0.0]}, 'compute is 0'),
    (
      {'method': 'paper_grid', 'r0': 0.9},
      'grid.a',
    ),
    (
      {'method': 'paper_grid', 'r0': 0.1, 'grid': curves.Grid(c_mid=(0.0,))},
      'grid.c_mid',
    ),
    ({'r0': 1.5}, 'r0=1.5'),
    ({'method': 'guess'}, "method='guess'"),
    ({'prior': curves.Prior(log_b_std=0.0)}, 'prior.log_b_std=0.0'),
    ({'prior': curves.Prior(r0_std=-1.0)}, 'prior.r0_std=-1.0'),
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
  got = curves.fit(x, y, r0=0.4, weights=weights, method='least_squares')
  twice = curves.fit(
    np.append(x, x[3]), np.append(y, y[3]), r0=0.4, method='least_squares'
  )
  np.testing.assert_allclose(got.params, twice.params, rtol=1e-5)


def test_power_law_gives_back_its_parameters():
  y = 0.7 - 2.0 / _X**0.4
  y = np.clip(y, 0, 1)
  got = curves.fit_power_law(_X, y)
  np.testing.assert_allclose(got[:3], (0.7, 2.0, 0.4), rtol=1e-3)


def test_power_law_over_any_range_of_compute():
  x = np.geomspace(1e-200, 1e200, 30)
  got = curves.fit_power_law(x, np.linspace(0.1, 0.6, 30))
  assert np.isfinite(got).all()


def test_power_law_fits_the_paper_curve_worse_than_the_sigmoid():
  x, y = paper_data.points('batch_2048')
  power = curves.fit_power_law(x, y, min_compute=1500.0)
  sigmoid = curves.fit(x, y, r0=0.4017, min_compute=1500.0)
  assert power.a > 0.7
  assert power.residual_std > 1.5 * sigmoid.residual_std
