"""The train state of a run, and what all its processes do to it together."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalerl_jax import arrays as arrays_lib
from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax import sharding
from scalerl_jax.build import base_policy
from scalerl_jax.build import processes as processes_lib
from scalerl_jax.pipeline import trainer as trainer_lib
from scalerl_jax.training import checkpointing
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

_Arrays = Mapping[str, np.ndarray]


class Learner:
  """Holds the train state, in shards over the devices of all processes.

  Each process makes one; process 0 calls its methods, the others follow.

  Attributes:
    spec: The model.
    mesh: What the state is cut over; None: one device.
    trainer: Owns the state; there after `start`.
  """

  def __init__(
    self,
    config: config_lib.RunConfig,
    workdir: pathlib.Path,
    tokenizer: data.Tokenizer,
    processes: processes_lib.Processes,
  ) -> None:
    """Allocates nothing yet.

    Args:
      config: The configuration, complete.
      workdir: The run's directory, which all processes see.
      tokenizer: Its tokenizer.
      processes: Those of the run.

    Raises:
      config_lib.ConfigError: The devices do not fit.
    """
    self.spec = config.model.spec(vocab_size=tokenizer.vocab_size)
    self.mesh = make_mesh(config) if max(config.mesh.shape) > 1 else None
    self.trainer: trainer_lib.Trainer
    self._config = config
    self._workdir = workdir
    self._tokenizer = tokenizer
    self._processes = processes
    self._checkpointer: checkpointing.Checkpointer | None = None
    self._host: dict[str, Any] = {}  # To be saved; by process 0.
    # Of weights on their way to generators.
    self._dtype = None
    if config.engine.kind == 'sglang':
      self._dtype = config.engine.sglang.weights_dtype
    if processes.count > 1:
      _check_processes(config, self.mesh)
    for name, operation in (
      ('start', self._start),
      ('step', self._step),
      ('gather', self._gather),
      ('score', self._score),
      ('save', self._save),
    ):
      processes.register(name, operation)

  def start(self) -> dict[str, Any] | None:
    """Makes the state, or restores it.

    Returns:
      The host state of the checkpoint; None: there is none.

    Raises:
      config_lib.ConfigError: The checkpoint of `model.path` cannot be used.
      checkpointing.UnusableCheckpointError: No checkpoint can be used.
      checkpointing.CheckpointError: A file could not be read.
    """
    return self._processes.call('start')

  def gather(self) -> Any:
    """Copies the parameters to this host, as generators want them.

    Returns:
      Numpy arrays.
    """
    return self._processes.call('gather')

  def score(self, token_ids: np.ndarray) -> np.ndarray:
    """Scores tokens with the current parameters, cast as for generators.

    Args:
      token_ids: N tokens.

    Returns:
      Log-prob of each but the first, at the sampling temperature, in nats.
    """
    return self._processes.call('score', {'token_ids': np.asarray(token_ids)})

  def save(self, updates: int, host: dict[str, Any]) -> None:
    """Saves a checkpoint.

    Args:
      updates: Updates that the state contains.
      host: See `checkpointing.Checkpointer.save`.

    Raises:
      checkpointing.CheckpointError: It could not be written.
    """
    self._host = host
    self._processes.call('save', {'updates': np.array(updates)})

  def close(self) -> None:
    """Waits for what is written."""
    if self._checkpointer is not None:
      self._checkpointer.close()

  def _start(self, _: _Arrays) -> dict[str, Any] | None:
    config, shardings = self._config, None
    if self.mesh is not None:
      shardings = sharding.param_shardings(
        models.logical_axes(self.spec), self.mesh
      )
    tx = optimizer.make_optimizer(config.optimizer)
    self._step_fn = make_step(config, self.spec, tx, self.mesh)
    self._checkpointer = checkpointing.Checkpointer(
      self._workdir / 'checkpoints', keep=config.checkpoint.keep
    )
    # First: what it holds needs no base policy, and no room beside one.
    restored = self._checkpointer.restore(
      state_lib.abstract(models.abstract_params(self.spec), tx, shardings)
    )
    if restored is None:
      state = self._begin(tx, shardings)
    else:
      state = restored.train_state
    self.trainer = trainer_lib.Trainer(
      state,
      self._led_step,
      spec=self.spec,
      row_multiple=config.row_multiple,
      max_tokens=config.batch.max_tokens,
      truncated=config.batch.truncated,
      packed=config.batch.packed,
      pad_id=self._tokenizer.pad_id,
      max_nonfinite_streak=config.optimizer.max_nonfinite_streak,
      num_devices=1 if self.mesh is None else self.mesh.size,
    )
    return None if restored is None else restored.host

  def _begin(
    self, tx: optax.GradientTransformation, shardings: Any
  ) -> state_lib.TrainState:
    params = base_policy.base_params(
      self._config,
      self.spec,
      self._tokenizer,
      self._workdir,
      jax.random.split(jax.random.key(self._config.seed), 3)[0],
      shardings=shardings,
    )
    if shardings is None:
      return state_lib.init(params, tx)
    return state_lib.init_sharded(params, tx, shardings, donate=True)

  def _led_step(
    self, state: state_lib.TrainState, batch: arrays_lib.Batch
  ) -> tuple[state_lib.TrainState, step_lib.StepMetrics]:
    assert state is self.trainer.state
    fields = {k: v for k, v in batch._asdict().items() if v is not None}
    return self._processes.call('step', fields)

  def _step(
    self, fields: _Arrays
  ) -> tuple[state_lib.TrainState, step_lib.StepMetrics]:
    batch = arrays_lib.Batch(**dict[str, Any](fields))
    self.trainer.state, metrics = self._step_fn(self.trainer.state, batch)
    return self.trainer.state, metrics

  def _gather(self, _: _Arrays) -> Any:
    return processes_lib.gather(self.trainer.state.params, dtype=self._dtype)

  def _score(self, fields: _Arrays) -> np.ndarray:
    score = jax.jit(
      make_score(self._config, self.spec, self.mesh, dtype=self._dtype),
      # Each process gets all of it.
      out_shardings=jax.sharding.NamedSharding(
        self.mesh, jax.sharding.PartitionSpec()
      )
      if self.mesh is not None
      else None,
    )
    return np.asarray(score(self.trainer.state.params, fields['token_ids']))

  def _save(self, fields: _Arrays) -> None:
    assert self._checkpointer is not None
    self._checkpointer.save(
      int(fields['updates']),
      train_state=self.trainer.state,
      host=self._host,
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


def make_score(
  config: config_lib.RunConfig,
  spec: models.ModelSpec,
  mesh: jax.sharding.Mesh | None,
  *,
  dtype: str | None = None,
) -> Any:
  """Makes a function that scores one sequence as the trainer does.

  Args:
    config: The configuration.
    spec: The model.
    mesh: That parameters are cut over; None: one device.
    dtype: What parameters are cast to first; None: they are left as they are.

  Returns:
    (params, N token ids) → log-prob of each but the first, at the sampling
    temperature; to be jitted.
  """
  policy = models.make_policy_fn(
    spec, temperature=config.engine.temperature, mesh=mesh
  )

  def score(params: Any, token_ids: jax.Array) -> jax.Array:
    if dtype is not None:
      params = jax.tree.map(lambda x: x.astype(dtype), params)
    # A row for each shard of them.
    shape = (config.mesh.num_row_shards, len(token_ids))
    tokens = jnp.broadcast_to(token_ids, shape)
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return policy(params, tokens, positions, jnp.ones_like(tokens)).logp[0, 1:]

  return score


def _check_processes(
  config: config_lib.RunConfig, mesh: jax.sharding.Mesh | None
) -> None:
  needed = 1 if mesh is None else mesh.size
  if needed != jax.device_count():
    raise config_lib.ConfigError(
      f'mesh={config.mesh.shape} has {needed} devices, and the'
      f' {jax.process_count()} processes have {jax.device_count()}; several'
      ' processes must use all that they have'
    )
  if config.warm_start.num_steps:
    raise config_lib.ConfigError(
      f'warm_start.num_steps={config.warm_start.num_steps} must be 0 with'
      ' several processes: a warm start is trained by one'
    )
