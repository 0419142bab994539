"""Writers of a run's files; each can be cut back to where a checkpoint was."""

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
import pathlib
import time
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import event_file_writer


class JsonlWriter:
  """Appends rows to a JSONL file, each flushed at once."""

  def __init__(self, path: pathlib.Path) -> None:
    """Opens or creates the file; rows are appended.

    Args:
      path: The file.
    """
    self._file = path.open('ab')

  def write(self, row: Mapping[str, Any]) -> None:
    """Appends one row; NaN and infinity become null, as JSON has neither."""
    line = json.dumps(jsonable(row), allow_nan=False) + '\n'
    self._file.write(line.encode('utf-8'))
    self._file.flush()

  def offset(self) -> int:
    """Size of the file in bytes."""
    return self._file.tell()

  def truncate(self, offset: int) -> None:
    """Cuts the file back to `offset` bytes.

    Args:
      offset: From `offset()`, at an earlier time.

    Raises:
      ValueError: The file is shorter than that: rows were lost.
    """
    size = self._file.seek(0, 2)
    if size < offset:
      raise ValueError(
        f'{self._file.name} has {size} bytes where the checkpoint says'
        f' {offset}: rows were removed; restore the file or start anew'
      )
    self._file.truncate(offset)
    self._file.seek(offset)

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class TensorBoardWriter:
  """Writes scalars to an event file."""

  def __init__(self, directory: pathlib.Path, *, start_step: int) -> None:
    """Opens a new event file.

    Args:
      directory: Where.
      start_step: First step to be written; what an interrupted run wrote from
        there on is purged by TensorBoard.
    """
    self._writer = event_file_writer.EventFileWriter(str(directory))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(event_pb2.Event(session_log=start), start_step)

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes the numbers among `scalars`; others are left to the JSONL file.

    Args:
      step: Updates done.
      scalars: Name → value.
    """
    values = [
      summary_pb2.Summary.Value(tag=name, simple_value=float(value))
      for name, value in scalars.items()
      if isinstance(value, int | float | np.number)
    ]
    self._add(event_pb2.Event(summary=summary_pb2.Summary(value=values)), step)

  def close(self) -> None:
    """Flushes and closes the event file."""
    self._writer.close()

  def _add(self, event: event_pb2.Event, step: int) -> None:
    event.step = step
    event.wall_time = time.time()
    self._writer.add_event(event)


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a path to write to; the file appears whole or not at all.

  Args:
    path: The file; replaced if it exists.

  Yields:
    Another path beside it, of which nothing is left.
  """
  part = path.with_name(path.name + '.part')
  try:
    yield part
    part.replace(path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file whole or not at all.

  Args:
    path: The file; replaced if it exists.
    text: Its content.
  """
  with whole(path) as part:
    part.write_text(text, encoding='utf-8')


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON, whole or not at all; NaN and infinity become null.

  Args:
    path: The file; replaced if it exists.
    value: Nested dicts, lists, numbers, strings, numpy values.
  """
  text = json.dumps(jsonable(value), indent=2, allow_nan=False)
  write_text(path, text + '\n')


def jsonable(value: Any) -> Any:
  """Turns a value into what JSON knows.

  Args:
    value: Nested dicts, lists, numbers, strings, numpy values.

  Returns:
    Dicts, lists, numbers and strings; None for NaN and infinity.
  """
  if isinstance(value, Mapping):
    return {str(k): jsonable(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [jsonable(v) for v in value]
  if isinstance(value, np.ndarray):
    return jsonable(value.tolist())
  if isinstance(value, np.generic):
    return jsonable(value.item())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
