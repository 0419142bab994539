"""One of the processes of `processes_test`: a step on a mesh over all of them.

python -m tests.training.worker COORDINATOR NUM_PROCESSES PROCESS_ID OUT
"""

import contextlib
import pathlib
import sys

import jax
from jax.experimental import multihost_utils
import numpy as np
import optax

from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax import sharding
from scalerl_jax import training
from scalerl_jax.training import checkpointing
from scalerl_jax.training import state as state_lib
from tests import tiny_model
from tests.training import tiny_batch

SPECS = {
  (2, 2, 2, 1): tiny_model.spec(),
  (1, 2, 2, 2): tiny_model.moe_spec(),
}
# Momentum, so that there is more than parameters to restore.
TX = optax.sgd(1.0, momentum=0.9)


def step_fn(spec, mesh=None):
  """Makes the step that is compared, for a mesh or for one device."""
  policy_fn = models.make_policy_fn(spec, temperature=1.0, mesh=mesh)
  return training.make_train_step(policy_fn, TX, recipes.scalerl(), mesh=mesh)


def batches():
  """Host arrays, the same in every process."""
  made = (tiny_batch.random_groups(seed) for seed in range(2))
  return [jax.tree.map(np.asarray, tiny_batch.batch(m)) for m in made]


def run(shape, directory: pathlib.Path):
  """Steps, saves, restores into shards, steps again."""
  mesh, spec = sharding.make_mesh(shape), SPECS[shape]
  shardings = sharding.param_shardings(models.logical_axes(spec), mesh)
  params = tiny_model.params(0, spec)
  state = state_lib.init_sharded(params, TX, shardings)
  step, found = step_fn(spec, mesh), {}
  for i, batch in enumerate(batches()):
    state, metrics = step(state, batch)
    found[f'loss{i}'] = np.asarray(metrics.loss)
    found[f'norm{i}'] = np.asarray(metrics.grad_norm)
    if i == 0:
      state = save_and_restore(state, directory)
      assert state.params['embed'].sharding == shardings['embed']
  params = multihost_utils.process_allgather(state.params, tiled=True)
  for i, leaf in enumerate(jax.tree.leaves(params)):
    found[f'param{i}'] = leaf
  return found


def save_and_restore(state, directory: pathlib.Path):
  """Returns the state as it comes back from the disk."""
  with contextlib.closing(
    checkpointing.Checkpointer(directory, keep=1)
  ) as checkpointer:
    checkpointer.save(1, train_state=state, host={'a': 1})
    restored = checkpointer.restore(state)
  assert restored is not None
  assert restored.host == {'a': 1}
  return restored.train_state


def main(coordinator: str, num_processes: str, process: str, out: str):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 4)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_disable_most_optimizations', True)  # Faster.
  jax.distributed.initialize(
    coordinator,
    int(num_processes),
    int(process),
    initialization_timeout=20,
  )
  assert (jax.process_count(), len(jax.devices())) == (2, 8)
  for shape in SPECS:
    directory = pathlib.Path(out) / 'x'.join(map(str, shape))
    found = run(shape, directory)
    np.savez(directory / f'{process}.npz', **found)
  jax.distributed.shutdown()


if __name__ == '__main__':
  main(*sys.argv[1:])
