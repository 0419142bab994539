import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import advantages
from scalerl_jax import aggregation
from scalerl_jax import filters
from scalerl_jax import losses
from scalerl_jax import recipes

REQUIRED = {'dr_grpo': {'length': 100}}


def make(name, **args):
  return recipes.make(name, **{**REQUIRED.get(name, {}), **args})


def example():
  """Two rows of three tokens, one rollout each."""
  rng = np.random.default_rng(0)
  policy, behavior, advantage = (
    jnp.asarray(rng.normal(0.0, 0.3, (2, 3)), jnp.float32) for _ in range(3)
  )
  mask = jnp.ones((2, 3), bool)
  index = jnp.asarray([[0] * 3, [1] * 3], jnp.int32)
  return policy, behavior, advantage, mask, index


def loss_of(recipe, args):
  return np.asarray(recipe.policy_loss(*args, num_rollouts=2))


@pytest.mark.parametrize(
  ('name', 'advantage', 'aggregate', 'is_filtered'),
  [
    ('scalerl', advantages.batch_normalized, aggregation.prompt_mean, True),
    ('grpo', advantages.group_normalized, aggregation.sequence_mean, False),
    ('dapo', advantages.group_normalized, aggregation.prompt_mean, True),
    ('magistral', advantages.group_normalized, aggregation.prompt_mean, True),
    ('minimax_m1', advantages.group_normalized, aggregation.prompt_mean, True),
    ('gspo', advantages.group_normalized, aggregation.sequence_mean, True),
  ],
)
def test_recipes_are_the_compositions_of_the_paper(
  name, advantage, aggregate, is_filtered
):
  recipe = make(name)
  assert recipe.advantage is advantage
  assert recipe.aggregation is aggregate
  assert recipe.filters == ((filters.zero_variance,) if is_filtered else ())
  assert recipe.kl_weight == 0.0


def test_dr_grpo_has_no_deviation_and_a_constant_length():
  recipe = make('dr_grpo', length=50)
  assert recipe.advantage is advantages.centered
  index = jnp.asarray([[0, 0, 1, -1]], jnp.int32)
  weights = recipe.aggregation(
    index >= 0,
    index,
    jnp.asarray([0, 0], jnp.int32),
    num_rollouts=2,
    num_prompts=1,
  )
  np.testing.assert_allclose(weights, [[0.01, 0.01, 0.01, 0.0]])


@pytest.mark.parametrize(
  ('name', 'args', 'loss', 'loss_args'),
  [
    ('scalerl', {}, losses.cispo, {'max_ratio': 5.0}),
    ('scalerl', {'max_ratio': 1.0}, losses.cispo, {'max_ratio': 1.0}),
    ('minimax_m1', {'max_ratio': 1.1}, losses.cispo, {'max_ratio': 1.1}),
    (
      'grpo',
      {'clip': 0.1},
      losses.clipped_surrogate,
      {'clip_low': 0.1, 'clip_high': 0.1},
    ),
    (
      'dapo',
      {},
      losses.clipped_surrogate,
      {'clip_low': 0.2, 'clip_high': 0.26},
    ),
    (
      'magistral',
      {'clip_high': 0.5},
      losses.clipped_surrogate,
      {'clip_low': 0.2, 'clip_high': 0.5},
    ),
    (
      'dr_grpo',
      {},
      losses.clipped_surrogate,
      {'clip_low': 0.2, 'clip_high': 0.2},
    ),
  ],
)
def test_l20_policy_loss_has_exactly_the_arguments_given(
  name, args, loss, loss_args
):
  inputs = example()
  np.testing.assert_array_equal(
    loss_of(make(name, **args), inputs), loss(*inputs[:3], **loss_args)
  )


def test_gspo_recipe_has_one_ratio_per_rollout():
  inputs = example()
  expected = losses.gspo(*inputs, num_rollouts=2, clip_low=3e-3, clip_high=4e-3)
  np.testing.assert_array_equal(loss_of(make('gspo'), inputs), expected)


def test_supervised_is_the_mean_negative_log_likelihood():
  recipe = recipes.supervised()
  policy, behavior, _, mask, index = example()
  advantage = recipe.advantage(
    jnp.asarray([jnp.nan, 3.0]),
    jnp.asarray([0, 0], jnp.int32),
    jnp.asarray([True, True]),
    num_prompts=1,
  )
  np.testing.assert_array_equal(advantage, 1.0)
  per_token = loss_of(recipe, (policy, behavior, jnp.ones((2, 3)), mask, index))
  weights = recipe.aggregation(
    mask, index, jnp.asarray([0, 0], jnp.int32), num_rollouts=2, num_prompts=1
  )
  np.testing.assert_allclose(
    np.sum(weights * per_token), -np.mean(policy), rtol=1e-5
  )


@pytest.mark.parametrize('name', sorted(recipes.RECIPES))
def test_every_recipe_runs_under_one_signature(name):
  recipe = make(name)
  loss = loss_of(recipe, example())
  assert loss.shape == (2, 3)
  assert np.isfinite(loss).all()


@pytest.mark.parametrize('name', sorted(recipes.RECIPES))
def test_every_argument_of_a_recipe_is_a_keyword(name):
  parameters = inspect.signature(recipes.RECIPES[name]).parameters.values()
  assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_ablation_is_one_replace():
  recipe = make('scalerl')._replace(aggregation=aggregation.token_mean)
  assert recipe.aggregation is aggregation.token_mean
  assert recipe.advantage is advantages.batch_normalized


def test_metrics_know_the_bound_of_the_ratio():
  assert make('scalerl', max_ratio=4.0).max_ratio == 4.0
  assert make('dapo').max_ratio == pytest.approx(1.26)
  assert make('gspo').max_ratio is None


@pytest.mark.parametrize('max_ratio', [0.2, 0.99, -1.0, float('nan')])
@pytest.mark.parametrize('name', ['scalerl', 'minimax_m1'])
def test_l24_cap_below_one_is_refused_when_the_recipe_is_made(name, max_ratio):
  with pytest.raises(ValueError, match='max_ratio='):
    make(name, max_ratio=max_ratio)


@pytest.mark.parametrize(
  ('name', 'args', 'message'),
  [
    ('grpo', {'clip': 1.0}, 'clip_low=1.0'),
    ('grpo', {'clip': -0.1}, 'clip_low=-0.1'),
    ('dapo', {'clip_low': -0.1}, 'clip_low=-0.1'),
    ('dapo', {'clip_high': -0.1}, 'clip_high=-0.1'),
    ('magistral', {'clip_high': float('nan')}, 'clip_high=nan'),
    ('gspo', {'clip_low': 2.0}, 'clip_low=2.0'),
    ('dr_grpo', {'length': 0}, 'length=0'),
  ],
)
def test_settings_are_checked_when_the_recipe_is_made(name, args, message):
  with pytest.raises(ValueError, match=message):
    make(name, **args)


def test_unknown_recipe_names_the_valid_ones():
  with pytest.raises(ValueError, match=r"recipe='scale_rl'.*'scalerl'"):
    recipes.make('scale_rl')


@pytest.mark.parametrize(
  ('name', 'args', 'message'),
  [
    ('scalerl', {'clip': 0.2}, "takes .*'max_ratio'.*'clip'"),
    ('dr_grpo', {}, "takes .*'length'.*missing.*'length'"),
    ('scalerl', {'max_ratio': '5'}, "max_ratio='5' is not a number"),
    ('scalerl', {'max_ratio': None}, 'max_ratio=None is not a number'),
    ('grpo', {'clip': True}, 'clip=True is not a number'),
  ],
)
def test_arguments_of_another_recipe_are_refused(name, args, message):
  with pytest.raises(ValueError, match=message):
    recipes.make(name, **args)
