"""Log-probs of given tokens without ever holding all logits.

A [B, T, V] float32 array is the largest of a naive train step (25 GiB at 16k
tokens and V = 128k). Here tokens are scored in chunks, and the backward pass
computes a chunk's logits again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from scalerl_jax import arrays


def token_logps(
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'D V'],
  targets: Int[Array, 'B T'],
  *,
  temperature: float = 1.0,
  chunk_size: int = 4096,
  softcap: float | None = None,
) -> arrays.TokenScores:
  """Scores targets under the softmax of an LM head, in float32.

      zₜ = W·hₜ / τ,   log π(yₜ) = zₜ[yₜ] - log Σ_v exp zₜ[v]
      H(π) = log Σ_v exp zₜ[v] - Σ_v π(v)·zₜ[v]

  The caller aligns: `hidden` at t must be what predicts `targets` at t.
  Inputs are cast to float32 in the forward pass, stored weights are left as
  they are, and gradients flow back in the dtypes of the inputs.

  Args:
    hidden: Inputs of the head.
    head: W, the LM head.
    targets: Token ids in [0, V).
    temperature: τ, positive: the one that the engine sampled with.
    chunk_size: Tokens whose logits exist at one time; peak memory is
      chunk_size · V floats.
    softcap: None, or c to squash the logits by c · tanh(z / c) before the
      temperature (Gemma 2).

  Returns:
    (logp, entropy), both float32 nats; differentiable in `hidden` and `head`.

  Raises:
    ValueError: temperature or chunk_size is not positive, or the shapes differ.
  """
  if temperature <= 0 or chunk_size < 1:
    raise ValueError(
      f'temperature={temperature} and chunk_size={chunk_size} must be positive'
    )
  B, T, D = hidden.shape
  if targets.shape != (B, T) or head.shape[0] != D:
    raise ValueError(
      f'hidden {hidden.shape}, head {head.shape} and targets {targets.shape}'
      ' must be [B, T, D], [D, V] and [B, T]'
    )

  def score(h: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = h.astype(jnp.float32) @ head.astype(jnp.float32)  # [chunk, V]
    if softcap is not None:
      logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    probs = jnp.exp(logits - log_z[:, None])
    return chosen - log_z, log_z - jnp.sum(probs * logits, axis=-1)

  num_tokens = B * T
  num_chunks = -(-num_tokens // chunk_size)
  size = num_tokens if num_chunks <= 1 else chunk_size
  pad = max(num_chunks, 1) * size - num_tokens
  flat = jnp.pad(hidden.reshape(num_tokens, D), ((0, pad), (0, 0)))
  ids = jnp.pad(targets.reshape(num_tokens), (0, pad))
  if num_chunks <= 1:
    logp, entropy = jax.checkpoint(score)(flat, ids)
  else:
    chunks = (flat.reshape(-1, size, D), ids.reshape(-1, size))
    logp, entropy = jax.lax.map(
      lambda chunk: jax.checkpoint(score)(*chunk), chunks
    )
  shape = (B, T)
  return arrays.TokenScores(
    logp.reshape(-1)[:num_tokens].reshape(shape),
    entropy.reshape(-1)[:num_tokens].reshape(shape),
  )
