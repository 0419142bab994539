"""Losses in float64 numpy, one token at a time, with `math` only."""

import math

import numpy as np

# What the implementation bounds log-ratios of clipped losses to.
_BOUND = 20.0


def cispo(policy, behavior, advantages, *, max_ratio, ratio_policy=None):
  """`ratio_policy`: where given, the (frozen) policy of the ratio."""
  frozen = policy if ratio_policy is None else ratio_policy
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    ratio = math.exp(frozen[i] - behavior[i])
    out[i] = -min(ratio, max_ratio) * advantages[i] * policy[i]
  return out


def clipped_surrogate(policy, behavior, advantages, *, clip_low, clip_high):
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    out[i] = _clip_one(
      policy[i] - behavior[i], advantages[i], clip_low, clip_high
    )
  return out


def gspo(
  policy, behavior, advantages, mask, rollout_index, *, clip_low, clip_high
):
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    if not mask[i] or rollout_index[i] < 0:
      continue
    mine = [
      policy[j] - behavior[j]
      for j in np.ndindex(policy.shape)
      if mask[j] and rollout_index[j] == rollout_index[i]
    ]
    mean = sum(mine) / len(mine)
    out[i] = _clip_one(mean, advantages[i], clip_low, clip_high)
  return out


def reinforce(policy, advantages):
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    out[i] = -advantages[i] * policy[i]
  return out


def kl(policy, reference, *, order):
  out = np.zeros(policy.shape)
  for i in np.ndindex(policy.shape):
    log_r = reference[i] - policy[i]
    out[i] = (-log_r, log_r**2 / 2, math.exp(log_r) - 1 - log_r)[order - 1]
  return out


def token_logps(hidden, head, targets, *, temperature=1.0, softcap=None):
  """One token at a time, from the definition of softmax and entropy."""
  logp, entropy = np.zeros(targets.shape), np.zeros(targets.shape)
  for i in np.ndindex(targets.shape):
    z = [float(hidden[i] @ head[:, v]) for v in range(head.shape[1])]
    if softcap is not None:
      z = [softcap * math.tanh(x / softcap) for x in z]
    z = [x / temperature for x in z]
    high = max(z)
    log_z = high + math.log(sum(math.exp(x - high) for x in z))
    logp[i] = z[targets[i]] - log_z
    entropy[i] = -sum(math.exp(x - log_z) * (x - log_z) for x in z)
  return logp, entropy


def _clip_one(log_ratio, advantage, low, high):
  ratio = math.exp(min(max(log_ratio, -_BOUND), _BOUND))
  clipped = min(max(ratio, 1 - low), 1 + high)
  return -min(ratio * advantage, clipped * advantage)
