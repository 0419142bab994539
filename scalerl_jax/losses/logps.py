"""Log-probs of given tokens, and losses of them, in bounded memory.

A [B, T, V] float32 array is the largest of a naive train step (25 GiB at 16k
tokens and V = 128k). Here tokens are scored in chunks. The backward pass of
`token_logps` computes a chunk's logits again, a fourth matmul of that size;
`fused_loss` needs three, because it has both gradients of a chunk by the time
that it has its loss.
"""

from collections.abc import Callable
import functools
from typing import Any

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


def default_chunk_size(*, vocab_size: int) -> int:
  """Returns how many tokens a chunk has where none is given.

  Args:
    vocab_size: V.

  Returns:
    At most 4,096, and at most 256 MiB of float32 logits.
  """
  return max(1, min(_MAX_CHUNK_TOKENS, _MAX_CHUNK // vocab_size))


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
      chunk_size · V floats. None: `default_chunk_size`.
    softcap: None, or c to squash the logits by c · tanh(z / c) before the
      temperature (Gemma 2).

  Returns:
    (logp, entropy), both float32 nats; differentiable in `hidden` and `head`.

  Raises:
    ValueError: temperature or chunk_size is not positive, or the shapes differ.
  """
  B, T, _ = hidden.shape
  score = _checked_score(hidden, head, targets, temperature, softcap)
  split, join = _chunking(B, T, head.shape[-1], chunk_size)
  # Outside the chunks, so that their gradients add up in float32.
  weights = head.astype(jnp.float32)

  @jax.checkpoint
  def part(chunk: tuple[jax.Array, jax.Array]) -> arrays.TokenScores:
    h, y = chunk
    return score(h, weights, y)

  return join(_map(part, split((hidden, targets))))


def fused_loss(
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'D V'],
  targets: Int[Array, 'B T'],
  *,
  loss_fn: jax.tree_util.Partial,
  temperature: float = 1.0,
  chunk_size: int | None = None,
  softcap: float | None = None,
) -> tuple[Float[Array, ''], arrays.TokenScores]:
  """Sums a loss of each token, with its gradients from the same pass.

      L = Σₜ ℓₜ(log π(yₜ)),   ∂L/∂zₜ = ℓ'ₜ · (onehot(yₜ) - π) / τ

  Equal to `loss_fn(token_logps(...).logp)`, summed, where the loss of a token
  depends on the log π of that token alone: ℓ' is then known as soon as a
  chunk's logits are, so that the gradients need no second look at them. A loss
  that couples tokens (`gspo`) would get a wrong gradient.

  As a chunk is scored by `token_logps`, so here. Without a gradient asked for,
  the logits are the only matmul. Reverse mode only.

  Args:
    hidden: Inputs of the head.
    head: W, the LM head.
    targets: Token ids in [0, V).
    loss_fn: log π [B, T] → loss of each token [B, T], weighted and masked. What
      else it needs are the arguments of the `Partial`, arrays [B, T] that get
      no gradient: `Partial(losses.cispo, behavior_logp=..., advantages=...)`.
    temperature: As for `token_logps`.
    chunk_size: As for `token_logps`.
    softcap: As for `token_logps`.

  Returns:
    (loss, scores): L, differentiable in `hidden` and `head`, and `TokenScores`
    without a gradient.

  Raises:
    ValueError: temperature or chunk_size is not positive, or the shapes differ.
  """
  B, T, _ = hidden.shape
  score = _checked_score(hidden, head, targets, temperature, softcap)
  for x in jax.tree.leaves(loss_fn):
    if jnp.shape(x) != (B, T):
      raise ValueError(
        f'an argument of loss_fn has shape {jnp.shape(x)} and must have one'
        f' value per token, {(B, T)}; bind constants with functools.partial'
      )
  split, join = _chunking(B, T, head.shape[-1], chunk_size)

  def part(h: jax.Array, weights: jax.Array, y: jax.Array, fn: Any) -> Any:
    scores = score(h, weights, y)
    values = fn(scores.logp)
    return jnp.sum(values), (values, scores)

  @jax.custom_vjp
  def total(hidden: Any, head: Any, targets: Any, loss_fn: Any) -> Any:
    weights = head.astype(jnp.float32)
    chunks = split((hidden, targets, loss_fn))
    values, scores = join(
      _map(lambda c: part(c[0], weights, *c[1:])[1], chunks)
    )
    return jnp.sum(values), scores

  def forward(hidden: Any, head: Any, targets: Any, loss_fn: Any) -> Any:
    weights = head.astype(jnp.float32)
    gradients = jax.value_and_grad(part, argnums=(0, 1), has_aux=True)

    def add(d_weights: jax.Array, chunk: Any) -> Any:
      h, *rest = chunk
      (_, outputs), (d_h, d_w) = gradients(h, weights, *rest)
      return d_weights + d_w, (*outputs, d_h)

    d_weights, outputs = jax.lax.scan(
      add, jnp.zeros_like(weights), split((hidden, targets, loss_fn))
    )
    values, scores, d_hidden = join(outputs)
    return (jnp.sum(values), scores), (d_hidden, d_weights)

  def backward(gradients: Any, cotangents: Any) -> Any:
    d_hidden, d_weights = gradients
    scale = cotangents[0]
    return (
      (scale * d_hidden.astype(jnp.float32)).astype(hidden.dtype),
      (scale * d_weights).astype(head.dtype),
      None,
      None,
    )

  total.defvjp(forward, backward)
  loss, scores = total(hidden, head, targets, loss_fn)
  return loss, jax.lax.stop_gradient(scores)


def _checked_score(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  temperature: float,
  softcap: float | None,
) -> Callable[..., arrays.TokenScores]:
  """Checks the inputs and makes the function that scores a chunk of them."""
  if not temperature > 0:
    raise ValueError(
      f'temperature={temperature} must be positive; pass the temperature that'
      ' the engine sampled with'
    )
  B, T, D = hidden.shape
  if targets.shape != (B, T) or head.shape[0] != D:
    raise ValueError(
      f'hidden {hidden.shape}, head {head.shape} and targets {targets.shape}'
      ' must be [B, T, D], [D, V] and [B, T]'
    )
  return functools.partial(_score, temperature=temperature, softcap=softcap)


def _score(
  h: jax.Array,
  weights: jax.Array,
  y: jax.Array,
  *,
  temperature: float,
  softcap: float | None,
) -> arrays.TokenScores:
  logits = h.astype(jnp.float32) @ weights  # [B, columns, V]
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  logits = logits / temperature
  log_z = jax.nn.logsumexp(logits, axis=-1)
  chosen = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
  probs = jnp.exp(logits - log_z[..., None])
  entropy = log_z - jnp.sum(probs * logits, axis=-1)
  return arrays.TokenScores(chosen - log_z, entropy)


def _chunking(
  B: int, T: int, V: int, chunk_size: int | None
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
  """Makes the functions that split trees of [B, T, ...] and join them again.

  The pieces are [chunks, rows, columns, ...]. A chunk holds columns of every
  row, so that it lies on all shards of the rows. If it were a run of rows,
  every device of a mesh would compute it.
  """
  if chunk_size is None:
    chunk_size = default_chunk_size(vocab_size=V)
  if chunk_size < 1:
    raise ValueError(f'chunk_size={chunk_size} must be positive')
  rows = 1 if chunk_size < B else B
  length = B * T // rows
  columns = min(chunk_size // rows, length)

  def split(x: jax.Array) -> jax.Array:
    x = x.reshape(rows, length, *x.shape[2:])
    # Repeats of the last token: what a loss says of them is finite.
    pad = ((0, 0), (0, -length % columns), *[(0, 0)] * (x.ndim - 2))
    x = jnp.pad(x, pad, mode='edge')
    return x.reshape(rows, -1, columns, *x.shape[2:]).swapaxes(0, 1)

  def join(x: jax.Array) -> jax.Array:
    x = x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])
    return x[:, :length].reshape(B, T, *x.shape[2:])

  return (
    functools.partial(jax.tree.map, split),
    functools.partial(jax.tree.map, join),
  )


def _map(fn: Callable[[Any], Any], chunks: Any) -> Any:
  if jax.tree.leaves(chunks)[0].shape[0] > 1:
    return jax.lax.map(fn, chunks)
  only = fn(jax.tree.map(lambda x: x[0], chunks))
  return jax.tree.map(lambda x: x[None], only)
