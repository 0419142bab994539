"""`config.json` to a `ModelSpec` and back; what is not implemented is refused.

Both layouts are read: `rope_theta`, `rope_scaling` and `torch_dtype`, and the
newer `rope_parameters` and `dtype`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from scalerl_jax import models
from scalerl_jax.hf import errors


class _Family(NamedTuple):
  """What tells the specifications of one `model_type` from those of others."""

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  router: str | None = None
  is_local: bool = False


# SmolLM2 is a Llama by its type.
_FAMILIES = {
  'llama': _Family('LlamaForCausalLM'),
  'qwen2': _Family('Qwen2ForCausalLM', qkv_bias=True),
  'qwen3': _Family('Qwen3ForCausalLM', qk_norm=True),
  'qwen3_moe': _Family('Qwen3MoeForCausalLM', qk_norm=True, router='softmax'),
  'llama4_text': _Family('Llama4ForCausalLM', router='sigmoid', is_local=True),
}
_SIZES = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'model_dim': 'hidden_size',
  'num_heads': 'num_attention_heads',
}
# Of a mixture of experts, a width that no layer has.
_HIDDEN = {'llama4_text': 'intermediate_size_mlp'}
# Field → the only value that is implemented; another one changes the numbers.
_ONLY: Mapping[str, Any] = {
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
  'is_encoder_decoder': False,
}
_LLAMA3 = {
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'original_max_positions': 'original_max_position_embeddings',
}
_DEFAULT_THETA = 10_000.0
_DEFAULT_EPS = 1e-6


def family(spec: models.ModelSpec) -> str:
  """Finds the `model_type` of a specification.

  Args:
    spec: The model.

  Returns:
    The type.

  Raises:
    HfError: No family has these options.
  """
  wanted = _Family(
    '',
    qkv_bias=spec.qkv_bias,
    qk_norm=spec.qk_norm,
    router=None if spec.moe is None else spec.moe.router,
    is_local=spec.local_attention is not None,
  )
  for kind, found in _FAMILIES.items():
    if found[1:] == wanted[1:]:
      return kind
  named = zip(wanted._fields[1:], wanted[1:], strict=True)
  options = ', '.join(f'{name}={value}' for name, value in named)
  raise errors.HfError(f'no family of Hugging Face has {options}')


def spec_from_hf(
  config: Mapping[str, Any], *, dtype: str = 'bfloat16', remat: str = 'none'
) -> models.ModelSpec:
  """Turns a `config.json` into a specification.

  Of a model that reads images too (`llama4`), that of its text.

  Args:
    config: Its content.
    dtype: As in `ModelSpec`; that of the stored weights does not matter.
    remat: As in `ModelSpec`.

  Returns:
    The specification.

  Raises:
    HfError: A family or an option that is not implemented, or a field that is
      missing or has a value that cannot be used.
  """
  try:
    if config.get('model_type') == 'llama4':
      config = config.get('text_config') or {}
    return _spec(config, dtype, remat)
  except ValueError as error:
    raise errors.HfError(f'config.json: {error}') from None


def config_from_spec(spec: models.ModelSpec, *, dtype: str) -> dict[str, Any]:
  """Makes a `config.json` that `transformers` and SGLang read.

  Args:
    spec: The model.
    dtype: Of the weights that lie beside it.

  Returns:
    Its content, in the layout that old and new versions read.

  Raises:
    HfError: No family has these options.
  """
  kind = family(spec)
  scaling: dict[str, Any] | None = None
  if spec.rope_scaling is not None:
    scaling = {
      'rope_type': spec.rope_scaling.kind,
      'factor': spec.rope_scaling.factor,
    }
    if spec.rope_scaling.kind == 'llama3':
      scaling |= {
        theirs: getattr(spec.rope_scaling, ours)
        for ours, theirs in _LLAMA3.items()
      }
  return {
    'architectures': [_FAMILIES[kind].architecture],
    'model_type': kind,
    **{theirs: getattr(spec, ours) for ours, theirs in _SIZES.items()},
    'intermediate_size': spec.hidden_dim,
    'num_key_value_heads': spec.num_kv_heads,
    'head_dim': spec.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': spec.norm_eps,
    'rope_theta': spec.rope_theta,
    'rope_scaling': scaling,
    'tie_word_embeddings': spec.tied_head,
    'torch_dtype': dtype,
    **_moe_config(spec),
    **_local_config(spec),
  }


def _spec(
  config: Mapping[str, Any], dtype: str, remat: str
) -> models.ModelSpec:
  kind = config.get('model_type')
  if kind not in _FAMILIES:
    raise ValueError(
      f'model_type={kind!r} is not implemented; these are:'
      f' {", ".join(_FAMILIES)}'
    )
  for field, only in _ONLY.items():
    if config.get(field, only) != only:
      raise ValueError(
        f'{field}={config[field]!r} is not implemented, only {only!r} is'
      )
  of_kind = _FAMILIES[kind]
  known = {'full_attention', *(('chunked_attention',) * of_kind.is_local)}
  if others := sorted(set(config.get('layer_types') or ()) - known):
    raise ValueError(
      f'layer_types={others} are not implemented, only {sorted(known)} are'
    )
  names = {**_SIZES, 'hidden_dim': _HIDDEN.get(kind, 'intermediate_size')}
  missing = [name for name in names.values() if config.get(name) is None]
  if missing:
    raise ValueError(f'has no {", ".join(missing)}')
  sizes: dict[str, Any] = {
    ours: _integer(config, name) for ours, name in names.items()
  }
  heads = max(sizes['num_heads'], 1)  # Less is refused below.
  rope = _rope(config)
  if config.get('head_dim') is None and sizes['model_dim'] % heads:
    raise ValueError(
      f'hidden_size={sizes["model_dim"]} must be a multiple of'
      f' num_attention_heads={heads} where no head_dim is given'
    )
  return models.ModelSpec(
    **sizes,
    num_kv_heads=_integer(config, 'num_key_value_heads', heads),
    head_dim=_integer(config, 'head_dim', sizes['model_dim'] // heads),
    rope_theta=_number(rope, 'rope_theta', _DEFAULT_THETA),
    rope_scaling=_scaling(rope, config),
    norm_eps=_number(config, 'rms_norm_eps', _DEFAULT_EPS),
    tied_head=bool(config.get('tie_word_embeddings', False)),
    dtype=dtype,
    remat=remat,
    qkv_bias=of_kind.qkv_bias,
    qk_norm=of_kind.qk_norm,
    moe=_moe(config, of_kind.router, sizes['num_layers']),
    local_attention=_local(config, sizes['num_layers'])
    if of_kind.is_local
    else None,
  )


def _moe(
  config: Mapping[str, Any], router: str | None, num_layers: int
) -> models.MoeSpec | None:
  if router is None:
    return None
  layers = list(range(num_layers))
  if router == 'softmax':
    step = _integer(config, 'decoder_sparse_step', 1)
    if config.get('mlp_only_layers') or step != 1:
      raise ValueError(
        'mlp_only_layers and decoder_sparse_step are not implemented, only'
        ' experts in every layer are'
      )
    # Newer versions of `transformers` write the second name.
    count = 'num_experts' if 'num_experts' in config else 'num_local_experts'
    return models.MoeSpec(
      num_experts=_integer(config, count),
      experts_per_token=_integer(config, 'num_experts_per_tok'),
      expert_dim=_integer(config, 'moe_intermediate_size'),
      router=router,
      normalized=bool(config.get('norm_topk_prob', False)),
    )
  step = _integer(config, 'interleave_moe_layer_step', 1)
  if step != 1 or (config.get('moe_layers') or layers) != layers:
    raise ValueError(
      'moe_layers and interleave_moe_layer_step are not implemented, only'
      ' experts in every layer are'
    )
  width = _integer(config, 'intermediate_size')
  return models.MoeSpec(
    num_experts=_integer(config, 'num_local_experts'),
    experts_per_token=_integer(config, 'num_experts_per_tok'),
    expert_dim=width,
    router=router,
    shared_dim=width,
  )


def _local(config: Mapping[str, Any], num_layers: int) -> models.LocalAttention:
  every = _integer(config, 'no_rope_layer_interval', 4)
  if every < 1:
    raise ValueError(f'no_rope_layer_interval={every} must be at least 1')
  default = [int((i + 1) % every > 0) for i in range(num_layers)]
  flags = config.get('no_rope_layers') or default
  if not isinstance(flags, list):
    raise ValueError(f'no_rope_layers={flags!r} must be a list')
  if 0 in flags:
    every = flags.index(0) + 1
  if [int(bool(f)) for f in flags] != [
    int((i + 1) % every > 0) for i in range(num_layers)
  ]:
    raise ValueError(
      f'no_rope_layers={flags} is not implemented, only every n-th layer'
      ' without positions is'
    )
  types = ['chunked_attention' if f else 'full_attention' for f in flags]
  if (config.get('layer_types') or types) != types:
    raise ValueError(
      'layer_types that differ from no_rope_layers are not implemented'
    )
  if config.get('attention_chunk_size', 1) is None:
    raise ValueError('attention_chunk_size=None is not implemented')
  tuned = config.get('attn_temperature_tuning', True)
  return models.LocalAttention(
    chunk_tokens=_integer(config, 'attention_chunk_size', 8192),
    global_every=every,
    qk_norm=bool(config.get('use_qk_norm', True)),
    scale=_number(config, 'attn_scale', 0.1) if tuned else 0.0,
    floor_tokens=_integer(config, 'floor_scale', 8192),
  )


def _moe_config(spec: models.ModelSpec) -> dict[str, Any]:
  moe = spec.moe
  if moe is None:
    return {}
  chosen = {'num_experts_per_tok': moe.experts_per_token}
  if moe.router == 'softmax':
    if moe.shared_dim:
      raise errors.HfError(f'qwen3_moe has no moe.shared_dim={moe.shared_dim}')
    return chosen | {
      'num_experts': moe.num_experts,
      'moe_intermediate_size': moe.expert_dim,
      'norm_topk_prob': moe.normalized,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  if moe.shared_dim != moe.expert_dim:
    raise errors.HfError(
      f'llama4 has one width of experts, not moe.shared_dim={moe.shared_dim}'
      f' and moe.expert_dim={moe.expert_dim}'
    )
  return chosen | {
    'num_local_experts': moe.num_experts,
    'intermediate_size': moe.expert_dim,
    'intermediate_size_mlp': spec.hidden_dim,
    'interleave_moe_layer_step': 1,
    'moe_layers': list(range(spec.num_layers)),
  }


def _local_config(spec: models.ModelSpec) -> dict[str, Any]:
  local = spec.local_attention
  if local is None:
    return {}
  flags = [int(spec.is_local(i)) for i in range(spec.num_layers)]
  return {
    'attention_chunk_size': local.chunk_tokens,
    'no_rope_layers': flags,
    'no_rope_layer_interval': local.global_every,
    'use_qk_norm': local.qk_norm,
    'attn_temperature_tuning': local.scale > 0,
    'attn_scale': local.scale,
    'floor_scale': local.floor_tokens,
  }


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """`rope_parameters`, or what older files have in its place."""
  found = config.get('rope_parameters')
  if found is None:
    scaling = config.get('rope_scaling')
    if not isinstance(scaling, Mapping | None):
      raise ValueError(f'rope_scaling={scaling!r} must be an object')
    found = {'rope_theta': config.get('rope_theta'), **(scaling or {})}
  if not isinstance(found, Mapping) or any(
    isinstance(v, Mapping) for v in found.values()
  ):
    raise ValueError(
      'rope_parameters that differ between layers are not implemented'
    )
  return found


def _scaling(
  rope: Mapping[str, Any], config: Mapping[str, Any]
) -> models.RopeScaling | None:
  kind = rope.get('rope_type', rope.get('type')) or 'default'
  if kind == 'default':
    return None
  if kind not in ('linear', 'llama3'):
    raise ValueError(
      f'rope_type={kind!r} is not implemented, only default,'
      ' linear and llama3 are'
    )
  needed = {'factor': 'factor'} | (_LLAMA3 if kind == 'llama3' else {})
  # Some files have it beside the others.
  place = config if 'original_max_position_embeddings' in config else {}
  values = {**place, **rope}
  missing = [name for name in needed.values() if values.get(name) is None]
  if missing:
    raise ValueError(f'rope {kind} has no {missing}')
  numbers: dict[str, Any] = {
    ours: _integer(values, theirs)
    if ours == 'original_max_positions'
    else _number(values, theirs)
    for ours, theirs in needed.items()
  }
  return models.RopeScaling(kind=kind, **numbers)


def _integer(
  config: Mapping[str, Any], name: str, default: int | None = None
) -> int:
  value = config.get(name)
  value = default if value is None else value
  if isinstance(value, bool) or not isinstance(value, int):
    raise ValueError(f'{name}={value!r} must be an integer')
  return value


def _number(
  config: Mapping[str, Any], name: str, default: float | None = None
) -> float:
  value = config.get(name)
  value = default if value is None else value
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f'{name}={value!r} must be a number')
  return float(value)
