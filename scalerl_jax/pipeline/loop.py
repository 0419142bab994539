"""The loop: who generates, who trains, who waits for whom.

    lockstep  one thread: pump the generator until the trainer may go on, train,
              publish, evaluate, checkpoint. Deterministic.
    threads   the generator pumps in a thread of its own; the trainer waits for
              groups, the generator for room under the pacing rules, and both
              share the producer under one lock. Weights reach the generator
              between two dispatches.

After update u: publish u, then evaluate, then checkpoint, so that a checkpoint
named u holds everything up to u and a resumed run repeats nothing of it.
For the same reason Ctrl-C takes effect only there; a second one at once.
"""

from collections.abc import Callable, Iterator
import contextlib
import logging
import signal
import threading
import time
from typing import Any, Protocol, runtime_checkable

from scalerl_jax import records
from scalerl_jax.pipeline import pacing as pacing_lib
from scalerl_jax.pipeline import rollouts
from scalerl_jax.pipeline import trainer as trainer_lib
from scalerl_jax.pipeline import weights as weights_lib
from scalerl_jax.reporting import compute

_log = logging.getLogger(__name__)
_POLL_S = 0.002


class GeneratorError(RuntimeError):
  """The generator died or was silent beyond the deadline."""


@runtime_checkable
class Observer(Protocol):
  """What wants to know of the run: evaluation, files, checkpoints."""

  def on_update(self, updates: int, row: dict[str, Any]) -> None:
    """Called after each update, with its metrics."""

  def on_version(self, updates: int) -> None:
    """Called when a version is in force, 0 included; may evaluate."""

  def checkpoint(self, updates: int) -> None:
    """Called where the state must be saved."""


class Loop:
  """Runs updates until the last one."""

  def __init__(
    self,
    *,
    producer: rollouts.RolloutProducer,
    trainer: trainer_lib.Trainer,
    store: weights_lib.WeightStore,
    pacing: pacing_lib.Pacing,
    observer: Observer,
    schedule: str,
    checkpoint_every: int,
    deadline_s: float,
  ) -> None:
    """Takes its parts.

    Args:
      producer: The generator's side.
      trainer: The trainer's side.
      store: Hand-over of weights.
      pacing: The rules.
      observer: Told of updates and versions.
      schedule: `lockstep` or `threads`.
      checkpoint_every: Updates between checkpoints.
      deadline_s: Seconds that the trainer waits for groups.
    """
    self._producer = producer
    self._trainer = trainer
    self._store = store
    self._pacing = pacing
    self._observer = observer
    self._schedule = schedule
    self._checkpoint_every = checkpoint_every
    self._deadline_s = deadline_s
    self._generator = _GeneratorThread(producer.pump, deadline_s=deadline_s)

  def run(self) -> None:
    """Runs to the last update; a checkpoint is made there in any case.

    Raises:
      GeneratorError: The generator failed or brought nothing in time.
      trainer_lib.TrainingDivergedError: Too many updates were skipped.
      KeyboardInterrupt: Passed on after the update and a checkpoint.
    """
    if self._trainer.version == 0:
      self._observer.on_version(0)
    if self._schedule == 'threads':
      self._generator.start()
    try:
      with _interrupt_deferred() as interrupted:
        while self._trainer.version < self._pacing.num_updates:
          self._update(interrupted)
    finally:
      self._generator.stop()

  def _update(self, interrupted: threading.Event) -> None:
    row = self._trainer.update(self._wait(self._trainer.version))
    version = self._trainer.version
    if self._pacing.publishes(version):
      self._store.publish(self._trainer.state.params, version)
    with self._generator.paused():
      row |= self._producer.metrics()
      self._observer.on_update(version, row)
      self._observer.on_version(version)
      stops = interrupted.is_set() or self._trainer.has_diverged
      last = version == self._pacing.num_updates
      if stops or last or version % self._checkpoint_every == 0:
        self._producer.refresh()
        self._observer.checkpoint(version)
    self._trainer.check()
    if stops:
      raise KeyboardInterrupt

  def _wait(self, version: int) -> list[records.RolloutGroup]:
    deadline = time.monotonic() + self._deadline_s
    while True:
      with self._generator.paused():
        groups = self._producer.select(version)
      if groups is not None:
        return groups
      if self._schedule == 'lockstep':
        if not self._producer.pump():
          raise GeneratorError(
            f'no work is left for the generator at update {version}, and the'
            ' batch is not complete'
          )
      else:
        time.sleep(_POLL_S)
        self._generator.check()
      if time.monotonic() > deadline:
        raise GeneratorError(
          f'update {version} waited {self._deadline_s} s for a batch'
          f' ({self._producer.num_buffered} groups are complete); raise'
          ' pipeline.deadline_s if the generator is only slow'
        )


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[threading.Event]:
  """Sets the event on the first Ctrl-C; the second raises as usual."""
  interrupted = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield interrupted  # Signals reach the main thread only.
    return

  def handle(*_: Any) -> None:
    interrupted.set()
    signal.signal(signal.SIGINT, before)
    _log.warning('stopping after this update; Ctrl-C again stops at once')

  before = signal.signal(signal.SIGINT, handle)
  try:
    yield interrupted
  finally:
    signal.signal(signal.SIGINT, before)


class _GeneratorThread:
  """Calls `pump` in a thread; `paused` keeps it between two calls."""

  def __init__(self, pump: Callable[[], bool], *, deadline_s: float) -> None:
    self._pump = pump
    self._deadline_s = deadline_s
    self._lock = threading.Lock()
    self._wanted = threading.Event()  # The trainer waits for the lock.
    self._stopping = threading.Event()
    self._error: Exception | None = None
    # A daemon: one that hangs must not keep the process from its end.
    self._thread = threading.Thread(
      target=self._run, name='generator', daemon=True
    )

  def start(self) -> None:
    self._thread.start()

  def stop(self) -> None:
    self._stopping.set()
    if self._thread.is_alive():
      self._thread.join(self._deadline_s)

  def check(self) -> None:
    if self._error is not None:
      raise GeneratorError(f'the generator failed: {self._error}') from (
        self._error
      )

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    self._wanted.set()
    if not self._lock.acquire(timeout=self._deadline_s):
      raise GeneratorError(
        f'the generator did not return from a dispatch in {self._deadline_s} s'
      )
    self._wanted.clear()
    try:
      yield
    finally:
      self._lock.release()

  def _run(self) -> None:
    try:
      while not self._stopping.is_set():
        with self._lock:
          busy = self._pump()
        # A lock alone is not fair: step aside where the trainer waits.
        if not busy or self._wanted.is_set():
          time.sleep(_POLL_S)
    except Exception as error:
      # Whatever it is, the trainer must learn of it.
      _log.exception('the generator failed')
      self._error = error


def total_meter(
  producer: rollouts.RolloutProducer, trainer: trainer_lib.Trainer
) -> compute.ComputeMeter:
  """Adds up what both sides spent.

  Args:
    producer: The generator's side.
    trainer: The trainer's side.

  Returns:
    The sum.
  """
  return producer.meter.add(**trainer.meter._asdict())
