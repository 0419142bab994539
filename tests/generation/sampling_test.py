import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.generation import sampling

BELOW_ONE = float(np.float32(1) - np.float32(2**-24))


def draw(logits, uniform, temperature=1.0):
  token, logp = sampling.sample(
    jnp.asarray(logits, jnp.float32),
    jnp.asarray(uniform, jnp.float32),
    temperature=temperature,
  )
  return np.asarray(token), np.asarray(logp)


@pytest.mark.parametrize('temperature', [0.7, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
  n = 4000
  logits = np.random.default_rng(0).normal(size=9) * 2
  # Equally spaced numbers: counts are exact up to rounding at the edges.
  uniform = (np.arange(n) + 0.5) / n
  token, logp = draw(np.tile(logits, (n, 1)), uniform, temperature)
  p = np.exp(logits / temperature)
  p /= p.sum()
  counts = np.bincount(token, minlength=9)
  assert abs(counts - n * p).max() <= 1.001
  np.testing.assert_allclose(logp, np.log(p)[token], rtol=0, atol=1e-5)


def test_hand_values():
  # Cumulative: .2, .5, 1.
  logits = np.log([[0.2, 0.3, 0.5]] * 5)
  token, logp = draw(logits, [0.0, 0.19, 0.21, 0.49, 0.51])
  assert token.tolist() == [0, 0, 1, 1, 2]
  np.testing.assert_allclose(np.exp(logp), [0.2, 0.2, 0.3, 0.3, 0.5], rtol=1e-6)


@pytest.mark.parametrize('uniform', [0.0, 0.5, BELOW_ONE])
def test_tokens_without_probability_are_never_sampled(uniform):
  logits = np.full((1, 6), -np.inf)
  logits[0, 2:4] = [0.0, 1.0]
  token, logp = draw(logits, [uniform])
  assert token[0] == (2 if uniform == 0 else 3)
  assert np.isfinite(logp).all()


@pytest.mark.parametrize('vocab', [3, 256, 257, 700, 4096])
def test_it_is_the_plain_inversion_whatever_the_vocabulary(vocab):
  rng = np.random.default_rng(vocab)
  n = 2000
  logits = np.float32(rng.normal(size=(n, vocab)) * 3)
  # Most tokens are impossible, and so are all of some blocks.
  possible = rng.random((n, vocab)) < 0.02
  possible[np.arange(n), rng.integers(0, vocab, n)] = True
  logits[~possible] = -np.inf
  uniform = np.float32(rng.random(n))
  token, logp = draw(logits, uniform)
  p = np.exp(np.float64(logits - logits.max(1, keepdims=True)))
  p /= p.sum(1, keepdims=True)
  assert possible[np.arange(n), token].all()
  np.testing.assert_allclose(
    logp, np.log(p[np.arange(n), token]), rtol=0, atol=1e-5
  )
  until = np.cumsum(p, axis=1)
  here = np.arange(n)
  low, high = until[here, token] - p[here, token], until[here, token]
  assert (low - 1e-6 <= uniform).all()
  assert (uniform <= high + 1e-6).all()


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('vocab', [2, 50, 4000])
def test_uniforms_at_the_edges_stay_in_the_vocabulary(seed, vocab):
  logits = np.random.default_rng(seed).normal(size=(2, vocab)) * 5
  token, _ = draw(logits, [0.0, BELOW_ONE])
  assert token[0] == 0
  assert 0 < token[1] < vocab


def test_one_certain_token():
  logits = np.array([[0.0, 1e4, 0.0]] * 3)
  token, logp = draw(logits, [0.0, 0.5, BELOW_ONE])
  assert token.tolist() == [1, 1, 1]
  np.testing.assert_array_equal(logp, 0)


def keys(visit, sample, seed=0):
  return sampling.slot_keys(
    jax.random.key(seed),
    jnp.asarray(visit, jnp.int32),
    jnp.asarray(sample, jnp.int32),
  )


def test_keys_are_a_function_of_key_visit_and_sample():
  found = np.asarray(keys([0, 0, 1, 1, 0], [0, 1, 0, 1, 0]))
  np.testing.assert_array_equal(found[0], found[4])
  assert len({tuple(k) for k in found}) == 4
  np.testing.assert_array_equal(found[3], np.asarray(keys([1], [1]))[0])
  assert (found[0] != np.asarray(keys([0], [0], seed=1))[0]).any()


def test_uniforms_differ_by_position_and_are_uniform():
  n = 512
  data = keys(np.arange(n), np.zeros(n))
  first, second, budget = (
    np.asarray(sampling.uniforms(data, jnp.full(n, p, jnp.int32)))
    for p in (0, 1, -1)
  )
  for u in (first, second, budget):
    assert (u >= 0).all()
    assert (u < 1).all()
    # Four standard deviations of the mean of n uniform numbers.
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * n)
  for a, b in ((first, second), (first, budget)):
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)
