"""A mixture of experts against a dense layer of the same active FLOPs.

    python benchmarks/moe.py

One layer, 16 experts, one a token, tokens spread unevenly; routing, sorting and
the sum are in the time. Beside it what `jax.lax.ragged_dot` costs here, which
runs on accelerators.
"""

from collections.abc import Callable
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax import models
from scalerl_jax.models import layers
from scalerl_jax.models import moe

_ROUNDS = 7
_TOKENS, _D, _F = 4096, 512, 1024
_SPEC = models.ModelSpec(
  vocab_size=1,
  num_layers=1,
  model_dim=_D,
  num_heads=1,
  num_kv_heads=1,
  head_dim=2,
  hidden_dim=_F,
  moe=models.MoeSpec(num_experts=16, experts_per_token=1, expert_dim=_F),
)


def main() -> None:
  """Prints seconds and ratios."""
  params = models.init_params(_SPEC, jax.random.key(0))['layers']
  block = {name: w[0] for name, w in params.items()}
  x = jax.random.normal(jax.random.key(1), (1, _TOKENS, _D))
  for kind, wrap in (('forward', _forward), ('with gradients', _gradients)):
    fns = {fn.__name__.strip('_'): wrap(fn) for fn in (_dense, _experts)}
    fns['ragged_dot'] = wrap(functools.partial(_ragged, _sizes(block, x)))
    seconds: dict[str, list[float]] = {name: [] for name in fns}
    for fn in fns.values():
      jax.block_until_ready(fn(block, x))  # Compiles.
    for _ in range(_ROUNDS):
      for name, fn in fns.items():
        start = time.perf_counter()
        jax.block_until_ready(fn(block, x))
        seconds[name].append(time.perf_counter() - start)
    for name, own in seconds.items():
      pairs = zip(own, seconds['dense'], strict=True)
      ratio = statistics.median(a / b for a, b in pairs)
      print(
        f'{kind}, {name}: {statistics.median(own):.3f} s, {ratio:.2f} of dense'
      )


def _forward(fn: Callable[..., jax.Array]) -> Any:
  return jax.jit(fn)


def _gradients(fn: Callable[..., jax.Array]) -> Any:
  return jax.jit(
    jax.grad(lambda *args: jnp.sum(jnp.square(fn(*args))), argnums=(0, 1))
  )


def _dense(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  matrices = (block[f'expert_{n}'][0] for n in ('gate', 'up', 'down'))
  return layers.swiglu(x, *matrices)


def _experts(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  assert _SPEC.moe is not None
  weights, routing = moe.route(x, block['router'], _SPEC.moe)
  return moe.feed_forward(block, _SPEC, x, weights, routing.experts)


def _sizes(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  assert _SPEC.moe is not None
  experts = moe.route(x, block['router'], _SPEC.moe)[1].experts
  return jnp.bincount(experts.reshape(-1), length=_SPEC.moe.num_experts)


def _ragged(
  sizes: jax.Array, block: dict[str, jax.Array], x: jax.Array
) -> jax.Array:
  gate, up = (
    jax.lax.ragged_dot(x[0], block[f'expert_{n}'], sizes)
    for n in ('gate', 'up')
  )
  return jax.lax.ragged_dot(jax.nn.silu(gate) * up, block['expert_down'], sizes)


if __name__ == '__main__':
  main()
