"""A model of the smallest size, requests for it, and its scores of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import models
from scalerl_jax import records


def spec(**changes) -> models.ModelSpec:
  fields = {
    'vocab_size': 18,
    'num_layers': 1,
    'model_dim': 32,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 8,
    'hidden_dim': 48,
  }
  return models.ModelSpec(**(fields | changes))


def moe_spec(**changes) -> models.ModelSpec:
  """A model with all that Scout has: two local layers to each global one."""
  fields = {
    'num_layers': 3,
    'moe': models.MoeSpec(
      num_experts=4,
      experts_per_token=1,
      expert_dim=24,
      router='sigmoid',
      shared_dim=16,
    ),
    'local_attention': models.LocalAttention(
      chunk_tokens=5, global_every=3, floor_tokens=4
    ),
  }
  return spec(**(fields | changes))


@functools.lru_cache
def params(seed: int = 0, model: models.ModelSpec | None = None):
  """Draws parameters; norms and biases too, so that a test sees them."""
  tree = models.init_params(model or spec(), jax.random.key(seed))
  leaves, treedef = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
  leaves = [
    leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)
    for leaf, key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(treedef, leaves)


def request(visit: int, *, num_samples: int = 2, length: int | None = None):
  """Asks about a prompt that is a function of the visit."""
  rng = np.random.default_rng(visit)
  length = 1 + visit % 5 if length is None else length
  prompt = rng.integers(2, 17, length).astype(np.int32)
  return records.Request(
    visit=visit,
    problem_id=f'p{visit}',
    prompt_ids=prompt,
    num_samples=num_samples,
  )


@functools.lru_cache
def _policy_fn(model: models.ModelSpec, temperature: float):
  return jax.jit(models.make_policy_fn(model, temperature=temperature))


def score(weights, sequences, *, temperature=1.0, model=None, width=24):
  """Scores each sequence alone in its row, as the trainer does.

  Column 0 of a result means nothing.
  """
  rows = -(-len(sequences) // 8) * 8  # Few shapes to compile.
  tokens = np.zeros((rows, width), np.int32)
  segments = np.zeros_like(tokens)
  for i, ids in enumerate(sequences):
    tokens[i, : len(ids)] = ids
    segments[i, : len(ids)] = 1
  positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
  scores = _policy_fn(model or spec(), temperature)(
    weights, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments)
  )
  logp = np.asarray(scores.logp)
  return [logp[i, : len(ids)] for i, ids in enumerate(sequences)]
