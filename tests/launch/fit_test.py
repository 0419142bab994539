"""Tests of the command line that fits logs."""

import errno
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch import fit
from scalerl_jax import curves
from tests.curves import paper_data

_ROOT = pathlib.Path(__file__).parents[2]
_PAPER = [
  str(_ROOT / 'tests' / 'data' / 'paper_curves.csv'),
  '--x=compute',
  '--y=pass_rate',
  '--group=series',
]


def _call(capsys, *args):
  """Exit code, stdout and stderr."""
  code = fit.main(['fit.py', *map(str, args)])
  return code, *capsys.readouterr()


def _csv(path, rows, header='compute,pass_rate'):
  lines = [','.join(map(str, row)) for row in rows]
  path.write_text('\n'.join([header, *lines]) + '\n')
  return path


@pytest.fixture
def rising(tmp_path):
  x, y = paper_data.points('recipe_scalerl')
  return _csv(tmp_path / 'rising.csv', zip(x, y, strict=True))


def test_all_runs_of_the_paper_are_fitted_as_by_hand(capsys):
  code, out, err = _call(capsys, *_PAPER, '--json', '--r0=first')
  assert (code, err) == (0, '')
  document = json.loads(out)
  assert document['x'] == 'compute'
  assert document['y'] == 'pass_rate'
  assert document['method'] == 'posterior'
  assert len(document['runs']) == 9
  assert not document['failed']
  for name, run in document['runs'].items():
    x, y = paper_data.points(name)
    found = curves.fit(x, y, r0=y[0])
    assert run['params'] == found.params._asdict()
    assert run['intervals']['a'] == list(found.intervals.a)
  assert len(document['comparison']['crossings']) == 36


def test_text_is_readable(capsys, rising):
  args = ('--budget=60000', '--price=2', '--fit_until=8000')
  code, out, err = _call(capsys, rising, *args)
  assert (code, err) == (0, '')
  for part in (
    'pass_rate over compute; method posterior; intervals at 90 %',
    'R0 (free): fitted freely',
    'Verdict at a budget of 60000',
    'Held out: compute above 8000',
    'Sigmoid and power law',
  ):
    assert part in out
  assert 'nan' not in out


def test_a_command_line_leaves_nothing_to_the_next(capsys, rising):
  assert _call(capsys, rising, '--json', '--method=least_squares')[0] == 0
  code, out, _ = _call(capsys, rising)
  assert code == 0
  assert 'method posterior' in out


def test_the_launcher_runs_without_matplotlib(tmp_path, rising):
  script = str(_ROOT / 'launch' / 'fit.py')
  code = (
    "import runpy, sys; sys.modules['matplotlib'] = None;"
    f"runpy.run_path({script!r}, run_name='__main__')"
  )

  def call(*args):
    return subprocess.run(
      [sys.executable, '-c', code, rising, *args],
      cwd=tmp_path,
      env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )

  done = call('--json', '--min_compute=auto')
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['min_compute'] == 'auto'
  done = call('--out=there')
  assert done.returncode == 2
  assert done.stderr.startswith('error: --out draws with matplotlib')
  assert done.stderr.endswith("pip install 'scalerl_jax[plots]'\n")
  assert not (tmp_path / 'there').exists()


def test_out_holds_what_json_prints(capsys, tmp_path, rising):
  code, out, err = _call(capsys, rising, '--json', f'--out={tmp_path}/a/b')
  assert (code, err) == (0, '')
  assert json.loads(out) == json.loads((tmp_path / 'a/b/fit.json').read_text())
  assert sorted(p.name for p in (tmp_path / 'a/b').iterdir()) == [
    'curve.png',
    'curve_linear.png',
    'fit.json',
    'report.html',
  ]


def test_out_that_cannot_be_written_is_no_usage_error(capsys, tmp_path, rising):
  code, out, err = _call(capsys, rising, f'--out={rising}/deeper')
  assert code == 1
  assert err.startswith('error: --out=')
  assert err.count('\n') == 1
  assert 'Verdict' not in out
  assert 'Fit' in out


def test_a_run_that_cannot_be_fitted_does_not_stop_the_others(capsys):
  code, out, _ = _call(capsys, *_PAPER, '--fit_until=5000')
  assert code == 0
  error = 'fit_until=5000 leaves nothing to score: the last compute is 3792.5'
  assert f'  pipelinerl_8  {error}\n' in out


def test_notes_come_first_or_beside_json(capsys, tmp_path):
  path = _csv(tmp_path / 'a.csv', [(i, i / 10) for i in (1, 3, 2, 5, 4)])
  code, out, err = _call(capsys, path)
  assert (code, err) == (0, '')
  assert out.startswith(f'note: {path}: rows below the one before')
  code, out, err = _call(capsys, path, '--json')
  assert err.startswith(f'note: {path}: rows below the one before')
  assert json.loads(out)['notes']


def test_columns_of_different_units_are_noted(capsys, tmp_path, rising):
  other = _csv(tmp_path / 'b.csv', [(1, 0.1), (2, 0.2)], 'step,pass_rate')
  code, out, _ = _call(capsys, rising, other)
  assert code == 0
  assert 'compute, step: runs can be compared only if' in out


@pytest.mark.parametrize(
  ('flag', 'x', 'axis'),
  [
    ('--devices=8', 'hours', 'device-hours of hours'),
    ('--compute_per_step=2', 'step', 'step x 2'),
  ],
)
def test_compute_is_named_as_it_was_converted(capsys, tmp_path, flag, x, axis):
  rows = [(i, i / 10) for i in range(1, 7)]
  path = _csv(tmp_path / 'a.csv', rows, f'{x},pass_rate')
  code, out, _ = _call(capsys, path, f'--x={x}', flag, '--json')
  assert code == 0
  assert json.loads(out)['x'] == axis


def test_percent(capsys, tmp_path):
  x, y = paper_data.points('loss_cispo')
  path = _csv(tmp_path / 'a.csv', zip(x, 100 * y, strict=True))
  code, out, err = _call(capsys, path)
  assert (code, out) == (2, '')
  assert 'give percent=True (--percent)' in err
  code, out, _ = _call(capsys, path, '--percent', '--json')
  assert code == 0
  (run,) = json.loads(out)['runs'].values()
  assert run['params']['a'] == pytest.approx(
    curves.fit(x, y).params.a, abs=1e-4
  )


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--budget=-1'], 'budget=-1.0 must be positive and finite'),
    (['--budget=much'], '--budget'),
    (['--target=0.5'], 'target says nothing without a budget: give --budget'),
    (['--fit_until=1'], 'fit_until=1 leaves nothing to fit'),
    (['--fit_until=1e9'], 'fit_until=1e+09 leaves nothing to score'),
    (['--r0=2'], 'r0=2.0 must be in [0, 1)'),
    (['--r0=low'], "r0='low' must be a number or free or first"),
    (['--min_compute=no'], "min_compute='no' must be a number or auto"),
    (['--method=guess'], '--method=guess'),
    (['--y=score'], "has no column y='score' (--y); there are 'compute'"),
    (['--bugdet=5'], "Unknown command line flag 'bugdet'"),
    (['missing.csv'], 'missing.csv: cannot be read: No such file'),
  ],
)
def test_bad_input_is_one_line(capsys, rising, args, message):
  code, out, err = _call(capsys, rising, *args)
  assert (code, out) == (2, '')
  assert err.startswith('error: ')
  assert message in err
  assert err.count('\n') == 1


def test_output_that_cannot_be_written_is_one_line(
  capsys, monkeypatch, tmp_path, rising
):
  class Full(io.StringIO):
    def write(self, text):
      raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(sys, 'stdout', Full())
  code, _, err = _call(capsys, rising, f'--out={tmp_path / "out"}')
  assert code == 1
  assert err == 'error: the output cannot be written: No space left on device\n'
  assert (tmp_path / 'out' / 'fit.json').exists()


def test_out_that_is_no_directory_is_refused_before_the_work(
  capsys, tmp_path, rising
):
  for out in (rising, ''):
    code, text, err = _call(capsys, rising, f'--out={out}')
    assert (code, text) == (2, '')
    assert f'--out={out} is not a directory' in err


def test_names_that_a_terminal_cannot_show(capsys, monkeypatch, tmp_path):
  rows = [('grün', i, i / 10) for i in range(1, 7)]
  path = _csv(tmp_path / 'a.csv', rows, 'run,compute,pass_rate')
  raw = io.BytesIO()
  monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(raw, 'ascii'))
  code, _, err = _call(capsys, path, '--group=run')
  assert (code, err) == (0, '')
  assert 'gr?n' in raw.getvalue().decode('ascii')


def test_no_file_is_an_error(capsys):
  code, _, err = _call(capsys)
  assert (code, err) == (2, 'error: no FILE is given; --help tells more\n')


@pytest.mark.parametrize(
  'rows',
  [
    [(1, 0.2)],
    [(1, 0.2), (2, 0.3)],
    [(i, 0.4) for i in range(1, 9)],
    [(i, 0.9 - i / 10) for i in range(9)],
  ],
  ids=['one', 'two', 'constant', 'falling'],
)
def test_poor_data_are_fitted_with_warnings(capsys, tmp_path, rows):
  path = _csv(tmp_path / 'poor.csv', rows)
  code, out, err = _call(capsys, path, '--json', '--budget=100')
  assert (code, err) == (0, '')
  (run,) = json.loads(out)['runs'].values()
  assert run['warnings']
  assert run['verdict']['decision'] == 'not enough data'
  assert _call(capsys, path, '--min_compute=auto')[0] == 0


def test_help_tells_every_flag(capsys):
  code, out, _ = _call(capsys, '--help')
  assert code == 0
  found, _ = fit._parse_flags(['fit.py', 'x'])
  own = {name for name in found if name not in ('help', 'helpshort')}
  assert len(own) >= 17
  for name in own:
    assert f'--{name}' in out


def test_matplotlib_is_asked_for_before_the_work(capsys, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  code, _, err = _call(capsys, 'missing.csv', '--out=x')
  assert code == 2
  assert "pip install 'scalerl_jax[plots]'" in err
