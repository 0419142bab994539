"""A decoder-only transformer as pure functions over a plain pytree.

RMSNorm, rotary positions, grouped-query attention and SwiGLU: the shape shared
by Llama 3, Qwen2.5 and Qwen3. One `forward` serves training (whole rows with
segment ids), prefill (the same, keys and values collected) and decoding (new
tokens against a cache).
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
from scalerl_jax.models import spec as spec_lib

Params = dict[str, Any]
CHUNK_TOKENS = 4096  # Whose logits a device of a mesh holds at one time.


class KeyValues(NamedTuple):
  """Keys and values of every layer, for the tokens of a forward pass."""

  keys: Float[Array, 'L B T K H']
  values: Float[Array, 'L B T K H']


class Output(NamedTuple):
  """What `forward` returns."""

  hidden: Float[Array, 'B T D']  # After the final norm; input of the head.
  cache: cache_lib.KVCache | None  # Updated; None where none was given.
  kv: KeyValues | None  # None unless collected.


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
    params: Parameters of a model, blocks stacked.

  Returns:
    The same with `layers` a tuple of one dict per block.
  """
  stacked = params['layers']
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
  placement: sharding.Placement | None = None,
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
    placement: Of activations of whole rows, where parameters are sharded; None:
      left to the compiler, which may choose to compute all rows on every device
      rather than to gather the weights.

  Returns:
    `Output`.
  """
  x = params['embed'][tokens].astype(spec.dtype)
  frequencies = layers.rope_frequencies(
    head_dim=spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling
  )
  cos, sin = layers.rope_tables(positions, frequencies)
  if cache is not None:
    x, cache = _cached_blocks(params, spec, x, cos, sin, cache)
    kv = None
  else:
    if segment_ids is None:
      raise ValueError('segment_ids are needed where no cache is given')
    mask = attention.segment_mask(segment_ids)

    def spread(x: jax.Array) -> jax.Array:
      if placement is None:
        return x
      return jax.lax.with_sharding_constraint(x, placement.rows)

    if placement is not None:
      x = jax.lax.with_sharding_constraint(x, placement.embedded)
    x, kv = _scanned_blocks(
      params, spec, spread(x), cos, sin, mask, collect_kv, spread
    )
  hidden = layers.rms_norm(x, params['final_norm'], eps=spec.norm_eps)
  return Output(hidden, cache, kv)


def make_policy_fn(
  spec: spec_lib.ModelSpec,
  *,
  temperature: float,
  chunk_size: int | None = None,
  placement: sharding.Placement | None = None,
) -> Callable[..., Any]:
  """Makes the function that scores given tokens, as the train step wants it.

  Column t of the result is about token t, predicted from the tokens before it;
  column 0 and the first token of each segment have nothing to be predicted
  from and must be masked.

  Args:
    spec: The model.
    temperature: Sampling temperature; logits are divided by it.
    chunk_size: Tokens whose logits exist at one time, over all devices. None:
      what `losses.token_logps` takes; on a mesh `CHUNK_TOKENS` of each shard of
      the rows, because each chunk may gather the head and reduce its gradient.
    placement: As for `forward`.

  Returns:
    (params, tokens, positions, segment_ids) → `TokenScores`. With `token_loss`,
    log π → loss of each token, as `losses.fused_loss` takes it: (their sum,
    `TokenScores`), by that function.
  """
  if chunk_size is None and placement is not None:
    sizes = placement.rows.mesh.shape
    chunk_size = CHUNK_TOKENS * sizes['data'] * sizes['fsdp']

  def policy_fn(
    params: Params,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    segment_ids: Int[Array, 'B T'],
    *,
    token_loss: jax.tree_util.Partial | None = None,
  ) -> Any:
    hidden = forward(
      params, spec, tokens, positions, segment_ids, placement=placement
    ).hidden
    inputs = (hidden[:, :-1], head_matrix(params), tokens[:, 1:])
    settings: dict[str, Any] = {
      'temperature': temperature,
      'chunk_size': chunk_size,
    }
    if token_loss is None:
      return _from_column_one(logps.token_logps(*inputs, **settings))
    token_loss = jax.tree.map(lambda x: x[:, 1:], token_loss)
    loss, scores = logps.fused_loss(*inputs, loss_fn=token_loss, **settings)
    return loss, _from_column_one(scores)

  return policy_fn


def _from_column_one(scores: arrays.TokenScores) -> arrays.TokenScores:
  return arrays.TokenScores(*(jnp.pad(x, ((0, 0), (1, 0))) for x in scores))


def _insert(tree: Params, path: str, value: Any) -> None:
  *parents, name = path.split('/')
  for parent in parents:
    tree = tree.setdefault(parent, {})
  tree[name] = value


def _qkv(
  block: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
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
  return layers.rope(q, cos, sin), layers.rope(k, cos, sin), v


def _finish_block(
  block: Params, spec: spec_lib.ModelSpec, x: jax.Array, attended: jax.Array
) -> jax.Array:
  x = x + jnp.einsum('BTNH,NHD->BTD', attended, block['o'])
  h = layers.rms_norm(x, block['mlp_norm'], eps=spec.norm_eps)
  return x + layers.swiglu(h, block['gate'], block['up'], block['down'])


def _scanned_blocks(
  params: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  mask: jax.Array,
  collect_kv: bool,
  spread: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, KeyValues | None]:
  def block_fn(
    x: jax.Array, block: Params
  ) -> tuple[jax.Array, KeyValues | None]:
    block = jax.tree.map(lambda w: w.astype(spec.dtype), block)
    with jax.named_scope('attention'):
      q, k, v = _qkv(block, spec, x, cos, sin)
      attended = attention.full_attention(q, k, v, mask)
    with jax.named_scope('mlp'):
      x = _finish_block(block, spec, x, attended)
    return spread(x), KeyValues(k, v) if collect_kv else None

  if spec.remat == 'dots':
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    block_fn = jax.checkpoint(block_fn, policy=policy)
  elif spec.remat == 'full':
    block_fn = jax.checkpoint(block_fn)
  return jax.lax.scan(block_fn, x, params['layers'])


def _cached_blocks(
  params: Params,
  spec: spec_lib.ModelSpec,
  x: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  cache: cache_lib.KVCache,
) -> tuple[jax.Array, cache_lib.KVCache]:
  if isinstance(params['layers'], dict):
    params = unstack_layers(params)
  T = x.shape[1]
  S = cache.visible.shape[1]
  age = jnp.arange(S) - cache.column  # [S]; 0 at the first new column.
  is_new = (age >= 0) & (age < T)
  earlier = age[None, :] <= jnp.arange(T)[:, None]  # [T, S]
  mask = jnp.where(is_new[None, None], earlier[None], cache.visible[:, None])
  keys, values = [], []
  write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
  for i, block in enumerate(params['layers']):
    block = jax.tree.map(lambda w: w.astype(spec.dtype), block)
    q, k, v = _qkv(block, spec, x, cos, sin)
    keys.append(write(cache.keys[i], k.swapaxes(1, 2), cache.column))
    values.append(write(cache.values[i], v.swapaxes(1, 2), cache.column))
    attended = attention.cached_attention(q, keys[i], values[i], mask)
    x = _finish_block(block, spec, x, attended)
  new_cache = cache_lib.KVCache(
    keys=tuple(keys),
    values=tuple(values),
    visible=cache.visible | is_new[None],
    column=cache.column + T,
  )
  return x, new_cache
