"""Holds one server, so that it ends when its owner does, however that ends.

    python -I -S guard.py OWNER_PID GRACE_S COMMAND...

The parent-death signal of Linux would follow a thread of the owner, not the
owner, and reach one process of the server's several. This small process leads
a process group of its own, which it kills whole when the server has ended, when
it is told to stop (SIGTERM), or when its parent is no longer the owner.
"""

from collections.abc import Sequence
import contextlib
import os
import signal
import subprocess
import sys
import time

_POLL_S = 0.2


def main(argv: Sequence[str]) -> None:
  """Runs a command until it ends or may no longer run; does not return.

  Args:
    argv: Process id of the owner, seconds between SIGTERM and SIGKILL, and the
      command.
  """
  owner, grace_s, *command = argv
  asked: list[int] = []
  # First: until then SIGTERM ends this process, and there is no other.
  signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
  # No thread runs here, so code between fork and exec is safe.
  server = subprocess.Popen(command, preexec_fn=_die_with_parent)
  while server.poll() is None and not asked and os.getppid() == int(owner):
    time.sleep(_POLL_S)
  if server.poll() is None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      server.wait(float(grace_s))
  print(f'guard: exit code {server.poll()}', flush=True)
  os.killpg(0, signal.SIGKILL)


def _die_with_parent() -> None:
  """Should this process be killed, the server must not go on unguarded."""
  if sys.platform == 'linux':
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG.


if __name__ == '__main__':
  main(sys.argv[1:])
