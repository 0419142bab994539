"""A whole run whose rollouts come from a real server that it starts."""

import json

import pytest

from scalerl_jax import build
from scalerl_jax import config as config_lib
from scalerl_jax.build import engines
from tests import tiny


@pytest.fixture(scope='module')
def workdir(sglang_python, tmp_path_factory):
  path = tmp_path_factory.mktemp('run')
  config = tiny.config(
    num_updates=10,
    batch={'prompts': 4},
    engine=tiny.sglang(sglang_python),
    pipeline={'schedule': 'threads', 'lockstep_lead': 0, 'deadline_s': 300.0},
    evaluation={'every': 5},
  )
  assert 'pass rate' in build.run(config, path)
  return path


def rows(workdir, name):
  lines = (workdir / f'{name}.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_it_runs_to_the_end(workdir):
  metrics = rows(workdir, 'metrics')
  assert [row['step'] for row in metrics] == list(range(1, 11))
  assert all(row['num_rollouts'] == 16 for row in metrics)
  assert all(row['num_aborted'] == 0 for row in metrics)
  assert max(row['lag_max'] for row in metrics) <= 2
  assert not any(row['update_skipped'] for row in metrics)


def test_s08_s10_evaluations_are_of_their_version(workdir):
  evals = rows(workdir, 'evals')
  assert [row['step'] for row in evals] == [0, 5, 10]
  assert all(row['policy_version'] == row['step'] for row in evals)


def test_l16_what_is_on_policy_has_a_ratio_of_one(workdir):
  metrics = rows(workdir, 'metrics')
  assert metrics[0]['lag_max'] == 0
  for row in metrics:
    # Where all groups have no variance, no token has a ratio.
    if row['lag_max'] == 0 and row['num_tokens']:
      assert row['ratio_max'] == pytest.approx(1, abs=1e-4)
      assert row['logp_diff_max'] < 1e-4


def test_what_happened_to_servers_is_in_the_metrics(workdir):
  last = rows(workdir, 'metrics')[-1]
  assert last['sglang/servers_ready'] == 1
  assert last['sglang/servers_lost'] == 0
  # Version 0 and one for each update, but for those that were overtaken.
  assert 2 <= last['sglang/pushes'] <= 11
  assert last['sglang/pushes_failed'] == 0


def test_nothing_is_left_behind(workdir):
  fields = json.loads((workdir / 'config.json').read_text())['config']
  config = config_lib.from_config_dict(fields)
  assert not engines.weights_dir(config, workdir).exists()
  assert (workdir / 'servers' / 'server0.log').exists()
