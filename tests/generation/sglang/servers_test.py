"""How servers are started, watched and stopped, on small processes and real."""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from scalerl_jax.generation.sglang import cpu_platform
from scalerl_jax.generation.sglang import servers as servers_lib

_ROOT = pathlib.Path(__file__).parents[3]
# A server of a moment: a child that must end with it, and an answer to /ping.
_SERVER = """
import http.server, os, signal, subprocess, sys, time
child = subprocess.Popen(
  [sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
with open(sys.argv[2], 'a') as pids:
  pids.write(f'{os.getpid()} {child.pid}\\n')
print('hello', flush=True)
if sys.argv[3] == 'deaf':
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[3] == 'broken':
  sys.exit('no such model')
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200 if self.path == '/ping' else 404)
    self.end_headers()
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""
_OWNER = """
import pathlib, sys, time
from scalerl_jax.generation.sglang import servers
from tests.generation.sglang import servers_test
directory = pathlib.Path(sys.argv[1])
running = servers_test.supervisor([servers_test.spec(directory)], directory)
running.wait_ready(30.0)
if sys.argv[2] == 'raises':
  raise RuntimeError('as it happens')
print('ready', flush=True)
time.sleep(600)
"""


def spec(directory, **changes):
  fields = {
    'python': sys.executable,
    'model_path': directory / 'model',
    'log_path': directory / 'server.log',
    'port': servers_lib.free_ports(1)[0],
    'context_tokens': 64,
    'max_running_requests': 4,
  }
  return servers_lib.ServerSpec(**(fields | changes))


def supervisor(specs, directory, *, kind='', **options):
  def command_fn(of):
    pids = str(directory / 'pids')
    argv = [of.python, '-S', '-c', _SERVER, str(of.port), pids, kind]
    return argv, {}

  options = {'backoff_s': 0.1, 'grace_s': 5.0} | options
  return servers_lib.Supervisor(specs, command_fn=command_fn, **options)


def _pids(directory):
  return [int(p) for p in (directory / 'pids').read_text().split()]


def _is_alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] not in 'ZX'


def _wait(condition, seconds=20.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not come'
    time.sleep(0.05)


@pytest.mark.parametrize(
  ('changes', 'present', 'absent'),
  [
    ({}, '-m sglang.launch_server --model-path', '--max-total-tokens'),
    ({}, '--load-format dummy --skip-tokenizer-init', '--attention-backend'),
    ({}, '--sampling-defaults openai --weight-version none', '--config'),
    ({}, '--device cuda --dtype bfloat16 --enable-fp32-lm-head', 'cpu'),
    ({'max_total_tokens': 100}, '--max-total-tokens 100', 'cpu'),
    ({'device': 'cpu'}, '-m scalerl_jax.generation.sglang.cpu_server', 'cuda'),
    ({'device': 'cpu'}, '--sampling-backend pytorch', 'cuda'),
    ({'api_key': 'secret'}, '--config ', 'secret'),
    ({'args': ('--tp-size', '2')}, '--tp-size 2', 'cpu'),
    ({}, '--context-length', '--enable-return-routed-experts'),
    ({'tell_experts': True}, '--enable-return-routed-experts', 'cpu'),
  ],
)
def test_command_says_what_the_specification_asks_for(
  changes, present, absent, tmp_path
):
  asked = spec(tmp_path, **changes)
  argv, environment = servers_lib.command(asked)
  line = ' '.join(argv).replace(str(tmp_path), '')
  assert present in line
  assert absent not in line
  assert f'--host 127.0.0.1 --port {asked.port} ' in line
  is_cpu = asked.device == 'cpu'
  assert (cpu_platform.VARIABLE in environment) == is_cpu
  assert environment['HF_HUB_OFFLINE'] == '1'


def test_key_is_not_shown(tmp_path):
  assert 'secret' not in repr(spec(tmp_path, api_key='secret'))


@pytest.mark.parametrize('host', ['0.0.0.0', '10.0.0.1', '::', 'example.org'])
def test_other_machines_need_a_key(tmp_path, host):
  with pytest.raises(ValueError, match='needs an api_key'):
    spec(tmp_path, host=host)
  assert spec(tmp_path, host=host, api_key='k').url.startswith('http://')


@pytest.mark.parametrize('host', ['127.0.0.1', '::1', 'localhost'])
def test_loopback_needs_no_key(tmp_path, host):
  assert spec(tmp_path, host=host).host == host


def test_ports_are_in_range_and_differ(tmp_path):
  with pytest.raises(ValueError, match='port=0'):
    spec(tmp_path, port=0)
  assert len(set(servers_lib.free_ports(20))) == 20
  one = spec(tmp_path)
  with pytest.raises(ValueError, match='port must differ'):
    supervisor([one, one], tmp_path)


def test_platform_is_chosen_only_where_it_is_asked_for(monkeypatch):
  monkeypatch.delenv('SGLANG_PLATFORM', raising=False)
  assert cpu_platform.activate() is None
  monkeypatch.setenv('SGLANG_PLATFORM', 'another')
  assert cpu_platform.activate() is None
  monkeypatch.setenv('SGLANG_PLATFORM', 'scalerl_cpu')
  name = 'scalerl_jax.generation.sglang.cpu_platform:CpuPlatform'
  assert cpu_platform.activate() == name


def test_key_goes_by_a_file_that_only_the_owner_reads(tmp_path):
  asked = spec(tmp_path, api_key='se"cret')
  with supervisor([asked], tmp_path):
    for path in (asked.key_path, asked.log_path):
      assert path.stat().st_mode & 0o777 == 0o600
    assert asked.key_path.read_text() == 'api-key: "se\\"cret"\n'
  assert not asked.key_path.exists()


def test_close_ends_whole_trees_and_nothing_else(tmp_path):
  with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1) as other:
    with supervisor([spec(tmp_path)], tmp_path) as running:
      running.wait_ready(30.0)
      assert all(map(_is_alive, _pids(tmp_path)))
    running.close()
    _wait(lambda: not any(map(_is_alive, _pids(tmp_path))))
    assert running.process_groups == (None,)
    assert other.poll() is None
    other.communicate(b'\n')


def test_who_does_not_listen_is_killed(tmp_path):
  with supervisor(
    [spec(tmp_path)], tmp_path, kind='deaf', grace_s=0.5
  ) as running:
    running.wait_ready(30.0)
  _wait(lambda: not any(map(_is_alive, _pids(tmp_path))))


def test_who_was_stopped_is_ended_too(tmp_path):
  with supervisor([spec(tmp_path)], tmp_path) as running:
    running.wait_ready(30.0)
    os.killpg(running.process_groups[0], signal.SIGSTOP)
    started = time.monotonic()
  assert time.monotonic() - started < 5.0  # It heard SIGTERM.
  _wait(lambda: not any(map(_is_alive, _pids(tmp_path))))


@pytest.mark.parametrize('of_group', [True, False])
def test_a_server_that_dies_is_started_again(tmp_path, of_group):
  with supervisor([spec(tmp_path)], tmp_path) as running:
    running.wait_ready(30.0)
    pid, child = _pids(tmp_path)
    if of_group:
      os.killpg(running.process_groups[0], signal.SIGKILL)
    else:
      os.kill(pid, signal.SIGKILL)
    _wait(lambda: running.num_restarts == 1)
    running.wait_ready(30.0)
    _wait(lambda: not _is_alive(child))
    assert len(_pids(tmp_path)) == 4
    running.check()


def test_a_server_without_its_guard_ends(tmp_path):
  with supervisor([spec(tmp_path)], tmp_path) as running:
    running.wait_ready(30.0)
    pids = _pids(tmp_path)
    os.kill(running.process_groups[0], signal.SIGKILL)
    _wait(lambda: not any(map(_is_alive, pids)))
    _wait(lambda: running.num_restarts == 1)
    running.wait_ready(30.0)


def test_gives_up_with_the_end_of_the_log(tmp_path, caplog):
  started = time.monotonic()
  with supervisor(
    [spec(tmp_path)], tmp_path, kind='broken', max_restarts=2, backoff_s=0.5
  ) as running:
    with pytest.raises(
      servers_lib.ServerError, match=r'2 restarts in a row(.|\n)*no such model'
    ):
      running.wait_ready(60.0)
    assert time.monotonic() - started > 0.5 + 1.0  # The pauses.
    assert running.num_restarts == 2
    with pytest.raises(servers_lib.ServerError):
      running.check()
  assert caplog.text.count('starts again in') == 2
  _wait(lambda: not any(map(_is_alive, _pids(tmp_path))))


def test_a_long_life_begins_a_new_row(tmp_path):
  with supervisor(
    [spec(tmp_path)], tmp_path, kind='broken', max_restarts=1, stable_s=0.0
  ) as running:
    _wait(lambda: running.num_restarts >= 3)
    running.check()


def test_waiting_has_an_end(tmp_path):
  asked = spec(tmp_path)
  with (
    servers_lib.Supervisor(
      [asked],
      command_fn=lambda of: (['sleep', '600'], {}),
    ) as running,
    pytest.raises(servers_lib.ServerError, match=r'not ready after 0\.3 s'),
  ):
    running.wait_ready(0.3)


@pytest.mark.parametrize('how', ['SIGKILL', 'SIGTERM', 'SIGINT', 'raises'])
def test_servers_end_with_their_owner(tmp_path, how):
  with subprocess.Popen(
    [sys.executable, '-c', _OWNER, tmp_path, how],
    cwd=_ROOT,
    env=os.environ | {'PYTHONPATH': str(_ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  ) as owner:
    if how != 'raises':
      assert owner.stdout.readline() == b'ready\n'
      pids = _pids(tmp_path)
      assert all(map(_is_alive, pids))
      owner.send_signal(signal.Signals[how])
    try:
      owner.wait(60)
    finally:
      owner.kill()
  pids = _pids(tmp_path)
  _wait(lambda: not any(map(_is_alive, pids)))


def _ask(url, path, body=None, method=None):
  request = urllib.request.Request(
    f'{url}{path}',
    None if body is None else json.dumps(body).encode(),
    {'Content-Type': 'application/json'},
    method=method,
  )
  with urllib.request.urlopen(request, timeout=60) as answer:
    return answer.status, answer.read()


def test_real_servers_are_ready(servers):
  assert len(servers.urls) == 2
  for url in servers.urls:
    status, info = _ask(url, '/model_info')
    assert status == http.client.OK
    assert json.loads(info)['is_generation']
    found = json.loads(_ask(url, '/server_info')[1])
    assert found['enable_fp32_lm_head']
    assert found['sampling_defaults'] == 'openai'
    assert found['context_length'] == 256


def test_a_paused_server_is_there(servers):
  url = servers.urls[0]
  _ask(url, '/pause_generation', {'mode': 'in_place'})
  try:
    servers.wait_ready(5.0)
  finally:
    _ask(url, '/continue_generation', {})


def test_servers_generate_ids_from_ids(servers):
  for url in servers.urls:
    answer = json.loads(
      _ask(
        url,
        '/generate',
        {
          'input_ids': [1, 2, 3],
          'sampling_params': {'max_new_tokens': 4, 'ignore_eos': True},
          'return_logprob': True,
        },
      )[1]
    )
    assert len(answer['output_ids']) == 4
