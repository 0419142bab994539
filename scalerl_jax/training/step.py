"""The train step: the only one, whatever the recipe.

    rewards ──filters──> keep ──advantage──> Â per rollout ──> per token
    masks ──aggregation──> weights           (global batch, no parameters)
    for each microbatch: tokens ──policy──> log π ──loss──> Σ weights · ℓ
    gradients ──optimizer──> new state

Filtering, advantages and weights are computed once for the whole batch, so
that microbatches only add up.
"""

from collections.abc import Callable
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
import optax

from scalerl_jax import arrays
from scalerl_jax import losses
from scalerl_jax import recipes
from scalerl_jax import sharding
from scalerl_jax.training import state as state_lib

NUM_LAG_BINS = 16
NUM_POSITION_BUCKETS = 4


class StepMetrics(NamedTuple):
  """Scalars of one step, over the tokens that count in the loss unless said."""

  loss: Float[Array, '']
  grad_norm: Float[Array, '']  # Before clipping.
  update_skipped: Float[Array, '']  # 1: loss or gradient was not finite.
  num_tokens: Float[Array, '']
  num_prompts: Float[Array, '']  # With a valid rollout.
  num_prompts_kept: Float[Array, '']
  zero_variance_fraction: Float[Array, '']  # Of prompts with a valid rollout.
  num_rollouts_masked: Float[Array, '']  # Not valid, padding included.
  reward_mean: Float[Array, '']  # Over valid rollouts, before filters.
  policy_entropy: Float[Array, '']
  ratio_mean: Float[Array, '']
  ratio_max: Float[Array, '']
  ratio_min: Float[Array, '']
  ratio_capped_fraction: Float[Array, '']  # Above the recipe's bound.
  kl_behavior: Float[Array, '']  # k3 estimate of KL(μ ‖ π).
  logp_diff_mean: Float[Array, '']  # Mean |log π - log μ|.
  logp_diff_max: Float[Array, '']
  logp_diff_by_position: Float[Array, ' Q']  # Mean by quarters of T.
  lag_mean: Float[Array, '']  # Updates, at consumption.
  lag_max: Float[Array, '']
  lag_histogram: Float[Array, ' A']  # Tokens of lag 0, 1, ..., 15 or more.
  # Of a mixture of experts, over all tokens but padding; None: it is dense.
  router_entropy: Float[Array, ''] | None = None  # Mean, nats.
  # Share of the most and least taken expert of any layer, times E.
  router_load_max: Float[Array, ''] | None = None
  router_load_min: Float[Array, ''] | None = None
  # Of replayed choices, those that are the own; None: nothing is replayed.
  router_agreement: Float[Array, ''] | None = None


class Targets(NamedTuple):
  """What the loss needs besides the policy; a function of the batch alone."""

  mask: Bool[Array, 'B T']
  weights: Float[Array, 'B T']
  advantages: Float[Array, 'B T']
  keep: Bool[Array, ' R']


def make_targets(recipe: recipes.Recipe, batch: arrays.Batch) -> Targets:
  """Filters the rollouts, computes advantages, spreads both over tokens.

  Args:
    recipe: The algorithm.
    batch: The global batch.

  Returns:
    `Targets`; masked tokens have weight and advantage 0.
  """
  num_rollouts = batch.rewards.shape[0]
  rewards = jnp.where(batch.valid, batch.rewards, 0.0)
  keep = batch.valid
  for f in recipe.filters:
    keep &= f(
      rewards, batch.prompt_index, batch.valid, num_prompts=num_rollouts
    )
  advantage = recipe.advantage(
    rewards, batch.prompt_index, keep, num_prompts=num_rollouts
  )
  rollout = jnp.maximum(batch.rollout_index, 0)
  mask = batch.loss_mask & (batch.rollout_index >= 0) & keep[rollout]
  weights = recipe.aggregation(
    mask,
    batch.rollout_index,
    batch.prompt_index,
    num_rollouts=num_rollouts,
    num_prompts=num_rollouts,
  )
  spread = jnp.where(mask, advantage[rollout], 0.0)
  return Targets(mask, jnp.where(mask, weights, 0.0), spread, keep)


def make_train_step(
  apply_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  recipe: recipes.Recipe,
  *,
  mesh: jax.sharding.Mesh | None = None,
  num_microbatches: int = 1,
) -> Callable[
  [state_lib.TrainState, arrays.Batch],
  tuple[state_lib.TrainState, StepMetrics],
]:
  """Makes the jitted step `(TrainState, Batch) -> (TrainState, StepMetrics)`.

  The state is donated: publish a copy of the parameters before the next step.
  An update whose loss or gradient is not finite changes nothing but the
  counters, and is counted in `update_skipped`.

  Args:
    apply_fn: (params, tokens, positions, segment_ids) → `TokenScores`, or
      `RoutedScores` of a policy with experts, column t about token t, at the
      sampling temperature. Where it takes `token_loss` too, as that of
      `models.make_policy_fn`, and the recipe has a `recipes.TokenLoss`, it is
      asked for the loss as well: one matmul over the LM head fewer. It is given
      `routed_experts` where the batch has them.
    tx: The optimizer.
    recipe: The algorithm.
    mesh: None: one device. Else rows are sharded over its `ROW_AXES`, and the
      state keeps the sharding that it comes with. It may span several
      processes, each of which calls the step with the same host batch.
    num_microbatches: Equal parts in which the rows are processed, one after
      the other; the result does not depend on it.

  Returns:
    The step. It raises ValueError, when traced, where the rows are not
    divisible by microbatches times row shards.
  """
  row_shards = 1 if mesh is None else sharding.num_row_shards(mesh)

  # The loss of a token by itself can be had in the pass that scores it.
  is_fused = isinstance(recipe.policy_loss, recipes.TokenLoss) and (
    'token_loss' in inspect.signature(apply_fn).parameters
  )

  def part_loss(
    params: Any, part: arrays.Batch, targets: Targets
  ) -> tuple[jax.Array, Any]:
    inputs = (params, part.tokens, part.positions, part.segment_ids)
    replay = {}
    if part.routed_experts is not None:
      replay['routed_experts'] = part.routed_experts
    token_loss = jax.tree_util.Partial(
      functools.partial(
        _token_loss, recipe, num_rollouts=targets.keep.shape[0]
      ),
      *(targets.mask, targets.weights, targets.advantages),
      *(part.rollout_index, part.behavior_logp, part.reference_logp),
    )
    if is_fused:
      return apply_fn(*inputs, **replay, token_loss=token_loss)
    scores = apply_fn(*inputs, **replay)
    return jnp.sum(token_loss(scores.logp)), jax.lax.stop_gradient(scores)

  grad_fn = jax.value_and_grad(part_loss, has_aux=True)

  def accumulate(
    params: Any, batch: arrays.Batch, targets: Targets
  ) -> tuple[jax.Array, Any, Any]:
    if num_microbatches == 1:
      (loss, scores), grads = grad_fn(params, batch, targets)
      return loss, scores, grads

    def add(carry: Any, part: Any) -> Any:
      (loss, scores), grads = grad_fn(params, *part)
      return jax.tree.map(jnp.add, carry, (loss, grads)), scores

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    parts = _split_rows((batch, targets), num_microbatches)
    (loss, grads), scores = jax.lax.scan(add, zero, parts)
    # What is of tokens is put together, what routers chose is summed up.
    joined = type(scores)(*map(_join_rows, scores[:2]), *scores[2:])
    if isinstance(joined, arrays.RoutedScores):
      total = jax.tree.map(lambda x: jnp.sum(x, axis=0), joined.router)
      joined = joined._replace(router=total)
    return loss, joined, grads

  def check_rows(batch: arrays.Batch) -> None:
    rows = batch.tokens.shape[0]
    if rows % (num_microbatches * row_shards):
      raise ValueError(
        f'{rows} rows must be divisible by num_microbatches={num_microbatches}'
        f' times {row_shards} row shards of the mesh'
      )

  def step(
    state: state_lib.TrainState, batch: arrays.Batch
  ) -> tuple[state_lib.TrainState, StepMetrics]:
    check_rows(batch)
    targets = make_targets(recipe, batch)
    loss, scores, grads = accumulate(state.params, batch, targets)
    grad_norm = optax.tree.norm(grads)
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    select = lambda new, old: jnp.where(ok, new, old)  # noqa: E731
    new_state = state_lib.TrainState(
      params=jax.tree.map(select, params, state.params),
      opt_state=jax.tree.map(select, opt_state, state.opt_state),
      version=state.version + 1,
      nonfinite_streak=jnp.where(ok, 0, state.nonfinite_streak + 1),
    )
    metrics = diagnose(
      recipe, batch, targets, scores, version=state.version
    )._replace(
      loss=loss,
      grad_norm=grad_norm,
      update_skipped=1.0 - ok.astype(jnp.float32),
    )
    return new_state, metrics

  if mesh is None:
    return jax.jit(step, donate_argnums=0)
  return _ShardedStep(step, mesh, check_rows)


def _token_loss(
  recipe: recipes.Recipe,
  mask: jax.Array,
  weights: jax.Array,
  advantages: jax.Array,
  rollout_index: jax.Array,
  behavior_logp: jax.Array,
  reference_logp: jax.Array | None,
  logp: jax.Array,
  *,
  num_rollouts: int,
) -> jax.Array:
  """Weighs the loss of each token; 0 where masked."""
  # The double-where: NaN behind the mask must not reach a gradient.
  logp = jnp.where(mask, logp, 0.0)
  per_token = recipe.policy_loss(
    logp,
    jnp.where(mask, behavior_logp, 0.0),
    advantages,
    mask,
    rollout_index,
    num_rollouts=num_rollouts,
  )
  if recipe.kl_weight:
    if reference_logp is None:
      raise ValueError('kl_weight > 0 needs reference_logp in the batch')
    reference = jnp.where(mask, reference_logp, 0.0)
    per_token += recipe.kl_weight * recipe.kl(logp, reference)
  return jnp.where(mask, weights * per_token, 0.0)


class _ShardedStep:
  """A jitted step that returns the state sharded as it is first given."""

  def __init__(
    self,
    step: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    check: Callable[[arrays.Batch], None],
  ) -> None:
    self._step = step
    self._mesh = mesh
    self._check = check
    self._jitted: Any = None

  def __call__(self, state: state_lib.TrainState, batch: arrays.Batch) -> Any:
    self._check(batch)
    shardings = sharding.batch_shardings(batch, self._mesh)
    return self._for(state)(state, sharding.put(batch, shardings))

  def lower(self, state: Any, batch: Any) -> Any:
    """Lowers the step for a state and a batch that may be abstract."""
    return self._for(state).lower(state, batch)

  def _for(self, state: Any) -> Any:
    if self._jitted is None:
      # Left to XLA, the output of a replicated array may come out sharded,
      # and the next step would compile again.
      shardings = jax.tree.map(lambda x: x.sharding, state)
      # Every process reads the metrics, so each has to hold them.
      self._jitted = jax.jit(
        self._step,
        donate_argnums=0,
        out_shardings=(shardings, state.version.sharding),
      )
    return self._jitted


def diagnose(
  recipe: recipes.Recipe,
  batch: arrays.Batch,
  targets: Targets,
  scores: arrays.TokenScores | arrays.RoutedScores,
  *,
  version: jax.Array,
) -> StepMetrics:
  """Computes the metrics of a step from the inputs of its loss.

  Args:
    recipe: The algorithm.
    batch: The global batch.
    targets: From `make_targets`.
    scores: Of the policy, before the update.
    version: Of the policy, before the update.

  Returns:
    Metrics; loss, grad_norm and update_skipped are 0, to be filled in.
  """
  mask = targets.mask
  count = jnp.sum(mask).astype(jnp.float32)

  def mean(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1.0)

  difference = jnp.where(mask, scores.logp - batch.behavior_logp, 0.0)
  ratio = jnp.exp(difference)
  lag = jnp.where(mask, version - batch.policy_version, 0)
  bins = jnp.where(mask, jnp.clip(lag, 0, NUM_LAG_BINS - 1), NUM_LAG_BINS)
  histogram = jnp.zeros(NUM_LAG_BINS + 1).at[bins.reshape(-1)].add(1.0)
  bound = jnp.inf if recipe.max_ratio is None else recipe.max_ratio
  valid = batch.valid.astype(jnp.float32)
  prompts = _num_prompts(batch, batch.valid)
  kept = _num_prompts(batch, targets.keep)
  total_reward = jnp.sum(jnp.where(batch.valid, batch.rewards, 0.0))
  zero = jnp.zeros(())
  return StepMetrics(
    loss=zero,
    grad_norm=zero,
    update_skipped=zero,
    num_tokens=count,
    num_prompts=prompts,
    num_prompts_kept=kept,
    zero_variance_fraction=(prompts - kept) / jnp.maximum(prompts, 1.0),
    num_rollouts_masked=jnp.sum(1.0 - valid),
    reward_mean=total_reward / jnp.maximum(jnp.sum(valid), 1.0),
    policy_entropy=mean(scores.entropy),
    ratio_mean=mean(ratio),
    ratio_max=jnp.max(jnp.where(mask, ratio, 0.0)),
    ratio_min=jnp.min(jnp.where(mask, ratio, jnp.inf), initial=jnp.inf),
    ratio_capped_fraction=mean((ratio > bound).astype(jnp.float32)),
    kl_behavior=mean(losses.kl_k3(jnp.zeros_like(difference), difference)),
    logp_diff_mean=mean(jnp.abs(difference)),
    logp_diff_max=jnp.max(jnp.abs(difference)),
    logp_diff_by_position=_by_position(
      jnp.abs(difference), batch.positions, mask
    ),
    lag_mean=mean(lag.astype(jnp.float32)),
    lag_max=jnp.max(lag).astype(jnp.float32),
    lag_histogram=histogram[:NUM_LAG_BINS],
    **_router_metrics(scores, batch.routed_experts is not None),
  )


def _router_metrics(
  scores: arrays.TokenScores | arrays.RoutedScores, is_replayed: bool
) -> dict[str, jax.Array]:
  if not isinstance(scores, arrays.RoutedScores):
    return {}
  stats = scores.router
  count = jnp.maximum(stats.num_choices, 1.0)
  total = jnp.maximum(jnp.sum(stats.load, axis=1, keepdims=True), 1.0)
  share = stats.load / total * stats.load.shape[1]
  found = {
    'router_entropy': stats.entropy / count,
    'router_load_max': jnp.max(share),
    'router_load_min': jnp.min(share),
  }
  if is_replayed:
    replayed = jnp.maximum(stats.num_replayed, 1.0)
    found['router_agreement'] = stats.num_agreed / replayed
  return found


def _num_prompts(batch: arrays.Batch, valid: jax.Array) -> jax.Array:
  seen = jax.ops.segment_max(
    valid.astype(jnp.float32),
    batch.prompt_index,
    num_segments=valid.shape[0],
  )
  return jnp.sum(seen > 0).astype(jnp.float32)


def _by_position(
  difference: jax.Array, positions: jax.Array, mask: jax.Array
) -> jax.Array:
  bucket = positions * NUM_POSITION_BUCKETS // mask.shape[1]
  zero = jnp.zeros(NUM_POSITION_BUCKETS)
  totals = zero.at[bucket].add(jnp.where(mask, difference, 0.0))
  counts = zero.at[bucket].add(mask.astype(jnp.float32))
  return totals / jnp.maximum(counts, 1.0)


def _split_rows(tree: Any, num_parts: int) -> Any:
  """Splits [B, T, ...] leaves into [M, B/M, T, ...]; repeats the others."""

  def split(x: jax.Array) -> jax.Array:
    if x.ndim < 2:
      return jnp.broadcast_to(x, (num_parts, *x.shape))
    # Strided, so that every shard of the rows takes part in every microbatch.
    parts = x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:])
    return parts.swapaxes(0, 1)

  return jax.tree.map(split, tree)


def _join_rows(x: jax.Array) -> jax.Array:
  return x.swapaxes(0, 1).reshape(-1, x.shape[-1])
