"""From a configuration to a run, new or resumed."""

import contextlib
import pathlib
import time
from typing import Any

import jax
import numpy as np

from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import evaluation
from scalerl_jax import records
from scalerl_jax import rewards
from scalerl_jax.build import engines
from scalerl_jax.build import learner as learner_lib
from scalerl_jax.build import processes as processes_lib
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

_FAILURES = (
  OSError,
  checkpointing.CheckpointError,
  client_lib.RefusedError,
  fleet_lib.FleetError,
  loop_lib.GeneratorError,
  processes_lib.FollowError,
  servers_lib.ServerError,
  trainer_lib.TrainingDivergedError,
)


class RunError(RuntimeError):
  """A run that had begun had to end; what it had checkpointed is kept."""


def run(config: config_lib.RunConfig, workdir: pathlib.Path) -> str:
  """Runs or resumes a run to its end.

  With several processes (`jax.distributed`) each calls this: process 0 runs,
  the others lend it their devices until it ends.

  Args:
    config: The configuration.
    workdir: The run's directory, which all processes see.

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
  processes = processes_lib.Processes()
  try:
    with processes.leading(), contextlib.ExitStack() as stack:
      learner = learner_lib.Learner(config, workdir, tokenizer, processes)
      stack.callback(learner.close)
      if not processes.leads:
        processes.follow()
        return f'process {jax.process_index()} followed to the end'
      workdir_lib.open_workdir(config, workdir)
      return _run(config, workdir, tokenizer, learner)
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
  learner: learner_lib.Learner,
) -> str:
  with contextlib.ExitStack() as stack:
    recorder = stack.enter_context(
      contextlib.closing(
        recorder_lib.Recorder(workdir, config, decode=tokenizer.decode)
      )
    )
    experiment = _Experiment(
      config, workdir, tokenizer, learner, recorder, stack
    )
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
    learner: learner_lib.Learner,
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
    self._learner = learner
    restored = learner.start()
    _, train_key, eval_key = jax.random.split(jax.random.key(config.seed), 3)
    made = engines.make(
      config,
      learner,
      tokenizer,
      workdir,
      stack,
      train_key=train_key,
      eval_key=eval_key,
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
      spec=learner.spec,
    )
    self._last_update_s = time.monotonic()
    self._resume(restored)

  def run(self) -> None:
    loop_lib.Loop(
      producer=self._producer,
      trainer=self._learner.trainer,
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
    self._pinned.publish(self._learner.trainer.state.params, updates)
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
        rollouts.group_flops(self._learner.spec, g, shares_prompt=True)
        for g in groups
      ),
    )
    self._last_update_s += seconds  # Not a part of any update.
    self._producer.leave_out(seconds)

  def checkpoint(self, updates: int) -> None:
    self._learner.save(
      updates,
      {
        'producer': self._producer.state(),
        'recorder': self.recorder.state(),
        'trainer_meter': self._learner.trainer.meter._asdict(),
        'eval_meter': self._eval_meter._asdict(),
      },
    )

  def _resume(self, host: dict[str, Any] | None) -> None:
    """Goes on from the host state of a checkpoint; None: begins."""
    trainer = self._learner.trainer
    self._store.publish(trainer.state.params, trainer.version)
    if host is None:
      self.recorder.reset()
    else:
      self._producer.load_state(host['producer'])
      self.recorder.load_state(host['recorder'])
      self.recorder.write_curve()
      trainer.meter = compute.ComputeMeter(**host['trainer_meter'])
      self._eval_meter = compute.ComputeMeter(**host['eval_meter'])
    self.recorder.start(trainer.version)

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
    return loop_lib.total_meter(self._producer, self._learner.trainer)


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


def _require_plots() -> None:
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise config_lib.ConfigError(
      'reporting.plots=True needs matplotlib: pip install'
      " 'scalerl_jax[plots]', or pass --config.reporting.plots=False"
    ) from None
