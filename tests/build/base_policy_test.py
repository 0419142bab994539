"""Where the base policy comes from, and what it is taught."""

import itertools

import jax
import numpy as np
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax import sharding
from scalerl_jax.build import base_policy
from tests import tiny
from tests import tiny_checkpoint


def _lines(batch):
  """The worked lines of a batch, as (operation, result)."""
  text = data.ByteTokenizer().decode(np.asarray(batch.tokens).ravel().tolist())
  return [
    (line[-5:-2], line[-1])
    for line in text.split('\n')
    if line[-2:-1] == '=' and line[-1:].isdigit()
  ]


def test_errors_begin_after_the_clean_steps():
  config = tiny.config(
    warm_start={
      'num_steps': 3,
      'error_rate': 1.0,
      'clean_steps': 2,
      'interrupted_fraction': 0.0,
    }
  )
  batches = base_policy._batches(config, data.ByteTokenizer())
  for step, batch in enumerate(itertools.islice(batches, 3)):
    lines = _lines(batch)
    assert len(lines) > 8
    right = [eval(op) % 10 == int(result) for op, result in lines]
    assert right == [step < 2] * len(lines)


def _base_params(directory, **options):
  """Base policy of a run that starts from a checkpoint."""
  fields = config_lib.to_dict(tiny.config(warm_start={'num_steps': 0}))
  config = config_lib.from_config_dict(
    {**fields, 'model': {'path': str(directory)}}
  )
  return base_policy.base_params(
    config,
    config.model.spec(vocab_size=1),
    data.ByteTokenizer(),
    directory,
    jax.random.key(1),
    **options,
  )


@pytest.mark.parametrize('shape', [None, (1, 8, 1, 1), (2, 2, 1, 2)])
def test_a_checkpoint_goes_straight_to_where_it_belongs(tmp_path, shape):
  directory = tiny_checkpoint.write(tmp_path / 'tiny', seed=5)
  wanted = models.init_params(tiny_checkpoint.spec(), jax.random.key(5))
  shardings = None
  if shape is not None:
    axes = models.logical_axes(tiny_checkpoint.spec())
    shardings = sharding.param_shardings(axes, sharding.make_mesh(shape))
  found = _base_params(directory, shardings=shardings)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  if shardings is not None:
    assert jax.tree.map(lambda x: x.sharding, found) == shardings


def test_a_checkpoint_without_weights_is_one_line(tmp_path):
  directory = tiny_checkpoint.write(tmp_path / 'tiny')
  (directory / 'model.safetensors').unlink()
  with pytest.raises(
    config_lib.ConfigError, match=r'model\.path=.*: holds nei'
  ):
    _base_params(directory)
