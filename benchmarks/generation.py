"""Generation against its floor, Hugging Face, and an SGLang server.

    python benchmarks/generation.py [--batch=16] [--rounds=5]
        [--python=.sglang/bin/python]

A model of 59 M parameters in float32, prompts of 64 tokens, 64 tokens for each
of a batch of rollouts, prefill included. The floor is the products with all
weights, of as many steps. With `--python`, of an environment for servers, the
same work is done by `transformers` (static batches, sampling) and by a real
server behind the engine. What is not measured is stopped meanwhile.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.generation import decode
from scalerl_jax.generation import jax_engine
from scalerl_jax.generation.sglang import engine as engine_lib
from scalerl_jax.generation.sglang import servers
from scalerl_jax.generation.sglang import transport

_SPEC = models.ModelSpec(
  vocab_size=32_768,
  num_layers=8,
  model_dim=512,
  num_heads=8,
  num_kv_heads=8,
  head_dim=64,
  hidden_dim=1_408,
  tied_head=False,
)
_PROMPT_TOKENS, _RESPONSE_TOKENS = 64, 64
_NO_STOP = _SPEC.vocab_size  # Never sampled.

# Reads lines `SEED`, answers each with the number of tokens when it has them.
_WORKER = """
import sys, torch, transformers
path, batch, prompt, response, vocab, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = transformers.AutoModelForCausalLM.from_pretrained(
  path, dtype=torch.float32)
model.generation_config.eos_token_id = None
print('ready', flush=True)
for line in sys.stdin:
  torch.manual_seed(int(line))
  ids = torch.randint(0, int(vocab), (int(batch), int(prompt)))
  with torch.inference_mode():
    found = model.generate(
      ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
      max_new_tokens=int(response), pad_token_id=0)
  print(found.numel() - ids.numel(), flush=True)
"""


def main() -> None:
  """Prints tokens per second of each, and ratios."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--python', default=None)
  args = parser.parse_args()
  params = models.init_params(_SPEC, jax.random.key(0))
  seeds = iter(range(1_000))
  with contextlib.ExitStack() as stack:
    runs: dict[str, Callable[[], int]] = {
      'floor': _floor(params, args.batch),
      'embedded': _embedded(params, args.batch, seeds),
    }
    stopped: dict[str, int] = {}  # Process group of each that has one.
    if args.python:
      root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      hf.save_params(root / 'model', params, _SPEC, dtype='float32')
      runs['hf'], stopped['hf'] = stack.enter_context(
        _transformers(args.python, root / 'model', args.batch, seeds)
      )
      runs['sglang'], stopped['sglang'] = stack.enter_context(
        _sglang(args.python, root, params, args.batch, seeds)
      )
    rates = _measure(runs, stopped, args.rounds)
  step_ms = 1e3 * args.batch / rates['floor']
  print(f'batch {args.batch}; a step of the floor takes {step_ms:.1f} ms')
  for name, rate in rates.items():
    print(
      f'{name}: {rate:.0f} tokens/s, time {rates["floor"] / rate:.2f} of the'
      ' floor' + (f', {rate / rates["hf"]:.2f} of hf' if args.python else '')
    )


def _measure(
  runs: dict[str, Callable[[], int]], stopped: dict[str, int], rounds: int
) -> dict[str, float]:
  """Median tokens per second of each, interleaved."""
  found: dict[str, list[float]] = {name: [] for name in runs}
  for run in runs.values():
    run()  # Compiles.
  for group in stopped.values():
    os.killpg(group, signal.SIGSTOP)
  for _ in range(rounds):
    for name, run in runs.items():
      if name in stopped:
        os.killpg(stopped[name], signal.SIGCONT)
      start = time.perf_counter()
      tokens = run()
      found[name].append(tokens / (time.perf_counter() - start))
      if name in stopped:
        os.killpg(stopped[name], signal.SIGSTOP)
  for group in stopped.values():
    os.killpg(group, signal.SIGCONT)
  return {name: statistics.median(rates) for name, rates in found.items()}


def _floor(params: dict, batch: int) -> Callable[[], int]:
  """The products with all weights, as often as tokens are made."""
  D, L = _SPEC.model_dim, _SPEC.num_layers
  layers = params['layers']
  into = {n: layers[n].reshape(L, D, -1) for n in ('q', 'k', 'v', 'gate', 'up')}
  out = {n: layers[n].reshape(L, -1, D) for n in ('o', 'down')}

  @jax.jit
  def steps(into, out, head):
    def step(x, _):
      for i in range(L):
        x = sum(x @ into[n][i] for n in ('q', 'k', 'v')) @ out['o'][i]
        x = sum(x @ into[n][i] for n in ('gate', 'up')) @ out['down'][i]
      return (x @ head)[:, :D], None

    x = jnp.ones((batch, D))
    return jax.lax.scan(step, x, None, length=_RESPONSE_TOKENS)[0]

  def run() -> int:
    steps(into, out, models.head_matrix(params)).block_until_ready()
    return batch * _RESPONSE_TOKENS

  return run


def _requests(batch: int, seeds: Iterator[int]) -> list[records.Request]:
  first = next(seeds) * batch  # Never a prompt that is in a cache.
  rng = np.random.default_rng(first)
  return [
    records.Request(
      visit=first + i,
      problem_id='',
      prompt_ids=rng.integers(0, _SPEC.vocab_size, _PROMPT_TOKENS).astype(
        np.int32
      ),
      num_samples=1,
    )
    for i in range(batch)
  ]


def _num_tokens(groups: list[records.RolloutGroup]) -> int:
  return sum(len(r.token_ids) for g in groups for r in g.rollouts)


def _embedded(
  params: dict, batch: int, seeds: Iterator[int]
) -> Callable[[], int]:
  engine = jax_engine.JaxEngine(
    decode.DecodeSpec(
      model=_SPEC,
      num_slots=batch,
      prompt_tokens=_PROMPT_TOKENS,
      response_tokens=_RESPONSE_TOKENS,
      steps_per_dispatch=8,
      temperature=1.0,
      stop_ids=(_NO_STOP,),
      interruption=None,
    ),
    key=jax.random.key(1),
    prefill_rows=(batch,),
  )
  engine.update_weights(params, 0)
  return lambda: _num_tokens(engine.generate(_requests(batch, seeds)))


@contextlib.contextmanager
def _transformers(
  python: str, model: pathlib.Path, batch: int, seeds: Iterator[int]
) -> Iterator[tuple[Callable[[], int], int]]:
  sizes = (batch, _PROMPT_TOKENS, _RESPONSE_TOKENS, _SPEC.vocab_size)
  worker = subprocess.Popen(
    [python, '-c', _WORKER, str(model), *map(str, sizes), str(os.cpu_count())],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  assert worker.stdin is not None
  assert worker.stdout is not None
  worker.stdout.readline()

  def run() -> int:
    print(next(seeds), file=worker.stdin, flush=True)
    return int(worker.stdout.readline())

  try:
    yield run, worker.pid
  finally:
    worker.kill()
    worker.communicate()


@contextlib.contextmanager
def _sglang(
  python: str,
  root: pathlib.Path,
  params: dict,
  batch: int,
  seeds: Iterator[int],
) -> Iterator[tuple[Callable[[], int], int]]:
  policy = jax.jit(models.make_policy_fn(_SPEC, temperature=1.0))

  def score(params, token_ids):
    row = np.asarray(token_ids)[None]
    positions = np.arange(row.shape[1], dtype=np.int32)[None]
    return np.asarray(policy(params, row, positions, row * 0 + 1).logp)[0, 1:]

  def write(open_file, params):
    return hf.write_params(open_file, params, _SPEC, dtype='float32')

  os.environ['OMP_NUM_THREADS'] = str(os.cpu_count())
  (port,) = servers.free_ports(1)
  spec = servers.ServerSpec(
    python=python,
    model_path=root / 'model',
    log_path=root / 'server.log',
    port=port,
    device='cpu',
    dtype='float32',
    context_tokens=_PROMPT_TOKENS + _RESPONSE_TOKENS + 64,
    max_running_requests=batch,
    max_total_tokens=32_768,
  )
  with servers.Supervisor([spec]) as supervisor:
    supervisor.wait_ready(600.0)
    engine = engine_lib.SglangEngine(
      engine_lib.SamplingSpec(
        num_slots=batch,
        prompt_tokens=_PROMPT_TOKENS,
        response_tokens=_RESPONSE_TOKENS,
        temperature=1.0,
        stop_ids=(_NO_STOP,),
        interruption=None,
        vocab_size=_SPEC.vocab_size,
      ),
      supervisor.urls,
      transport.DiskTransport(root / 'weights', write),
      score=score,
      seed=0,
      probe_s=600.0,  # It is stopped while others are measured.
    )
    with contextlib.closing(engine):
      engine.update_weights(params, 0)
      yield (
        lambda: _num_tokens(engine.generate(_requests(batch, seeds))),
        supervisor.process_groups[0],
      )


if __name__ == '__main__':
  main()
