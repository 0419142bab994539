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

# Logits of a chunk by default. Larger fresh buffers are dear on a CPU; with
# fewer tokens the head's gradient is read and written more than it is computed.
_CHUNK = 2**25
_MIN_CHUNK_TOKENS = 512
_MAX_CHUNK_TOKENS = 4096

# (∂L/∂log π, ∂L/∂entropy or None) → (∂L/∂h, ∂L/∂W).
_Pullback = Callable[..., tuple[jax.Array, jax.Array]]


def default_chunk_size(*, vocab_size: int) -> int:
  """Returns how many tokens a chunk has where none is given.

  Args:
    vocab_size: V.

  Returns:
    128 MiB of float32 logits, but at least 512 tokens and at most 4,096.
  """
  return min(max(_MIN_CHUNK_TOKENS, _CHUNK // vocab_size), _MAX_CHUNK_TOKENS)


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
    (logp, entropy), both float32 nats; differentiable in `hidden` and `head`,
    in reverse mode.

  Raises:
    ValueError: temperature or chunk_size is not positive, or the shapes differ.
  """
  B, T, _ = hidden.shape
  score = _checked_score(hidden, head, targets, temperature, softcap)
  split, join = _chunking(B, T, head.shape[-1], chunk_size)

  @jax.custom_vjp
  def total(hidden: Any, head: Any, targets: Any) -> arrays.TokenScores:
    weights = head.astype(jnp.float32)
    chunks = split((hidden, targets))
    return join(_map(lambda c: score(c[0], weights, c[1])[0], chunks))

  def forward(*inputs: Any) -> Any:
    return total(*inputs), inputs

  def backward(inputs: Any, cotangents: arrays.TokenScores) -> Any:
    hidden, head, targets = inputs

    def part(h: Any, weights: Any, y: Any, ct: arrays.TokenScores) -> Any:
      return (), score(h, weights, y)[1](ct.logp, ct.entropy)

    chunks = split((hidden, targets, cotangents))
    _, d_hidden, d_head = _accumulate(part, head.astype(jnp.float32), chunks)
    return join(d_hidden).astype(hidden.dtype), d_head.astype(head.dtype), None

  total.defvjp(forward, backward)
  return total(hidden, head, targets)


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

  @jax.custom_vjp
  def total(hidden: Any, head: Any, targets: Any, loss_fn: Any) -> Any:
    weights = head.astype(jnp.float32)
    chunks = split((hidden, targets, loss_fn))

    def part(chunk: Any) -> Any:
      h, y, fn = chunk
      scores, _ = score(h, weights, y)
      return fn(scores.logp), scores

    values, scores = join(_map(part, chunks))
    return jnp.sum(values), scores

  def forward(hidden: Any, head: Any, targets: Any, loss_fn: Any) -> Any:
    def part(h: Any, weights: Any, y: Any, fn: Any) -> Any:
      scores, pullback = score(h, weights, y)
      values, slopes = jax.vjp(fn, scores.logp)
      return (values, scores), pullback(*slopes(jnp.ones_like(values)))

    outputs, d_hidden, d_head = _accumulate(
      part, head.astype(jnp.float32), split((hidden, targets, loss_fn))
    )
    values, scores = join(outputs)
    return (jnp.sum(values), scores), (join(d_hidden), d_head)

  def backward(gradients: Any, cotangents: Any) -> Any:
    d_hidden, d_head = gradients
    scale = cotangents[0]
    return (
      (scale * d_hidden).astype(hidden.dtype),
      (scale * d_head).astype(head.dtype),
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
) -> Callable[..., tuple[arrays.TokenScores, _Pullback]]:
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
) -> tuple[arrays.TokenScores, _Pullback]:
  """Scores a chunk, and has what takes gradients by its scores to its inputs.

  By hand, since autodiff keeps and writes several arrays as large as the
  logits. Where that by the entropy is None,

      ∂L/∂z = ∂L/∂log π(y) · (onehot(y) - π)

  is scaled by row only after the matmuls, and written once.
  """
  h = h.astype(jnp.float32)
  logits = h @ weights  # [rows, columns, V]
  slope: jax.Array | None = None  # ∂ capped / ∂ z.
  if softcap is not None:
    capped = jnp.tanh(logits / softcap)
    logits, slope = softcap * capped, 1.0 - capped**2
  logits = logits / temperature
  top = jnp.max(logits, axis=-1, keepdims=True)
  log_z = top + jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
  probs = jnp.exp(logits - log_z)
  mean = jnp.sum(probs * logits, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, y[..., None], axis=-1)
  scores = arrays.TokenScores((chosen - log_z)[..., 0], (log_z - mean)[..., 0])

  def pullback(
    d_logp: jax.Array, d_entropy: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    ids = jax.lax.broadcasted_iota(y.dtype, logits.shape, logits.ndim - 1)
    d_logits = jnp.where(ids == y[..., None], 1.0 - probs, -probs)
    if slope is not None:
      d_logits *= slope
    scale = d_logp[..., None] / temperature
    if d_entropy is not None:
      by_entropy = probs * (mean - logits)
      if slope is not None:
        by_entropy *= slope
      d_logits = (
        scale * d_logits + d_entropy[..., None] / temperature * by_entropy
      )
      scale = jnp.ones_like(scale)
    # Of `weights.T` a mesh would gather another copy.
    d_h = scale * jnp.einsum('btv,dv->btd', d_logits, weights)
    return d_h, jnp.einsum('btd,btv->dv', scale * h, d_logits)

  return scores, pullback


def _accumulate(
  part: Callable[..., Any], weights: jax.Array, chunks: tuple[Any, ...]
) -> tuple[Any, jax.Array, jax.Array]:
  """Maps `part` over chunks and adds up the gradients by the weights.

  Args:
    part: (h, weights, *rest) → (outputs, (d_h, d_weights)).
    weights: float32, [D, V].
    chunks: (h, *rest), as `split` of `_chunking` makes them.

  Returns:
    (outputs, d_h) of all chunks, and d_weights.
  """

  def add(total: jax.Array, chunk: Any) -> Any:
    h, *rest = chunk
    outputs, (d_h, d_weights) = part(h, weights, *rest)
    return total + d_weights, (outputs, d_h)

  d_weights, (outputs, d_h) = jax.lax.scan(add, jnp.zeros_like(weights), chunks)
  return outputs, d_h, d_weights


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
    pad = ((0, 0), (0, -length % columns), *[(0, 0)] * (x.ndim - 2))
    # Hidden states of 0 add nothing to the head's gradient, as long as the
    # loss there is finite: as that of the token whose inputs are repeated is.
    x = jnp.pad(x, pad, mode='constant' if x.ndim > 2 else 'edge')
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
