"""The shape of a decoder-only transformer, and the list of its arrays.

Each parameter is described once, in `parameter_table`: its shape, its logical
axes and its initial scale. Initialization, sharding, the parameter count and
the FLOP count all derive from that table.
"""

import dataclasses
import math
from typing import NamedTuple

_DTYPES = ('float32', 'bfloat16')
_REMAT = ('none', 'dots', 'full')
_ROPE_KINDS = ('linear', 'llama3')
_ROUTERS = ('softmax', 'sigmoid')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are lowered for contexts beyond the pretrained one.

  With λ = 2π / f, the wavelength of a frequency f in tokens:

      linear:  f / factor
      llama3:  f                            where λ < original / high
               f / factor                   where λ > original / low
               (1 - s)·f / factor + s·f     between, s = (original / λ - low)
                                                         / (high - low)

  Attributes:
    kind: `linear` or `llama3` (the Llama 3.1 model card).
    factor: At least 1.
    low_frequency_factor: Of `llama3`, low.
    high_frequency_factor: Of `llama3`, high; at least low.
    original_max_positions: Of `llama3`, the pretrained context in tokens.
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_max_positions: int = 8192

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    if self.kind not in _ROPE_KINDS:
      raise ValueError(
        f'rope_scaling.kind={self.kind!r} must be one of {_ROPE_KINDS}'
      )
    if not 1 <= self.factor < math.inf:
      raise ValueError(
        f'rope_scaling.factor={self.factor} must be at least 1 and finite'
      )
    low, high = self.low_frequency_factor, self.high_frequency_factor
    if not 0 < low <= high < math.inf:
      raise ValueError(
        f'rope_scaling.high_frequency_factor={high} must be finite and at least'
        f' low_frequency_factor={low}, which must be positive'
      )
    if self.original_max_positions < 1:
      raise ValueError(
        'rope_scaling.original_max_positions='
        f'{self.original_max_positions} must be at least 1'
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
  """A mixture of experts in the place of every feed-forward.

  With r = W·x in float32 and S the k experts of the largest r:

      softmax:  y = Σ_{e ∈ S} p_e · FFN_e(x),   p = softmax(r), over S where
                                                `normalized` (Qwen3-MoE)
      sigmoid:  y = Σ_{e ∈ S} FFN_e(σ(r_e)·x)   (Llama 4)

  and FFN_shared(x) is added where there is a shared expert.

  Attributes:
    num_experts: E.
    experts_per_token: k, at most E.
    expert_dim: Width of the feed-forward of an expert.
    router: `softmax` or `sigmoid`.
    normalized: Of `softmax`, whether the weights of a token add up to 1.
    shared_dim: Width of the expert that every token passes; 0: there is none.
  """

  num_experts: int
  experts_per_token: int
  expert_dim: int
  router: str = 'softmax'
  normalized: bool = True
  shared_dim: int = 0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    for name in ('num_experts', 'experts_per_token', 'expert_dim'):
      if getattr(self, name) < 1:
        raise ValueError(f'moe.{name}={getattr(self, name)} must be at least 1')
    if self.experts_per_token > self.num_experts:
      raise ValueError(
        f'moe.experts_per_token={self.experts_per_token} must be at most'
        f' moe.num_experts={self.num_experts}'
      )
    if self.shared_dim < 0:
      raise ValueError(f'moe.shared_dim={self.shared_dim} must be at least 0')
    if self.router not in _ROUTERS:
      raise ValueError(f'moe.router={self.router!r} must be one of {_ROUTERS}')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
  """Attention within chunks, but for every n-th layer (Llama 4).

  A local layer has rotary positions, and its tokens see those of the same
  chunk: floor(p / chunk_tokens) is equal. A global layer has no positions, sees
  the whole sequence, and scales its queries at position p by

      1 + scale · log(1 + floor((p + 1) / floor_tokens))

  Attributes:
    chunk_tokens: Length of a chunk.
    global_every: n; layers n - 1, 2n - 1, ... are global.
    qk_norm: True: RMSNorm without gain over each head of q and k, after the
      rotation, in local layers.
    scale: Of the queries of global layers; 0: they are not scaled.
    floor_tokens: As above.
  """

  chunk_tokens: int
  global_every: int
  qk_norm: bool = True
  scale: float = 0.1
  floor_tokens: int = 8192

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    for name in ('chunk_tokens', 'global_every', 'floor_tokens'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'local_attention.{name}={getattr(self, name)} must be at least 1'
        )
    if not 0 <= self.scale < math.inf:
      raise ValueError(
        f'local_attention.scale={self.scale} must be at least 0 and finite'
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
  """Sizes and options of one decoder-only transformer (hashable, static).

  Attributes:
    vocab_size: Rows of the embedding, V.
    num_layers: Transformer blocks, L.
    model_dim: Width of the residual stream, D.
    num_heads: Query heads, N; a multiple of `num_kv_heads`.
    num_kv_heads: Key-value heads, K.
    head_dim: Width of one head, H; even, for the rotary embedding.
    hidden_dim: Width of the SwiGLU feed-forward, F; not used with `moe`.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: How they are lowered for long contexts; None: not at all.
    norm_eps: Added to the mean square in RMSNorm.
    tied_head: True: the LM head is the transposed embedding.
    qk_norm: True: RMSNorm over each head of q and k, before RoPE (Qwen3).
    qkv_bias: True: q, k and v have biases (Qwen2.5).
    dtype: Of the body's activations; logits are float32 in any case.
    remat: What the backward pass recomputes: `none`, all but matrix products
      (`dots`), or everything (`full`).
    moe: The mixture of experts; None: dense.
    local_attention: Layers that see a part of the sequence; None: there are
      none.
  """

  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  hidden_dim: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tied_head: bool = True
  qk_norm: bool = False
  qkv_bias: bool = False
  dtype: str = 'float32'
  remat: str = 'none'
  rope_scaling: RopeScaling | None = None
  moe: MoeSpec | None = None
  local_attention: LocalAttention | None = None

  def __post_init__(self) -> None:
    """Checks every size and option; raises ValueError."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(f'{field.name}={value} must be at least 1')
    for name in ('rope_theta', 'norm_eps'):
      value = getattr(self, name)
      if not 0 < value < math.inf:
        raise ValueError(f'{name}={value} must be positive and finite')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of'
        f' num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim} must be even (RoPE)')
    if self.dtype not in _DTYPES:
      raise ValueError(f'dtype={self.dtype!r} must be one of {_DTYPES}')
    if self.remat not in _REMAT:
      raise ValueError(f'remat={self.remat!r} must be one of {_REMAT}')

  def is_local(self, layer: int) -> bool:
    """Whether a layer attends within chunks."""
    local = self.local_attention
    return local is not None and (layer + 1) % local.global_every > 0


class ArrayInfo(NamedTuple):
  """One parameter: its shape, the name of each axis, its initial scale."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float | None  # Normal(0, scale); None: ones; 0: zeros.


def parameter_table(spec: ModelSpec) -> dict[str, ArrayInfo]:
  """Lists every array of a model, by its path ('layers/q').

  Arrays of the blocks are stacked on a leading L axis, to be scanned over.
  Projections that write into the residual stream start 1/√(2L) smaller, as in
  GPT-2, so that its variance does not grow with depth.

  Args:
    spec: The model.

  Returns:
    Path → `ArrayInfo`, in the order of the forward pass.
  """
  D, N, K, H = (
    spec.model_dim,
    spec.num_heads,
    spec.num_kv_heads,
    spec.head_dim,
  )
  fan_in = D**-0.5
  residual = (2 * spec.num_layers) ** -0.5
  blocks: dict[str, ArrayInfo] = {
    'attention_norm': ArrayInfo((D,), (None,), None),
    'q': ArrayInfo((D, N, H), ('embed', 'heads', 'head_dim'), fan_in),
    'k': ArrayInfo((D, K, H), ('embed', 'kv_heads', 'head_dim'), fan_in),
    'v': ArrayInfo((D, K, H), ('embed', 'kv_heads', 'head_dim'), fan_in),
    'o': ArrayInfo(
      (N, H, D),
      ('heads', 'head_dim', 'embed'),
      residual * (N * H) ** -0.5,
    ),
    'mlp_norm': ArrayInfo((D,), (None,), None),
  }
  blocks |= _feed_forward(spec, fan_in, residual)
  if spec.qkv_bias:
    blocks['q_bias'] = ArrayInfo((N, H), ('heads', 'head_dim'), 0.0)
    blocks['k_bias'] = ArrayInfo((K, H), ('kv_heads', 'head_dim'), 0.0)
    blocks['v_bias'] = ArrayInfo((K, H), ('kv_heads', 'head_dim'), 0.0)
  if spec.qk_norm:
    blocks['q_norm'] = ArrayInfo((H,), (None,), None)
    blocks['k_norm'] = ArrayInfo((H,), (None,), None)
  table = {'embed': ArrayInfo((spec.vocab_size, D), ('vocab', 'embed'), fan_in)}
  for name, info in blocks.items():
    table[f'layers/{name}'] = ArrayInfo(
      (spec.num_layers, *info.shape), ('layers', *info.axes), info.scale
    )
  table['final_norm'] = ArrayInfo((D,), (None,), None)
  if not spec.tied_head:
    table['head'] = ArrayInfo((D, spec.vocab_size), ('embed', 'vocab'), fan_in)
  return table


def num_parameters(spec: ModelSpec, *, active: bool = False) -> int:
  """Counts the parameters of a model.

  Args:
    spec: The model.
    active: True: those that a token passes through, which of the experts are
      k / E.

  Returns:
    Number of scalars in all arrays; a tied head counts once.
  """
  return sum(
    round(math.prod(i.shape) * (active_fraction(spec, path) if active else 1))
    for path, i in parameter_table(spec).items()
  )


def active_fraction(spec: ModelSpec, path: str) -> float:
  """Tells what part of an array a token passes through.

  Args:
    spec: The model.
    path: Of an array, as in `parameter_table`.

  Returns:
    k / E of the experts, 1 of all else.
  """
  if spec.moe is None or not path.startswith('layers/expert_'):
    return 1.0
  return spec.moe.experts_per_token / spec.moe.num_experts


def _feed_forward(
  spec: ModelSpec, fan_in: float, residual: float
) -> dict[str, ArrayInfo]:
  D, moe = spec.model_dim, spec.moe

  def dense(F: int, prefix: str) -> dict[str, ArrayInfo]:
    return {
      f'{prefix}gate': ArrayInfo((D, F), ('embed', 'mlp'), fan_in),
      f'{prefix}up': ArrayInfo((D, F), ('embed', 'mlp'), fan_in),
      f'{prefix}down': ArrayInfo((F, D), ('mlp', 'embed'), residual * F**-0.5),
    }

  if moe is None:
    return dense(spec.hidden_dim, '')
  E, F = moe.num_experts, moe.expert_dim
  into, out = (
    ('expert', 'expert_embed', 'mlp'),
    ('expert', 'mlp', 'expert_embed'),
  )
  return {
    'router': ArrayInfo((D, E), ('embed', None), fan_in),
    'expert_gate': ArrayInfo((E, D, F), into, fan_in),
    'expert_up': ArrayInfo((E, D, F), into, fan_in),
    'expert_down': ArrayInfo((E, F, D), out, residual * F**-0.5),
    **(dense(moe.shared_dim, 'shared_') if moe.shared_dim else {}),
  }
