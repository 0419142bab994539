"""Sampling of one token per slot, from randomness tied to the request."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import UInt32

_BLOCK = 256


def slot_keys(
  key: jax.Array, visit: Int[Array, ' N'], sample: Int[Array, ' N']
) -> UInt32[Array, 'N 2']:
  """Derives the key of each rollout from what identifies it.

  Args:
    key: The run's sampling key; not consumed (only folded into).
    visit: Prompt visit of each slot.
    sample: Sample of the visit, in [0, G).

  Returns:
    Key data of each slot, a function of (key, visit, sample) alone.
  """

  def one(v: jax.Array, s: jax.Array) -> jax.Array:
    folded = jax.random.fold_in(jax.random.fold_in(key, v), s)
    return jax.random.key_data(folded)

  return jax.vmap(one)(visit, sample)


def uniforms(
  keys: UInt32[Array, 'N 2'], position: Int[Array, ' N']
) -> Float[Array, ' N']:
  """Draws the uniform number of each slot at a position of its response.

  Args:
    keys: From `slot_keys`.
    position: Index of the token in the response; negative positions are free
      for draws that are not tokens.

  Returns:
    Numbers in [0, 1).
  """

  def one(data: jax.Array, p: jax.Array) -> jax.Array:
    folded = jax.random.fold_in(jax.random.wrap_key_data(data), p)
    return jax.random.uniform(folded)

  return jax.vmap(one)(keys, position)


def sample(
  logits: Float[Array, 'N V'],
  uniform: Float[Array, ' N'],
  *,
  temperature: float,
) -> tuple[Int[Array, ' N'], Float[Array, ' N']]:
  """Samples by inverting the cumulative distribution: one uniform per slot.

      p = softmax(logits / T),   token = min {i : Σ_{j ≤ i} p_j > u}

  Costs one pass over the logits, where the Gumbel trick draws V random numbers:
  the sums of blocks of tokens say in which block the token is, and only that
  block is summed token by token.

  Args:
    logits: Float32.
    uniform: u, in [0, 1).
    temperature: T, positive; nothing else shapes the distribution.

  Returns:
    (token, log p of the token), the latter in float32 nats.
  """
  N, V = logits.shape
  scaled = logits / temperature
  largest = jnp.max(scaled, axis=-1, keepdims=True)
  weights = jnp.exp(scaled - largest)
  weights = jnp.pad(weights, ((0, 0), (0, -V % _BLOCK))).reshape(N, -1, _BLOCK)
  of_block = jnp.sum(weights, axis=-1)
  until = jnp.cumsum(of_block, axis=-1)
  # Rounding leaves the total beside 1: scale u so that it cannot overshoot.
  total = until[:, -1]
  threshold = uniform * total
  block = _first_above(until, threshold, of_block)[:, None]
  within = jnp.take_along_axis(weights, block[:, None], axis=1)[:, 0]
  # Not until - of_block, which may be above the threshold by a rounding.
  before = jnp.take_along_axis(until, jnp.maximum(block - 1, 0), axis=-1)
  before = jnp.where(block > 0, before, 0.0)
  column = _first_above(before + jnp.cumsum(within, axis=-1), threshold, within)
  token = block * _BLOCK + column[:, None]
  logp = jnp.take_along_axis(scaled, token, axis=-1) - largest
  return token[:, 0].astype(jnp.int32), logp[:, 0] - jnp.log(total)


def _first_above(
  sums: Float[Array, 'N M'],
  threshold: Float[Array, ' N'],
  weights: Float[Array, 'N M'],
) -> Int[Array, ' N']:
  """Finds the first sum above the threshold; in a pinch, the largest weight."""
  index = jnp.sum(sums <= threshold[:, None], axis=-1)
  # Sums in another order may fall short of the threshold by a rounding.
  return jnp.where(index < sums.shape[-1], index, jnp.argmax(weights, axis=-1))
