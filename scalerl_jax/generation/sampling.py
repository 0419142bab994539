"""Sampling of one token per slot, from randomness tied to the request."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import UInt32


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

  Costs one cumulative sum, where the Gumbel trick draws V random numbers.

  Args:
    logits: Float32.
    uniform: u, in [0, 1).
    temperature: T, positive; nothing else shapes the distribution.

  Returns:
    (token, log p of the token), the latter in float32 nats.
  """
  logp = jax.nn.log_softmax(logits / temperature, axis=-1)
  cumulative = jnp.cumsum(jnp.exp(logp), axis=-1)
  # Rounding leaves the total beside 1: scale u so that it cannot overshoot.
  threshold = uniform * cumulative[:, -1]
  token = jnp.sum(cumulative <= threshold[:, None], axis=-1).astype(jnp.int32)
  overshot = token >= logits.shape[-1]
  token = jnp.where(overshot, jnp.argmax(logp, axis=-1), token)
  token = token.astype(jnp.int32)
  return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]
