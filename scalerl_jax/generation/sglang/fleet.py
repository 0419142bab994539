"""Several servers as one: who gets a request, and which weights each holds.

A server is ready while it is known to hold the newest weights. It is taken out
when it does not answer, refuses new weights, or answers with weights that it
should not have; what it was working on goes to the others. A server that is out
is looked at again and again: once it answers, it is sent the newest weights,
and it is let in when it has proved to hold them. So a server that restarted,
hung, or lost a push comes back by the same door.

Weights have a tag, RUN:VERSION. RUN is drawn anew by each process, so that
weights which an earlier one left on a server are not taken for new ones.

What a server holds after a load is compared with the manifest, where it names
and hashes tensors as that does, and with what most servers hold. A server that
joins others has to score tokens as they do, too: it may have right weights and
a wrong model around them.

The cache of a prefix is shared under a key that changes with each load of
weights: no request that is sent to a server after a load meets a cache of
before it, but for what its own rollout left there.
"""

import asyncio
import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
import math
import pathlib
import time
from typing import Any, NamedTuple
import uuid

import numpy as np

from scalerl_jax.generation.sglang import client as client_lib

_log = logging.getLogger(__name__)
_MAX_TRIES = 12
_MISSES = 2  # Looks without an answer after which a server is out.
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class FleetError(RuntimeError):
  """The servers cannot do what a run needs; names them and the reason."""


class _WrongError(RuntimeError):
  """A server does not do what its weights should make it do."""


class Weights(NamedTuple):
  """A version of the weights that servers can load."""

  version: int
  directory: pathlib.Path
  checksums: Mapping[str, str]  # Tensor → start of its SHA-256; may be empty.


class Place(NamedTuple):
  """Where a rollout goes on."""

  server: int
  cache_key: str | None = None  # None: it has left no prefix there.


@dataclasses.dataclass(slots=True)
class Counts:
  """What happened to the servers since the start; all but the first grow.

  Attributes:
    servers_ready: Servers that requests are given to now.
    servers_lost: Times that a server was taken out.
    servers_admitted: Times that a server was let in, the first included.
    requests: Requests that were sent.
    requests_repeated: Of them, those whose predecessor brought no answer.
    requests_aborted: Answers that ended early and were gone on with.
    answers_stale: Answers thrown away for weights that were not ours.
    tokens_cached: Prompt tokens whose cache was there already.
    retractions: Times that a server set a request back.
    pushes: Versions that were in force.
    pushes_failed: Versions, or attempts at one, that no server took.
    push_seconds: From the start of a push to its end on the last server.
    pause_seconds: Longest time that a server did not sample for a push, added
      up over pushes.
    max_pause_seconds: The longest of these.
  """

  servers_ready: int = 0
  servers_lost: int = 0
  servers_admitted: int = 0
  requests: int = 0
  requests_repeated: int = 0
  requests_aborted: int = 0
  answers_stale: int = 0
  tokens_cached: int = 0
  retractions: int = 0
  pushes: int = 0
  pushes_failed: int = 0
  push_seconds: float = 0.0
  pause_seconds: float = 0.0
  max_pause_seconds: float = 0.0


class _Vote:
  """Finds out which checksums are right: those of most that were sent weights.

  It is decided as soon as more than half agree, so that one that hangs does not
  keep the others waiting.
  """

  def __init__(self, voters: Collection[str]) -> None:
    self._left = set(voters)
    self._cast: collections.Counter[frozenset[tuple[str, str]]] = (
      collections.Counter()
    )
    self._right: dict[str, str] | None = None
    self._decided = asyncio.Event()

  def cast(self, voter: str, sums: Mapping[str, str]) -> None:
    """Counts what a voter holds, the first time; others have no say."""
    if voter in self._left:
      self._cast[frozenset(sums.items())] += 1
      self.leave(voter)

  def leave(self, voter: str) -> None:
    """Counts on a voter no more."""
    self._left.discard(voter)
    for sums, count in self._cast.most_common(1):
      if 2 * count > self._cast.total() + len(self._left):
        self._right = dict(sums)
    if self._right is not None or not self._left:
      self._decided.set()

  async def objection(self, sums: Mapping[str, str]) -> str:
    """Waits for the result; says what is wrong with checksums, '' for none."""
    await self._decided.wait()
    if self._right is None:
      return 'no more than half of the servers agree on what they hold'
    names = self._right.keys() | sums.keys()
    if wrong := _differences(sums, self._right, names):
      return f'it does not hold what most servers do: {wrong}'
    return ''


class _Server:
  """A server as the fleet knows it."""

  def __init__(self, client: client_lib.Client) -> None:
    self.client = client
    self.is_ready = False
    self.outstanding = 0  # Tokens that were asked for and did not come.
    self.lock = asyncio.Lock()  # Held while its weights change.
    self.gone = asyncio.Event()
    self.look: asyncio.Future[str] | None = None
    self.is_misfit = False
    self.num_devices = 1
    self.num_loads = 0
    self.loaded: Weights | None = None  # None: it is not known.
    self.reason = ''
    self.paused_s = 0.0

  @property
  def address(self) -> str:
    return self.client.address


class Fleet:
  """Runs in one event loop; only `counts` and `version` are read elsewhere."""

  def __init__(
    self,
    clients: Sequence[client_lib.Client],
    *,
    update: str,
    probe_s: float,
    request_s: float,
    context_tokens: int,
    probe_ids: Sequence[int],
    max_logp_diff: float,
    needs_routing: bool = False,
  ) -> None:
    """Knows the servers; `start` talks to them.

    Args:
      clients: One for each server.
      update: `in_place` or `retract`; see `Client.pause`.
      probe_s: Seconds between two looks at a server, and that one may take.
      request_s: Seconds after which a request is taken to another server.
      context_tokens: Longest sequence that will be asked for.
      probe_ids: Tokens, at least 2, that a server which joins others has to
        score as they do.
      max_logp_diff: Largest mean |Δ log-prob| of that comparison, in nats.
      needs_routing: Whether servers have to tell the experts of tokens.
    """
    self.counts = Counts()
    self.run_id = uuid.uuid4().hex[:12]
    self._servers = [_Server(c) for c in clients]
    self._update = update
    self._probe_s = probe_s
    self._request_s = request_s
    self._context_tokens = context_tokens
    self._probe_ids = probe_ids
    self._max_logp_diff = max_logp_diff
    self._needs_routing = needs_routing
    self._weights: Weights | None = None  # That servers are given.
    self._vote = _Vote(())  # On them.
    self._version = -1
    # Tensors that servers hold as they were written: not fused, padded or
    # hashed in another way. Found at the first push, whose weights the engine
    # proves by their log-probs.
    self._comparable: set[str] | None = None
    self._num_requests = 0
    self._changed = asyncio.Condition()
    self._watchers: list[asyncio.Task[None]] = []

  @property
  def version(self) -> int:
    """Version that all ready servers hold at least; -1: nothing was pushed."""
    return self._version

  @property
  def num_devices(self) -> int:
    """Devices of the servers that are ready."""
    return sum(s.num_devices for s in self._servers if s.is_ready)

  async def start(self) -> None:
    """Checks the servers; those that do not answer may join later.

    Raises:
      FleetError: One cannot do what the run needs, or none answers.
    """
    problems = await asyncio.gather(*(self._look(s) for s in self._servers))
    for server, problem in zip(self._servers, problems, strict=True):
      server.reason = problem
    if any(s.is_misfit for s in self._servers) or all(problems):
      raise FleetError(f'servers cannot be used: {self.reasons()}')
    for problem in filter(None, problems):
      _log.warning('a server may join later: %s', problem)

  async def close(self) -> None:
    """Ends what the servers work on for us, and leaves them sampling."""
    for task in self._watchers:
      task.cancel()
    await asyncio.gather(*self._watchers, return_exceptions=True)
    await asyncio.gather(*(self._leave(s) for s in self._servers))

  async def _leave(self, server: _Server) -> None:
    with contextlib.suppress(client_lib.UnavailableError):
      if server.is_ready:
        await server.client.abort(deadline_s=self._probe_s)
        # A push may have been cut off.
        await server.client.resume(deadline_s=self._probe_s)
    await server.client.close()

  async def push(self, weights: Weights) -> None:
    """Brings weights into force on all servers that are ready, or at first all.

    Running requests go on: each of their tokens tells by its tag which weights
    made it.

    Args:
      weights: They stay where they are until the push after the next.

    Raises:
      FleetError: No server took them. All are out then, and none samples until
        it has been given the weights, these or others, once more.
    """
    start = time.monotonic()
    before = self._weights, self._vote
    ready = [s for s in self._servers if s.is_ready]
    servers = ready or self._servers
    vote = _Vote([s.address for s in servers])
    self._weights, self._vote = weights, vote

    async def take(server: _Server) -> None:
      try:
        await self._try_to_load(server)
      finally:
        vote.leave(server.address)

    await asyncio.gather(*(take(s) for s in servers))
    if not any(s.is_ready for s in self._servers):
      self.counts.pushes_failed += 1
      # Good once: the watchers give them back.
      self._weights, self._vote = before
      raise FleetError(
        f'no server took version {weights.version}: {self.reasons()}'
      )
    # Not before: a server that had not loaded them yet might be asked.
    self._version = weights.version
    self.counts.pushes += 1
    self.counts.push_seconds += time.monotonic() - start
    longest = max(s.paused_s for s in servers)
    self.counts.pause_seconds += longest
    self.counts.max_pause_seconds = max(self.counts.max_pause_seconds, longest)
    if not self._watchers:
      self._watchers = [
        asyncio.create_task(self._watch(s)) for s in self._servers
      ]

  async def refresh_cache(self) -> None:
    """Drops all caches, so that what runs is computed anew."""

    async def refresh(server: _Server) -> None:
      try:
        async with server.lock:
          await server.client.pause('retract')
          await server.client.flush_cache()
          await server.client.resume()
      except client_lib.UnavailableError as error:
        self._take_out(server, str(error))

    await asyncio.gather(*(refresh(s) for s in self._servers if s.is_ready))

  def reasons(self) -> str:
    """Says which servers are out, and why."""
    return '; '.join(s.reason for s in self._servers if not s.is_ready)

  def version_of(self, tag: str) -> int | None:
    """Reads a tag; None: the weights are not of this run."""
    run, _, version = tag.partition(':')
    return int(version) if run == self.run_id and version.isdigit() else None

  async def choose(self, *, other_than: int | None = None) -> int:
    """Waits for a ready server and returns the one with the least to do.

    Args:
      other_than: Number of a server that is chosen only if no other is ready.

    Returns:
      Its number.
    """
    async with self._changed:
      await self._changed.wait_for(
        lambda: any(s.is_ready for s in self._servers)
      )
    ready = [i for i, s in enumerate(self._servers) if s.is_ready]
    return min(
      ready, key=lambda i: (i == other_than, self._servers[i].outstanding)
    )

  @contextlib.contextmanager
  def reserved(self, server: int, num_tokens: int) -> Iterator[None]:
    """Counts work that a server will be given, for those who choose next.

    Args:
      server: Its number.
      num_tokens: How much.

    Yields:
      Nothing.
    """
    self._servers[server].outstanding += num_tokens
    try:
      yield
    finally:
      self._servers[server].outstanding -= num_tokens

  async def generate(
    self, token_ids: Sequence[int], *, place: Place, **how: Any
  ) -> tuple[client_lib.Answer, list[int], Place]:
    """Samples the tokens that follow, on whatever server lives.

    Args:
      token_ids: The prompt and the response so far.
      place: The server to ask first, and the key of the prefix that the
        rollout has there.
      **how: `max_tokens`, `temperature`, `stop_ids` and `routing` of
        `Client.generate`.

    Returns:
      (the answer, version of each token, where to go on).

    Raises:
      client_lib.RefusedError: The request can be served by none.
      client_lib.UnavailableError: It was tried too often.
    """
    wait = _BACKOFF_S
    server, key = place
    for _ in range(_MAX_TRIES):
      if not self._servers[server].is_ready:
        server, key = await self.choose(), None
      chosen = self._servers[server]
      key = key or f'{self.run_id}:{chosen.num_loads}'
      try:
        answer = await self._ask(chosen, token_ids, key, how)
      except client_lib.UnavailableError as error:
        _log.warning('asking again: %s', error)
        await self._look_at_once(chosen)
      else:
        known = [
          v for t in answer.tags if (v := self.version_of(t)) is not None
        ]
        if len(known) < len(answer.tags):
          self.counts.answers_stale += 1
          tags = sorted(set(answer.tags))
          self._take_out(chosen, f'{chosen.address} has the weights {tags}')
        elif known:
          self._count(answer)
          if answer.ending is client_lib.Ending.ABORT:
            other = await self.choose(other_than=server)
            return answer, known, Place(other, None)
          return answer, known, Place(server, key)
        # Else it was aborted before its first token.
      self.counts.requests_repeated += 1
      await asyncio.sleep(wait)
      wait = min(2 * wait, _MAX_BACKOFF_S)
      server, key = await self.choose(other_than=server), None
    raise client_lib.UnavailableError(
      f'a request was given up after {_MAX_TRIES} tries'
    )

  async def sample_on_each(
    self, token_ids: Sequence[int], **how: Any
  ) -> dict[str, client_lib.Answer]:
    """Samples with every server that is ready, for a comparison.

    Args:
      token_ids: The prompt.
      **how: `max_tokens`, `temperature` and `stop_ids` of `Client.generate`.

    Returns:
      Address → answer.

    Raises:
      FleetError: One does not answer.
    """
    servers = [s for s in self._servers if s.is_ready]
    try:
      answers = await asyncio.gather(
        *(self._ask(s, token_ids, f'{self.run_id}:check', how) for s in servers)
      )
    except (client_lib.UnavailableError, client_lib.RefusedError) as error:
      raise FleetError(str(error)) from None
    return {s.address: a for s, a in zip(servers, answers, strict=True)}

  def _count(self, answer: client_lib.Answer) -> None:
    self.counts.tokens_cached += answer.num_cached
    self.counts.retractions += answer.num_retractions
    self.counts.requests_aborted += answer.ending is client_lib.Ending.ABORT

  async def _ask(
    self,
    server: _Server,
    token_ids: Sequence[int],
    cache_key: str,
    how: Mapping[str, Any],
  ) -> client_lib.Answer:
    self._num_requests += 1
    self.counts.requests += 1
    # Of one length: a server aborts all that begin with an id.
    request_id = f'{self.run_id}-{self._num_requests:012d}'
    server.outstanding += how['max_tokens']
    call = asyncio.ensure_future(
      server.client.generate(
        token_ids,
        request_id=request_id,
        cache_key=cache_key,
        deadline_s=self._request_s + 2 * self._probe_s,
        **how,
      )
    )
    gone = asyncio.ensure_future(server.gone.wait())
    try:
      either = {call, gone}
      first = asyncio.FIRST_COMPLETED
      done, _ = await asyncio.wait(
        either, timeout=self._request_s, return_when=first
      )
      if not done:  # What it has so far is as good as any.
        await server.client.abort(request_id, deadline_s=self._probe_s)
        await asyncio.wait(either, timeout=self._probe_s, return_when=first)
      if call.done():
        return call.result()
      late = f'{server.address}: no answer in {self._request_s} s'
      raise client_lib.UnavailableError(server.reason if gone.done() else late)
    except client_lib.UnavailableError:
      if server.is_ready:
        # It may still be at work on it.
        with contextlib.suppress(client_lib.UnavailableError):
          await server.client.abort(request_id, deadline_s=self._probe_s)
      raise
    finally:
      server.outstanding -= how['max_tokens']
      call.cancel()
      gone.cancel()

  async def _look(self, server: _Server) -> str:
    """Asks a server for its settings; says what is wrong, '' for nothing."""
    try:
      info = await server.client.info(deadline_s=self._probe_s)
    except client_lib.UnavailableError as error:
      return str(error)
    sizes = (info.get(f'{axis}_size') for axis in ('tp', 'dp', 'pp'))
    server.num_devices = math.prod(size or 1 for size in sizes)
    problem = _misfit(info, self._context_tokens, self._needs_routing)
    server.is_misfit = bool(problem)
    return f'{server.address}: {problem}' if problem else ''

  async def _look_at_once(self, server: _Server) -> None:
    """Takes a server out that does not answer now; one look serves many."""
    if server.look is None or server.look.done():
      server.look = asyncio.ensure_future(self._look(server))
    problem = await asyncio.shield(server.look)
    if problem and not server.lock.locked():
      self._take_out(server, problem)

  async def _try_to_load(self, server: _Server) -> None:
    """Gives a server the weights; it is ready then, or else out."""
    async with server.lock:
      try:
        if not server.is_ready:
          if problem := await self._look(server):
            raise client_lib.UnavailableError(problem)
          await self._compare(server)
        while server.loaded is not self._weights:  # They may change meanwhile.
          await self._load(server)
      except (client_lib.UnavailableError, client_lib.RefusedError) as error:
        self._take_out(server, str(error))
        return
      except _WrongError as error:
        reason = f'{server.address}: {error}'
        if reason != server.reason:
          _log.warning('a server is not let in: %s', reason)
        self._take_out(server, reason)
        return
      if not server.is_ready:
        server.is_ready = True
        server.gone.clear()
        self.counts.servers_admitted += 1
        self.counts.servers_ready += 1
    async with self._changed:
      self._changed.notify_all()

  async def _compare(self, server: _Server) -> None:
    """Lets a server score as one that is ready does, if any is."""
    server.loaded = None  # Whatever it was given, it may have lost it.
    others = [s for s in self._servers if s.is_ready]
    if not others:
      return
    other = min(others, key=lambda s: s.outstanding)
    for _ in range(_MAX_TRIES):
      expected = await self._score(other)  # It is busy, so first.
      await self._load(server)
      if await self._scores_alike(server, expected):
        return
    raise _WrongError('the weights changed too often to compare it')

  async def _scores_alike(
    self, server: _Server, expected: client_lib.Scores
  ) -> bool:
    """Compares log-probs; False: they are of other weights."""
    found = await self._score(server)
    if found.tag != expected.tag:
      return False
    diff = float(np.mean(abs(found.logps - expected.logps)))
    if not diff <= self._max_logp_diff:
      raise _WrongError(
        f'its log-probs differ from those of another server by {diff:.3g} nats'
        f' on average, more than max_logp_diff={self._max_logp_diff}, with the'
        ' same weights; is it the same model, with the same dtype?'
      )
    return True

  async def _score(self, server: _Server) -> client_lib.Scores:
    self._num_requests += 1
    return await server.client.score(
      self._probe_ids,
      request_id=f'{self.run_id}-{self._num_requests:012d}',
    )

  async def _load(self, server: _Server) -> None:
    """Pauses, loads, verifies and goes on; stays paused where that fails."""
    assert self._weights is not None
    weights, vote = self._weights, self._vote
    start = time.monotonic()
    sums = await self._load_paused(server, weights)
    vote.cast(server.address, sums)
    if wrong := await vote.objection(sums):
      raise _WrongError(wrong)
    server.num_loads += 1
    await server.client.resume(deadline_s=2 * self._probe_s)
    server.paused_s = time.monotonic() - start
    server.loaded = weights

  async def _load_paused(
    self, server: _Server, weights: Weights
  ) -> dict[str, str]:
    """Returns the checksums, which the manifest does not contradict."""
    await server.client.pause(self._update, deadline_s=2 * self._probe_s)
    await server.client.load_weights(
      str(weights.directory),
      tag=f'{self.run_id}:{weights.version}',
      flush_cache=self._update == 'retract',
    )
    sums = await server.client.checksums()
    held = {name.partition('/')[2]: value for name, value in sums.items()}
    if self._comparable is None:
      same = held.items() & weights.checksums.items()
      self._comparable = {name for name, _ in same}
    if wrong := _differences(held, weights.checksums, self._comparable):
      raise _WrongError(f'it does not hold what was written: {wrong}')
    return sums

  def _take_out(self, server: _Server, reason: str) -> None:
    server.reason = reason
    server.gone.set()
    if server.is_ready:
      server.is_ready = False
      self.counts.servers_lost += 1
      self.counts.servers_ready -= 1
      _log.warning('a server is out: %s', reason)

  async def _watch(self, server: _Server) -> None:
    misses = 0
    while True:
      await asyncio.sleep(self._probe_s)
      if server.lock.locked():
        continue  # It is loading weights, which has a deadline of its own.
      try:
        misses = await self._look_after(server, misses)
      except Exception:
        # Whatever a server says, it must go on being looked at.
        _log.exception('a look at %s failed', server.address)

  async def _look_after(self, server: _Server, misses: int) -> int:
    """Takes a server out or lets it in; returns its misses in a row."""
    if problem := await self._look(server):
      if misses + 1 >= _MISSES:
        self._take_out(server, problem)
      return misses + 1
    if not server.is_ready:
      with contextlib.suppress(client_lib.UnavailableError):
        await server.client.abort(deadline_s=self._probe_s)
        await self._try_to_load(server)
        if server.is_ready:
          _log.info('a server is back: %s', server.address)
    return 0


def _misfit(
  info: Mapping[str, Any], context_tokens: int, needs_routing: bool
) -> str:
  """Says what of a server's settings a run cannot use; '': nothing."""
  length = info.get('context_length')
  wanted = context_tokens + client_lib.SPARE_TOKENS
  if isinstance(length, int) and length < wanted:
    return (
      f'context_length={length} must be at least {wanted}, the longest sequence'
      f' and {client_lib.SPARE_TOKENS} tokens; start it with --context-length'
    )
  if info.get('dtype') != 'float32' and not info.get('enable_fp32_lm_head'):
    return 'the head is not in float32; start it with --enable-fp32-lm-head'
  if (info.get('tokenizer_worker_num') or 1) > 1:
    return 'a pause reaches one of several tokenizer workers; start it with 1'
  if needs_routing and not info.get('enable_return_routed_experts'):
    return (
      'it does not tell the experts of tokens, for engine.replay_routing; start'
      ' it with --enable-return-routed-experts'
    )
  if info.get('speculative_algorithm'):
    return (
      'log-probs of speculative decoding are not those of the policy; start it'
      ' without'
    )
  return ''


def _differences(
  held: Mapping[str, str], wanted: Mapping[str, str], names: Collection[str]
) -> str:
  """Says which of the tensors have other checksums; '': none has."""
  wrong = sorted(n for n in names if held.get(n) != wanted.get(n))
  more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
  return ', '.join(wrong[:3]) + more
