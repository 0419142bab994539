import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import aggregation
from scalerl_jax import losses
from tests.reference import groups as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')

NAMES = ['token_mean', 'sequence_mean', 'prompt_mean', 'fixed_length']
LENGTH = 10


def run(name, mask, rollout_index, prompts, **kwargs):
  if name == 'fixed_length':
    kwargs = {'length': LENGTH, **kwargs}
  kwargs = {
    'num_rollouts': len(prompts),
    'num_prompts': int(np.max(prompts)) + 1,
    **kwargs,
  }
  return np.asarray(
    getattr(aggregation, name)(
      jnp.asarray(mask),
      jnp.asarray(rollout_index, jnp.int32),
      jnp.asarray(prompts, jnp.int32),
      **kwargs,
    )
  )


# Rollouts of 2, 1, 3 tokens; the first two belong to prompt 0, and a fourth
# (prompt 1) is masked as a whole, as a truncated one is.
ROLLOUT_INDEX = np.array([[0, 0, -1], [1, -1, -1], [2, 2, 2], [3, 3, 3]])
MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
PROMPTS = [0, 0, 1, 1]


@pytest.mark.parametrize(
  ('name', 'per_rollout'),
  [
    ('token_mean', [1 / 6, 1 / 6, 1 / 6]),
    ('sequence_mean', [1 / 6, 1 / 3, 1 / 9]),  # 1/3 rollouts / length.
    ('prompt_mean', [1 / 6, 1 / 6, 1 / 6]),  # 1/2 prompts / 3 tokens each.
    ('fixed_length', [1 / 30, 1 / 30, 1 / 30]),  # 1/3 rollouts / 10.
  ],
)
def test_l25_weights_by_hand(name, per_rollout):
  expected = np.zeros(MASK.shape)
  for rollout, weight in enumerate(per_rollout):
    expected[MASK & np.equal(ROLLOUT_INDEX, rollout)] = weight
  actual = run(name, MASK, ROLLOUT_INDEX, PROMPTS)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_prompt_mean_by_hand_of_unequal_prompts():
  # Prompt 0 has 2 tokens, prompt 1 has 4: 1/2/2 and 1/2/4.
  index = np.array([[0, 0, 1, 1, 1, 1]])
  actual = run('prompt_mean', index >= 0, index, [0, 1])
  np.testing.assert_allclose(actual, [[0.25, 0.25, 0.125, 0.125, 0.125, 0.125]])


def random_layout(seed):
  """Packed rows of any rollouts, random masks, padding, R = 7, P = 4."""
  rng = np.random.default_rng(seed)
  index = np.full((4, 12), -1)
  for rollout in range(7):
    row, start = rollout % 4, 6 * (rollout // 4)
    index[row, start : start + rng.integers(1, 7)] = rollout
  mask = rng.random(index.shape) > 0.3  # Also over padding.
  mask[index == 5] = False
  return mask, index, rng.integers(0, 4, 7)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', NAMES)
def test_weights_equal_reference(name, seed):
  layout = random_layout(seed)
  np.testing.assert_allclose(
    run(name, *layout, num_prompts=4),
    reference.weights(name, *layout, length=LENGTH),
    rtol=1e-6,
  )


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', ['token_mean', 'sequence_mean', 'prompt_mean'])
def test_weights_of_a_mean_sum_to_one(name, seed):
  weights = run(name, *random_layout(seed), num_prompts=4)
  np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_l01_masked_rollouts_are_in_no_denominator(name):
  # The fourth rollout is masked: the same as if it had never been there.
  without = run(name, MASK[:3], ROLLOUT_INDEX[:3], PROMPTS[:3])
  actual = run(name, MASK, ROLLOUT_INDEX, PROMPTS)
  np.testing.assert_allclose(actual[:3], without, rtol=1e-6)
  np.testing.assert_array_equal(actual[3], 0.0)


@pytest.mark.parametrize('name', NAMES)
def test_l02_everything_masked_gives_zeros(name):
  weights = run(name, np.zeros_like(MASK), ROLLOUT_INDEX, PROMPTS)
  np.testing.assert_array_equal(weights, 0.0)


@pytest.mark.parametrize('name', NAMES)
def test_l25_row_without_tokens_gives_zeros_in_that_row_only(name):
  mask = MASK.copy()
  mask[0] = False
  weights = run(name, mask, ROLLOUT_INDEX, PROMPTS)
  np.testing.assert_array_equal(weights[0], 0.0)
  assert (weights[mask] > 0).all()
  assert np.isfinite(weights).all()


@pytest.mark.parametrize('name', NAMES)
def test_tokens_of_no_rollout_carry_no_weight(name):
  # The mask is wrongly True over padding: index -1 must not wrap around.
  expected = run(name, MASK, ROLLOUT_INDEX, PROMPTS)
  mask = MASK | (ROLLOUT_INDEX < 0)
  np.testing.assert_array_equal(
    run(name, mask, ROLLOUT_INDEX, PROMPTS), expected
  )


@pytest.mark.parametrize('name', NAMES)
def test_l09_padding_does_not_change_a_weight(name):
  expected = run(name, MASK, ROLLOUT_INDEX, PROMPTS)
  for left, right, below in ((0, 5, 0), (4, 0, 0), (2, 3, 6)):
    pad = ((0, below), (left, right))
    actual = run(
      name,
      np.pad(MASK, pad),
      np.pad(ROLLOUT_INDEX, pad, constant_values=-1),
      [*PROMPTS, 0, 0],
    )
    np.testing.assert_allclose(actual[:4, left : left + 3], expected, rtol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_packing_does_not_change_a_weight(name):
  expected = run(name, MASK, ROLLOUT_INDEX, PROMPTS)
  packed = run(name, MASK.reshape(1, -1), ROLLOUT_INDEX.reshape(1, -1), PROMPTS)
  np.testing.assert_allclose(packed.reshape(4, 3), expected, rtol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_l13_labels_of_rollouts_and_prompts_do_not_matter(name):
  mask, index, prompts = random_layout(0)
  rng = np.random.default_rng(0)
  rollout_labels, prompt_labels = rng.permutation(7), rng.permutation(9)
  new_prompts = np.zeros(7, int)
  new_prompts[rollout_labels] = prompt_labels[prompts]
  relabelled = np.where(index >= 0, rollout_labels[index], -1)
  np.testing.assert_allclose(
    run(name, mask, relabelled, new_prompts, num_prompts=9),
    run(name, mask, index, prompts, num_prompts=4),
    rtol=1e-6,
  )


@pytest.mark.parametrize('name', NAMES)
def test_l08_gradient_is_the_same_for_any_partition(name):
  mask, index, prompts = (jnp.asarray(x) for x in random_layout(1))
  weights = jnp.asarray(
    run(name, mask, index, np.asarray(prompts), num_prompts=4)
  )
  rng = np.random.default_rng(0)
  policy, advantages = (
    jnp.asarray(rng.normal(0, 1, mask.shape), jnp.float32) for _ in range(2)
  )

  def loss(p, w, m, a):
    return jnp.sum(jnp.where(m, w * losses.reinforce(p, a), 0.0))

  whole = jax.grad(loss)(policy, weights, mask, advantages)
  for bounds in ((0, 1, 2, 3, 4), (0, 2, 4), (0, 3, 4)):
    parts = [
      jax.grad(loss)(*(x[i:j] for x in (policy, weights, mask, advantages)))
      for i, j in itertools.pairwise(bounds)
    ]
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=1e-6)


def test_l09_fixed_length_divides_by_a_constant():
  short = run('fixed_length', MASK[:, :3], ROLLOUT_INDEX[:, :3], PROMPTS)
  wide = np.pad(ROLLOUT_INDEX, ((0, 0), (0, 40)), constant_values=-1)
  long = run('fixed_length', np.pad(MASK, ((0, 0), (0, 40))), wide, PROMPTS)
  np.testing.assert_array_equal(long[:, :3], short)
  twice = run('fixed_length', MASK, ROLLOUT_INDEX, PROMPTS, length=2 * LENGTH)
  np.testing.assert_allclose(2 * twice, short)


def test_l07_kl_metric_of_a_fully_masked_batch_is_zero():
  mask = np.zeros_like(MASK)
  weights = run('token_mean', mask, ROLLOUT_INDEX, PROMPTS)
  kl = losses.kl_k3(jnp.full((4, 3), -jnp.inf), jnp.full((4, 3), jnp.nan))
  assert float(jnp.sum(jnp.where(jnp.asarray(mask), weights * kl, 0.0))) == 0.0


@pytest.mark.parametrize('length', [0, -3])
def test_fixed_length_must_be_positive(length):
  with pytest.raises(ValueError, match=r'length=.*at least 1'):
    run('fixed_length', MASK, ROLLOUT_INDEX, PROMPTS, length=length)


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('shape', [(4, 4), (4,), (1, 3), (4, 1)])
def test_l06_mask_of_another_shape_is_an_error(name, shape):
  with pytest.raises(ValueError, match='same shape'):
    run(name, np.ones(shape, bool), ROLLOUT_INDEX, PROMPTS)
