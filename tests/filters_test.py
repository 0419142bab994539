import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import filters
from tests.reference import groups as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')


def run(rewards, prompt_index, valid=None, num_prompts=None, **kwargs):
  if valid is None:
    valid = np.ones(len(rewards), bool)
  if num_prompts is None:
    num_prompts = int(np.max(prompt_index)) + 1
  return np.asarray(
    filters.zero_variance(
      jnp.asarray(rewards, jnp.float32),
      jnp.asarray(prompt_index, jnp.int32),
      jnp.asarray(valid),
      num_prompts=num_prompts,
      **kwargs,
    )
  )


def test_zero_variance_by_hand():
  rewards = [1, 1, 1, -1, -1, -1]
  keep = run(rewards, [0, 0, 1, 1, 2, 2])
  np.testing.assert_array_equal(keep, [False, False, True, True, False, False])


@pytest.mark.parametrize('seed', range(4))
def test_zero_variance_equals_reference(seed):
  rng = np.random.default_rng(seed)
  rewards = rng.choice([-1.0, 1.0], 24)
  prompt_index = rng.integers(0, 9, 24)
  valid = rng.random(24) > 0.3
  np.testing.assert_array_equal(
    run(rewards, prompt_index, valid, num_prompts=9),
    reference.zero_variance(rewards, prompt_index, valid),
  )


def test_l03_zero_variance_is_a_property_of_the_group():
  # The batch has variance; each group has none.
  keep = run([1, 1, -1, -1], [0, 0, 1, 1])
  np.testing.assert_array_equal(keep, False)


def test_l03_other_groups_do_not_change_the_decision():
  alone = run([1, -1], [0, 0])
  for others in ([1, 1], [-1, -1], [1, -1], [1e6, -1e6]):
    together = run([1, -1, *others], [0, 0, 1, 1])
    np.testing.assert_array_equal(together[:2], alone)


@pytest.mark.parametrize(
  ('spread', 'kept'), [(0.0, False), (5e-7, False), (2e-6, True)]
)
def test_l04_spread_within_the_tolerance_is_none(spread, kept):
  assert run([0.5, 0.5 + spread], [0, 0]).tolist() == [kept, kept]


def test_tolerance_is_in_units_of_reward():
  assert run([0.0, 0.1], [0, 0], tolerance=0.2).tolist() == [False, False]
  assert run([0.0, 0.3], [0, 0], tolerance=0.2).tolist() == [True, True]


def test_l04_nan_rewards_are_not_valid():
  keep = run([1, -1, np.nan, 1, 1, np.nan], [0, 0, 0, 1, 1, 1])
  np.testing.assert_array_equal(keep, [True, True, *[False] * 4])


@pytest.mark.parametrize('junk', [np.nan, np.inf, -np.inf, -1.0])
def test_rollouts_that_are_not_valid_neither_vote_nor_stay(junk):
  keep = run([1, 1, junk], [0, 0, 0], [True, True, False])
  np.testing.assert_array_equal(keep, False)


def test_l11_whole_groups_are_dropped_or_kept():
  keep = run([0.0] + [0.95] * 7, [0] * 8)
  np.testing.assert_array_equal(keep, True)


def test_single_rollout_is_dropped():
  np.testing.assert_array_equal(run([1.0, -1.0], [0, 1]), False)


def test_l13_order_and_labels_do_not_matter():
  rng = np.random.default_rng(0)
  rewards, prompts = rng.choice([-1.0, 1.0], 20), rng.integers(0, 8, 20)
  order = rng.permutation(20)
  labels = rng.permutation(12)[:8]
  expected = run(rewards, prompts, num_prompts=8)
  actual = run(rewards[order], labels[prompts[order]], num_prompts=12)
  np.testing.assert_array_equal(actual, expected[order])


def test_zero_variance_under_jit_and_vmap():
  rewards = jnp.asarray([[1.0, 1.0], [1.0, -1.0]])
  keep = jax.jit(
    jax.vmap(
      lambda r: filters.zero_variance(
        r, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_prompts=1
      )
    )
  )(rewards)
  np.testing.assert_array_equal(keep, [[False, False], [True, True]])
