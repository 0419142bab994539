"""The configurations that come with the package."""

import pathlib
import runpy

import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax import rewards
from tests import tiny_checkpoint

_CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'


def test_smollm2_takes_its_sizes_from_the_checkpoint(tmp_path):
  tree = runpy.run_path(str(_CONFIGS / 'smollm2_135m.py'))['get_config']()
  tree.model.path = str(tiny_checkpoint.write(tmp_path / 'tiny'))
  config = config_lib.from_config_dict(tree)
  assert config.model.num_layers == 1
  assert config.data.chat


@pytest.mark.parametrize(
  ('name', 'variants', 'parameters'),
  [
    ('dense_8b', ('14k', '32k'), 8_030_261_248),
    ('qwen3_0p6b', (), 596_049_920),
    ('scout', ('64', '256'), 107_769_861_120),
  ],
)
def test_published_sizes(name, variants, parameters):
  get_config = runpy.run_path(str(_CONFIGS / f'{name}.py'))['get_config']
  trees = [get_config(), *map(get_config, variants)]
  for tree in trees:
    config, tokenizer = build.complete(config_lib.from_config_dict(tree))
    spec = config.model.spec(vocab_size=tokenizer.vocab_size)
    assert models.num_parameters(spec) == parameters
  if variants:
    with pytest.raises(ValueError, match='must be one of'):
      get_config('7k')


def test_sums_are_right_and_none_is_in_both_files():
  operands = []
  for name in ('train', 'eval'):
    found = data.read_problems(_CONFIGS / 'sums' / f'{name}.jsonl')
    for problem in found:
      a, b = map(int, problem.problem_id.split('+'))
      assert problem.prompt.startswith(f'What is {a} plus {b}? ')
      verifier = rewards.VERIFIERS[problem.verifier]
      assert verifier.reward(f'It is {a + b}.', problem.answer) == 1
    # A sum is the same in the other order.
    operands.append({frozenset(p.problem_id.split('+')) for p in found})
  assert len(operands[0]) + len(operands[1]) == 12 * 13 // 2
  assert not operands[0] & operands[1]
