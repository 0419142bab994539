import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import losses
from tests.reference import losses as reference

pytestmark = pytest.mark.usefixtures('strict_dtypes')


def make_inputs(B=3, T=5, D=4, V=11, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(0.0, 1.0, (B, T, D)), jnp.float32)
  head = jnp.asarray(rng.normal(0.0, 1.0, (D, V)), jnp.float32)
  return hidden, head, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def total(hidden, head, targets, **kwargs):
  """A scalar that depends on every output with another weight."""
  scores = losses.token_logps(hidden, head, targets, **kwargs)
  scale = jnp.cos(jnp.arange(targets.size, dtype=jnp.float32))
  scale = scale.reshape(targets.shape)
  return jnp.sum(scale * scores.logp + scale[::-1] * scores.entropy)


def test_p01_log_probs_stand_at_their_own_token():
  # Three tokens, V = 3; hidden states are one-hot, so the logits of column t
  # are row h of the head: logs of the probabilities below.
  probs = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.5, 0.25]])
  hidden = jnp.eye(3, dtype=jnp.float32)[None]
  head = jnp.asarray(np.log(probs), jnp.float32)
  scores = losses.token_logps(hidden, head, jnp.asarray([[1, 2, 0]]))
  np.testing.assert_allclose(
    jnp.exp(scores.logp), [[0.2, 0.6, 0.25]], rtol=1e-6
  )
  # -(.7 ln .7 + .2 ln .2 + .1 ln .1) = .8018; .8979; 1.5 ln 2 = 1.0397.
  np.testing.assert_allclose(
    scores.entropy, [[0.8018, 0.8979, 1.0397]], atol=1e-4
  )


@pytest.mark.parametrize('temperature', [0.6, 1.0, 1.7])
@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('chunk_size', [None, 4])
def test_token_logps_equals_reference(temperature, softcap, chunk_size):
  hidden, head, targets = make_inputs()
  kwargs = {'temperature': temperature, 'softcap': softcap}
  scores = losses.token_logps(
    hidden, head, targets, chunk_size=chunk_size, **kwargs
  )
  logp, entropy = reference.token_logps(
    *(np.asarray(x) for x in (hidden, head, targets)), **kwargs
  )
  np.testing.assert_allclose(scores.logp, logp, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(scores.entropy, entropy, rtol=1e-5, atol=1e-5)


# Fewer tokens than rows (1, 2), whole and padded columns, no chunks (15...).
@pytest.mark.parametrize('chunk_size', [1, 2, 4, 5, 7, 14, 15, 16, 10**6])
def test_chunks_change_neither_values_nor_gradients(chunk_size):
  inputs = make_inputs()
  expected = losses.token_logps(*inputs, chunk_size=15)
  actual = losses.token_logps(*inputs, chunk_size=chunk_size)
  grad = jax.grad(total, argnums=(0, 1))
  for a, e in (
    (actual, expected),
    (grad(*inputs, chunk_size=chunk_size), grad(*inputs, chunk_size=15)),
  ):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, e
    )


def test_gradient_of_logp_in_closed_form():
  # d log π(y)/dz = onehot(y) - π, dz/dh = W/τ, dz/dW = h/τ.
  hidden, head, targets = make_inputs()
  temperature = 0.8
  h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
  z = h @ w / temperature
  probs = np.exp(z - z.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  dz = np.eye(w.shape[1])[np.asarray(targets)] - probs
  dh, dw = jax.grad(
    lambda h, w: jnp.sum(
      losses.token_logps(
        h, w, targets, temperature=temperature, chunk_size=4
      ).logp
    ),
    argnums=(0, 1),
  )(hidden, head)
  np.testing.assert_allclose(dh, dz @ w.T / temperature, atol=1e-5)
  np.testing.assert_allclose(
    dw, np.einsum('btd,btv->dv', h, dz) / temperature, atol=1e-5
  )


def test_gradient_of_entropy_by_finite_differences():
  hidden, head, targets = make_inputs(B=1, T=2, D=3, V=5)
  grad = jax.grad(
    lambda h: jnp.sum(losses.token_logps(h, head, targets, softcap=3.0).entropy)
  )(hidden)
  w, y = np.asarray(head, np.float64), np.asarray(targets)
  for i in np.ndindex(hidden.shape):
    up = np.asarray(hidden, np.float64)
    down = up.copy()
    up[i] += 1e-6
    down[i] -= 1e-6
    numeric = (
      reference.token_logps(up, w, y, softcap=3.0)[1].sum()
      - reference.token_logps(down, w, y, softcap=3.0)[1].sum()
    ) / 2e-6
    np.testing.assert_allclose(grad[i], numeric, atol=1e-4)


def test_probabilities_of_all_targets_sum_to_one():
  hidden, head, _ = make_inputs(B=1, T=1)
  V = head.shape[1]
  everywhere = jnp.broadcast_to(hidden, (1, V, hidden.shape[-1]))
  scores = losses.token_logps(
    everywhere, head, jnp.arange(V)[None], temperature=0.7
  )
  np.testing.assert_allclose(jnp.sum(jnp.exp(scores.logp)), 1.0, rtol=1e-5)
  expected = -jnp.sum(jnp.exp(scores.logp) * scores.logp)
  np.testing.assert_allclose(scores.entropy[0, 0], expected, rtol=1e-5)


def test_large_logits_stay_finite():
  hidden, head, targets = make_inputs()
  value, grads = jax.value_and_grad(total, argnums=(0, 1))(
    1e4 * hidden, head, targets, chunk_size=4
  )
  assert np.isfinite(value)
  assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 1.3])
def test_p07_on_policy_ratio_is_one_at_any_temperature(temperature):
  hidden, head, targets = make_inputs(V=50)
  logits = np.asarray(hidden @ head, np.float64) / temperature
  engine = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  behavior = np.take_along_axis(engine, np.asarray(targets)[..., None], -1)
  scores = losses.token_logps(hidden, head, targets, temperature=temperature)
  ratio = np.exp(np.asarray(scores.logp) - behavior[..., 0])
  np.testing.assert_allclose(ratio, 1.0, atol=1e-5)


def test_p07_trainer_without_the_temperature_would_be_off():
  hidden, head, targets = make_inputs(V=50)
  sampled = losses.token_logps(hidden, head, targets, temperature=0.5)
  rescored = losses.token_logps(hidden, head, targets)
  assert float(jnp.max(jnp.abs(sampled.logp - rescored.logp))) > 0.5


@pytest.mark.parametrize('temperature', [0.0, -1.0, float('nan')])
def test_p09_temperature_zero_is_refused(temperature):
  with pytest.raises(ValueError, match=r'temperature=.*engine sampled with'):
    losses.token_logps(*make_inputs(), temperature=temperature)


def test_p12_tied_bfloat16_embedding_gives_float32_logits():
  hidden, head, targets = make_inputs(D=64, V=300)
  embedding = head.T.astype(jnp.bfloat16)
  scores = losses.token_logps(hidden.astype(jnp.bfloat16), embedding.T, targets)
  assert embedding.dtype == jnp.bfloat16
  assert scores.logp.dtype == jnp.float32
  assert scores.entropy.dtype == jnp.float32
  # Bfloat16 logits would be off by 2^-8 of their size; these are not.
  exact, _ = reference.token_logps(
    *(np.asarray(x, np.float64) for x in (hidden.astype(jnp.bfloat16),)),
    np.asarray(embedding.T, np.float64),
    np.asarray(targets),
  )
  np.testing.assert_allclose(scores.logp, exact, rtol=1e-5)


def test_p13_gradients_flow_from_float32_logits_to_a_bfloat16_body():
  hidden, head, targets = make_inputs()
  grads = jax.grad(total, argnums=(0, 1))(
    hidden.astype(jnp.bfloat16), head, targets, chunk_size=4
  )
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
  assert all(float(jnp.sum(jnp.abs(g).astype(jnp.float32))) > 0 for g in grads)


def test_bfloat16_head_gradient_adds_up_in_float32_over_chunks():
  hidden, head, targets = make_inputs(B=8, T=64, V=64)
  head = head.astype(jnp.bfloat16)
  grad = jax.grad(lambda w, c: total(hidden, w, targets, chunk_size=c))
  whole, chunked = grad(head, 10**6), grad(head, 8)
  # One rounding at the end, whatever the chunks: equal to the last bit or so.
  np.testing.assert_allclose(
    chunked.astype(jnp.float32), whole.astype(jnp.float32), rtol=2**-7
  )


def test_p14_no_copy_of_the_head_goes_stale():
  hidden, head, targets = make_inputs()
  score = jax.jit(losses.token_logps)
  score(hidden, head, targets)
  updated = score(hidden, head + 0.1 * head[::-1], targets)
  fresh = losses.token_logps(hidden, head + 0.1 * head[::-1], targets)
  np.testing.assert_allclose(updated.logp, fresh.logp, rtol=1e-5)


def test_p15_head_is_cast_in_the_forward_pass_and_not_in_place():
  hidden, head, targets = make_inputs()
  stored = head.astype(jnp.bfloat16)
  before = np.asarray(stored)
  losses.token_logps(hidden, stored, targets)
  assert stored.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(stored), before)


def compile_gradient(B, T, D, V, chunk_size, sharding=None):
  def struct(shape, dtype, placed=True):
    where = sharding if placed else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  fn = jax.jit(
    jax.grad(
      lambda h, w, y: total(h, w, y, chunk_size=chunk_size), argnums=(0, 1)
    )
  )
  return fn.lower(
    struct((B, T, D), jnp.float32),
    struct((D, V), jnp.float32, placed=False),
    struct((B, T), jnp.int32),
  ).compile()


def largest_buffer(hlo_text, V):
  shapes = re.findall(r'\b[a-z]+\d*\[([\d,]+)\]', hlo_text)
  dims = [[int(d) for d in shape.split(',')] for shape in shapes]
  return max(math.prod(d) for d in dims if V in d)


@pytest.mark.parametrize('B', [8, 7, 96])
def test_m01_all_logits_never_exist_forward_or_backward(B):
  T, D, V, chunk_size = 512, 8, 1031, 64
  text = compile_gradient(B, T, D, V, chunk_size).as_text()
  assert chunk_size * V / 2 < largest_buffer(text, V) <= chunk_size * V
  # The same search finds the buffer where it does exist.
  whole = compile_gradient(B, T, D, V, B * T).as_text()
  assert largest_buffer(whole, V) == B * T * V


def test_m01_peak_memory_does_not_grow_with_tokens_times_vocabulary():
  D, V, chunk_size = 8, 1031, 64
  small, large = (
    compile_gradient(8, T, D, V, chunk_size).memory_analysis()
    for T in (128, 1024)
  )
  growth = large.temp_size_in_bytes - small.temp_size_in_bytes
  # A few values per token and hidden size, against 4·V bytes for its logits.
  assert growth / (8 * (1024 - 128)) < 4 * V / 10


def test_m01_default_chunk_bounds_the_logits_of_a_large_vocabulary():
  V = 2**18
  jaxpr = jax.make_jaxpr(losses.token_logps)(
    jax.ShapeDtypeStruct((4, 4096, 4), jnp.float32),
    jax.ShapeDtypeStruct((4, V), jnp.float32),
    jax.ShapeDtypeStruct((4, 4096), jnp.int32),
  )
  assert largest_buffer(str(jaxpr), V) == 512 * V


def test_few_tokens_take_no_loop():
  hidden, head, targets = make_inputs()
  jaxpr = str(jax.make_jaxpr(losses.token_logps)(hidden, head, targets))
  assert 'scan' not in jaxpr
  assert 'while' not in jaxpr


@pytest.mark.parametrize('B', [16, 24])
def test_devices_score_their_own_rows_only(B):
  # 24: rows of a chunk would not divide among 8 devices, columns do.
  mesh = jax.make_mesh(
    (8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  T, D, V = 32, 4, 1031
  compiled = compile_gradient(B, T, D, V, B * T // 2, sharding=rows)
  text = compiled.as_text()
  assert 'all-gather' not in text
  assert 'all-to-all' not in text
  assert largest_buffer(text, V) == B * T // 2 // 8 * V

  hidden, head, targets = make_inputs(B=B, T=T, D=D, V=V)
  expected = jax.grad(total, argnums=(0, 1))(hidden, head, targets)
  actual = compiled(
    jax.device_put(hidden, rows),
    jax.device_put(
      head, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ),
    jax.device_put(targets, rows),
  )
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures('unchecked_signatures')
def test_l06_shapes_that_do_not_fit_are_an_error():
  hidden, head, targets = make_inputs()
  for bad in (
    (hidden, head.T, targets),
    (hidden, head, targets[:, 1:]),
    (hidden, head, targets[:1]),
  ):
    with pytest.raises(ValueError, match=r'must be \[B, T, D\]'):
      losses.token_logps(*bad)


def test_chunk_size_zero_is_an_error():
  with pytest.raises(ValueError, match='chunk_size=0'):
    losses.token_logps(*make_inputs(), chunk_size=0)
