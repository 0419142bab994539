"""The loss over the LM head: seconds and memory, as ratios.

    python benchmarks/loss.py

Loss and gradients by hidden states and head: all logits at once under plain
autodiff, `token_logps`, and `fused_loss`, against the three matmuls that no
exact method can avoid (logits, and the two gradients). Then what each needs at
the sizes of a large model, compiled and not run. On a CPU large fresh buffers
are dear; to see the rest, run with

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=16000000000 MALLOC_ARENA_MAX=1
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from scalerl_jax import losses

_ROUNDS = 9
_TIMED = (8, 256, 512, 32_768)  # B, T, D, V.
_COMPILED = ((8, 2048, 4096, 128_256), (8, 2048, 4096, 202_048))
_GIB = 2**30


def main() -> None:
  """Prints seconds, ratios and GiB."""
  B, T, D, V = _TIMED
  keys = jax.random.split(jax.random.key(0), 5)
  inputs = (
    jax.random.normal(keys[0], (B, T, D)),
    jax.random.normal(keys[1], (D, V)) * D**-0.5,
    jax.random.randint(keys[2], (B, T), 0, V),
    jax.random.normal(keys[3], (B, T)) - 11.0,
    jax.random.normal(keys[4], (B, T)),
  )
  fns = {'three matmuls': jax.jit(_three_matmuls), **_variants()}
  seconds = {name: [] for name in fns}
  for fn in fns.values():
    jax.block_until_ready(fn(*inputs))  # Compiles.
  for _ in range(_ROUNDS):
    for name, fn in fns.items():
      start = time.perf_counter()
      jax.block_until_ready(fn(*inputs))
      seconds[name].append(time.perf_counter() - start)
  # Within a round, so that a slow one counts for all alike.
  for name, own in seconds.items():
    to_floor, to_naive = (
      statistics.median(a / b for a, b in zip(own, seconds[other], strict=True))
      for other in ('three matmuls', 'naive')
    )
    print(
      f'{name}: {statistics.median(own):.3f} s, {to_floor:.2f} of three'
      f' matmuls, {to_naive:.2f} of naive'
    )
  for sizes in _COMPILED:
    for name, fn in _variants().items():
      memory = fn.lower(*_abstract(*sizes)).compile().memory_analysis()
      print(
        f'V = {sizes[-1]}, {name}: {memory.temp_size_in_bytes / _GIB:.1f} GiB'
        f' of temporaries, {memory.output_size_in_bytes / _GIB:.1f} of results'
      )


def _variants():
  return {
    fn.__name__.strip('_'): jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))
    for fn in (_naive, _token_logps, _fused_loss)
  }


def _three_matmuls(hidden, head, *_):
  hidden = hidden.reshape(-1, hidden.shape[-1])
  logits = hidden @ head
  return logits @ head.T, hidden.T @ logits


def _naive(hidden, head, targets, behavior, advantages):
  logp = jax.nn.log_softmax(hidden @ head)
  logp = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  return jnp.sum(losses.cispo(logp, behavior, advantages))


def _token_logps(hidden, head, targets, behavior, advantages):
  logp = losses.token_logps(hidden, head, targets).logp
  return jnp.sum(losses.cispo(logp, behavior, advantages))


def _fused_loss(hidden, head, targets, behavior, advantages):
  loss_fn = jax.tree_util.Partial(
    losses.cispo, behavior_logp=behavior, advantages=advantages
  )
  return losses.fused_loss(hidden, head, targets, loss_fn=loss_fn)[0]


def _abstract(B, T, D, V):
  struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  return (
    struct((B, T, D)),
    struct((D, V)),
    jax.ShapeDtypeStruct((B, T), jnp.int32),
    struct((B, T)),
    struct((B, T)),
  )


if __name__ == '__main__':
  main()
