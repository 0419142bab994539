"""Seconds per update of whole runs: PipelineRL-8 against synchronous.

    python benchmarks/end_to_end.py

Both are the toy run in lockstep, warm start and evaluation left out; the
reference is `pipeline.max_lag=0`, which drains the engine before every update.
On one machine both stages share the cores, so that only the batching of the
decode loop can gain.
"""

import setting  # isort: skip  # First: it sits beside this script.

import json
import pathlib
import statistics
import tempfile

from scalerl_jax import build
from scalerl_jax import config as config_lib

_UPDATES = 14
_SKIPPED = 5  # They compile.


def main() -> None:
  """Prints seconds per update of both and their ratio."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    ours = _seconds(root / 'pipeline')
    reference = _seconds(root / 'synchronous', max_lag=0, lockstep_lead=0)
  print(f'pipeline_rl-8: {ours:.2f} s per update')
  print(f'synchronous: {reference:.2f} s per update')
  print(f'ratio: {reference / ours:.2f}')


def _seconds(workdir, **pipeline):
  config = setting.toy_config()
  config.num_updates = _UPDATES
  config.warm_start.num_steps = 0
  config.pipeline.update(pipeline)
  config.evaluation.every = _UPDATES
  config.evaluation.num_problems = 1
  config.evaluation.samples_per_problem = 1
  config.reporting.plots = False
  config.checkpoint.every = _UPDATES
  build.run(config_lib.from_config_dict(config), workdir)
  rows = [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  return statistics.median(row['update_s'] for row in rows[_SKIPPED:])


if __name__ == '__main__':
  main()
