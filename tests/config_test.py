import dataclasses
import json

import ml_collections
import pytest

from scalerl_jax import config as config_lib


def _tree():
  return {
    'seed': 0,
    'num_updates': 4,
    'recipe': 'scalerl',
    'recipe_args': {'max_ratio': 5.0},
    'model': {
      'num_layers': 1,
      'model_dim': 16,
      'num_heads': 2,
      'num_kv_heads': 1,
      'head_dim': 8,
      'hidden_dim': 32,
    },
    'data': {
      'train_path': '',
      'eval_path': '',
      'max_prompt_tokens': 16,
      'toy': {'num_train': 20, 'num_eval': 10},
    },
    'warm_start': {'num_steps': 2, 'batch_size': 8},
    'batch': {'prompts': 4, 'group_size': 4, 'max_tokens': 64},
    'engine': {'num_slots': 8},
    'length': {
      'interrupt': True,
      'min_thinking_tokens': 10,
      'max_thinking_tokens': 40,
      'answer_tokens': 4,
    },
    'pipeline': {'max_lag': 2, 'lockstep_lead': 1},
    'evaluation': {'every': 1, 'num_problems': 5},
    'checkpoint': {'every': 2},
  }


def _read(changes=()):
  tree = ml_collections.ConfigDict(_tree())
  for name, value in dict(changes).items():
    *sections, field = name.split('.')
    node = tree
    for section in sections:
      if section not in node:
        node[section] = ml_collections.ConfigDict()
      node = node[section]
    with node.ignore_type():
      node[field] = value
  return config_lib.from_config_dict(tree)


def test_defaults_and_values():
  config = _read({'optimizer.learning_rate': 1e-4})
  assert config.optimizer.learning_rate == 1e-4
  assert config.optimizer.warmup_steps == 100
  assert config.batch.rows == 16
  assert config.mesh.shape == (1, 1, 1, 1)
  assert config.model.spec(vocab_size=260).vocab_size == 260


def test_round_trip_through_json():
  config = _read()
  tree = json.loads(json.dumps(config_lib.to_dict(config)))
  assert config_lib.from_config_dict(tree) == config
  assert config_lib.differences(tree, config_lib.to_dict(config)) == []


def test_rope_scaling_is_a_section_or_none():
  assert _read({'model.rope_scaling': None}).model.rope_scaling is None
  scaling = {'kind': 'linear', 'factor': 2}
  config = _read({'model.rope_scaling': scaling})
  assert config.model.spec(vocab_size=1).rope_scaling.factor == 2.0
  tree = json.loads(json.dumps(config_lib.to_dict(config)))
  assert config_lib.from_config_dict(tree) == config


def test_whole_numbers_become_floats():
  config = _read({'engine.temperature': 1})
  assert isinstance(config.engine.temperature, float)


def test_differences_name_fields_and_values():
  before = config_lib.to_dict(_read())
  after = config_lib.to_dict(
    _read({'batch.prompts': 8, 'recipe_args': {'max_ratio': 4.0}})
  )
  del after['seed']
  assert config_lib.differences(before, after) == [
    'batch.prompts: 4 -> 8',
    'recipe_args.max_ratio: 5.0 -> 4.0',
    'seed: 0 -> (none)',
  ]


def test_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    _read().seed = 1


_PPO = {'pipeline.algorithm': 'ppo_off_policy'}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    # Fields.
    ({'filed': 1}, 'filed is not a field; config has'),
    ({'batch.promts': 1}, 'batch.promts is not a field; batch has'),
    ({'num_updates': '4'}, "num_updates='4' must be of type int, got str"),
    ({'num_updates': 4.0}, 'num_updates=4.0 must be of type int'),
    ({'num_updates': True}, 'num_updates=True must be of type int'),
    ({'reporting.plots': 1}, 'reporting.plots=1 must be of type bool'),
    ({'engine.temperature': '1'}, 'engine.temperature='),
    ({'engine.temperature': float('nan')}, 'must be finite'),
    ({'batch': 3}, 'batch=3 must be a section'),
    # Ranges.
    ({'num_updates': 0}, 'num_updates=0 must be at least 1'),
    ({'seed': -1}, 'seed=-1 must be in'),
    ({'batch.prompts': 0}, 'batch.prompts=0'),
    ({'batch.group_size': 1}, 'batch.group_size=1 must be at least 2'),
    ({'batch.truncated': 'drop'}, "batch.truncated='drop' must be one of"),
    ({'engine.kind': 'sglang'}, 'needs start_servers=True or sglang.addresses'),
    ({'engine.start_servers': True}, "engine.kind='jax' generates in this"),
    ({'engine.sglang': {'addresses': 'a'}}, "addresses='a' must be a list"),
    (
      {'engine.sglang': {'max_total_tokens': 9}},
      'max_total_tokens=9 must be 0',
    ),
    ({'engine.sglang': {'args': [1]}}, r'args\[0\]=1 must be of type str'),
    ({'engine.sglang': {'addresses': ['a:1']}}, "'a:1' must be http://"),
    (
      {
        'engine': {
          'kind': 'sglang',
          'num_slots': 8,
          'start_servers': True,
          'replay_routing': True,
          'sglang': {'update': 'retract'},
        }
      },
      "replay_routing=True needs sglang.update='in_place'",
    ),
    ({'engine.kind': 'vllm'}, "engine.kind='vllm' must be one of"),
    ({'engine.temperature': 0.0}, 'engine.temperature=0.0 must be positive'),
    ({'optimizer.b1': 1.0}, 'optimizer.b1=1.0'),
    ({'model.head_dim': 7}, 'model.head_dim=7 must be even'),
    ({'model.dtype': 'float16'}, "model.dtype='float16'"),
    ({'model.rope_scaling': 1}, 'model.rope_scaling=1 must be a section'),
    (
      {'model.rope_scaling': {'kind': 'yarn', 'factor': 2.0}},
      "model.rope_scaling.kind='yarn' must be one of",
    ),
    ({'model.rope_scaling': {'kind': 'linear'}}, 'scaling.factor is missing'),
    ({'length.phrase': 'stop'}, 'length.phrase='),
    ({'length.max_thinking_tokens': 9}, 'length.max_thinking_tokens=9'),
    ({'pipeline.schedule': 'async'}, "pipeline.schedule='async'"),
    ({'curve.compute_axis': 'steps'}, "curve.compute_axis='steps'"),
    ({'data.toy.num_eval': 0}, 'toy.num_eval=0'),
    ({'data.toy.num_eval': 10**6}, 'exceeds the 1440 distinct problems'),
    ({'warm_start.interrupted_fraction': 1.5}, 'must be in \\[0, 1\\]'),
    (
      {'warm_start.num_steps': 5, 'warm_start.clean_steps': 6},
      'warm_start.clean_steps=6 must be at most num_steps=5',
    ),
    # Recipes.
    ({'recipe': 'ppo'}, "recipe='ppo' must be one of"),
    ({'recipe_args': {'max_ratio': 0.5}}, 'max_ratio=0.5 .* at least 1'),
    ({'recipe_args': {'clip': 0.5}}, "takes \\['max_ratio'\\]"),
    ({'recipe_args': {'max_ratio': '5'}}, 'not a number'),
    # Several fields.
    ({'batch.num_microbatches': 3}, '16 rows must be divisible by'),
    ({'mesh.data': 3}, '16 rows must be divisible by'),
    ({'mesh.tensor': 2}, 'mesh.tensor=2 must divide the .kv_heads. axis'),
    (
      {'length.interrupt': False, 'batch.max_tokens': 16},
      'data.max_prompt_tokens=16 must be below',
    ),
    ({'pipeline.lockstep_lead': 3}, 'lockstep_lead=3 must be at most'),
    (
      _PPO | {'pipeline.max_lag': 0, 'pipeline.lockstep_lead': 0},
      'max_lag=0 must be at least 1 for ppo_off_policy',
    ),
    (_PPO | {'checkpoint.every': 3}, 'checkpoint.every=3 must be a multiple'),
    ({'evaluation.num_problems': 11}, 'must be at most data.toy.num_eval=10'),
  ],
)
def test_bad_config_is_one_line(changes, message):
  with pytest.raises(config_lib.ConfigError, match=message) as caught:
    _read(changes)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('section', 'field'), [('batch', 'prompts'), ('model', 'num_layers')]
)
def test_missing_field_is_named(section, field):
  tree = _tree()
  del tree[section][field]
  with pytest.raises(
    config_lib.ConfigError, match=f'{section}.{field} is miss'
  ):
    config_lib.from_config_dict(tree)
