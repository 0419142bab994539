"""Attention behind one interface, with segment ids and with a cache.

Both functions attend with `num_heads` queries to `num_kv_heads` keys and
values (grouped-query attention, arXiv:2305.13245).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def segment_mask(
  segment_ids: Int[Array, 'B T'],
) -> Bool[Array, 'B 1 T T']:
  """Lets each token see its own segment up to itself.

  Args:
    segment_ids: Segment of each token; equal ids in a row belong together.

  Returns:
    [B, 1, query, key]; True means visible. A token always sees itself, so no
    row of the softmax is empty, padding included.
  """
  T = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  causal = jnp.tril(jnp.ones((T, T), bool))
  return (same & causal[None])[:, None]


def full_attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B T K H'],
  v: Float[Array, 'B T K H'],
  mask: Bool[Array, 'B 1 T T'],
) -> Float[Array, 'B T N H']:
  """Attends over whole rows, as in training and prefill.

      softmax(q·kᵀ / √H)·v   over the visible keys

  Args:
    q: Queries.
    k: Keys.
    v: Values.
    mask: From `segment_mask`.

  Returns:
    Attended values.
  """
  return jax.nn.dot_product_attention(q, k, v, mask=mask)


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
