"""Decoder-only transformers: what they are made of and how they run."""

from scalerl_jax.models.cache import KVCache as KVCache
from scalerl_jax.models.moe import Routing as Routing
from scalerl_jax.models.spec import LocalAttention as LocalAttention
from scalerl_jax.models.spec import ModelSpec as ModelSpec
from scalerl_jax.models.spec import MoeSpec as MoeSpec
from scalerl_jax.models.spec import RopeScaling as RopeScaling
from scalerl_jax.models.spec import num_parameters as num_parameters
from scalerl_jax.models.spec import parameter_table as parameter_table
from scalerl_jax.models.transformer import abstract_params as abstract_params
from scalerl_jax.models.transformer import chunk_tokens as chunk_tokens
from scalerl_jax.models.transformer import forward as forward
from scalerl_jax.models.transformer import head_matrix as head_matrix
from scalerl_jax.models.transformer import init_params as init_params
from scalerl_jax.models.transformer import logical_axes as logical_axes
from scalerl_jax.models.transformer import make_policy_fn as make_policy_fn
from scalerl_jax.models.transformer import unstack_layers as unstack_layers

__all__ = (
  'KVCache',
  'LocalAttention',
  'ModelSpec',
  'MoeSpec',
  'RopeScaling',
  'Routing',
  'abstract_params',
  'chunk_tokens',
  'forward',
  'head_matrix',
  'init_params',
  'logical_axes',
  'make_policy_fn',
  'num_parameters',
  'parameter_table',
  'unstack_layers',
)
