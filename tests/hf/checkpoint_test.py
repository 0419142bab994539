"""Checkpoints in and out, and those that must be refused."""

import contextlib
import dataclasses
import hashlib
import io
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax import sharding
from scalerl_jax.hf import keys
from scalerl_jax.hf import writing
from tests.hf import parity_test

pytestmark = pytest.mark.usefixtures('quick_compilation')

DATA = parity_test.DATA


def _spec(directory, **options):
  return hf.spec_from_hf(hf.read_config(directory), dtype='float32', **options)


def _stored(directory):
  """All tensors of a checkpoint, as the library reads them."""
  tensors = {}
  for path in sorted(directory.glob('*.safetensors')):
    tensors |= safetensors.numpy.load_file(path)
  return tensors


@pytest.fixture
def copy(tmp_path):
  def make(family='llama3'):
    return shutil.copytree(DATA / family, tmp_path / family)

  return make


def _change(directory, name, value):
  """Replaces a tensor of the single file; None removes it."""
  path = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors.pop(name, None)
  if value is not None:
    tensors[name] = value
  safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize('family', parity_test.FAMILIES)
@pytest.mark.parametrize('max_file_bytes', [10**9, 9000])
def test_out_and_in_again_is_the_same(tmp_path, family, max_file_bytes):
  spec = _spec(DATA / family)
  params = hf.load_params(DATA / family, spec)
  out = tmp_path / 'out'
  hf.save_params(
    out, params, spec, dtype='float32', max_file_bytes=max_file_bytes
  )
  assert len(list(out.glob('*.safetensors'))) > 1 or max_file_bytes > 9000
  stored, wanted = _stored(out), _stored(DATA / family)
  wanted.pop('lm_head.weight', None) if spec.tied_head else None
  assert stored.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_array_equal(stored[name], value)
  assert hf.spec_from_hf(hf.read_config(out), dtype='float32') == spec
  again = hf.load_params(out, spec)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, again, params))


def test_out_is_bfloat16_with_the_files_of_the_tokenizer(tmp_path, copy):
  source = copy()
  (source / 'tokenizer.json').write_text('{}')
  (source / 'secret.txt').write_text('')
  _edit_config(source, eos_token_id=[7, 8], secret=1)
  spec = _spec(source)
  params = hf.load_params(source, spec)
  out = tmp_path / 'out'
  hf.save_params(out, params, spec, source=source)
  assert {p.name for p in out.iterdir()} == {
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'tokenizer.json',
  }
  config = hf.read_config(out)
  assert config['torch_dtype'] == 'bfloat16'
  assert config['max_position_embeddings'] == 128
  assert config['eos_token_id'] == [7, 8]
  assert 'secret' not in config
  for value in _stored(out).values():
    assert value.dtype == jnp.bfloat16
  again = hf.load_params(out, spec)
  assert jax.tree.all(
    jax.tree.map(
      lambda a, b: jnp.array_equal(a, b.astype('bfloat16').astype('float32')),
      again,
      params,
    )
  )


def _into(files):
  """Opens files in memory, of the sizes that were announced."""

  @contextlib.contextmanager
  def open_file(name, num_bytes):
    file = io.BytesIO()
    yield file.write
    files[name] = file.getvalue()
    assert len(files[name]) == num_bytes

  return open_file


@pytest.mark.parametrize('family', parity_test.FAMILIES)
@pytest.mark.parametrize('max_file_bytes', [10**9, 9000])
def test_files_of_the_caller_get_the_same_bytes(
  tmp_path, family, max_file_bytes
):
  source = DATA / family
  spec = _spec(source)
  params = hf.load_params(source, spec)
  options = {'source': source, 'max_file_bytes': max_file_bytes}
  out = tmp_path / 'out'
  hf.save_params(out, params, spec, **options)
  files = {}
  written = hf.write_params(_into(files), params, spec, **options)
  kept = ('config', 'model')
  assert files == {
    path.name: path.read_bytes()
    for path in out.iterdir()
    if path.name.startswith(kept)
  }
  stored = _stored(out)
  assert [t.name for t in written] == list(
    dict.fromkeys(t.name for t in written)
  )
  assert {t.name for t in written} == stored.keys()
  for tensor in written:
    value = stored[tensor.name]
    assert (tensor.dtype, tensor.shape) == ('BF16', value.shape)
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    assert tensor.checksum == digest[:16]
  options['checksums'] = False
  unsummed = hf.write_params(_into({}), params, spec, **options)
  assert unsummed == [dataclasses.replace(t, checksum=None) for t in written]


@pytest.mark.parametrize(
  ('family', 'shape'),
  [
    ('qwen3', (2, 2, 2, 1)),
    ('qwen3_moe', (1, 2, 2, 2)),
    ('llama4', (1, 2, 2, 2)),
  ],
)
def test_parameters_on_many_devices_are_the_same_bytes(family, shape):
  spec = _spec(DATA / family)
  params = hf.load_params(DATA / family, spec)
  # Of what adds up devices, none may lose the sign of a zero.
  params = jax.tree.map(np.array, params)
  for array in jax.tree.leaves(params):
    array[..., 0] = -0.0
  mesh = sharding.make_mesh(shape)
  shardings = sharding.param_shardings(models.logical_axes(spec), mesh)
  cut = jax.device_put(params, shardings)
  one, many = {}, {}
  written = hf.write_params(_into(one), params, spec)
  assert hf.write_params(_into(many), cut, spec) == written
  assert one == many


def test_one_expert_is_fetched_without_the_others():
  """Else each device would hold the experts of all layers meanwhile."""
  spec = _spec(DATA / 'qwen3_moe')
  mesh = sharding.make_mesh((1, 2, 1, 2))
  shardings = sharding.param_shardings(models.logical_axes(spec), mesh)
  params = hf.load_params(DATA / 'qwen3_moe', spec, shardings=shardings)
  for tensor in keys.tensors(spec):
    if tensor.at == (0, 0):
      array = params['layers'][tensor.path.removeprefix('layers/')]
      kind = tensor._replace(at=(), name='', path='')
      program = writing._stored.lower(
        array, tensor.at, tensor=kind, dtype='bfloat16'
      ).compile()
      size = 4 * np.prod(tensor.shape)
      assert program.memory_analysis().temp_size_in_bytes <= 2 * size
      assert array.nbytes > 10 * size


def test_w18_w19_few_tensors_are_on_their_way_at_a_time():
  fetched = []

  class Counted(dict):
    def __getitem__(self, name):
      value = super().__getitem__(name)
      if not isinstance(value, dict):
        fetched.append(name)
      return value

  spec = _spec(DATA / 'llama3')
  params = hf.load_params(DATA / 'llama3', spec)
  params = Counted(params, layers=Counted(params['layers']))
  ahead = []

  @contextlib.contextmanager
  def open_file(name, num_bytes):
    yield lambda data: ahead.append(len(fetched) - len(ahead) + 1)

  written = hf.write_params(open_file, params, spec)
  # The header is the first that is put, `config.json` the last.
  ahead = ahead[1:-1]
  assert len(written) == len(fetched) == len(ahead)
  assert max(ahead) <= 3


def test_nothing_is_left_of_a_checkpoint_that_fails(tmp_path):
  spec = _spec(DATA / 'llama3')
  params = hf.load_params(DATA / 'llama3', spec)
  del params['final_norm']
  with pytest.raises(KeyError):
    hf.save_params(tmp_path / 'out', params, spec)
  assert not list(tmp_path.iterdir())


def test_no_checkpoint_is_overwritten(tmp_path):
  spec = _spec(DATA / 'llama3')
  with pytest.raises(hf.HfError, match='exists'):
    hf.save_params(tmp_path, {}, spec)
  with pytest.raises(hf.HfError, match='float16'):
    hf.save_params(tmp_path / 'out', {}, spec, dtype='float16')


@pytest.mark.parametrize(
  ('family', 'shape'),
  [
    ('qwen3', (1, 2, 2, 1)),
    ('qwen3', (2, 4, 1, 1)),
    ('qwen3', (1, 1, 2, 1)),
    ('qwen3_moe', (1, 2, 1, 2)),
    ('llama4', (1, 2, 2, 2)),
  ],
)
def test_each_device_gets_its_part(family, shape):
  spec = _spec(DATA / family)
  mesh = sharding.make_mesh(shape)
  shardings = sharding.param_shardings(models.logical_axes(spec), mesh)
  params = hf.load_params(DATA / family, spec, shardings=shardings)
  whole = hf.load_params(DATA / family, spec)
  for got, wanted, placed in zip(
    *map(jax.tree.leaves, (params, whole, shardings)), strict=True
  ):
    assert got.sharding == placed
    np.testing.assert_array_equal(got, wanted)


def test_dtype_of_the_parameters():
  spec = _spec(DATA / 'llama3')
  params = hf.load_params(DATA / 'llama3', spec, dtype='bfloat16')
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}


def _truncate(directory):
  path = directory / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])


def _edit_index(directory, edit):
  path = directory / 'model.safetensors.index.json'
  index = json.loads(path.read_text())
  edit(index['weight_map'])
  path.write_text(json.dumps(index))


def _edit_config(directory, **fields):
  path = directory / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


_NORM = 'model.norm.weight'


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (_truncate, 'model.safetensors: cannot be read'),
    (lambda d: _change(d, _NORM, None), f"lacks 1 tensors: '{_NORM}'"),
    (lambda d: _change(d, 'odd', np.ones(3)), "does not have: 'odd'"),
    (
      lambda d: _change(d, _NORM, np.ones(17, np.float32)),
      rf"'{_NORM}' has shape \(17,\), the config.json says \(16,\)",
    ),
    (lambda d: _change(d, _NORM, np.ones(16)), 'is stored as F64; only F32'),
    (lambda d: _edit_config(d, vocab_size=50), r'says \(50, 16\)'),
    (lambda d: _edit_config(d, num_hidden_layers=3), 'lacks 9 tensors'),
    (lambda d: _edit_config(d, num_hidden_layers=1), 'holds 9 tensors'),
    (lambda d: _edit_config(d, tie_word_embeddings=True), 'differs from the'),
    (lambda d: (d / 'model.safetensors').unlink(), 'holds neither'),
    (lambda d: (d / 'config.json').write_text('[1]'), 'a JSON object'),
    (lambda d: (d / 'config.json').write_text('{'), 'is not JSON'),
    (lambda d: (d / 'config.json').unlink(), 'cannot be read'),
  ],
)
def test_damaged_checkpoints_are_refused(copy, damage, message):
  directory = copy()
  damage(directory)
  with pytest.raises(hf.HfError, match=message):
    hf.load_params(directory, _spec(directory))


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    (lambda m: m.update({_NORM: '../x.safetensors'}), 'not a file beside it'),
    (lambda m: m.update({_NORM: '/etc/passwd'}), 'not a file beside it'),
    (lambda m: m.update({_NORM: 'a\\b.safetensors'}), 'not a file beside it'),
    (
      lambda m: m.update({_NORM: 'x.safetensors'}),
      "'x.safetensors', not there",
    ),
    (lambda m: m.update({_NORM: 'config.json'}), 'not a safetensors file'),
    (lambda m: m.update({'odd': m[_NORM]}), 'which does not hold it'),
    (dict.clear, 'has no weight_map'),
  ],
)
def test_bad_indices_are_refused(copy, edit, message):
  directory = copy('qwen3')
  _edit_index(directory, edit)
  with pytest.raises(hf.HfError, match=message):
    hf.load_params(directory, _spec(directory))


class _Bomb:
  def __reduce__(self):
    return (pytest.fail, ('the pickle was executed',))


def test_pickles_are_refused_and_not_opened(copy):
  directory = copy()
  (directory / 'model.safetensors').unlink()
  (directory / 'pytorch_model.bin').write_bytes(pickle.dumps(_Bomb()))
  with pytest.raises(hf.HfError, match='is a pickle'):
    hf.load_params(directory, _spec(directory))


def test_of_a_model_that_reads_images_the_text_is_loaded(copy):
  directory = copy('llama4')
  spec = _spec(directory)
  expected = hf.load_params(directory, spec)
  path = directory / 'model.safetensors'
  renamed = {
    f'language_model.{name}': value
    for name, value in safetensors.numpy.load_file(path).items()
  }
  image = {'vision_model.patch.weight': np.zeros((2, 2), np.float32)}
  safetensors.numpy.save_file(renamed | image, path)
  found = hf.load_params(directory, spec)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  del renamed['language_model.model.norm.weight']
  safetensors.numpy.save_file(renamed | image, path)
  with pytest.raises(hf.HfError, match='language_model'):
    hf.load_params(directory, spec)


def test_a_tied_head_may_be_stored_too(copy):
  directory = copy('smollm2')
  embed = _stored(directory)['model.embed_tokens.weight']
  _change(directory, 'lm_head.weight', embed)
  params = hf.load_params(directory, _spec(directory))
  assert 'head' not in params


def test_derived_tensors_are_no_matter(copy):
  directory = copy()
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  _change(directory, name, np.ones(2, np.float32))
  hf.load_params(directory, _spec(directory))
