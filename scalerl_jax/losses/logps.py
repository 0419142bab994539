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

# Logits of a chunk by default: float32 values, and tokens (more are slower on
# a CPU, where fresh large buffers are dear).
_MAX_CHUNK = 2**26
_MAX_CHUNK_TOKENS = 4096


def token_logps(
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'D V'],
  targets: Int[Array, 'B T'],
  *,
  temperature: float = 1.0,
  chunk_size: int | None = None,
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
      chunk_size · V floats. None: at most 4,096, and 256 MiB of logits.
    softcap: None, or c to squash the logits by c · tanh(z / c) before the
      temperature (Gemma 2).

  Returns:
    (logp, entropy), both float32 nats; differentiable in `hidden` and `head`.

  Raises:
    ValueError: temperature or chunk_size is not positive, or the shapes differ.
  """
  if chunk_size is None:
    chunk_size = max(1, min(_MAX_CHUNK_TOKENS, _MAX_CHUNK // head.shape[-1]))
  if not temperature > 0 or chunk_size < 1:
    raise ValueError(
      f'temperature={temperature} and chunk_size={chunk_size} must be positive;'
      ' pass the temperature that the engine sampled with'
    )
  B, T, D = hidden.shape
  if targets.shape != (B, T) or head.shape[0] != D:
    raise ValueError(
      f'hidden {hidden.shape}, head {head.shape} and targets {targets.shape}'
      ' must be [B, T, D], [D, V] and [B, T]'
    )
  # Outside the chunks, so that their gradients add up in float32.
  weights = head.astype(jnp.float32)

  @jax.checkpoint
  def score(h: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = h.astype(jnp.float32) @ weights  # [chunk, V]
    if softcap is not None:
      logits = softcap * jnp.tanh(logits / softcap)
    return _logp_and_entropy(logits / temperature, y)

  if chunk_size >= B * T:
    logp, entropy = score(hidden.reshape(B * T, D), targets.reshape(B * T))
  else:
    rows = 1 if chunk_size < B else B
    shape = (rows, B * T // rows)
    chunks = (
      _split(hidden.reshape(*shape, D), chunk_size // rows),
      _split(targets.reshape(shape), chunk_size // rows),
    )
    parts = jax.lax.map(lambda chunk: score(*chunk), chunks)
    logp, entropy = (_join(x, *shape) for x in parts)
  return arrays.TokenScores(logp.reshape(B, T), entropy.reshape(B, T))


def _logp_and_entropy(
  logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  log_z = jax.nn.logsumexp(logits, axis=-1)
  chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  probs = jnp.exp(logits - log_z[:, None])
  return chosen - log_z, log_z - jnp.sum(probs * logits, axis=-1)


def _split(x: jax.Array, columns: int) -> jax.Array:
  """Splits [B, T, ...] into [chunks, B · columns, ...], zero-padded.

  A chunk holds a piece of every row, so that it lies on all shards of the
  rows. If it were a run of rows, every device of a mesh would compute it.
  """
  B, T, *rest = x.shape
  pad = -T % columns
  x = jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * len(rest)))
  parts = x.reshape(B, -1, columns, *rest).swapaxes(0, 1)
  return parts.reshape(-1, B * columns, *rest)


def _join(x: jax.Array, B: int, T: int) -> jax.Array:
  """Inverts `_split` for [chunks, B · columns]."""
  return x.reshape(x.shape[0], B, -1).swapaxes(0, 1).reshape(B, -1)[:, :T]
