import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax.models import attention
from scalerl_jax.models import cache as cache_lib
from tests import tiny_model
from tests.reference import transformer as reference

pytestmark = pytest.mark.usefixtures('quick_compilation')

SIZES = {'vocab_size': 11, 'model_dim': 12, 'hidden_dim': 20, 'num_layers': 2}
OPTIONS = {
  'rope_theta': 20.0,
  'norm_eps': 0.3,
  'tied_head': False,
  'qk_norm': True,
  'qkv_bias': True,
}
SPECS = {
  name: tiny_model.spec(**(SIZES | changes))
  for name, changes in {
    'plain': {},
    'one_key_head': {'num_kv_heads': 1, 'qk_norm': True},
    'no_groups': {'num_kv_heads': 4, 'qkv_bias': True, 'num_layers': 1},
    'full': OPTIONS,
  }.items()
}
SPEC = SPECS['full']
T = 9
TEMPERATURE = 0.7


@functools.cache
def draw_params(spec):
  """Draws norms and biases too, so that a test sees them."""
  rng = np.random.default_rng(0)
  params = {'layers': {}}
  for path, info in models.parameter_table(spec).items():
    value = rng.normal(0.0, info.scale or 0.2, info.shape)
    value = (value + (info.scale is None)).astype(np.float32)
    tree = params['layers'] if path.startswith('layers/') else params
    tree[path.removeprefix('layers/')] = jnp.asarray(value)
  return params


def draw_tokens(rows):
  rng = np.random.default_rng(0)
  return rng.integers(0, SPEC.vocab_size, (rows, T)).astype(np.int32)


def count_up(rows):
  return np.tile(np.arange(T, dtype=np.int32), (rows, 1))


@functools.cache
def forward_fn(spec):
  return jax.jit(
    lambda params, *rows: models.forward(params, spec, *rows, collect_kv=True)
  )


def forward(tokens, positions=None, segments=None, *, spec=SPEC):
  """Runs up to ten rows, filled up so that all tests share one shape."""
  positions = count_up(len(tokens)) if positions is None else positions
  segments = np.ones_like(tokens) if segments is None else segments
  missing = ((0, 10 - len(tokens)), (0, 0))
  rows = (np.pad(x, missing) for x in (tokens, positions, segments))
  output = forward_fn(spec)(draw_params(spec), *rows)
  assert output.cache is None
  return output._replace(
    hidden=np.asarray(output.hidden)[: len(tokens)],
    kv=jax.tree.map(lambda x: np.asarray(x)[:, : len(tokens)], output.kv),
  )


def run(*rows, **kwargs):
  """Hidden states of rows; by default, a sequence per row."""
  return forward(*rows, **kwargs).hidden


def assert_close(actual, expected, *, atol=1e-5):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# --- Values. ----------------------------------------------------------------


@pytest.mark.parametrize('name', SPECS)
def test_logits_equal_the_reference(name):
  spec = SPECS[name]
  params = draw_params(spec)
  tokens = draw_tokens(2)
  logits = run(tokens, spec=spec) @ np.asarray(models.head_matrix(params))
  for row, ids in zip(logits, tokens, strict=True):
    assert_close(row, reference.logits(params, spec, ids), atol=3e-5)


@pytest.mark.parametrize('name', OPTIONS)
def test_each_option_changes_the_reference(name):
  # Else the comparison with it would say nothing of the option.
  plain = getattr(SPECS['plain'], name)
  without = dataclasses.replace(SPEC, **{name: plain})
  ids = draw_tokens(1)[0]
  one, other = (
    reference.logits(draw_params(SPEC), spec, ids) for spec in (SPEC, without)
  )
  assert abs(one - other)[1:].max() > 0.01


def test_only_distances_between_positions_matter():
  tokens = draw_tokens(2)
  expected = run(tokens)
  assert_close(run(tokens, count_up(2) + 100), expected, atol=1e-4)
  assert abs(run(tokens, count_up(2) * 2) - expected).max() > 0.01


def test_bfloat16_is_near_float32():
  spec = dataclasses.replace(SPEC, dtype='bfloat16')
  tokens = draw_tokens(4)
  hidden = run(tokens, spec=spec)
  assert hidden.dtype == jnp.bfloat16
  difference = abs(hidden.astype(np.float32) - run(tokens))
  assert 1e-4 < difference.max() < 0.1


def test_a_bfloat16_body_has_float32_scores_and_gradients():
  spec = dataclasses.replace(SPEC, dtype='bfloat16')
  rows, _ = lay_out(PACKED)
  policy_fn = models.make_policy_fn(spec, temperature=TEMPERATURE)
  (_, scores), grads = jax.eval_shape(
    loss_and_grad_fn(policy_fn), draw_params(spec), {}, *rows
  )
  assert {x.dtype for x in (*scores, *jax.tree.leaves(grads))} == {
    np.dtype(np.float32)
  }


# --- What a token sees. -----------------------------------------------------


def test_a_token_sees_itself_and_what_is_before_it():
  tokens = np.tile(draw_tokens(1), (T, 1))
  changed = tokens.copy()
  for t in range(T):  # Row t has another token in column t.
    changed[t, t] = (changed[t, t] + 1) % SPEC.vocab_size
  moved = abs(run(changed) - run(tokens)).max(axis=-1)
  earlier = np.tril(np.ones((T, T), bool), -1)
  np.testing.assert_array_equal(moved[earlier], 0)
  assert moved[~earlier].min() > 1e-3


def test_segment_mask_by_hand():
  mask = attention.segment_mask(jnp.asarray([[1, 1, 2, 2], [0, 3, 3, 0]]))
  expected = [
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]],
  ]
  np.testing.assert_array_equal(mask[:, 0], np.array(expected, bool))


A, B, C = (ids[:n] for ids, n in zip(draw_tokens(3), (5, 2, 4), strict=True))
# Rows of (segment, sequence); segment 0 is so much padding.
LAYOUTS = {
  'padded_right': [[(1, A)], [(1, B)], [(1, C)]],
  'padded_left': [[(0, 4), (1, A)], [(0, 7), (1, B)], [(0, 5), (1, C)]],
  'padded_on_both_sides': [
    [(0, 1), (2, A)],
    [(0, 5), (9, B)],
    [(0, 3), (1, C)],
  ],
  'packed': [[(1, A), (2, B)], [(1, C)]],
  'packed_with_gaps': [[(0, 1), (3, A), (0, 1), (1, B)], [(0, 2), (1, C)]],
}
PACKED = [[(1, A), (2, B)], [(0, 1), (1, C), (0, 1), (2, B[::-1])]]


def lay_out(layout):
  """Returns the rows, and where each sequence lies in them."""
  shape = (len(layout), T)
  tokens = np.full(shape, 3, np.int32)
  positions = np.full(shape, 5, np.int32)
  segments = np.zeros(shape, np.int32)
  places = []
  for i, row in enumerate(layout):
    start = 0
    for segment, ids in row:
      if segment == 0:
        start += ids
        continue
      where = np.s_[i, start : start + len(ids)]
      tokens[where], segments[where] = ids, segment
      positions[where] = np.arange(len(ids))
      places.append(where)
      start += len(ids)
  return (tokens, positions, segments), places


def logits_of(hidden):
  return hidden @ np.asarray(models.head_matrix(draw_params(SPEC)))


@functools.cache
def alone():
  """Logits of each sequence by itself."""
  return [reference.logits(draw_params(SPEC), SPEC, ids) for ids in (A, B, C)]


@pytest.mark.parametrize('name', LAYOUTS)
def test_p17_neither_padding_nor_neighbours_change_a_sequence(name):
  rows, places = lay_out(LAYOUTS[name])
  logits = logits_of(run(*rows))
  assert np.isfinite(logits).all()
  for where, expected in zip(places, alone(), strict=True):
    assert_close(logits[where], expected, atol=3e-5)


def test_without_segments_neighbours_would_be_seen():
  (tokens, positions, segments), places = lay_out(LAYOUTS['packed'])
  logits = logits_of(run(tokens, positions, np.minimum(segments, 1)))
  assert_close(logits[places[0]], alone()[0], atol=3e-5)
  assert abs(logits[places[1]] - alone()[1]).max() > 0.01


def test_rows_without_segments_and_without_a_cache_are_refused():
  tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
  with pytest.raises(ValueError, match='segment_ids are needed'):
    jax.eval_shape(
      lambda ids: models.forward(draw_params(SPEC), SPEC, ids, ids, None),
      tokens,
    )


# --- With a cache. ----------------------------------------------------------

COLUMNS = 12


@functools.cache
def cached_fn():
  return jax.jit(
    lambda params, tokens, positions, cache: models.forward(
      params, SPEC, tokens, positions, None, cache
    )
  )


def empty_cache():
  return cache_lib.empty(SPEC, num_rows=2, num_columns=COLUMNS)


def feed(parts, cache=None, *, params=None, start=0):
  """Feeds two rows in parts of given lengths; returns (hidden, cache)."""
  tokens, positions = draw_tokens(2), count_up(2)
  params = draw_params(SPEC) if params is None else params
  cache = empty_cache() if cache is None else cache
  out = []
  for n in parts:
    columns = np.s_[:, start : start + n]
    output = cached_fn()(params, tokens[columns], positions[columns], cache)
    assert output.kv is None
    out.append(output.hidden)
    cache, start = output.cache, start + n
  return np.concatenate(out, axis=1), cache


@pytest.mark.parametrize(
  'parts', [(4, 1, 1, 1, 1, 1), (4, 4, 1), (1,) * T], ids=str
)
def test_prefill_and_decoding_equal_whole_rows(parts):
  hidden, cache = feed(parts)
  whole = forward(draw_tokens(2))
  assert_close(hidden, whole.hidden)
  for held, collected in (
    (cache.keys, whole.kv.keys),
    (cache.values, whole.kv.values),
  ):
    assert len(held) == SPEC.num_layers
    for layer, expected in zip(held, collected, strict=True):
      assert_close(layer[:, :, :T], expected.swapaxes(1, 2))
      np.testing.assert_array_equal(layer[:, :, T:], 0)
  assert int(cache.column) == T
  np.testing.assert_array_equal(
    cache.visible, np.tile(np.arange(COLUMNS) < T, (2, 1))
  )


def test_unstacked_layers_give_the_same_from_a_cache():
  unstacked = models.unstack_layers(draw_params(SPEC))
  assert len(unstacked['layers']) == SPEC.num_layers
  hidden, _ = feed((4,), params=unstacked)
  assert_close(hidden, feed((4,))[0], atol=1e-6)


def test_what_is_not_visible_has_no_effect():
  # Junk in every column, as earlier tenants of the rows leave it.
  junk = jax.tree.map(
    lambda x: np.full_like(x, 50) if x.ndim == 4 else x, empty_cache()
  )
  clean, dirty = (feed((4, 1, 1), cache)[0] for cache in (None, junk))
  np.testing.assert_array_equal(clean, dirty)


def test_each_row_sees_its_own_columns():
  # Row 1 starts at column 4; what is before is hidden from row 1 only.
  tokens, positions = draw_tokens(2)[:, 4:8], count_up(2)[:, 4:8]
  _, cache = feed((4,))
  visible = np.array(cache.visible)
  visible[1] = False
  positions[1] -= 4
  output = cached_fn()(
    draw_params(SPEC), tokens, positions, cache._replace(visible=visible)
  )
  logits = logits_of(np.asarray(output.hidden))
  whole, late = (
    reference.logits(draw_params(SPEC), SPEC, ids)
    for ids in (draw_tokens(2)[0, :8], tokens[1])
  )
  assert_close(logits[0], whole[4:], atol=3e-5)
  assert_close(logits[1], late, atol=3e-5)
  columns = np.arange(COLUMNS)
  np.testing.assert_array_equal(
    output.cache.visible, [columns < 8, (columns >= 4) & (columns < 8)]
  )


def test_the_order_of_columns_does_not_matter():
  _, cache = feed((4,))
  order = np.array([8, 2, 9, 0, 5, 3, 11, 7, 1, 4, 10, 6])
  shuffled = jax.tree.map(np.asarray, cache)
  shuffled = shuffled._replace(
    keys=tuple(x[:, :, order] for x in shuffled.keys),
    values=tuple(x[:, :, order] for x in shuffled.values),
    visible=shuffled.visible[:, order],
  )
  assert not shuffled.visible[:, 4].any()  # The next to be written.
  hidden, _ = feed((1,), shuffled, start=4)
  assert_close(hidden, run(draw_tokens(2))[:, 4:5])


def test_an_empty_cache_has_a_buffer_per_array():
  spec = dataclasses.replace(SPEC, dtype='bfloat16')
  cache = cache_lib.empty(spec, num_rows=3, num_columns=5)
  arrays = [*cache.keys, *cache.values]
  assert len(arrays) == 2 * spec.num_layers
  # Donated as one pytree, a buffer may not stand in two places.
  assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
  for x in arrays:
    assert x.shape == (3, spec.num_kv_heads, 5, spec.head_dim)
    assert x.dtype == jnp.bfloat16
  assert not np.asarray(cache.visible).any()
  assert int(cache.column) == 0


# --- Scores of given tokens. ------------------------------------------------


def weights_of(positions, segments):
  """A weight for each logp and entropy that means something."""
  mask = (segments > 0) & (positions > 0)
  t = np.arange(mask.size, dtype=np.float32).reshape(mask.shape)
  return mask * np.cos(t), mask * np.sin(2 * t)


def loss_and_grad_fn(policy_fn):
  """Jits (chosen, other, *rows) → ((loss, scores), gradients of chosen)."""

  def loss(chosen, other, *rows):
    scores = jax.tree.leaves(policy_fn(chosen | other, *rows))
    weights = weights_of(*lay_out(PACKED)[0][1:])
    total = sum(jnp.sum(w * x) for w, x in zip(weights, scores, strict=True))
    return total, tuple(scores)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def loss_and_grad(remat='none'):
  """((loss, (logp, entropy)), gradients of all arrays), as numpy."""
  spec = dataclasses.replace(SPEC, remat=remat)
  policy_fn = models.make_policy_fn(spec, temperature=TEMPERATURE)
  out = loss_and_grad_fn(policy_fn)(draw_params(SPEC), {}, *lay_out(PACKED)[0])
  return jax.tree.map(np.asarray, out)


def above_the_body(policy_fn):
  """The same; gradients of the final norm and the head, cheap to compile."""
  names = ('final_norm', 'head')
  params = draw_params(SPEC)
  return loss_and_grad_fn(policy_fn)(
    {name: params[name] for name in names},
    {name: x for name, x in params.items() if name not in names},
    *lay_out(PACKED)[0],
  )


@functools.cache
def dense():
  """What the policy function must say, from logits that all exist."""

  def policy_fn(params, tokens, positions, segments):
    hidden = models.forward(params, SPEC, tokens, positions, segments).hidden
    logits = hidden[:, :-1] @ params['head'] / TEMPERATURE
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    first = jnp.zeros((len(tokens), 1))
    return [jnp.concatenate([first, x], axis=1) for x in (chosen, entropy)]

  return above_the_body(policy_fn)


def assert_same_leaves(actual, expected):
  """Compares to 1e-5 of the largest value of each leaf."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for x, y in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert_close(x, y, atol=1e-5 * max(1.0, abs(y).max()))


@pytest.mark.parametrize('chunk_size', [6, 4096])
def test_scores_and_gradients_equal_a_dense_log_softmax(chunk_size):
  policy_fn = models.make_policy_fn(
    SPEC, temperature=TEMPERATURE, chunk_size=chunk_size
  )
  assert_same_leaves(above_the_body(policy_fn), dense())


def reference_scores(params, ids):
  return (
    fn(params, SPEC, ids, temperature=TEMPERATURE)
    for fn in (reference.logps, reference.entropies)
  )


def test_p01_a_score_stands_at_its_own_token():
  (tokens, _, _), places = lay_out(PACKED)
  (_, scores), _ = loss_and_grad()
  for where in places:
    expected = reference_scores(draw_params(SPEC), tokens[where])
    for actual, values in zip(scores, expected, strict=True):
      assert_close(actual[where][1:], values[1:], atol=3e-5)
  for actual in scores:
    np.testing.assert_array_equal(actual[:, 0], 0)


def test_gradients_equal_finite_differences_of_the_reference():
  # In float64, along one random direction per array.
  (tokens, positions, segments), places = lay_out(PACKED)
  weights = weights_of(positions, segments)
  leaves, treedef = jax.tree.flatten(reference.to_float64(draw_params(SPEC)))

  def loss(leaves):
    params = jax.tree.unflatten(treedef, leaves)
    return sum(
      w[where][1:] @ values[1:]
      for where in places
      for w, values in zip(
        weights, reference_scores(params, tokens[where]), strict=True
      )
    )

  (value, _), grads = loss_and_grad()
  np.testing.assert_allclose(value, loss(leaves), rtol=1e-5)
  rng = np.random.default_rng(5)
  eps = 1e-5
  for i, grad in enumerate(jax.tree.leaves(grads)):
    direction = rng.normal(size=grad.shape)
    up, down = (
      loss([*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]])
      for step in (eps, -eps)
    )
    slope = (up - down) / (2 * eps)
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(
      np.sum(grad * direction), slope, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize('remat', ['dots', 'full'])
def test_rematerialization_changes_neither_loss_nor_gradients(remat):
  assert_same_leaves(loss_and_grad(remat), loss_and_grad())


def test_rematerialization_keeps_less():
  rows, _ = lay_out(PACKED)

  def num_kept(remat):
    spec = dataclasses.replace(SPEC, remat=remat)
    _, pull_back = jax.eval_shape(
      lambda params, *rows: jax.vjp(
        lambda p: models.forward(p, spec, *rows).hidden, params
      ),
      draw_params(SPEC),
      *rows,
    )
    return sum(x.size for x in jax.tree.leaves(pull_back))

  none, dots, full = (num_kept(remat) for remat in ('none', 'dots', 'full'))
  assert full < dots < none


# --- The table of arrays. ---------------------------------------------------


@pytest.mark.parametrize(
  ('count', 'fields'),
  [
    (  # Qwen2.5-0.5B, as published.
      494_032_768,
      {
        'vocab_size': 151_936,
        'num_layers': 24,
        'model_dim': 896,
        'num_heads': 14,
        'num_kv_heads': 2,
        'head_dim': 64,
        'hidden_dim': 4864,
        'qkv_bias': True,
      },
    ),
    (  # Qwen3-0.6B.
      596_049_920,
      {
        'vocab_size': 151_936,
        'num_layers': 28,
        'model_dim': 1024,
        'num_heads': 16,
        'num_kv_heads': 8,
        'head_dim': 128,
        'hidden_dim': 3072,
        'qk_norm': True,
      },
    ),
    (  # Llama-3.1-8B.
      8_030_261_248,
      {
        'vocab_size': 128_256,
        'num_layers': 32,
        'model_dim': 4096,
        'num_heads': 32,
        'num_kv_heads': 8,
        'head_dim': 128,
        'hidden_dim': 14_336,
        'tied_head': False,
      },
    ),
  ],
  ids=['qwen2.5', 'qwen3', 'llama3'],
)
def test_parameters_are_counted_as_published(count, fields):
  assert models.num_parameters(models.ModelSpec(**fields)) == count


@pytest.mark.parametrize('name', SPECS)
def test_a_model_has_the_arrays_of_its_table(name):
  spec = SPECS[name]
  params = jax.eval_shape(
    functools.partial(models.init_params, spec), jax.random.key(0)
  )
  found = {
    '/'.join(k.key for k in path): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  table = models.parameter_table(spec)
  assert found == {path: info.shape for path, info in table.items()}
  total = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert models.num_parameters(spec) == total
  axes = models.logical_axes(spec)
  jax.tree.map(lambda x, names: (x.ndim, names), params, axes)
  for info in table.values():
    assert len(info.axes) == len(info.shape)


@functools.cache
def drawn(seed):
  spec = dataclasses.replace(
    SPEC, vocab_size=400, num_layers=8, model_dim=64, hidden_dim=100
  )
  params = jax.jit(models.init_params, static_argnums=0)(
    spec,
    jax.random.key(seed, impl='rbg'),  # Compiles faster.
  )
  return jax.tree.map(np.asarray, params)


def test_initial_scales_by_hand():
  params = {**drawn(3), **drawn(3)['layers']}
  for name in ('attention_norm', 'mlp_norm', 'q_norm', 'k_norm', 'final_norm'):
    np.testing.assert_array_equal(params[name], 1)
  for name in ('q_bias', 'k_bias', 'v_bias'):
    np.testing.assert_array_equal(params[name], 0)
  # 1/√D = 1/8; what writes into the stream: 1/√(2L) = 1/4 of 1/√fan-in.
  for names, scale in (
    (('embed', 'head', 'q', 'k', 'v', 'gate', 'up'), 1 / 8),
    (('o',), 1 / 4 / math.sqrt(32)),
    (('down',), 1 / 40),
  ):
    for name in names:
      value = params[name]
      assert value.dtype == np.float32
      np.testing.assert_allclose(value.std(), scale, rtol=0.05, err_msg=name)
      assert abs(value.mean()) < 0.1 * scale


def test_each_array_has_a_key_of_its_own():
  layers = drawn(3)['layers']
  for one, other in (('k', 'v'), ('gate', 'up')):
    r = np.corrcoef(layers[one].ravel(), layers[other].ravel())[0, 1]
    assert abs(r) < 0.1
  assert abs(drawn(3)['embed'] - drawn(4)['embed']).max() > 0.1


FIELDS = (
  'vocab_size',
  'num_layers',
  'model_dim',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'hidden_dim',
)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    *(({name: 0}, f'{name}=0 must be at least 1') for name in FIELDS),
    ({'num_heads': -4}, 'num_heads=-4 must be at least 1'),
    ({'num_kv_heads': 3}, 'num_heads=4 must be a multiple of num_kv_heads=3'),
    ({'num_kv_heads': 8}, 'num_heads=4 must be a multiple of num_kv_heads=8'),
    ({'head_dim': 7}, 'head_dim=7 must be even'),
    ({'rope_theta': 0.0}, 'rope_theta=0.0 must be positive and finite'),
    ({'rope_theta': np.inf}, 'rope_theta=inf must be positive'),
    ({'norm_eps': -1e-6}, 'norm_eps=-1e-06 must be positive'),
    ({'norm_eps': np.nan}, 'norm_eps=nan must be positive'),
    ({'dtype': 'float16'}, "dtype='float16' must be one of"),
    ({'remat': 'all'}, "remat='all' must be one of"),
  ],
  ids=str,
)
def test_a_spec_that_makes_no_sense_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_model.spec(**changes)
