"""What SGLang's plain PyTorch code takes most of its time for, made faster.

Runs in the environment of the server, which has PyTorch. On two cores, with 64
sequences and 32,768 tokens of vocabulary, `torch.multinomial` takes 39 ms and
inversion less than 1; attention of one sequence at a time takes 4.4 ms a layer
and that of all at once 2.1.
"""

from sglang.srt.layers import sampler
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention import torch_native_backend
import torch

# Keys that are copied out of the pool at one time: 75 MB for SmolLM2-135M.
_GATHERED_TOKENS = 2**15


def install() -> None:
  """Puts both in the place of what SGLang has under the same names."""
  attention_registry.ATTENTION_BACKENDS['torch_native'] = BatchedAttention
  sampler.sampling_from_probs_torch = sample


class BatchedAttention(torch_native_backend.TorchNativeAttnBackend):
  """Decodes several sequences with one call of PyTorch's attention."""

  def _run_sdpa_forward_decode(
    self,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
  ) -> torch.Tensor:
    """Writes attention of one query per sequence, [B, H, D], to `output`."""
    if encoder_lens is not None or is_cross_attn:
      return super()._run_sdpa_forward_decode(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens,
        scaling,
        enable_gqa,
        causal,
        is_cross_attn,
        sliding_window_size,
      )
    step = max(1, _GATHERED_TOKENS // int(seq_lens.max()))
    for start in range(0, len(seq_lens), step):
      part = slice(start, start + step)
      lengths = seq_lens[part, None]
      places = torch.arange(int(lengths.max()), device=lengths.device)
      seen = places < lengths
      if sliding_window_size is not None and sliding_window_size > -1:
        seen &= places >= lengths - 1 - sliding_window_size
      slots = req_to_token[req_pool_indices[part], : len(places)]
      # Of a slot without a token even the product with 0 may not be a number.
      last = slots.gather(1, lengths - 1)
      slots = torch.where(seen, slots, last).flatten()

      keys, values = (
        cache.flatten(1)
        .index_select(0, slots)
        .to(query.dtype)
        .view(*seen.shape, *cache.shape[1:])
        .transpose(1, 2)  # [b, heads, S, D].
        for cache in (k_cache, v_cache)
      )
      output[part] = torch.nn.functional.scaled_dot_product_attention(
        query[part, :, None],
        keys,
        values,
        attn_mask=seen[:, None, None],
        scale=scaling,
        enable_gqa=enable_gqa,
      )[:, :, 0]
    return output


def sample(
  probs: torch.Tensor,
  sampling_seed: torch.Tensor | None = None,
  positions: torch.Tensor | None = None,
) -> torch.Tensor:
  """Draws a token of each row of probabilities by inversion.

  Args:
    probs: Probabilities, or weights in proportion to them, [B, V].
    sampling_seed: None, or a seed per row: SGLang's own sampling then answers.
    positions: Of the drawn tokens in their sequences, where seeds are given.

  Returns:
    Token ids, int32, [B].
  """
  if sampling_seed is not None:
    return _seeded(probs, sampling_seed=sampling_seed, positions=positions)
  # Tokens below 1e-7 would vanish in float32 sums.
  sums = probs.cumsum(dim=-1, dtype=torch.float64)
  drawn = torch.rand(len(probs), 1, dtype=torch.float64) * sums[:, -1:]
  # The first sum above the draw: never that of a token without probability.
  ids = torch.searchsorted(sums, drawn, right=True)
  return ids.clamp_(max=probs.shape[-1] - 1).view(-1).to(torch.int32)


_seeded = sampler.sampling_from_probs_torch
