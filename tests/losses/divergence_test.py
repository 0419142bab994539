import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import losses
from tests.reference import losses as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')

ESTIMATORS = [(losses.kl_k1, 1), (losses.kl_k2, 2), (losses.kl_k3, 3)]


def row(*values):
  return jnp.asarray([values], jnp.float32)


def random_inputs():
  rng = np.random.default_rng(0)
  return -rng.exponential(1.0, (3, 5)), -rng.exponential(1.0, (3, 5))


@pytest.mark.parametrize(
  ('estimator', 'expected'),
  [
    # π = .5, π_ref = .25: log r = -.6931, r = .5.
    (losses.kl_k1, 0.6931),
    (losses.kl_k2, 0.2402),
    (losses.kl_k3, 0.1931),  # .5 - 1 + .6931
  ],
)
def test_kl_by_hand(estimator, expected):
  actual = estimator(jnp.log(row(0.5)), jnp.log(row(0.25)))
  np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize(('estimator', 'order'), ESTIMATORS)
def test_kl_equals_reference(estimator, order):
  policy, ref = random_inputs()
  actual = estimator(
    jnp.asarray(policy, jnp.float32), jnp.asarray(ref, jnp.float32)
  )
  expected = reference.kl(policy, ref, order=order)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('estimator', 'order'), ESTIMATORS)
def test_kl_gradient_in_closed_form(estimator, order):
  policy, ref = random_inputs()
  log_r = ref - policy
  expected = (np.ones_like(log_r), -log_r, 1 - np.exp(log_r))[order - 1]
  actual = jax.grad(
    lambda p: jnp.sum(estimator(p, jnp.asarray(ref, jnp.float32)))
  )(jnp.asarray(policy, jnp.float32))
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('estimator', 'order'), ESTIMATORS)
def test_kl_of_equal_policies_is_zero(estimator, order):
  del order
  policy = row(-0.1, -2.0, -30.0)
  np.testing.assert_array_equal(estimator(policy, policy), 0.0)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
  # Exact expectation over a three-token vocabulary.
  policy = jnp.log(row(0.5, 0.3, 0.2))
  ref = jnp.log(row(0.2, 0.2, 0.6))
  exact = jnp.sum(jnp.exp(policy) * (policy - ref))
  for estimator in (losses.kl_k1, losses.kl_k3):
    mean = jnp.sum(jnp.exp(policy) * estimator(policy, ref))
    np.testing.assert_allclose(mean, exact, rtol=1e-5)
  assert float(jnp.min(losses.kl_k3(policy, ref))) >= 0.0


@pytest.mark.parametrize(('estimator', 'order'), ESTIMATORS)
@pytest.mark.parametrize('gap', [-200.0, -80.0, 80.0, 200.0])
def test_kl_of_extreme_ratios_is_finite(estimator, order, gap):
  del order
  value, grad = jax.value_and_grad(
    lambda p: jnp.sum(estimator(p, row(-300.0 + gap)))
  )(row(-300.0))
  assert np.isfinite(value)
  assert np.isfinite(grad).all()


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize(('estimator', 'order'), ESTIMATORS)
@pytest.mark.parametrize('shape', [(4,), (1, 4), (4, 1), (4, 5)])
def test_l06_kl_never_broadcasts_silently(estimator, order, shape):
  del order
  with pytest.raises(ValueError, match='same shape'):
    estimator(jnp.zeros((4, 4)), jnp.zeros(shape))
