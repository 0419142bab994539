"""Weights in flight: tokens per second of a real server, pushed to and not.

    python benchmarks/sglang_push.py --python=.sglang/bin/python [--rounds=5]

starts a server of the toy's model on this CPU and keeps it full of long
rollouts. Each round samples for some seconds without a push and as long with
one a second; half of the rounds begin with one, half with the other.
"""

import setting  # isort: skip  # First: it sits beside this script.

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.generation.sglang import engine as engine_lib
from scalerl_jax.generation.sglang import servers
from scalerl_jax.generation.sglang import transport

_SLOTS = 32
_RESPONSE_TOKENS = 400
_SECONDS = 10.0
_PUSH_EVERY_S = 1.0


def _server(python: str, directory: pathlib.Path) -> servers.ServerSpec:
  model = directory / 'model'
  model.mkdir()
  config = hf.config_from_spec(setting.SPEC, dtype='float32')
  (model / 'config.json').write_text(json.dumps(config))
  (port,) = servers.free_ports(1)
  return servers.ServerSpec(
    python=python,
    model_path=model,
    log_path=directory / 'server.log',
    port=port,
    device='cpu',
    dtype='float32',
    context_tokens=_RESPONSE_TOKENS + 64,
    max_running_requests=_SLOTS,
    max_total_tokens=40_000,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--python', required=True)
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  params = models.init_params(setting.SPEC, jax.random.key(0))
  policy = jax.jit(models.make_policy_fn(setting.SPEC, temperature=1.0))

  def score(params, token_ids):
    row = np.asarray(token_ids)[None]
    positions = np.arange(row.shape[1], dtype=np.int32)[None]
    return np.asarray(policy(params, row, positions, row * 0 + 1).logp)[0, 1:]

  def write(open_file, params):
    return hf.write_params(open_file, params, setting.SPEC, dtype='float32')

  with tempfile.TemporaryDirectory() as root:
    directory = pathlib.Path(root)
    spec = _server(args.python, directory)
    with servers.Supervisor([spec]) as supervisor:
      supervisor.wait_ready(600.0)
      engine = engine_lib.SglangEngine(
        engine_lib.SamplingSpec(
          num_slots=_SLOTS,
          prompt_tokens=16,
          response_tokens=_RESPONSE_TOKENS,
          temperature=1.0,
          stop_ids=(setting.STOP_ID,),
          interruption=None,
          vocab_size=setting.SPEC.vocab_size,
        ),
        supervisor.urls,
        transport.DiskTransport('/dev/shm/scalerl-benchmark', write),
        score=score,
        seed=0,
      )
      engine.update_weights(params, 0)
      _measure(engine, params, args.rounds)
      engine.close()


def _measure(engine, params, rounds: int) -> None:
  visits = iter(range(1_000_000))

  def sample(*, pushes: bool) -> float:
    """Tokens per second; counts groups that end, over whole rollouts."""
    start, tokens, next_push = time.monotonic(), 0, 0.0
    while (now := time.monotonic()) < start + _SECONDS:
      if pushes and now > next_push:
        engine.update_weights(params, engine.version + 1)
        next_push = now + _PUSH_EVERY_S
      while engine.has_room:
        visit = next(visits)
        engine.submit(setting.requests(1, group_size=4, first=visit)[0])
      tokens += sum(len(r.token_ids) for g in engine.step() for r in g.rollouts)
    return tokens / (time.monotonic() - start)

  sample(pushes=True)
  rates: dict[bool, list[float]] = {False: [], True: []}
  for i in range(rounds):
    for pushes in (i % 2 == 0, i % 2 == 1):
      rates[pushes].append(sample(pushes=pushes))
  without, with_ = (statistics.median(rates[key]) for key in (False, True))
  counts = engine.metrics()
  print(
    f'{without:.0f} tokens/s without pushes, {with_:.0f} with one each'
    f' {_PUSH_EVERY_S:g} s: {with_ / without:.2f} of it'
  )
  print(
    f'{counts["sglang/pushes"]} pushes, pause'
    f' {counts["sglang/pause_seconds"] / counts["sglang/pushes"]:.3f} s on'
    f' average, {counts["sglang/max_pause_seconds"]:.3f} s at most;'
    f' {counts["sglang/requests_repeated"]} requests repeated'
  )


if __name__ == '__main__':
  main()
