"""Stand-ins for the slow parts: real interfaces, made-up content."""

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalerl_jax import arrays
from scalerl_jax import records
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib


class FakeEngine:
  """One token per step for each running group; groups differ in length.

  Attributes:
    fails_at: Step that raises; None: none does.
    stalls: True: nothing ever becomes complete.
    gives_up: Visits whose first rollout comes without a token.
    gate: A step waits until it is set.
  """

  def __init__(self, *, num_slots: int = 3, seed: int = 0) -> None:
    self.fails_at: int | None = None
    self.stalls = False
    self.gives_up: set[int] = set()
    self.is_concurrent = False
    self.gate = threading.Event()
    self.gate.set()
    self.num_refreshes = 0
    self._num_slots = num_slots
    self._rng = np.random.default_rng(seed)
    self._version = -1
    self._num_steps = 0
    self._requests: dict[int, records.Request] = {}
    self._versions: dict[int, list[int]] = {}
    self._left: dict[int, int] = {}

  @property
  def version(self) -> int:
    return self._version

  @property
  def num_devices(self) -> int:
    return 1

  @property
  def num_in_flight(self) -> int:
    return len(self._requests)

  @property
  def in_flight(self) -> dict[int, int]:
    return {v: (t or [self._version])[0] for v, t in self._versions.items()}

  @property
  def has_room(self) -> bool:
    return len(self._requests) < self._num_slots

  def submit(self, request: records.Request) -> None:
    self._requests[request.visit] = request
    self._versions[request.visit] = []
    self._left[request.visit] = int(self._rng.integers(1, 8))

  def step(self) -> list[records.RolloutGroup]:
    self.gate.wait()
    if self._num_steps == self.fails_at:
      raise RuntimeError('the engine broke')
    self._num_steps += 1
    done = []
    for visit in list(self._requests):
      self._versions[visit].append(self._version)
      self._left[visit] -= 1
      if self._left[visit] <= 0 and not self.stalls:
        done.append(self._finish(visit))
    return done

  def _finish(self, visit: int) -> records.RolloutGroup:
    versions = np.array(self._versions.pop(visit), np.int32)
    del self._left[visit]
    request = self._requests.pop(visit)
    n = len(versions)
    rollouts = tuple(
      records.Rollout(
        token_ids=np.full(n, sample, np.int32),
        logps=np.zeros(n, np.float32),
        policy_versions=versions,
        sampled=np.ones(n, bool),
        finish_reason=records.FinishReason.STOP,
        reward=1.0 if sample else -1.0,
      )
      for sample in range(request.num_samples)
    )
    if visit in self.gives_up:
      empty = np.zeros(0)
      lost = records.Rollout(
        token_ids=empty.astype(np.int32),
        logps=empty.astype(np.float32),
        policy_versions=empty.astype(np.int32),
        sampled=empty.astype(bool),
        finish_reason=records.FinishReason.ABORTED,
      )
      rollouts = (lost, *rollouts[1:])
    return records.RolloutGroup(
      request=request,
      rollouts=rollouts,
      admitted_version=int(versions[0]),
    )

  def update_weights(self, params: Any, version: int) -> None:
    assert int(params['updates']) == version
    self._version = version

  def refresh_cache(self) -> None:
    self.num_refreshes += 1

  def metrics(self) -> dict[str, int | float]:
    return {'engine/num_steps': self._num_steps}

  def state(self) -> dict[str, Any]:
    return {}

  def load_state(self, state: dict[str, Any]) -> None:
    pass

  def close(self) -> None:
    pass


def train_state() -> state_lib.TrainState:
  """Starts a state whose parameters are the number of updates."""
  zero = jnp.zeros((), jnp.int32)
  return state_lib.TrainState(
    params={'updates': zero},
    opt_state=(),
    version=zero,
    nonfinite_streak=zero,
  )


class FakeStep:
  """A train step that counts; from `diverges_at` on every update is skipped."""

  def __init__(self, *, diverges_at: int | None = None) -> None:
    self.batches: list[arrays.Batch] = []
    self._diverges_at = diverges_at

  def __call__(
    self, state: state_lib.TrainState, batch: arrays.Batch
  ) -> tuple[state_lib.TrainState, step_lib.StepMetrics]:
    self.batches.append(batch)
    version = state.version + 1
    skips = self._diverges_at is not None and int(version) >= self._diverges_at
    lag = jnp.where(batch.loss_mask, state.version - batch.policy_version, 0)
    zeros = {name: jnp.zeros(()) for name in step_lib.StepMetrics._fields}
    metrics = step_lib.StepMetrics(
      **zeros
      | {
        'lag_max': lag.max().astype(jnp.float32),
        'logp_diff_by_position': jnp.zeros(step_lib.NUM_POSITION_BUCKETS),
        'lag_histogram': jnp.zeros(step_lib.NUM_LAG_BINS),
      }
    )
    streak = state.nonfinite_streak + 1 if skips else jnp.zeros((), jnp.int32)
    return (
      state_lib.TrainState({'updates': version}, (), version, streak),
      metrics,
    )


class FakeObserver:
  """Keeps what it is told, as (event, updates); may act on it."""

  def __init__(self) -> None:
    self.events: list[tuple[str, int]] = []
    self.rows: list[dict[str, Any]] = []
    self.actions: dict[tuple[str, int], Any] = {}

  def on_update(self, updates: int, row: dict[str, Any]) -> None:
    self.rows.append(row)
    self._tell('update', updates)

  def on_version(self, updates: int) -> None:
    self._tell('version', updates)

  def checkpoint(self, updates: int) -> None:
    self._tell('checkpoint', updates)

  def _tell(self, event: str, updates: int) -> None:
    self.events.append((event, updates))
    self.actions.get((event, updates), lambda: None)()
