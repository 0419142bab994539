"""The whole configuration, and the rules that tie its sections together."""

import dataclasses
import math
from typing import Any

from scalerl_jax import recipes
from scalerl_jax.config import checks
from scalerl_jax.config import sections
from scalerl_jax.models import spec as spec_lib
from scalerl_jax.sharding import rules
from scalerl_jax.training import optimizer

_SPARE_TOKENS = 8  # Of a server's cache, beyond its longest sequence.
_ROW_BUCKETS = 16  # Most shapes of packed rows.
# Seeds are also folded into 32-bit keys.
_MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
  """Everything that defines a run.

  Attributes:
    seed: Of parameters, problem order and sampling.
    num_updates: Updates of the run.
    recipe: Name of the algorithm, one of `recipes.RECIPES`.
    recipe_args: Its keyword arguments.
    model: The policy.
    data: The problems.
    warm_start: The supervised start.
    batch: The batch of one update.
    engine: What generates.
    length: Control of the length.
    pipeline: How generation and training overlap.
    curriculum: Which problems leave.
    optimizer: The optimizer.
    evaluation: Held-out evaluation.
    checkpoint: Checkpoints.
    curve: The fit.
    mesh: The devices.
    reporting: What is written.
  """

  seed: int = 0
  num_updates: int
  recipe: str = 'scalerl'
  recipe_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  model: sections.ModelConfig
  data: sections.DataConfig
  warm_start: sections.WarmStartConfig
  batch: sections.BatchConfig
  engine: sections.EngineConfig
  length: sections.LengthConfig
  pipeline: sections.PipelineConfig
  curriculum: sections.CurriculumConfig
  optimizer: optimizer.OptimizerConfig
  evaluation: sections.EvaluationConfig
  checkpoint: sections.CheckpointConfig
  curve: sections.CurveConfig
  mesh: sections.MeshConfig
  reporting: sections.ReportingConfig

  def __post_init__(self) -> None:
    """Checks what concerns several fields; raises ValueError."""
    checks.at_least(self, 1, 'num_updates')
    if not 0 <= self.seed <= _MAX_SEED:
      raise ValueError(f'seed={self.seed} must be in [0, {_MAX_SEED}]')
    recipes.make(self.recipe, **self.recipe_args)
    self._check_rows()
    self._check_tokens()
    self._check_phases()
    self._check_sharding()
    if self.engine.replay_routing and self.model.moe is None:
      raise ValueError(
        'engine.replay_routing=True needs a mixture of experts, model.moe'
      )
    if not self.data.eval_path:
      limit = self.data.toy.num_eval
      if self.evaluation.num_problems > limit:
        raise ValueError(
          f'evaluation.num_problems={self.evaluation.num_problems} must be at'
          f' most data.toy.num_eval={limit}'
        )

  @property
  def row_multiple(self) -> int:
    """What the rows of a batch are padded to a multiple of.

    One row for each microbatch and shard, and where rows are packed, so that
    their number varies, coarse enough for few shapes to be compiled.
    """
    parts = self.batch.num_microbatches * self.mesh.num_row_shards
    coarse = self.batch.rows // _ROW_BUCKETS if self.batch.packed else 0
    return max(coarse // parts, 1) * parts

  def _check_rows(self) -> None:
    parts = self.batch.num_microbatches * self.mesh.num_row_shards
    if self.batch.rows % parts:
      raise ValueError(
        f'batch.prompts={self.batch.prompts} x batch.group_size='
        f'{self.batch.group_size} = {self.batch.rows} rows must be divisible by'
        f' batch.num_microbatches={self.batch.num_microbatches} x'
        f' mesh.data={self.mesh.data} x mesh.fsdp={self.mesh.fsdp} x'
        f' mesh.expert={self.mesh.expert} = {parts}'
      )

  def _check_tokens(self) -> None:
    prompt, limit = self.data.max_prompt_tokens, self.batch.max_tokens
    if prompt >= limit:
      raise ValueError(
        f'data.max_prompt_tokens={prompt} must be below batch.max_tokens='
        f'{limit}, which includes the response'
      )
    cache = self.engine.sglang.max_total_tokens
    if 0 < cache < limit + _SPARE_TOKENS:
      raise ValueError(
        f'engine.sglang.max_total_tokens={cache} must be 0 or at least'
        f' batch.max_tokens={limit} and {_SPARE_TOKENS}: a server holds one'
        ' whole sequence or more'
      )

  def _check_phases(self) -> None:
    k, every = self.pipeline.max_lag, self.checkpoint.every
    if self.pipeline.algorithm == 'ppo_off_policy' and every % k:
      raise ValueError(
        f'checkpoint.every={every} must be a multiple of pipeline.max_lag={k}'
        ' for ppo_off_policy, whose phases are saved whole'
      )

  def _check_sharding(self) -> None:
    sizes = dict(zip(rules.MESH_AXES, self.mesh.shape, strict=True))
    # A vocabulary that only the tokenizer knows is checked with it.
    spec = self.model.spec(vocab_size=math.prod(self.mesh.shape))
    for path, info in spec_lib.parameter_table(spec).items():
      for size, name in zip(info.shape, info.axes, strict=True):
        axes = rules.mesh_axes(name)
        if size % math.prod(sizes[axis] for axis in axes):
          cut = ' x '.join(f'mesh.{axis}={sizes[axis]}' for axis in axes)
          raise ValueError(
            f'{cut} must divide the {name!r} axis of {path!r}, which has size'
            f' {size}'
          )
