"""The policy of a run as a checkpoint in the layout of Hugging Face."""

import json
import pathlib

import jax

from scalerl_jax import config as config_lib
from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.build import tokenization
from scalerl_jax.training import checkpointing


def export(
  workdir: pathlib.Path,
  out: pathlib.Path,
  *,
  updates: int | None = None,
  dtype: str = 'bfloat16',
) -> int:
  """Writes the parameters of a checkpoint of a run, and its tokenizer.

  Args:
    workdir: The run's directory, which is not changed.
    out: Does not exist yet; appears whole or not at all.
    updates: Which checkpoint; None: the newest that is whole.
    dtype: `float32` or `bfloat16`, of the stored weights.

  Returns:
    Updates that the weights contain.

  Raises:
    config_lib.ConfigError: The directory holds no run, or its tokenizer or the
      checkpoint that it started from is not where it was.
    checkpointing.UnusableCheckpointError: There is no such checkpoint, or it is
      damaged.
    checkpointing.CheckpointError: It could not be read, which may pass.
    hf.HfError: `out` exists, or the model cannot be stored so.
    OSError: `out` cannot be written.
  """
  path = workdir / 'config.json'
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))['config']
  except OSError as error:
    raise config_lib.ConfigError(
      f'{path} cannot be read: {error.strerror}; give the directory of a run'
    ) from None
  except (ValueError, KeyError, TypeError):
    raise config_lib.ConfigError(f'{path} is not that of a run') from None
  config, tokenizer = tokenization.complete(config_lib.from_config_dict(fields))
  spec = config.model.spec(vocab_size=tokenizer.vocab_size)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  template = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
    models.abstract_params(spec),
  )
  found, params = checkpointing.read_params(
    workdir / 'checkpoints', template, updates=updates
  )
  source = tokenization.directory(config)
  hf.save_params(out, params, spec, dtype=dtype, source=source)
  return found
