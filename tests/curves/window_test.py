"""Tests of the window of the fit."""

import numpy as np
import pytest

from scalerl_jax import curves
from tests.curves import paper_data

_X = np.linspace(200.0, 2e4, 60)


def _run(seed, early=0.0):
  """A run that is above its law before compute 2,000."""
  rng = np.random.default_rng(seed)
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 5e3)
  return y + early * (_X < 2e3) + 0.004 * rng.standard_normal(len(_X))


def test_early_regime_is_found():
  found = [curves.window_start(_X, _run(s, 0.05), r0=0.3) for s in range(20)]
  assert np.median(found) == _X[_X >= 2e3][0]
  assert np.mean(np.abs(np.array(found) - 2e3) < 800) >= 0.8


def test_a_run_that_follows_the_law_is_left_whole():
  found = [curves.window_start(_X, _run(s), r0=0.3) for s in range(100)]
  assert np.mean(np.array(found) > 0) <= 0.03


def test_autocorrelated_noise_is_no_early_regime():
  found = []
  for seed in range(60):
    rng = np.random.default_rng(seed)
    white = rng.standard_normal(len(_X))
    red = np.zeros(len(_X))
    for i in range(len(_X)):
      red[i] = 0.85 * red[i - 1] + white[i]
    y = paper_data.law(_X, 0.3, 0.7, 1.5, 5e3) + 0.004 * red
    found.append(curves.window_start(_X, y, r0=0.3))
  # Without regard to the correlation it is 18 %.
  assert np.mean(np.array(found) > 0) <= 0.05


@pytest.mark.parametrize('r0', [None, 0.3])
def test_short_runs_are_left_whole(r0):
  assert curves.window_start(_X[:8], _run(0)[:8], r0=r0) == 0.0
  assert curves.window_start([1.0], [0.5], r0=r0) == 0.0


def test_noise_free_data_are_left_whole():
  y = paper_data.law(_X, 0.3, 0.7, 1.5, 5e3)
  assert curves.window_start(_X, y, r0=0.3) == 0.0


def test_sensitivity_is_the_fit_of_each_window():
  x, y = paper_data.points('batch_2048')
  windows = ((1500.0, 50000.0), (0.0, 100000.0), (0.0, 50000.0), (5e3, 50000.0))
  got = curves.window_sensitivity(x, y, windows=windows, r0=0.4017)
  for window, (low, high) in zip(got, windows, strict=True):
    kept = (x >= low) & (x <= high)
    expected = curves.fit(x[kept], y[kept], r0=0.4017)
    assert window.params == expected.params
    assert window.num_points == kept.sum()
    # The paper's table has 0.645 to 0.655.
    assert window.params.a == pytest.approx(0.645, abs=0.015)


def test_weights_go_with_their_points():
  x, y = paper_data.points('batch_2048')
  w = np.linspace(1.0, 2.0, len(x))
  (got,) = curves.window_sensitivity(
    x, y, windows=[(1500.0, 5e4)], r0=0.4, weights=w
  )
  kept = (x >= 1500) & (x <= 5e4)
  assert (
    got.params == curves.fit(x[kept], y[kept], r0=0.4, weights=w[kept]).params
  )


def test_empty_window_is_refused():
  x, y = paper_data.points('batch_2048')
  with pytest.raises(ValueError, match='holds no point'):
    curves.window_sensitivity(x, y, windows=[(1e6, 2e6)], r0=0.4)
