"""Runs or resumes an experiment.

    python launch/run.py --config=configs/toy.py[:VARIANT] [--workdir=DIR]
        [--config.FIELD=VALUE ...]
        [--distributed | --coordinator=HOST:PORT --num_processes=N
         --process_id=I]
        [--dry_run [--device_memory_gib=M] [--device_tflops=F]
         [--generator_memory_gib=G] [--topology=NAME]]

`--dry_run` checks the config and the problem files, compiles the train step for
the configured mesh over simulated devices, and prints what it needs; exit code
1 where that does not fit the memory, or the compiler gathers an array whole.
With `--topology=v6e:16x16` it compiles for that TPU instead, which need not be
there (`pip install 'scalerl_jax[tpu]'`).

On several hosts start it once on each, with the same config and a workdir that
all see. `--distributed` asks the cluster (Slurm, a TPU pod, Kubernetes) who the
processes are; else each is told, the coordinator being an address of process 0.

Bad input ends with one line on stderr and exit code 2, a run that fails on the
way with one line and exit code 1.
"""

from collections.abc import Sequence
import json
import logging
import math
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from scalerl_jax import compilation
from scalerl_jax import config as config_lib
from scalerl_jax import data

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file, as FILE or FILE:VARIANT.', lock_config=True
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  "The run's directory; a run that is there already is resumed. Default:"
  ' runs/FILE-VARIANT-seedSEED.',
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Check the config, print what a step needs, and stop.'
)
_MEMORY = flags.DEFINE_float(
  'device_memory_gib', None, 'Memory of a device.', lower_bound=0
)
_TFLOPS = flags.DEFINE_float(
  'device_tflops', None, 'Peak of a device, in 10^12 per s.', lower_bound=0
)
_GENERATOR_MEMORY = flags.DEFINE_float(
  'generator_memory_gib',
  None,
  'Memory of a server that generates, all its devices together.',
  lower_bound=0,
)
_TOPOLOGY = flags.DEFINE_string(
  'topology', None, 'TPU that the train step is compiled for, as v6e:16x16.'
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed', False, 'One of several processes, which the cluster knows.'
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'HOST:PORT at which process 0 can be reached.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'Processes of the run.', lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'Which of them this is, from 0.', lower_bound=0
)
_OF_THE_PROCESSES = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
_OF_THE_PLAN = (_MEMORY, _TFLOPS, _GENERATOR_MEMORY, _TOPOLOGY)


class _UsageError(Exception):
  """Arguments that cannot be used; the message is one line."""


def main(argv: Sequence[str]) -> int:
  """Runs one command line.

  Args:
    argv: Arguments, the program's name first.

  Returns:
    The exit code.
  """
  logging.basicConfig(level=logging.WARNING, format='%(message)s')
  logging.getLogger('scalerl_jax').setLevel(logging.INFO)
  try:
    if not _parse_flags(argv):
      return 0
    run_config = _read_config()
    workdir = _workdir(run_config)
    if _DRY_RUN.value:
      if _is_one_of_several():
        raise _UsageError('--dry_run plans for all processes, and is one')
      from scalerl_jax import build

      run_config, tokenizer = build.complete(run_config)
      _check_data(run_config, tokenizer)
      print(json.dumps(config_lib.to_dict(run_config), indent=2))
      code = _plan(run_config)
      print(f'would run in {workdir}')
      return code
    given = [f.name for f in _OF_THE_PLAN if f.value is not None]
    if given:
      raise _UsageError(f'--{given[0]} is of use with --dry_run only')
    if _is_one_of_several():
      _join()
    compilation.use_cache()
    # Not before the config is known to be right: it imports everything.
    from scalerl_jax import build

    try:
      print(build.run(run_config, workdir))
    except build.RunError as error:
      print(f'error: {config_lib.one_line(error)}', file=sys.stderr)
      return 1
  except (_UsageError, config_lib.ConfigError, data.DataError) as error:
    print(f'error: {config_lib.one_line(error)}', file=sys.stderr)
    return 2
  return 0


def _parse_flags(argv: Sequence[str]) -> bool:
  """Parses flags; False: help was asked for and given."""
  if any(a.lstrip('-') in ('help', 'h') for a in argv[1:]):
    print(__doc__)
    return False
  try:
    rest = flags.FLAGS(list(argv))
  except Exception as error:
    # The config file is a user's program, and an override may meet any fault
    # of it: whatever is raised here is about the command line.
    raise _UsageError(config_lib.one_line(error)) from None
  if len(rest) > 1:
    raise _UsageError(
      f'unexpected arguments {rest[1:]}; flags are --NAME=VALUE'
    )
  return True


def _read_config() -> config_lib.RunConfig:
  if flags.FLAGS['config'].value is None:
    raise _UsageError('--config is missing; try --config=configs/toy.py')
  try:
    config = _CONFIG.value.to_dict()
  except Exception as error:
    raise _UsageError(f'--config: {config_lib.one_line(error)}') from None
  return config_lib.from_config_dict(config)


def _workdir(run_config: config_lib.RunConfig) -> pathlib.Path:
  if _WORKDIR.value:
    return pathlib.Path(_WORKDIR.value)
  filename = config_flags.get_config_filename(flags.FLAGS['config'])
  path, _, variant = filename.partition(':')
  name = f'{pathlib.Path(path).stem}-{variant or run_config.recipe}'
  return pathlib.Path('runs') / f'{name}-seed{run_config.seed}'


def _check_data(
  run_config: config_lib.RunConfig, tokenizer: data.Tokenizer
) -> None:
  found = []
  for path in (run_config.data.train_path, run_config.data.eval_path):
    if path:
      found.append(
        data.read_problems(
          path,
          tokenizer=tokenizer,
          max_prompt_tokens=run_config.data.max_prompt_tokens,
        )
      )
  if len(found) == 2:
    data.check_disjoint(*found)


def _is_one_of_several() -> bool:
  given = [f.name for f in _OF_THE_PROCESSES if f.value is not None]
  return _DISTRIBUTED.value or bool(given)


def _join() -> None:
  """Meets the other processes; before anything asks JAX for its devices."""
  import jax

  found = {f.name: f.value for f in _OF_THE_PROCESSES}
  lacking = [name for name, value in found.items() if value is None]
  if _DISTRIBUTED.value:
    if len(lacking) < len(found):
      raise _UsageError('--distributed finds out what the others would say')
    where: dict[str, object] = {}
  else:
    if lacking:
      raise _UsageError(f'--{lacking[0]} is missing beside the others')
    if found['process_id'] >= found['num_processes']:
      raise _UsageError(
        f'--process_id={found["process_id"]} must be below --num_processes='
        f'{found["num_processes"]}'
      )
    where = {
      'coordinator_address': found['coordinator'],
      'num_processes': found['num_processes'],
      'process_id': found['process_id'],
    }
  try:
    jax.distributed.initialize(**where)
  except (RuntimeError, ValueError) as error:
    raise _UsageError(
      f'the processes did not meet: {config_lib.one_line(error)}'
    ) from None


def _plan(run_config: config_lib.RunConfig) -> int:
  """Prints what a step needs; returns the exit code."""
  from scalerl_jax import build

  def gib(flag: flags.FlagHolder[float | None]) -> float | None:
    return None if flag.value is None else flag.value * 2**30

  build.simulate_devices(math.prod(run_config.mesh.shape))
  try:
    found = build.plan(run_config, topology=_TOPOLOGY.value)
  except build.DoesNotFitError as error:
    print(error)
    return 1
  text, sound = build.report(
    found,
    device_memory=gib(_MEMORY),
    device_flops=None if not _TFLOPS.value else _TFLOPS.value * 1e12,
    generator_memory=gib(_GENERATOR_MEMORY),
  )
  print(text)
  return 0 if sound else 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
