"""A run's directory: who may use it, and the problems generated into it."""

import importlib.metadata
import json
import pathlib
import subprocess
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax import data
from scalerl_jax import records
from scalerl_jax.data import arithmetic
from scalerl_jax.reporting import writers

# May change when a run is resumed: none of them alters an update.
_FREE = (
  'num_updates',
  'checkpoint.',
  'reporting.',
  'pipeline.deadline_s',
  'engine.start_servers',
  'engine.sglang.',
)
_PACKAGES = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'scipy')


def open_workdir(
  config: config_lib.RunConfig, workdir: pathlib.Path
) -> pathlib.Path:
  """Creates a run's directory, or checks that it is of the same run.

  Args:
    config: The configuration.
    workdir: The directory.

  Returns:
    The directory.

  Raises:
    config_lib.ConfigError: It cannot be written to, or holds a run of another
      configuration.
  """
  path = workdir / 'config.json'
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if path.exists():
      _check_same(json.loads(path.read_text()), config, workdir)
    writers.write_json(path, _describe(config))
  except OSError as error:
    raise config_lib.ConfigError(
      f'--workdir={workdir} cannot be written to: {error.strerror}'
    ) from None
  except json.JSONDecodeError:
    raise config_lib.ConfigError(
      f'{path} is damaged; restore it or use a new --workdir'
    ) from None
  return workdir


def read_problems(
  config: config_lib.RunConfig,
  workdir: pathlib.Path,
  tokenizer: data.Tokenizer,
) -> tuple[list[records.Problem], list[records.Problem]]:
  """Reads training and held-out problems; generates the toy's if asked to.

  Args:
    config: The configuration.
    workdir: Where generated files go.
    tokenizer: Measures prompts.

  Returns:
    (training problems, held-out problems).

  Raises:
    data.DataError: A file cannot be used, or the two overlap.
  """
  found = []
  for path, split, count in (
    (
      config.data.train_path,
      arithmetic.Split.TRAIN,
      config.data.toy.num_train,
    ),
    (
      config.data.eval_path,
      arithmetic.Split.HELD_OUT,
      config.data.toy.num_eval,
    ),
  ):
    file = (
      pathlib.Path(path) if path else _generate(config, workdir, split, count)
    )
    found.append(
      data.read_problems(
        file,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
      )
    )
  train, held_out = found
  data.check_disjoint(train, held_out)
  return train, held_out[: config.evaluation.num_problems]


def _generate(
  config: config_lib.RunConfig,
  workdir: pathlib.Path,
  split: arithmetic.Split,
  count: int,
) -> pathlib.Path:
  path = workdir / 'data' / f'{split.name.lower()}.jsonl'
  if not path.exists():
    path.parent.mkdir(exist_ok=True)
    toy = config.data.toy
    arithmetic.write_jsonl(
      path,
      arithmetic.problems(
        split,
        num_problems=count,
        min_operations=toy.min_operations,
        max_operations=toy.max_operations,
        seed=toy.seed,
      ),
    )
  return path


def _check_same(
  before: dict[str, Any], config: config_lib.RunConfig, workdir: pathlib.Path
) -> None:
  now = json.loads(json.dumps(config_lib.to_dict(config)))
  changed = [
    line
    for line in config_lib.differences(before.get('config', {}), now)
    if not line.startswith(_FREE)
  ]
  if changed:
    raise config_lib.ConfigError(
      f'--workdir={workdir} holds a run of another configuration'
      f' ({"; ".join(changed)}); use a new --workdir or the same values'
    )


def _describe(config: config_lib.RunConfig) -> dict[str, Any]:
  return {
    'config': config_lib.to_dict(config),
    'versions': {name: importlib.metadata.version(name) for name in _PACKAGES},
    'commit': _commit(),
  }


def _commit() -> str | None:
  """Commit of the source tree; None where it is not a git checkout."""
  here = pathlib.Path(__file__).parent
  try:
    done = subprocess.run(
      ['git', 'rev-parse', 'HEAD'],
      cwd=here,
      capture_output=True,
      text=True,
      timeout=10,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
