import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalerl_jax import arrays
from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax import records
from scalerl_jax import sharding
from scalerl_jax import training
from scalerl_jax.training import state as state_lib
from tests import tiny_model
from tests.training import tiny_batch

pytestmark = pytest.mark.usefixtures('quick_compilation')

RECIPES = {
  'scalerl': recipes.scalerl,
  'grpo': recipes.grpo,
  'dapo': recipes.dapo,
  'minimax_m1': recipes.minimax_m1,
  'dr_grpo': functools.partial(recipes.dr_grpo, length=10),
  'gspo': functools.partial(recipes.gspo, clip_low=0.5, clip_high=0.5),
  'supervised': recipes.supervised,
}
# Plain descent at rate 1: an update is the gradient.
SGD = optax.sgd(1.0)


def table_params():
  return jnp.asarray(np.random.default_rng(7).normal(size=17), jnp.float32)


@functools.cache
def step_fn(name, num_microbatches=1, kl_weight=0.0):
  """Steps are shared between tests: compiling is most of the time."""
  return training.make_train_step(
    tiny_batch.table_policy,
    SGD,
    RECIPES[name]()._replace(kl_weight=kl_weight),
    num_microbatches=num_microbatches,
  )


def take_step(batch, name='scalerl', *, params=None, **kwargs):
  params = table_params() if params is None else params
  return step_fn(name, **kwargs)(state_lib.init(params, SGD), batch)


def assert_same_update(a, b, *, atol=1e-6):
  (state_a, metrics_a), (state_b, metrics_b) = a, b
  for x, y in zip(
    jax.tree.leaves(state_a.params),
    jax.tree.leaves(state_b.params),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)
  for name in ('loss', 'grad_norm'):
    np.testing.assert_allclose(
      getattr(metrics_a, name), getattr(metrics_b, name), rtol=1e-5, atol=atol
    )


# --- Values by hand. --------------------------------------------------------


def hand_batch():
  """Ratios 1, 2 and 10 of a policy that is uniform over three tokens."""
  return tiny_batch.batch(
    [
      tiny_batch.group(
        0,
        tiny_batch.rollout([0], [math.log(1 / 3)], reward=1.0),
        tiny_batch.rollout(
          [1, 2], [math.log(1 / 6), math.log(1 / 30)], reward=-1.0
        ),
      )
    ]
  )


def test_one_cispo_step_by_hand():
  # Advantages are 1 and -1, weights 1/3, ratios 1, 2 and 5 (capped from 10):
  # loss = 6 · log(1/3) / 3, gradient = (-e0 + 2·e1 + 5·e2 - 6 · 1/3) / 3.
  state, metrics = take_step(hand_batch(), params=jnp.zeros(3))
  np.testing.assert_allclose(metrics.loss, -2 * math.log(3), rtol=1e-6)
  np.testing.assert_allclose(state.params, [1, 0, -1], rtol=0, atol=1e-6)
  np.testing.assert_allclose(metrics.grad_norm, math.sqrt(2), rtol=1e-6)
  assert int(state.version) == 1
  assert int(state.nonfinite_streak) == 0


def test_metrics_by_hand():
  _, metrics = take_step(hand_batch(), params=jnp.zeros(3))
  expected = {
    'update_skipped': 0,
    'num_tokens': 3,
    'num_prompts': 1,
    'num_prompts_kept': 1,
    'zero_variance_fraction': 0,
    'num_rollouts_masked': 0,
    'reward_mean': 0,
    'policy_entropy': math.log(3),
    'ratio_mean': 13 / 3,
    'ratio_max': 10,
    'ratio_min': 1,
    'ratio_capped_fraction': 1 / 3,
    'kl_behavior': (0 + (1 - math.log(2)) + (9 - math.log(10))) / 3,
    'logp_diff_mean': math.log(20) / 3,
    'logp_diff_max': math.log(10),
    'lag_mean': 0,
    'lag_max': 0,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(
      getattr(metrics, name), value, rtol=1e-5, atol=1e-6, err_msg=name
    )


def test_p04_differences_by_position():
  # Columns of 8: quarters of two. Prompts take column 0.
  rollouts = [
    tiny_batch.rollout([0] * 7, math.log(1 / 3) - np.array(d), reward=r)
    for d, r in (([0, 1, 1, 2, 2, 3, 3], 1.0), ([0, 1, 1, 2, 2, 3, 5], -1.0))
  ]
  batch = tiny_batch.batch([tiny_batch.group(0, *rollouts)], row_tokens=8)
  _, metrics = take_step(batch, params=jnp.zeros(3))
  np.testing.assert_allclose(
    metrics.logp_diff_by_position, [0, 1, 2, 3.5], rtol=0, atol=1e-5
  )


def test_s01_s06_lag_is_in_updates_at_consumption():
  versions = np.array([3, 5, 7, 0], np.int32)
  rollouts = [
    tiny_batch.rollout([0] * 4, reward=r, policy_versions=versions)
    for r in (1.0, -1.0)
  ]
  batch = tiny_batch.batch([tiny_batch.group(0, *rollouts)])
  step = training.make_train_step(
    tiny_batch.table_policy, SGD, recipes.scalerl()
  )
  state = state_lib.init(jnp.zeros(3), SGD)
  state = state._replace(version=jnp.asarray(20, jnp.int32))
  state, metrics = step(state, batch)
  assert int(state.version) == 21
  np.testing.assert_allclose(metrics.lag_mean, (17 + 15 + 13 + 20) / 4)
  assert float(metrics.lag_max) == 20
  histogram = np.zeros(16)
  histogram[13], histogram[15] = 2, 6  # 15 or more.
  np.testing.assert_array_equal(metrics.lag_histogram, histogram)


# --- Masks and denominators. ------------------------------------------------


def with_rollout(groups, g, i, **changes):
  """Replaces fields of one rollout."""
  rollouts = list(groups[g].rollouts)
  rollouts[i] = dataclasses.replace(rollouts[i], **changes)
  out = list(groups)
  out[g] = dataclasses.replace(groups[g], rollouts=tuple(rollouts))
  return out


def without_rollout(groups, g, i):
  rollouts = groups[g].rollouts[:i] + groups[g].rollouts[i + 1 :]
  out = list(groups)
  out[g] = dataclasses.replace(groups[g], rollouts=rollouts)
  return out


TRUNCATED = {'finish_reason': records.FinishReason.LENGTH}


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    *((name, TRUNCATED) for name in RECIPES),
    ('scalerl', {'finish_reason': records.FinishReason.ABORTED}),
    ('scalerl', {'reward': None}),
    ('scalerl', {'reward': math.nan}),
  ],
)
def test_l01_a_masked_rollout_is_in_no_numerator_and_no_denominator(
  name, changes
):
  groups = tiny_batch.random_groups()
  masked = tiny_batch.batch(with_rollout(groups, 1, 2, **changes), num_rows=16)
  absent = tiny_batch.batch(without_rollout(groups, 1, 2), num_rows=16)
  results = [take_step(b, name) for b in (masked, absent)]
  assert_same_update(*results)
  # One prompt is filtered in both; one more rollout is padding in the other.
  for field in ('num_tokens', 'num_prompts', 'num_rollouts_masked'):
    assert float(getattr(results[0][1], field)) == float(
      getattr(results[1][1], field)
    )


@pytest.mark.parametrize('name', RECIPES)
def test_l02_s07_a_batch_without_a_valid_rollout_changes_nothing(name):
  groups = [
    tiny_batch.group(
      v,
      *(dataclasses.replace(r, **TRUNCATED) for r in g.rollouts),
    )
    for v, g in enumerate(tiny_batch.random_groups())
  ]
  state, metrics = take_step(tiny_batch.batch(groups), name)
  np.testing.assert_array_equal(state.params, table_params())
  assert float(metrics.loss) == float(metrics.grad_norm) == 0
  assert float(metrics.update_skipped) == 0
  assert float(metrics.num_tokens) == float(metrics.num_prompts) == 0
  finite = {
    name: bool(np.isfinite(value).all())
    for name, value in metrics._asdict().items()
    # The least of no ratio; None without experts.
    if name != 'ratio_min' and value is not None
  }
  assert all(finite.values()), finite


@pytest.mark.parametrize('name', ['scalerl', 'dapo', 'minimax_m1', 'gspo'])
def test_l03_a_filtered_prompt_is_in_no_denominator(name):
  groups = tiny_batch.random_groups()  # The last prompt has no variance.
  whole, rest = (
    take_step(tiny_batch.batch(g, num_rows=16), name)
    for g in (groups, groups[:-1])
  )
  assert_same_update(whole, rest)
  assert float(whole[1].num_prompts) == 4
  assert float(whole[1].num_prompts_kept) == 3
  np.testing.assert_allclose(whole[1].zero_variance_fraction, 0.25)


def test_forced_tokens_and_prompts_take_no_part():
  groups = tiny_batch.random_groups()
  before = tiny_batch.batch(groups)
  behind = ~np.asarray(before.loss_mask)
  after = before._replace(
    behavior_logp=jnp.where(behind, jnp.nan, before.behavior_logp),
    policy_version=jnp.where(behind, 99, before.policy_version),
  )
  a, b = take_step(before), take_step(after)
  assert_same_update(a, b, atol=0)
  for x, y in zip(*map(jax.tree.leaves, (a[1], b[1])), strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_nan_of_the_policy_behind_the_mask_reaches_no_gradient():
  batch = tiny_batch.batch(tiny_batch.random_groups())

  def policy(params, tokens, positions, segment_ids):
    logp, entropy = tiny_batch.table_policy(
      params, tokens, positions, segment_ids
    )
    is_prompt = positions == 0
    return arrays.TokenScores(jnp.where(is_prompt, jnp.nan, logp), entropy)

  step = training.make_train_step(policy, SGD, recipes.scalerl())
  result = step(state_lib.init(table_params(), SGD), batch)
  assert_same_update(result, take_step(batch))


# --- The ratio. -------------------------------------------------------------


def test_l16_the_ratio_is_against_the_engines_logps():
  batch = tiny_batch.batch(tiny_batch.random_groups())
  logp = jax.nn.log_softmax(table_params())[batch.tokens]
  on_policy = batch._replace(behavior_logp=logp)
  _, metrics = take_step(on_policy)
  np.testing.assert_allclose(metrics.ratio_max, 1, rtol=1e-5)
  np.testing.assert_allclose(metrics.ratio_min, 1, rtol=1e-5)
  assert float(metrics.ratio_capped_fraction) == 0
  off_policy = batch._replace(behavior_logp=logp - math.log(6))
  _, metrics = take_step(off_policy)
  np.testing.assert_allclose(metrics.ratio_mean, 6, rtol=1e-5)
  assert float(metrics.ratio_capped_fraction) == 1


@pytest.mark.parametrize('name', ['scalerl', 'grpo'])
def test_l18_the_ratio_is_recomputed_in_every_update(name):
  batch = hand_batch()
  step = training.make_train_step(
    tiny_batch.table_policy, optax.sgd(0.5), RECIPES[name]()
  )
  state, first = step(state_lib.init(jnp.zeros(3), SGD), batch)
  logp = np.asarray(jax.nn.log_softmax(state.params))
  _, second = step(state, batch)
  ratio = math.exp(logp[0]) * 3
  np.testing.assert_allclose(
    second.ratio_min,
    min(ratio, math.exp(logp[1]) * 6, math.exp(logp[2]) * 30),
    rtol=1e-5,
  )
  assert abs(float(first.ratio_min) - float(second.ratio_min)) > 0.05


# --- The reference policy. --------------------------------------------------


def test_a_kl_term_vanishes_at_the_reference_and_pulls_towards_it():
  batch = tiny_batch.batch(tiny_batch.random_groups())
  plain = take_step(batch)
  logp = jax.nn.log_softmax(table_params())[batch.tokens]
  at = take_step(batch._replace(reference_logp=logp), kl_weight=0.5)
  assert_same_update(plain, at)
  away = take_step(batch._replace(reference_logp=logp - 1), kl_weight=0.5)
  # k3 of log r = -1 is e⁻¹, and the weights of the batch sum to 1.
  np.testing.assert_allclose(
    float(away[1].loss - plain[1].loss), 0.5 * math.exp(-1), rtol=1e-4
  )


def test_a_kl_term_asks_for_the_reference():
  with pytest.raises(ValueError, match='reference_logp'):
    take_step(tiny_batch.batch(tiny_batch.random_groups()), kl_weight=0.5)


# --- Partitions of the batch. -----------------------------------------------


@pytest.mark.parametrize('name', RECIPES)
def test_l08_the_update_does_not_depend_on_microbatches(name):
  batch = tiny_batch.batch(tiny_batch.random_groups())
  parts = take_step(batch, name, num_microbatches=4)
  whole = take_step(batch, name)
  assert_same_update(whole, parts)
  for a, b in zip(*map(jax.tree.leaves, (whole[1], parts[1])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', RECIPES)
def test_l13_the_update_does_not_depend_on_the_order_of_rows(name):
  batch = tiny_batch.batch(tiny_batch.random_groups())
  order = np.random.default_rng(3).permutation(16)
  shuffled = jax.tree.map(lambda x: x[order] if x.ndim == 2 else x, batch)
  assert_same_update(take_step(batch, name), take_step(shuffled, name))


@pytest.mark.parametrize('name', RECIPES)
def test_l09_the_update_does_not_depend_on_padding(name):
  groups = tiny_batch.random_groups()
  narrow = tiny_batch.batch(groups)
  wide = tiny_batch.batch(groups, num_rows=20, row_tokens=15)
  assert_same_update(take_step(narrow, name), take_step(wide, name))


@functools.cache
def model_step(num_microbatches=1, mesh_shape=None):
  mesh = None if mesh_shape is None else sharding.make_mesh(mesh_shape)
  return training.make_train_step(
    models.make_policy_fn(tiny_model.spec(), temperature=0.7),
    ADAM,
    recipes.scalerl(),
    num_microbatches=num_microbatches,
    mesh=mesh,
  )


# A large ε: Adam is smooth, and rounding is not blown up to a full step.
ADAM = training.make_optimizer(
  training.OptimizerConfig(
    learning_rate=0.1, warmup_steps=0, eps=1.0, max_grad_norm=1e9
  )
)


@functools.cache
def model_update():
  """One update of a transformer on one device, as numpy."""
  batch = tiny_batch.batch(tiny_batch.random_groups())
  state = state_lib.init(tiny_model.params(), ADAM)
  return jax.tree.map(np.asarray, model_step()(state, batch))


def test_l08_microbatches_of_a_transformer():
  batch = tiny_batch.batch(tiny_batch.random_groups())
  state = state_lib.init(tiny_model.params(), ADAM)
  assert_same_update(model_update(), model_step(4)(state, batch))


def test_p17_packed_rows_give_the_same_update():
  batch = tiny_batch.batch(
    tiny_batch.random_groups(), num_rows=7, row_tokens=20, packed=True
  )
  assert batch.segment_ids.max() > 1
  state = state_lib.init(tiny_model.params(), ADAM)
  assert_same_update(model_update(), model_step()(state, batch))


@pytest.mark.parametrize('name', ['scalerl', 'grpo', 'gspo', 'supervised'])
def test_a_policy_that_is_asked_for_the_loss_gives_the_same_update(name):
  batch = tiny_batch.batch(tiny_batch.random_groups())
  batch = batch._replace(reference_logp=batch.behavior_logp - 0.1)
  score = models.make_policy_fn(
    tiny_model.spec(), temperature=0.7, chunk_size=50
  )
  asked = []

  def policy(params, tokens, positions, segment_ids, *, token_loss=None):
    asked.append(token_loss is not None)
    return score(params, tokens, positions, segment_ids, token_loss=token_loss)

  def update(fn):
    recipe = RECIPES[name]()._replace(kl_weight=0.1)
    step = training.make_train_step(fn, ADAM, recipe, num_microbatches=2)
    return step(state_lib.init(tiny_model.params(), ADAM), batch)

  fused, plain = update(policy), update(lambda *args: score(*args))
  # A loss that couples the tokens of a rollout cannot be taken in one pass.
  assert set(asked) == {name != 'gspo'}
  assert_same_update(fused, plain)
  for a, b in zip(*map(jax.tree.leaves, (fused[1], plain[1])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'shape', [(8, 1, 1, 1), (4, 2, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1)]
)
def test_l08_a_mesh_gives_the_update_of_one_device(shape):
  mesh = sharding.make_mesh(shape)
  shardings = sharding.param_shardings(
    models.logical_axes(tiny_model.spec()), mesh
  )
  state = state_lib.init_sharded(tiny_model.params(), ADAM, shardings)
  before = jax.tree.map(lambda x: x.sharding, state)
  jax.tree.map(
    lambda x, s: check_sharding(x.sharding, s, x.ndim), state.params, shardings
  )
  batch = tiny_batch.batch(tiny_batch.random_groups())
  step = model_step(mesh_shape=shape)
  state, metrics = step(state, batch)
  assert_same_update(model_update(), (state, metrics), atol=1e-5)
  jax.tree.map(
    lambda x, s: check_sharding(x.sharding, s, x.ndim), state, before
  )


def check_sharding(found, expected, ndim):
  assert found.is_equivalent_to(expected, ndim), (found, expected)


def test_moments_are_sharded_as_their_parameters():
  mesh = sharding.make_mesh((2, 2, 2, 1))
  shardings = sharding.param_shardings(
    models.logical_axes(tiny_model.spec()), mesh
  )
  state = state_lib.init_sharded(tiny_model.params(), ADAM, shardings)
  moments = optax.tree.get(state.opt_state, 'mu')
  jax.tree.map(
    lambda m, p: check_sharding(m.sharding, p.sharding, p.ndim),
    moments,
    state.params,
  )
  assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(state))
  assert int(state.version) == int(state.nonfinite_streak) == 0


@pytest.mark.parametrize('donate', [False, True])
def test_parameters_are_copied_unless_they_are_given_away(donate):
  mesh = sharding.make_mesh((2, 2, 2, 1))
  shardings = sharding.param_shardings(
    models.logical_axes(tiny_model.spec()), mesh
  )
  own = jax.tree.map(jnp.copy, tiny_model.params())
  params = jax.device_put(own, shardings)
  before = buffers(params)
  state = state_lib.init_sharded(params, ADAM, shardings, donate=donate)
  assert (buffers(state.params) == before) == donate
  batch = tiny_batch.batch(tiny_batch.random_groups())
  model_step(mesh_shape=(2, 2, 2, 1))(state, batch)
  assert {x.is_deleted() for x in jax.tree.leaves(params)} == {donate}


def buffers(tree):
  return [
    shard.data.unsafe_buffer_pointer()
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
  ]


def test_rows_that_cannot_be_divided_are_refused():
  batch = tiny_batch.batch(tiny_batch.random_groups(), num_rows=18)
  with pytest.raises(ValueError, match='18 rows must be divisible by num_micr'):
    take_step(batch, num_microbatches=4)
  state = state_lib.init(tiny_model.params(), ADAM)
  with pytest.raises(ValueError, match='times 8 row shards'):
    model_step(mesh_shape=(4, 2, 1, 1))(state, batch)


# --- Guards. ----------------------------------------------------------------


def test_an_update_that_is_not_finite_is_skipped_and_counted():
  good = tiny_batch.batch(tiny_batch.random_groups())
  bad = good._replace(behavior_logp=good.behavior_logp.at[:].set(jnp.nan))
  tx = optax.adam(0.1)
  step = training.make_train_step(
    tiny_batch.table_policy, tx, recipes.scalerl()
  )
  state, _ = step(state_lib.init(table_params(), tx), good)
  before = jax.tree.map(np.asarray, state)
  for streak in (1, 2):
    state, metrics = step(state, bad)
    assert float(metrics.update_skipped) == 1
    assert int(state.nonfinite_streak) == streak
    assert int(state.version) == 1 + streak
  jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
  jax.tree.map(np.testing.assert_array_equal, before.opt_state, state.opt_state)
  state, metrics = step(state, good)
  assert float(metrics.update_skipped) == 0
  assert int(state.nonfinite_streak) == 0
  assert np.isfinite(np.asarray(state.params)).all()


def test_m02_it_compiles_once():
  step = training.make_train_step(
    tiny_batch.table_policy, SGD, recipes.scalerl()
  )
  state = state_lib.init(table_params(), SGD)
  for seed in range(3):
    state, _ = step(state, tiny_batch.batch(tiny_batch.random_groups(seed)))
  assert step._cache_size() == 1
  assert int(state.version) == 3


def test_the_state_is_donated_and_the_parameters_given_are_not():
  params = table_params()
  state = state_lib.init(params, SGD)
  step = training.make_train_step(
    tiny_batch.table_policy, SGD, recipes.scalerl()
  )
  step(state, hand_batch()._replace(tokens=hand_batch().tokens))
  assert state.params.is_deleted()
  assert not params.is_deleted()
