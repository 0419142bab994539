"""The decode loop: pure state, pure steps, storage allocated before the loop.

A slot holds one rollout at a time. The cache of a slot has two regions:

    columns [0, P)       the prompt, all but its last token, copied at admission
    columns [P, P + R)   a ring that all slots write in step: at global step g
                         every slot writes column P + g mod R

A rollout lives at most R steps, so that the ring never overwrites a token
that a live slot needs. The last prompt token is the first one fed to the loop:
prefill computes no logits, and the samples of a prompt share its prefill.

    admit: prefill once per prompt ──copy──> slots      (between dispatches)
    run:   [embed, attend, logits, sample or force, record] x num_steps
    refresh: recompute keys and values of live slots with other weights
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import UInt32

from scalerl_jax import length_control
from scalerl_jax.generation import sampling
from scalerl_jax.models import cache as cache_lib
from scalerl_jax.models import spec as spec_lib
from scalerl_jax.models import transformer

RUNNING = 0
STOPPED = 1
TRUNCATED = 2

# Position of the draw of the thinking budget; tokens draw at 0, 1, ...
_BUDGET_POSITION = -1


class DecodeSpec(NamedTuple):
  """Static description of a decode loop (hashable)."""

  model: spec_lib.ModelSpec
  num_slots: int  # N
  prompt_tokens: int  # P: longest prompt.
  response_tokens: int  # R: longest response, forced tokens included.
  steps_per_dispatch: int
  temperature: float
  stop_ids: tuple[int, ...]  # Any of them ends a rollout.
  interruption: length_control.Interruption | None
  record_routing: bool = False  # Whether the experts of fed tokens are kept.


class DecodeState(NamedTuple):
  """Everything about the slots; N of each."""

  cache: cache_lib.KVCache
  keys: UInt32[Array, 'N 2']
  prompts: Int[Array, 'N P']  # Right-padded.
  prompt_length: Int[Array, ' N']
  start_step: Int[Array, ' N']  # Global step at which the slot began.
  step: Int[Array, '']  # Global step.
  last_token: Int[Array, ' N']
  num_tokens: Int[Array, ' N']  # Response tokens so far.
  status: Int[Array, ' N']  # RUNNING, STOPPED or TRUNCATED.
  limits: length_control.InterruptionState | None
  tokens: Int[Array, 'N R']
  logps: Float[Array, 'N R']
  versions: Int[Array, 'N R']
  sampled: Bool[Array, 'N R']
  # That each layer passed the token fed before response token r through; None:
  # not recorded.
  experts: Int[Array, 'N R L k'] | None


class Admission(NamedTuple):
  """New work for a dispatch: M prompts, and which slot takes which."""

  prompts: Int[Array, 'M P']
  prompt_length: Int[Array, ' M']
  row: Int[Array, ' N']  # Prompt row that the slot takes; -1: none.
  visit: Int[Array, ' N']
  sample: Int[Array, ' N']


def init_state(spec: DecodeSpec) -> DecodeState:
  """Allocates slots, all free.

  Args:
    spec: The loop.

  Returns:
    A state in which every slot is STOPPED.

  Raises:
    ValueError: Routing is to be recorded of a model without experts.
  """
  N, R = spec.num_slots, spec.response_tokens
  cache = cache_lib.empty(
    spec.model, num_rows=N, num_columns=spec.prompt_tokens + R
  )
  limits = None
  if spec.interruption is not None:
    limits = spec.interruption.init(jnp.zeros((N,), jnp.int32))
  return DecodeState(
    cache=cache,
    keys=jnp.zeros((N, 2), jnp.uint32),
    prompts=jnp.zeros((N, spec.prompt_tokens), jnp.int32),
    prompt_length=jnp.ones((N,), jnp.int32),
    start_step=jnp.zeros((N,), jnp.int32),
    step=jnp.zeros((), jnp.int32),
    last_token=jnp.zeros((N,), jnp.int32),
    num_tokens=jnp.zeros((N,), jnp.int32),
    status=jnp.full((N,), STOPPED, jnp.int32),
    limits=limits,
    tokens=jnp.zeros((N, R), jnp.int32),
    logps=jnp.zeros((N, R), jnp.float32),
    versions=jnp.zeros((N, R), jnp.int32),
    sampled=jnp.zeros((N, R), bool),
    experts=_no_experts(spec) if spec.record_routing else None,
  )


def admit(
  params: transformer.Params,
  spec: DecodeSpec,
  state: DecodeState,
  admission: Admission,
  key: jax.Array,
) -> DecodeState:
  """Prefills M prompts and gives each to the slots that asked for it.

  Args:
    params: Weights that the prompts are read with.
    spec: The loop (static).
    state: Before.
    admission: The new work; the slots it names must be free.
    key: The run's sampling key; only folded into.

  Returns:
    State with the new rollouts RUNNING.
  """
  is_new = admission.row >= 0
  row = jnp.maximum(admission.row, 0)
  kv = _prefill(params, spec, admission.prompts)
  P = spec.prompt_tokens

  def fill(cached: jax.Array, fresh: jax.Array) -> jax.Array:
    prompt = fresh.swapaxes(1, 2)[row]  # [N, K, P, H]
    prompt = jnp.where(is_new[:, None, None, None], prompt, cached[:, :, :P])
    return cached.at[:, :, :P].set(prompt)

  length = jnp.where(is_new, admission.prompt_length[row], state.prompt_length)
  prompts = jnp.where(is_new[:, None], admission.prompts[row], state.prompts)
  last = jnp.take_along_axis(prompts, length[:, None] - 1, axis=1)[:, 0]
  keys = sampling.slot_keys(key, admission.visit, admission.sample)
  keys = jnp.where(is_new[:, None], keys, state.keys)
  limits = state.limits
  if spec.interruption is not None:
    draw = sampling.uniforms(keys, jnp.full_like(length, _BUDGET_POSITION))
    fresh = spec.interruption.init(spec.interruption.draw_budget(draw))
    limits = jax.tree.map(
      lambda new, old: jnp.where(is_new, new, old), fresh, state.limits
    )
  positions = state.cache.positions
  if positions is not None:
    positions = positions.at[:, :P].set(jnp.arange(P)[None, :])
  cache = state.cache._replace(
    keys=tuple(map(fill, state.cache.keys, kv.keys)),
    values=tuple(map(fill, state.cache.values, kv.values)),
    positions=positions,
  )
  return state._replace(
    cache=cache,
    keys=keys,
    prompts=prompts,
    prompt_length=length,
    start_step=jnp.where(is_new, state.step, state.start_step),
    last_token=jnp.where(is_new, last, state.last_token),
    num_tokens=jnp.where(is_new, 0, state.num_tokens),
    status=jnp.where(is_new, RUNNING, state.status),
    limits=limits,
  )


def prepare(params: transformer.Params) -> transformer.Params:
  """Lays weights out as `run` reads them; once, for any number of dispatches.

  Blocks are unstacked (`transformer.unstack_layers`), and the head is float32
  with a row for each token of the vocabulary: as tied heads are stored, and
  faster than [D, V] where a CPU multiplies few rows with it.

  Args:
    params: Parameters of a model.

  Returns:
    The same with `layers` a tuple and `head_rows`, [V, D], for `head`.
  """
  rows = params['head'].T if 'head' in params else params['embed']
  rest = {name: w for name, w in params.items() if name != 'head'}
  return {
    **transformer.unstack_layers(rest),
    'head_rows': rows.astype(jnp.float32),
  }


def run(
  params: transformer.Params,
  spec: DecodeSpec,
  state: DecodeState,
  version: Int[Array, ''],
) -> DecodeState:
  """Decodes up to `steps_per_dispatch` tokens per slot; fewer if all are done.

  Args:
    params: Weights, as they are or from `prepare`.
    spec: The loop (static).
    state: Before.
    version: Version of `params`, recorded for each token.

  Returns:
    State after.
  """
  if 'head_rows' not in params:
    params = prepare(params)
  first = state.step

  def goes_on(state: DecodeState) -> jax.Array:
    within = state.step - first < spec.steps_per_dispatch
    return within & jnp.any(state.status == RUNNING)

  def body(state: DecodeState) -> DecodeState:
    logits, experts, state = _advance_cache(params, spec, state)
    return _record(spec, state, logits, experts, version)

  return jax.lax.while_loop(goes_on, body, state)


def refresh(
  params: transformer.Params, spec: DecodeSpec, state: DecodeState
) -> DecodeState:
  """Recomputes keys and values of all slots from their tokens.

  After it the cache is a function of (params, tokens, recorded experts) alone,
  so that a run continued from a checkpoint equals one that went on.

  Args:
    params: Weights to recompute with, blocks stacked.
    spec: The loop (static).
    state: Before.

  Returns:
    State with the same rollouts and another cache.
  """
  P, R = spec.prompt_tokens, spec.response_tokens
  # Sequence of a slot: the prompt, then its response, without a gap.
  index = jnp.arange(P + R)[None, :]
  length = state.prompt_length[:, None]
  response = jnp.clip(index - length, 0, R - 1)
  tokens = jnp.where(
    index < length,
    jnp.pad(state.prompts, ((0, 0), (0, R))),
    jnp.take_along_axis(state.tokens, response, axis=1),
  )
  kv = _prefill(params, spec, tokens, _routed(state, index - (length - 1)))
  # Ring column c of a slot holds its fed token (c - start) mod R, counted from
  # the last prompt token.
  fed = (jnp.arange(R)[None, :] - state.start_step[:, None]) % R
  source = jnp.minimum(length - 1 + fed, P + R - 1)
  source = jnp.concatenate(
    [jnp.broadcast_to(jnp.arange(P), (spec.num_slots, P)), source], axis=1
  )

  def place(fresh: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(fresh, source[:, :, None, None], axis=1)
    return picked.swapaxes(1, 2)

  return state._replace(
    cache=state.cache._replace(
      keys=tuple(map(place, kv.keys)),
      values=tuple(map(place, kv.values)),
      positions=None if state.cache.positions is None else source,
    )
  )


def _routed(state: DecodeState, fed: jax.Array) -> jax.Array | None:
  """Experts that tokens took when they were fed; -1 where they were not."""
  if state.experts is None:
    return None
  known = (fed >= 0) & (fed < state.num_tokens[:, None])
  R = state.experts.shape[1]
  found = jnp.take_along_axis(
    state.experts, jnp.clip(fed, 0, R - 1)[:, :, None, None], axis=1
  )
  return jnp.where(known[:, :, None, None], found, -1).astype(jnp.int32)


def _prefill(
  params: transformer.Params,
  spec: DecodeSpec,
  tokens: jax.Array,
  routed_experts: jax.Array | None = None,
) -> transformer.KeyValues:
  B, T = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  out = transformer.forward(
    params,
    spec.model,
    tokens,
    positions,
    jnp.ones((B, T), jnp.int32),
    collect_kv=True,
    routed_experts=routed_experts,
  )
  assert out.kv is not None
  return out.kv


def _visible(spec: DecodeSpec, state: DecodeState) -> jax.Array:
  P, R = spec.prompt_tokens, spec.response_tokens
  in_prompt = jnp.arange(P)[None, :] < state.prompt_length[:, None] - 1
  age = (state.step - 1 - jnp.arange(R)) % R  # Steps since it was written.
  in_ring = age[None, :] < (state.step - state.start_step)[:, None]
  return jnp.concatenate([in_prompt, in_ring], axis=1)


def _advance_cache(
  params: transformer.Params,
  spec: DecodeSpec,
  state: DecodeState,
) -> tuple[jax.Array, jax.Array | None, DecodeState]:
  column = spec.prompt_tokens + state.step % spec.response_tokens
  cache = state.cache._replace(
    visible=_visible(spec, state), column=column.astype(jnp.int32)
  )
  position = state.prompt_length - 1 + state.num_tokens
  out = transformer.forward(
    params,
    spec.model,
    state.last_token[:, None],
    position[:, None],
    None,
    cache,
  )
  last = out.hidden[:, 0].astype(jnp.float32)
  logits = jnp.einsum('ND,VD->NV', last, params['head_rows'])
  assert out.cache is not None
  experts = None
  if out.routing is not None:
    experts = out.routing.experts[:, :, 0].swapaxes(0, 1)  # [N, L, k]
  state = state._replace(cache=out.cache, step=state.step + 1)
  return logits, experts, state


def _no_experts(spec: DecodeSpec) -> jax.Array:
  model = spec.model
  if model.moe is None:
    raise ValueError('record_routing=True needs a model with experts')
  sizes = (model.num_layers, model.moe.experts_per_token)
  shape = (spec.num_slots, spec.response_tokens, *sizes)
  return jnp.full(shape, -1, jnp.int16)


def _record(
  spec: DecodeSpec,
  state: DecodeState,
  logits: jax.Array,
  experts: jax.Array | None,
  version: jax.Array,
) -> DecodeState:
  running = state.status == RUNNING
  uniform = sampling.uniforms(state.keys, state.num_tokens)
  token, logp = sampling.sample(logits, uniform, temperature=spec.temperature)
  is_forced = jnp.zeros_like(running)
  limits = state.limits
  over_budget = jnp.zeros_like(running)
  if spec.interruption is not None and limits is not None:
    forced, is_forced = spec.interruption.forced_token(limits)
    token = jnp.where(is_forced, forced, token)
    advanced = spec.interruption.advance(limits, token, is_forced)
    limits = jax.tree.map(
      lambda new, old: jnp.where(running, new, old), advanced, limits
    )
    over_budget = spec.interruption.exhausted(limits)
  num_tokens = state.num_tokens + running
  is_stop = token[:, None] == jnp.asarray(spec.stop_ids, jnp.int32)[None, :]
  stopped = jnp.any(is_stop, axis=1) & ~is_forced
  truncated = over_budget | (num_tokens >= spec.response_tokens)
  status = jnp.where(stopped, STOPPED, jnp.where(truncated, TRUNCATED, RUNNING))
  here = jnp.arange(spec.response_tokens)[None, :] == state.num_tokens[:, None]
  here &= running[:, None]

  def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(here, jnp.reshape(value, (-1, 1)), buffer)

  routed = state.experts
  if routed is not None and experts is not None:
    at = jnp.where(running, state.num_tokens, spec.response_tokens)
    slots = jnp.arange(spec.num_slots)
    # Not as `put` does: the buffer is large, and most of it stays.
    routed = routed.at[slots, at].set(experts.astype(routed.dtype), mode='drop')
  return state._replace(
    last_token=jnp.where(running, token, state.last_token),
    num_tokens=num_tokens.astype(jnp.int32),
    status=jnp.where(running, status, state.status).astype(jnp.int32),
    limits=limits,
    tokens=put(state.tokens, token),
    logps=put(state.logps, jnp.where(is_forced, 0.0, logp)),
    versions=put(state.versions, version),
    sampled=put(state.sampled, ~is_forced),
    experts=routed,
  )
