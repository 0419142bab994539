"""Our kernels of the CPU platform against PyTorch's and SGLang's own.

They run where PyTorch is, in the environment of the servers.
"""

import json
import os
import subprocess

import numpy as np
from scipy import stats

_ATTENTION = """
import itertools, json
from scalerl_jax.generation.sglang import cpu_server
cpu_server.stand_in()
import torch
from sglang.srt.layers.attention import torch_native_backend
from scalerl_jax.generation.sglang import cpu_kernels

torch.manual_seed(0)
theirs = torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode
lengths = torch.tensor([1, 7, 30, 13, 2])
pools = torch.tensor([8, 3, 0, 5, 1])
differences = []
for window, (heads, kv_heads), gathered in itertools.product(
  (None, 5), ((4, 4), (6, 2)), (2**15, 64, 1)
):
  cpu_kernels._GATHERED_TOKENS = gathered
  query = torch.randn(5, heads, 8)
  keys, values = torch.randn(2, 200, kv_heads, 8)
  keys[0] = values[0] = float('nan')  # Of a slot that no sequence has.
  free = iter((1 + torch.randperm(199)).split(lengths.tolist() + [146]))
  table = torch.zeros(9, 40, dtype=torch.int32)
  for pool, length in zip(pools, lengths):
    table[pool, :length] = next(free)
  found = []
  for cls, run in (
    (torch_native_backend.TorchNativeAttnBackend, theirs),
    (None, cpu_kernels.BatchedAttention._run_sdpa_forward_decode),
  ):
    found.append(run(
      cls, query, torch.empty_like(query), keys, values, table, pools, lengths,
      scaling=0.3, enable_gqa=heads != kv_heads, sliding_window_size=window,
    ))
  differences.append(float((found[0] - found[1]).abs().max()))
print(json.dumps(differences))
"""

_SAMPLES = """
import json
from scalerl_jax.generation.sglang import cpu_server
cpu_server.stand_in()
import torch
from scalerl_jax.generation.sglang import cpu_kernels

torch.manual_seed(0)
rows = torch.tensor([[0.0, 0.5, 0.0, 0.125, 0.375, 0.0], [0, 0, 0, 0, 0, 1]])
ids = cpu_kernels.sample(rows.repeat(20_000, 1))
assert ids.dtype == torch.int32 and ids.shape == (40_000,)
counts = [torch.bincount(ids[i::2], minlength=6).tolist() for i in range(2)]
# A float32 sum of 1 does not change by any of these; together they are 1/32.
rare = torch.full((8, 2**20), 2.0**-25)
rare[:, 0] = 1.0
counts.append(sum(int((cpu_kernels.sample(rare) > 0).sum()) for _ in range(32)))
print(json.dumps(counts))
"""


def _answer(python, script):
  environment = {**os.environ, 'SGLANG_PLATFORM': 'scalerl_cpu'}
  run = subprocess.run(
    [python, '-c', script],
    capture_output=True,
    text=True,
    env=environment,
    check=False,
    timeout=300,
  )
  assert run.returncode == 0, run.stderr[-2000:]
  return json.loads(run.stdout.splitlines()[-1])


def test_attention_of_all_sequences_is_that_of_each(sglang_python):
  differences = _answer(sglang_python, _ATTENTION)
  assert len(differences) == 12
  assert max(differences) < 1e-6


def test_samples_follow_the_probabilities(sglang_python):
  counts, certain, rare = _answer(sglang_python, _SAMPLES)
  assert certain == [0, 0, 0, 0, 0, 20_000]
  expected = 20_000 * np.array([0.5, 0.125, 0.375])
  assert [counts[i] for i in (0, 2, 5)] == [0, 0, 0]
  assert stats.chisquare([counts[i] for i in (1, 3, 4)], expected).pvalue > 1e-3
  # Binomial: 256 draws, mean 8, standard deviation 2.8.
  assert 1 <= rare <= 20
