"""Mixtures of experts against loops in numpy."""

import itertools

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax.models import moe
from tests import tiny_model

pytestmark = pytest.mark.usefixtures('quick_compilation')

SOFTMAX = models.MoeSpec(num_experts=5, experts_per_token=2, expert_dim=7)
SIGMOID = models.MoeSpec(
  num_experts=4, experts_per_token=1, expert_dim=7, router='sigmoid'
)
D = 6


def _groups(num_rows, num_groups, *, total, seed=0):
  rng = np.random.default_rng(seed)
  sizes = rng.multinomial(total, rng.dirichlet(np.ones(num_groups) / 2))
  x = rng.normal(size=(num_rows, D)).astype(np.float32)
  w = rng.normal(size=(num_groups, D, 3)).astype(np.float32)
  g = rng.normal(size=(num_rows, 3)).astype(np.float32)
  return x, w, g, sizes


def _products(x, w, g, sizes):
  """Products, and the gradients of their sum weighed by g."""
  y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), w * 0.0
  ends = np.cumsum(sizes)
  for e, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
    y[start:stop] = x[start:stop] @ w[e]
    dx[start:stop] = g[start:stop] @ w[e].T
    dw[e] = x[start:stop].T @ g[start:stop]
  return y, dx, dw


# The second has groups of several blocks, the last one row a group and less.
@pytest.mark.parametrize(
  ('num_rows', 'num_groups', 'total'),
  [(20, 3, 20), (700, 2, 640), (40, 4, 31), (3, 8, 2), (4, 2, 0)],
)
def test_grouped_products_are_those_of_each_group(num_rows, num_groups, total):
  x, w, g, sizes = _groups(num_rows, num_groups, total=total)
  expected = _products(x, w, g, sizes)

  def weighed(x, w):
    y = moe.grouped_matmul(x, w, jnp.asarray(sizes))
    return jnp.sum(y * g), y

  grad_fn = jax.jit(jax.grad(weighed, argnums=(0, 1), has_aux=True))
  (dx, dw), y = grad_fn(x, w)
  for got, wanted in zip((y, dx, dw), expected, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


def test_what_accelerators_run_gives_the_same():
  x, w, g, sizes = _groups(40, 4, total=31)
  y, _, dw = _products(x, w, g, sizes)
  x, w, g, sizes = map(jnp.asarray, (x, w, g, sizes))
  np.testing.assert_allclose(moe._ragged_dot(x, w, sizes), y, atol=1e-5)
  np.testing.assert_allclose(moe._ragged_outer(x, g, sizes), dw, atol=1e-5)


def _layer(kind, seed=0):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)

  E, F = kind.num_experts, kind.expert_dim
  return {
    'router': draw(D, E),
    'expert_gate': draw(E, D, F),
    'expert_up': draw(E, D, F),
    'expert_down': draw(E, F, D),
  }


def _reference(block, kind, x):
  """One token at a time, in float64."""
  out = np.zeros_like(x, dtype=np.float64)
  for at in np.ndindex(x.shape[:-1]):
    token = x[at].astype(np.float64)
    logits = token @ block['router']
    chosen = np.argsort(-logits)[: kind.experts_per_token]
    probs = np.exp(logits) / np.exp(logits).sum()
    for e in chosen:
      scale, weight = 1.0, probs[e]
      if kind.router == 'sigmoid':
        scale, weight = 1 / (1 + np.exp(-logits[e])), 1.0
      elif kind.normalized:
        weight = probs[e] / probs[chosen].sum()
      inner = scale * token
      gated = inner @ block['expert_gate'][e]
      gated = gated / (1 + np.exp(-gated)) * (inner @ block['expert_up'][e])
      out[at] += weight * (gated @ block['expert_down'][e])
  return out


def _apply(block, kind, x, replayed=None):
  spec = tiny_model.spec(model_dim=D, moe=kind)
  block = {name: jnp.asarray(w) for name, w in block.items()}
  weights, routing = moe.route(x, block['router'], kind, replayed)
  return moe.feed_forward(block, spec, x, weights, routing.experts), routing


@pytest.mark.parametrize(
  'kind',
  [
    SOFTMAX,
    SIGMOID,
    models.MoeSpec(
      num_experts=3, experts_per_token=2, expert_dim=4, normalized=False
    ),
  ],
)
@pytest.mark.parametrize('max_pairs', [2**14, 10])
def test_a_layer_is_the_sum_over_its_experts(monkeypatch, kind, max_pairs):
  monkeypatch.setattr(moe, '_MAX_PAIRS', max_pairs)
  block = _layer(kind)
  x = np.random.default_rng(1).normal(size=(3, 8, D)).astype(np.float32)
  got, _ = _apply(block, kind, jnp.asarray(x))
  np.testing.assert_allclose(got, _reference(block, kind, x), rtol=0, atol=2e-4)


def test_no_token_is_dropped_where_all_choose_one_expert():
  block = _layer(SIGMOID)
  block['router'][:] = 0
  block['router'][0, 2] = 50.0
  x = np.random.default_rng(1).normal(size=(2, 300, D)).astype(np.float32)
  x[..., 0] = np.abs(x[..., 0])
  got, routing = _apply(block, SIGMOID, jnp.asarray(x))
  assert np.all(np.asarray(routing.experts) == 2)
  np.testing.assert_allclose(
    got, _reference(block, SIGMOID, x), rtol=1e-4, atol=1e-3
  )


def test_entropy_is_that_of_the_router():
  x = jnp.asarray([[[1.0, 0, 0, 0, 0, 0]]])
  router = np.zeros((D, 4), np.float32)
  _, routing = moe.route(x, jnp.asarray(router), SIGMOID)
  np.testing.assert_allclose(routing.entropy, [[np.log(4)]], rtol=1e-6)
  router[0] = np.log([0.5, 0.25, 0.125, 0.125])
  _, routing = moe.route(x, jnp.asarray(router), SIGMOID)
  np.testing.assert_allclose(routing.entropy, [[1.75 * np.log(2)]], rtol=1e-6)


def test_m04_replayed_experts_are_taken_and_weighed_by_the_trainer():
  block = _layer(SOFTMAX)
  x = np.random.default_rng(1).normal(size=(1, 4, D)).astype(np.float32)
  own, chosen = _apply(block, SOFTMAX, jnp.asarray(x))
  experts = np.asarray(chosen.experts)
  # The first token replays its own choice in another order, the second others,
  # the third none at all.
  replayed = experts.copy()
  replayed[0, 0] = experts[0, 0, ::-1]
  replayed[0, 1] = (experts[0, 1] + 1) % 5
  replayed[0, 2] = -1
  got, routing = _apply(block, SOFTMAX, jnp.asarray(x), jnp.asarray(replayed))
  changed = set(experts[0, 1]) != set(replayed[0, 1])
  assert changed
  np.testing.assert_array_equal(routing.replayed, [[True, True, False, True]])
  np.testing.assert_array_equal(routing.agreed, [[True, False, False, True]])
  np.testing.assert_array_equal(routing.experts[0, 2], experts[0, 2])
  np.testing.assert_allclose(got[0, [0, 2, 3]], own[0, [0, 2, 3]], atol=1e-5)
  # Weights are those of the trainer's router, over the replayed experts.
  logits = x[0, 1] @ block['router']
  weights, _ = moe.route(
    *map(jnp.asarray, (x, block['router'])), SOFTMAX, jnp.asarray(replayed)
  )
  expected = np.exp(logits[replayed[0, 1]])
  np.testing.assert_allclose(
    weights[0, 1], expected / expected.sum(), rtol=1e-5
  )


@pytest.mark.parametrize('kind', [SOFTMAX, SIGMOID])
def test_the_router_is_trained(kind):
  block = _layer(kind)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, D)), jnp.float32)

  def loss(router, x):
    y, _ = _apply({**block, 'router': router}, kind, jnp.asarray(x))
    return jnp.sum(jnp.sin(y))

  test_util.check_grads(
    loss,
    (jnp.asarray(block['router']), x),
    order=1,
    modes=['rev'],
    eps=1e-3,
    rtol=2e-2,
  )


def test_rows_can_be_permuted():
  spec = tiny_model.moe_spec()
  params = tiny_model.params(0, spec)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(0, 18, (4, 9)))
  positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
  ones = jnp.ones_like(tokens)
  run = jax.jit(
    lambda t: models.forward(params, spec, t, positions, ones).hidden
  )
  order = np.array([2, 0, 3, 1])
  np.testing.assert_allclose(run(tokens[order]), run(tokens)[order], atol=1e-5)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_experts': 0}, 'moe.num_experts=0 must be at least 1'),
    ({'experts_per_token': 6}, 'moe.experts_per_token=6 must be at most'),
    ({'router': 'hash'}, "moe.router='hash' must be one of"),
    ({'shared_dim': -1}, 'moe.shared_dim=-1 must be at least 0'),
  ],
)
def test_bad_mixtures_are_refused(changes, message):
  fields = {'num_experts': 5, 'experts_per_token': 2, 'expert_dim': 7}
  with pytest.raises(ValueError, match=message):
    models.MoeSpec(**(fields | changes))


def test_replay_needs_experts():
  spec = tiny_model.spec()
  tokens = jnp.zeros((1, 2), jnp.int32)
  with pytest.raises(ValueError, match='without experts'):
    models.forward(
      tiny_model.params(),
      spec,
      tokens,
      tokens,
      tokens,
      routed_experts=jnp.zeros((1, 2, 1, 1), jnp.int32),
    )
