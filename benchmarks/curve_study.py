"""How far the fit of a curve can be trusted, on simulated runs.

    python benchmarks/curve_study.py

2,000 curves with A ~ U(.4, .95), B ~ logU(.8, 4), C_mid ~ logU over 1.5 decades
and R0 ~ U(.1, .35), each evaluated 30 times, evenly in compute, up to .5, 1, 2
and 4 C_mid, after an evaluation at compute 0 that gives R0. An evaluation is
binomial with 6,400 samples: a standard error of .006 at a half. The final pass
rate is that at 8 C_mid. Verdicts are asked for targets .02 below and above it,
with 8 C_mid as the budget. The defaults of the fit are used throughout.

The second table is the error of A of the 8B run of arXiv:2510.13786 (R0 .4, A
.61, B 1.92), 60 evaluations with noise .006, 400 runs for each length.
"""

from collections.abc import Iterator
import time
from typing import Any

import numpy as np

from scalerl_jax import curves
from scalerl_jax.curves import law

_NUM_CURVES = 2000
_NUM_EVALUATIONS = 30
_NUM_SAMPLES = 6400
_SEEN = (0.5, 1.0, 2.0, 4.0)  # In C_mid.
_FINAL = 8.0
_OFF_TARGET = 0.02
_LENGTHS = (1.0, 1.6, 2.0, 3.2, 6.4)


def runs(seen: float) -> Iterator[tuple[law.SigmoidParams, Any, Any]]:
  """Yields the truth, compute and pass rate of simulated runs."""
  rng = np.random.default_rng(int(10 * seen))
  for _ in range(_NUM_CURVES):
    truth = law.SigmoidParams(
      r0=rng.uniform(0.1, 0.35),
      a=rng.uniform(0.4, 0.95),
      b=float(np.exp(rng.uniform(np.log(0.8), np.log(4.0)))),
      c_mid=1e3 * 10 ** rng.uniform(0.0, 1.5),
    )
    x = np.linspace(0.0, seen * truth.c_mid, _NUM_EVALUATIONS + 1)
    y = rng.binomial(_NUM_SAMPLES, law.evaluate(x, truth)) / _NUM_SAMPLES
    yield truth, x, y


def _row(truth: law.SigmoidParams, x: Any, y: Any) -> dict[str, float]:
  fit = curves.fit(x[1:], y[1:], r0=y[0])
  at = np.array([_FINAL * truth.c_mid])
  final = float(law.evaluate(at, truth)[0])
  band = curves.forecast(fit, at)
  stop_wrong, go_wrong = (
    curves.verdict(fit, target=t, budget=at[0]).decision
    for t in (final - _OFF_TARGET, min(final + _OFF_TARGET, 1.0))
  )
  return {
    'identifiable': fit.identifiable,
    'covers_a': fit.intervals.a[0] <= truth.a <= fit.intervals.a[1],
    'covers_final': band.low[0] <= final <= band.high[0],
    'covers_b': fit.intervals.b[0] <= truth.b <= fit.intervals.b[1],
    'error': abs(fit.params.a - truth.a),
    'stopped': stop_wrong == 'stop',
    'continued': go_wrong == 'continue',
  }


def main() -> None:
  """Prints two tables in Markdown."""
  print(
    '| compute seen | identifiable | A covered | final rate covered'
    ' | B covered | error of A, median | 95 % | all runs: median | 95 %'
    ' | stopped wrongly | continued wrongly |'
  )
  print('|' + '---|' * 11)
  for seen in _SEEN:
    rows = [_row(*run) for run in runs(seen)]
    v = {k: np.array([r[k] for r in rows], float) for k in rows[0]}
    sure = v['identifiable'] > 0
    cells = [f'{seen} C_mid', f'{100 * sure.mean():.1f} % ({sure.sum():.0f})']
    for key in ('covers_a', 'covers_final', 'covers_b'):
      cells.append(f'{100 * v[key][sure].mean():.1f} %')
    cells += [f'{q:.3f}' for q in np.quantile(v['error'][sure], [0.5, 0.95])]
    cells += [f'{q:.3f}' for q in np.quantile(v['error'], [0.5, 0.95])]
    for key in ('stopped', 'continued'):
      cells.append(f'{100 * v[key][sure].mean():.1f} %')
    print('| ' + ' | '.join(cells) + ' |')
  truth = law.SigmoidParams(0.4, 0.61, 1.92, 2542.0)
  rng = np.random.default_rng(0)
  print('\n| compute seen | least squares | default |\n|---|---|---|')
  for length in _LENGTHS:
    x = np.linspace(0.0, length * truth.c_mid, 61)[1:]
    errors: dict[str, list[float]] = {'least_squares': [], 'posterior': []}
    for _ in range(400):
      y = law.evaluate(x, truth) + 0.006 * rng.standard_normal(len(x))
      for method, found in errors.items():
        fit = curves.fit(x, y, r0=truth.r0, method=method)
        found.append(abs(fit.params.a - truth.a))
    worst = (np.quantile(e, 0.95) for e in errors.values())
    cells = [f'{length} C_mid', *(f'{w:.3f}' for w in worst)]
    print('| ' + ' | '.join(cells) + ' |')


if __name__ == '__main__':
  start = time.perf_counter()
  main()
  print(f'\n{time.perf_counter() - start:.0f} s')
