"""Every loss × every property that its use in a train step needs.

A new loss is one row of `LOSSES`. The objective here is the documented one,
sum(where(mask, weights * per_token, 0)), composed from the public functions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import advantages
from scalerl_jax import aggregation
from scalerl_jax import filters
from scalerl_jax import losses

# name: (policy, behavior, advantages, mask, rollout_index, num_rollouts) -> ℓ
LOSSES = {
  'cispo': lambda p, b, a, m, i, n: losses.cispo(p, b, a),
  'clipped_surrogate': lambda p, b, a, m, i, n: losses.clipped_surrogate(
    p, b, a, clip_high=0.28
  ),
  'gspo': lambda p, b, a, m, i, n: losses.gspo(
    p, b, a, m, i, num_rollouts=n, clip_low=0.1, clip_high=0.2
  ),
  'reinforce': lambda p, b, a, m, i, n: losses.reinforce(p, a),
  'kl_k1': lambda p, b, a, m, i, n: losses.kl_k1(p, b),
  'kl_k2': lambda p, b, a, m, i, n: losses.kl_k2(p, b),
  'kl_k3': lambda p, b, a, m, i, n: losses.kl_k3(p, b),
}
KLS = ('kl_k1', 'kl_k2', 'kl_k3')
AGGREGATIONS = {
  'token_mean': aggregation.token_mean,
  'sequence_mean': aggregation.sequence_mean,
  'prompt_mean': aggregation.prompt_mean,
  'fixed_length': lambda *args, **kwargs: aggregation.fixed_length(
    *args, **kwargs, length=8
  ),
}

every_loss = pytest.mark.parametrize('loss', LOSSES)
every_aggregation = pytest.mark.parametrize('aggregate', AGGREGATIONS)


class Samples(NamedTuple):
  """Rollouts as lists, before any layout in rows."""

  policy: list
  behavior: list
  sampled: list  # False: a forced token.
  rewards: np.ndarray
  prompts: np.ndarray
  valid: np.ndarray


class Layout(NamedTuple):
  """The same rollouts in rows, as a train step has them."""

  policy: np.ndarray
  behavior: np.ndarray
  mask: np.ndarray
  index: np.ndarray


def make_samples(seed=0):
  """Eight rollouts of three prompts; prompt 1 has no variance."""
  rng = np.random.default_rng(seed)
  lengths = [3, 1, 4, 2, 5, 2, 3, 4]
  policy = [-rng.exponential(1.0, n) for n in lengths]
  behavior = [p + rng.normal(0.0, 0.3, p.size) for p in policy]
  sampled = [np.ones(n, bool) for n in lengths]
  sampled[4][2:4] = False
  return Samples(
    policy,
    behavior,
    sampled,
    np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0]),
    np.array([0, 0, 1, 1, 2, 2, 2, 0]),
    np.ones(8, bool),
  )


def lay_out(samples, *, rows=None, width=6, side='right', fill=-1.5):
  """Lays rollouts out in rows.

  Args:
    samples: The rollouts.
    rows: Which rollouts share a row; None: one each.
    width: Of a row, in tokens.
    side: Of the padding.
    fill: Log-probs of padding and of forced tokens.

  Returns:
    The layout.
  """
  rows = [[i] for i in range(len(samples.policy))] if rows is None else rows
  shape = (len(rows), width)
  out = Layout(
    np.full(shape, fill),
    np.full(shape, fill),
    np.zeros(shape, bool),
    np.full(shape, -1),
  )
  for row, members in enumerate(rows):
    total = sum(samples.policy[i].size for i in members)
    start = 0 if side == 'right' else width - total
    for i in members:
      where = np.s_[row, start : start + samples.policy[i].size]
      out.index[where] = i
      out.mask[where] = samples.sampled[i]
      out.policy[where] = np.where(samples.sampled[i], samples.policy[i], fill)
      out.behavior[where] = np.where(
        samples.sampled[i], samples.behavior[i], fill
      )
      start += samples.policy[i].size
  return out


class Terms(NamedTuple):
  """What the loss needs besides the policy; made once per global batch."""

  behavior: jax.Array
  mask: jax.Array
  index: jax.Array
  weights: jax.Array
  advantages: jax.Array


def make_terms(
  samples, layout, *, aggregate='prompt_mean', is_filtered=True, num_prompts=4
):
  rewards = jnp.asarray(samples.rewards, jnp.float32)
  prompts = jnp.asarray(samples.prompts, jnp.int32)
  keep = jnp.asarray(samples.valid)
  if is_filtered:
    keep = filters.zero_variance(
      rewards, prompts, keep, num_prompts=num_prompts
    )
  advantage = advantages.batch_normalized(
    rewards, prompts, keep, num_prompts=num_prompts
  )
  index = jnp.asarray(layout.index, jnp.int32)
  rollout = jnp.maximum(index, 0)
  mask = jnp.asarray(layout.mask) & (index >= 0) & keep[rollout]
  weights = AGGREGATIONS[aggregate](
    mask,
    index,
    prompts,
    num_rollouts=len(samples.policy),
    num_prompts=num_prompts,
  )
  return Terms(
    jnp.asarray(layout.behavior, jnp.float32),
    mask,
    index,
    weights,
    jnp.where(mask, advantage[rollout], 0.0),
  )


def objective(policy, terms, loss, num_rollouts):
  # The double-where: NaN behind the mask must not reach the gradient.
  safe = jnp.where(terms.mask, policy, 0.0)
  behavior = jnp.where(terms.mask, terms.behavior, 0.0)
  per_token = LOSSES[loss](
    safe, behavior, terms.advantages, terms.mask, terms.index, num_rollouts
  )
  return jnp.sum(jnp.where(terms.mask, terms.weights * per_token, 0.0))


def evaluate(samples, layout, loss, **kwargs):
  """Returns the loss and, per rollout, its gradient in log π."""
  terms = make_terms(samples, layout, **kwargs)
  num_rollouts = len(samples.policy)
  value, grad = jax.value_and_grad(objective)(
    jnp.asarray(layout.policy, jnp.float32), terms, loss, num_rollouts
  )
  grad = np.asarray(grad)
  return float(value), [grad[layout.index == i] for i in range(num_rollouts)]


def assert_same(actual, expected):
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)
  for a, e in zip(actual[1], expected[1], strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def assert_nothing(result):
  assert result[0] == 0.0
  for grad in result[1]:
    np.testing.assert_array_equal(grad, 0.0)


@every_loss
def test_the_example_is_not_trivial(loss):
  samples = make_samples()
  value, grads = evaluate(samples, lay_out(samples), loss)
  assert value != 0.0
  assert sum(np.abs(g).sum() for g in grads) > 0.01
  np.testing.assert_array_equal(grads[4][2:4], 0.0)  # Forced tokens.
  np.testing.assert_array_equal(grads[2], 0.0)  # No variance.


@every_aggregation
@every_loss
def test_l08_any_partition_in_microbatches_gives_the_same_gradient(
  loss, aggregate
):
  samples = make_samples()
  layout = lay_out(samples)
  terms = make_terms(samples, layout, aggregate=aggregate)
  policy = jnp.asarray(layout.policy, jnp.float32)
  fn = jax.value_and_grad(objective)
  value, grad = fn(policy, terms, loss, 8)
  for parts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [0, 3, 5], [6, 1, 2, 4]]):
    total = 0.0
    for rows in parts:
      rows = np.array(rows)
      part = Terms(*(x[rows] for x in terms))
      part_value, part_grad = fn(policy[rows], part, loss, 8)
      np.testing.assert_allclose(part_grad, grad[rows], rtol=1e-5, atol=1e-7)
      total += float(part_value)
    np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-6)


@every_aggregation
@every_loss
def test_packed_rows_equal_a_row_per_rollout(loss, aggregate):
  samples = make_samples()
  expected = evaluate(samples, lay_out(samples), loss, aggregate=aggregate)
  rows = [[4, 1, 3], [2, 7, 0], [6, 5], []]
  packed = lay_out(samples, rows=rows, width=13)
  assert_same(evaluate(samples, packed, loss, aggregate=aggregate), expected)


@every_aggregation
@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('width', [5, 11])
@every_loss
def test_p06_l09_padding_width_and_side_do_not_matter(
  loss, width, side, aggregate
):
  samples = make_samples()
  expected = evaluate(samples, lay_out(samples), loss, aggregate=aggregate)
  padded = lay_out(samples, width=width, side=side)
  assert_same(evaluate(samples, padded, loss, aggregate=aggregate), expected)


@every_loss
def test_l13_order_of_the_rollouts_does_not_matter(loss):
  samples = make_samples()
  expected = evaluate(samples, lay_out(samples), loss)
  order = [5, 2, 7, 0, 3, 6, 1, 4]
  permuted = Samples(
    *([x[i] for i in order] for x in samples[:3]),
    *(x[order] for x in samples[3:]),
  )
  value, grads = evaluate(permuted, lay_out(permuted), loss)
  assert_same((value, [grads[order.index(i)] for i in range(8)]), expected)


@every_loss
def test_labels_of_the_prompts_do_not_matter(loss):
  samples = make_samples()
  expected = evaluate(samples, lay_out(samples), loss)
  relabelled = samples._replace(prompts=np.array([5, 0, 2])[samples.prompts])
  assert_same(
    evaluate(relabelled, lay_out(relabelled), loss, num_prompts=7), expected
  )


@every_aggregation
@every_loss
def test_l02_everything_masked_gives_zero_and_finite_gradients(loss, aggregate):
  samples = make_samples()._replace(valid=np.zeros(8, bool))
  layout = lay_out(samples, fill=np.nan)
  assert_nothing(evaluate(samples, layout, loss, aggregate=aggregate))


@every_aggregation
@every_loss
def test_l01_masked_rollouts_equal_absent_rollouts(loss, aggregate):
  samples = make_samples()
  valid = samples.valid.copy()
  valid[[1, 6]] = False
  masked = samples._replace(valid=valid)
  value, grads = evaluate(masked, lay_out(masked), loss, aggregate=aggregate)
  kept = np.flatnonzero(valid)
  without = Samples(
    *([x[i] for i in kept] for x in samples[:3]),
    *(x[kept] for x in samples[3:]),
  )
  expected = evaluate(without, lay_out(without), loss, aggregate=aggregate)
  assert_same((value, [grads[i] for i in kept]), expected)
  np.testing.assert_array_equal(np.concatenate([grads[1], grads[6]]), 0.0)


@every_loss
def test_l27_one_valid_rollout_has_nothing_to_learn_from(loss):
  samples = make_samples()._replace(valid=np.arange(8) == 4)
  layout = lay_out(samples)
  assert_nothing(evaluate(samples, layout, loss))
  unfiltered = evaluate(samples, layout, loss, is_filtered=False)
  if loss in KLS:
    assert np.isfinite(unfiltered[0])
    assert all(np.isfinite(g).all() for g in unfiltered[1])
  else:
    assert_nothing(unfiltered)


@every_loss
def test_zero_variance_everywhere_gives_nothing(loss):
  samples = make_samples()._replace(rewards=np.full(8, 1.0))
  layout = lay_out(samples)
  assert_nothing(evaluate(samples, layout, loss))
  if loss not in KLS:
    assert_nothing(evaluate(samples, layout, loss, is_filtered=False))


@every_loss
def test_l03_mask_is_made_before_the_denominator(loss):
  # Prompt 1 has no variance: to drop it by the filter or by hand is the same.
  samples = make_samples()
  by_hand = samples._replace(valid=samples.prompts != 1)
  assert_same(
    evaluate(samples, lay_out(samples), loss),
    evaluate(by_hand, lay_out(by_hand), loss, is_filtered=False),
  )


@pytest.mark.parametrize('loss', KLS)
def test_l03_kl_applies_where_the_advantage_is_zero(loss):
  # Without the filter a prompt of equal rewards is still pulled back.
  samples = make_samples()
  _, grads = evaluate(samples, lay_out(samples), loss, is_filtered=False)
  assert (grads[2] != 0).all()


@pytest.mark.parametrize('fill', [np.nan, np.inf, -np.inf, 80.0, -80.0])
@every_loss
def test_junk_behind_the_mask_does_not_leak(loss, fill):
  samples = make_samples()
  expected = evaluate(samples, lay_out(samples), loss)
  assert_same(evaluate(samples, lay_out(samples, fill=fill), loss), expected)


@pytest.mark.parametrize('gap', [80.0, -80.0])
@every_loss
def test_extreme_ratios_give_finite_losses_and_gradients(loss, gap):
  samples = make_samples()
  behavior = [b.copy() for b in samples.behavior]
  for i in (0, 1, 4, 5):  # Advantages of both signs.
    behavior[i][0] = samples.policy[i][0] - gap
  extreme = samples._replace(behavior=behavior)
  value, grads = evaluate(extreme, lay_out(extreme), loss)
  assert np.isfinite(value)
  assert all(np.isfinite(g).all() for g in grads)
  if loss == 'cispo':
    ratio = 5.0 if gap > 0 else 0.0
    ordinary = evaluate(samples, lay_out(samples), 'reinforce')[1]
    for i in (0, 1, 4, 5):
      np.testing.assert_allclose(
        grads[i][0], ratio * ordinary[i][0], rtol=1e-5, atol=1e-12
      )


@pytest.mark.parametrize('advantage', [0.0, 1.0, -1.0])
@pytest.mark.parametrize('gap', [80.0, -80.0, 200.0])
@every_loss
def test_extreme_ratio_times_any_advantage_is_a_number(loss, gap, advantage):
  def fn(policy):
    return jnp.sum(
      LOSSES[loss](
        policy,
        jnp.full((1, 2), -300.0 - gap),
        jnp.full((1, 2), advantage),
        jnp.ones((1, 2), bool),
        jnp.zeros((1, 2), jnp.int32),
        1,
      )
    )

  value, grad = jax.value_and_grad(fn)(jnp.full((1, 2), -300.0))
  assert np.isfinite(value)
  assert np.isfinite(grad).all()


@every_loss
def test_losses_work_under_jit_and_vmap(loss):
  samples = make_samples()
  layout = lay_out(samples)
  terms = make_terms(samples, layout)
  policy = jnp.asarray(layout.policy, jnp.float32)

  def value(p):
    return objective(p, terms, loss, 8)

  batched = jax.jit(jax.vmap(value))(jnp.stack([policy, policy - 0.1]))
  np.testing.assert_allclose(
    batched, [value(policy), value(policy - 0.1)], rtol=1e-5, atol=1e-6
  )
