"""`config.json` to a `ModelSpec` and back; what is not implemented is refused.

Both layouts are read: `rope_theta`, `rope_scaling` and `torch_dtype`, and the
newer `rope_parameters` and `dtype`.
"""

from collections.abc import Mapping
from typing import Any

from scalerl_jax import models
from scalerl_jax.hf import errors

# Of a family: whether q, k and v have biases, and q and k norms. SmolLM2 is a
# Llama by its type.
_FAMILIES = {
  'llama': {'qkv_bias': False, 'qk_norm': False},
  'qwen2': {'qkv_bias': True, 'qk_norm': False},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
}
_ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}
_SIZES = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'model_dim': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'hidden_dim': 'intermediate_size',
}
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


def spec_from_hf(
  config: Mapping[str, Any], *, dtype: str = 'bfloat16', remat: str = 'none'
) -> models.ModelSpec:
  """Turns a `config.json` into a specification.

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
  options = {'qkv_bias': spec.qkv_bias, 'qk_norm': spec.qk_norm}
  kind = next((k for k, v in _FAMILIES.items() if v == options), None)
  if kind is None:
    raise errors.HfError(f'no family of Hugging Face has {options}')
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
    'architectures': [_ARCHITECTURES[kind]],
    'model_type': kind,
    **{theirs: getattr(spec, ours) for ours, theirs in _SIZES.items()},
    'num_key_value_heads': spec.num_kv_heads,
    'head_dim': spec.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': spec.norm_eps,
    'rope_theta': spec.rope_theta,
    'rope_scaling': scaling,
    'tie_word_embeddings': spec.tied_head,
    'torch_dtype': dtype,
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
  layers = config.get('layer_types') or ()
  if others := sorted(set(layers) - {'full_attention'}):
    raise ValueError(
      f"layer_types={others} are not implemented, only 'full_attention' is"
    )
  missing = [name for name in _SIZES.values() if config.get(name) is None]
  if missing:
    raise ValueError(f'has no {", ".join(missing)}')
  sizes: dict[str, Any] = {
    ours: _integer(config, name) for ours, name in _SIZES.items()
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
    **_FAMILIES[kind],
  )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """`rope_parameters`, or what older files have in its place."""
  found = config.get('rope_parameters')
  if found is None:
    scaling = config.get('rope_scaling')
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
