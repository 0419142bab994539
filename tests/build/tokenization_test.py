"""What a configuration and a tokenizer say of each other."""

import dataclasses

import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax.build import tokenization
from tests import tiny
from tests import tiny_checkpoint

_NO_START = {'num_steps': 0}


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  return str(tiny_checkpoint.write(tmp_path_factory.mktemp('hf') / 'tiny'))


def test_bytes_are_the_default():
  config = tiny.config()
  completed, tokenizer = build.complete(config)
  assert isinstance(tokenizer, data.ByteTokenizer)
  assert completed.model.vocab_size == 260
  model = dataclasses.replace(completed.model, vocab_size=0)
  assert dataclasses.replace(completed, model=model) == config
  assert build.complete(completed)[0] == completed


def test_a_tokenizer_of_its_own(directory):
  config = tiny.config(
    data={'tokenizer': directory, 'chat': True},
    warm_start=_NO_START,
    batch={'max_tokens': 8 + 6 + 1 + 3},  # The phrase is one token here.
  )
  completed, tokenizer = build.complete(config)
  assert tokenizer.encode_prompt('hello')[0] == 1
  assert completed.model.vocab_size == tokenizer.vocab_size == 265


def _with_checkpoint(directory, **sections):
  model = sections.pop('model', {}) | {'path': directory}
  fields = config_lib.to_dict(tiny.config(warm_start=_NO_START, **sections))
  return config_lib.from_config_dict({**fields, 'model': model})


def test_a_checkpoint_gives_sizes_and_tokenizer(directory):
  config = _with_checkpoint(directory, model={'dtype': 'bfloat16'})
  model = config_lib.to_dict(config)['model']
  sizes = dataclasses.asdict(tiny_checkpoint.spec())
  assert model == sizes | {'path': directory, 'dtype': 'bfloat16'}
  completed, tokenizer = build.complete(config)
  assert completed == config  # More rows than tokens.
  assert tokenizer.stop_ids == (2, 0)
  assert config_lib.from_config_dict(config_lib.to_dict(config)) == config
  bytes_too = _with_checkpoint(directory, data={'tokenizer': 'bytes'})
  assert isinstance(build.complete(bytes_too)[1], data.ByteTokenizer)


@pytest.mark.parametrize(
  ('sections', 'message'),
  [
    (
      {'batch': {'max_tokens': 17}},
      'phrase of 1 [+] .* = 18 tokens exceed batch.max_tokens=17',
    ),
    ({'data': {'chat': True}}, 'data.chat=True needs a tokenizer'),
    ({'model': {'vocab_size': 50}}, 'model.vocab_size=50 must be at least 260'),
    ({'data': {'tokenizer': 'nowhere'}, 'warm_start': _NO_START}, 'nowhere: h'),
    ({'data': {'tokenizer': 'nowhere'}}, 'warm_start.num_steps=100 must be 0'),
  ],
)
def test_contradictions_are_one_line(sections, message):
  config = tiny.config(**sections)
  with pytest.raises(config_lib.ConfigError, match=message) as caught:
    build.complete(config)
  assert '\n' not in str(caught.value)


def test_the_mesh_must_divide_the_vocabulary(directory):
  wide = {'num_heads': 8, 'num_kv_heads': 8}
  config = tiny.config(
    data={'tokenizer': directory},
    model=wide,
    mesh={'tensor': 8},
    warm_start=_NO_START,
  )
  with pytest.raises(config_lib.ConfigError, match=r'of .embed., .* size 265'):
    build.complete(config)


def test_the_end_of_thinking_may_be_several_tokens(tmp_path):
  path = tiny_checkpoint.write_tokenizer(tmp_path)
  whole = data.HfTokenizer(path, chat=False)
  assert len(tokenization.end_of_thinking(whole)) == 1
  text = (path / 'tokenizer.json').read_text()
  (path / 'tokenizer.json').write_text(text.replace('</think>', '<other>'))
  parts = data.HfTokenizer(path, chat=False)
  first, *others = tokenization.end_of_thinking(parts)
  written = parts.encode('so 12 </think>')
  begin = next(i for i, t in enumerate(written) if t in first)
  assert parts.decode(written[begin:]).strip() == '</think>'
  assert [(i,) for i in written[begin + 1 : -1]] == others


@pytest.mark.parametrize(
  ('model', 'message'),
  [
    (
      {'num_layers': 3},
      'model.num_layers=3 must be that of the checkpoint model.path, 1;',
    ),
    ({'vocab_size': 265}, 'model.vocab_size=265 must be .* 272'),
    ({'rope_scaling': {'kind': 'linear'}}, 'model.rope_scaling={.* None'),
    ({'path': 'nowhere'}, "model.path='nowhere': nowhere/config.json: cannot"),
    ({'path': 3}, 'model.path=3 must be of type str'),
  ],
)
def test_what_is_written_must_agree_with_the_checkpoint(
  directory, model, message
):
  fields = config_lib.to_dict(tiny.config())
  with pytest.raises(config_lib.ConfigError, match=message) as caught:
    config_lib.from_config_dict(
      {**fields, 'model': {'path': directory} | model}
    )
  assert '\n' not in str(caught.value)


def test_parts_of_a_nested_section_are_filled_in(tmp_path):
  path = tiny_checkpoint.write(tmp_path / 'tiny')
  config_file = path / 'config.json'
  text = config_file.read_text().replace(
    '"rope_scaling": null',
    '"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor":'
    ' 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}',
  )
  config_file.write_text(text)
  for written in ({}, {'kind': 'llama3', 'factor': 8}):
    config = _with_checkpoint(str(path), model={'rope_scaling': written})
    assert config.model.rope_scaling.original_max_positions == 64
    assert config.model.spec(vocab_size=1).rope_scaling.factor == 8.0
  with pytest.raises(config_lib.ConfigError, match=r'rope_scaling\.factor=4'):
    _with_checkpoint(str(path), model={'rope_scaling': {'factor': 4.0}})
