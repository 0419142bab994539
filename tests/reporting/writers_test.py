import contextlib
import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from scalerl_jax import records
from scalerl_jax.reporting import run_files
from scalerl_jax.reporting import writers


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'metrics.jsonl'


def opened(path):
  return contextlib.closing(writers.JsonlWriter(path))


def write(path, *rows):
  with opened(path) as writer:
    for row in rows:
      writer.write(row)


# --- JSONL. -----------------------------------------------------------------


def test_rows_are_lines_in_the_order_written(path):
  write(path, {'step': 1, 'loss': 0.5}, {'step': 2, 'text': 'é\n"'})
  assert path.read_bytes() == (
    b'{"step": 1, "loss": 0.5}\n{"step": 2, "text": "\\u00e9\\n\\""}\n'
  )


def test_opening_again_appends(path):
  write(path, {'step': 1})
  write(path, {'step': 2})
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_row_is_on_disk_at_once(path):
  with opened(path) as writer:
    writer.write({'step': 1})
    assert path.read_text() == '{"step": 1}\n'


def test_offset_is_the_size_of_the_file_however_it_was_opened(path):
  with opened(path) as writer:
    assert writer.offset() == 0
    writer.write({'text': 'é'})
    assert writer.offset() == path.stat().st_size
  with opened(path) as writer:
    assert writer.offset() == path.stat().st_size


@pytest.mark.parametrize('reopened', [False, True])
def test_rows_after_a_checkpoint_are_cut_and_written_again(path, reopened):
  writer = writers.JsonlWriter(path)
  writer.write({'step': 1})
  offset = writer.offset()
  writer.write({'step': 2, 'from': 'the first life'})
  writer.write({'step': 3})
  if reopened:
    writer.close()
    writer = writers.JsonlWriter(path)
  writer.truncate(offset)
  assert writer.offset() == offset
  writer.write({'step': 2})
  writer.close()
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_half_written_line_is_cut_on_resume(path):
  write(path, {'step': 1})
  offset = path.stat().st_size
  with path.open('ab') as file:
    file.write(b'{"step": 2, "lo')
  with opened(path) as writer:
    writer.truncate(offset)
    writer.write({'step': 2})
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_truncating_to_nothing_starts_anew(path):
  write(path, {'step': 1}, {'step': 2})
  with opened(path) as writer:
    writer.truncate(0)
    writer.write({'step': 1})
  assert path.read_text() == '{"step": 1}\n'


def test_a_file_shorter_than_its_checkpoint_is_refused_and_kept(path):
  write(path, {'step': 1})
  before = path.read_bytes()
  with (
    opened(path) as writer,
    pytest.raises(
      ValueError, match=f'{path} has 12 bytes where the checkpoint says 13'
    ),
  ):
    writer.truncate(13)
  assert path.read_bytes() == before


def test_what_is_not_finite_becomes_null(path):
  row = {
    'nan': math.nan,
    'inf': -math.inf,
    'numpy': np.float32('nan'),
    'array': np.array([[1.5, np.inf]]),
    'nested': {'list': [math.nan, (1, math.inf)]},
  }
  write(path, row)
  assert json.loads(path.read_text()) == {
    'nan': None,
    'inf': None,
    'numpy': None,
    'array': [[1.5, None]],
    'nested': {'list': [None, [1, None]]},
  }


def test_values_keep_their_kind(path):
  row = {
    'count': np.int64(2**53 + 1),
    'float': np.float64(0.1),
    'flag': np.bool_(True),
    'scalar': np.array(3),
    'none': None,
    'reason': records.FinishReason.LENGTH,
    'surrogate': 'cut \ud83d',
    4: 'key',
  }
  write(path, row)
  text = path.read_text()
  assert json.loads(text) == {
    'count': 2**53 + 1,
    'float': 0.1,
    'flag': True,
    'scalar': 3,
    'none': None,
    'reason': 'length',
    'surrogate': 'cut \ud83d',
    '4': 'key',
  }
  assert '"flag": true' in text
  assert '"scalar": 3,' in text


def test_a_row_that_cannot_be_written_leaves_the_file_whole(path):
  with opened(path) as writer:
    writer.write({'step': 1})
    with pytest.raises(TypeError, match='set is not JSON serializable'):
      writer.write({'step': 2, 'bad': {1}})
    writer.write({'step': 3})
  assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_rows_come_back_through_the_reader(path):
  rows = [{'step': i, 'loss': 0.1 * i} for i in range(3)]
  write(path, *rows)
  assert run_files.read(path.parent).metrics == rows


# --- TensorBoard. -----------------------------------------------------------


@contextlib.contextmanager
def board(directory, start_step):
  writer = writers.TensorBoardWriter(directory, start_step=start_step)
  yield writer
  writer.close()


def scalars(directory):
  """Name → {step: value}, as TensorBoard shows them."""
  loaded = event_accumulator.EventAccumulator(str(directory)).Reload()
  return {
    tag: {e.step: e.value for e in loaded.Scalars(tag)}
    for tag in loaded.Tags()['scalars']
  }


def test_numbers_are_shown_and_the_rest_is_left_out(tmp_path):
  with board(tmp_path, 0) as writer:
    writer.write(
      3,
      {
        'loss': 0.5,
        'count': 2,
        'numpy': np.float32(0.25),
        'text': 'no',
        'list': [1.0],
        'none': None,
      },
    )
  assert scalars(tmp_path) == {
    'loss': {3: 0.5},
    'count': {3: 2},
    'numpy': {3: 0.25},
  }


def test_what_is_not_finite_stays_so_in_an_event(tmp_path):
  with board(tmp_path, 0) as writer:
    writer.write(1, {'loss': math.nan, 'norm': math.inf})
  found = scalars(tmp_path)
  assert math.isnan(found['loss'][1])
  assert found['norm'] == {1: math.inf}


def test_a_resumed_run_replaces_what_came_from_its_first_step_on(tmp_path):
  with board(tmp_path, 0) as writer:
    for step in range(5):
      writer.write(step, {'loss': float(step)})
  with board(tmp_path, 3) as writer:
    writer.write(3, {'loss': 30.0})
  assert scalars(tmp_path) == {'loss': {0: 0.0, 1: 1.0, 2: 2.0, 3: 30.0}}


# --- Whole files. -----------------------------------------------------------


def test_a_whole_file_replaces_the_one_before(tmp_path):
  path = tmp_path / 'fit.json'
  for value in ({'a': 1}, {'b': [np.float32(0.5), math.nan]}):
    writers.write_json(path, value)
  assert path.read_text() == ('{\n  "b": [\n    0.5,\n    null\n  ]\n}\n')
  assert [p.name for p in tmp_path.iterdir()] == ['fit.json']


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
  path = tmp_path / 'report.html'
  writers.write_text(path, 'whole')
  with pytest.raises(UnicodeEncodeError):
    writers.write_text(path, 'half \ud800')
  with pytest.raises(TypeError, match='not JSON serializable'):
    writers.write_json(path, {'bad': {1}})
  assert path.read_text() == 'whole'
  writers.write_text(path, 'ünew')
  assert path.read_bytes() == 'ünew'.encode()
  assert [p.name for p in tmp_path.iterdir()] == ['report.html']
