"""Checkpoints in the layout of Hugging Face: read, written, refused."""

from scalerl_jax.hf.configs import config_from_spec as config_from_spec
from scalerl_jax.hf.configs import spec_from_hf as spec_from_hf
from scalerl_jax.hf.errors import HfError as HfError
from scalerl_jax.hf.gguf import convert_gguf as convert_gguf
from scalerl_jax.hf.reading import load_params as load_params
from scalerl_jax.hf.reading import read_config as read_config
from scalerl_jax.hf.writing import save_params as save_params
from scalerl_jax.hf.writing import write_params as write_params

__all__ = (
  'HfError',
  'config_from_spec',
  'convert_gguf',
  'load_params',
  'read_config',
  'save_params',
  'spec_from_hf',
  'write_params',
)
