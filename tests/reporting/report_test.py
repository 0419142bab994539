"""Tests of the report of a run."""

from html import parser as html_parser
import json
import re

import pytest

from scalerl_jax.reporting import plots
from scalerl_jax.reporting import report

_ATTACK = '<script>alert("x")</script><img src=http://evil.example/a.png>'


class _Page(html_parser.HTMLParser):
  """Collects elements, attributes and what is not closed."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attrs, self.open = [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attrs += attrs
    if tag != 'meta':
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attrs += attrs

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def _write_lines(path, rows):
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows), encoding='utf-8')


def _make_run(workdir):
  steps = range(0, 60, 10)
  rates = [0.2, 0.3, 0.38, 0.43, 0.46, 0.48]
  _write_lines(
    workdir / 'evals.jsonl',
    [
      {
        'step': s,
        'policy_version': s,
        'device_hours': 0.1 * s,
        'flops': 1e12 * s,
        'tokens': 1000 * s,
        'pass_rate': r,
        'pass_rate_stderr': 0.01 if s else None,
        'truncated_fraction': 0.1,
      }
      for s, r in zip(steps, rates, strict=True)
    ],
  )
  lines = [f'{0.1 * s},{r},,{s}\n' for s, r in zip(steps, rates, strict=True)]
  header = 'compute,pass_rate,stderr,step\n'
  (workdir / 'curve.csv').write_text(header + ''.join(lines))
  _write_lines(
    workdir / 'metrics.jsonl',
    [
      {
        'step': s,
        'reward_mean': -0.5 + s / 100,
        'pass_rate_train': s / 100,
        'truncated_fraction': 0.1,
        'interrupted_fraction': 0.05,
        'policy_entropy': None if s == 3 else 1.0,
        'lag_mean': 1.5,
        'lag_max': 4,
        'lag_histogram': [10, 20, 5],
        'ratio_max': 1.2 + s,
        'ratio_capped_fraction': 0.0,
        'zero_variance_fraction': 0.3,
        'tokens_per_s': 1e4,
      }
      for s in range(60)
    ],
  )
  fit = {
    'params': {'r0': 0.2, 'a': 0.5, 'b': 1.5, 'c_mid': 1.2},
    'intervals': {
      'r0': [0.2, 0.2],
      'a': [0.45, 0.55],
      'b': [1.0, None],
      'c_mid': [0.5, 2.0],
    },
    'identifiable': False,
    'warnings': ['the curve has not bent yet'],
    'forecast': {
      'compute': [1.0, 5.0, 10.0],
      'mean': [0.3, 0.46, 0.48],
      'low': [0.28, 0.44, None],
      'high': [0.32, 0.48, 0.52],
    },
    'verdict': {'decision': 'not enough data', 'probability': 0.5},
    'compute_axis': 'device_hours',
  }
  (workdir / 'fit.json').write_text(json.dumps(fit))
  (workdir / 'config.json').write_text(json.dumps({'note': _ATTACK}))
  _write_lines(
    workdir / 'samples.jsonl',
    [
      {
        'step': 50,
        'problem_id': _ATTACK,
        'prompt': _ATTACK,
        'response': f'{_ATTACK} \ud800 naïve </pre>',
        'reward': 1.0,
        'finish_reason': 'stop',
      }
    ],
  )


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp('whole')
  _make_run(path)
  return report.write_report(path).read_text(encoding='utf-8')


@pytest.fixture
def workdir(tmp_path):
  path = tmp_path / 'run'
  path.mkdir()
  _make_run(path)
  return path


def test_report_holds_every_section_and_well_formed_html(text):
  page = _Page(text)
  assert page.open == []
  for title in ('Curve', 'Evaluations', 'Training', 'Samples', 'Configuration'):
    assert f'<h2>{title}</h2>' in text
  assert page.tags.count('svg') == 11
  assert 'the curve has not bent yet' in text
  assert 'not enough data' in text


def test_text_of_the_model_is_escaped(text):
  page = _Page(text)
  assert not {'script', 'img', 'b<'} & set(page.tags)
  assert '&lt;script&gt;' in text
  assert not [name for name, _ in page.attrs if name.startswith('on')]


def test_name_of_the_directory_is_escaped(tmp_path):
  path = tmp_path / 'run<b>'
  path.mkdir()
  text = report.write_report(path).read_text(encoding='utf-8')
  assert '<title>run&lt;b&gt;</title>' in text


def test_report_refers_to_nothing_outside_itself(text):
  page = _Page(text)
  links = [v for k, v in page.attrs if k in ('href', 'src', 'xlink:href')]
  assert all(link.startswith('#') for link in links)
  assert not [v for _, v in page.attrs if v and '://' in v]


def test_ids_are_unique_and_references_resolve(text):
  page = _Page(text)
  ids = [v for k, v in page.attrs if k == 'id']
  assert len(ids) == len(set(ids))
  used = [v[1:] for k, v in page.attrs if k == 'href']
  used += [
    m for _, v in page.attrs for m in re.findall(r'url\(#(.*?)\)', v or '')
  ]
  assert set(used) <= set(ids)


def test_the_same_run_gives_the_same_bytes(workdir):
  first = report.write_report(workdir).read_bytes()
  assert report.write_report(workdir).read_bytes() == first
  image = plots.write_curve_png(workdir)
  first = image.read_bytes()
  assert plots.write_curve_png(workdir).read_bytes() == first
  assert first.startswith(b'\x89PNG')


def test_an_empty_run_has_a_report_and_no_plot(tmp_path):
  text = report.write_report(tmp_path).read_text(encoding='utf-8')
  assert 'No evaluation has finished yet' in text
  assert plots.write_curve_png(tmp_path) is None


@pytest.mark.parametrize(
  'missing',
  ['evals.jsonl', 'curve.csv', 'fit.json', 'metrics.jsonl', 'samples.jsonl'],
)
def test_a_missing_file_leaves_its_section_out(workdir, missing):
  (workdir / missing).unlink()
  assert report.write_report(workdir).exists()


def test_a_single_point_at_compute_zero_is_drawn(tmp_path):
  (tmp_path / 'curve.csv').write_text(
    'compute,pass_rate,stderr,step\n0.0,0.2,0.01,0\n'
  )
  assert plots.write_curve_png(tmp_path) is not None
  assert 'No fit yet' in report.write_report(tmp_path).read_text()


def test_a_run_in_which_nothing_was_trained_on_is_drawn(workdir):
  path = workdir / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  _write_lines(path, [row | {'ratio_max': 0.0} for row in rows])
  assert report.write_report(workdir).exists()


def test_a_last_line_cut_short_is_left_out(workdir):
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 60, "rew')
  assert report.write_report(workdir).exists()


def test_damage_elsewhere_is_named(workdir):
  path = workdir / 'metrics.jsonl'
  path.write_text('{"step": 0}\nbroken\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r'metrics\.jsonl:2'):
    report.write_report(workdir)


def test_a_missing_directory_is_named(tmp_path):
  with pytest.raises(NotADirectoryError, match='nowhere'):
    report.write_report(tmp_path / 'nowhere')
