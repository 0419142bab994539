import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import losses
from tests.losses import logps_test
from tests.reference import losses as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes', 'quick_compilation')

Partial = jax.tree_util.Partial

# (loss of log π, μ or reference, advantages; the same in float64 numpy).
FAMILY = {
  'cispo': (
    functools.partial(losses.cispo, max_ratio=1.5),
    functools.partial(reference.cispo, max_ratio=1.5),
  ),
  'clipped_surrogate': (
    functools.partial(losses.clipped_surrogate, clip_low=0.2, clip_high=0.3),
    functools.partial(reference.clipped_surrogate, clip_low=0.2, clip_high=0.3),
  ),
  'reinforce': (
    lambda logp, _, a: losses.reinforce(logp, a),
    lambda logp, _, a: reference.reinforce(logp, a),
  ),
  **{
    f'kl_k{order}': (
      lambda logp, b, a, fn=fn: a * fn(logp, b),
      lambda logp, b, a, order=order: a * reference.kl(logp, b, order=order),
    )
    for order, fn in enumerate((losses.kl_k1, losses.kl_k2, losses.kl_k3), 1)
  },
}
SETTINGS = {'temperature': 0.7, 'softcap': 3.0}


def make_inputs(dtype=jnp.float32, **kwargs):
  """Hidden, head and targets; behaviour log-probs near the policy's, Â."""
  hidden, head, targets = logps_test.make_inputs(**kwargs)
  inputs = (hidden.astype(dtype), head.astype(dtype), targets)
  logp = losses.token_logps(*inputs, **SETTINGS).logp
  rng = np.random.default_rng(1)
  behavior, advantages = (
    jnp.asarray(rng.normal(0.0, s, targets.shape), jnp.float32)
    for s in (0.3, 1.0)
  )
  return inputs, (logp + behavior, advantages)


def weighted(fn, mask, behavior, advantages, logp):
  """As the train step does it: masked twice."""
  logp = jnp.where(mask, logp, 0.0)
  per_token = fn(logp, jnp.where(mask, behavior, 0.0), advantages)
  return jnp.where(mask, per_token, 0.0)


def fused(hidden, head, targets, fn, args, **kwargs):
  """Three times the loss, so that the scale of a gradient counts."""
  loss, scores = losses.fused_loss(
    hidden, head, targets, loss_fn=Partial(fn, *args), **SETTINGS, **kwargs
  )
  return 3.0 * loss, scores


def unfused(hidden, head, targets, fn, args):
  scores = losses.token_logps(hidden, head, targets, **SETTINGS)
  return 3.0 * jnp.sum(fn(*args, scores.logp)), scores


def gradients(total, inputs, *args, **kwargs):
  return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
    *inputs, *args, **kwargs
  )


def assert_close(actual, expected, tolerance=1e-5):
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(
      a.astype(jnp.float32),
      e.astype(jnp.float32),
      rtol=tolerance,
      atol=tolerance,
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize('name', FAMILY)
# Less than a row, columns that do not divide, all at once.
@pytest.mark.parametrize('chunk_size', [2, 6, None])
def test_it_is_the_loss_of_the_scores(name, chunk_size):
  inputs, args = make_inputs()
  mask = jnp.asarray(np.random.default_rng(2).random((3, 5)) > 0.3)
  fn, exact = FAMILY[name]
  call = (functools.partial(weighted, fn), (mask, *args))
  actual = gradients(fused, inputs, *call, chunk_size=chunk_size)
  assert_close(actual, gradients(unfused, inputs, *call))
  logp, entropy = reference.token_logps(
    *(np.asarray(x, np.float64) for x in inputs[:2]),
    np.asarray(inputs[2]),
    **SETTINGS,
  )
  expected = exact(logp, *(np.asarray(x, np.float64) for x in args))
  (loss, scores), _ = actual
  np.testing.assert_allclose(
    loss, 3 * np.sum(expected, where=np.asarray(mask)), rtol=1e-4
  )
  np.testing.assert_allclose(scores.logp, logp, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(scores.entropy, entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('argument', [0, 1])
def test_gradients_by_finite_differences(argument):
  inputs, args = make_inputs(B=1, T=3, D=2, V=4)
  fn, exact = FAMILY['clipped_surrogate']
  _, grads = gradients(
    fused,
    inputs,
    functools.partial(weighted, fn),
    (jnp.ones((1, 3), bool), *args),
    chunk_size=2,
  )

  def loss(moved):
    values = [np.asarray(x, np.float64) for x in inputs[:2]]
    values[argument] = moved
    logp, _ = reference.token_logps(*values, np.asarray(inputs[2]), **SETTINGS)
    return 3 * np.sum(exact(logp, *(np.asarray(x, np.float64) for x in args)))

  start = np.asarray(inputs[argument], np.float64)
  for i in np.ndindex(start.shape):
    step = np.zeros_like(start)
    step[i] = 1e-6
    numeric = (loss(start + step) - loss(start - step)) / 2e-6
    np.testing.assert_allclose(grads[argument][i], numeric, atol=1e-4)


def test_gradients_have_the_dtypes_of_the_inputs():
  inputs, args = make_inputs(jnp.bfloat16, B=8, T=16, V=64)
  fn = functools.partial(weighted, FAMILY['cispo'][0])
  call = (fn, (jnp.ones((8, 16), bool), *args))
  actual = gradients(fused, inputs, *call, chunk_size=8)
  expected = gradients(unfused, inputs, *call)
  assert [g.dtype for g in actual[1]] == [jnp.bfloat16] * 2
  # The head's adds up in float32 over 16 chunks, so few roundings differ.
  assert_close(actual, expected, tolerance=2**-6)


@pytest.mark.parametrize('share', [0.5, 0.0])
def test_nan_behind_the_mask_reaches_nothing(share):
  inputs, args = make_inputs()
  mask = jnp.asarray(np.random.default_rng(3).random((3, 5)) < share)
  fn = functools.partial(weighted, FAMILY['cispo'][0])
  clean = gradients(fused, inputs, fn, (mask, *args), chunk_size=4)
  hidden_away = [jnp.where(mask, x, jnp.nan) for x in args]
  dirty = gradients(fused, inputs, fn, (mask, *hidden_away), chunk_size=4)
  jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  assert all(np.isfinite(g).all() for g in clean[1])
  assert bool(np.any(clean[1][1])) == (share > 0)


def test_padding_of_the_last_chunk_is_not_seen_by_a_loss_that_divides():
  inputs, (_, advantages) = make_inputs()
  call = (lambda a, logp: logp / a, (advantages,))
  assert_close(
    gradients(fused, inputs, *call, chunk_size=6),
    gradients(unfused, inputs, *call),
    tolerance=1e-4,
  )


def test_under_jit_and_vmap():
  inputs, args = make_inputs()
  fn = functools.partial(weighted, FAMILY['cispo'][0])
  args = (jnp.ones((3, 5), bool), *args)

  def grad(hidden):
    return gradients(fused, (hidden, *inputs[1:]), fn, args, chunk_size=4)[1]

  stacked = jnp.stack([inputs[0], 0.5 * inputs[0]])
  actual = jax.jit(jax.vmap(grad))(stacked)
  expected = [grad(x) for x in stacked]
  assert_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_three_matmuls_with_a_gradient_and_one_without():
  inputs, args = make_inputs()
  fn = functools.partial(weighted, FAMILY['cispo'][0])
  args = (jnp.ones((3, 5), bool), *args)

  def count(function):
    compiled = jax.make_jaxpr(function)(*inputs[:2])
    return str(compiled).count('dot_general[')

  loss = lambda h, w: fused(h, w, inputs[2], fn, args, chunk_size=4)[0]  # noqa: E731
  generic = lambda h, w: unfused(h, w, inputs[2], fn, args)[0]  # noqa: E731
  assert count(loss) == 1
  assert count(jax.grad(loss, argnums=(0, 1))) == 3
  assert count(jax.grad(generic, argnums=(0, 1))) == 4


def test_all_logits_never_exist():
  T, D, V, chunk_size = 512, 8, 1031, 64

  def compiled(size):
    def loss(h, w, y, b, a):
      loss_fn = Partial(losses.cispo, behavior_logp=b, advantages=a)
      return losses.fused_loss(h, w, y, loss_fn=loss_fn, chunk_size=size)[0]

    struct = jax.ShapeDtypeStruct
    return (
      jax.jit(jax.grad(loss, argnums=(0, 1)))
      .lower(
        struct((8, T, D), jnp.float32),
        struct((D, V), jnp.float32),
        struct((8, T), jnp.int32),
        *[struct((8, T), jnp.float32)] * 2,
      )
      .compile()
    )

  text = compiled(chunk_size).as_text()
  assert logps_test.largest_buffer(text, V) == chunk_size * V
  # The same search finds the buffer where it does exist.
  assert logps_test.largest_buffer(compiled(8 * T).as_text(), V) == 8 * T * V


def test_the_scores_carry_no_gradient():
  inputs, args = make_inputs()
  fn = FAMILY['cispo'][0]
  call = (lambda b, a, logp: fn(logp, b, a), args)
  grad = jax.grad(lambda h: jnp.sum(fused(h, *inputs[1:], *call)[1].logp))
  np.testing.assert_array_equal(grad(inputs[0]), 0.0)


def test_an_argument_without_a_value_per_token_is_refused():
  inputs, (behavior, advantages) = make_inputs()
  with pytest.raises(ValueError, match=r'shape \(3, 1\).*per token, \(3, 5\)'):
    fused(*inputs, lambda *_: behavior, (behavior, advantages[:, :1]))
