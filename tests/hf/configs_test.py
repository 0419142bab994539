"""`config.json`: both layouts, and what is refused."""

import json
import pathlib
import runpy

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax import hf
from scalerl_jax import models
from tests import tiny_model

_CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
_LLAMA_3_1 = {
  'model_type': 'llama',
  'vocab_size': 128256,
  'hidden_size': 4096,
  'intermediate_size': 14336,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-5,
  'rope_theta': 5e5,
  'rope_scaling': {
    'factor': 8.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'pretraining_tp': 1,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
}


def test_llama_3_1_8b():
  spec = hf.spec_from_hf(_LLAMA_3_1)
  assert spec == models.ModelSpec(
    vocab_size=128256,
    num_layers=32,
    model_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=14336,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied_head=False,
    dtype='bfloat16',
    rope_scaling=models.RopeScaling(
      kind='llama3',
      factor=8.0,
      low_frequency_factor=1.0,
      high_frequency_factor=4.0,
      original_max_positions=8192,
    ),
  )
  assert models.num_parameters(spec) == 8_030_261_248


def test_both_layouts_are_read_alike():
  old = dict(_LLAMA_3_1)
  new = dict(_LLAMA_3_1, dtype=old['torch_dtype'])
  scaling = new.pop('rope_scaling')
  new['rope_parameters'] = scaling | {'rope_theta': new.pop('rope_theta')}
  del new['torch_dtype']
  assert hf.spec_from_hf(old) == hf.spec_from_hf(new)
  older = dict(old, rope_scaling={'type': 'linear', 'factor': 2.0})
  newer = dict(older, rope_scaling={'rope_type': 'linear', 'factor': 2})
  assert hf.spec_from_hf(older) == hf.spec_from_hf(newer)


def test_heads_and_rope_have_defaults():
  config = dict(_LLAMA_3_1, rope_scaling=None)
  for name in ('num_key_value_heads', 'rope_theta', 'rms_norm_eps'):
    del config[name]
  spec = hf.spec_from_hf(config)
  assert spec.num_kv_heads == 32
  assert (spec.rope_theta, spec.norm_eps) == (1e4, 1e-6)
  assert spec.rope_scaling is None


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'mamba'}, "model_type='mamba' is not implemented"),
    ({'model_type': None}, 'model_type=None'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not implemented"),
    ({'attention_bias': True}, 'attention_bias=True'),
    ({'mlp_bias': True}, 'mlp_bias=True'),
    ({'use_sliding_window': True}, 'use_sliding_window=True'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config='),
    ({'layer_types': ['sliding_attention']}, "layer_types=\\['sliding"),
    ({'rope_scaling': {'rope_type': 'yarn'}}, "rope_type='yarn' is not"),
    ({'rope_scaling': {'type': 'dynamic'}}, "rope_type='dynamic' is not"),
    ({'rope_scaling': {'type': 'llama3'}}, 'rope llama3 has no'),
    ({'rope_parameters': {'full': {}}}, 'differ between layers'),
    ({'rope_parameters': [1]}, 'differ between layers'),
    ({'rope_scaling': [1]}, 'rope_scaling=.* must be an object'),
    ({'hidden_size': None}, 'has no hidden_size'),
    ({'hidden_size': '4096'}, "hidden_size='4096' must be an integer"),
    ({'hidden_size': 4100}, 'a multiple of num_attention_heads=32'),
    ({'num_key_value_heads': 7}, 'num_kv_heads=7'),
    ({'num_attention_heads': 0}, 'num_heads=0 must be at least 1'),
    ({'rms_norm_eps': 'x'}, "rms_norm_eps='x' must be a number"),
    ({'rope_theta': -1.0}, 'rope_theta=-1.0'),
  ],
)
def test_what_is_not_implemented_is_refused(changes, message):
  config = json.loads(json.dumps(_LLAMA_3_1 | changes))
  with pytest.raises(hf.HfError, match=message) as caught:
    hf.spec_from_hf(config)
  assert str(caught.value).count('config.json: ') == 1


# Of the text of the published checkpoint.
_SCOUT = {
  'model_type': 'llama4_text',
  'vocab_size': 202048,
  'hidden_size': 5120,
  'intermediate_size': 8192,
  'intermediate_size_mlp': 16384,
  'num_hidden_layers': 48,
  'num_attention_heads': 40,
  'num_key_value_heads': 8,
  'head_dim': 128,
  'num_local_experts': 16,
  'num_experts_per_tok': 1,
  'interleave_moe_layer_step': 1,
  'attention_chunk_size': 8192,
  'attn_temperature_tuning': 4,
  'attn_scale': 0.1,
  'floor_scale': 8192,
  'no_rope_layers': [1, 1, 1, 0] * 12,
  'use_qk_norm': True,
  'rms_norm_eps': 1e-5,
  'rope_theta': 5e5,
  'rope_scaling': {
    'factor': 16.0,
    'high_freq_factor': 1.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
}
_QWEN3_30B = {
  'model_type': 'qwen3_moe',
  'vocab_size': 151936,
  'hidden_size': 2048,
  'intermediate_size': 6144,
  'moe_intermediate_size': 768,
  'num_hidden_layers': 48,
  'num_attention_heads': 32,
  'num_key_value_heads': 4,
  'head_dim': 128,
  'num_experts': 128,
  'num_experts_per_tok': 8,
  'norm_topk_prob': True,
  'decoder_sparse_step': 1,
  'mlp_only_layers': [],
  'rope_theta': 1e6,
}


def test_scout_is_that_of_its_configuration():
  tree = runpy.run_path(str(_CONFIGS / 'scout.py'))['get_config']()
  written = config_lib.from_config_dict(tree).model.spec(vocab_size=1)
  image = {'model_type': 'llama4', 'text_config': _SCOUT, 'vision_config': {}}
  for config in (_SCOUT, image):
    assert hf.spec_from_hf(config, remat='full') == written
  assert models.num_parameters(written) == 107_769_861_120
  assert 16e9 < models.num_parameters(written, active=True) < 18e9


def test_qwen3_30b_a3b():
  spec = hf.spec_from_hf(_QWEN3_30B)
  assert spec.moe == models.MoeSpec(
    num_experts=128, experts_per_token=8, expert_dim=768
  )
  assert 30e9 < models.num_parameters(spec) < 31e9
  assert 3e9 < models.num_parameters(spec, active=True) < 3.5e9
  renamed = {**_QWEN3_30B, 'num_local_experts': 128}
  del renamed['num_experts']
  assert hf.spec_from_hf(renamed) == spec


@pytest.mark.parametrize('config', [_SCOUT, _QWEN3_30B])
def test_mixtures_are_written_as_they_are_read(config):
  spec = hf.spec_from_hf(config)
  again = hf.config_from_spec(spec, dtype='bfloat16')
  assert hf.spec_from_hf(again) == spec
  assert again['model_type'] == config['model_type']


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (_SCOUT | {'moe_layers': [1, 3]}, 'moe_layers and interleave'),
    (_SCOUT | {'interleave_moe_layer_step': 2}, 'moe_layers and interleave'),
    (_SCOUT | {'no_rope_layers': [1, 0, 0, 1] * 12}, 'no_rope_layers='),
    (_SCOUT | {'no_rope_layers': 4}, 'no_rope_layers=4 must be a list'),
    (_SCOUT | {'no_rope_layer_interval': 0}, 'no_rope_layer_interval=0'),
    (_SCOUT | {'interleave_moe_layer_step': '1'}, 'must be an integer'),
    (_SCOUT | {'attention_chunk_size': None}, 'attention_chunk_size=None'),
    (_SCOUT | {'layer_types': ['full_attention'] * 48}, 'layer_types that'),
    (_SCOUT | {'num_local_experts': None}, 'num_local_experts=None must be'),
    (_QWEN3_30B | {'mlp_only_layers': [0]}, 'mlp_only_layers and'),
    (_QWEN3_30B | {'decoder_sparse_step': 2}, 'mlp_only_layers and'),
    (_QWEN3_30B | {'layer_types': ['chunked_attention']}, 'layer_types='),
    ({'model_type': 'llama4'}, 'model_type=None is not'),
  ],
)
def test_mixtures_that_are_not_implemented_are_refused(config, message):
  with pytest.raises(hf.HfError, match=message):
    hf.spec_from_hf(config)


def test_options_of_no_family_cannot_be_written():
  spec = hf.spec_from_hf(_LLAMA_3_1)
  odd = tiny_model.spec(qk_norm=True, qkv_bias=True)
  assert hf.config_from_spec(spec, dtype='float32')['model_type'] == 'llama'
  with pytest.raises(hf.HfError, match='no family'):
    hf.config_from_spec(odd, dtype='float32')
  mixture = tiny_model.moe_spec()
  with pytest.raises(hf.HfError, match='one width of experts'):
    hf.config_from_spec(mixture, dtype='float32')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'kind': 'yarn'}, "rope_scaling.kind='yarn'"),
    ({'factor': 0.5}, 'rope_scaling.factor=0.5'),
    ({'factor': float('nan')}, 'rope_scaling.factor=nan'),
    ({'low_frequency_factor': 5.0}, 'rope_scaling.high_frequency_factor=4.0'),
    ({'low_frequency_factor': 0.0}, 'must be positive'),
    ({'original_max_positions': 0}, 'rope_scaling.original_max_positions=0'),
  ],
)
def test_bad_scaling_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    models.RopeScaling(**({'kind': 'llama3', 'factor': 8.0} | changes))
