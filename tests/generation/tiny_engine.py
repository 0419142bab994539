"""Engines of a tiny model; those of one kind share their compiled code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import length_control
from scalerl_jax import models
from scalerl_jax.generation import decode
from scalerl_jax.generation import jax_engine
from scalerl_jax.models import cache as cache_lib
from tests import tiny_model

STOP_ID = 1
END_THINK_ID = 3
RULE = length_control.Interruption(
  min_tokens=2, max_tokens=5, phrase_ids=(7, STOP_ID, 3), answer_tokens=4
)


def spec(*, interrupt: bool = False, **changes) -> decode.DecodeSpec:
  fields = {
    'model': tiny_model.spec(),
    'num_slots': 4,
    'prompt_tokens': 5,
    'response_tokens': RULE.max_response_tokens,
    'steps_per_dispatch': 5,
    'temperature': 1.0,
    'stop_ids': (STOP_ID,),
    'interruption': RULE if interrupt else None,
  }
  return decode.DecodeSpec(**(fields | changes))


@functools.lru_cache
def _prototype(decode_spec: decode.DecodeSpec) -> jax_engine.JaxEngine:
  return jax_engine.JaxEngine(
    decode_spec, key=jax.random.key(0), prefill_rows=(decode_spec.num_slots,)
  )


def engine(*, key: int = 0, weights: int | None = 0, version: int = 0, **kind):
  """Makes an engine; `weights` is the seed of its parameters."""
  made = _prototype(spec(**kind)).fork(key=jax.random.key(key))
  if weights is not None:
    made.update_weights(tiny_model.params(weights), version)
  return made


def rollouts(groups):
  """Flattens groups to (prompt ids, rollout)."""
  return [(g.request.prompt_ids, r) for g in groups for r in g.rollouts]


def scored(groups, weights, **kwargs):
  """Pairs each rollout with the trainer's log-probs of its tokens."""
  pairs = rollouts(groups)
  sequences = [np.concatenate([p, r.token_ids]) for p, r in pairs]
  logps = tiny_model.score(weights, sequences, **kwargs)
  return [(r, s[len(p) :]) for (p, r), s in zip(pairs, logps, strict=True)]


def scored_in_place(groups, seeds, *, width):
  """Pairs each rollout with log-probs of its tokens, none of them forced.

  The cache is one that was kept through updates: each token goes through the
  model once, with the weights that the token after it was sampled with.

  Args:
    groups: Groups.
    seeds: Version → seed of its parameters.
    width: At least the tokens of the longest row.

  Returns:
    (rollout, log-probs) of each.
  """
  pairs = rollouts(groups)
  tokens = np.zeros((len(pairs), width), np.int32)
  chosen = np.zeros_like(tokens)  # Seed that is used after each token.
  for i, (prompt, r) in enumerate(pairs):
    ids = np.concatenate([prompt, r.token_ids])
    tokens[i, : len(ids)] = ids
    used = [seeds[v] for v in r.policy_versions.tolist()]
    chosen[i, : len(ids) - 1] = [used[0]] * (len(prompt) - 1) + used
  logps = np.asarray(_in_place(tokens, chosen, tuple(set(seeds.values()))))
  return [
    (r, logps[i, len(p) - 1 : len(p) - 1 + len(r.token_ids)])
    for i, (p, r) in enumerate(pairs)
  ]


@functools.partial(jax.jit, static_argnums=2)
def _in_place(tokens, chosen, seeds):
  model = tiny_model.spec()

  def step(kept, column):
    now = tokens[:, column, None]
    position = jnp.full_like(now, column)
    logp, new = jnp.zeros(len(tokens)), kept
    for seed in seeds:
      weights = tiny_model.params(seed)
      out = models.forward(weights, model, now, position, None, kept)
      logits = out.hidden[:, 0] @ models.head_matrix(weights)
      mine = chosen[:, column] == seed
      after = tokens[:, column + 1, None]
      found = jnp.take_along_axis(jax.nn.log_softmax(logits), after, 1)[:, 0]
      logp = jnp.where(mine, found, logp)
      new = jax.tree.map(
        lambda a, b, mine=mine: (
          jnp.where(mine.reshape(-1, *[1] * (a.ndim - 1)), a, b)
          if a.ndim
          else a
        ),
        out.cache,
        new,
      )
    return new, logp

  empty = cache_lib.empty(
    model, num_rows=len(tokens), num_columns=tokens.shape[1]
  )
  _, logps = jax.lax.scan(step, empty, jnp.arange(tokens.shape[1] - 1))
  return logps.T


def assert_same(a, b, *, atol: float = 0.0):
  """Checks that two groups hold the same rollouts."""
  assert a.request.visit == b.request.visit
  for x, y in zip(a.rollouts, b.rollouts, strict=True):
    np.testing.assert_array_equal(x.token_ids, y.token_ids)
    np.testing.assert_array_equal(x.sampled, y.sampled)
    np.testing.assert_array_equal(x.policy_versions, y.policy_versions)
    np.testing.assert_allclose(x.logps, y.logps, rtol=0, atol=atol)
    assert x.finish_reason is y.finish_reason


def run_to_end(made):
  """Steps until nothing is in flight; returns the groups by visit."""
  done = []
  while made.num_in_flight:
    done += made.step()
  return sorted(done, key=lambda g: g.request.visit)
