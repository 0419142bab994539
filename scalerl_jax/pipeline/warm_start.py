"""Supervised warm start: the base policy that reinforcement starts from.

Not part of the compute axis: it stands for the pre-training that a real base
model has behind it. It runs the same train step with `recipes.supervised`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalerl_jax import arrays
from scalerl_jax import recipes
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

# (prompt ids, response ids, which response tokens are learned)
_WARMUP_STEPS = 20
_SMOOTHING = 0.9  # Of the loss that ends the warm start.

Example = tuple[list[int], list[int], list[bool]]


def make_batch(examples: list[Example], *, row_tokens: int) -> arrays.Batch:
  """Lays examples out one per row, every learned token with reward 1.

  Args:
    examples: (prompt ids, response ids, learned) of each row.
    row_tokens: T; each example must fit.

  Returns:
    A batch for a step of `recipes.supervised`.
  """
  B = len(examples)
  tokens = np.zeros((B, row_tokens), np.int32)
  segment_ids, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
  for i, (prompt, response, learned) in enumerate(examples):
    p, n = len(prompt), len(response)
    tokens[i, : p + n] = prompt + response
    segment_ids[i, : p + n] = 1
    mask[i, p : p + n] = learned
  index = np.broadcast_to(np.arange(B, dtype=np.int32)[:, None], tokens.shape)
  fields: dict[str, Any] = dict(
    tokens=tokens,
    positions=np.broadcast_to(
      np.arange(row_tokens, dtype=np.int32), tokens.shape
    ),
    segment_ids=segment_ids,
    loss_mask=mask,
    behavior_logp=np.zeros(tokens.shape, np.float32),
    policy_version=np.zeros(tokens.shape, np.int32),
    rollout_index=index,
    rewards=np.ones(B, np.float32),
    valid=np.ones(B, bool),
    prompt_index=np.arange(B, dtype=np.int32),
  )
  return jax.tree.map(jnp.asarray, arrays.Batch(**fields))


def train(
  params: Any,
  apply_fn: Callable[..., arrays.TokenScores],
  batches: Iterator[arrays.Batch],
  *,
  num_steps: int,
  learning_rate: float,
  stop_loss: float = 0.0,
) -> Iterator[tuple[Any, float]]:
  """Trains on a stream of batches, at a constant rate after a short warm-up.

  Args:
    params: Initial parameters.
    apply_fn: Scores tokens, as for the train step.
    batches: At least `num_steps` batches of one shape.
    num_steps: Most updates.
    learning_rate: Rate after the warm-up.
    stop_loss: Ends once the smoothed loss falls below it, in nats per token,
      so that base policies of different seeds are equally good; 0: never.

  Yields:
    (parameters, smoothed loss) after each update; the parameters are valid
    until the next one is asked for.
  """
  schedule = optax.linear_schedule(0.0, learning_rate, _WARMUP_STEPS)
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)
  )
  step = step_lib.make_train_step(apply_fn, tx, recipes.supervised())
  state = state_lib.init(params, tx)
  smoothed = None
  for _ in range(num_steps):
    state, metrics = step(state, next(batches))
    loss = float(metrics.loss)
    keep = 0.0 if smoothed is None else _SMOOTHING
    smoothed = keep * (smoothed or 0.0) + (1 - keep) * loss
    yield state.params, smoothed
    if smoothed < stop_loss:
      return
