"""Attention over whole rows, with segment ids, and over a cache.

Both functions attend with `num_heads` queries to `num_kv_heads` keys and
values (grouped-query attention, arXiv:2305.13245).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

# (query, key) pairs of a head and a row whose scores exist at one time.
_MAX_PAIRS = 2**21


def segment_mask(
  segment_ids: Int[Array, 'B T'],
  *,
  start: int | Int[Array, ''] = 0,
  num_queries: int | None = None,
) -> Bool[Array, 'B 1 Q T']:
  """Lets each token see its own segment up to itself.

  Args:
    segment_ids: Segment of each token; equal ids in a row belong together.
    start: First of the queries.
    num_queries: Q; None: all T.

  Returns:
    [B, 1, query, key]; True means visible. A token always sees itself, so no
    row of the softmax is empty, padding included.
  """
  T = segment_ids.shape[1]
  Q = T if num_queries is None else num_queries
  queries = jax.lax.dynamic_slice_in_dim(segment_ids, start, Q, axis=1)
  same = queries[:, :, None] == segment_ids[:, None, :]
  causal = jnp.arange(T)[None, :] <= start + jnp.arange(Q)[:, None]
  return (same & causal[None])[:, None]


def segment_attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B T K H'],
  v: Float[Array, 'B T K H'],
  segment_ids: Int[Array, 'B T'],
) -> Float[Array, 'B T N H']:
  """Attends over whole rows, as in training and prefill.

      softmax(q·kᵀ / √H)·v   over the visible keys

  Long rows are attended in blocks of queries, whose scores the backward pass
  computes again, so that memory grows with T and not with T².

  Args:
    q: Queries.
    k: Keys.
    v: Values.
    segment_ids: As for `segment_mask`.

  Returns:
    Attended values.
  """
  B, T, N, H = q.shape
  size = max(1, _MAX_PAIRS // T)
  if size >= T:
    mask = segment_mask(segment_ids)
    return jax.nn.dot_product_attention(q, k, v, mask=mask)
  num_blocks = -(-T // size)
  size = -(-T // num_blocks)
  # The last block begins earlier rather than to reach beyond the row.
  starts = jnp.minimum(jnp.arange(num_blocks) * size, T - size)
  # So that the gradients of all blocks add up in float32.
  k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)

  @jax.checkpoint
  def attend(start: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice_in_dim(q, start, size, axis=1)
    mask = segment_mask(segment_ids, start=start, num_queries=size)
    return jax.nn.dot_product_attention(
      part, k32.astype(k.dtype), v32.astype(v.dtype), mask=mask
    )

  parts = jax.lax.map(attend, starts)  # [blocks, B, size, N, H]
  whole = parts[:-1].swapaxes(0, 1).reshape(B, -1, N, H)
  last = parts[-1, :, whole.shape[1] - (T - size) :]
  return jnp.concatenate([whole, last], axis=1)


def cached_attention(
  q: Float[Array, 'B T N H'],
  keys: Float[Array, 'B K S H'],
  values: Float[Array, 'B K S H'],
  mask: Bool[Array, 'B T S'],
) -> Float[Array, 'B T N H']:
  """Attends to a cache laid out [B, K, S, H], as in decoding.

  The order of the cache columns does not matter: keys carry their rotary
  position, and the mask says which columns a query sees.

  Args:
    q: Queries of the new tokens.
    keys: Cached keys, those of the new tokens included.
    values: Cached values.
    mask: True where query t of row b sees column s.

  Returns:
    Attended values.
  """
  B, T, N, H = q.shape
  K = keys.shape[1]
  grouped = q.reshape(B, T, K, N // K, H)
  scores = jnp.einsum(
    'BTKGH,BKSH->BKGTS', grouped, keys, preferred_element_type=jnp.float32
  )
  scores = scores * H**-0.5
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  out = jnp.einsum('BKGTS,BKSH->BTKGH', weights, values)
  return out.reshape(B, T, N, H)
