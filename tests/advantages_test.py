import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import advantages
from tests.reference import groups as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')

NAMES = ['centered', 'group_normalized', 'batch_normalized', 'leave_one_out']


def run(name, rewards, prompt_index, valid=None, num_prompts=None, **kwargs):
  if valid is None:
    valid = np.ones(len(rewards), bool)
  if num_prompts is None:
    num_prompts = int(np.max(prompt_index)) + 1
  return np.asarray(
    getattr(advantages, name)(
      jnp.asarray(rewards, jnp.float32),
      jnp.asarray(prompt_index, jnp.int32),
      jnp.asarray(valid),
      num_prompts=num_prompts,
      **kwargs,
    )
  )


def random_batch(seed=0, num_rollouts=24, num_prompts=5):
  """Unequal groups in any order, invalid rollouts, one of them NaN."""
  rng = np.random.default_rng(seed)
  rewards = rng.choice([-1.0, 1.0, 0.25], num_rollouts)
  prompt_index = rng.integers(0, num_prompts, num_rollouts)
  valid = rng.random(num_rollouts) > 0.2
  rewards[np.flatnonzero(~valid)[0]] = np.nan
  return rewards, prompt_index, valid


# Prompt 0: 1, -1, -1, -1 (mean -.5); prompt 1: 1, 1, 1, -1 (mean .5).
REWARDS = [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0]
PROMPTS = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
  ('name', 'first', 'last'),
  [
    ('centered', 1.5, -1.5),
    # Variance of a group: (1.5² + 3·.5²)/4 = .75.
    ('group_normalized', 1.5 / np.sqrt(0.75), -1.5 / np.sqrt(0.75)),
    # The same over both groups together.
    ('batch_normalized', 1.5 / np.sqrt(0.75), -1.5 / np.sqrt(0.75)),
    # 1 - (-1), and -1 - 1.
    ('leave_one_out', 2.0, -2.0),
  ],
)
def test_advantages_by_hand(name, first, last):
  actual = run(name, REWARDS, PROMPTS)
  np.testing.assert_allclose(actual[[0, 7]], [first, last], rtol=1e-5)


def test_batch_normalized_by_hand_of_unequal_groups():
  # Centered: 1, -1 | .5, .5, -1; variance (1 + 1 + .25 + .25 + 1)/5 = .7.
  actual = run('batch_normalized', [1, -1, 1, 1, -0.5], [0, 0, 1, 1, 1])
  expected = np.array([1.0, -1.0, 0.5, 0.5, -1.0]) / np.sqrt(0.7)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', NAMES)
def test_advantages_equal_reference(name, seed):
  rewards, prompt_index, valid = random_batch(seed)
  np.testing.assert_allclose(
    run(name, rewards, prompt_index, valid, num_prompts=5),
    getattr(reference, name)(rewards, prompt_index, valid),
    rtol=1e-4,
    atol=1e-5,
  )


@pytest.mark.parametrize('name', NAMES)
def test_l13_order_of_the_rollouts_does_not_matter(name):
  # Prompt-major, sample-major, any order: grouping is by id.
  rewards, prompt_index, valid = random_batch(1)
  order = np.random.default_rng(0).permutation(len(rewards))
  expected = run(name, rewards, prompt_index, valid, num_prompts=5)
  actual = run(
    name, rewards[order], prompt_index[order], valid[order], num_prompts=5
  )
  np.testing.assert_allclose(actual, expected[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_labels_of_the_prompts_do_not_matter(name):
  rewards, prompt_index, valid = random_batch(2)
  labels = np.array([7, 3, 0, 8, 5])
  np.testing.assert_allclose(
    run(name, rewards, labels[prompt_index], valid, num_prompts=9),
    run(name, rewards, prompt_index, valid, num_prompts=5),
    rtol=1e-6,
  )


@pytest.mark.parametrize('name', NAMES)
def test_shift_of_a_prompts_rewards_does_not_matter(name):
  rewards, prompt_index, valid = random_batch(3)
  shifted = rewards + np.array([0.0, 3.0, -2.0, 1.0, 0.5])[prompt_index]
  np.testing.assert_allclose(
    run(name, shifted, prompt_index, valid, num_prompts=5),
    run(name, rewards, prompt_index, valid, num_prompts=5),
    atol=1e-5,
  )


@pytest.mark.parametrize('scale', [1e-3, 10.0])
@pytest.mark.parametrize(
  ('name', 'degree'),
  [('centered', 1), ('leave_one_out', 1), ('batch_normalized', 0)],
)
def test_scale_of_the_rewards(name, degree, scale):
  rewards, prompt_index, valid = random_batch(3)
  np.testing.assert_allclose(
    run(name, scale * rewards, prompt_index, valid, num_prompts=5),
    scale**degree * run(name, rewards, prompt_index, valid, num_prompts=5),
    rtol=1e-4,
    atol=1e-6 * scale**degree,
  )


@pytest.mark.parametrize('name', ['centered', 'leave_one_out'])
def test_advantages_of_a_prompt_sum_to_zero(name):
  rewards, prompt_index, valid = random_batch(1)
  actual = run(name, rewards, prompt_index, valid, num_prompts=5)
  totals = np.bincount(prompt_index, weights=actual, minlength=5)
  np.testing.assert_allclose(totals, 0.0, atol=1e-5)


def test_leave_one_out_is_centered_times_n_over_n_minus_one():
  np.testing.assert_allclose(
    run('leave_one_out', REWARDS, PROMPTS),
    4 / 3 * run('centered', REWARDS, PROMPTS),
    rtol=1e-6,
  )


@pytest.mark.parametrize('name', ['group_normalized', 'batch_normalized'])
def test_normalized_advantages_have_mean_zero_and_deviation_one(name):
  actual = run(name, REWARDS, PROMPTS)
  np.testing.assert_allclose(actual.mean(), 0.0, atol=1e-6)
  np.testing.assert_allclose(actual.std(), 1.0, rtol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_l27_single_rollout_has_advantage_zero(name):
  actual = run(name, [1.0, 1.0, -1.0], [0, 1, 2])
  np.testing.assert_array_equal(actual, 0.0)


@pytest.mark.parametrize('name', NAMES)
def test_l27_single_valid_rollout_of_a_group_has_advantage_zero(name):
  actual = run(name, [1.0, -1.0, -1.0], [0, 0, 0], [True, False, False])
  np.testing.assert_array_equal(actual, 0.0)


@pytest.mark.parametrize('junk', [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize('name', NAMES)
def test_l04_rewards_that_are_not_valid_do_not_leak(name, junk):
  expected = run(name, REWARDS, PROMPTS)
  actual = run(name, [*REWARDS, junk], [*PROMPTS, 1], [True] * 8 + [False])
  np.testing.assert_allclose(actual[:8], expected, rtol=1e-6)
  assert actual[8] == 0.0


@pytest.mark.parametrize('name', NAMES)
def test_l01_masked_rollouts_are_in_no_denominator(name):
  rewards, prompt_index, valid = random_batch(2)
  expected = run(name, rewards[valid], prompt_index[valid], None, num_prompts=5)
  actual = run(name, rewards, prompt_index, valid, num_prompts=5)
  np.testing.assert_allclose(actual[valid], expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(actual[~valid], 0.0)


@pytest.mark.parametrize('name', NAMES)
def test_l02_no_valid_rollout_gives_zeros(name):
  actual = run(name, [np.nan] * 4, [0, 0, 1, 1], [False] * 4)
  np.testing.assert_array_equal(actual, 0.0)


@pytest.mark.parametrize('reward', [0.1, 1.0, -1.0, 1000.1])
@pytest.mark.parametrize('size', [3, 7])
@pytest.mark.parametrize('name', NAMES)
def test_zero_variance_gives_zeros_and_not_amplified_rounding(
  name, size, reward
):
  actual = run(name, [reward] * 2 * size, [0] * size + [1] * size)
  bound = 1e-6 * max(1.0, abs(reward))
  if name == 'group_normalized':
    bound *= 1e6  # ε is in units of reward.
  np.testing.assert_allclose(actual, 0.0, atol=bound)


@pytest.mark.parametrize('name', NAMES)
def test_l11_advantages_are_bounded_for_a_lone_failure(name):
  # The population's deviation bounds a normalised advantage by √(n - 1).
  actual = run(name, [0.0] + [0.95] * 7, [0] * 8)
  assert np.abs(actual).max() <= np.sqrt(7) + 1e-4
  np.testing.assert_allclose(actual.sum(), 0.0, atol=1e-5)


def test_filtered_prompts_must_not_be_valid_for_the_batch_deviation():
  # Their zeros would shrink it by √(kept fraction), here √(1/2).
  rewards, prompts = [1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1]
  kept = run('batch_normalized', rewards, prompts, [True, True, False, False])
  full = run('batch_normalized', rewards, prompts)
  np.testing.assert_allclose(kept, [1.0, -1.0, 0.0, 0.0], rtol=1e-6)
  np.testing.assert_allclose(full[:2], np.sqrt(2) * kept[:2], rtol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_jacobian_by_finite_differences(name):
  rewards, prompt_index, valid = random_batch(0)
  rewards = np.where(valid, rewards, 0.0)
  fn = getattr(reference, name)
  actual = jax.jacobian(
    lambda r: getattr(advantages, name)(
      r,
      jnp.asarray(prompt_index, jnp.int32),
      jnp.asarray(valid),
      num_prompts=5,
    )
  )(jnp.asarray(rewards, jnp.float32))
  for j in np.flatnonzero(valid)[:6]:
    mine = rewards[valid & (prompt_index == prompt_index[j])]
    if np.ptp(mine) == 0:
      continue  # The deviation of a group is not differentiable at 0.
    step = 1e-6 * np.eye(len(rewards))[j]
    up, down = (fn(rewards + s, prompt_index, valid) for s in (step, -step))
    np.testing.assert_allclose(actual[:, j], (up - down) / 2e-6, atol=1e-3)
