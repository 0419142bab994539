"""Fits of one curve and of a bootstrap, against SciPy in the same process.

    python benchmarks/curve_fit.py

60 points of a curve with noise .006, as a run of 7,500 updates has. The
reference is `scipy.optimize.curve_fit`, started near the answer and unbounded
(its fastest), and started from the same place with the bounds of the law. Cold
is the first call in a new process, compilation included.
"""

import setting  # isort: skip  # First: it sits beside this script.

import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from scipy import optimize

from scalerl_jax import curves

_R0, _TRUTH = 0.4, (0.61, 1.9, 2600.0)
_START = (0.6, 1.5, 3000.0)
_BOUNDS = ((_R0, 0.05, 1.0), (1.0, 50.0, 1e6))
_COLD = """
import time
import numpy as np
from scalerl_jax import curves
x = np.linspace(500.0, 2e4, 60)
y = 0.4 + 0.21 / (1 + (2600 / x) ** 1.9) + 0.003 * np.cos(x)
start = time.perf_counter()
curves.fit(x, y, r0=0.4, method={method!r})
print(time.perf_counter() - start)
"""


def law(c: np.ndarray, a: float, b: float, c_mid: float) -> np.ndarray:
  """The law with R0 held."""
  return _R0 + (a - _R0) / (1 + (c_mid / c) ** b)


def _scipy_grid(x: np.ndarray, y: np.ndarray) -> float:
  best = np.inf
  for a in np.linspace(0.45, 0.8, 71):
    for c_mid in np.geomspace(x.min() / 4, x.max() * 4, 100):
      try:
        (b,), _ = optimize.curve_fit(
          lambda c, b, a=a, m=c_mid: law(c, a, b, m), x, y, p0=[1.0]
        )
      except RuntimeError:
        continue
      best = min(best, float(np.sum((law(x, a, b, c_mid) - y) ** 2)))
  return best


def _report(name: str, ours: float, reference: float) -> None:
  print(
    f'{name:46s} {1e3 * ours:9.2f} ms {1e3 * reference:9.2f} ms'
    f'  {ours / reference:6.2f}'
  )


def main() -> None:
  """Prints one line per comparison."""
  x = np.linspace(500.0, 2e4, 60)
  rng = np.random.default_rng(0)
  y = law(x, *_TRUTH) + 0.006 * rng.standard_normal(len(x))

  def direct() -> np.ndarray:
    return optimize.curve_fit(law, x, y, p0=_START)[0]

  def bounded() -> np.ndarray:
    return optimize.curve_fit(law, x, y, p0=_START, bounds=_BOUNDS)[0]

  print(f'{"":46s} {"ours":>12s} {"SciPy":>12s}  ratio')
  for method in ('least_squares', 'posterior'):
    for name, reference in (('unbounded', direct), ('bounded', bounded)):
      ours, theirs = setting.compare(
        lambda m=method: curves.fit(x, y, r0=_R0, method=m).params.a,
        reference,
        pairs=100,
      )
      _report(f'{method} / curve_fit {name}', ours, theirs)

  key = jax.random.key(0)
  for name, args in (('unbounded', {}), ('bounded', {'bounds': _BOUNDS})):
    base = optimize.curve_fit(law, x, y, p0=_START, **args)[0]
    rate = law(x, *base)

    def loop(rate: Any = rate, base: Any = base, args: Any = args) -> Any:
      drawn = rng.integers(0, len(x), (1000, len(x)))
      return [
        optimize.curve_fit(law, x, rate + (y - rate)[i], p0=base, **args)[0]
        for i in drawn
      ]

    ours, theirs = setting.compare(
      lambda: curves.bootstrap(x, y, key=key, r0=_R0).intervals, loop, pairs=5
    )
    _report(f'bootstrap of 1,000 / curve_fit {name}', ours, theirs)
  grid = curves.Grid(c_mid=tuple(np.geomspace(x.min() / 4, x.max() * 4, 100)))

  def paper_grid() -> float:
    fit = curves.fit(x, y, r0=_R0, method='paper_grid', grid=grid)
    return float(np.sum((law(x, *fit.params[1:]) - y) ** 2))

  ours, theirs = setting.compare(paper_grid, lambda: _scipy_grid(x, y), pairs=3)
  _report('paper_grid of 71 x 100 / curve_fit in cells', ours, theirs)
  squares = curves.fit(x, y, r0=_R0, method='least_squares')
  ssr = float(np.sum((law(x, *squares.params[1:]) - y) ** 2))
  print(
    f'sum of squares: ours {ssr:.9f}, direct'
    f' {np.sum((law(x, *direct()) - y) ** 2):.9f}, our grid'
    f' {paper_grid():.9f}, SciPy grid {_scipy_grid(x, y):.9f}'
  )
  for method in ('least_squares', 'posterior', 'paper_grid'):
    done = subprocess.run(
      [sys.executable, '-c', _COLD.format(method=method)],
      capture_output=True,
      text=True,
      check=True,
    )
    print(f'{method} cold: {float(done.stdout):.2f} s')


if __name__ == '__main__':
  start = time.perf_counter()
  main()
  print(f'{time.perf_counter() - start:.0f} s')
