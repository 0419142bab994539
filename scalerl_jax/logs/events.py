"""Scalars out of TensorBoard's event files."""

import collections
from collections.abc import Sequence
import math
import pathlib
from typing import Any

from scalerl_jax.logs import columns
from scalerl_jax.logs import tables

_FRAME = 16  # Bytes of a record besides its data: length and two checksums.


def read(
  folder: pathlib.Path,
  files: Sequence[pathlib.Path],
  *,
  name: str,
  y: str | None,
) -> tables.Table:
  """Reads one run, whose scalars become columns next to `step` and `wall_time`.

  As in TensorBoard, a later value of a step replaces the earlier one, and a
  restart that says so takes back all steps from its own on.

  Args:
    folder: Where the run is.
    files: Its event files, in the order of their names.
    name: Of the run.
    y: The tag that gives the pass rate; None: guessed.

  Returns:
    A table with a row for each step that has the tag. `wall_time` is in seconds
    since the run's first event.

  Raises:
    NoCurveError: The run has no such tag.
    ValueError: A file cannot be read.
  """
  tags: dict[str, dict[int, tuple[float, float]]] = {}
  lost: collections.Counter[str] = collections.Counter()
  replaced: collections.Counter[str] = collections.Counter()
  notes: list[str] = []
  start = math.inf
  for file in files:
    for event in _events(file, notes):
      start = min(start, event.wall_time)
      if event.session_log.status == event.session_log.START:
        for tag, points in tags.items():
          undone = [step for step in points if step >= event.step]
          replaced[tag] += len(undone)
          for step in undone:
            del points[step]
      for value in event.summary.value:
        number = _scalar(value)
        if number is None:
          lost[value.tag] += 1
          continue
        points = tags.setdefault(value.tag, {})
        replaced[value.tag] += event.step in points
        points[event.step] = (event.wall_time, number)
  if not tags:
    raise tables.NoCurveError('; '.join([f'{folder}: holds no scalar', *notes]))
  y = columns.pick_y(str(folder), tuple(tags), y)
  for counts, what in (
    (replaced, 'values replaced by a later one of their step or by a restart'),
    (lost, 'values that are not scalars dropped'),
  ):
    if counts[y]:
      notes.append(f'{folder}: {what}: {counts[y]}')
  steps = list(tags[y])

  def cells(column: str) -> list[Any]:
    if column == 'step':
      return steps
    if column == 'wall_time':
      return [tags[y][step][0] - start for step in steps]
    return [tags[column].get(step, (0.0, None))[1] for step in steps]

  return tables.Table(
    str(folder),
    name,
    tuple(dict.fromkeys(('step', 'wall_time', *tags))),
    cells,
    steps,
    unit='step',
    notes=tuple(notes),
    default_x='step',
    default_y=y,
  )


def _events(file: pathlib.Path, notes: list[str]) -> Any:
  from google.protobuf import message
  from tensorboard.backend.event_processing import event_file_loader
  from tensorboard.compat.proto import event_pb2

  try:
    rest = file.stat().st_size
    for record in event_file_loader.RawEventFileLoader(str(file)).Load():
      yield event_pb2.Event.FromString(record)
      rest -= len(record) + _FRAME
  except message.DecodeError:
    pass  # Counted below with what follows it.
  except OSError as error:
    raise ValueError(f'{file}: cannot be read: {error.strerror}') from None
  if rest > 0:
    notes.append(f'{file}: last {rest} bytes, cut short or damaged, dropped')


def _scalar(value: Any) -> float | None:
  from tensorboard.util import tensor_util

  if value.WhichOneof('value') == 'simple_value':
    return value.simple_value
  shape = value.tensor.tensor_shape
  # Before the tensor is made: its shape may claim any size.
  if value.WhichOneof('value') != 'tensor' or any(
    d.size != 1 for d in shape.dim
  ):
    return None
  try:
    return float(tensor_util.make_ndarray(value.tensor).item())
  except (TypeError, ValueError):
    return None
