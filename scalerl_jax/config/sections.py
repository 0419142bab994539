"""The sections of a configuration, each with the checks of its own fields."""

import dataclasses
import math

from scalerl_jax.config import checks
from scalerl_jax.models import spec as spec_lib
from scalerl_jax.pipeline import pacing
from scalerl_jax.reporting import compute
from scalerl_jax.sharding import rules

SCHEDULES = ('lockstep', 'threads')
TRUNCATED = ('mask', 'keep')
# A toy problem of n operations has 10 · 24ⁿ forms, of which the splits hold
# 1 / 10 (held out) and 3 / 10 (train); drawing stays fast up to half of them.
_FORMS_PER_OPERATION = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
  """The model, as `models.ModelSpec`, and where its weights come from.

  Attributes:
    path: Directory of a checkpoint in the layout of Hugging Face that the run
      starts from; its `config.json` gives every size that is not written. '':
      drawn weights.
    vocab_size: Rows of the embedding; 0: as many as the tokenizer has ids.
    num_layers: Transformer blocks.
    model_dim: Width of the residual stream.
    num_heads: Query heads.
    num_kv_heads: Key-value heads.
    head_dim: Width of one head.
    hidden_dim: Width of the feed-forward.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: How they are lowered for long contexts; None: not at all.
    norm_eps: Added to the mean square in RMSNorm.
    tied_head: True: the LM head is the transposed embedding.
    qk_norm: True: RMSNorm over each head of q and k.
    qkv_bias: True: q, k and v have biases.
    moe: The mixture of experts; None: dense.
    local_attention: Layers that see a part of the sequence; None: there are
      none.
    dtype: Of the body's activations.
    remat: What the backward pass recomputes.
  """

  path: str = ''
  vocab_size: int = 0
  num_layers: int
  model_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  hidden_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: spec_lib.RopeScaling | None = None
  norm_eps: float = 1e-6
  tied_head: bool = True
  qk_norm: bool = False
  qkv_bias: bool = False
  moe: spec_lib.MoeSpec | None = None
  local_attention: spec_lib.LocalAttention | None = None
  dtype: str = 'float32'
  remat: str = 'none'

  def __post_init__(self) -> None:
    """Checks every size and option; raises ValueError."""
    self.spec(vocab_size=1)

  def spec(self, *, vocab_size: int) -> spec_lib.ModelSpec:
    """Completes the model.

    Args:
      vocab_size: Of the tokenizer, for where the field is 0.

    Returns:
      The specification.
    """
    names = [f.name for f in dataclasses.fields(spec_lib.ModelSpec)]
    values = {name: getattr(self, name) for name in names}
    values['vocab_size'] = self.vocab_size or vocab_size
    return spec_lib.ModelSpec(**values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
  """The generated problems.

  Attributes:
    num_train: Training problems.
    num_eval: Held-out problems.
    min_operations: Operations of the easiest problem.
    max_operations: Operations of the hardest problem.
    seed: Of the generator; apart from the run's, so that seeds share problems.
  """

  num_train: int = 0
  num_eval: int = 0
  min_operations: int = 2
  max_operations: int = 6
  seed: int = 0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 0, 'num_train', 'num_eval', 'seed')
    checks.at_least(self, 2, 'min_operations')
    checks.at_least(self, self.min_operations, 'max_operations')
    num_lengths = self.max_operations - self.min_operations + 1
    for name, tenths in (('num_train', 3), ('num_eval', 1)):
      limit = tenths * _FORMS_PER_OPERATION**self.min_operations // 2
      if getattr(self, name) > limit * num_lengths:
        raise ValueError(
          f'{name}={getattr(self, name)} exceeds the {limit * num_lengths}'
          f' distinct problems that min_operations={self.min_operations}'
          ' leaves; lower it or raise min_operations'
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
  """Where problems come from.

  Attributes:
    train_path: JSONL file of training problems; '': generated.
    eval_path: JSONL file of held-out problems; '': generated.
    tokenizer: Directory with a `tokenizer.json`, or `bytes`; '': that of
      `model.path`, or bytes where there is none.
    chat: True: a prompt is one message of the user in the tokenizer's chat
      template; False: it is the bare text.
    max_prompt_tokens: Longest prompt, as it is rendered.
    toy: The generated problems.
  """

  train_path: str = ''
  eval_path: str = ''
  tokenizer: str = ''
  chat: bool = False
  max_prompt_tokens: int
  toy: ToyConfig

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'max_prompt_tokens')
    for path, count in (('train_path', 'num_train'), ('eval_path', 'num_eval')):
      if not getattr(self, path) and getattr(self.toy, count) < 1:
        raise ValueError(
          f"{path}='' means generated problems, but toy.{count}="
          f'{getattr(self.toy, count)}; give a file or at least 1 problem'
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
  """The supervised start from worked toy solutions.

  Attributes:
    num_steps: Steps; 0: no warm start.
    batch_size: Solutions per step.
    learning_rate: Peak rate, between a warm-up and a cosine decay.
    interrupted_fraction: Share of solutions that are cut off by the phrase.
    error_rate: Probability that a line of a solution has a wrong result.
    clean_steps: Steps, from the first, whose solutions have no errors: facts
      are learned faster without.
  """

  num_steps: int = 0
  batch_size: int = 64
  learning_rate: float = 1e-3
  interrupted_fraction: float = 0.0
  error_rate: float = 0.0
  clean_steps: int = 0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 0, 'num_steps', 'clean_steps')
    checks.at_least(self, 1, 'batch_size')
    checks.positive(self, 'learning_rate')
    for name in ('interrupted_fraction', 'error_rate'):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f'{name}={getattr(self, name)} must be in [0, 1]')
    if self.num_steps and self.clean_steps > self.num_steps:
      raise ValueError(
        f'clean_steps={self.clean_steps} must be at most num_steps='
        f'{self.num_steps}, of which they are the first'
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
  """The batch of one update.

  Attributes:
    prompts: Prompts, P.
    group_size: Rollouts per prompt, G; at least 2, because advantages and
      filters compare the rollouts of a prompt.
    num_microbatches: Equal parts that gradients are accumulated over.
    max_tokens: Longest row, prompt included.
    truncated: `mask` or `keep` rollouts that ran out of tokens.
    packed: True: rows of `max_tokens` that hold several rollouts each; False:
      one rollout per row, and rows as long as the longest one.
  """

  prompts: int
  group_size: int
  num_microbatches: int = 1
  max_tokens: int
  truncated: str = 'mask'
  packed: bool = False

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'prompts', 'num_microbatches')
    checks.at_least(self, 2, 'group_size', 'max_tokens')
    checks.one_of(self, 'truncated', TRUNCATED)

  @property
  def rows(self) -> int:
    """Rollouts of one update: rows that are not packed."""
    return self.prompts * self.group_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
  """The servers that generate, and how weights reach them.

  Attributes:
    addresses: Of servers that run already, `http://HOST:PORT`; they must see
      `weights_dir` under the same path. (): the run starts its own.
    num_servers: Servers that the run starts.
    python: Interpreter of the environment that SGLang is installed in; '':
      this one.
    device: `cuda` or `cpu`, of the servers that are started.
    first_port: Port of the first of them, the others follow; 0: free ones.
    max_total_tokens: Tokens that the cache of a server holds; 0: as many as
      SGLang finds room for.
    args: Further flags of `sglang.launch_server`.
    weights_dir: Where versions of the weights are written, best on a RAM disk;
      '': a new directory in /dev/shm where there is one, else in the run's.
    weights_dtype: `bfloat16` or `float32`, of what is written.
    update: `in_place`: running rollouts keep their cache; `retract`: it is
      recomputed with the new weights.
    max_logp_diff: Largest mean |Δ log-prob| between a server and the trainer,
      in nats, on the same tokens and weights, that a run starts with.
    probe_s: Seconds between two looks at whether a server lives, and that an
      answer may take.
    control_s: Seconds that a server may take for new weights.
    request_s: Seconds after which a request is taken to another server.
  """

  addresses: tuple[str, ...] = ()
  num_servers: int = 1
  python: str = ''
  device: str = 'cuda'
  first_port: int = 0
  max_total_tokens: int = 0
  args: tuple[str, ...] = ()
  weights_dir: str = ''
  weights_dtype: str = 'bfloat16'
  update: str = 'in_place'
  max_logp_diff: float = 0.1
  probe_s: float = 5.0
  control_s: float = 120.0
  request_s: float = 1800.0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'num_servers')
    checks.at_least(self, 0, 'first_port', 'max_total_tokens')
    checks.one_of(self, 'device', ('cuda', 'cpu'))
    checks.one_of(self, 'weights_dtype', ('bfloat16', 'float32'))
    checks.one_of(self, 'update', ('in_place', 'retract'))
    checks.positive(self, 'max_logp_diff', 'probe_s', 'control_s', 'request_s')
    for address in self.addresses:
      if not address.startswith(('http://', 'https://')):
        raise ValueError(f'addresses: {address!r} must be http://HOST:PORT')
    if len(set(self.addresses)) < len(self.addresses):
      raise ValueError(f'addresses={self.addresses} must be distinct')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
  """What generates rollouts.

  Attributes:
    kind: `jax`, the embedded engine, or `sglang`, a fleet of servers.
    num_slots: Rollouts that are decoded together; with SGLang, by each server.
    steps_per_dispatch: Tokens per slot between two looks of the host.
    temperature: Of sampling, in training and evaluation; positive.
    replay_routing: True: in training, the tokens of a response pass through the
      experts that they passed through when it was sampled. Needs `model.moe`.
    start_servers: True: the run starts the SGLang servers and stops them.
    sglang: The servers.
  """

  kind: str = 'jax'
  num_slots: int
  steps_per_dispatch: int = 8
  temperature: float = 1.0
  replay_routing: bool = False
  start_servers: bool = False
  sglang: SglangConfig

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.one_of(self, 'kind', ('jax', 'sglang'))
    checks.at_least(self, 1, 'num_slots', 'steps_per_dispatch')
    checks.positive(self, 'temperature')
    if self.kind == 'jax' and (self.start_servers or self.sglang.addresses):
      raise ValueError(
        "kind='jax' generates in this process and needs no servers; set"
        " kind='sglang', or leave start_servers and sglang.addresses out"
      )
    if self.kind == 'sglang':
      if self.start_servers == bool(self.sglang.addresses):
        raise ValueError(
          f"kind='sglang' needs start_servers=True or sglang.addresses, and"
          f' not both; got start_servers={self.start_servers} and'
          f' {len(self.sglang.addresses)} addresses'
        )
      if self.replay_routing and self.sglang.update != 'in_place':
        raise ValueError(
          "replay_routing=True needs sglang.update='in_place': after"
          f' {self.sglang.update!r} the experts that servers tell are not those'
          ' that tokens were sampled with'
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
  """Control of the length of the thinking.

  Attributes:
    interrupt: True: thinking is ended by the phrase; False: rollouts run until
      `batch.max_tokens`.
    min_thinking_tokens: Smallest drawn budget.
    max_thinking_tokens: Largest drawn budget.
    answer_tokens: Tokens that may follow the thinking.
    phrase: What is forced; it ends with `</think>`.
  """

  interrupt: bool
  min_thinking_tokens: int = 1
  max_thinking_tokens: int = 1
  answer_tokens: int = 1
  phrase: str = '</think>'

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'min_thinking_tokens', 'answer_tokens')
    checks.at_least(self, self.min_thinking_tokens, 'max_thinking_tokens')
    if not self.phrase.endswith('</think>'):
      raise ValueError(f'phrase={self.phrase!r} must end with </think>')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
  """How generation and training overlap.

  Attributes:
    schedule: `lockstep`, which is deterministic, or `threads`.
    algorithm: `pipeline_rl` or `ppo_off_policy`.
    max_lag: k, the largest lag in updates.
    lockstep_lead: Batches that the generator stays ahead in lockstep.
    deadline_s: Seconds that any wait may take.
  """

  schedule: str = 'lockstep'
  algorithm: str = 'pipeline_rl'
  max_lag: int
  lockstep_lead: int = 0
  deadline_s: float = 600.0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.one_of(self, 'schedule', SCHEDULES)
    checks.one_of(self, 'algorithm', pacing.ALGORITHMS)
    checks.at_least(self, 0, 'max_lag', 'lockstep_lead')
    checks.positive(self, 'deadline_s')
    if self.lockstep_lead > self.max_lag:
      raise ValueError(
        f'lockstep_lead={self.lockstep_lead} must be at most max_lag='
        f'{self.max_lag}'
      )
    if self.algorithm == 'ppo_off_policy' and self.max_lag < 1:
      raise ValueError(
        f'max_lag={self.max_lag} must be at least 1 for ppo_off_policy: it is'
        ' the number of updates per generation phase'
      )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
  """Which problems leave the later epochs.

  Attributes:
    max_pass_rate: Pass rate from which a problem leaves; above 1: none leaves.
  """

  max_pass_rate: float = 0.9

  def __post_init__(self) -> None:
    """Checks the value; raises ValueError."""
    checks.positive(self, 'max_pass_rate')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
  """Held-out evaluation.

  Attributes:
    every: Updates between evaluations; update 0 is always evaluated.
    samples_per_problem: Samples per problem.
    num_problems: Held-out problems used, the first of the file.
  """

  every: int
  samples_per_problem: int = 16
  num_problems: int

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'every', 'samples_per_problem', 'num_problems')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
  """Checkpoints.

  Attributes:
    every: Updates between checkpoints.
    keep: Newest checkpoints that are kept.
  """

  every: int
  keep: int = 2

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, 'every', 'keep')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveConfig:
  """The fit of the compute-performance curve.

  Attributes:
    compute_axis: `device_hours`, `flops` or `tokens`.
    forecast_multiple: The forecast reaches this multiple of the compute spent.
    min_compute: Evaluations below it are not fitted, in the axis' unit.
  """

  compute_axis: str = 'flops'
  forecast_multiple: float = 2.0
  min_compute: float = 0.0

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.one_of(self, 'compute_axis', compute.AXES)
    checks.at_least(self, 0, 'min_compute')
    checks.at_least(self, 1, 'forecast_multiple')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
  """Devices along each axis of the mesh.

  Attributes:
    data: Copies of the parameters. Rows are spread over data, fsdp and expert.
    fsdp: Shards of the columns of all parameters.
    tensor: Shards of heads and feed-forward.
    expert: Shards of the experts, and of the columns of all else.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  expert: int = 1

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 1, *rules.MESH_AXES)

  @property
  def shape(self) -> tuple[int, int, int, int]:
    """Sizes in the order of `sharding.MESH_AXES`."""
    return self.data, self.fsdp, self.tensor, self.expert

  @property
  def num_row_shards(self) -> int:
    """Parts that the rows of a batch are spread over."""
    return math.prod(getattr(self, name) for name in rules.ROW_AXES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportingConfig:
  """What is written beside the metrics.

  Attributes:
    plots: True: `curve.png` and `report.html`.
    tensorboard: True: scalars go to TensorBoard too.
    num_samples: Rollouts kept of each evaluation.
  """

  plots: bool = True
  tensorboard: bool = True
  num_samples: int = 8

  def __post_init__(self) -> None:
    """Checks the values; raises ValueError."""
    checks.at_least(self, 0, 'num_samples')
