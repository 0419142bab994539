"""The base policy: a checkpoint, drawn parameters, or the warm start."""

from collections.abc import Iterator
import contextlib
import functools
import itertools
import logging
import pathlib
from typing import Any

import jax
import numpy as np

from scalerl_jax import arrays
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.data import arithmetic
from scalerl_jax.pipeline import warm_start
from scalerl_jax.reporting import writers
from scalerl_jax.training import checkpointing

_log = logging.getLogger(__name__)
_LOG_EVERY = 50


def base_params(
  config: config_lib.RunConfig,
  spec: models.ModelSpec,
  tokenizer: data.Tokenizer,
  workdir: pathlib.Path,
  key: jax.Array,
  *,
  shardings: Any = None,
) -> Any:
  """Loads or draws parameters and warms them up, unless that is cached.

  The warm start runs on one device whatever the mesh is, so that runs on
  different meshes start from the same policy.

  Args:
    config: The configuration.
    spec: The model.
    tokenizer: Turns solutions into tokens.
    workdir: Holds the cache, `warm_start/`, and the losses,
      `warm_start.jsonl`.
    key: Of the drawn parameters, consumed.
    shardings: Of the parameters; None: one device. Without a warm start they
      are drawn or loaded straight into them.

  Returns:
    Parameters, which are the caller's alone.

  Raises:
    config_lib.ConfigError: The checkpoint of `model.path` cannot be used.
  """
  steps = config.warm_start.num_steps
  placed = None if steps else shardings
  if path := config.model.path:
    try:
      params = hf.load_params(path, spec, shardings=placed)
    except hf.HfError as error:
      raise config_lib.ConfigError(f'model.path={path!r}: {error}') from None
  else:
    draw = functools.partial(models.init_params, spec)
    # Eagerly on one device: its program would only cost time to compile.
    params = (jax.jit(draw, out_shardings=placed) if placed else draw)(key)
  if not steps:
    return params
  cache = checkpointing.Checkpointer(workdir / 'warm_start', keep=1)
  restored = cache.restore(params)
  if restored is None:
    params = _train(config, spec, tokenizer, workdir, params)
    cache.save(steps, train_state=params, host={})
  else:
    params = restored.train_state
  cache.close()
  return params


def _train(
  config: config_lib.RunConfig,
  spec: models.ModelSpec,
  tokenizer: data.Tokenizer,
  workdir: pathlib.Path,
  params: Any,
) -> Any:
  steps = config.warm_start.num_steps
  (workdir / 'warm_start.jsonl').unlink(missing_ok=True)
  trained = warm_start.train(
    params,
    models.make_policy_fn(spec, temperature=1.0),
    _batches(config, tokenizer),
    num_steps=steps,
    learning_rate=config.warm_start.learning_rate,
  )
  with contextlib.closing(
    writers.JsonlWriter(workdir / 'warm_start.jsonl')
  ) as writer:
    for i, (current, loss) in enumerate(trained, start=1):
      writer.write({'step': i, 'loss': loss})
      params = current
      if i % _LOG_EVERY == 0:
        _log.info('warm start %d/%d: loss %.3f', i, steps, loss)
  # The generator is done with its state, so the last parameters stay valid.
  return params


def _batches(
  config: config_lib.RunConfig, tokenizer: data.Tokenizer
) -> Iterator[arrays.Batch]:
  toy = config.data.toy
  rng = np.random.default_rng([config.seed, 1])

  def example(error_rate: float) -> warm_start.Example:
    length = int(rng.integers(toy.min_operations, toy.max_operations + 1))
    chain = arithmetic.draw(
      rng, arithmetic.Split.WARM_START, num_operations=length
    )
    is_cut = rng.random() < config.warm_start.interrupted_fraction
    phrase = config.length.phrase if is_cut else None
    texts = arithmetic.worked_solution(
      rng, chain, phrase=phrase, error_rate=error_rate
    )
    before, inserted, after = map(tokenizer.encode, texts)
    learned = [
      *([True] * len(before)),
      *([False] * len(inserted)),
      *([True] * len(after)),
    ]
    prompt = tokenizer.encode_prompt(chain.prompt)
    return prompt, before + inserted + after, learned

  # Prompt, a line for each operation, the markers and the answer.
  longest = 2 * toy.max_operations + 2 + 6 * toy.max_operations + 4
  longest += len(tokenizer.encode(config.length.phrase))
  for step in itertools.count():
    has_errors = step >= config.warm_start.clean_steps
    error_rate = config.warm_start.error_rate if has_errors else 0.0
    examples = [
      example(error_rate) for _ in range(config.warm_start.batch_size)
    ]
    yield warm_start.make_batch(examples, row_tokens=2 * longest)
