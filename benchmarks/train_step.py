"""Train step against a plain one: tokens per second, as a ratio.

    python benchmarks/train_step.py

The reference is what one writes first: whole rows, all logits at once, the
loss reduced inside, no microbatches.
"""

import setting  # isort: skip  # First: it sits beside this script.

import dataclasses

import jax
import jax.numpy as jnp
import optax

from scalerl_jax import models
from scalerl_jax import recipes
from scalerl_jax.generation import jax_engine
from scalerl_jax.training import batching
from scalerl_jax.training import optimizer
from scalerl_jax.training import state as state_lib
from scalerl_jax.training import step as step_lib

_PROMPTS, _GROUP, _TOKENS, _MICROBATCHES = 24, 16, 80, 12


def main() -> None:
  """Prints both rates and their ratio."""
  params = models.init_params(setting.SPEC, jax.random.key(0))
  engine = jax_engine.JaxEngine(
    setting.decode_spec(num_slots=384, response_tokens=60),
    key=jax.random.key(1),
  )
  engine.update_weights(params, 0)
  groups = engine.generate(setting.requests(_PROMPTS, group_size=_GROUP))
  # Rewards are random numbers here; without any, nothing would be trained.
  groups = [_with_rewards(g, i) for i, g in enumerate(groups)]
  batch, stats = batching.assemble(
    groups, num_rows=_PROMPTS * _GROUP, row_tokens=_TOKENS, truncated='keep'
  )
  batch = jax.tree.map(jnp.asarray, batch)
  tx = optimizer.make_optimizer(optimizer.OptimizerConfig())
  step = step_lib.make_train_step(
    models.make_policy_fn(setting.SPEC, temperature=1.0),
    tx,
    recipes.scalerl(),
    num_microbatches=_MICROBATCHES,
  )
  ours = _Stepper(step, state_lib.init(params, tx), batch)
  plain = _Stepper(_plain_step(tx), state_lib.init(params, tx), batch)
  seconds = setting.compare(ours, plain, pairs=5)
  for name, s in zip(('scalerl_jax', 'plain'), seconds, strict=True):
    print(f'{name}: {s:.3f} s, {stats.num_tokens / s:.0f} tokens/s')
  print(f'ratio: {seconds[1] / seconds[0]:.2f}')


class _Stepper:
  def __init__(self, step, state, batch):
    self._step, self._state, self._batch = step, state, batch

  def __call__(self):
    self._state, metrics = self._step(self._state, self._batch)
    return self._state, metrics


def _with_rewards(group, index):
  rollouts = tuple(
    dataclasses.replace(r, reward=1.0 if (i + index) % 3 else -1.0)
    for i, r in enumerate(group.rollouts)
  )
  return dataclasses.replace(group, rollouts=rollouts)


def _plain_step(tx):
  def loss_fn(params, batch, advantages):
    hidden = models.forward(
      params,
      setting.SPEC,
      batch.tokens,
      batch.positions,
      batch.segment_ids,
    ).hidden
    logits = hidden[:, :-1] @ models.head_matrix(params)
    logp = jnp.take_along_axis(
      jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1
    )[..., 0]
    mask = batch.loss_mask[:, 1:]
    ratio = jnp.exp(jnp.where(mask, logp - batch.behavior_logp[:, 1:], 0.0))
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, 5.0))
    return -jnp.sum(mask * weight * advantages * logp) / jnp.sum(mask)

  def step(state, batch):
    rewards = batch.rewards.reshape(-1, _GROUP)
    advantages = rewards - rewards.mean(1, keepdims=True)
    advantages = (advantages / advantages.std()).reshape(-1, 1)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, advantages)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state), loss

  return jax.jit(step, donate_argnums=0)


if __name__ == '__main__':
  main()
