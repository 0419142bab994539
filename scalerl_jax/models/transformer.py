"""A decoder-only transformer as pure functions over a plain pytree.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, dense or as a
mixture of experts: the shape shared by Llama 3 and 4, Qwen2.5 and Qwen3. One
`forward` serves training (whole rows with segment ids), prefill (the same, keys
and values collected) and decoding (new tokens against a cache).
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from scalerl_jax import arrays
from scalerl_jax import sharding
from scalerl_jax.losses import logps
from scalerl_jax.models import attention
from scalerl_jax.models import cache as cache_lib
from scalerl_jax.models import layers
from scalerl_jax.models import moe
from scalerl_jax.models import spec as spec_lib

Params = dict[str, Any]
# Whose logits a device of a mesh holds at one time.
_CHUNK_TOKENS = 4096


class KeyValues(NamedTuple):
  """Keys and values of every layer, for the tokens of a forward pass."""

  keys: Float[Array, 'L B T K H']
  values: Float[Array, 'L B T K H']


class Output(NamedTuple):
  """What `forward` returns."""

  hidden: Float[Array, 'B T D']  # After the final norm; input of the head.
  cache: cache_lib.KVCache | None  # Updated; None where none was given.
  kv: KeyValues | None  # None unless collected.
  routing: moe.Routing | None  # Stacked, [L, ...]; None for a dense model.


def init_params(spec: spec_lib.ModelSpec, key: jax.Array) -> Params:
  """Draws float32 parameters.

  Under `jit` with shardings the values are the same to the bit, and no array is
  ever whole on one device.

  Args:
    spec: The model.
    key: PRNG key, consumed.

  Returns:
    The parameter pytree: nested dicts by the paths of `parameter_table`.
  """
  table = spec_lib.parameter_table(spec)
  params: Params = {}
  for (path, info), k in zip(
    table.items(), jax.random.split(key, len(table)), strict=True
  ):
    if info.scale is None:
      value = jnp.ones(info.shape, jnp.float32)
    else:
      normal = jax.random.normal(k, info.shape, jnp.float32)
      # Else a compiler merges the scale into the last factor of `normal`.
      value = info.scale * jax.lax.optimization_barrier(normal)
    _insert(params, path, value)
  return params


def abstract_params(spec: spec_lib.ModelSpec) -> Params:
  """Describes parameters without allocating them.

  Args:
    spec: The model.

  Returns:
    A tree like that of `init_params`; leaves are `jax.ShapeDtypeStruct`.
  """
  params: Params = {}
  for path, info in spec_lib.parameter_table(spec).items():
    _insert(params, path, jax.ShapeDtypeStruct(info.shape, jnp.float32))
  return params


def logical_axes(spec: spec_lib.ModelSpec) -> Params:
  """Names the axes of every parameter, for the sharding rules.

  Args:
    spec: The model.

  Returns:
    A tree like the parameters; leaves are tuples of axis names (None: never
    sharded).
  """
  axes: Params = {}
  for path, info in spec_lib.parameter_table(spec).items():
    _insert(axes, path, info.axes)
  return axes


def head_matrix(params: Params) -> Float[Array, 'D V']:
  """Returns the LM head: its own array, or the transposed embedding.

  Args:
    params: Parameters of a model.

  Returns:
    The head, in the dtype it is stored in; cast where logits are computed.
  """
  return params['head'] if 'head' in params else params['embed'].T


def unstack_layers(params: Params) -> Params:
  """Splits the stacked blocks, once, for a loop that uses them many times.

  Slicing a stack inside the decode loop copies the weights at every step.

  Args:
    params: Parameters of a model.

  Returns:
    The same with `layers` a tuple of one dict per block; as they are if it is.
  """
  stacked = params['layers']
  if not isinstance(stacked, dict):
    return params
  num_layers = jax.tree.leaves(stacked)[0].shape[0]
  blocks = tuple(
    jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(num_layers)
  )
  return {**params, 'layers': blocks}


def forward(
  params: Params,
  spec: spec_lib.ModelSpec,
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  segment_ids: Int[Array, 'B T'] | None,
  cache: cache_lib.KVCache | None = None,
  *,
  collect_kv: bool = False,
  routed_experts: Int[Array, 'B T L k'] | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Output:
  """Runs the transformer up to the input of the LM head.

  Args:
    params: From `init_params`; blocks may be unstacked where `cache` is given.
    spec: The model (static).
    tokens: Token ids.
    positions: Position of each token in its own sequence, from 0.
    segment_ids: Tokens see their own segment only. Not used with a cache.
    cache: None for whole rows. Else the new tokens are written at its column
      and see the visible columns and, among the new, those up to themselves.
    collect_kv: Whether to return the keys and values of whole rows.
    routed_experts: Experts that tokens of whole rows take, as `moe.route` says;
      None: each chooses for itself.
    mesh: That parameters are sharded over, to place the activations of whole
      rows: left to itself the compiler may compute all rows on every device
      rather than gather the weights. None: they are not placed.

  Returns:
    `Output`.

  Raises:
    ValueError: Neither segment_ids nor a cache is given, or routed_experts for
      a model without experts.
  """
  if routed_experts is not None and spec.moe is None:
    raise ValueError('routed_experts are given for a model without experts')
  x = params['embed'][tokens].astype(spec.dtype)
  frequencies = layers.rope_frequencies(
    head_dim=spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling
  )
  place = _Place(positions, *layers.rope_tables(positions, frequencies))
  if cache is not None:
    x, cache, routing = _cached_blocks(params, spec, x, place, cache)
    kv = None
  else:
    if segment_ids is None:
      raise ValueError('segment_ids are needed where no cache is given')
    if mesh is not None:
      placement = sharding.placement(mesh)
      for where in placement:
        x = jax.lax.with_sharding_constraint(x, where)
    x, kv, routing = _scanned_blocks(
      params, spec, x, place, segment_ids, routed_experts, collect_kv, mesh
    )
  hidden = layers.rms_norm(x, params['final_norm'], eps=spec.norm_eps)
  return Output(hidden, cache, kv, routing)


def chunk_tokens(
  spec: spec_lib.ModelSpec, mesh: jax.sharding.Mesh | None
) -> int:
  """Tells of how many tokens a device holds logits at one time, by default.

  Args:
    spec: The model.
    mesh: As for `make_policy_fn`.

  Returns:
    On several devices 4,096, because each chunk may gather the head and reduce
    its gradient; on one, what `losses.token_logps` takes.
  """
  if mesh is not None and mesh.size > 1:
    return _CHUNK_TOKENS
  return logps.default_chunk_size(vocab_size=spec.vocab_size)


def make_policy_fn(
  spec: spec_lib.ModelSpec,
  *,
  temperature: float,
  chunk_size: int | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Any]:
  """Makes the function that scores given tokens, as the train step wants it.

  Column t of the result is about token t, predicted from the tokens before it;
  column 0 and the first token of each segment have nothing to be predicted
  from and must be masked.

  Args:
    spec: The model.
    temperature: Sampling temperature; logits are divided by it.
    chunk_size: Tokens whose logits exist at one time, over all devices. None:
      `chunk_tokens` of each shard of the rows.
    mesh: As for `forward`.

  Returns:
    (params, tokens, positions, segment_ids) → `TokenScores`; of a mixture,
    `RoutedScores`, and `routed_experts` may be given, as for `forward`. With
    `token_loss`, log π → loss of each token, as `losses.fused_loss` takes it:
    (their sum, scores), by that function.
  """
  if chunk_size is None:
    row_shards = 1 if mesh is None else sharding.num_row_shards(mesh)
    chunk_size = chunk_tokens(spec, mesh) * row_shards

  def policy_fn(
    params: Params,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    segment_ids: Int[Array, 'B T'],
    *,
    token_loss: jax.tree_util.Partial | None = None,
    routed_experts: Int[Array, 'B T L k'] | None = None,
  ) -> Any:
    hidden, _, _, routing = forward(
      params,
      spec,
      tokens,
      positions,
      segment_ids,
      routed_experts=routed_experts,
      mesh=mesh,
    )
    router = None
    if routing is not None:
      router = moe.summarize(spec, routing, segment_ids > 0)
    inputs = (hidden[:, :-1], head_matrix(params), tokens[:, 1:])
    settings: dict[str, Any] = {
      'temperature': temperature,
      'chunk_size': chunk_size,
    }
    if token_loss is None:
      scores = logps.token_logps(*inputs, **settings)
      return _from_column_one(scores, router)
    token_loss = jax.tree.map(lambda x: x[:, 1:], token_loss)
    loss, scores = logps.fused_loss(*inputs, loss_fn=token_loss, **settings)
    return loss, _from_column_one(scores, router)

  return policy_fn


def _from_column_one(
  scores: arrays.TokenScores, router: arrays.RouterStats | None
) -> arrays.TokenScores | arrays.RoutedScores:
  scores = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), scores)
  return scores if router is None else arrays.RoutedScores(*scores, router)


def _insert(tree: Params, path: str, value: Any) -> None:
  *parents, name = path.split('/')
  for parent in parents:
    tree = tree.setdefault(parent, {})
  tree[name] = value


class _Place(NamedTuple):
  """Where the tokens of a forward pass are."""

  positions: Int[Array, 'B T']
  cos: Float[Array, 'B T H2']
  sin: Float[Array, 'B T H2']


def _qkv(
  block: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  place: _Place,
  is_local: bool | jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  h = layers.rms_norm(x, block['attention_norm'], eps=spec.norm_eps)
  q, k, v = (jnp.einsum('BTD,DNH->BTNH', h, block[n]) for n in 'qkv')
  if spec.qkv_bias:
    q, k, v = (
      y + block[f'{n}_bias'][None, None]
      for y, n in zip((q, k, v), 'qkv', strict=True)
    )
  if spec.qk_norm:
    q = layers.rms_norm(q, block['q_norm'], eps=spec.norm_eps)
    k = layers.rms_norm(k, block['k_norm'], eps=spec.norm_eps)
  local = spec.local_attention
  if local is None:
    q, k = (layers.rope(y, place.cos, place.sin) for y in (q, k))
    return q, k, v
  assert is_local is not None
  grown = jnp.log1p((place.positions + 1) // local.floor_tokens)
  scale = (1 + local.scale * grown)[..., None, None]

  def turn(y: jax.Array, otherwise: jax.Array) -> jax.Array:
    y = layers.rope(y, place.cos, place.sin)
    if local.qk_norm:
      y = layers.rms_norm(y, None, eps=spec.norm_eps)
    return jnp.where(is_local, y, otherwise.astype(y.dtype))

  return turn(q, q * scale), turn(k, k), v


def _finish_block(
  block: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  attended: jax.Array,
  replayed: jax.Array | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, moe.Routing | None]:
  x = x + jnp.einsum('BTNH,NHD->BTD', attended, block['o'])
  h = layers.rms_norm(x, block['mlp_norm'], eps=spec.norm_eps)

  def dense(prefix: str) -> jax.Array:
    matrices = (block[f'{prefix}{n}'] for n in ('gate', 'up', 'down'))
    return layers.swiglu(h, *matrices)

  if spec.moe is None:
    return x + dense(''), None
  weights, routing = moe.route(h, block['router'], spec.moe, replayed)
  x = x + moe.feed_forward(block, spec, h, weights, routing.experts, mesh)
  if spec.moe.shared_dim:
    x = x + dense('shared_')
  return x, routing


def _scanned_blocks(
  params: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  place: _Place,
  segment_ids: jax.Array,
  routed_experts: jax.Array | None,
  collect_kv: bool,
  mesh: jax.sharding.Mesh | None,
) -> tuple[jax.Array, KeyValues | None, moe.Routing | None]:
  is_local = finer = None
  if spec.local_attention is not None:
    is_local = jnp.array([spec.is_local(i) for i in range(spec.num_layers)])
    # A chunk of a segment is a segment of its own.
    chunks = place.positions // spec.local_attention.chunk_tokens
    finer = segment_ids * segment_ids.shape[1] + chunks

  def block_fn(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
    block, is_local, replayed = layer
    block = _cast(block, spec)
    segments = segment_ids
    if finer is not None:
      segments = jnp.where(is_local, finer, segment_ids)
    with jax.named_scope('attention'):
      q, k, v = _qkv(block, spec, x, place, is_local)
      attended = attention.segment_attention(q, k, v, segments)
    with jax.named_scope('mlp'):
      x, routing = _finish_block(block, spec, x, attended, replayed, mesh)
    if mesh is not None:
      rows = sharding.placement(mesh).rows
      x = jax.lax.with_sharding_constraint(x, rows)
    return x, (KeyValues(k, v) if collect_kv else None, routing)

  if spec.remat == 'dots':
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    block_fn = jax.checkpoint(block_fn, policy=policy)
  elif spec.remat == 'full':
    block_fn = jax.checkpoint(block_fn)
  if routed_experts is not None:
    routed_experts = jnp.moveaxis(routed_experts, 2, 0)
  stacked = (params['layers'], is_local, routed_experts)
  x, (kv, routing) = jax.lax.scan(block_fn, x, stacked)
  return x, kv, routing


def _cached_blocks(
  params: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  place: _Place,
  cache: cache_lib.KVCache,
) -> tuple[jax.Array, cache_lib.KVCache, moe.Routing | None]:
  params = unstack_layers(params)
  T = x.shape[1]
  S = cache.visible.shape[1]
  age = jnp.arange(S) - cache.column  # [S]; 0 at the first new column.
  is_new = (age >= 0) & (age < T)
  earlier = age[None, :] <= jnp.arange(T)[:, None]  # [T, S]
  mask = jnp.where(is_new[None, None], earlier[None], cache.visible[:, None])
  positions, local_mask = cache.positions, mask
  if spec.local_attention is not None:
    assert positions is not None
    positions = jax.lax.dynamic_update_slice_in_dim(
      positions, place.positions, cache.column, axis=1
    )
    query, key = (
      p // spec.local_attention.chunk_tokens
      for p in (place.positions, positions)
    )
    local_mask = mask & (query[:, :, None] == key[:, None, :])
  keys, values, routings = [], [], []
  write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
  for i, block in enumerate(params['layers']):
    block = _cast(block, spec)
    is_local = spec.is_local(i)
    q, k, v = _qkv(block, spec, x, place, is_local)
    keys.append(write(cache.keys[i], k.swapaxes(1, 2), cache.column))
    values.append(write(cache.values[i], v.swapaxes(1, 2), cache.column))
    attended = attention.cached_attention(
      q, keys[i], values[i], local_mask if is_local else mask
    )
    x, routing = _finish_block(block, spec, x, attended)
    routings.append(routing)
  new_cache = cache_lib.KVCache(
    keys=tuple(keys),
    values=tuple(values),
    visible=cache.visible | is_new[None],
    positions=positions,
    column=cache.column + T,
  )
  return x, new_cache, jax.tree.map(lambda *y: jnp.stack(y), *routings)


def _cast(block: Params, spec: spec_lib.ModelSpec) -> Params:
  # The router is small, and its choice is not to depend on the dtype.
  return {
    name: w if name == 'router' else w.astype(spec.dtype)
    for name, w in block.items()
  }
