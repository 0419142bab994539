"""The smallest run that still learns: seconds on one core."""

import contextlib
import json
import logging
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from scalerl_jax import config as config_lib

# Fields that no two runs share: they are times.
_TIMES = ('device_hours', 'training_s', 'update_s', 'tokens_per_s')


def config(**sections) -> config_lib.RunConfig:
  """Returns the configuration; a section given is merged into it."""
  fields = {
    'num_updates': 4,
    'recipe': 'scalerl',
    'model': {
      'num_layers': 1,
      'model_dim': 32,
      'num_heads': 2,
      'num_kv_heads': 1,
      'head_dim': 16,
      'hidden_dim': 32,
    },
    'data': {
      'max_prompt_tokens': 8,
      'toy': {'num_train': 24, 'num_eval': 6, 'max_operations': 2},
    },
    # Enough to answer with a digit, so that some rewards differ.
    'warm_start': {
      'num_steps': 100,
      'batch_size': 16,
      'learning_rate': 1e-2,
      'interrupted_fraction': 1.0,
    },
    'batch': {
      'prompts': 2,
      'group_size': 4,
      'max_tokens': 48,
      'packed': True,
    },
    'engine': {'num_slots': 8, 'steps_per_dispatch': 4},
    'length': {
      'interrupt': True,
      'min_thinking_tokens': 2,
      'max_thinking_tokens': 6,
      'answer_tokens': 3,
    },
    'pipeline': {'max_lag': 2, 'lockstep_lead': 1, 'deadline_s': 60.0},
    'curriculum': {},
    'optimizer': {'learning_rate': 1e-3, 'warmup_steps': 1},
    'evaluation': {'every': 2, 'num_problems': 4, 'samples_per_problem': 2},
    'checkpoint': {'every': 2},
    'curve': {},
    'mesh': {},
    'reporting': {'plots': False, 'tensorboard': False, 'num_samples': 4},
  }
  for name, value in sections.items():
    merged = isinstance(value, dict) and name != 'recipe_args'
    fields[name] = fields[name] | value if merged else value
  return config_lib.from_config_dict(fields)


def sglang(python: str) -> dict:
  """Returns the section `engine` of a run that starts a server on the CPU."""
  return {
    'kind': 'sglang',
    'start_servers': True,
    'sglang': {
      'python': python,
      'device': 'cpu',
      'max_total_tokens': 20_000,
      'weights_dtype': 'float32',
      'max_logp_diff': 1e-4,
      'probe_s': 10.0,
    },
  }


@contextlib.contextmanager
def compiled_once(directory: pathlib.Path):
  """Keeps compiled code in a directory, for runs that are alike."""
  values = {
    'jax_compilation_cache_dir': str(directory),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    'jax_disable_most_optimizations': True,  # Compiles faster.
  }
  before = {name: jax.config.values[name] for name in values}
  try:
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def when_logged(text: str, action):
  """Calls `action` where the package logs a line that begins with `text`."""

  class Handler(logging.Handler):
    def emit(self, record):
      if record.getMessage().startswith(text):
        action()

  logger = logging.getLogger('scalerl_jax')
  handler, level = Handler(), logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    yield
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)


def rows(workdir: pathlib.Path, name: str) -> list[dict]:
  """Reads a JSONL file of a run, without the times."""
  lines = (workdir / f'{name}.jsonl').read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if k not in _TIMES}
    for line in lines
  ]
