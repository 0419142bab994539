"""Advantages, weights and filters in float64 numpy, by explicit loops."""

import numpy as np


def _others(prompt_index, valid, i, *, with_self):
  return [
    j
    for j in range(len(valid))
    if valid[j] and prompt_index[j] == prompt_index[i] and (with_self or j != i)
  ]


def centered(rewards, prompt_index, valid):
  out = np.zeros(len(rewards))
  for i in np.flatnonzero(valid):
    mine = _others(prompt_index, valid, i, with_self=True)
    out[i] = rewards[i] - sum(rewards[j] for j in mine) / len(mine)
  return out


def group_normalized(rewards, prompt_index, valid, eps=1e-6):
  difference = centered(rewards, prompt_index, valid)
  out = np.zeros(len(rewards))
  for i in np.flatnonzero(valid):
    mine = _others(prompt_index, valid, i, with_self=True)
    out[i] = difference[i] / (np.std(difference[mine]) + eps)
  return out


def batch_normalized(rewards, prompt_index, valid):
  difference = centered(rewards, prompt_index, valid)
  kept = [difference[i] for i in np.flatnonzero(valid)]
  std = np.std(kept) if kept else 0.0
  return difference / std if std > 1e-9 else np.zeros(len(rewards))


def leave_one_out(rewards, prompt_index, valid):
  out = np.zeros(len(rewards))
  for i in np.flatnonzero(valid):
    others = _others(prompt_index, valid, i, with_self=False)
    if others:
      out[i] = rewards[i] - sum(rewards[j] for j in others) / len(others)
  return out


def zero_variance(rewards, prompt_index, valid, tolerance=1e-6):
  keep = np.zeros(len(rewards), bool)
  for i in np.flatnonzero(valid):
    mine = [rewards[j] for j in _others(prompt_index, valid, i, with_self=True)]
    keep[i] = max(mine) - min(mine) > tolerance
  return keep


def weights(kind, mask, rollout_index, prompt_of_rollout, *, length=None):
  """`kind` is the name of the function in `aggregation`."""
  tokens = [
    (i, int(rollout_index[i]))
    for i in np.ndindex(mask.shape)
    if mask[i] and rollout_index[i] >= 0
  ]
  rollouts = {r for _, r in tokens}
  prompts = {int(prompt_of_rollout[r]) for r in rollouts}
  out = np.zeros(mask.shape)
  for i, r in tokens:
    prompt = prompt_of_rollout[r]
    of_rollout = sum(1 for _, q in tokens if q == r)
    of_prompt = sum(1 for _, q in tokens if prompt_of_rollout[q] == prompt)
    out[i] = {
      'token_mean': lambda: 1 / len(tokens),
      'sequence_mean': lambda n=of_rollout: 1 / len(rollouts) / n,
      'prompt_mean': lambda n=of_prompt: 1 / len(prompts) / n,
      'fixed_length': lambda: 1 / len(rollouts) / length,
    }[kind]()
  return out
