"""Event files, as TensorBoard's own writer leaves them."""

import pytest
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from scalerl_jax import logs
from scalerl_jax.reporting import writers

_START = 1_700_000_000.0


def write(folder, events, *, suffix='', tensor=False):
  """Events are (step, hours, {tag: value}); a step alone is a restart there."""
  writer = event_file_writer.EventFileWriter(
    str(folder), filename_suffix=suffix
  )
  first = event_pb2.Event(wall_time=_START, file_version='brain.Event:2')
  writer.add_event(first)
  for step, hours, scalars in events:
    event = event_pb2.Event(step=step, wall_time=_START + 3600 * hours)
    for tag, value in scalars.items():
      if tensor or not isinstance(value, float):
        proto = tensor_util.make_tensor_proto(value)
        event.summary.value.add(tag=tag, tensor=proto)
      else:
        event.summary.value.add(tag=tag, simple_value=value)
    if not scalars:
      event.session_log.status = event_pb2.SessionLog.START
    writer.add_event(event)
  writer.close()
  (file,) = folder.glob(f'*tfevents*{suffix}') if suffix else [None]
  return file


_RUN = [
  (1, 1, {'val/acc': 0.25, 'loss': 3.0, 'tokens': 100.0}),
  (2, 2, {'loss': 2.0, 'tokens': 200.0}),
  (3, 3, {'val/acc': 0.5, 'loss': 1.0, 'tokens': 300.0}),
]


def points(curve):
  return list(
    zip(curve.compute.tolist(), curve.pass_rate.tolist(), strict=True)
  )


@pytest.mark.parametrize('tensor', [False, True])
def test_scalars_against_each_axis(tmp_path, tensor):
  write(tmp_path / 'run', _RUN, tensor=tensor)
  for options, expected, label in (
    ({}, [1, 3], 'step'),
    ({'x': 'step'}, [1, 3], 'step'),
    ({'x': 'wall_time'}, [1, 3], 'hours of wall_time'),
    (
      {'x': 'wall_time', 'devices': 8.0},
      [8, 24],
      'device-hours of wall_time',
    ),
    ({'devices': 8.0}, [8, 24], 'device-hours of wall_time'),
    ({'compute_per_step': 1e18}, [1e18, 3e18], 'step x 1e+18'),
    ({'x': 'tokens'}, [100, 300], 'tokens'),
  ):
    (curve,), notes = logs.read(tmp_path / 'run', y='val/acc', **options)
    assert curve.compute.tolist() == pytest.approx(expected)
    assert curve.pass_rate.tolist() == [0.25, 0.5]
    assert (curve.name, curve.x) == ('run', label)
    assert bool(notes) == (
      len(options) > 0 and options.get('x') not in ('step', 'tokens')
    )
  (guessed,), _ = logs.read(tmp_path / 'run')
  assert (guessed.x, guessed.y) == ('step', 'val/acc')


def test_each_folder_is_a_run(tmp_path):
  for name in ('b/eval', 'a/eval'):
    write(tmp_path / name, _RUN)
  write(tmp_path / 'a', [(1, 1, {'loss': 1.0})])
  curves, notes = logs.read(tmp_path)
  assert [c.name for c in curves] == ['a/eval', 'b/eval']
  assert len(notes) == 1
  assert notes[0].startswith(f'{tmp_path / "a"}: no column is known')
  assert notes[0].endswith("one of 'loss': skipped")


def test_single_event_file(tmp_path):
  file = write(tmp_path / 'run', _RUN, suffix='.x')
  write(tmp_path / 'run', [(9, 9, {'val/acc': 1.0})], suffix='.y')
  (curve,), _ = logs.read(file)
  assert points(curve) == [(1, 0.25), (3, 0.5)]
  assert curve.name == 'run'


def test_missing_tag_lists_the_others(tmp_path):
  write(tmp_path, _RUN)
  with pytest.raises(ValueError, match=r"y='acc' .*'val/acc', 'loss'"):
    logs.read(tmp_path, y='acc')


def test_steps_that_go_back_keep_the_later_value(tmp_path):
  again = [(3, 5, {'val/acc': 0.75}), (4, 6, {'val/acc': 0.875})]
  write(tmp_path, _RUN + again)
  (curve,), notes = logs.read(tmp_path)
  assert points(curve) == [(1, 0.25), (3, 0.75), (4, 0.875)]
  assert next(n for n in notes if 'replaced' in n).endswith('restart: 1')


def test_marked_restart_takes_back_what_lies_ahead(tmp_path):
  write(tmp_path, [*_RUN, (2, 4, {}), (2, 5, {'val/acc': 0.375})])
  (curve,), notes = logs.read(tmp_path)
  assert points(curve) == [(1, 0.25), (2, 0.375)]
  assert 'replaced' in notes[0]


def test_restart_that_takes_back_everything(tmp_path):
  write(tmp_path, [*_RUN, (0, 4, {})])
  with pytest.raises(ValueError, match='no row has both'):
    logs.read(tmp_path)


def test_own_writer(tmp_path):
  for start in (0, 5):
    writer = writers.TensorBoardWriter(tmp_path / 'tb', start_step=start)
    for step in (start, start + 6):
      writer.write(step, {'pass_rate': step / 16})
    writer.close()
  (curve,), _ = logs.read(tmp_path)
  assert points(curve) == [(0, 0), (5, 0.3125), (11, 0.6875)]
  assert curve.name == 'tb'


def test_not_a_number_is_dropped(tmp_path):
  write(tmp_path, [*_RUN, (4, 4, {'val/acc': float('nan')})])
  (curve,), notes = logs.read(tmp_path)
  assert len(curve.compute) == 2
  assert notes[-1].endswith("without 'val/acc' dropped: 1 (first: step 4)")


def test_values_that_are_no_scalars(tmp_path):
  odd = [(5, 5, {'val/acc': [1.0, 2.0]}), (6, 6, {'val/acc': 'text'})]
  write(tmp_path, [*_RUN, *odd, (7, 7, {'words': b'x'})])
  writer = event_file_writer.EventFileWriter(str(tmp_path), filename_suffix='z')
  # Its shape claims 8 TB.
  tensor = tensor_util.make_tensor_proto(0.5)
  tensor.tensor_shape.dim.add(size=10**12)
  value = summary_pb2.Summary.Value(tag='val/acc', tensor=tensor)
  summary = summary_pb2.Summary(value=[value])
  writer.add_event(event_pb2.Event(step=8, wall_time=_START, summary=summary))
  writer.close()
  (curve,), notes = logs.read(tmp_path)
  assert points(curve) == [(1, 0.25), (3, 0.5)]
  assert notes[0].endswith('that are not scalars dropped: 3')


def test_file_cut_short(tmp_path):
  file = write(tmp_path, _RUN, suffix='.x')
  data = file.read_bytes()
  file.write_bytes(data[:-10])
  (curve,), notes = logs.read(tmp_path)
  assert points(curve) == [(1, 0.25)]
  assert 'cut short or damaged, dropped' in notes[0]
  file.write_bytes(data + b'\xff' * 99)
  (curve,), notes = logs.read(tmp_path)
  assert len(curve.compute) == 2
  assert 'last 99 bytes' in notes[0]


def test_junk(tmp_path):
  path = tmp_path / 'events.out.tfevents.1'
  for content in (b'', b'junk' * 99):
    path.write_bytes(content)
    with pytest.raises(ValueError, match='holds no scalar'):
      logs.read(tmp_path)
  with pytest.raises(ValueError, match='cannot be read'):
    logs.read(tmp_path / 'tfevents.missing')
