"""GGUF files to checkpoints."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

from launch import from_gguf
from scalerl_jax import data
from scalerl_jax import hf
from scalerl_jax import models
from tests import tiny_checkpoint

# One that the digits of a number must not come together to.
_MERGES = (*tiny_checkpoint.MERGES, ('1', '2'))
_TOKENS = [*tiny_checkpoint.tokens(), '12']
_SPEC = dataclasses.replace(
  tiny_checkpoint.spec(), vocab_size=len(_TOKENS), hidden_dim=32, num_layers=2
)
_NAMES = {
  'attention_norm': 'attn_norm',
  'mlp_norm': 'ffn_norm',
  'q': 'attn_q',
  'k': 'attn_k',
  'v': 'attn_v',
  'o': 'attn_output',
  'gate': 'ffn_gate',
  'up': 'ffn_up',
  'down': 'ffn_down',
}


def _interleaved(weight, num_heads):
  """As convert_hf_to_gguf.py of llama.cpp does it."""
  rows, columns = weight.shape
  halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
  return halves.swapaxes(1, 2).reshape(rows, columns)


def _tensors(params, spec):
  """Tensors of a GGUF file, each as [outputs, inputs]."""
  yield 'token_embd.weight', np.asarray(params['embed'])
  yield 'output_norm.weight', np.asarray(params['final_norm'])
  if not spec.tied_head:
    yield 'output.weight', np.asarray(params['head']).T
  for ours, theirs in _NAMES.items():
    for i, value in enumerate(np.asarray(params['layers'][ours])):
      if ours == 'o':
        value = value.reshape(-1, value.shape[-1])
      elif value.ndim > 1:
        value = value.reshape(value.shape[0], -1)
      if ours in ('q', 'k'):
        count = spec.num_heads if ours == 'q' else spec.num_kv_heads
        value = _interleaved(value.T, count).T
      yield f'blk.{i}.{theirs}.weight', value.T if value.ndim > 1 else value


def _write(
  path,
  *,
  spec=_SPEC,
  arch='llama',
  skip=(),
  add=None,
  quantized=False,
  **fields,
):
  """Writes a file; returns the parameters in it."""
  params = models.init_params(spec, jax.random.key(3))
  writer = gguf.GGUFWriter(path, arch)
  values = {
    'llama.context_length': 64,
    'llama.block_count': spec.num_layers,
    'llama.embedding_length': spec.model_dim,
    'llama.feed_forward_length': spec.hidden_dim,
    'llama.attention.head_count': spec.num_heads,
    'llama.attention.head_count_kv': spec.num_kv_heads,
    'llama.rope.dimension_count': spec.head_dim,
    'llama.rope.freq_base': spec.rope_theta,
    'llama.attention.layer_norm_rms_epsilon': spec.norm_eps,
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': _TOKENS,
    'tokenizer.ggml.token_type': [3] * 4 + [1] * (len(_TOKENS) - 4),
    'tokenizer.ggml.merges': [' '.join(pair) for pair in _MERGES],
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.padding_token_id': 0,
    'tokenizer.chat_template': tiny_checkpoint.TEMPLATE,
  } | {name.replace('__', '.'): value for name, value in fields.items()}
  add_one = {
    str: writer.add_string,
    int: writer.add_uint32,
    float: writer.add_float32,
    bool: writer.add_bool,
    list: writer.add_array,
  }
  for name, value in values.items():
    if value is not None:
      add_one[type(value)](name, value)
  for name, value in dict(_tensors(params, spec), **add or {}).items():
    value = np.ascontiguousarray(value, np.float32)
    kind = gguf.GGMLQuantizationType.F32
    if quantized and value.ndim > 1 and value.shape[1] % 32 == 0:
      kind = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quants.quantize(value, kind)
    if name not in skip:
      writer.add_tensor(name, value, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return params


@pytest.mark.parametrize('tied_head', [True, False])
def test_weights_are_those_of_the_file(tmp_path, tied_head):
  spec = dataclasses.replace(_SPEC, tied_head=tied_head)
  params = _write(tmp_path / 'a.gguf', spec=spec)
  out = tmp_path / 'out'
  found = hf.convert_gguf(tmp_path / 'a.gguf', out, dtype='float32')
  assert found == spec
  config = hf.read_config(out)
  assert hf.spec_from_hf(config, dtype='float32') == spec
  assert config['max_position_embeddings'] == 64
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(out, spec), params)


def test_quantized_weights_are_near(tmp_path):
  spec = dataclasses.replace(_SPEC, model_dim=32)  # Blocks are of 32 columns.
  wanted = _write(tmp_path / 'a.gguf', spec=spec, quantized=True)
  hf.convert_gguf(tmp_path / 'a.gguf', tmp_path / 'out', dtype='float32')
  found = hf.load_params(tmp_path / 'out', spec)
  for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    bound = float(np.abs(other).max()) / 254
    np.testing.assert_allclose(one, other, rtol=0, atol=1.1 * bound)
  assert not np.array_equal(found['embed'], wanted['embed'])


def test_the_tokenizer_is_that_of_the_file(tmp_path):
  _write(tmp_path / 'a.gguf')
  hf.convert_gguf(tmp_path / 'a.gguf', tmp_path / 'out')
  tokenizer = data.HfTokenizer(tmp_path / 'out', chat=True)
  assert tokenizer.stop_ids == (2,)
  assert tokenizer.pad_id == 0
  assert tokenizer.vocab_size == len(_TOKENS)
  hello = _TOKENS.index('hello')
  assert tokenizer.encode('hello hello<|im_start|>') == [hello, hello + 1, 1]
  assert tokenizer.encode('12') == [_TOKENS.index('1'), _TOKENS.index('2')]
  assert tokenizer.encode_prompt('hello').count(hello) == 1
  assert tokenizer.decode(tokenizer.encode('é 12 hello')) == 'é 12 hello'


def _call(capsys, *args):
  code = from_gguf.main(['from_gguf.py', *map(str, args)])
  return code, *capsys.readouterr()


def test_command_line(capsys, tmp_path):
  _write(tmp_path / 'a.gguf')
  out = tmp_path / 'out'
  code, text, err = _call(capsys, tmp_path / 'a.gguf', out)
  assert (code, err) == (0, '')
  count = models.num_parameters(_SPEC)
  assert text == f'wrote {out}: {count} parameters, bfloat16\n'
  assert hf.read_config(out)['torch_dtype'] == 'bfloat16'
  code, text, _ = _call(capsys, '--help')
  assert code == 0
  assert 'FILE.gguf OUT' in text


_ODD = {'blk.0.odd.weight': np.ones(2)}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'arch': 'qwen2'}, "architecture 'qwen2' is not implemented"),
    ({'tokenizer__ggml__pre': 'llama-bpe'}, "pre='llama-bpe'"),
    ({'tokenizer__ggml__model': 'llama'}, "model='llama'"),
    ({'tokenizer__ggml__add_bos_token': True}, 'add_bos_token=True'),
    ({'tokenizer__ggml__eos_token_id': 999}, "'eos': 999"),
    (
      {'tokenizer__ggml__token_type': [4] * len(_TOKENS)},
      'neither normal nor control',
    ),
    ({'llama__rope__scaling__type': 'yarn'}, "rope scaling 'yarn'"),
    ({'llama__expert_count': 8}, '8 experts'),
    ({'llama__block_count': None}, "field 'llama.block_count' is missing"),
    ({'llama__block_count': 'two'}, 'of the wrong type'),
    ({'llama__attention__head_count_kv': 3}, 'num_heads=2 must be a multiple'),
    ({'llama__feed_forward_length': 31}, "'blk.0.ffn_gate.weight' has shape"),
    ({'skip': ('blk.1.attn_q.weight',)}, "tensors ['blk.1.attn_q.weight'] and"),
    ({'add': _ODD}, "has ['blk.0.odd.weight'] that are not implemented"),
  ],
)
def test_what_is_not_implemented_is_one_line(capsys, tmp_path, fields, message):
  _write(tmp_path / 'a.gguf', **fields)
  _assert_refused(capsys, tmp_path, message)


@pytest.mark.parametrize('content', [b'', b'no', b'GGUF', b'x' * 4096])
def test_a_file_of_another_kind_is_one_line(capsys, tmp_path, content):
  (tmp_path / 'a.gguf').write_bytes(content)
  _assert_refused(capsys, tmp_path, 'a.gguf: cannot be read as GGUF')


def test_a_file_that_is_cut_off_is_one_line(capsys, tmp_path):
  _write(tmp_path / 'a.gguf')
  content = (tmp_path / 'a.gguf').read_bytes()
  for size in (len(content) // 2, len(content) - 100):
    (tmp_path / 'a.gguf').write_bytes(content[:size])
    _assert_refused(capsys, tmp_path, 'a.gguf: cannot be read as GGUF')


def _assert_refused(capsys, directory, message):
  code, text, err = _call(capsys, directory / 'a.gguf', directory / 'out')
  assert (code, text) == (2, '')
  assert message in err
  assert err.startswith('error: ')
  assert err.count('\n') == 1
  assert [p.name for p in directory.iterdir()] == ['a.gguf']


def test_nothing_is_overwritten(capsys, tmp_path):
  _write(tmp_path / 'a.gguf')
  (tmp_path / 'out').mkdir()
  code, _, err = _call(capsys, tmp_path / 'a.gguf', tmp_path / 'out')
  assert code == 2
  assert 'exists; give a new directory' in err
  assert _call(capsys, tmp_path / 'a.gguf')[0] == 2
