"""What the base policy is taught."""

import itertools

import numpy as np

from scalerl_jax import data
from scalerl_jax.build import base_policy
from tests import tiny


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
