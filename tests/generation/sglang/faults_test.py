"""What goes wrong with real servers; the rollouts come all the same."""

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import signal
import time

import numpy as np
import pytest

from scalerl_jax.generation.sglang import client as client_lib
from scalerl_jax.generation.sglang import fleet as fleet_lib
from scalerl_jax.generation.sglang import transport
from tests import tiny_model
from tests.generation import tiny_engine
from tests.generation.sglang import contract_test
from tests.generation.sglang import proxy as proxy_lib
from tests.generation.sglang import tiny_fleet

pytestmark = pytest.mark.usefixtures('quick_compilation')

LONG = contract_test.LONG
# A server that came back takes as long as one that starts.
BACK_S = 300.0


@pytest.fixture
def make(servers, tmp_path):
  """Makes an engine on both servers; `urls` may name others."""
  with contextlib.ExitStack() as stack:

    def engine(urls=None, **kind):
      return stack.enter_context(
        tiny_fleet.engine(urls or servers.urls, tmp_path / 'weights', **kind)
      )

    yield engine


@pytest.fixture
def proxy(servers):
  with contextlib.closing(proxy_lib.Proxy(servers.urls[0])) as made:
    yield made


def counts(made) -> fleet_lib.Counts:
  return made._fleet.counts


def run(made, *, visits=range(12), during=lambda: None, **kwargs):
  """Generates long rollouts; calls `during` when they are on their way."""
  for visit in visits:
    made.submit(tiny_model.request(visit))
  groups = made.step()
  during()
  while made.num_in_flight:
    groups += made.step()
  groups.sort(key=lambda g: g.request.visit)
  # None is lost, none comes twice, none was given up.
  assert [g.request.visit for g in groups] == list(visits)
  for _, r in tiny_engine.rollouts(groups):
    assert len(r.token_ids) == 200
  contract_test.assert_scored_alike(groups, **kwargs)
  return groups


def wait_until(condition, *, seconds=BACK_S):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.1)


def call(url, name, *args, **kwargs):
  """Calls a server as a stranger would."""

  async def main():
    made = client_lib.Client(url, control_s=60.0)
    try:
      return await getattr(made, name)(*args, **kwargs)
    finally:
      await made.close()

  return asyncio.run(main())


# --- Servers. ---------------------------------------------------------------


def test_w14_a_server_that_is_killed_comes_back(servers, make):
  made = make(**LONG, options={'probe_s': 2.0})

  def kill():
    os.killpg(servers.process_groups[0], signal.SIGKILL)

  run(made, during=kill, weights={0: 0})
  assert counts(made).servers_lost >= 1
  assert counts(made).requests_repeated >= 1
  made.update_weights(tiny_model.params(1), 1)  # On the other one.
  wait_until(lambda: counts(made).servers_ready == 2)
  before = counts(made).requests
  run(made, visits=range(20, 32), weights={1: 1})
  assert counts(made).requests >= before + 24
  assert servers.num_restarts >= 1


def test_w20_a_server_that_hangs_is_left_and_taken_back(servers, make):
  made = make(**LONG, options={'probe_s': 1.0})
  group = servers.process_groups[1]

  def stop():
    os.killpg(group, signal.SIGSTOP)

  try:
    run(made, during=stop, weights={0: 0})
    assert counts(made).servers_lost >= 1
    made.update_weights(tiny_model.params(1), 1)
  finally:
    os.killpg(group, signal.SIGCONT)
  wait_until(lambda: counts(made).servers_ready == 2)
  run(made, visits=range(20, 32), weights={1: 1})


def test_w15_a_pause_is_not_taken_for_a_death(servers, make):
  made = make(**LONG, options={'probe_s': 2.0})

  def pause():
    for url in servers.urls:
      call(url, 'pause', 'in_place')
    start = time.monotonic()
    # From 20 s on SGLang says that it is not healthy.
    while time.monotonic() < start + 22:
      assert made.step() == []
    assert counts(made).servers_lost == 0
    for url in servers.urls:
      call(url, 'resume')

  run(made, during=pause, weights={0: 0})
  assert counts(made).requests_repeated == 0


def test_s04_a_straggler_is_taken_to_another_server(servers, make):
  made = make(**LONG, options={'request_s': 3.0, 'probe_s': 3.0})

  def pause():
    call(servers.urls[0], 'pause', 'in_place')

  try:
    run(made, visits=range(4), during=pause, weights={0: 0})
  finally:
    call(servers.urls[0], 'resume')
  assert counts(made).requests_repeated + counts(made).requests_aborted >= 1


def test_s12_weights_of_a_stranger_are_found_out(servers, make, tmp_path):
  made = make(**LONG, options={'probe_s': 2.0})
  other = transport.DiskTransport(tmp_path / 'other', tiny_fleet.write)
  foreign = str(other.publish(tiny_model.params(2), 0).directory)
  tag = '0123456789ab:0'  # Of an earlier run, say.

  def load():
    url = servers.urls[0]
    call(url, 'pause', 'in_place')
    call(url, 'load_weights', foreign, tag=tag, flush_cache=False)
    call(url, 'resume')

  with contextlib.closing(other):
    run(made, during=load, weights={0: 0})
  assert counts(made).answers_stale >= 1
  wait_until(lambda: counts(made).servers_ready == 2)


def test_w02_nothing_waits_for_ever(make):
  with pytest.raises(fleet_lib.FleetError, match=r'127.0.0.1:9/server_info'):
    make(urls=('http://127.0.0.1:9',))


def test_a_server_may_join_later(servers, make, proxy):
  proxy.cuts = lambda path: True
  urls = (proxy.url, servers.urls[1])
  made = make(urls=urls, **LONG, options={'probe_s': 1.0})
  assert counts(made).servers_ready == 1
  run(made, visits=range(4), weights={0: 0})
  proxy.cuts = lambda path: False
  wait_until(lambda: counts(made).servers_ready == 2)
  run(made, visits=range(10, 14), weights={0: 0})


def test_p01_a_server_scores_as_the_trainer_does(servers, make):
  made = make(temperature=0.7)  # Which is not that of scores.
  ids = np.random.default_rng(1).integers(0, 17, 20)
  (expected,) = tiny_model.score(tiny_model.params(0), [ids])
  for url in servers.urls:
    for request_id in ('first', 'again'):
      found = call(
        url, 'score', ids.tolist(), request_id=request_id, deadline_s=60.0
      )
      np.testing.assert_allclose(found.logps, expected[1:], rtol=0, atol=1e-4)
      assert made._fleet.version_of(found.tag) == 0


def test_p11_a_server_with_another_model_is_refused(servers, make):
  wrong = tiny_model.params(3)
  made = make(weights=None)
  score = made._score
  made._score = lambda params, token_ids: score(wrong, token_ids)
  with pytest.raises(fleet_lib.FleetError, match='log-probs differ from the'):
    made.update_weights(tiny_model.params(0), 0)


# --- Connections. -----------------------------------------------------------


def test_m05_connections_that_are_cut_cost_no_rollout(servers, make, proxy):
  rng = np.random.default_rng(0)
  made = make(urls=(proxy.url, servers.urls[1]), **LONG)
  proxy.cuts = lambda path: path == '/generate' and rng.random() < 0.5
  run(made, weights={0: 0})
  assert proxy.num_cut >= 1
  assert counts(made).requests_repeated >= proxy.num_cut


# --- Weights. ---------------------------------------------------------------


def test_w04_weights_go_by_files_alone(servers, make, proxy):
  paths = []
  proxy.cuts = paths.append  # Which cuts none.
  made = make(
    urls=(proxy.url, servers.urls[1]), **LONG, options={'update': 'retract'}
  )
  paths.clear()
  run(
    made,
    weights={0: 0, 1: 1},
    during=lambda: made.update_weights(tiny_model.params(1), 1),
  )
  pushes = [path for path in paths if 'weights' in path]
  assert pushes.count('/update_weights_from_disk') == 1
  assert set(pushes) <= {'/update_weights_from_disk', '/weights_checker'}


def test_w21_a_push_that_dies_half_way_leaves_that_server_out(
  servers, make, proxy
):
  made = make(
    urls=(proxy.url, servers.urls[1]), **LONG, options={'probe_s': 2.0}
  )
  proxy.cuts = lambda path: path in ('/continue_generation', '/generate')
  made.update_weights(tiny_model.params(1), 1)
  assert counts(made).servers_ready == 1
  run(made, visits=range(4), weights={1: 1})
  proxy.cuts = lambda path: False
  wait_until(lambda: counts(made).servers_ready == 2)
  run(made, visits=range(10, 22), weights={1: 1})


def test_a_full_disk_is_waited_for(servers, small_disk):
  with tiny_fleet.engine(servers.urls, small_disk / 'weights') as made:
    ballast = small_disk / 'ballast'
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    made._deadline_s = 2.0
    with pytest.raises(fleet_lib.FleetError, match=r'version 1 could .* left'):
      made.update_weights(tiny_model.params(1), 1)
    assert made.version == 0
    made._deadline_s = 600.0
    failed = counts(made).pushes_failed
    with concurrent.futures.ThreadPoolExecutor() as pool:
      push = pool.submit(made.update_weights, tiny_model.params(1), 1)
      wait_until(lambda: counts(made).pushes_failed == failed + 2)
      assert made.version == 0
      ballast.unlink()
      push.result()
    assert made.version == 1
    groups = made.generate([tiny_model.request(0)])
    contract_test.assert_scored_alike(groups, weights={1: 1})


@pytest.mark.parametrize('update', ['in_place', 'retract'])
def test_w01_w05_w10_versions_are_right_through_many_updates_under_load(
  make, update
):
  made = make(**LONG, options={'update': update})
  visits = iter(range(1000))
  groups = []

  def pump():
    while made.has_room:
      made.submit(tiny_model.request(next(visits)))
    groups.extend(made.step())

  for version in range(1, 21):
    for _ in range(6):
      pump()
    made.update_weights(tiny_model.params(version % 3), version)
  groups += tiny_engine.run_to_end(made)
  found = sorted(g.request.visit for g in groups)
  assert found == list(range(next(visits)))
  pairs = tiny_engine.rollouts(groups)
  assert all(len(r.token_ids) == 200 for _, r in pairs)
  assert max(len(set(r.policy_versions)) for _, r in pairs) >= 2
  assert counts(made).requests_aborted == counts(made).requests_repeated == 0
  seeds = {v: v % 3 for v in range(21)}
  if update == 'retract':
    n = contract_test.assert_scored_alike(groups, weights=seeds)
    assert n == 400 * len(groups)
    return
  for r, logps in tiny_engine.scored_in_place(
    groups, seeds, width=tiny_fleet.WIDTH
  ):
    np.testing.assert_allclose(r.logps, logps, rtol=0, atol=1e-4)


class Truncating(transport.DiskTransport):
  """Cuts off the end of the weights of one publication."""

  def publish(self, params, version):
    published = super().publish(params, version)
    if version == 1 and not getattr(self, 'done', False):
      self.done = True
      path = published.directory / 'model.safetensors'
      os.truncate(path, path.stat().st_size // 2)
    return published


def test_w07_a_truncated_file_is_written_again(servers, make, monkeypatch):
  # SGLang 0.5.23 does not survive such a file: both servers start again.
  monkeypatch.setattr(transport, 'DiskTransport', Truncating)
  made = make(**LONG, options={'update': 'retract'})

  def push():
    made.update_weights(tiny_model.params(1), 1)

  groups = run(made, during=push, weights={0: 0, 1: 1})
  assert counts(made).pushes_failed >= 1
  assert counts(made).pushes == 2
  versions = [r.policy_versions for _, r in tiny_engine.rollouts(groups)]
  assert set(np.concatenate(versions)) == {0, 1}
