"""Weights that turn per-token losses into one number.

    loss = sum(where(loss_mask, weights * per_token, 0))

A weight depends on the masks of the whole batch and on nothing else, so a
batch may be cut into microbatches, packed or sharded in any way: the parts only
add up. Masked tokens are in no numerator and in no denominator; a batch
without any unmasked token has weights 0.

See arXiv:2510.13786, §3.2 (loss aggregation).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def token_mean(
  loss_mask: Bool[Array, 'B T'],
  rollout_index: Int[Array, 'B T'],
  prompt_of_rollout: Int[Array, ' R'],
  *,
  num_rollouts: int,
  num_prompts: int,
) -> Float[Array, 'B T']:
  """Weighs every token of the batch equally: 1 / number of tokens (DAPO).

  Args:
    loss_mask: True for the tokens that count.
    rollout_index: Rollout of each token; -1: none.
    prompt_of_rollout: Prompt of each rollout.
    num_rollouts: R (static).
    num_prompts: P (static).

  Returns:
    Weight of each token; they sum to 1, or to 0 if all is masked.
  """
  del prompt_of_rollout, num_rollouts, num_prompts
  counts = _counts(loss_mask, rollout_index)
  return counts / jnp.maximum(jnp.sum(counts), 1.0)


def sequence_mean(
  loss_mask: Bool[Array, 'B T'],
  rollout_index: Int[Array, 'B T'],
  prompt_of_rollout: Int[Array, ' R'],
  *,
  num_rollouts: int,
  num_prompts: int,
) -> Float[Array, 'B T']:
  """Weighs every rollout equally, and its tokens equally (GRPO).

      w = 1 / (number of rollouts with tokens · |yᵢ|)

  Args:
    loss_mask: True for the tokens that count.
    rollout_index: Rollout of each token; -1: none.
    prompt_of_rollout: Prompt of each rollout.
    num_rollouts: R (static).
    num_prompts: P (static).

  Returns:
    Weight of each token; they sum to 1, or to 0 if all is masked.
  """
  del prompt_of_rollout, num_prompts
  return _unit_mean(loss_mask, rollout_index, rollout_index, num_rollouts)


def prompt_mean(
  loss_mask: Bool[Array, 'B T'],
  rollout_index: Int[Array, 'B T'],
  prompt_of_rollout: Int[Array, ' R'],
  *,
  num_rollouts: int,
  num_prompts: int,
) -> Float[Array, 'B T']:
  """Weighs every kept prompt equally, its tokens equally (ScaleRL).

      w = 1 / (number of prompts with tokens · Σ_g |y_g|)

  Args:
    loss_mask: True for the tokens that count.
    rollout_index: Rollout of each token; -1: none.
    prompt_of_rollout: Prompt of each rollout, in [0, num_prompts).
    num_rollouts: R (static).
    num_prompts: P (static).

  Returns:
    Weight of each token; they sum to 1, or to 0 if all is masked.
  """
  del num_rollouts
  prompt = prompt_of_rollout[jnp.maximum(rollout_index, 0)]
  return _unit_mean(loss_mask, rollout_index, prompt, num_prompts)


def fixed_length(
  loss_mask: Bool[Array, 'B T'],
  rollout_index: Int[Array, 'B T'],
  prompt_of_rollout: Int[Array, ' R'],
  *,
  num_rollouts: int,
  num_prompts: int,
  length: int,
) -> Float[Array, 'B T']:
  """Divides every rollout by the same constant length (Dr. GRPO).

      w = 1 / (number of rollouts with tokens · length)

  See "Understanding R1-Zero-Like Training" (arXiv:2503.20783), §3.2. The
  constant must not depend on the batch or its padding.

  Args:
    loss_mask: True for the tokens that count.
    rollout_index: Rollout of each token; -1: none.
    prompt_of_rollout: Prompt of each rollout.
    num_rollouts: R (static).
    num_prompts: P (static).
    length: The divisor, in tokens: the longest response allowed.

  Returns:
    Weight of each token.

  Raises:
    ValueError: length is not positive.
  """
  del prompt_of_rollout, num_prompts
  if length < 1:
    raise ValueError(f'length={length} must be at least 1 token')
  counts = _counts(loss_mask, rollout_index)
  per_rollout = _segment_totals(counts, rollout_index, num_rollouts)
  num_kept = jnp.sum(per_rollout > 0).astype(counts.dtype)
  return counts / (jnp.maximum(num_kept, 1.0) * length)


def _counts(loss_mask: jax.Array, rollout_index: jax.Array) -> jax.Array:
  if loss_mask.shape != rollout_index.shape:
    raise ValueError(
      f'loss_mask {loss_mask.shape} and rollout_index {rollout_index.shape}'
      ' must have the same shape'
    )
  return (loss_mask & (rollout_index >= 0)).astype(jnp.float32)


def _segment_totals(
  counts: jax.Array, unit: jax.Array, num_units: int
) -> jax.Array:
  return jax.ops.segment_sum(
    counts.reshape(-1),
    jnp.maximum(unit, 0).reshape(-1),
    num_segments=num_units,
  )


def _unit_mean(
  loss_mask: jax.Array,
  rollout_index: jax.Array,
  unit: jax.Array,
  num_units: int,
) -> jax.Array:
  counts = _counts(loss_mask, rollout_index)
  totals = _segment_totals(counts, unit, num_units)
  num_kept = jnp.maximum(jnp.sum(totals > 0).astype(counts.dtype), 1.0)
  share = 1.0 / (num_kept * jnp.maximum(totals, 1.0))
  return counts * share[jnp.maximum(unit, 0)]
