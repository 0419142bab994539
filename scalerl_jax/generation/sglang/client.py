"""One SGLang server over HTTP: token ids in, token ids and log-probs out.

Written against SGLang 0.5.23. Every call has a deadline and fails with a named
error; none is repeated here, since only the caller knows what a repetition
would do.
"""

import base64
from collections.abc import Mapping, Sequence
import dataclasses
import enum
import json
import time
from typing import Any, NamedTuple

from jaxtyping import Float
from jaxtyping import Int
import numpy as np

# SGLang ends an answer two tokens early rather than fill its context, and
# refuses a prompt that leaves less than a few.
SPARE_TOKENS = 8


class UnavailableError(RuntimeError):
  """The server did not answer, or said that it cannot: another one may."""


class RefusedError(RuntimeError):
  """The server will not do what it was asked: no server would."""


class Ending(enum.StrEnum):
  """Why a server ended a request."""

  STOP = 'stop'
  LENGTH = 'length'
  ABORT = 'abort'


class Routing(NamedTuple):
  """Which experts an answer is to tell of."""

  num_layers: int
  experts_per_token: int
  start: int  # First token of the request that is told of; from 0.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
  """What one request brought.

  Attributes:
    token_ids: Sampled tokens, a stop token included.
    logps: Float32 log-prob of each, at the sampling temperature, in nats.
    tags: Name of the weights that each was sampled with.
    ending: Why there are no more.
    message: What the server said of an abort.
    num_cached: Prompt tokens whose cache was there already.
    num_retractions: Times that the request was set back and its cache
      computed anew.
    routed_experts: Experts that each token passed through which the model read
      for the answer, from `Routing.start` on, the last sampled token left out;
      None: not asked for, or not told, which an abort may be the reason of.
  """

  token_ids: Int[np.ndarray, ' N']
  logps: Float[np.ndarray, ' N']
  tags: tuple[str, ...]
  ending: Ending
  message: str = ''
  num_cached: int = 0
  num_retractions: int = 0
  routed_experts: Int[np.ndarray, 'M L k'] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
  """Log-probs of given tokens.

  Attributes:
    logps: Float32 log-prob of each token but the first, at temperature 1, in
      nats.
    tag: Name of the weights that made them.
  """

  logps: Float[np.ndarray, ' N']
  tag: str


def parse_answer(
  reply: Any, *, num_given: int = 0, routing: Routing | None = None
) -> Answer:
  """Reads the reply to a request for tokens.

  Args:
    reply: As it came, parsed from JSON.
    num_given: Tokens of the request; of meaning with `routing` only.
    routing: The experts that were asked for; None: none were.

  Returns:
    The answer.

  Raises:
    UnavailableError: It is not such a reply, or it leaves open which weights
      made a token.
  """
  try:
    tokens = np.array(reply['output_ids'], np.int32).reshape(-1)
    meta = reply['meta_info']
    scored = meta['output_token_logprobs']
    logps = np.array([s[0] for s in scored], np.float32).reshape(-1)
    if [int(s[1]) for s in scored] != tokens.tolist():
      raise ValueError('output_token_logprobs are not those of output_ids')
    if not np.isfinite(logps).all():
      raise ValueError('a log-prob is not finite')
    tags: list[str] = []
    for span in meta['weight_versions'] if len(tokens) else ():
      if span['start'] != len(tags) or span['end'] < span['start']:
        raise ValueError(f'weight_versions have a gap at token {len(tags)}')
      tags += [str(span['version'])] * (span['end'] - span['start'])
    if len(tags) != len(tokens):
      raise ValueError(
        f'weight_versions tell of {len(tags)} tokens of {len(tokens)}'
      )
    finish = meta['finish_reason']
    ending = Ending(finish['type'])
    experts = None
    if routing is not None and len(tokens):
      experts = _experts(meta, num_given + len(tokens) - 1, routing)
      if experts is None and ending is not Ending.ABORT:
        raise ValueError('routed_experts are missing')
    return Answer(
      token_ids=tokens,
      logps=logps,
      tags=tuple(tags),
      ending=ending,
      message=str(finish.get('message') or ''),
      num_cached=int(meta.get('cached_tokens') or 0),
      num_retractions=int(meta.get('num_retractions') or 0),
      routed_experts=experts,
    )
  except (KeyError, TypeError, ValueError, IndexError) as error:
    raise UnavailableError(
      f'a reply to /generate cannot be used: {error!r}'
    ) from None


def _experts(
  meta: Mapping[str, Any], num_read: int, routing: Routing
) -> np.ndarray | None:
  """Experts of the tokens that were read, as int32 in base64."""
  text = meta.get('routed_experts')
  if text is None:
    return None
  found = np.frombuffer(base64.b64decode(text, validate=True), np.dtype('<i4'))
  shape = (
    num_read - routing.start,
    routing.num_layers,
    routing.experts_per_token,
  )
  if (found < 0).any():
    raise ValueError(f'routed_experts has the expert {found.min()}')
  found = found.reshape(shape)  # Raises where there are more or fewer.
  ordered = np.sort(found, axis=-1)
  # Kernels that choose experts themselves leave zeros in the record.
  if (ordered[..., 1:] == ordered[..., :-1]).any():
    raise ValueError(
      'routed_experts has an expert twice for one token and layer, so this'
      ' --moe-runner-backend does not record them; use triton'
    )
  return found


def parse_scores(reply: Any, token_ids: Sequence[int]) -> Scores:
  """Reads the reply to a request for the log-probs of given tokens.

  Args:
    reply: As it came, parsed from JSON; one token was sampled after them.
    token_ids: The tokens.

  Returns:
    The scores.

  Raises:
    UnavailableError: It is not such a reply.
  """
  answer = parse_answer(reply)
  try:
    scored = reply['meta_info']['input_token_logprobs']
    if [int(s[1]) for s in scored] != list(token_ids):
      raise ValueError('input_token_logprobs are not those of the tokens')
    logps = np.array([s[0] for s in scored[1:]], np.float32)
    if not np.isfinite(logps).all():
      raise ValueError('a log-prob is not finite')
    return Scores(logps=logps, tag=answer.tags[0])
  except (KeyError, TypeError, ValueError, IndexError) as error:
    raise UnavailableError(
      f'a reply to /generate cannot be used: {error!r}'
    ) from None


class Client:
  """Calls one server; all methods but the constructor run in an event loop."""

  def __init__(
    self, address: str, *, control_s: float, api_key: str | None = None
  ) -> None:
    """Connects to nothing yet.

    Args:
      address: `http://HOST:PORT`.
      control_s: Seconds that a call may take that samples nothing.
      api_key: Sent with each call; None: none is.
    """
    self.address = address.rstrip('/')
    self._control_s = control_s
    self._api_key = api_key
    self._session: Any = None

  async def close(self) -> None:
    """Closes the connections."""
    if self._session is not None:
      await self._session.close()

  async def generate(
    self,
    token_ids: Sequence[int],
    *,
    request_id: str,
    max_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    cache_key: str,
    deadline_s: float,
    routing: Routing | None = None,
  ) -> Answer:
    """Samples the tokens that follow.

    Nothing of how to sample is left to the server, which would take it from
    the model's `generation_config.json`.

    Args:
      token_ids: The prompt, and what was sampled of the response before.
      request_id: Never used before on this server.
      max_tokens: Tokens to sample, at least 1.
      temperature: Of sampling.
      stop_ids: Tokens after which sampling ends.
      cache_key: Only requests of the same key share the cache of a prefix.
      deadline_s: Seconds that it may take.
      routing: Experts to be told of; None: none.

    Returns:
      The answer.

    Raises:
      UnavailableError: There was no usable reply in time.
      RefusedError: The request is not accepted.
    """
    told: dict[str, Any] = {}
    if routing is not None:
      told['return_routed_experts'] = True
      told['routed_experts_start_len'] = routing.start
    reply = await self._call(
      'POST',
      '/generate',
      {
        'rid': request_id,
        'input_ids': [int(t) for t in token_ids],
        'sampling_params': {
          'max_new_tokens': max_tokens,
          'temperature': temperature,
          'top_p': 1.0,
          'top_k': -1,
          'min_p': 0.0,
          'frequency_penalty': 0.0,
          'presence_penalty': 0.0,
          'repetition_penalty': 1.0,
          'stop_token_ids': [int(t) for t in stop_ids],
        },
        'return_logprob': True,
        'extra_key': cache_key,
        **told,
      },
      deadline_s=deadline_s,
    )
    return parse_answer(reply, num_given=len(token_ids), routing=routing)

  async def score(
    self,
    token_ids: Sequence[int],
    *,
    request_id: str,
    deadline_s: float | None = None,
  ) -> Scores:
    """Asks for the log-probs of given tokens.

    Args:
      token_ids: At least 2; the last of the vocabulary cannot be scored.
      request_id: Never used before on this server.
      deadline_s: Seconds that it may take; None: as any control call.

    Returns:
      The scores.

    Raises:
      UnavailableError: There was no usable reply in time.
      RefusedError: The request is not accepted.
    """
    reply = await self._call(
      'POST',
      '/generate',
      {
        'rid': request_id,
        'input_ids': [int(t) for t in token_ids],
        'sampling_params': {'max_new_tokens': 1, 'ignore_eos': True},
        'return_logprob': True,
        'logprob_start_len': 0,
        # Of its own: what was cached would not be scored.
        'extra_key': request_id,
      },
      deadline_s=deadline_s,
    )
    return parse_scores(reply, token_ids)

  async def abort(
    self, request_id: str | None = None, *, deadline_s: float | None = None
  ) -> None:
    """Ends a request, whose reply then holds what was sampled.

    Args:
      request_id: Which; None: all.
      deadline_s: Seconds that it may take; None: as any control call.
    """
    what = {'abort_all': True} if request_id is None else {'rid': request_id}
    await self._call('POST', '/abort_request', what, deadline_s=deadline_s)

  async def info(self, *, deadline_s: float | None = None) -> dict[str, Any]:
    """Asks for the server's settings; its scheduler answers, paused or not.

    Args:
      deadline_s: Seconds that it may take; None: as any control call.

    Returns:
      Setting → value.
    """
    reply = await self._call('GET', '/server_info', deadline_s=deadline_s)
    if not isinstance(reply, dict):
      raise UnavailableError(
        f'{self.address}/server_info: unknown reply: {_shorten(reply)}'
      )
    return reply

  async def pause(self, mode: str, *, deadline_s: float | None = None) -> None:
    """Stops sampling between two tokens.

    Args:
      mode: `in_place` leaves the cache of running requests as it is, `retract`
        drops it.
      deadline_s: Seconds that it may take; None: as any control call.
    """
    body = {'mode': mode}
    await self._call('POST', '/pause_generation', body, deadline_s=deadline_s)

  async def resume(self, *, deadline_s: float | None = None) -> None:
    """Goes on sampling.

    Args:
      deadline_s: Seconds that it may take; None: as any control call.
    """
    await self._call('POST', '/continue_generation', {}, deadline_s=deadline_s)

  async def flush_cache(self) -> None:
    """Drops the cache of all prefixes; nothing may be running."""
    await self._call('POST', '/flush_cache')

  async def load_weights(
    self, directory: str, *, tag: str, flush_cache: bool
  ) -> None:
    """Replaces the weights; to be called while paused.

    Args:
      directory: A checkpoint, as the server sees it.
      tag: Name of the weights, which `Answer.tags` repeats.
      flush_cache: True: the cache of all prefixes is dropped.
    """
    reply = await self._call(
      'POST',
      '/update_weights_from_disk',
      {
        'model_path': directory,
        'weight_version': tag,
        'flush_cache': flush_cache,
        'load_format': 'safetensors',
      },
    )
    if not (isinstance(reply, Mapping) and reply.get('success')):
      raise UnavailableError(
        f'{self.address}/update_weights_from_disk: {_shorten(reply)}'
      )

  async def checksums(self) -> dict[str, str]:
    """Asks for the checksum of each tensor that the server holds.

    Returns:
      Name, with the rank that holds it → checksum. On a CPU that is the start
      of the SHA-256 of the bytes; on a GPU another one.
    """
    reply = await self._call('POST', '/weights_checker', {'action': 'checksum'})
    try:
      return {
        f'{i}/{name}': str(value)
        for i, rank in enumerate(reply['ranks'])
        for name, value in rank['checksums'].items()
      }
    except (KeyError, TypeError, AttributeError) as error:
      raise UnavailableError(
        f'{self.address}/weights_checker: unknown reply ({error!r})'
      ) from None

  async def _call(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    deadline_s: float | None = None,
  ) -> Any:
    import aiohttp

    if self._session is None:
      headers = {}
      if self._api_key:
        headers['Authorization'] = f'Bearer {self._api_key}'
      self._session = aiohttp.ClientSession(
        # The fleet bounds what is outstanding. A server closes connections that
        # were idle for 5 s, and would meet a request that is on its way.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        headers=headers,
      )
    deadline_s = self._control_s if deadline_s is None else deadline_s
    start = time.monotonic()
    try:
      async with self._session.request(
        method,
        self.address + path,
        json=body,
        timeout=aiohttp.ClientTimeout(total=deadline_s),
      ) as response:
        text = await response.text()
        status = response.status
    except TimeoutError:
      raise UnavailableError(
        f'{self.address}{path}: no answer in {time.monotonic() - start:.1f} s'
      ) from None
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
      raise UnavailableError(
        f'{self.address}{path}: {str(error) or type(error).__name__}'
      ) from None
    if status >= 400:
      message = f'{self.address}{path}: HTTP {status}: {_shorten(text)}'
      # A load of weights that failed says 400 too, and is no fault of ours.
      if status < 500 and path == '/generate':
        raise RefusedError(message)
      raise UnavailableError(message)
    try:
      return json.loads(text) if text.startswith(('{', '[')) else text
    except ValueError:
      raise UnavailableError(
        f'{self.address}{path}: not JSON: {_shorten(text)}'
      ) from None


def _shorten(reply: Any) -> str:
  text = ' '.join(str(reply).split())
  return text if len(text) <= 300 else f'{text[:300]}...'
