"""Activations that are placed by rule change no number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax import sharding
from tests import tiny_model

pytestmark = pytest.mark.usefixtures('quick_compilation')

_SOFTMAX = models.MoeSpec(num_experts=8, experts_per_token=3, expert_dim=12)


_SPECS = {
  'dense': tiny_model.spec(num_layers=2, vocab_size=16),
  'scout': tiny_model.moe_spec(vocab_size=16),
  'softmax': tiny_model.spec(vocab_size=16, moe=_SOFTMAX),
}
_TOKENS = np.random.default_rng(0).integers(0, 16, (16, 12))
_WEIGHTS = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
@functools.partial(jax.value_and_grad, argnums=0)
def _loss(params, spec, mesh):
  policy = models.make_policy_fn(spec, temperature=0.7, mesh=mesh)
  tokens = jnp.asarray(_TOKENS)
  positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
  scores = policy(params, tokens, positions, jnp.ones_like(tokens))
  return jnp.sum(_WEIGHTS * scores.logp)


@pytest.mark.parametrize(
  ('shape', 'kind', 'remat'),
  [
    ((8, 1, 1, 1), 'dense', 'none'),
    ((2, 4, 1, 1), 'dense', 'full'),
    ((2, 2, 2, 1), 'dense', 'none'),
    ((8, 1, 1, 1), 'scout', 'none'),
    ((2, 4, 1, 1), 'scout', 'none'),
    ((2, 2, 2, 1), 'scout', 'none'),
    ((1, 2, 2, 2), 'scout', 'full'),
    ((1, 2, 1, 4), 'softmax', 'none'),
  ],
)
def test_scores_and_gradients_are_those_of_one_device(shape, kind, remat):
  spec = _SPECS[kind]
  params = models.init_params(spec, jax.random.key(0))
  expected = _loss(params, spec, None)
  mesh = sharding.make_mesh(shape)
  placed = jax.device_put(
    params, sharding.param_shardings(models.logical_axes(spec), mesh)
  )
  got = _loss(placed, dataclasses.replace(spec, remat=remat), mesh)
  scale = abs(float(expected[0]))
  np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5 * scale)
  for a, b in zip(*map(jax.tree.leaves, (got[1], expected[1])), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
