"""The fleet behind the engine protocol: servers generate, this process waits.

Everything that talks to servers runs in one event loop in a thread of its own,
so that answers are taken while the caller trains, evaluates or writes. What the
caller sees changes only in its own calls.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
import concurrent.futures
import dataclasses
import logging
import threading
import time
from typing import Any, TypeVar

import numpy as np

from scalerl_jax import length_control
from scalerl_jax import records
from scalerl_jax.generation import engine as engine_lib
from scalerl_jax.generation.sglang import client as client_lib
from scalerl_jax.generation.sglang import drafts
from scalerl_jax.generation.sglang import fleet as fleet_lib
from scalerl_jax.generation.sglang import transport as transport_lib

_log = logging.getLogger(__name__)
_STEP_S = 0.05  # How long a step waits for a group.
_CHECK_TOKENS = 16
_CHECK_PROMPTS = 4
_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 10.0

T = TypeVar('T')
# (params, token ids) → log-prob of each token but the first, at the sampling
# temperature.
Score = Callable[[Any, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
  """How rollouts are sampled.

  Attributes:
    num_slots: Rollouts that a server works on at a time.
    prompt_tokens: Longest prompt.
    response_tokens: Longest response, forced tokens included.
    temperature: Of sampling.
    stop_ids: Tokens that end a rollout.
    interruption: None: thinking is never interrupted.
    vocab_size: Token ids are below it.
    routing: Layers and experts per token of a mixture whose experts are
      recorded; None: none are.
  """

  num_slots: int
  prompt_tokens: int
  response_tokens: int
  temperature: float
  stop_ids: tuple[int, ...]
  interruption: length_control.Interruption | None
  vocab_size: int
  routing: tuple[int, int] | None = None

  @property
  def context_tokens(self) -> int:
    """Longest sequence."""
    return self.prompt_tokens + self.response_tokens


class _Pending:
  """A request whose group was not returned."""

  def __init__(self, request: records.Request) -> None:
    self.request = request
    self.admitted_version = -1
    self.group: concurrent.futures.Future[records.RolloutGroup] | None = None


class _Connection:
  """The event loop and what lives in it; shared by the engines of a run."""

  def __init__(self, fleet: Callable[[], fleet_lib.Fleet]) -> None:
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='sglang', daemon=True
    )
    self._thread.start()
    self._lock = threading.Lock()
    self._is_closed = False

    async def make() -> fleet_lib.Fleet:
      return fleet()

    self.fleet = self.call(make())
    self.checked = False

  def submit(
    self, work: Coroutine[Any, Any, T]
  ) -> 'concurrent.futures.Future[T]':
    with self._lock:
      if self._is_closed:  # Nobody would do it.
        work.close()
        raise fleet_lib.FleetError('the engine is closed')
      return asyncio.run_coroutine_threadsafe(work, self._loop)

  def call(self, work: Coroutine[Any, Any, T]) -> T:
    try:
      return self.submit(work).result()
    except concurrent.futures.CancelledError:
      raise fleet_lib.FleetError('the engine was closed') from None

  def close(self) -> None:
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
    try:
      asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
    finally:
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()
      self._loop.close()

  async def _end(self) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self.fleet.close()


class SglangEngine:
  """Generates with SGLang servers; see `engine.Engine`."""

  def __init__(
    self,
    spec: SamplingSpec,
    addresses: Sequence[str],
    transport: transport_lib.WeightTransport,
    *,
    score: Score,
    seed: int,
    update: str = 'in_place',
    max_logp_diff: float = 0.1,
    probe_s: float = 5.0,
    control_s: float = 120.0,
    request_s: float = 1800.0,
    deadline_s: float = 600.0,
    api_key: str | None = None,
  ) -> None:
    """Checks the servers' settings.

    Args:
      spec: How to sample.
      addresses: `http://HOST:PORT` of each server.
      transport: Brings weights to where the servers read them.
      score: The trainer's log-probs, which those of the servers are compared
        with before the first rollout.
      seed: Of the thinking budgets; tokens are drawn by the servers.
      update: `in_place` or `retract`; see `Client.pause`.
      max_logp_diff: Largest mean |Δ log-prob| of that comparison, and of one
        between a server that joins later and another, in nats.
      probe_s: Seconds between two looks at a server.
      control_s: Seconds that a server may take for new weights.
      request_s: Seconds after which a request is taken to another server.
      deadline_s: Seconds that new weights may be refused by all servers, which
        may have to start again.
      api_key: Of the servers; None: they have none.

    Raises:
      fleet_lib.FleetError: A server cannot do what the run needs.
    """
    self.spec = spec
    self._transport = transport
    self._score = score
    self._seed = seed
    self._max_logp_diff = max_logp_diff
    self._active: dict[int, _Pending] = {}
    self._closing = threading.Event()
    # Without the last token, which SGLang scores as if it were the first.
    probe = np.random.default_rng(0).integers(
      0, spec.vocab_size - 1, min(_CHECK_TOKENS, spec.context_tokens)
    )

    def fleet() -> fleet_lib.Fleet:
      return fleet_lib.Fleet(
        [
          client_lib.Client(a, control_s=control_s, api_key=api_key)
          for a in addresses
        ],
        update=update,
        probe_s=probe_s,
        request_s=request_s,
        context_tokens=spec.context_tokens,
        probe_ids=probe.tolist(),
        needs_routing=spec.routing is not None,
        max_logp_diff=max_logp_diff,
      )

    self._deadline_s = deadline_s
    self._connection = _Connection(fleet)
    try:
      self._connection.call(self._fleet.start())
    except BaseException:
      self.close()
      raise

  def fork(self, *, seed: int, keep_routing: bool = True) -> 'SglangEngine':
    """Makes an engine with requests of its own on the same servers.

    Args:
      seed: Of the thinking budgets.
      keep_routing: False: experts are not recorded.

    Returns:
      The engine; weights that either pushes are those of both.
    """
    other = object.__new__(SglangEngine)
    other.__dict__.update(self.__dict__)
    other._seed = seed
    if not keep_routing:
      other.spec = dataclasses.replace(self.spec, routing=None)
    other._active = {}
    return other

  @property
  def _fleet(self) -> fleet_lib.Fleet:
    return self._connection.fleet

  @property
  def version(self) -> int:
    """Version of the weights that the next token is sampled with."""
    return self._fleet.version

  @property
  def num_devices(self) -> int:
    """Devices of the servers that are ready."""
    return self._fleet.num_devices

  @property
  def is_concurrent(self) -> bool:
    """True: servers go on while nobody waits for them."""
    return True

  @property
  def num_in_flight(self) -> int:
    """Prompt visits submitted and not yet returned."""
    return len(self._active)

  @property
  def in_flight(self) -> dict[int, int]:
    """Visit → version of its first token; the current one if it waits."""
    version = self.version
    return {
      visit: p.admitted_version if p.admitted_version >= 0 else version
      for visit, p in self._active.items()
    }

  @property
  def has_room(self) -> bool:
    """True while fewer rollouts are in flight than the servers have slots."""
    outstanding = sum(p.request.num_samples for p in self._active.values())
    ready = max(self._fleet.counts.servers_ready, 1)
    return outstanding < ready * self.spec.num_slots

  def submit(self, request: records.Request) -> None:
    """Sends a request to a server; see `engine.Engine`.

    Args:
      request: What to generate.

    Raises:
      ValueError: The prompt is empty or too long, or the visit is already in
        flight.
    """
    engine_lib.check_request(
      request, prompt_tokens=self.spec.prompt_tokens, in_flight=self._active
    )
    pending = self._active[request.visit] = _Pending(request)
    pending.group = self._connection.submit(self._generate_group(pending))

  def step(self) -> list[records.RolloutGroup]:
    """Waits a moment for groups to become complete, and returns those."""
    if self.version < 0:
      raise RuntimeError('update_weights must be called before step')
    futures = [p.group for p in self._active.values() if p.group is not None]
    concurrent.futures.wait(
      futures, _STEP_S, concurrent.futures.FIRST_COMPLETED
    )
    done = [p for p in self._active.values() if p.group and p.group.done()]
    groups = []
    for pending in done:
      assert pending.group is not None
      groups.append(pending.group.result())
      del self._active[pending.request.visit]
    return groups

  def generate(
    self, requests: list[records.Request]
  ) -> list[records.RolloutGroup]:
    """Generates all requests to the end.

    Args:
      requests: What to generate; visits must be distinct.

    Returns:
      The groups, in the order of `requests`.

    Raises:
      fleet_lib.FleetError: None came for `deadline_s`.
    """
    done: dict[int, records.RolloutGroup] = {}
    waiting = list(requests)
    latest = time.monotonic()
    while waiting or self._active:
      while waiting and self.has_room:
        self.submit(waiting.pop(0))
      groups = self.step()
      done |= {g.request.visit: g for g in groups}
      if groups:
        latest = time.monotonic()
      elif time.monotonic() > latest + self._deadline_s:
        raise fleet_lib.FleetError(
          f'no group came in {self._deadline_s} s (pipeline.deadline_s):'
          f' {self._fleet.reasons() or "all servers answer"}'
        )
    return [done[r.visit] for r in requests]

  def update_weights(self, params: Any, version: int) -> None:
    """Brings weights into force on the servers; running rollouts go on.

    Where it fails, be it for a full disk or for all servers refusing, it is
    tried again from the writing on.

    Args:
      params: The trainer's parameters, on any devices.
      version: Updates that they contain.

    Raises:
      fleet_lib.FleetError: It failed for `deadline_s`, or the log-probs of a
        server are not the trainer's.
    """
    if version == self.version:
      return
    start, wait = time.monotonic(), _BACKOFF_S
    while True:
      try:
        self._push(params, version)
        break
      except (OSError, fleet_lib.FleetError) as error:
        elapsed = time.monotonic() - start
        if elapsed + wait > self._deadline_s or self._closing.is_set():
          raise fleet_lib.FleetError(
            f'version {version} could not be brought to the servers in'
            f' {elapsed:.0f} s (pipeline.deadline_s): {error}'
          ) from error
        _log.warning('weights, version %d, again: %s', version, error)
        self._closing.wait(wait)
        wait = min(2 * wait, _MAX_BACKOFF_S)
    if not self._connection.checked:
      self._check(params)
      self._connection.checked = True

  def _push(self, params: Any, version: int) -> None:
    try:
      published = self._transport.publish(params, version)
    except OSError:
      self._fleet.counts.pushes_failed += 1
      raise
    weights = fleet_lib.Weights(
      version, published.directory, published.checksums
    )
    try:
      self._connection.call(self._fleet.push(weights))
    except fleet_lib.FleetError:
      # Else the next attempt would be written over the last good version.
      self._transport.discard(published)
      raise

  def refresh_cache(self) -> None:
    """Recomputes the cache of running rollouts with the current weights."""
    self._connection.call(self._fleet.refresh_cache())

  def metrics(self) -> dict[str, int | float]:
    """Counts of what happened to servers and requests; see `fleet.Counts`."""
    counts = dataclasses.asdict(self._fleet.counts)
    return {f'sglang/{name}': value for name, value in counts.items()}

  def state(self) -> dict[str, Any]:
    """The requests in flight; what was sampled for them is drawn anew."""
    return {
      'requests': [records.to_state(p.request) for p in self._active.values()]
    }

  def load_state(self, state: dict[str, Any]) -> None:
    """Sends the requests of `state()` again, with the current weights.

    Args:
      state: From an engine of the same spec.
    """
    for request in state['requests']:
      self.submit(records.request_from_state(request))

  def close(self) -> None:
    """Ends all requests and the event loop; a second time does nothing."""
    self._closing.set()
    try:
      self._connection.close()
    finally:
      self._transport.close()

  async def _generate_group(self, pending: _Pending) -> records.RolloutGroup:
    request = pending.request
    server = await self._fleet.choose()
    pending.admitted_version = self.version
    num_tokens = request.num_samples * self.spec.response_tokens
    with self._fleet.reserved(server, num_tokens):
      try:
        async with asyncio.TaskGroup() as tasks:
          rollouts = [
            tasks.create_task(self._generate_rollout(request, i, server))
            for i in range(request.num_samples)
          ]
      except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return records.RolloutGroup(
      request=request,
      rollouts=tuple(r.result() for r in rollouts),
      admitted_version=pending.admitted_version,
    )

  async def _generate_rollout(
    self, request: records.Request, sample: int, server: int
  ) -> records.Rollout:
    rule, budget = self.spec.interruption, 0
    if rule is not None:
      rng = np.random.default_rng([self._seed, request.visit, sample])
      budget = int(rng.integers(rule.min_tokens, rule.max_tokens + 1))
    draft = drafts.RolloutDraft(
      stop_ids=self.spec.stop_ids,
      max_tokens=self.spec.response_tokens,
      rule=rule,
      budget=budget,
      routing=self.spec.routing,
    )
    prompt = request.prompt_ids.tolist()
    place = fleet_lib.Place(server)
    while draft.num_wanted:
      routing = None
      if self.spec.routing is not None:
        # Of the token that the first unknown one was sampled after.
        start = len(prompt) - 1 + draft.num_routed
        routing = client_lib.Routing(*self.spec.routing, start)
      try:
        answer, versions, place = await self._fleet.generate(
          prompt + draft.token_ids,
          place=place,
          max_tokens=draft.num_wanted,
          temperature=self.spec.temperature,
          stop_ids=self.spec.stop_ids,
          routing=routing,
        )
      except client_lib.UnavailableError as error:
        _log.warning('a rollout of visit %d: %s', request.visit, error)
        draft.abandon()
        break
      # A server may have stopped at a token that only its own model's files
      # call an end: then it is asked to go on.
      experts = answer.routed_experts
      if answer.num_retractions:
        experts = None  # What was read again may have gone other ways.
      draft.append(answer.token_ids, answer.logps, versions, experts)
    return draft.rollout()

  def _check(self, params: Any) -> None:
    """Compares log-probs of sampled tokens; raises FleetError."""
    rng = np.random.default_rng(0)
    n = min(_CHECK_TOKENS, self.spec.prompt_tokens)
    diffs: dict[str, list[np.ndarray]] = {}
    for _ in range(_CHECK_PROMPTS):
      prompt = rng.integers(0, self.spec.vocab_size, n).tolist()
      answers = self._connection.call(
        self._fleet.sample_on_each(
          prompt,
          max_tokens=min(_CHECK_TOKENS, self.spec.response_tokens),
          temperature=self.spec.temperature,
          stop_ids=(),
        )
      )
      for address, answer in answers.items():
        tokens = np.array([*prompt, *answer.token_ids], np.int32)
        expected = self._score(params, tokens)[n - 1 :]
        diffs.setdefault(address, []).append(abs(answer.logps - expected))
    for address, found in diffs.items():
      diff = float(np.mean(np.concatenate(found)))
      _log.info('%s: mean |Δ log-prob| to the trainer %.2g', address, diff)
      if not diff <= self._max_logp_diff:
        raise fleet_lib.FleetError(
          f'{address}: log-probs differ from the trainer by {diff:.3g} nats on'
          f' average, more than max_logp_diff={self._max_logp_diff}; is it the'
          ' same model, with the same dtype?'
        )
