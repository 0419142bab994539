"""Supervised warm start: the base policy that reinforcement starts from.

Not part of the compute axis: it stands for the pre-training that a real base
model has behind it. It runs the same train step with `recipes.supervised`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalerl_jax import arrays
from scalerl_jax import recipes
from scalerl_jax import records
from scalerl_jax.training import batching
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

_WARMUP_STEPS = 20
_FINAL_RATE = 0.02  # Of the peak learning rate.

# (prompt ids, response ids, which response tokens are learned)
Example = tuple[list[int], list[int], list[bool]]


def make_batch(
  examples: Sequence[Example], *, row_tokens: int, row_multiple: int = 4
) -> arrays.Batch:
  """Packs examples into rows, each a rollout with reward 1.

  Args:
    examples: (prompt ids, response ids, learned) of each.
    row_tokens: T; each example must fit.
    row_multiple: Granularity of the number of rows.

  Returns:
    A batch for a step of `recipes.supervised`.
  """
  batch, _ = batching.assemble(
    [_group(i, *example) for i, example in enumerate(examples)],
    num_rows=None,
    row_tokens=row_tokens,
    packed=True,
    row_multiple=row_multiple,
  )
  return jax.tree.map(jnp.asarray, batch)


def _group(
  visit: int, prompt: list[int], response: list[int], learned: list[bool]
) -> records.RolloutGroup:
  n = len(response)
  rollout = records.Rollout(
    token_ids=np.array(response, np.int32),
    logps=np.zeros(n, np.float32),
    policy_versions=np.zeros(n, np.int32),
    sampled=np.array(learned),
    finish_reason=records.FinishReason.STOP,
    reward=1.0,
  )
  request = records.Request(
    visit=visit,
    problem_id=str(visit),
    prompt_ids=np.array(prompt, np.int32),
    num_samples=1,
  )
  return records.RolloutGroup(
    request=request, rollouts=(rollout,), admitted_version=0
  )


def train(
  params: Any,
  apply_fn: Callable[..., arrays.TokenScores],
  batches: Iterator[arrays.Batch],
  *,
  num_steps: int,
  learning_rate: float,
) -> Iterator[tuple[Any, float]]:
  """Trains on a stream of batches, with a warm-up and a cosine decay.

  Args:
    params: Initial parameters.
    apply_fn: Scores tokens, as for the train step.
    batches: At least `num_steps` batches of one shape.
    num_steps: Updates.
    learning_rate: Rate after the warm-up.

  Yields:
    (parameters, loss) after each update; the parameters are valid until the
    next one is asked for.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=learning_rate,
    warmup_steps=_WARMUP_STEPS,
    decay_steps=max(num_steps, _WARMUP_STEPS + 1),
    end_value=_FINAL_RATE * learning_rate,
  )
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)
  )
  step = step_lib.make_train_step(apply_fn, tx, recipes.supervised())
  state = state_lib.init(params, tx)
  for _ in range(num_steps):
    state, metrics = step(state, next(batches))
    yield state.params, float(metrics.loss)
