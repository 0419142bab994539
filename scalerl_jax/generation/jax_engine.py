"""The embedded engine: continuous batching in JAX, in the trainer's process.

The host keeps the queue and knows which slot works for which sample; the
device does everything else in at most two compiled calls per `step` (one
prefill where there is new work, one decode dispatch).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import records
from scalerl_jax.generation import decode
from scalerl_jax.generation import engine as engine_lib
from scalerl_jax.models import transformer

_FINISH = {
  decode.STOPPED: records.FinishReason.STOP,
  decode.TRUNCATED: records.FinishReason.LENGTH,
}

# Fields of DecodeState that a checkpoint holds; the cache is recomputed.
_SAVED = tuple(
  f for f in decode.DecodeState._fields if f not in ('cache', 'limits')
)


class _Pending:
  """A request some of whose samples have not finished."""

  def __init__(self, request: records.Request) -> None:
    self.request = request
    self.next_sample = 0
    self.admitted_version = -1
    self.rollouts: dict[int, records.Rollout] = {}

  @property
  def is_complete(self) -> bool:
    return len(self.rollouts) == self.request.num_samples


class JaxEngine:
  """Generates with a policy of this process; see `engine.Engine`.

  Weights handed over are used by reference: they must never be donated.

  Attributes:
    spec: The decode loop.
    num_compiles: How many times each device function was traced.
  """

  def __init__(
    self,
    spec: decode.DecodeSpec,
    *,
    key: jax.Array,
    prefill_rows: tuple[int, ...] | None = None,
  ) -> None:
    """Allocates the slots.

    Args:
      spec: The decode loop.
      key: Sampling key of the run (not consumed: folded into).
      prefill_rows: Ascending bucket sizes for the number of prompts prefilled
        at once; None: powers of four up to the number of slots.
    """
    self.spec = spec
    self.num_compiles = {'admit': 0, 'run': 0, 'refresh': 0}
    if prefill_rows is None:
      sizes = [1]
      while sizes[-1] < spec.num_slots:
        sizes.append(min(sizes[-1] * 4, spec.num_slots))
      prefill_rows = tuple(sizes)
    self._prefill_rows = prefill_rows
    self._key = key
    self._params: transformer.Params | None = None
    self._prepared: transformer.Params | None = None
    self._version = -1
    self._queue: list[_Pending] = []  # Some samples wait for a slot.
    self._active: dict[int, _Pending] = {}  # By visit; not complete.
    self._slots: list[tuple[int, int] | None] = [None] * spec.num_slots
    self._keep_routing = True
    self._state = decode.init_state(spec)
    self._admit = self._compile('admit', decode.admit)
    self._run = self._compile('run', decode.run)
    self._refresh = self._compile('refresh', decode.refresh)
    self._prepare = jax.jit(decode.prepare)

  def fork(self, *, key: jax.Array, keep_routing: bool = True) -> 'JaxEngine':
    """Makes an engine with slots of its own that shares the compiled code.

    Args:
      key: Sampling key of the new engine.
      keep_routing: False: recorded experts are left out of rollouts.

    Returns:
      The engine, without weights.
    """
    other = JaxEngine(self.spec, key=key, prefill_rows=self._prefill_rows)
    other.num_compiles = self.num_compiles
    other._keep_routing = keep_routing
    other._admit, other._run = self._admit, self._run
    other._refresh, other._prepare = self._refresh, self._prepare
    return other

  def _compile(self, name: str, fn: Any) -> Any:
    def counted(*args: Any) -> decode.DecodeState:
      self.num_compiles[name] += 1
      return fn(*args)

    return jax.jit(counted, static_argnums=1, donate_argnums=2)

  @property
  def version(self) -> int:
    """Version of the weights that the next token is sampled with."""
    return self._version

  @property
  def num_devices(self) -> int:
    """One."""
    return 1

  @property
  def is_concurrent(self) -> bool:
    """False: it generates in `step`."""
    return False

  @property
  def num_in_flight(self) -> int:
    """Prompt visits submitted and not yet returned."""
    return len(self._active)

  @property
  def in_flight(self) -> dict[int, int]:
    """Visit → version of its first token; the current one if it waits."""
    return {
      visit: p.admitted_version if p.admitted_version >= 0 else self._version
      for visit, p in self._active.items()
    }

  @property
  def has_room(self) -> bool:
    """True while fewer samples wait than there are free slots."""
    waiting = sum(p.request.num_samples - p.next_sample for p in self._queue)
    return waiting < self._slots.count(None)

  def submit(self, request: records.Request) -> None:
    """Queues a request; see `engine.Engine`.

    Args:
      request: What to generate.

    Raises:
      ValueError: The prompt is empty or longer than the prompt region, or the
        visit is already in flight.
    """
    engine_lib.check_request(
      request, prompt_tokens=self.spec.prompt_tokens, in_flight=self._active
    )
    pending = _Pending(request)
    self._active[request.visit] = pending
    self._queue.append(pending)

  def update_weights(self, params: transformer.Params, version: int) -> None:
    """Swaps the weights between dispatches; the cache is kept."""
    self._params = params
    self._prepared = self._prepare(params)
    self._version = version

  def step(self) -> list[records.RolloutGroup]:
    """Admits waiting samples, decodes one dispatch, returns complete groups."""
    if self._prepared is None:
      raise RuntimeError('update_weights must be called before step')
    self._admit_waiting()
    if all(slot is None for slot in self._slots):
      return []
    version = jnp.asarray(self._version, jnp.int32)
    self._state = self._run(self._prepared, self.spec, self._state, version)
    return self._collect()

  def generate(
    self, requests: list[records.Request]
  ) -> list[records.RolloutGroup]:
    """Generates all requests to the end, at pinned weights.

    Args:
      requests: What to generate; visits must be distinct.

    Returns:
      The groups, in the order of `requests`.
    """
    done: dict[int, records.RolloutGroup] = {}
    for request in requests:
      self.submit(request)
    while self._active:
      done |= {g.request.visit: g for g in self.step()}
    return [done[r.visit] for r in requests]

  def refresh_cache(self) -> None:
    """Recomputes the cache of running rollouts with the current weights."""
    self._state = self._refresh(self._params, self.spec, self._state)

  def metrics(self) -> dict[str, int | float]:
    """Nothing: what can go wrong here ends the run."""
    return {}

  def state(self) -> dict[str, Any]:
    """Everything in flight; the cache is left out: load_state recomputes it."""
    device: dict[str, Any] = {
      name: np.asarray(value)
      for name in _SAVED
      if (value := getattr(self._state, name)) is not None
    }
    if self._state.limits is not None:
      limits = self._state.limits._asdict()
      device['limits'] = {k: np.asarray(v) for k, v in limits.items()}
    else:
      device['limits'] = {}
    return {
      'device': device,
      'slots': [list(s) if s else None for s in self._slots],
      'queue': [p.request.visit for p in self._queue],
      'active': [_pending_state(p) for p in self._active.values()],
    }

  def load_state(self, state: dict[str, Any]) -> None:
    """Continues from `state()` with the current weights.

    Args:
      state: From an engine of the same spec.
    """
    device = dict(state['device'])
    limits = device.pop('limits')
    fields: dict[str, Any] = {k: jnp.asarray(v) for k, v in device.items()}
    if self._state.limits is not None:
      fields['limits'] = type(self._state.limits)(
        **{k: jnp.asarray(v) for k, v in limits.items()}
      )
    self._state = self._state._replace(**fields)
    self._slots = [tuple(s) if s else None for s in state['slots']]
    pending = [_pending_from_state(s) for s in state['active']]
    self._active = {p.request.visit: p for p in pending}
    self._queue = [self._active[v] for v in state['queue']]
    self.refresh_cache()

  def close(self) -> None:
    """Drops the weights and the slots."""
    self._params = self._prepared = None

  def _admit_waiting(self) -> None:
    N = self.spec.num_slots
    free = [i for i, slot in enumerate(self._slots) if slot is None]
    row = np.full(N, -1, np.int32)
    visit, sample = np.zeros(N, np.int32), np.zeros(N, np.int32)
    prompts: list[np.ndarray] = []
    while self._queue and free:
      pending = self._queue[0]
      if pending.admitted_version < 0:
        pending.admitted_version = self._version
      room = pending.request.num_samples - pending.next_sample
      if len(free) < min(room, N):
        break  # A group starts as one, so that its prompt is prefilled once.
      prompts.append(pending.request.prompt_ids)
      for _ in range(min(room, N)):
        slot = free.pop(0)
        row[slot] = len(prompts) - 1
        visit[slot], sample[slot] = pending.request.visit, pending.next_sample
        self._slots[slot] = (pending.request.visit, pending.next_sample)
        pending.next_sample += 1
      if pending.next_sample == pending.request.num_samples:
        self._queue.pop(0)
    if not prompts:
      return
    M = next(m for m in self._prefill_rows if m >= len(prompts))
    padded = np.zeros((M, self.spec.prompt_tokens), np.int32)
    lengths = np.ones(M, np.int32)
    for i, ids in enumerate(prompts):
      padded[i, : len(ids)], lengths[i] = ids, len(ids)
    work = (padded, lengths, row, visit, sample)
    admission = decode.Admission(*map(jnp.asarray, work))
    self._state = self._admit(
      self._params, self.spec, self._state, admission, self._key
    )

  def _collect(self) -> list[records.RolloutGroup]:
    status = np.asarray(self._state.status)
    finished = [
      i
      for i, slot in enumerate(self._slots)
      if slot is not None and status[i] != decode.RUNNING
    ]
    if not finished:
      return []
    names = ('num_tokens', 'tokens', 'logps', 'versions', 'sampled')
    lengths, *columns = (np.asarray(getattr(self._state, n)) for n in names)
    routed = self._state.experts if self._keep_routing else None
    experts = None if routed is None else np.asarray(routed)
    groups = []
    for i in finished:
      visit, sample = self._slots[i]  # type: ignore[misc]
      tokens, logps, versions, sampled = (
        c[i, : lengths[i]].copy() for c in columns
      )
      pending = self._active[visit]
      pending.rollouts[sample] = records.Rollout(
        token_ids=tokens,
        logps=logps,
        policy_versions=versions,
        sampled=sampled,
        finish_reason=_FINISH[int(status[i])],
        routed_experts=None
        if experts is None
        else experts[i, : lengths[i]].copy(),
      )
      self._slots[i] = None
      if pending.is_complete:
        del self._active[visit]
        groups.append(_to_group(pending))
    return groups


def _to_group(pending: _Pending) -> records.RolloutGroup:
  return records.RolloutGroup(
    request=pending.request,
    rollouts=tuple(pending.rollouts[i] for i in sorted(pending.rollouts)),
    admitted_version=pending.admitted_version,
  )


def _pending_state(pending: _Pending) -> dict[str, Any]:
  return {
    'request': records.to_state(pending.request),
    'next_sample': pending.next_sample,
    'admitted_version': pending.admitted_version,
    'rollouts': [
      {'sample': i, 'rollout': records.to_state(r)}
      for i, r in pending.rollouts.items()
    ],
  }


def _pending_from_state(state: dict[str, Any]) -> _Pending:
  pending = _Pending(records.request_from_state(state['request']))
  pending.next_sample = state['next_sample']
  pending.admitted_version = state['admitted_version']
  pending.rollouts = {
    r['sample']: records.rollout_from_state(r['rollout'])
    for r in state['rollouts']
  }
  return pending
