"""The generators of a configuration: one for training, one for evaluation."""

from collections.abc import Sequence
import contextlib
import hashlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import hf
from scalerl_jax import length_control
from scalerl_jax import models
from scalerl_jax.build import learner as learner_lib
from scalerl_jax.build import serving
from scalerl_jax.build import tokenization
from scalerl_jax.generation import decode
from scalerl_jax.generation import jax_engine
from scalerl_jax.generation.sglang import engine as sglang_engine
from scalerl_jax.generation.sglang import servers as servers_lib
from scalerl_jax.generation.sglang import transport
from scalerl_jax.pipeline import weights

_RAM_DISK = pathlib.Path('/dev/shm')


class Engines(NamedTuple):
  """What generates, and how weights are handed over to it."""

  train: Any
  evaluation: Any
  store: weights.WeightStore
  pinned: weights.WeightStore  # Of an evaluation.


def start_servers(
  config: config_lib.RunConfig,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
) -> servers_lib.Supervisor | None:
  """Starts the servers of a run; returns before they are ready.

  Args:
    config: The configuration.
    workdir: The run's directory; logs go to `servers/` in it.
    stack: Stops them.

  Returns:
    What keeps them alive; None: the run starts none.

  Raises:
    config_lib.ConfigError: SGLang is not to be found, or cannot serve the
      model.
    servers.ServerError: A log file cannot be written.
  """
  if not config.engine.start_servers:
    return None
  return stack.enter_context(
    servers_lib.Supervisor(serving.server_specs(config, workdir / 'servers'))
  )


def make(
  config: config_lib.RunConfig,
  learner: learner_lib.Learner,
  tokenizer: data.Tokenizer,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
  *,
  train_key: jax.Array,
  eval_key: jax.Array,
  servers: servers_lib.Supervisor | None,
) -> Engines:
  """Makes the generators of a run.

  Args:
    config: The configuration.
    learner: Whose weights they get.
    tokenizer: The tokenizer of the model.
    workdir: The run's directory.
    stack: Closes them.
    train_key: Sampling key in training.
    eval_key: Sampling key in evaluation.
    servers: From `start_servers`.

  Returns:
    The generators.

  Raises:
    config_lib.ConfigError: A package is missing.
    fleet.FleetError: The servers cannot do what the run needs.
    servers.ServerError: One does not start.
  """
  interruption = _interruption(config, tokenizer)
  response_tokens = config.batch.max_tokens - config.data.max_prompt_tokens
  if interruption is not None:
    response_tokens = interruption.max_response_tokens
  common: dict[str, Any] = {
    'num_slots': config.engine.num_slots,
    'prompt_tokens': config.data.max_prompt_tokens,
    'response_tokens': response_tokens,
    'temperature': config.engine.temperature,
    'stop_ids': tokenizer.stop_ids,
    'interruption': interruption,
  }
  gather = learner.gather if jax.process_count() > 1 else None
  if config.engine.kind == 'jax':
    engine = jax_engine.JaxEngine(
      decode.DecodeSpec(
        model=learner.spec,
        steps_per_dispatch=config.engine.steps_per_dispatch,
        record_routing=config.engine.replay_routing,
        **common,
      ),
      key=train_key,
    )
    stack.callback(engine.close)
    device = jax.local_devices()[0]
    return Engines(
      train=engine,
      evaluation=engine.fork(key=eval_key, keep_routing=False),
      store=weights.WeightStore(device, gather=gather),
      pinned=weights.WeightStore(device, gather=gather),
    )
  sampling = sglang_engine.SamplingSpec(
    vocab_size=learner.spec.vocab_size,
    routing=_routing(config, learner.spec),
    **common,
  )
  addresses = config.engine.sglang.addresses
  if servers is not None:
    servers.wait_ready(config.pipeline.deadline_s)
    addresses = servers.urls
  fleet = _fleet(config, learner, sampling, addresses, workdir, stack)
  dtype = config.engine.sglang.weights_dtype
  return Engines(
    train=fleet,
    evaluation=fleet.fork(seed=2 * config.seed + 1, keep_routing=False),
    store=weights.WeightStore(None, dtype=dtype, gather=gather),
    pinned=weights.WeightStore(None, dtype=dtype, gather=gather),
  )


def weights_dir(
  config: config_lib.RunConfig, workdir: pathlib.Path
) -> pathlib.Path:
  """Says where a run writes weights for its servers.

  Args:
    config: The configuration.
    workdir: The run's directory.

  Returns:
    The directory, the same for a run that is resumed.
  """
  if config.engine.sglang.weights_dir:
    return pathlib.Path(config.engine.sglang.weights_dir)
  if not _RAM_DISK.is_dir():
    return workdir / 'weights'
  name = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:12]
  return _RAM_DISK / f'scalerl-{name}'


def _fleet(
  config: config_lib.RunConfig,
  learner: learner_lib.Learner,
  sampling: sglang_engine.SamplingSpec,
  addresses: Sequence[str],
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
) -> sglang_engine.SglangEngine:
  try:
    import aiohttp  # noqa: F401
  except ImportError:
    raise config_lib.ConfigError(
      "engine.kind='sglang' needs aiohttp: pip install 'scalerl_jax[remote]'"
    ) from None
  servers = config.engine.sglang

  def write(open_file: Any, params: Any) -> Any:
    return hf.write_params(
      open_file, params, learner.spec, dtype=servers.weights_dtype
    )

  engine = sglang_engine.SglangEngine(
    sampling,
    addresses,
    transport.DiskTransport(weights_dir(config, workdir), write),
    score=_score_fn(config, learner),
    seed=2 * config.seed,
    update=servers.update,
    max_logp_diff=servers.max_logp_diff,
    probe_s=servers.probe_s,
    control_s=servers.control_s,
    request_s=servers.request_s,
    deadline_s=config.pipeline.deadline_s,
    api_key=os.environ.get(serving.API_KEY),
  )
  stack.callback(engine.close)
  return engine


def _score_fn(
  config: config_lib.RunConfig, learner: learner_lib.Learner
) -> sglang_engine.Score:
  if jax.process_count() > 1:
    # What is compared first, before the run begins, is what it begins with.
    return lambda _, token_ids: learner.score(token_ids)
  score = jax.jit(learner_lib.make_score(config, learner.spec, learner.mesh))
  return lambda params, token_ids: np.asarray(score(params, token_ids))


def _routing(
  config: config_lib.RunConfig, spec: models.ModelSpec
) -> tuple[int, int] | None:
  if not config.engine.replay_routing or spec.moe is None:
    return None
  return spec.num_layers, spec.moe.experts_per_token


def _interruption(
  config: config_lib.RunConfig, tokenizer: data.Tokenizer
) -> length_control.Interruption | None:
  if not config.length.interrupt:
    return None
  return length_control.Interruption(
    min_tokens=config.length.min_thinking_tokens,
    max_tokens=config.length.max_thinking_tokens,
    phrase_ids=tuple(tokenizer.encode(config.length.phrase)),
    answer_tokens=config.length.answer_tokens,
    end_ids=tokenization.end_of_thinking(tokenizer),
  )
