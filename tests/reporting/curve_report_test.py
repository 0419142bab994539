"""Tests of the files about curves."""

import json
import re

import numpy as np
import pytest

from scalerl_jax.reporting import curve_report
from scalerl_jax.reporting import curve_summary
from tests.curves import paper_data
from tests.reporting import report_test

_ATTACK = '_<script>alert("$x")</script>--><img src=http://evil.example/a.png>'
_FILES = ('fit.json', 'curve.png', 'curve_linear.png', 'report.html')


def _write(out, runs, **options):
  document = curve_summary.summarize(
    runs, curve_summary.Options(**options), x=_ATTACK, y='é$', notes=[_ATTACK]
  )
  curve_report.write(out, document)
  return (out / 'report.html').read_text(encoding='utf-8')


def _run(series, name=None):
  return curve_summary.Run(name or series, *paper_data.points(series))


@pytest.fixture(scope='module')
def out(tmp_path_factory):
  path = tmp_path_factory.mktemp('out')
  x = np.array([0.0, 2000.0, 4000.0, 9000.0])
  known = np.array([0.01, np.nan, 0.01, 0.01])
  runs = [
    _run('batch_2048'),
    _run('loss_cispo', _ATTACK),
    curve_summary.Run('few\nlines', x, np.array([0.1, 0.2, 0.3, 0.4]), known),
  ]
  _write(path, runs, fit_until=6000.0, budget=2e5, min_compute=1500.0)
  return path


@pytest.fixture(scope='module')
def text(out):
  return (out / 'report.html').read_text(encoding='utf-8')


def test_every_file_is_written_and_nothing_else(out):
  assert sorted(p.name for p in out.iterdir()) == sorted(_FILES)
  document = json.loads((out / 'fit.json').read_text())
  assert len(document['runs']) == 3
  for name in ('curve.png', 'curve_linear.png'):
    assert (out / name).read_bytes().startswith(b'\x89PNG')


def test_the_page_is_well_formed_and_holds_every_part(text):
  page = report_test._Page(text)
  assert page.open == []
  # Two of all runs, one of each, the slopes.
  assert page.tags.count('svg') == 6
  for title in ('Fit', 'Forecast', 'Verdict', 'Held out', 'Comparison'):
    assert f'<h2>{title}' in text
  assert 'Slopes around the mean ceiling' in text


def test_text_of_the_data_is_escaped(text):
  page = report_test._Page(text)
  assert not {'script', 'img'} & set(page.tags)
  assert '<script' not in text
  assert '&lt;script&gt;' in text
  assert not [name for name, _ in page.attrs if name.startswith('on')]


def test_the_page_refers_to_nothing_outside_itself(text, tmp_path):
  page = report_test._Page(text)
  links = [v for k, v in page.attrs if k in ('href', 'src', 'xlink:href')]
  assert all(link.startswith('#') for link in links)
  ids = [v for k, v in page.attrs if k == 'id']
  assert len(ids) == len(set(ids))
  used = [
    m for _, v in page.attrs for m in re.findall(r'url\(#(.*?)\)', v or '')
  ]
  assert {*used, *(link[1:] for link in links)} <= set(ids)
  document = curve_summary.summarize(
    [_run('loss_cispo')], curve_summary.Options()
  )
  curve_report.write(tmp_path, document)
  assert 'http' not in (tmp_path / 'report.html').read_text()


def test_the_same_data_give_the_same_bytes(tmp_path):
  for name in ('one', 'two'):
    (tmp_path / name).mkdir()
    _write(tmp_path / name, [_run('loss_cispo')])
  for name in _FILES:
    first, second = ((tmp_path / d / name).read_bytes() for d in ('one', 'two'))
    assert first == second


def test_a_document_that_was_stored_gives_the_same_page(out, text, tmp_path):
  document = json.loads((out / 'fit.json').read_text())
  curve_report.write(tmp_path, document)
  assert (tmp_path / 'report.html').read_text(encoding='utf-8') == text


@pytest.mark.parametrize(
  ('x', 'y'),
  [
    ([5.0], [0.3]),
    ([0.0, 5.0], [0.3, 0.3]),
    ([1.0, 2.0, 3.0, 4.0, 5.0], [0.6, 0.5, 0.4, 0.3, 0.2]),
  ],
)
def test_poor_data_are_drawn(tmp_path, x, y):
  text = _write(tmp_path, [curve_summary.Run('p', np.array(x), np.array(y))])
  assert 'class="warning"' in text


def test_characters_that_steer_are_shown_as_question_marks(tmp_path):
  x, y = paper_data.points('loss_cispo')
  text = _write(tmp_path, [curve_summary.Run('a\0\x1b[1m\u202eb', x, y)])
  assert 'a??[1m?b' in text
  assert not set(text) & set('\0\x1b\u202e')


def test_a_page_that_cannot_be_written_leaves_no_part(tmp_path):
  (tmp_path / 'report.html').mkdir()
  with pytest.raises(OSError, match='report'):
    _write(tmp_path, [_run('loss_cispo')])
  assert not list(tmp_path.glob('*.part'))
  assert not (tmp_path / 'fit.json').exists()


def test_many_evaluations_do_not_make_a_large_page(tmp_path):
  x = np.linspace(1.0, 60.0, 20_000)
  y = paper_data.law(x, 0.2, 0.7, 1.8, 15.0)
  text = _write(tmp_path, [curve_summary.Run('a', x, y)])
  assert len(text) < 1_000_000
  assert 'data:image/png;base64' in text


def test_twenty_runs_are_drawn(tmp_path):
  x, y = paper_data.points('recipe_scalerl')
  runs = [
    curve_summary.Run(f'run {i}', x[::3], y[::3] - i / 100) for i in range(20)
  ]
  text = _write(tmp_path, runs)
  assert report_test._Page(text).tags.count('svg') == 23


def test_runs_whose_slopes_make_no_sense_are_drawn(tmp_path):
  x, y = paper_data.points('recipe_grpo')
  runs = [
    curve_summary.Run('low', x, y - 0.4),
    curve_summary.Run('high', x, y + 0.4),
  ]
  text = _write(tmp_path, runs, r0='first')
  assert 'must be in (r0, 1]' in text
