"""Processes of SGLang servers: how each is started, watched and stopped.

A `ServerSpec` says what a server is for, `command` turns it into flags, and a
`Supervisor` keeps a process of each alive. What a server says goes to a log
file. Requests are not sent from here, but for the question whether it is there.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import http.client
import ipaddress
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Literal

from scalerl_jax.generation.sglang import cpu_platform
from scalerl_jax.generation.sglang import guard

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_PING_S = 5.0
_TAIL_LINES = 12
_TAIL_BYTES = 8192


class ServerError(RuntimeError):
  """A server did not start, or ended too often; has the end of its log."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
  """What one server is to be.

  Attributes:
    python: Interpreter of an environment that has SGLang.
    model_path: Directory that holds a `config.json`; weights in it are not
      read.
    log_path: What the server writes is appended here; only its owner may read
      it, since SGLang writes its API key there.
    port: To listen on.
    host: Address to listen on. Another than a loopback address needs `api_key`.
    device: What it computes on.
    dtype: Of weights and activations; the head is in float32.
    context_tokens: Most tokens of prompt and answer together.
    max_running_requests: Most requests that it decodes at once.
    max_total_tokens: Tokens that its KV cache holds; None: SGLang takes what
      memory there is, on a CPU most of that of the machine.
    tell_experts: Whether it can tell through which experts tokens passed.
    args: More flags of SGLang; they win over those set here.
    api_key: What requests must present; None: nothing.

  Raises:
    ValueError: A field cannot be used.
  """

  python: str
  model_path: pathlib.Path
  log_path: pathlib.Path
  port: int
  host: str = '127.0.0.1'
  device: Literal['cuda', 'cpu'] = 'cuda'
  dtype: str = 'bfloat16'
  context_tokens: int
  max_running_requests: int
  max_total_tokens: int | None = None
  args: tuple[str, ...] = ()
  tell_experts: bool = False
  api_key: str | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self) -> None:
    if not 0 < self.port < 1 << 16:
      raise ValueError(
        f'port={self.port} must be in [1, 65535]; free_ports finds one'
      )
    if not self.api_key and not _is_loopback(self.host):
      raise ValueError(
        f'host={self.host} is open to other machines, which needs an api_key'
      )

  @property
  def url(self) -> str:
    """Address that requests go to."""
    host = f'[{self.host}]' if ':' in self.host else self.host
    return f'http://{host}:{self.port}'

  @property
  def key_path(self) -> pathlib.Path:
    """File that hands the API key over, unseen in the list of processes."""
    return self.log_path.with_suffix('.key.yaml')


def command(spec: ServerSpec) -> tuple[list[str], dict[str, str]]:
  """Says how to start a server.

  Args:
    spec: The server.

  Returns:
    Its command line, which names `key_path` where there is an API key, and what
    it needs in its environment beside what is there.
  """
  module = 'sglang.launch_server'
  environment = {'HF_HUB_OFFLINE': '1'}  # All that it may read lies here.
  flags: dict[str, object] = {
    'model-path': spec.model_path,
    # Weights are pushed before the first request, over drawn ones.
    'load-format': 'dummy',
    # No tokenizer: ids in and out.
    'skip-tokenizer-init': True,
    'host': spec.host,
    'port': spec.port,
    'device': spec.device,
    'dtype': spec.dtype,
    'enable-fp32-lm-head': True,
    'context-length': spec.context_tokens,
    'max-running-requests': spec.max_running_requests,
    'max-total-tokens': spec.max_total_tokens,
    # The warm-up would generate with the drawn weights.
    'skip-server-warmup': True,
    # Not those of a generation_config.json.
    'sampling-defaults': 'openai',
    # Of no policy, so that a server which lost its weights is found out.
    'weight-version': 'none',
    'enable-return-routed-experts': spec.tell_experts or None,
    # A flag of the key itself would be seen by all users of the machine.
    'config': spec.key_path if spec.api_key else None,
  }
  if spec.device == 'cpu':
    module = 'scalerl_jax.generation.sglang.cpu_server'
    environment |= {
      cpu_platform.VARIABLE: cpu_platform.NAME,
      # In a model of the size of the toy's, threads wait for one another: 10
      # times slower. One of 59 M parameters is a third faster on two.
      'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '1'),
    }
    flags |= {
      'attention-backend': 'torch_native',
      'sampling-backend': 'pytorch',
      # Else it takes a core to look for requests that do not come.
      'sleep-on-idle': True,
      # There is no device whose work would overlap.
      'disable-overlap-schedule': True,
    }
  argv = [spec.python, '-m', module]
  for name, value in flags.items():
    if value is not None:
      argv += [f'--{name}'] if value is True else [f'--{name}', str(value)]
  return [*argv, *spec.args], environment


def free_ports(count: int) -> list[int]:
  """Finds ports on which nobody listens at this moment.

  Args:
    count: How many.

  Returns:
    Different ports; another process may still take one before it is used.
  """
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for found in sockets:
      found.bind(('127.0.0.1', 0))
    return [found.getsockname()[1] for found in sockets]


def answers(spec: ServerSpec) -> bool:
  """Asks a server whether it is ready, which generates nothing.

  `/ping` answers 200 while the server is paused too, where `/health` hangs and
  `/ready` says 503.

  Args:
    spec: The server.

  Returns:
    Whether it is up.
  """
  key = spec.api_key
  headers = {'Authorization': f'Bearer {key}'} if key else {}
  # Not urllib: this must not go to a proxy.
  connection = http.client.HTTPConnection(spec.host, spec.port, timeout=_PING_S)
  try:
    connection.request('GET', '/ping', headers=headers)
    return connection.getresponse().status == http.client.OK
  except (OSError, http.client.HTTPException):
    return False
  finally:
    connection.close()


class Supervisor:
  """Keeps servers alive, and stops those it started, whole trees, at `close`.

  Each runs under a guard (guard.py), which also stops it when this process ends
  in any way, SIGKILL included. A thread starts a server that ended again, after
  a pause that doubles from one time to the next; it gives the server up when
  that happened too often in a row.
  """

  def __init__(
    self,
    specs: Sequence[ServerSpec],
    *,
    max_restarts: int = 5,
    backoff_s: float = 1.0,
    stable_s: float = 600.0,
    grace_s: float = 15.0,
    command_fn: Callable[
      [ServerSpec], tuple[Sequence[str], Mapping[str, str]]
    ] = command,
  ) -> None:
    """Starts the servers; returns before they are ready.

    Args:
      specs: The servers, with different ports and log files.
      max_restarts: Of one server in a row.
      backoff_s: Pause before the first restart in a row, in seconds.
      stable_s: A server that lived so long begins a new row.
      grace_s: Seconds between SIGTERM and SIGKILL. SGLang takes 5 for its
        diagnostics and waits for running requests.
      command_fn: Says how to start a server.

    Raises:
      ValueError: Two servers share a port or a log file.
      ServerError: A log file cannot be written.
    """
    for field in ('port', 'log_path'):
      values = [getattr(spec, field) for spec in specs]
      if len(set(values)) < len(values):
        raise ValueError(f'{field} must differ between servers, not {values}')
    self._servers = [
      _Server(spec, command_fn, max_restarts, backoff_s, stable_s, grace_s)
      for spec in specs
    ]
    try:
      for server in self._servers:
        server.start()
    except ServerError:
      self._stop()
      raise
    self._closing = threading.Event()
    self._watcher = threading.Thread(
      target=self._watch, name='sglang-supervisor', daemon=True
    )
    self._watcher.start()

  def __enter__(self) -> 'Supervisor':
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  @property
  def urls(self) -> tuple[str, ...]:
    """Addresses of the servers, in the order of `specs`."""
    return tuple(server.spec.url for server in self._servers)

  @property
  def num_restarts(self) -> int:
    """Restarts so far, of all servers."""
    return sum(server.num_restarts for server in self._servers)

  @property
  def process_groups(self) -> tuple[int | None, ...]:
    """Process group of each server that is alive, guard included, else None."""
    return tuple(server.process_group for server in self._servers)

  def wait_ready(
    self,
    deadline_s: float,
    *,
    on_ready: Callable[[ServerSpec], None] = lambda spec: None,
  ) -> None:
    """Waits until every server answers.

    Args:
      deadline_s: Most seconds to wait.
      on_ready: Called with each server as it answers for the first time.

    Raises:
      ServerError: The time is over, or a server was given up.
    """
    deadline = time.monotonic() + deadline_s
    waiting = list(self._servers)
    while waiting:
      self.check()
      for server in [s for s in waiting if answers(s.spec)]:
        waiting.remove(server)
        on_ready(server.spec)
      if waiting and time.monotonic() > deadline:
        raise ServerError(
          f'{waiting[0].spec.url} was not ready after {deadline_s:g} s'
          + waiting[0].log_tail()
        )
      time.sleep(_POLL_S)

  def check(self) -> None:
    """Says whether all is well.

    Raises:
      ServerError: A server was given up.
    """
    for server in self._servers:
      if server.error is not None:
        raise ServerError(server.error)

  def close(self) -> None:
    """Stops all servers and waits until they are gone; once is enough."""
    self._closing.set()
    self._watcher.join()
    self._stop()

  def _stop(self) -> None:
    for server in self._servers:
      server.ask_to_stop()
    for server in self._servers:
      server.wait_stopped()

  def _watch(self) -> None:
    while not self._closing.wait(_POLL_S):
      for server in self._servers:
        server.revive()


class _Server:
  """The process of one server; after `start` only the watcher touches it."""

  def __init__(
    self,
    spec: ServerSpec,
    command_fn: Callable[[ServerSpec], tuple[Sequence[str], Mapping[str, str]]],
    max_restarts: int,
    backoff_s: float,
    stable_s: float,
    grace_s: float,
  ) -> None:
    self.spec = spec
    self.num_restarts = 0
    self.error: str | None = None
    self._command_fn = command_fn
    self._max_restarts = max_restarts
    self._backoff_s = backoff_s
    self._stable_s = stable_s
    self._grace_s = grace_s
    self._guard: subprocess.Popen[bytes] | None = None
    self._in_row = 0
    self._started = 0.0
    self._next_start: float | None = None

  @property
  def process_group(self) -> int | None:
    """As the watcher saw it last."""
    alive = self._guard is not None and self._guard.returncode is None
    return self._guard.pid if self._guard and alive else None

  def has_ended(self) -> bool:
    """Sees whether the guard is gone, and ends what it may have left."""
    if self._guard is None or self._guard.returncode is not None:
      return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if os.waitid(os.P_PID, self._guard.pid, flags) is None:
      return False
    # Not waited for yet, so the number of the group is nobody else's.
    os.killpg(self._guard.pid, signal.SIGKILL)
    self._guard.wait()
    return True

  def start(self) -> None:
    self._started = time.monotonic()
    self._next_start = None
    argv, environment = self._command_fn(self.spec)
    private = os.O_WRONLY | os.O_CREAT
    try:
      self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
      if self.spec.api_key:
        self.spec.key_path.unlink(missing_ok=True)
        with open(os.open(self.spec.key_path, private, 0o600), 'w') as file:
          file.write(f'api-key: {json.dumps(self.spec.api_key)}\n')
      log = os.open(self.spec.log_path, private | os.O_APPEND, 0o600)
      with open(log, 'ab') as output:
        self._guard = subprocess.Popen(
          [
            *(sys.executable, '-I', '-S', guard.__file__),
            *(str(os.getpid()), str(self._grace_s), *argv),
          ],
          env={**os.environ, **environment},
          stdin=subprocess.DEVNULL,
          stdout=output,
          stderr=output,
          start_new_session=True,
        )
    except OSError as error:
      raise ServerError(f'{self.spec.url} cannot be started: {error}') from None

  def revive(self) -> None:
    """Starts it again if it ended and its time has come."""
    if self.error is not None or not self.has_ended():
      return
    now = time.monotonic()
    if self._next_start is None:
      if now - self._started >= self._stable_s:
        self._in_row = 0
      if self._in_row == self._max_restarts:
        self._give_up(f'ended again after {self._in_row} restarts in a row')
        return
      pause_s = self._backoff_s * 2**self._in_row
      self._next_start = now + pause_s
      _log.warning(
        '%s ended; it starts again in %g s%s',
        *(self.spec.url, pause_s, self.log_tail()),
      )
    elif now >= self._next_start:
      self._in_row += 1
      self.num_restarts += 1
      try:
        self.start()
      except ServerError as error:
        self._give_up(str(error))

  def ask_to_stop(self) -> None:
    if self._guard is not None and not self.has_ended():
      self._guard.terminate()
      # A group that was stopped would not hear it.
      os.killpg(self._guard.pid, signal.SIGCONT)

  def wait_stopped(self) -> None:
    self.spec.key_path.unlink(missing_ok=True)
    if self._guard is None:
      return
    try:
      self._guard.wait(self._grace_s + 5.0)
    except subprocess.TimeoutExpired:
      os.killpg(self._guard.pid, signal.SIGKILL)
      self._guard.wait()

  def log_tail(self) -> str:
    """The end of its log, for a message."""
    with contextlib.suppress(OSError), open(self.spec.log_path, 'rb') as log:
      log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
      lines = log.read().decode(errors='replace').splitlines()
      end = [line for line in lines if line.strip()][-_TAIL_LINES:]
      return '\n'.join([f'; the end of {self.spec.log_path}:', *end])
    return f'; {self.spec.log_path} cannot be read'

  def _give_up(self, reason: str) -> None:
    self.error = f'{self.spec.url} {reason}{self.log_tail()}'
    _log.error('%s', self.error)


def _is_loopback(host: str) -> bool:
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
