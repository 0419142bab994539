"""The configuration of a run: read once, checked whole, then frozen.

A config file returns an `ml_collections.ConfigDict`; `from_config_dict` turns
it into a `RunConfig`, so that a mistyped field, a wrong type or contradictory
values end in one line before anything is compiled.
"""

from scalerl_jax.config.parsing import ConfigError as ConfigError
from scalerl_jax.config.parsing import differences as differences
from scalerl_jax.config.parsing import from_config_dict as from_config_dict
from scalerl_jax.config.parsing import one_line as one_line
from scalerl_jax.config.parsing import to_dict as to_dict
from scalerl_jax.config.run_config import RunConfig as RunConfig
from scalerl_jax.config.sections import BatchConfig as BatchConfig
from scalerl_jax.config.sections import CheckpointConfig as CheckpointConfig
from scalerl_jax.config.sections import CurriculumConfig as CurriculumConfig
from scalerl_jax.config.sections import CurveConfig as CurveConfig
from scalerl_jax.config.sections import DataConfig as DataConfig
from scalerl_jax.config.sections import EngineConfig as EngineConfig
from scalerl_jax.config.sections import EvaluationConfig as EvaluationConfig
from scalerl_jax.config.sections import LengthConfig as LengthConfig
from scalerl_jax.config.sections import MeshConfig as MeshConfig
from scalerl_jax.config.sections import ModelConfig as ModelConfig
from scalerl_jax.config.sections import PipelineConfig as PipelineConfig
from scalerl_jax.config.sections import ReportingConfig as ReportingConfig
from scalerl_jax.config.sections import ToyConfig as ToyConfig
from scalerl_jax.config.sections import WarmStartConfig as WarmStartConfig

__all__ = (
  'BatchConfig',
  'CheckpointConfig',
  'ConfigError',
  'CurriculumConfig',
  'CurveConfig',
  'DataConfig',
  'EngineConfig',
  'EvaluationConfig',
  'LengthConfig',
  'MeshConfig',
  'ModelConfig',
  'PipelineConfig',
  'ReportingConfig',
  'RunConfig',
  'ToyConfig',
  'WarmStartConfig',
  'differences',
  'from_config_dict',
  'one_line',
  'to_dict',
)
