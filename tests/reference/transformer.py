"""A transformer in float64 numpy: one sequence, one position, one head."""

import math

import numpy as np


def logits(params, spec, tokens):
  """Returns [T, V]: row t is about the token after t."""
  params = to_float64(params)
  embed = params['embed']
  x = [embed[t] for t in tokens]
  for i in range(spec.num_layers):
    block = {name: w[i] for name, w in params['layers'].items()}
    attended = _attention(block, spec, x)
    x = [a + b for a, b in zip(x, attended, strict=True)]
    x = [a + _mlp(block, spec, a) for a in x]
  head = embed.T if spec.tied_head else params['head']
  return np.stack([_norm(a, params['final_norm'], spec) @ head for a in x])


def logps(params, spec, tokens, *, temperature=1.0):
  """Returns [T]: log-prob of each token given those before it; NaN at 0."""
  scaled = logits(params, spec, tokens) / temperature
  out = np.full(len(tokens), np.nan)
  for t in range(1, len(tokens)):
    row = scaled[t - 1]
    out[t] = row[tokens[t]] - _log_sum_exp(row)
  return out


def entropies(params, spec, tokens, *, temperature=1.0):
  scaled = logits(params, spec, tokens) / temperature
  out = np.full(len(tokens), np.nan)
  for t in range(1, len(tokens)):
    logp = scaled[t - 1] - _log_sum_exp(scaled[t - 1])
    out[t] = -sum(math.exp(v) * v for v in logp)
  return out


def to_float64(tree):
  if isinstance(tree, dict):
    return {k: to_float64(v) for k, v in tree.items()}
  return np.asarray(tree).astype(np.float64)


def _log_sum_exp(row):
  return row.max() + math.log(sum(math.exp(v - row.max()) for v in row))


def _norm(x, scale, spec):
  return scale * x / math.sqrt(np.mean(x * x) + spec.norm_eps)


def _rotate(x, position, spec):
  half = spec.head_dim // 2
  out = np.zeros_like(x)
  for i in range(half):
    angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
    out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
    out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
  return out


def _head(block, spec, name, x, position, head):
  """Query, key or value of one head at one position."""
  y = _norm(x, block['attention_norm'], spec) @ block[name][:, head]
  if spec.qkv_bias:
    y = y + block[f'{name}_bias'][head]
  if spec.qk_norm and name != 'v':
    y = _norm(y, block[f'{name}_norm'], spec)
  return y if name == 'v' else _rotate(y, position, spec)


def _attention(block, spec, x):
  out = [np.zeros(spec.model_dim) for _ in x]
  for n in range(spec.num_heads):
    k = n // (spec.num_heads // spec.num_kv_heads)
    keys = [_head(block, spec, 'k', a, t, k) for t, a in enumerate(x)]
    values = [_head(block, spec, 'v', a, t, k) for t, a in enumerate(x)]
    for t, a in enumerate(x):
      query = _head(block, spec, 'q', a, t, n)
      scores = np.array(
        [query @ keys[s] / math.sqrt(spec.head_dim) for s in range(t + 1)]
      )
      weights = np.exp(scores - _log_sum_exp(scores))
      attended = sum(w * values[s] for s, w in enumerate(weights))
      out[t] = out[t] + attended @ block['o'][n]
  return out


def _mlp(block, spec, x):
  h = _norm(x, block['mlp_norm'], spec)
  gate = h @ block['gate']
  return (gate / (1 + np.exp(-gate)) * (h @ block['up'])) @ block['down']
