"""A fleet whose servers do just what a test says, with no other process."""

import asyncio
import concurrent.futures
import contextlib
import time
import types

import numpy as np
import pytest

from scalerl_jax import records
from scalerl_jax.generation.sglang import client as client_lib
from scalerl_jax.generation.sglang import engine as engine_lib
from scalerl_jax.generation.sglang import fleet as fleet_lib
from tests import tiny_model

MADE = {}  # Address → client.


class Client(client_lib.Client):
  """A server that answers at once; `fails` is asked before each answer."""

  def __init__(self, address, *, control_s, api_key=None):
    super().__init__(address, control_s=control_s, api_key=api_key)
    self.fails = lambda name: False
    self.hangs = set()
    self.calls = []
    self.tag = 'none'
    self.sums = {'0/w': 'aa'}
    self.logp = -1.0
    self.keys = []
    MADE[address] = self

  async def _do(self, name, result=None):
    self.calls.append(name)
    while name in self.hangs:
      await asyncio.sleep(0.01)
    if self.fails(name):
      raise client_lib.UnavailableError(f'{self.address}/{name}: no')
    return result

  async def info(self, *, deadline_s=None):
    return await self._do('info', {'dtype': 'float32'})

  async def generate(self, token_ids, *, max_tokens, cache_key, **_):
    self.keys.append(cache_key)
    return await self._do(
      'generate',
      client_lib.Answer(
        token_ids=np.full(max_tokens, 2, np.int32),
        logps=np.full(max_tokens, -1.0, np.float32),
        tags=(self.tag,) * max_tokens,
        ending=client_lib.Ending.LENGTH,
      ),
    )

  async def score(self, token_ids, *, request_id):
    logps = np.full(len(token_ids) - 1, self.logp, np.float32)
    return await self._do('score', client_lib.Scores(logps=logps, tag=self.tag))

  async def pause(self, mode, *, deadline_s=None):
    await self._do('pause')

  async def resume(self, *, deadline_s=None):
    await self._do('resume')

  async def abort(self, request_id=None, *, deadline_s=None):
    await self._do('abort')

  async def load_weights(self, directory, *, tag, flush_cache):
    await self._do('load')
    self.tag = tag

  async def checksums(self):
    return await self._do('checksums', self.sums)

  async def close(self):
    await self._do('close')


class Transport:
  """Publishes nothing, with checksums as servers have them or with none."""

  def __init__(self, checksums):
    self.checksums = checksums

  def publish(self, params, version):
    return types.SimpleNamespace(directory='nowhere', checksums=self.checksums)

  def discard(self, published):
    pass

  def close(self):
    pass


@pytest.fixture
def make(monkeypatch):
  monkeypatch.setattr(client_lib, 'Client', Client)
  with contextlib.ExitStack() as stack:

    def engine(count=2, *, checksums=(('w', 'aa'),), **options):
      made = engine_lib.SglangEngine(
        engine_lib.SamplingSpec(
          num_slots=64,
          prompt_tokens=5,
          response_tokens=8,
          temperature=1.0,
          stop_ids=(1,),
          interruption=None,
          vocab_size=18,
        ),
        [f'http://server{i}' for i in range(count)],
        Transport(dict(checksums)),
        score=lambda params, ids: np.full(len(ids) - 1, -1.0, np.float32),
        seed=0,
        **options,
      )
      stack.enter_context(contextlib.closing(made))
      made.update_weights(None, 0)
      for client in MADE.values():
        client.calls.clear()
      return made

    yield engine


def test_a_burst_of_groups_is_spread(make):
  made = make(count=4)
  made.generate([tiny_model.request(v, num_samples=4) for v in range(32)])
  counts = [c.calls.count('generate') for c in MADE.values()]
  assert sum(counts) == 128
  assert max(counts) <= 2 * min(counts)


def test_a_rollout_that_is_given_up_has_no_tokens(make, monkeypatch):
  monkeypatch.setattr(fleet_lib, '_BACKOFF_S', 0.0)
  made = make()
  for client in MADE.values():
    client.fails = lambda name: name == 'generate'
  (group,) = made.generate([tiny_model.request(0)])
  for r in group.rollouts:
    assert r.finish_reason is records.FinishReason.ABORTED
    assert len(r.token_ids) == 0
  assert made.metrics()['sglang/servers_ready'] == 2


def test_w03_an_evaluation_without_servers_ends(make):
  made = make(deadline_s=0.5, probe_s=0.1)
  for client in MADE.values():
    client.fails = lambda name: name != 'close'
  with pytest.raises(fleet_lib.FleetError, match=r'server0/info: no; http'):
    made.generate([tiny_model.request(0)])


def test_w10_a_key_is_of_one_load_of_one_server(make):
  made = make(count=1)
  (client,) = MADE.values()
  keys = []
  for version in (1, 2):
    made.generate([tiny_model.request(version)])
    keys.append(set(client.keys[-2:]))
    made.update_weights(None, version)
  assert len(keys[0]) == len(keys[1]) == 1
  assert not keys[0] & keys[1]


def test_w13_every_server_must_take_the_weights(make):
  made = make(count=3)
  clients = list(MADE.values())
  clients[1].fails = lambda name: name == 'load'
  made.update_weights(None, 1)
  assert made.metrics()['sglang/servers_ready'] == 2
  assert 'resume' not in clients[1].calls  # Paused until it has them.


def wait_until(condition, *, seconds=30.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def ready(made):
  return made.metrics()['sglang/servers_ready']


def reasons(made):
  return made._fleet.reasons()


def test_w05_what_was_not_written_is_not_taken(make):
  made = make(count=2)
  clients = list(MADE.values())
  clients[0].sums = {'0/w': 'bb'}
  made.update_weights(None, 1)
  assert 'server0: it does not hold what was written: w' in reasons(made)
  assert 'resume' not in clients[0].calls


@pytest.mark.parametrize('wrong', [0, 1, 2])
def test_w05_without_a_manifest_most_servers_are_right(make, wrong):
  made = make(count=3, checksums=())
  clients = list(MADE.values())
  clients[wrong].sums = {'0/w': 'bb'}
  made.update_weights(None, 1)
  assert ready(made) == 2
  assert f'server{wrong}: it does not hold what most' in reasons(made)
  assert 'resume' not in clients[wrong].calls


def test_w05_two_that_disagree_are_both_sent_the_weights_again(make):
  made = make(count=2, checksums=(), deadline_s=0.5)
  client = MADE['http://server1']
  client.sums = {'0/w': 'bb'}
  with pytest.raises(fleet_lib.FleetError, match='no more than half of the'):
    made.update_weights(None, 1)
  assert made.version == 0
  assert ready(made) == 0
  client.sums = {'0/w': 'aa'}
  made.update_weights(None, 1)
  assert made.version == 1
  assert ready(made) == 2


def test_w05_a_server_that_hangs_keeps_no_others_waiting(make):
  made = make(count=3, checksums=())
  clients = list(MADE.values())
  clients[1].hangs.add('load')
  with concurrent.futures.ThreadPoolExecutor() as pool:
    push = pool.submit(made.update_weights, None, 1)
    wait_until(lambda: all('resume' in clients[i].calls for i in (0, 2)))
    assert not push.done()
    clients[1].hangs.clear()
    push.result()
  assert ready(made) == 3


def test_p11_one_that_joins_must_score_as_the_others_do(make):
  made = make(count=2, probe_s=0.02)
  late = MADE['http://server1']
  late.fails = lambda name: name == 'info'
  wait_until(lambda: ready(made) == 1)
  late.logp = -1.2
  late.fails = lambda name: False
  wait_until(lambda: 'log-probs differ from those of another' in reasons(made))
  assert ready(made) == 1
  late.logp = -1.05
  wait_until(lambda: ready(made) == 2)


def test_one_that_joins_is_compared_with_the_same_weights_only(make):
  made = make(count=2, probe_s=0.02)
  here, late = MADE.values()
  late.fails = lambda name: name == 'info'
  wait_until(lambda: ready(made) == 1)
  here.tag = 'others'  # While the new one has ours.
  late.fails = lambda name: False
  wait_until(lambda: 'the weights changed too often to' in reasons(made))
  made.update_weights(None, 1)
  wait_until(lambda: ready(made) == 2)


def test_a_push_meets_a_server_that_is_just_coming_back(make):
  made = make(count=1, probe_s=0.02)
  client = MADE['http://server0']
  client.fails = lambda name: name == 'info'
  wait_until(lambda: ready(made) == 0)
  client.calls.clear()
  client.hangs.add('load')
  client.fails = lambda name: False
  wait_until(lambda: 'load' in client.calls)  # Of the old weights.
  with concurrent.futures.ThreadPoolExecutor() as pool:
    push = pool.submit(made.update_weights, None, 1)
    wait_until(lambda: made._fleet._weights.version == 1)
    client.hangs.clear()
    push.result(timeout=30)
  assert made.version == 1
  assert ready(made) == 1


def test_closing_does_not_wait_for_weights_to_be_taken(make):
  made = make(count=1, deadline_s=600.0)
  MADE['http://server0'].fails = lambda name: name == 'load'
  with concurrent.futures.ThreadPoolExecutor() as pool:
    push = pool.submit(made.update_weights, None, 1)
    wait_until(lambda: made.metrics()['sglang/pushes_failed'] == 1)
    made.close()
    with pytest.raises(fleet_lib.FleetError, match='could not be brought'):
      push.result()


def test_a_server_that_talks_nonsense_is_looked_at_again(make):
  made = make(probe_s=0.05)
  client = MADE['http://server0']

  def fails(name):
    if name == 'info':
      raise AttributeError('nonsense')
    return False

  client.fails = fails
  while client.calls.count('info') < 3:
    made.step()
  client.fails = lambda name: False
  assert made.metrics()['sglang/servers_ready'] == 2


def test_a_server_is_left_sampling(make):
  made = make(count=1)
  made.close()
  (client,) = MADE.values()
  assert client.calls[-3:] == ['abort', 'resume', 'close']


@pytest.fixture(autouse=True)
def _forget():
  MADE.clear()
