import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from scalerl_jax import losses
from tests.reference import losses as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')

SHAPE = (3, 7)


def random_inputs(seed=0, spread=1.0):
  rng = np.random.default_rng(seed)
  policy = -rng.exponential(1.0, SHAPE)
  behavior = policy + rng.normal(0.0, spread, SHAPE)
  return policy, behavior, rng.normal(0.0, 1.0, SHAPE)


def as_jax(*arrays):
  return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def row(*values):
  return jnp.asarray([values], jnp.float32)


def gradient(fn, policy, *args, **kwargs):
  return jax.grad(lambda p: jnp.sum(fn(p, *args, **kwargs)))(policy)


def numeric_gradient(fn, policy, eps=1e-6):
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    step = np.zeros(policy.shape)
    step[i] = eps
    out[i] = (fn(policy + step).sum() - fn(policy - step).sum()) / (2 * eps)
  return out


# CISPO.


def test_cispo_by_hand():
  # ρ = .5/.05 = 10, capped at 5; ρ = 1; ρ = .25/.5 = .5.
  policy = jnp.log(row(0.5, 0.25, 0.25))
  behavior = jnp.log(row(0.05, 0.25, 0.5))
  loss = losses.cispo(policy, behavior, row(2.0, -1.0, 1.0), max_ratio=5.0)
  # -5·2·ln .5 = 6.9315; -1·-1·ln .25 = -1.3863; -.5·1·ln .25 = .6931.
  np.testing.assert_allclose(loss, [[6.9315, -1.3863, 0.6931]], atol=1e-4)


@pytest.mark.parametrize('max_ratio', [1.0, 1.5, 5.0])
def test_cispo_equals_reference(max_ratio):
  policy, behavior, advantages = random_inputs()
  np.testing.assert_allclose(
    losses.cispo(*as_jax(policy, behavior, advantages), max_ratio=max_ratio),
    reference.cispo(policy, behavior, advantages, max_ratio=max_ratio),
    rtol=1e-5,
  )


def test_l22_cispo_gradient_has_the_log_pi_factor():
  policy, behavior, advantages = random_inputs(1)
  frozen = policy.copy()
  expected = numeric_gradient(
    lambda p: reference.cispo(
      p, behavior, advantages, max_ratio=2.0, ratio_policy=frozen
    ),
    policy,
  )
  actual = gradient(
    losses.cispo, *as_jax(policy, behavior, advantages), max_ratio=2.0
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('logp', [-0.1, -0.9, -1.1, -3.0, -30.0])
@pytest.mark.parametrize('shift', [-2.0, 0.0, 1.0, 3.0])
def test_l23_cispo_gradient_is_stopped_through_the_ratio(logp, shift):
  # Without the stop-gradient the sign flips where log π < -1.
  grad = gradient(losses.cispo, row(logp), row(logp - shift), row(0.7))
  np.testing.assert_allclose(grad, -min(np.exp(shift), 5.0) * 0.7, rtol=1e-5)


def test_l15_cispo_has_no_lower_floor():
  grad = gradient(losses.cispo, row(-9.0), row(-1.0), row(1.0))
  np.testing.assert_allclose(grad, -np.exp(-8.0), rtol=1e-5)


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_l17_cispo_caps_both_signs(advantage):
  grad = gradient(losses.cispo, row(-1.0), row(-9.0), row(advantage))
  np.testing.assert_allclose(grad, -5.0 * advantage)


def test_l18_ratio_is_recomputed_for_every_policy():
  loss = jax.jit(losses.cispo)
  first = loss(row(-1.0), row(-1.0), row(1.0))
  second = loss(row(-2.0), row(-1.0), row(1.0))
  np.testing.assert_allclose(first, 1.0, rtol=1e-6)
  np.testing.assert_allclose(second, 2 * np.exp(-1.0), rtol=1e-6)


@pytest.mark.parametrize('max_ratio', [0.2, 0.999, 0.0, -1.0, float('nan')])
def test_l24_cispo_cap_below_one_is_an_error(max_ratio):
  with pytest.raises(ValueError, match=r'max_ratio=.*at least 1'):
    losses.cispo(row(0.0), row(0.0), row(0.0), max_ratio=max_ratio)


def test_cispo_gradient_reaches_the_policy_only():
  policy, behavior, advantages = as_jax(*random_inputs())
  grad = jax.grad(lambda b: jnp.sum(losses.cispo(policy, b, advantages)))(
    behavior
  )
  np.testing.assert_array_equal(grad, 0.0)


# The clipped surrogate.


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'loss', 'grad'),
  [
    # d(-ρ·Â)/dlog π = -ρ·Â where not clipped, 0 where clipped.
    (1.0, 2.0, -2.0, -2.0),
    (1.5, 2.0, -2.52, 0.0),  # Above 1 + .26.
    (0.5, 2.0, -1.0, -1.0),  # A bad ratio with Â > 0 is not clipped.
    (1.5, -2.0, 3.0, 3.0),
    (0.5, -2.0, 1.6, 0.0),  # Below 1 - .2.
    (1.1, -2.0, 2.2, 2.2),
  ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, grad):
  policy, behavior = row(-1.0), row(-1.0 - np.log(ratio))
  clips = {'clip_low': 0.2, 'clip_high': 0.26}
  actual = losses.clipped_surrogate(policy, behavior, row(advantage), **clips)
  np.testing.assert_allclose(actual, loss, rtol=1e-5)
  actual = gradient(
    losses.clipped_surrogate, policy, behavior, row(advantage), **clips
  )
  np.testing.assert_allclose(actual, grad, rtol=1e-5)


@pytest.mark.parametrize('clips', [(0.2, 0.2), (0.2, 0.28), (0.0, 0.5)])
def test_clipped_surrogate_equals_reference(clips):
  low, high = clips
  inputs = random_inputs(2, spread=0.4)
  kwargs = {'clip_low': low, 'clip_high': high}
  np.testing.assert_allclose(
    losses.clipped_surrogate(*as_jax(*inputs), **kwargs),
    reference.clipped_surrogate(*inputs, **kwargs),
    rtol=1e-5,
  )


def test_clipped_surrogate_gradient_by_finite_differences():
  policy, behavior, advantages = random_inputs(3, spread=0.4)
  kwargs = {'clip_low': 0.2, 'clip_high': 0.26}
  expected = numeric_gradient(
    lambda p: reference.clipped_surrogate(p, behavior, advantages, **kwargs),
    policy,
  )
  actual = gradient(
    losses.clipped_surrogate, *as_jax(policy, behavior, advantages), **kwargs
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
  assert (expected == 0).any()
  assert (expected != 0).any()


def test_l16_stale_policy_is_clipped_and_fresh_one_is_not():
  # The ratio is against the engine's own log-probs: an off-policy batch clips.
  policy, behavior, advantages = as_jax(*random_inputs(4, spread=0.5))
  fresh = gradient(losses.clipped_surrogate, policy, policy, advantages)
  stale = gradient(losses.clipped_surrogate, policy, behavior, advantages)
  assert float(jnp.mean(fresh == 0)) == 0.0
  assert float(jnp.mean(stale == 0)) > 0.0


def test_on_policy_losses_have_the_policy_gradient():
  policy, _, advantages = as_jax(*random_inputs(5))
  mask = jnp.ones(SHAPE, bool)
  rollout_index = jnp.broadcast_to(jnp.arange(3)[:, None], SHAPE)
  expected = gradient(losses.reinforce, policy, advantages)
  for grad in (
    gradient(losses.cispo, policy, policy, advantages),
    gradient(losses.clipped_surrogate, policy, policy, advantages),
    gradient(
      losses.gspo,
      policy,
      policy,
      advantages,
      mask,
      rollout_index,
      num_rollouts=3,
    ),
  ):
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


@pytest.mark.parametrize(
  'clips', [(-0.1, 0.2), (1.0, 0.2), (0.2, -0.1), (float('nan'), 0.2)]
)
@pytest.mark.parametrize('loss', ['clipped_surrogate', 'gspo'])
def test_clip_range_out_of_bounds_is_an_error(loss, clips):
  args = [row(0.0)] * 3
  if loss == 'gspo':
    args += [jnp.ones((1, 1), bool), jnp.zeros((1, 1), jnp.int32)]
  kwargs = {'num_rollouts': 1} if loss == 'gspo' else {}
  low, high = clips
  with pytest.raises(ValueError, match=r'clip_low=.*clip_high='):
    getattr(losses, loss)(*args, clip_low=low, clip_high=high, **kwargs)


# GSPO.


def gspo_inputs(seed=0, spread=0.02):
  """Three rows; row 0 holds two rollouts, row 2 is shorter, some masked."""
  policy, behavior, _ = random_inputs(seed, spread=spread)
  rollout_index = np.array(
    [[0, 0, 0, 1, 1, 1, 1], [2] * 7, [3, 3, 3, 3, -1, -1, -1]]
  )
  mask = rollout_index >= 0
  mask[1, 2:4] = False
  per_rollout = np.random.default_rng(seed).normal(0.0, 1.0, 4)
  advantages = np.where(rollout_index >= 0, per_rollout[rollout_index], 0.0)
  return policy, behavior, advantages, mask, rollout_index


def run_gspo(policy, behavior, advantages, mask, rollout_index, **kwargs):
  return losses.gspo(
    *as_jax(policy, behavior, advantages),
    jnp.asarray(mask),
    jnp.asarray(rollout_index),
    num_rollouts=4,
    **kwargs,
  )


def test_gspo_by_hand():
  # Log-ratios .2 and .4: s = exp(.3) = 1.34986 for both tokens.
  kwargs = {'num_rollouts': 1, 'clip_low': 0.5, 'clip_high': 0.5}
  args = (
    row(-1.0, -2.0),
    row(-1.2, -2.4),
    row(2.0, 2.0),
    jnp.ones((1, 2), bool),
    jnp.zeros((1, 2), jnp.int32),
  )
  np.testing.assert_allclose(
    losses.gspo(*args, **kwargs), [[-2.69972, -2.69972]], rtol=1e-5
  )
  kwargs['clip_high'] = 0.3
  np.testing.assert_allclose(
    losses.gspo(*args, **kwargs), [[-2.6, -2.6]], rtol=1e-5
  )


@pytest.mark.parametrize('clip', [3e-3, 1e-2, 0.5])
def test_gspo_equals_reference(clip):
  inputs = gspo_inputs()
  actual = run_gspo(*inputs, clip_low=clip, clip_high=clip)
  expected = reference.gspo(*inputs, clip_low=clip, clip_high=clip)
  mask = inputs[3]
  np.testing.assert_allclose(
    np.where(mask, actual, 0.0), expected, rtol=1e-5, atol=1e-6
  )


def test_gspo_gradient_equals_the_sequence_form():
  # With one advantage and one weight in a rollout, Σₜ of the token form has
  # the gradient of |y|·(sequence form).
  policy, behavior, advantages, mask, rollout_index = gspo_inputs(1)
  clips = {'clip_low': 1e-2, 'clip_high': 1e-2}
  expected = numeric_gradient(
    lambda p: reference.gspo(
      p, behavior, advantages, mask, rollout_index, **clips
    ),
    policy,
  )

  def total(p):
    loss = run_gspo(p, behavior, advantages, mask, rollout_index, **clips)
    return jnp.sum(jnp.where(jnp.asarray(mask), loss, 0.0))

  actual = jax.grad(total)(jnp.asarray(policy, jnp.float32))
  np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)
  assert (expected[mask] == 0).any()
  assert (expected[mask] != 0).any()


def test_gspo_counts_masked_tokens_neither_in_the_mean_nor_in_the_length():
  inputs = gspo_inputs()
  policy, mask = inputs[0].copy(), inputs[3]
  before = run_gspo(*inputs)
  policy[~mask] += 3.0
  after = run_gspo(policy, *inputs[1:])
  np.testing.assert_array_equal(
    np.where(mask, before, 0.0), np.where(mask, after, 0.0)
  )


# REINFORCE.


def test_reinforce_by_hand():
  loss = losses.reinforce(row(-1.0, -2.0), row(3.0, -0.5))
  np.testing.assert_allclose(loss, [[3.0, -1.0]])


def test_reinforce_equals_reference_and_its_gradient_is_minus_the_advantage():
  policy, _, advantages = random_inputs()
  np.testing.assert_allclose(
    losses.reinforce(*as_jax(policy, advantages)),
    reference.reinforce(policy, advantages),
    rtol=1e-6,
  )
  grad = gradient(losses.reinforce, *as_jax(policy, advantages))
  np.testing.assert_allclose(grad, -advantages, rtol=1e-6)


# All of them.


def call(loss, policy, behavior, advantages):
  if loss == 'reinforce':
    return losses.reinforce(policy, advantages)
  if loss == 'gspo':
    mask = jnp.ones(policy.shape, bool)
    index = jnp.zeros(policy.shape, jnp.int32)
    return losses.gspo(
      policy, behavior, advantages, mask, index, num_rollouts=1
    )
  return getattr(losses, loss)(policy, behavior, advantages)


LOSSES = ['cispo', 'clipped_surrogate', 'gspo', 'reinforce']


@pytest.mark.parametrize('loss', LOSSES)
def test_advantage_per_row_equals_advantage_per_token(loss):
  policy, behavior, _ = as_jax(*random_inputs())
  per_row = jnp.asarray([[1.0], [-2.0], [0.5]])
  per_token = jnp.broadcast_to(per_row, SHAPE)
  np.testing.assert_array_equal(
    call(loss, policy, behavior, per_row),
    call(loss, policy, behavior, per_token),
  )


@pytest.mark.parametrize('loss', LOSSES)
def test_losses_are_linear_in_positive_scales_of_the_advantage(loss):
  policy, behavior, advantages = as_jax(*random_inputs())
  np.testing.assert_allclose(
    call(loss, policy, behavior, 4.0 * advantages),
    4.0 * call(loss, policy, behavior, advantages),
    rtol=1e-6,
  )


@pytest.mark.parametrize('loss', LOSSES)
def test_jitted_losses_equal_themselves(loss):
  inputs = as_jax(*random_inputs())
  jitted = jax.jit(lambda *args: call(loss, *args))
  np.testing.assert_allclose(jitted(*inputs), call(loss, *inputs), rtol=1e-6)


# Square shapes, where a broadcast would go unnoticed, and others.
BAD_ADVANTAGES = [(4,), (3,), (1, 4), (4, 3), (1, 1), ()]


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize('shape', BAD_ADVANTAGES)
@pytest.mark.parametrize('loss', LOSSES)
def test_l06_advantages_are_never_broadcast_silently(loss, shape):
  policy = jnp.zeros((4, 4))
  with pytest.raises(ValueError, match='advantages of shape'):
    call(loss, policy, policy, jnp.zeros(shape))


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize('loss', ['cispo', 'clipped_surrogate', 'gspo'])
def test_l06_behavior_of_another_shape_is_an_error(loss):
  policy = jnp.zeros((4, 4))
  for shape in [(4, 5), (4,), (1, 4), (4, 1)]:
    with pytest.raises(ValueError, match='shapes differ'):
      call(loss, policy, jnp.zeros(shape), policy)


@pytest.mark.usefixtures('unchecked_signatures')
def test_l06_gspo_mask_of_another_shape_is_an_error():
  policy = jnp.zeros((4, 4))
  mask, index = jnp.ones((4, 5), bool), jnp.zeros((4, 4), jnp.int32)
  with pytest.raises(ValueError, match='shapes differ'):
    losses.gspo(policy, policy, policy, mask, index, num_rollouts=1)


def test_l06_checked_signatures_refuse_a_vector_too():
  policy = jnp.zeros((4, 4))
  with pytest.raises(jaxtyping.TypeCheckError):
    losses.cispo(policy, policy, jnp.zeros(4))
