"""The experts of mixtures, as real servers tell them, against the trainer's."""

import dataclasses

import jax
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax.generation.sglang import fleet as fleet_lib
from scalerl_jax.generation.sglang import servers as servers_lib
from scalerl_jax.training import batching
from tests import tiny_model
from tests.generation import tiny_engine
from tests.generation.sglang import contract_test
from tests.generation.sglang import tiny_fleet
from tests.generation.sglang import tiny_servers

pytestmark = pytest.mark.usefixtures('quick_compilation')

# Qwen3-MoE. Its head is not tied: SGLang does not do that for this family.
MODEL = tiny_model.spec(
  tied_head=False,
  num_layers=2,
  qk_norm=True,
  moe=models.MoeSpec(
    num_experts=4, experts_per_token=2, expert_dim=24, router='softmax'
  ),
)
REQUESTS = [tiny_model.request(v) for v in range(9)]


@pytest.fixture(scope='module')
def url(sglang_python, tmp_path_factory):
  specs = tiny_servers.specs(
    tmp_path_factory.mktemp('moe'),
    sglang_python,
    count=1,
    model=MODEL,
    tell_experts=True,
  )
  with servers_lib.Supervisor(specs) as supervisor:
    supervisor.wait_ready(tiny_servers.READY_S)
    yield supervisor.urls[0]


@pytest.fixture
def make(url, tmp_path):
  return lambda **kind: tiny_fleet.engine(
    (url,), tmp_path / 'weights', model=MODEL, **kind
  )


def replaced(group, changes):
  """Replaces fields of each rollout, which `changes` tells of it."""
  rollouts = [dataclasses.replace(r, **changes(r)) for r in group.rollouts]
  return dataclasses.replace(group, rollouts=tuple(rollouts))


def router_stats(groups, params):
  """What the trainer makes of the experts that rollouts passed through."""
  rows = sum(len(g.rollouts) for g in groups)
  batch, _ = batching.assemble(
    [replaced(g, lambda r: {'reward': 1.0}) for g in groups],
    num_rows=rows,
    row_tokens=tiny_fleet.WIDTH,
    truncated='keep',
  )
  policy = jax.jit(models.make_policy_fn(MODEL, temperature=1.0))
  return policy(
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    routed_experts=batch.routed_experts,
  ).router


@pytest.mark.parametrize('interrupt', [False, True])
def test_m04_experts_are_those_of_the_trainer(make, interrupt):
  params = tiny_model.params(0, MODEL)
  with make(interrupt=interrupt) as made:
    groups = made.generate(REQUESTS)
  rollouts = [r for _, r in tiny_engine.rollouts(groups)]
  assert any(r.is_interrupted for r in rollouts) == interrupt
  num_tokens = sum(len(r.token_ids) for r in rollouts)
  for r in rollouts:
    assert r.routed_experts.shape == (len(r.token_ids), 2, 2)
    assert (r.routed_experts >= 0).all()
  assert (
    len(np.unique(np.concatenate([r.routed_experts for r in rollouts]))) > 2
  )
  found = router_stats(groups, params)
  assert int(found.num_replayed) == 2 * num_tokens
  assert int(found.num_agreed) == 2 * num_tokens
  contract_test.assert_scored_alike(groups, weights={0: 0}, model=MODEL)


def test_m04_experts_follow_the_weights_in_flight(make):
  with make(**contract_test.LONG) as made:
    for version in range(1, 11):
      contract_test.submit_and_begin(made)
      made.update_weights(tiny_model.params(version % 2, MODEL), version)
      groups = tiny_engine.run_to_end(made)
      rollouts = [r for _, r in tiny_engine.rollouts(groups)]
      if all(len(set(r.policy_versions)) == 2 for r in rollouts):
        break
    else:
      raise AssertionError('no update met the rollouts')
  old = tiny_model.params((version + 1) % 2, MODEL)
  for r in rollouts:
    assert r.routed_experts.shape == (200, 2, 2)
    assert (r.routed_experts >= 0).all()
  before = router_stats([cut(g, version - 1) for g in groups], old)
  assert before.num_replayed > 0
  assert before.num_agreed == before.num_replayed
  assert router_stats(groups, old).num_agreed < 2 * 200 * len(rollouts)


def cut(group, version):
  """What was sampled with one version, which comes first."""
  return replaced(
    group,
    lambda r: {
      name: getattr(r, name)[: int((r.policy_versions == version).sum())]
      for name in (
        'token_ids',
        'logps',
        'policy_versions',
        'sampled',
        'routed_experts',
      )
    },
  )


def test_evaluations_do_not_ask(make):
  with make() as made:
    (group,) = made.fork(seed=1, keep_routing=False).generate(REQUESTS[:1])
  assert all(r.routed_experts is None for r in group.rollouts)


def test_a_server_that_cannot_tell_is_refused(servers, tmp_path):
  with (
    pytest.raises(fleet_lib.FleetError, match='--enable-return-routed-experts'),
    tiny_fleet.engine(servers.urls, tmp_path / 'weights', model=MODEL),
  ):
    pass
