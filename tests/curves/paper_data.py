"""The digitised curves in tests/data."""

import csv
import pathlib

import numpy as np

_DATA = pathlib.Path(__file__).parents[1] / 'data'


def points(series, *, split=None):
  with (_DATA / 'paper_curves.csv').open(encoding='utf-8') as file:
    rows = [r for r in csv.DictReader(file) if r['series'] == series]
  rows = [r for r in rows if split in (None, r['split'])]
  return (
    np.array([float(r['compute']) for r in rows]),
    np.array([float(r['pass_rate']) for r in rows]),
  )


def params():
  with (_DATA / 'paper_curve_params.csv').open(encoding='utf-8') as file:
    rows = list(csv.DictReader(file))
  return {
    r['series']: {k: float(r[k]) for k in ('r0', 'a', 'b', 'c_mid')}
    for r in rows
  }


def law(x, r0, a, b, c_mid):
  return r0 + (a - r0) / (1 + (c_mid / x) ** b)
