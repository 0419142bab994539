"""Records what `transformers` computes for small models of every family.

    pip install torch transformers && python tests/hf/record.py

writes tests/data/hf/<family>/: the checkpoint as it was saved, and
expected.npz with the logits and the gradient of one loss. Needed again only
when a family is added.
"""

import pathlib

import numpy as np
import torch
import transformers

_OUT = pathlib.Path(__file__).parents[1] / 'data' / 'hf'
_SIZES = {
  'vocab_size': 48,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 128,
  'attention_dropout': 0.0,
  'initializer_range': 0.3,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 1e4,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
_FAMILIES = {
  'llama3': ('Llama', {'rope_parameters': _LLAMA3}),
  'smollm2': ('Llama', {'tie_word_embeddings': True, 'rope_theta': 1e5}),
  'linear': (
    'Llama',
    {
      'rope_parameters': {
        'rope_type': 'linear',
        'factor': 4.0,
        'rope_theta': 1e4,
      }
    },
  ),
  'qwen2': ('Qwen2', {'tie_word_embeddings': True, 'rms_norm_eps': 1e-5}),
  'qwen3': ('Qwen3', {'head_dim': 8}),
  'qwen3_moe': (
    'Qwen3Moe',
    {
      'head_dim': 8,
      'moe_intermediate_size': 12,
      'num_experts': 6,
      'num_experts_per_tok': 2,
      'norm_topk_prob': True,
      'decoder_sparse_step': 1,
    },
  ),
  # Both chunks and steps of the temperature end within the row.
  'llama4': (
    'Llama4',
    {
      'num_hidden_layers': 4,
      'head_dim': 8,
      'intermediate_size_mlp': 40,
      'num_local_experts': 4,
      'num_experts_per_tok': 1,
      'no_rope_layer_interval': 2,
      'attention_chunk_size': 16,
      'floor_scale': 8,
      'attn_scale': 0.5,
      # As in Scout, nothing is between kept and lowered frequencies.
      'rope_parameters': {**_LLAMA3, 'high_freq_factor': 1.0},
    },
  ),
}
_T = 40


def _as_stored(name, value, kind):
  """Experts of Qwen3 are one array in memory, and many in a file."""
  start, found, part = name.partition('.experts.')
  if not found or kind != 'Qwen3Moe':
    yield name, value
    return
  for i, expert in enumerate(value):
    here = f'{start}.experts.{i}'
    if part == 'down_proj':
      yield f'{here}.down_proj.weight', expert
    else:
      gate, up = np.split(expert, 2)
      yield f'{here}.gate_proj.weight', gate
      yield f'{here}.up_proj.weight', up


def record(family: str) -> None:
  kind, options = _FAMILIES[family]
  text = 'Text' if kind == 'Llama4' else ''
  sizes = {**_SIZES, **options}
  config = getattr(transformers, f'{kind}{text}Config')(**sizes)
  torch.manual_seed(0)
  model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
  with torch.no_grad():  # Norms and biases would else be ones and zeros.
    for p in model.parameters():
      if p.ndim == 1:
        p.add_(0.2 * torch.randn(p.shape))
  out = _OUT / family
  # One of them in several files.
  size = '8KB' if family == 'qwen3' else '1GB'
  model.save_pretrained(out, max_shard_size=size)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, (2, _T))
  # Two sequences in one row, each with positions of its own.
  positions = np.concatenate([np.arange(25), np.arange(_T - 25)])
  segments = np.concatenate([np.zeros(25, int), np.ones(_T - 25, int)])
  batch = torch.tensor(tokens)
  logits = model(batch).logits
  apart = [
    model(batch[:1, part]).logits for part in (slice(0, 25), slice(25, _T))
  ]
  logp = torch.log_softmax(logits[:, :-1], -1)
  chosen = logp.gather(-1, batch[:, 1:, None])[..., 0]
  (-chosen.mean()).backward()
  gradients = {
    f'gradient/{n}': g
    for name, p in model.named_parameters()
    for n, g in _as_stored(name, p.grad.numpy(), kind)
  }
  np.savez_compressed(
    out / 'expected.npz',
    tokens=tokens.astype(np.int32),
    positions=positions.astype(np.int32),
    segments=segments.astype(np.int32),
    logits=logits.detach().numpy(),
    packed_logits=torch.cat(apart, 1).detach().numpy(),
    logps=chosen.detach().numpy(),
    **gradients,
  )


if __name__ == '__main__':
  for name in _FAMILIES:
    record(name)
