import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalerl_jax.models import spec as spec_lib
from scalerl_jax.training import optimizer
from tests import tiny_model


def config(**changes):
  """Rate 0.1 at once, no decay, and a norm that nothing reaches."""
  fields = {
    'learning_rate': 0.1,
    'warmup_steps': 0,
    'weight_decay': 0.0,
    'max_grad_norm': 1e9,
  }
  return optimizer.OptimizerConfig(**(fields | changes))


def trajectory(params, grads, **changes):
  """Parameters after each of the gradients."""
  tx = optimizer.make_optimizer(config(**changes))
  params = jax.tree.map(jnp.asarray, params)
  state = tx.init(params)
  step = jax.jit(lambda g, s, p: _apply(tx, g, s, p))
  visited = []
  for g in grads:
    params, state = step(jax.tree.map(jnp.asarray, g), state, params)
    visited.append(jax.tree.map(np.asarray, params))
  return visited


def _apply(tx, grads, state, params):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def reference(params, grads, config):
  """AdamW in float64, array by array."""
  params = {k: np.float64(v) for k, v in params.items()}
  mu = {k: np.zeros_like(v) for k, v in params.items()}
  nu = {k: np.zeros_like(v) for k, v in params.items()}
  for t, g in enumerate(grads, start=1):
    norm = math.sqrt(sum(float((np.float64(v) ** 2).sum()) for v in g.values()))
    scale = min(1.0, config.max_grad_norm / norm)
    rate = config.learning_rate * min(1.0, t / max(config.warmup_steps, 1))
    for k, p in params.items():
      clipped = scale * np.float64(g[k])
      mu[k] = config.b1 * mu[k] + (1 - config.b1) * clipped
      nu[k] = config.b2 * nu[k] + (1 - config.b2) * clipped**2
      step = mu[k] / (1 - config.b1**t)
      step = step / (np.sqrt(nu[k] / (1 - config.b2**t)) + config.eps)
      params[k] = p - rate * (step + config.weight_decay * p)
  return params


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'warmup_steps': 3},
    {'weight_decay': 0.3},
    {'max_grad_norm': 1.5},
    {'b1': 0.5, 'b2': 0.7, 'eps': 0.1},
    {'b1': 0.0, 'b2': 0.0},
    {'warmup_steps': 9, 'weight_decay': 0.3, 'max_grad_norm': 1.5, 'eps': 0.1},
  ],
)
def test_equals_the_reference(changes):
  rng = np.random.default_rng(0)
  shapes = {'matrix': (3, 4), 'vector': (5,), 'scalar': ()}

  def draw(scale):
    return {
      k: np.array(scale * rng.normal(size=s), np.float32)
      for k, s in shapes.items()
    }

  params = draw(1.0)
  # Norms are about 4.2 times these: some of them are clipped at 1.5.
  grads = [draw(scale) for scale in (1.0, 0.01, 3.0, 0.1, 1.0, 0.3)]
  expected = reference(params, grads, config(**changes))
  found = trajectory(params, grads, **changes)[-1]
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_first_step_has_the_size_of_the_rate_by_hand():
  # m̂ / √v̂ is the sign of the gradient in the first step.
  found = trajectory(np.float32([1, 1, 1]), [np.float32([2, -0.5, 0])])[-1]
  np.testing.assert_allclose(found, [0.9, 1.1, 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
  ('warmup_steps', 'rates'),
  [
    (0, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    (1, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    (2, [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]),
    (4, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]),
    (10, [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]),
  ],
)
def test_the_rate_rises_from_a_fraction_and_is_then_constant(
  warmup_steps, rates
):
  # Gradients that stay 1 make every step as long as its rate.
  found = trajectory(
    np.float32(0), [np.float32(1)] * 6, warmup_steps=warmup_steps
  )
  steps = -np.diff([0.0, *map(float, found)])
  np.testing.assert_allclose(steps, rates, rtol=1e-4)


def test_a_gradient_is_clipped_at_the_norm_of_the_whole_tree():
  # With eps = 1, a first step of gradient g is as long as g / (|g| + 1); the
  # norm of (3, 4) is 5.
  params = {'a': np.float32(0), 'b': np.float32([0])}
  grad = {'a': np.float32(3), 'b': np.float32([4])}
  for max_grad_norm, a, b in (
    (1.0, 0.6 / 1.6, 0.8 / 1.8),
    (5.0, 3 / 4, 4 / 5),
    (6.0, 3 / 4, 4 / 5),
    (math.inf, 3 / 4, 4 / 5),
  ):
    found = trajectory(params, [grad], eps=1.0, max_grad_norm=max_grad_norm)
    np.testing.assert_allclose(found[-1]['a'], -0.1 * a, rtol=1e-5)
    np.testing.assert_allclose(found[-1]['b'], [-0.1 * b], rtol=1e-5)


def test_a_clipped_outlier_leaves_the_moments_small():
  grads = [np.float32([1e6, 0]), np.float32([0.5, 0.5])]
  clipped = trajectory(np.zeros(2, np.float32), grads, max_grad_norm=1.0)
  as_if = [np.float32([1, 0]), np.float32([0.5, 0.5])]
  expected = trajectory(np.zeros(2, np.float32), as_if, max_grad_norm=1.0)
  np.testing.assert_allclose(clipped, expected, rtol=1e-5)


def test_decay_is_times_the_rate_and_apart_from_the_moments():
  # By hand: without a gradient, p shrinks by 1 - 0.1 · 0.5 per step.
  zero = np.float32(0)
  found = trajectory(np.float32(2), [zero, zero], weight_decay=0.5)
  np.testing.assert_allclose(found, [2 * 0.95, 2 * 0.95**2], rtol=1e-6)
  # The gradient's part of a step does not know of the decay.
  grad = np.float32(0.3)
  plain = trajectory(np.float32(2), [grad])[-1]
  decayed = trajectory(np.float32(2), [grad], weight_decay=0.5)[-1]
  np.testing.assert_allclose(plain - decayed, 0.1 * 0.5 * 2, rtol=1e-5)


def test_decay_warms_up_with_the_rate():
  zero = np.float32(0)
  found = trajectory(
    np.float32(1), [zero] * 3, weight_decay=0.5, warmup_steps=2
  )
  np.testing.assert_allclose(found, [0.975, 0.975 * 0.95, 0.975 * 0.95**2])


def test_every_parameter_of_a_model_decays():
  # Norms, biases and the embedding too: the paper exempts none.
  rng = np.random.default_rng(0)
  table = spec_lib.parameter_table(
    tiny_model.spec(qkv_bias=True, qk_norm=True, tied_head=False)
  )
  assert {'layers/q_bias', 'layers/q_norm', 'final_norm', 'head'} <= set(table)
  params = {
    name: np.float32(rng.normal(size=info.shape))
    for name, info in table.items()
  }
  grads = jax.tree.map(np.zeros_like, params)
  found = trajectory(params, [grads], weight_decay=0.5)[-1]
  for name, before in params.items():
    np.testing.assert_allclose(
      found[name], 0.95 * before, rtol=1e-6, err_msg=name
    )


def test_tiny_gradients_take_full_steps():
  # With the usual eps of 1e-8 this step would be 1e-4 of the rate.
  eps = optimizer.OptimizerConfig().eps
  found = trajectory(np.float32(0), [np.float32(1e-12)], eps=eps)[-1]
  np.testing.assert_allclose(found, -0.1, rtol=2e-3)


def test_defaults_are_those_of_the_paper():
  defaults = optimizer.OptimizerConfig()
  assert defaults.learning_rate == 5e-7
  assert defaults.warmup_steps == 100
  assert defaults.eps == 1e-15
  assert defaults.weight_decay == 0.01


@pytest.mark.parametrize(
  ('name', 'value', 'rule'),
  [
    ('learning_rate', 0.0, 'must be positive'),
    ('learning_rate', -1.0, 'must be positive'),
    ('learning_rate', math.nan, 'must be positive'),
    ('eps', 0.0, 'must be positive'),
    ('eps', math.nan, 'must be positive'),
    ('max_grad_norm', 0.0, 'must be positive'),
    ('max_grad_norm', math.nan, 'must be positive'),
    ('warmup_steps', -1, 'must not be negative'),
    ('weight_decay', -0.1, 'must not be negative'),
    ('weight_decay', math.nan, 'must not be negative'),
    ('b1', 1.0, r'must be in \[0, 1\)'),
    ('b2', 1.0, r'must be in \[0, 1\)'),
    ('b2', -0.1, r'must be in \[0, 1\)'),
    ('b1', math.nan, r'must be in \[0, 1\)'),
    ('max_nonfinite_streak', 0, 'must be at least 1'),
  ],
)
def test_an_impossible_value_is_refused_by_name(name, value, rule):
  with pytest.raises(ValueError, match=f'^{name}={value} {rule}'):
    dataclasses.replace(optimizer.OptimizerConfig(), **{name: value})
