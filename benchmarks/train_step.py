"""Train step against a plain one: tokens per second, as a ratio.

    python benchmarks/train_step.py

Both train on the same rollouts, in the sizes of the toy run: ours packs them
and goes over the rows in microbatches. The reference is what one writes first:
a rollout per row, as wide as the longest, all logits at once, no microbatches.
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

_BATCH = setting.CONFIG.batch
_RESPONSE_TOKENS = 56


def main() -> None:
  """Prints both rates and their ratio."""
  params = models.init_params(setting.SPEC, jax.random.key(0))
  engine = jax_engine.JaxEngine(
    setting.decode_spec(
      num_slots=_BATCH.prompts * _BATCH.group_size,
      response_tokens=_RESPONSE_TOKENS,
    ),
    key=jax.random.key(1),
  )
  engine.update_weights(params, 0)
  groups = engine.generate(
    setting.requests(_BATCH.prompts, group_size=_BATCH.group_size)
  )
  # Rewards are random numbers here; without any, nothing would be trained.
  groups = [_with_rewards(g, i) for i, g in enumerate(groups)]
  packed, stats = batching.assemble(
    groups,
    num_rows=None,
    row_multiple=setting.CONFIG.row_multiple,
    row_tokens=_BATCH.max_tokens,
    truncated='keep',
    packed=True,
  )
  longest = max(
    len(g.request.prompt_ids) + len(r.token_ids)
    for g in groups
    for r in g.rollouts
  )
  padded, padded_stats = batching.assemble(
    groups, num_rows=None, row_tokens=longest, truncated='keep'
  )
  tx = optimizer.make_optimizer(setting.CONFIG.optimizer)
  step = step_lib.make_train_step(
    models.make_policy_fn(setting.SPEC, temperature=1.0),
    tx,
    recipes.scalerl(),
    num_microbatches=_BATCH.num_microbatches,
  )
  ours = _Stepper(step, state_lib.init(params, tx), packed)
  plain = _Stepper(_plain_step(tx), state_lib.init(params, tx), padded)
  seconds = setting.compare(ours, plain, pairs=5)
  for name, s, n in zip(
    ('scalerl_jax', 'plain'), seconds, (stats, padded_stats), strict=True
  ):
    print(
      f'{name}: {s:.3f} s, {n.num_tokens / s:.0f} tokens/s,'
      f' padding {n.padding_fraction:.0%}'
    )
  print(f'ratio: {seconds[1] / seconds[0]:.2f}')


class _Stepper:
  def __init__(self, step, state, batch):
    self._step, self._state = step, state
    self._batch = jax.tree.map(jnp.asarray, batch)

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
    rewards = batch.rewards.reshape(-1, _BATCH.group_size)
    advantages = rewards - rewards.mean(1, keepdims=True)
    advantages = (advantages / advantages.std()).reshape(-1, 1)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, advantages)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state), loss

  return jax.jit(step, donate_argnums=0)


if __name__ == '__main__':
  main()
