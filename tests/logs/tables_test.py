"""Files with columns, as trainers and exports write them."""

import json
import time

import numpy as np
import pytest

from scalerl_jax import logs

pytestmark = pytest.mark.filterwarnings('error')


def write(path, text, **kwargs):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, newline='', **kwargs)
  return path


def one(path, **options):
  (curve,), notes = logs.read(path, **options)
  return curve, notes


def points(curve):
  pairs = zip(curve.compute.tolist(), curve.pass_rate.tolist(), strict=True)
  return [(x, pytest.approx(y)) for x, y in pairs]


def refusal(path, **options):
  with pytest.raises(ValueError, match=r'.') as caught:
    logs.read(path, **options)
  message = str(caught.value)
  assert '\n' not in message
  assert '\x00' not in message
  return message


# --- Own files. -------------------------------------------------------------


def test_own_curve(tmp_path):
  path = write(
    tmp_path / 'run7' / 'curve.csv',
    'compute,pass_rate,stderr,step\n0.5,0.25,0.1,0\n1.5,0.5,,10\n',
  )
  curve, notes = one(path)
  assert curve.name == 'run7'
  assert (curve.x, curve.y) == ('compute', 'pass_rate')
  assert points(curve) == [(0.5, 0.25), (1.5, 0.5)]
  np.testing.assert_array_equal(curve.stderr, [0.1, np.nan])
  assert curve.compute.dtype == curve.pass_rate.dtype == np.float64
  assert notes == []
  # The run's directory says the same.
  assert points(one(path.parent)[0]) == points(curve)
  assert one(str(path.parent))[0].name == 'run7'


def test_no_standard_error_is_none(tmp_path):
  path = write(
    tmp_path / 'curve.csv', 'compute,pass_rate,stderr,step\n1,0.5,,1\n'
  )
  assert one(path)[0].stderr is None


def test_own_evals_on_each_axis(tmp_path):
  rows = [
    {
      'step': 10 * i,
      'policy_version': i,
      'device_hours': 0.5 * i,
      'flops': 1e15 * i,
      'tokens': 1000 * i,
      'pass_rate': 0.1 * i,
      'pass_rate_stderr': None if i == 1 else 0.01,
      'num_problems': 8,
      'samples_per_problem': 2,
      'truncated_fraction': 0.0,
    }
    for i in (1, 2)
  ]
  text = ''.join(json.dumps(r) + '\n' for r in rows)
  path = write(tmp_path / 'run' / 'evals.jsonl', text)
  curve, _ = one(path)
  assert (curve.name, curve.x) == ('run', 'device_hours')
  assert points(curve) == [(0.5, 0.1), (1.0, 0.2)]
  np.testing.assert_array_equal(curve.stderr, [np.nan, 0.01])
  for x, first in (('flops', 1e15), ('tokens', 1e3), ('step', 10)):
    assert one(path, x=x)[0].compute[0] == first


def test_directory_of_runs(tmp_path):
  for name in ('b', 'a'):
    write(tmp_path / name / 'curve.csv', 'compute,pass_rate\n1,0.5\n')
  curves, _ = logs.read(tmp_path)
  assert [c.name for c in curves] == ['a', 'b']


# --- Formats. ---------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('a.csv', 'step,acc\n1,0.25\n2,0.5\n'),
    ('a.csv', '\ufeffstep,acc\r\n1,0.25\r\n2,0.5\r\n'),
    ('a.csv', '"step","acc","text"\n1,0.25,"a, ""b""\nc"\n\n2,0.5,\n'),
    ('a.csv', 'step;acc\n1;0.25\n2;0.5\n'),
    ('a.tsv', 'step\tacc\n1\t0.25\n2\t0.5\n'),
    ('a.txt', 'step\tacc\n1\t0.25\n2\t0.5'),
    ('a.jsonl', '{"step": 1, "acc": 0.25}\n\n{"step": 2, "acc": "0.5"}\n'),
    ('a.log', '\ufeff{"step": 1, "acc": 0.25}\r\n{"step": 2, "acc": 0.5}'),
    ('a.json', '[{"step": 1, "acc": 0.25},\n {"step": 2, "acc": 0.5}]'),
    (
      'trainer_state.json',
      '{\n "log_history": [\n  {"step": 1, "acc": 0.25},\n'
      '  {"step": 2, "acc": 0.5}]}',
    ),
    (
      'trainer_state.json',
      '{"log_history": [{"step": 1, "acc": 0.25}, {"step": 2, "acc": 0.5}]}',
    ),
  ],
)
def test_text_formats(tmp_path, name, text):
  curve, notes = one(write(tmp_path / name, text, encoding='utf-8'))
  assert points(curve) == [(1, 0.25), (2, 0.5)]
  assert (curve.x, curve.y) == ('step', 'acc')
  assert notes == []


def test_parquet(tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  table = pyarrow.table(
    {'_step': [1, 2, 3], 'val/acc': [0.25, None, 0.5], 'ok': [True] * 3}
  )
  parquet.write_table(table, tmp_path / 'a.parquet')
  curve, notes = one(tmp_path / 'a.parquet')
  assert points(curve) == [(1, 0.25), (3, 0.5)]
  assert notes[0].endswith("rows without 'val/acc' dropped: 1 (first: row 2)")
  assert 'not a number' in refusal(tmp_path / 'a.parquet', y='ok')
  (tmp_path / 'cut.parquet').write_bytes(
    (tmp_path / 'a.parquet').read_bytes()[:-30]
  )
  assert 'damaged Parquet' in refusal(tmp_path / 'cut.parquet')


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'pyarrow', None)
  (tmp_path / 'a.parquet').write_bytes(b'PAR1')
  message = refusal(tmp_path / 'a.parquet')
  assert "pip install 'scalerl_jax[parquet]'" in message


# --- Weights & Biases. ------------------------------------------------------

_WIDE = (
  '"Step","run-a - val/acc","run-a - val/acc__MIN","run-a - val/acc__MAX",'
  '"b - c - val/acc","b - c - val/acc__MIN","b - c - val/acc__MAX"\n'
  '0,0.1,0.0,9,,,\n5,,,,0.2,0.2,0.2\n10,0.3,0.3,0.3,0.4,0.4,0.4\n'
)


def test_wide_export_is_a_curve_for_each_run(tmp_path):
  path = write(tmp_path / 'wandb.csv', _WIDE)
  curves, notes = logs.read(path)
  assert [(c.name, c.x, c.y) for c in curves] == [
    ('run-a', 'Step', 'val/acc'),
    ('b - c', 'Step', 'val/acc'),
  ]
  assert points(curves[0]) == [(0, 0.1), (10, 0.3)]
  assert points(curves[1]) == [(5, 0.2), (10, 0.4)]
  assert notes == [
    f"{path} ({run}): rows without 'val/acc' dropped: 1 (first: line {line})"
    for run, line in (('run-a', 3), ('b - c', 2))
  ]
  (curve,), _ = logs.read(path, y='run-a - val/acc')
  assert points(curve) == points(curves[0])


def test_wide_export_with_other_names(tmp_path):
  text = _WIDE.replace('Step', 'train/samples').replace('val/acc', 'x/y')
  curves, _ = logs.read(write(tmp_path / 'wandb.csv', text))
  assert {(c.x, c.y) for c in curves} == {('train/samples', 'x/y')}


def test_wide_export_of_one_run_without_bounds(tmp_path):
  path = write(tmp_path / 'wandb.csv', 'Step,r - acc\n1,0.5\n')
  assert one(path)[0].name == 'r'


def test_run_without_the_metric_is_noted(tmp_path):
  text = 'Step,a - acc,b - loss,b - kl\n1,0.5,2,3\n2,0.6,1,2\n'
  (curve,), notes = logs.read(write(tmp_path / 'wandb.csv', text))
  assert curve.name == 'a'
  assert 'loss' in notes[0]
  assert notes[0].endswith(': skipped')


def test_long_export_with_a_group_column(tmp_path):
  path = write(
    tmp_path / 'long.csv',
    'Name,_step,acc,seed\nx,1,0.1,1\ny,1,0.2,1\nx,2,0.3,2\ny,2,,2\n',
  )
  curves, _ = logs.read(path, group='Name')
  assert [(c.name, points(c)) for c in curves] == [
    ('x', [(1, 0.1), (2, 0.3)]),
    ('y', [(1, 0.2)]),
  ]
  curves, notes = logs.read(path, group='Name, seed')
  assert [c.name for c in curves] == ['x,seed=1', 'y,seed=1', 'x,seed=2']
  assert f"{path}: group 'y,seed=2' has no point: skipped" in notes
  assert "'sed'" in refusal(path, group='Name,sed')


def test_runs_in_one_file_are_not_split_silently(tmp_path):
  path = write(
    tmp_path / 'a.csv',
    'step,acc,trial_no,note\n1,0.1,1,a\n1,0.2,2,a\n2,0.3,1,b\n2,0.4,2,a\n',
  )
  curve, notes = one(path)
  assert len(curve.compute) == 4
  assert notes[0].endswith(
    'rows whose x has another y already, both kept: 2 (first: line 3)'
  )
  assert notes[1].endswith("split it with group (--group): 'trial_no'")
  path = write(tmp_path / 'b.csv', 'step,acc,seed\n1,0.1,1\n2,0.2,2\n')
  assert "(--group): 'seed'" in one(path)[1][0]


def test_groups_whose_names_collide_stay_apart(tmp_path):
  path = write(tmp_path / 'a.csv', 'p,q,step,acc\n"a,b",c,1,0\na,"b,c",1,1\n')
  curves, _ = logs.read(path, group='p,q')
  assert [c.name for c in curves] == [f'{path}: a,b,c', f'{path}: a,b,c #2']


def test_names_are_unique(tmp_path):
  paths = [tmp_path / d / 'a.csv' for d in 'pq']
  for path in paths:
    write(path, 'step,acc,seed\n1,0.1,1\n1,0.2,2\n')
  curves, _ = logs.read(paths)
  assert [c.name for c in curves] == [f'{paths[0]}: a', f'{paths[1]}: a']
  curves, _ = logs.read(paths, group='seed')
  assert curves[0].name == f'{paths[0]}: seed=1'
  assert len({c.name for c in curves}) == 4


def test_a_file_that_is_given_twice_is_refused(tmp_path):
  path = write(tmp_path / 'a.csv', 'step,acc\n1,0.1\n')
  with pytest.raises(ValueError, match='given twice'):
    logs.read([path, tmp_path / '..' / tmp_path.name / 'a.csv'])


# --- Choice of columns. -----------------------------------------------------


@pytest.mark.parametrize(
  ('header', 'x', 'y'),
  [
    ('step,flops,compute,pass_rate', 'compute', 'pass_rate'),
    ('Step,tokens,flops,score', 'flops', 'score'),
    ('Step,_step,val-core/gsm8k/acc/mean@16,acc', '_step', None),
    ('step,eval_accuracy,reward', 'step', 'eval_accuracy'),
    ('global_step,eval/reward', 'global_step', 'eval/reward'),
    ('gpu_hours,device_hours,ACC', 'device_hours', 'ACC'),
    ('Wall time,Step,Value', 'Step', 'Value'),
  ],
)
def test_guesses(tmp_path, header, x, y):
  n = len(header.split(','))
  path = write(tmp_path / 'a.csv', header + '\n' + ','.join(['0.5'] * n) + '\n')
  curve, _ = one(path)
  assert (curve.x, curve.y) == (x, y or 'val-core/gsm8k/acc/mean@16')


def test_no_guess_lists_the_columns(tmp_path):
  path = write(tmp_path / 'a.csv', 'when,a/acc,b/acc,loss\n1,0.1,0.2,3\n')
  message = refusal(path)
  assert "'a/acc', 'b/acc'" in message
  assert '--y' in message
  message = refusal(path, y='a/acc')
  assert "'when', 'a/acc', 'b/acc', 'loss'" in message
  assert '--x' in message
  message = refusal(path, x='when', y='acc')
  assert "y='acc'" in message
  assert "'loss'" in message
  assert 'both' in refusal(path, x='loss', y='loss')
  assert "'nope'" in refusal(path, x='when', y='a/acc', stderr='nope')
  assert one(path, x='when', y='b/acc', stderr='a/acc')[0].stderr == [0.1]
  path = write(tmp_path / 'b.csv', 'step,loss\n1,2\n')
  assert "'step', 'loss'" in refusal(path)


# --- Values. ----------------------------------------------------------------


def test_numbers_as_text(tmp_path):
  path = write(
    tmp_path / 'a.csv',
    'tokens,acc\n"1,234.5",61 %\n"2,000,000",62%\n3e6,\n, 0.5\n4e6,NaN\n',
  )
  curve, notes = one(path)
  assert points(curve) == [(1234.5, 0.61), (2e6, 0.62)]
  assert notes == [
    f"{path}: values of 'tokens' read without thousands separators: 2"
    ' (first: line 2)',
    f"{path}: values of 'acc' divided by 100: 2 (first: line 2)",
    f"{path}: rows without 'tokens' dropped: 1 (first: line 5)",
    f"{path}: rows without 'acc' dropped: 2 (first: line 4)",
  ]
  # A percent sign is not divided twice.
  assert one(path, percent=True)[0].pass_rate.tolist() == [0.61, 0.62]


def test_percent_is_asked_for(tmp_path):
  path = write(
    tmp_path / 'a.csv', 'step,acc,acc_stderr\n1,0.5,1\n2,100,2\n3,61,\n'
  )
  message = refusal(path)
  assert 'percent=True (--percent)' in message
  assert 'line 3' in message
  curve, notes = one(path, percent=True)
  assert points(curve) == [(1, 0.005), (2, 1.0), (3, 0.61)]
  np.testing.assert_allclose(curve.stderr, [0.01, 0.02, np.nan])
  assert notes[0] == (
    f"{path}: values of 'acc' divided by 100: 3 (first: line 2)"
  )


@pytest.mark.parametrize(
  ('row', 'part'),
  [
    ('-1,0.5', "'step' is -1 on line 3"),
    ('inf,0.5', "'step' is inf on line 3; it must be finite"),
    ('1e999,0.5', 'must be finite'),
    ('2,-inf', "'acc' is -inf on line 3"),
    ('2,-0.5', '--y'),
    ('2,101', '--y'),
    ('2,True', "'acc' is 'True' on line 3, which is not a number"),
    ('2,"0,61"', "'0,61'"),
    ('2,1_0', "'1_0'"),
    ('abc,0.5', "'abc' on line 3"),
    ('0x10,0.5', "'0x10'"),
    ("2,__import__('os').abort()", 'not a number'),
  ],
)
def test_values_that_are_refused(tmp_path, row, part):
  path = write(tmp_path / 'a.csv', f'step,acc\n1,0.5\n{row}\n')
  assert part in refusal(path)


@pytest.mark.parametrize('value', ['true', '[0.5]', '"x"'])
def test_json_values_that_are_no_numbers(tmp_path, value):
  path = write(tmp_path / 'a.jsonl', f'{{"step": 1, "acc": {value}}}\n')
  assert "'acc' is" in refusal(path)
  assert 'line 1' in refusal(path)


def test_a_huge_integer_is_not_finite(tmp_path):
  path = write(tmp_path / 'a.jsonl', '{"step": 1%s, "acc": 0.5}' % ('0' * 400))
  assert 'must be finite' in refusal(path)


def test_negative_standard_error(tmp_path):
  path = write(tmp_path / 'a.csv', 'step,acc,stderr\n1,0.5,-0.1\n')
  assert "'stderr' is -0.1 on line 2" in refusal(path)


def test_order_and_repetitions(tmp_path):
  path = write(
    tmp_path / 'a.csv', 'step,acc\n3,0.3\n1,0.1\n2,0.9\n2,0.2\n1,0.1\n2,0.9\n'
  )
  curve, notes = one(path)
  assert points(curve) == [(1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3)]
  assert notes == [
    f'{path}: rows below the one before, sorted by x: 2 (first: line 3)',
    f'{path}: repeated rows (same x and y) dropped: 2 (first: line 6)',
    f'{path}: rows whose x has another y already, both kept: 1 (first: line 5)',
  ]


# --- Compute. ---------------------------------------------------------------


def test_wall_time_becomes_device_hours(tmp_path):
  path = write(
    tmp_path / 'a.csv',
    'run,_timestamp,_runtime,secs,my_Hours,step,acc\n'
    'p,1700000000,0,0,0,1,\np,1700003600,3600,3600,1,2,0.5\n'
    'q,1700100000,0,0,0,1,\nq,1700107200,7200,7200,2,2,0.5\n',
  )
  for options, expected in (
    ({'x': '_runtime'}, [1, 2]),
    ({'x': '_timestamp'}, [1, 2]),
    ({'devices': 8.0}, [8, 16]),
    ({'devices': 8.0, 'x': '_timestamp'}, [8, 16]),
    ({'devices': 8.0, 'x': 'secs'}, [8, 16]),
    ({'devices': 8.0, 'x': 'my_Hours'}, [8, 16]),
    ({'x': 'secs'}, [3600, 7200]),
    ({'compute_per_step': 1e20}, [2e20, 2e20]),
  ):
    curves, notes = logs.read(path, group='run', **options)
    assert [c.compute.tolist() for c in curves] == [[v] for v in expected]
    assert any('converted' in n or 'multiplied' in n for n in notes) == (
      options != {'x': 'secs'}
    )
  assert 'devices' in refusal(path, x='step', devices=8.0)
  assert 'compute_per_step' in refusal(path, x='_runtime', compute_per_step=2.0)
  assert 'exclude' in refusal(path, compute_per_step=2.0, devices=8.0)
  assert 'devices=0' in refusal(path, devices=0.0)


def test_time_that_is_nowhere(tmp_path):
  path = write(tmp_path / 'a.csv', '_timestamp,acc\n,0.5\n')
  assert 'no row has both' in refusal(path, x='_timestamp')


# --- Faults. ----------------------------------------------------------------


@pytest.mark.parametrize(
  ('content', 'part'),
  [
    (b'', 'is empty'),
    (b' \r\n\n', 'is empty'),
    (b'step,acc\n', 'no row'),
    (b'[]', 'no row'),
    (b'{"log_history": []}', 'no row'),
    (b'\x80\x03\xff\xfe' * 99, 'neither UTF-8'),
    (b'step,acc\n1,\x00\n', 'neither UTF-8'),
    ('step,acc\n1,1\n'.encode('utf-16'), 'neither UTF-8'),
    (b'PAR1garbage', 'damaged Parquet'),
    (b'{"step": 1, "acc": 0.1}\n{"step": 2, "ac', ':2: not valid JSON'),
    (b'[{"step": 1},\n{"step":', ':2: not valid JSON'),
    (b'[' * 99999, 'not valid JSON'),
    (b'{"step": 1' + b'0' * 9999 + b', "acc": 1}', ':1: not valid JSON'),
    (b'[1, 2]', 'row 1 must be a JSON object, got int'),
    (b'{"step": 1, "acc": 1}\n3\n', 'line 2 must be a JSON object'),
    (b'step,acc,acc\n1,1,1\n', "repeats 'acc'"),
    (b'step,acc\n1,"0.5\n', 'not CSV'),
    (b'step,acc\n1,"' + b'x' * 200_000 + b'"\n', 'not CSV'),
    (b'step,acc\n1\n2,3,4\n', 'dropped: 2 (first: line 2)'),
    (b'just some prose\nand more\n', "'just some prose'"),
    (b'x' * 9999 + b'\n1\n', '...'),
    (b'step,acc\n1,\n', 'no row has both'),
  ],
)
def test_faults(tmp_path, content, part):
  path = tmp_path / 'a.log'
  path.write_bytes(content)
  message = refusal(path)
  assert part in message
  assert message.startswith(str(path))
  assert len(message) < 2000


def test_ragged_rows_are_counted(tmp_path):
  path = write(tmp_path / 'a.csv', 'step,acc\n1,0.5\n2\n3,1,234\n4,0.6\n5,')
  curve, notes = one(path)
  assert points(curve) == [(1, 0.5), (4, 0.6)]
  assert notes[0].endswith('header dropped: 2 (first: line 3)')
  assert notes[1].endswith("'acc' dropped: 1 (first: line 6)")


def test_nameless_columns(tmp_path):
  path = write(tmp_path / 'a.csv', ',step,acc,\n0,1,0.5,\n')
  assert points(one(path)[0]) == [(1, 0.5)]


def test_paths_that_hold_nothing(tmp_path):
  assert 'No such file' in refusal(tmp_path / 'missing.csv')
  write(tmp_path / 'notes.md', 'step,acc\n1,1\n')
  assert 'neither curve.csv nor' in refusal(tmp_path)
  assert 'at least one' in refusal([])


def test_many_rows_take_seconds_at_most(tmp_path):
  n = 100_000
  rows = ''.join(f'{i},{(i % 997) / 997},"{i % 3}"\n' for i in range(n))
  csv = write(tmp_path / 'a.csv', 'step,acc,seed\n' + rows)
  lines = ''.join(f'{{"step":{i},"acc":{i / n}}}\n' for i in range(n))
  jsonl = write(tmp_path / 'a.jsonl', lines)
  # Columns that differ in each row must not cost their product.
  odd = ''.join(f'{{"step":{i},"acc":0.5,"k{i}":1}}\n' for i in range(n))
  odd = write(tmp_path / 'odd.jsonl', odd)
  # A third of a second each; the tests check the types of every call.
  for path in (csv, jsonl, odd):
    start = time.process_time()
    assert len(one(path)[0].compute) == n
    assert time.process_time() - start < 10


# --- What other tools write. ------------------------------------------------


def test_objects_in_json_become_columns(tmp_path):
  rows = [
    {
      'step': i,
      'data': {'val-core/gsm8k/acc/mean@16': i / 10, 'loss': {'a': 1}},
    }
    for i in (1, 2)
  ]
  path = write(tmp_path / 'a.jsonl', '\n'.join(map(json.dumps, rows)))
  (curve,), _ = logs.read(path)
  assert curve.y == 'data/val-core/gsm8k/acc/mean@16'
  assert curve.pass_rate.tolist() == [0.1, 0.2]


def test_the_evaluation_is_preferred_to_training(tmp_path):
  text = 'step,reward,eval_reward\n1,0.1,0.2\n'
  (curve,), _ = logs.read(write(tmp_path / 'a.csv', text))
  assert curve.y == 'eval_reward'


def test_names_may_have_capitals_and_spaces(tmp_path):
  text = 'Compute,Pass Rate\n1,0.1\n'
  (curve,), _ = logs.read(write(tmp_path / 'a.csv', text))
  assert (curve.x, curve.y) == ('Compute', 'Pass Rate')


def test_decimal_commas_and_comments(tmp_path):
  text = '# of 2026\n\n# seed 1\nstep;acc\n1,065;0,291\n2000;,5\n'
  (curve,), _ = logs.read(write(tmp_path / 'a.csv', text))
  assert curve.compute.tolist() == [1.065, 2000]
  assert curve.pass_rate.tolist() == [0.291, 0.5]
  bad = write(tmp_path / 'b.csv', 'step,acc\n1,"0,291"\n')
  assert "'acc' is '0,291'" in refusal(bad)


def test_a_header_may_be_marked_as_a_comment(tmp_path):
  text = '# compute,pass_rate\n1,0.25\n2,0.5\n'
  (curve,), _ = logs.read(write(tmp_path / 'a.csv', text))
  assert (curve.x, curve.y) == ('compute', 'pass_rate')
  assert len(curve.compute) == 2


_BOUNDED = '"{x}","a - _step","a - acc","a - acc__MIN","a - acc__MAX"\n'


@pytest.mark.parametrize(
  ('x', 'start', 'options', 'label', 'compute'),
  [
    ('Step', 0, {'compute_per_step': 2.0}, 'Step x 2', [0, 7200]),
    (
      'train/global_step',
      0,
      {'compute_per_step': 2.0},
      'train/global_step x 2',
      [0, 7200],
    ),
    ('Wall Time', 1.7e9, {}, 'hours of Wall Time', [0, 1]),
    (
      'Relative Time (Process)',
      0,
      {'devices': 8.0},
      'device-hours of Relative Time (Process)',
      [0, 8],
    ),
  ],
)
def test_axes_of_wide_exports(tmp_path, x, start, options, label, compute):
  rows = [f'{start + 3600 * i},{i},0.{i + 1},0,0' for i in range(2)]
  path = write(
    tmp_path / 'a.csv', _BOUNDED.format(x=x) + '\n'.join(rows) + '\n'
  )
  (curve,), _ = logs.read(path, **options)
  assert curve.x == label
  assert curve.compute.tolist() == compute


def test_a_guess_of_the_only_metric_is_noted(tmp_path):
  text = 'Step,a - train/loss\n1,0.3\n2,0.2\n'
  _, notes = logs.read(write(tmp_path / 'a.csv', text))
  assert any("y is 'train/loss'" in note for note in notes)


def test_fractions_that_are_read_as_percent_are_noted(tmp_path):
  path = write(tmp_path / 'a.csv', 'step,acc\n1,0.3\n2,0.5\n')
  _, notes = logs.read(path, percent=True)
  assert any('drop percent' in note for note in notes)


def test_standard_errors_are_checked(tmp_path):
  path = write(tmp_path / 'a.csv', 'step,acc,stderr\n1,0.3,1.2\n')
  assert "'stderr' is 1.2" in refusal(path)
  assert 'y and stderr are both' in refusal(path, stderr='acc')


@pytest.mark.parametrize('x', ['time_ms', 'epoch', 'minutes'])
def test_times_in_other_units_are_refused(tmp_path, x):
  path = write(tmp_path / 'a.csv', f'{x},acc\n1,0.3\n')
  assert 'is not in seconds' in refusal(path, x=x, devices=8.0)


def test_an_empty_run_does_not_hide_the_others(tmp_path):
  for name, text in (
    ('a', 'step,acc\n1,0.3\n'),
    ('b', 'step,acc\n'),
    ('c', ''),
  ):
    (tmp_path / name).mkdir()
    write(tmp_path / name / 'curve.csv', text)
  (curve,), notes = logs.read(tmp_path)
  assert curve.name == 'a'
  assert sum('skipped' in note for note in notes) == 2
