"""Continuous against static batching, on the same compiled decode loop.

    python benchmarks/decode.py

Rollouts end at budgets drawn uniformly from 4 to 60 tokens. The reference
starts the next batch when the last rollout of the one before has ended.
"""

import setting  # isort: skip  # First: it sits beside this script.

import jax

from scalerl_jax import models
from scalerl_jax.generation import jax_engine

_SLOTS, _GROUP, _NUM_GROUPS = 64, 8, 48


def main() -> None:
  """Prints both rates and their ratio."""
  params = models.init_params(setting.SPEC, jax.random.key(0))
  engine = jax_engine.JaxEngine(
    setting.decode_spec(num_slots=_SLOTS, response_tokens=64),
    key=jax.random.key(1),
  )
  engine.update_weights(params, 0)
  work = setting.requests(_NUM_GROUPS, group_size=_GROUP)
  tokens = sum(
    len(r.token_ids) for g in engine.generate(work) for r in g.rollouts
  )
  at_once = _SLOTS // _GROUP

  def continuous():
    engine.generate(work)

  def static():
    for i in range(0, _NUM_GROUPS, at_once):
      engine.generate(work[i : i + at_once])

  seconds = setting.compare(continuous, static, pairs=3)
  for name, s in zip(('continuous', 'static'), seconds, strict=True):
    print(f'{name}: {s:.3f} s, {tokens / s:.0f} tokens/s')
  print(f'ratio: {seconds[1] / seconds[0]:.2f}')


if __name__ == '__main__':
  main()
