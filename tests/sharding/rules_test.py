import functools
import re

import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax import sharding
from tests import tiny_model

# Every kind of array there is; each named axis but `layers` divides by 4.
SPEC = tiny_model.spec(
  vocab_size=20,
  num_kv_heads=4,
  tied_head=False,
  qk_norm=True,
  qkv_bias=True,
)


def resolve(axes, shape=(2, 2, 2, 1)):
  return sharding.param_shardings(axes, sharding.make_mesh(shape))


def leaves(tree):
  """Path → leaf, 'layers/q' for example."""
  return {
    '/'.join(k.key for k in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      tree, is_leaf=lambda x: isinstance(x, tuple)
    )
  }


# What all columns but those of the experts are cut along.
COLUMNS = ('fsdp', 'expert')

# --- Rules. -----------------------------------------------------------------


@pytest.mark.parametrize(
  ('axes', 'expected'),
  [
    ((), ()),
    ((None,), (None,)),
    (('layers', None), (None, None)),
    (('vocab', 'embed'), ('tensor', COLUMNS)),
    (('embed', 'heads', 'head_dim'), (COLUMNS, 'tensor', None)),
    (('kv_heads', 'head_dim'), ('tensor', None)),
    (('expert', 'expert_embed', 'mlp'), ('expert', 'fsdp', 'tensor')),
    (('mlp', 'embed'), ('tensor', COLUMNS)),
  ],
  ids=str,
)
def test_names_become_the_axes_of_the_mesh(axes, expected):
  mesh = sharding.make_mesh((2, 2, 2, 1))
  assert sharding.param_shardings(axes, mesh) == jax.sharding.NamedSharding(
    mesh, PartitionSpec(*expected)
  )


def test_a_tree_of_names_keeps_its_structure():
  found = resolve({'a': ('mlp',), 'b': {'c': (None, 'embed'), 'd': ()}})
  specs = jax.tree.map(lambda s: s.spec, found)
  assert specs == {
    'a': PartitionSpec('tensor'),
    'b': {'c': PartitionSpec(None, COLUMNS), 'd': PartitionSpec()},
  }


def test_an_axis_without_a_rule_is_refused():
  message = "logical axes ['batch', 'time'] have no rule in ['layers', 'vocab'"
  with pytest.raises(ValueError, match=re.escape(message)):
    resolve({'w': ('batch', 'embed', 'time')})


@pytest.mark.parametrize(
  'axes',
  [
    ('heads', 'mlp'),
    ('embed', 'embed'),
    ('vocab', None, 'kv_heads'),
    ('embed', 'expert'),
  ],
)
def test_two_dimensions_on_one_mesh_axis_are_refused(axes):
  with pytest.raises(ValueError, match='put two dimensions on one of'):
    resolve(axes)


def test_rules_lead_to_axes_of_the_mesh():
  targets = {a for name in sharding.RULES for a in sharding.mesh_axes(name)}
  assert targets == {'fsdp', 'tensor', 'expert'}
  assert targets < set(sharding.MESH_AXES)


# --- Meshes. ----------------------------------------------------------------


def test_a_mesh_has_the_named_sizes_and_the_devices_in_order():
  mesh = sharding.make_mesh((1, 2, 3, 1))
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 2, 'tensor': 3, 'expert': 1}
  assert tuple(mesh.axis_names) == sharding.MESH_AXES
  assert mesh.devices.ravel().tolist() == jax.devices()[:6]
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_mesh_takes_the_devices_it_is_given():
  devices = jax.devices()[:3:-1]
  mesh = sharding.make_mesh((2, 1, 2, 1), devices=devices)
  assert mesh.devices[:, 0, :, 0].tolist() == [devices[:2], devices[2:]]


@pytest.mark.parametrize('given', [None, 3])
def test_too_few_devices_are_an_error(given):
  devices = None if given is None else jax.devices()[:given]
  message = (
    "mesh {'data': 3, 'fsdp': 3, 'tensor': 1, 'expert': 1} needs 9 devices,"
    f' {given or 8} found'
  )
  with pytest.raises(ValueError, match=re.escape(message)):
    sharding.make_mesh((3, 3, 1, 1), devices=devices)


# --- Parameters of a model. -------------------------------------------------


def test_every_parameter_has_the_sharding_of_the_design():
  # Blocks are stacked on a leading axis, which is not sharded.
  block = {
    'attention_norm': (None,),
    'q': (COLUMNS, 'tensor', None),
    'k': (COLUMNS, 'tensor', None),
    'v': (COLUMNS, 'tensor', None),
    'q_bias': ('tensor', None),
    'k_bias': ('tensor', None),
    'v_bias': ('tensor', None),
    'q_norm': (None,),
    'k_norm': (None,),
    'o': ('tensor', None, COLUMNS),
    'mlp_norm': (None,),
    'gate': (COLUMNS, 'tensor'),
    'up': (COLUMNS, 'tensor'),
    'down': ('tensor', COLUMNS),
  }
  expected = {
    'embed': ('tensor', COLUMNS),
    'final_norm': (None,),
    'head': (COLUMNS, 'tensor'),
    **{f'layers/{name}': (None, *axes) for name, axes in block.items()},
  }
  found = leaves(resolve(models.logical_axes(SPEC)))
  assert set(found) == set(models.parameter_table(SPEC))
  assert {path: tuple(s.spec) for path, s in found.items()} == expected


@pytest.mark.parametrize('tied_head', [True, False])
@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('qkv_bias', [True, False])
def test_shardings_are_a_tree_like_the_parameters(tied_head, qk_norm, qkv_bias):
  spec = tiny_model.spec(
    tied_head=tied_head, qk_norm=qk_norm, qkv_bias=qkv_bias
  )
  shardings = resolve(models.logical_axes(spec))
  params = jax.eval_shape(lambda: models.init_params(spec, jax.random.key(0)))
  assert jax.tree.structure(shardings) == jax.tree.structure(params)
  for path, leaf in leaves(params).items():
    assert len(leaves(shardings)[path].spec) == leaf.ndim


def draw_params():
  rng = np.random.default_rng(0)
  params = {'layers': {}}
  for path, info in models.parameter_table(SPEC).items():
    tree = params['layers'] if path.startswith('layers/') else params
    value = rng.normal(0.0, 0.2, info.shape).astype(np.float32)
    tree[path.removeprefix('layers/')] = value
  return params


def place(params, shape):
  return jax.device_put(params, resolve(models.logical_axes(SPEC), shape))


def test_each_device_holds_its_part():
  placed = leaves(place(draw_params(), (1, 2, 4, 1)))
  params = leaves(draw_params())
  for path, held in {
    'embed': 8,
    'head': 8,
    'layers/q': 8,
    'layers/k_bias': 4,
    'layers/down': 8,
    'layers/q_norm': 1,
  }.items():
    sizes = {s.data.size for s in placed[path].addressable_shards}
    assert sizes == {params[path].size // held}
  # Replicated over `data`: the first and the second half of the devices.
  q = leaves(place(draw_params(), (2, 2, 2, 1)))['layers/q']
  parts = {s.device: np.asarray(s.data) for s in q.addressable_shards}
  devices = jax.devices()
  for one, other in zip(devices[:4], devices[4:], strict=True):
    np.testing.assert_array_equal(parts[one], parts[other])
    assert parts[one].size == q.size // 4


def test_l08_optional_arrays_on_a_mesh_give_the_scores_of_one_device():
  policy_fn = jax.jit(models.make_policy_fn(SPEC, temperature=0.7))
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, SPEC.vocab_size, (4, 6)).astype(np.int32)
  positions = np.tile(np.arange(6, dtype=np.int32), (4, 1))
  rows = (tokens, positions, np.ones_like(tokens))
  expected = policy_fn(draw_params(), *rows)
  mesh = sharding.make_mesh((1, 2, 4, 1))
  on_rows = jax.sharding.NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))
  actual = policy_fn(
    place(draw_params(), (1, 2, 4, 1)), *jax.device_put(rows, on_rows)
  )
  assert len(actual.logp.sharding.device_set) == 8
  for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
  assert np.asarray(expected.logp).std() > 0.1


def test_parameters_drawn_into_shards_are_those_of_one_device():
  shardings = resolve(models.logical_axes(SPEC))
  draw = functools.partial(models.init_params, SPEC)
  params = jax.jit(draw, out_shardings=shardings)(jax.random.key(3))
  jax.tree.map(np.testing.assert_array_equal, params, draw(jax.random.key(3)))
  assert params['head'].sharding == shardings['head']
