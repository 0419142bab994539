"""Groups by hand or at random, and a policy that is a table of logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import arrays
from scalerl_jax import records
from scalerl_jax.training import batching

VOCAB = 17


def rollout(tokens, logps=None, *, reward=1.0, sampled=None, **changes):
  n = len(tokens)
  made = records.Rollout(
    token_ids=np.array(tokens, np.int32),
    logps=np.full(n, -1.0, np.float32)
    if logps is None
    else np.array(logps, np.float32),
    policy_versions=np.zeros(n, np.int32),
    sampled=np.ones(n, bool) if sampled is None else np.array(sampled),
    finish_reason=records.FinishReason.STOP,
    reward=reward,
  )
  return dataclasses.replace(made, **changes)


def group(visit, *rollouts, prompt=(2,)):
  request = records.Request(
    visit=visit,
    problem_id=f'p{visit}',
    prompt_ids=np.array(prompt, np.int32),
    num_samples=len(rollouts),
  )
  return records.RolloutGroup(
    request=request, rollouts=tuple(rollouts), admitted_version=0
  )


def random_groups(seed=0, *, num_groups=4, group_size=4, max_tokens=7):
  """Groups of mixed lengths; the last has one reward only, and is filtered."""
  rng = np.random.default_rng(seed)
  groups = []
  for visit in range(num_groups):
    rollouts = []
    for sample in range(group_size):
      n = int(rng.integers(1, max_tokens + 1))
      sampled = rng.random(n) > 0.2
      sampled[-1] = True
      reward = 1.0 if visit == num_groups - 1 or sample % 2 else -1.0
      rollouts.append(
        rollout(
          rng.integers(0, VOCAB, n),
          np.where(sampled, rng.normal(-2.8, 0.5, n), 0.0),
          reward=reward,
          sampled=sampled,
          policy_versions=np.sort(rng.integers(0, 3, n)).astype(np.int32),
        )
      )
    prompt = rng.integers(0, VOCAB, 1 + visit % 3)
    groups.append(group(visit, *rollouts, prompt=prompt))
  return groups


def batch(groups, *, num_rows=None, row_tokens=10, **kwargs) -> arrays.Batch:
  if num_rows is None:
    num_rows = sum(len(g.rollouts) for g in groups)
  made, _ = batching.assemble(
    groups, num_rows=num_rows, row_tokens=row_tokens, **kwargs
  )
  return jax.tree.map(jnp.asarray, made)


def table_policy(params, tokens, positions, segment_ids):
  """Every token comes from the same distribution: softmax(params)."""
  del positions, segment_ids
  logp = jax.nn.log_softmax(params)
  entropy = -jnp.sum(jnp.exp(logp) * logp)
  return arrays.TokenScores(logp[tokens], jnp.full(tokens.shape, entropy))
