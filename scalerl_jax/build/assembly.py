"""From a configuration to a run, new or resumed."""

from collections.abc import Sequence
import contextlib
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import evaluation
from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax import records
from scalerl_jax import rewards
from scalerl_jax import sharding
from scalerl_jax.build import base_policy
from scalerl_jax.build import engines
from scalerl_jax.build import recorder as recorder_lib
from scalerl_jax.build import tokenization
from scalerl_jax.build import workdir as workdir_lib
from scalerl_jax.generation.sglang import client as client_lib
from scalerl_jax.generation.sglang import fleet as fleet_lib
from scalerl_jax.generation.sglang import servers as servers_lib
from scalerl_jax.pipeline import loop as loop_lib
from scalerl_jax.pipeline import pacing as pacing_lib
from scalerl_jax.pipeline import rollouts
from scalerl_jax.pipeline import trainer as trainer_lib
from scalerl_jax.reporting import compute
from scalerl_jax.training import checkpointing
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

_FAILURES = (
  OSError,
  checkpointing.CheckpointError,
  client_lib.RefusedError,
  fleet_lib.FleetError,
  loop_lib.GeneratorError,
  servers_lib.ServerError,
  trainer_lib.TrainingDivergedError,
)


class RunError(RuntimeError):
  """A run that had begun had to end; what it had checkpointed is kept."""


def run(config: config_lib.RunConfig, workdir: pathlib.Path) -> str:
  """Runs or resumes a run to its end.

  Args:
    config: The configuration.
    workdir: The run's directory.

  Returns:
    What happened, in one or two lines.

  Raises:
    config_lib.ConfigError: The directory, its checkpoints, the devices, the
      tokenizer or the checkpoint that it starts from do not fit.
    data.DataError: The problem files cannot be used.
    RunError: The disk, the generator or the optimization failed on the way.
  """
  if config.reporting.plots:
    _require_plots()
  config, tokenizer = tokenization.complete(config)
  workdir_lib.open_workdir(config, workdir)
  try:
    return _run(config, workdir, tokenizer)
  except checkpointing.UnusableCheckpointError as error:
    raise config_lib.ConfigError(str(error)) from None
  except _FAILURES as error:
    raise RunError(
      f'{error} (what was checkpointed in {workdir} is kept, and the same'
      ' command goes on from there)'
    ) from error


def _run(
  config: config_lib.RunConfig,
  workdir: pathlib.Path,
  tokenizer: data.Tokenizer,
) -> str:
  with contextlib.ExitStack() as stack:
    recorder = stack.enter_context(
      contextlib.closing(
        recorder_lib.Recorder(workdir, config, decode=tokenizer.decode)
      )
    )
    experiment = _Experiment(config, workdir, tokenizer, recorder, stack)
    try:
      experiment.run()
      outcome = f'files: {workdir}'
      if config.reporting.plots:
        outcome = f'report: {workdir}/report.html'
    except KeyboardInterrupt:
      outcome = (
        f'interrupted; run the same command with --workdir={workdir} to resume'
      )
    return f'{recorder.finish()}\n{outcome}'


class _Experiment:
  """All objects of one run; also the loop's observer."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    workdir: pathlib.Path,
    tokenizer: data.Tokenizer,
    recorder: recorder_lib.Recorder,
    stack: contextlib.ExitStack,
  ) -> None:
    self._config = config
    servers = engines.start_servers(config, workdir, stack)
    self._train, self._held_out = workdir_lib.read_problems(
      config, workdir, tokenizer
    )
    self._tokenizer = tokenizer
    self.recorder = recorder
    self._spec = config.model.spec(vocab_size=tokenizer.vocab_size)
    init_key, train_key, eval_key = jax.random.split(
      jax.random.key(config.seed), 3
    )
    mesh, shardings = None, None
    if max(config.mesh.shape) > 1:
      mesh = make_mesh(config)
      shardings = sharding.param_shardings(
        models.logical_axes(self._spec), mesh
      )
    params = base_policy.base_params(
      config, self._spec, tokenizer, workdir, init_key, shardings=shardings
    )
    self.trainer = _make_trainer(
      config, self._spec, params, tokenizer.pad_id, mesh, shardings
    )
    made = engines.make(
      config,
      self._spec,
      tokenizer,
      workdir,
      stack,
      train_key=train_key,
      eval_key=eval_key,
      mesh=mesh,
      servers=servers,
    )
    self._evaluator = made.evaluation
    self._eval_meter = compute.ComputeMeter()
    self._store, self._pinned = made.store, made.pinned
    self._pacing = _make_pacing(config)
    self._producer = rollouts.RolloutProducer(
      made.train,
      data.PromptSampler(
        self._train,
        seed=config.seed,
        max_pass_rate=config.curriculum.max_pass_rate,
      ),
      prompts=[self._ids(p) for p in self._train],
      problem_ids=[p.problem_id for p in self._train],
      group_size=config.batch.group_size,
      grade=lambda group, i: self._grade(group, self._train[i]),
      pacing=self._pacing,
      store=self._store,
      spec=self._spec,
    )
    self._checkpointer = checkpointing.Checkpointer(
      workdir / 'checkpoints', keep=config.checkpoint.keep
    )
    self._last_update_s = time.monotonic()
    self._restore()

  def run(self) -> None:
    loop_lib.Loop(
      producer=self._producer,
      trainer=self.trainer,
      store=self._store,
      pacing=self._pacing,
      observer=self,
      schedule=self._config.pipeline.schedule,
      checkpoint_every=self._config.checkpoint.every,
      deadline_s=self._config.pipeline.deadline_s,
    ).run()

  def on_update(self, updates: int, row: dict[str, Any]) -> None:
    now = time.monotonic()
    seconds, self._last_update_s = now - self._last_update_s, now
    meter = self._meter()
    row = {
      'step': updates,
      **row,
      'update_s': seconds,
      'tokens_per_s': row['num_sampled_tokens'] / seconds,
      'device_hours': meter.device_hours,
      'flops': meter.flops,
      'tokens': meter.tokens,
    }
    self.recorder.on_update(row)

  def on_version(self, updates: int) -> None:
    last = updates == self._config.num_updates
    if updates % self._config.evaluation.every and not last:
      return
    start = time.monotonic()
    self._pinned.publish(self.trainer.state.params, updates)
    groups = self._evaluate()
    meter = self._meter()
    point = evaluation.summarize(
      groups,
      step=updates,
      policy_version=updates,
      device_hours=meter.device_hours,
      flops=meter.flops,
      tokens=meter.tokens,
    )
    self.recorder.on_evaluation(point, groups, self._held_out)
    seconds = time.monotonic() - start
    self._eval_meter = self._eval_meter.add(
      evaluation_seconds=seconds * self._evaluator.num_devices,
      evaluation_tokens=sum(
        int(r.sampled.sum()) for g in groups for r in g.rollouts
      ),
      evaluation_flops=sum(
        rollouts.group_flops(self._spec, g, shares_prompt=True) for g in groups
      ),
    )
    self._last_update_s += seconds  # Not a part of any update.
    self._producer.leave_out(seconds)

  def checkpoint(self, updates: int) -> None:
    self._checkpointer.save(
      updates,
      train_state=self.trainer.state,
      host={
        'producer': self._producer.state(),
        'recorder': self.recorder.state(),
        'trainer_meter': self.trainer.meter._asdict(),
        'eval_meter': self._eval_meter._asdict(),
      },
    )

  def _restore(self) -> None:
    restored = self._checkpointer.restore(self.trainer.state)
    if restored is None:
      self.recorder.reset()
    else:
      self.trainer.state = restored.train_state
    self._store.publish(self.trainer.state.params, self.trainer.version)
    if restored is not None:
      host = restored.host
      self._producer.load_state(host['producer'])
      self.recorder.load_state(host['recorder'])
      self.recorder.write_curve()
      self.trainer.meter = compute.ComputeMeter(**host['trainer_meter'])
      self._eval_meter = compute.ComputeMeter(**host['eval_meter'])
    self.recorder.start(self.trainer.version)

  def _evaluate(self) -> list[records.RolloutGroup]:
    weights = self._pinned.latest()
    self._evaluator.update_weights(weights.params, weights.version)
    n = len(self._held_out)
    requests = [
      records.Request(
        # Never the same randomness twice, whatever else is evaluated.
        visit=weights.version * n + i,
        problem_id=problem.problem_id,
        prompt_ids=self._ids(problem),
        num_samples=self._config.evaluation.samples_per_problem,
      )
      for i, problem in enumerate(self._held_out)
    ]
    groups = self._evaluator.generate(requests)
    return [
      self._grade(g, p) for g, p in zip(groups, self._held_out, strict=True)
    ]

  def _grade(
    self, group: records.RolloutGroup, problem: records.Problem
  ) -> records.RolloutGroup:
    return rewards.grade(group, problem, decode=self._tokenizer.decode)

  def _ids(self, problem: records.Problem) -> np.ndarray:
    return np.array(self._tokenizer.encode_prompt(problem.prompt), np.int32)

  def _meter(self) -> compute.ComputeMeter:
    return loop_lib.total_meter(self._producer, self.trainer)


def _make_pacing(config: config_lib.RunConfig) -> pacing_lib.Pacing:
  return pacing_lib.Pacing(
    algorithm=config.pipeline.algorithm,
    max_lag=config.pipeline.max_lag,
    prompts=config.batch.prompts,
    num_updates=config.num_updates,
    lead=config.pipeline.lockstep_lead
    if config.pipeline.schedule == 'lockstep'
    else 0,
  )


def _make_trainer(
  config: config_lib.RunConfig,
  spec: models.ModelSpec,
  params: Any,
  pad_id: int,
  mesh: jax.sharding.Mesh | None,
  shardings: Any,
) -> trainer_lib.Trainer:
  tx = optimizer.make_optimizer(config.optimizer)
  step_fn = make_step(config, spec, tx, mesh)
  if mesh is None:
    state = state_lib.init(params, tx)
  else:
    state = state_lib.init_sharded(params, tx, shardings, donate=True)
  return trainer_lib.Trainer(
    state,
    step_fn,
    spec=spec,
    row_multiple=config.row_multiple,
    max_tokens=config.batch.max_tokens,
    truncated=config.batch.truncated,
    packed=config.batch.packed,
    pad_id=pad_id,
    max_nonfinite_streak=config.optimizer.max_nonfinite_streak,
    num_devices=1 if mesh is None else mesh.size,
  )


def make_mesh(
  config: config_lib.RunConfig, *, devices: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
  """Makes the mesh of a configuration.

  Args:
    config: The configuration.
    devices: Which; None: the first of all.

  Returns:
    The mesh.

  Raises:
    config_lib.ConfigError: There are fewer devices than it needs.
  """
  try:
    return sharding.make_mesh(config.mesh.shape, devices=devices)
  except ValueError as error:
    raise config_lib.ConfigError(str(error)) from None


def make_step(
  config: config_lib.RunConfig,
  spec: models.ModelSpec,
  tx: optax.GradientTransformation,
  mesh: jax.sharding.Mesh | None,
) -> Any:
  """Makes the train step of a configuration.

  Args:
    config: The configuration.
    spec: The model.
    tx: The optimizer.
    mesh: None: one device.

  Returns:
    The jitted step, which can be lowered too.
  """
  return step_lib.make_train_step(
    models.make_policy_fn(
      spec,
      temperature=config.engine.temperature,
      mesh=mesh,
    ),
    tx,
    recipes.make(config.recipe, **config.recipe_args),
    mesh=mesh,
    num_microbatches=config.batch.num_microbatches,
  )


def _require_plots() -> None:
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise config_lib.ConfigError(
      'reporting.plots=True needs matplotlib: pip install'
      " 'scalerl_jax[plots]', or pass --config.reporting.plots=False"
    ) from None
