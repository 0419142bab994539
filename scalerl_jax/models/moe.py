"""Mixture of experts: dropless routing, grouped matrix products, replay.

    router ──top k──> (token, expert) pairs ──sort by expert──> grouped FFN
           ──sort back, weigh──> sum over the k experts of each token

No pair is ever dropped: groups are as long as they turn out. Which experts a
token takes may be given from outside (routing replay, arXiv:2510.11370): the
choice of the engine that sampled the token, while the weights of the choice
stay the trainer's own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from scalerl_jax import arrays
from scalerl_jax import sharding
from scalerl_jax.models import spec as spec_lib

# Rows of one product on a CPU, where each reads the weights of one expert.
_BLOCK_ROWS = 128
# (token, expert) pairs that are passed at one time.
_MAX_PAIRS = 2**14
_MATRICES = ('gate', 'up', 'down')


class Routing(NamedTuple):
  """Which experts the tokens of one layer took."""

  experts: Int[Array, 'B T k']
  replayed: Bool[Array, 'B T']  # Whether the choice was given.
  agreed: Bool[Array, 'B T']  # Given and equal to the own one, as sets.
  entropy: Float[Array, 'B T']  # Of softmax(r), nats.


def route(
  x: Float[Array, 'B T D'],
  router: Float[Array, 'D E'],
  moe: spec_lib.MoeSpec,
  replayed: Int[Array, 'B T k'] | None = None,
) -> tuple[Float[Array, 'B T k'], Routing]:
  """Chooses and weighs the experts of each token, in float32.

  Args:
    x: Normalized activations.
    router: W of `MoeSpec`.
    moe: The mixture.
    replayed: Experts to take in place of the k best; a token whose first is
      negative chooses for itself. None: all do.

  Returns:
    (weights, routing).
  """
  logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
  own = jax.lax.top_k(logits, moe.experts_per_token)[1]
  experts, given = own, jnp.zeros(own.shape[:-1], bool)
  if replayed is not None:
    given = replayed[..., 0] >= 0
    experts = jnp.where(given[..., None], replayed, own)
  log_probs = jax.nn.log_softmax(logits)
  if moe.router == 'sigmoid':
    weights = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, axis=-1))
  else:
    weights = jnp.exp(jnp.take_along_axis(log_probs, experts, axis=-1))
    if moe.normalized:
      weights /= jnp.sum(weights, axis=-1, keepdims=True)
  entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
  same = jnp.sort(experts, axis=-1) == jnp.sort(own, axis=-1)
  agreed = given & jnp.all(same, axis=-1)
  return weights, Routing(experts, given, agreed, entropy)


def feed_forward(
  block: dict[str, Any],
  spec: spec_lib.ModelSpec,
  x: Float[Array, 'B T D'],
  weights: Float[Array, 'B T k'],
  experts: Int[Array, 'B T k'],
  mesh: jax.sharding.Mesh | None = None,
) -> Float[Array, 'B T D']:
  """Passes each token through its experts, the shared one apart.

  On a mesh, rows lie on data, fsdp and expert. Devices along `expert` hold some
  of the experts each: they gather one another's tokens, pass those that chose
  their experts, and scatter the sums back.

  Args:
    block: Parameters of a layer: `expert_gate`, `expert_up`, `expert_down`.
    spec: The model, a mixture.
    x: Normalized activations.
    weights: From `route`.
    experts: From `route`.
    mesh: Of the parameters; None: one device.

  Returns:
    Array of the shape and dtype of `x`.
  """
  moe = spec.moe
  assert moe is not None
  matrices = [block[f'expert_{n}'] for n in _MATRICES]
  weights = weights.astype(x.dtype)
  if mesh is None:
    return _local(moe, x, weights, experts, *matrices, first=0)
  table = spec_lib.parameter_table(spec)
  specs = [
    sharding.partition_spec(table[f'layers/expert_{n}'].axes[1:])
    for n in _MATRICES
  ]

  def shard(
    x: jax.Array, weights: jax.Array, experts: jax.Array, *matrices: jax.Array
  ) -> jax.Array:
    x, weights, experts = (
      jax.lax.all_gather(y, 'expert', axis=0, tiled=True)
      for y in (x, weights, experts)
    )
    gate, up, down = (
      jax.lax.all_gather(w, 'fsdp', axis=axis, tiled=True)
      for w, axis in zip(matrices, (1, 1, 2), strict=True)
    )
    first = jax.lax.axis_index('expert') * gate.shape[0]
    y = _local(moe, x, weights, experts, gate, up, down, first=first)
    y = jax.lax.psum(y, 'tensor')
    return jax.lax.psum_scatter(y, 'expert', scatter_dimension=0, tiled=True)

  rows = sharding.placement(mesh).rows.spec
  return jax.shard_map(
    shard,
    mesh=mesh,
    in_specs=(rows, rows, rows, *specs),
    out_specs=rows,
    check_vma=False,
  )(x, weights, experts, *matrices)


def summarize(
  spec: spec_lib.ModelSpec,
  routing: Routing,
  counted: Bool[Array, 'B T'],
) -> arrays.RouterStats:
  """Sums up what all layers chose.

  Args:
    spec: The model, a mixture.
    routing: Of all layers, stacked on a leading axis.
    counted: False for padding.

  Returns:
    Sums, without a gradient.
  """
  assert spec.moe is not None
  routing = jax.lax.stop_gradient(routing)
  each = jnp.arange(spec.moe.num_experts)
  is_taken = routing.experts[..., None] == each[None, None, None, None, :]
  is_taken &= counted[None, :, :, None, None]
  counted = counted[None]

  def total(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted, x, 0.0))

  return arrays.RouterStats(
    load=jnp.sum(is_taken, axis=(1, 2, 3), dtype=jnp.float32),
    num_choices=total(jnp.ones_like(routing.entropy)),
    num_replayed=total(routing.replayed.astype(jnp.float32)),
    num_agreed=total(routing.agreed.astype(jnp.float32)),
    entropy=total(routing.entropy),
  )


def grouped_matmul(
  x: Float[Array, 'M D'],
  w: Float[Array, 'E D F'],
  sizes: Int[Array, ' E'],
) -> Float[Array, 'M F']:
  """Multiplies consecutive groups of rows by a matrix each.

      y_m = x_m · w_e   for the sizes[e] rows m of group e

  `jax.lax.ragged_dot`; on a CPU, where that multiplies every row by every
  matrix, products of blocks of rows.

  Args:
    x: Rows, sorted by group.
    w: A matrix for each group.
    sizes: Rows of each group; they add up to at most M.

  Returns:
    Products; 0 for rows of no group.
  """
  # Differentiated as one operation: the transpose of a loop over blocks would
  # add a whole gradient of `w` for each of them.
  return _grouped(x, w, sizes)


@jax.custom_vjp
def _grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  return jax.lax.platform_dependent(
    x, w, sizes, cpu=_blocked_dot, default=_ragged_dot
  )


def _grouped_fwd(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
  return _grouped(x, w, sizes), (x, w, sizes)


def _grouped_bwd(residuals: Any, g: jax.Array) -> Any:
  x, w, sizes = residuals
  dw = jax.lax.platform_dependent(
    x, g, sizes, cpu=_blocked_outer, default=_ragged_outer
  )
  return _grouped(g, w.swapaxes(1, 2), sizes), dw.astype(w.dtype), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _local(
  moe: spec_lib.MoeSpec,
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  first: int | jax.Array,
) -> jax.Array:
  """The part of the sum that experts `first`, first + 1, ... contribute."""
  B, T, D = x.shape
  # So that the gradients of all parts add up in float32.
  matrices = [w.astype(jnp.float32) for w in (gate, up, down)]

  @jax.checkpoint
  def part(inputs: list[jax.Array]) -> jax.Array:
    cast = (w.astype(x.dtype) for w in matrices)
    return _pass(moe, *inputs, *cast, first=first)

  flat = [y.reshape(B * T, -1) for y in (x, weights, experts)]
  num_parts = -(-B * T * moe.experts_per_token // _MAX_PAIRS)
  if num_parts == 1:
    return part(flat).reshape(x.shape)
  padding = ((0, -(B * T) % num_parts), (0, 0))
  padded = (jnp.pad(y, padding) for y in flat)
  parts = [y.reshape(num_parts, -1, y.shape[-1]) for y in padded]
  y = jax.lax.map(part, parts).reshape(-1, D)
  return y[: B * T].reshape(x.shape)


def _pass(
  moe: spec_lib.MoeSpec,
  x: Float[Array, 'M D'],
  weights: Float[Array, 'M k'],
  experts: Int[Array, 'M k'],
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  first: int | jax.Array,
) -> Float[Array, 'M D']:
  k, num_local = moe.experts_per_token, gate.shape[0]
  pair = experts.reshape(-1) - first
  # Pairs of other experts are sorted behind all groups.
  pair = jnp.where((pair >= 0) & (pair < num_local), pair, num_local)
  order = jnp.argsort(pair, stable=True)
  sizes = jnp.bincount(pair, length=num_local + 1)[:num_local]
  sorted_weights = weights.reshape(-1)[order][:, None]
  rows = x[order // k]
  if moe.router == 'sigmoid':
    rows = rows * sorted_weights
  hidden = jax.nn.silu(grouped_matmul(rows, gate, sizes))
  hidden = hidden * grouped_matmul(rows, up, sizes)
  out = grouped_matmul(hidden, down, sizes)
  if moe.router == 'softmax':
    out = out * sorted_weights
  return jnp.sum(out[jnp.argsort(order)].reshape(-1, k, x.shape[-1]), axis=1)


def _ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  y = jax.lax.ragged_dot(x, w, sizes.astype(jnp.int32))
  return jnp.where(_in_a_group(x, sizes), y, 0)


def _ragged_outer(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
  """Σ_m x_m ⊗ g_m over the rows of each group."""
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jax.lax.ragged_dot_general(
    x,
    jnp.where(_in_a_group(g, sizes), g, 0),
    sizes.astype(jnp.int32),
    numbers,
    preferred_element_type=jnp.float32,
  )


def _in_a_group(x: jax.Array, sizes: jax.Array) -> jax.Array:
  return (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]


class _Blocks(NamedTuple):
  """Sorted rows cut into blocks of one group each."""

  group: Int[Array, ' J']  # E: the block is not used.
  rows: Int[Array, 'J b']  # Of the sorted array.
  valid: Bool[Array, 'J b']
  place: Int[Array, ' M']  # Of a sorted row among the rows of all blocks.


def _cut(num_rows: int, sizes: jax.Array) -> _Blocks:
  num_groups = sizes.shape[0]
  # Few rows: blocks of about one group, so that padding does not dominate.
  size = min(_BLOCK_ROWS, max(1, 2 * num_rows // num_groups))
  # At most one block of a group is not full.
  num_blocks = -(-num_rows // size) + num_groups
  counts = -(-sizes // size)
  ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(counts)
  starts, block_starts = ends - sizes, block_ends - counts
  group = _count_up_to(block_ends, jnp.arange(num_blocks))
  safe = jnp.minimum(group, num_groups - 1)
  within = (jnp.arange(num_blocks) - block_starts[safe]) * size
  rows = (starts[safe] + within)[:, None] + jnp.arange(size)[None, :]
  valid = (rows < ends[safe][:, None]) & (group < num_groups)[:, None]
  index = jnp.arange(num_rows)
  of_row = jnp.minimum(_count_up_to(ends, index), num_groups - 1)
  place = block_starts[of_row] * size + index - starts[of_row]
  return _Blocks(group, jnp.minimum(rows, num_rows - 1), valid, place)


def _count_up_to(ends: jax.Array, index: jax.Array) -> jax.Array:
  """Number of groups that end at an index or before it."""
  return jnp.sum(ends[None, :] <= index[:, None], axis=1)


def _blocked_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  blocks = _cut(x.shape[0], sizes)

  def product(block: tuple[jax.Array, jax.Array]) -> jax.Array:
    group, rows = block
    return jax.lax.cond(
      group < w.shape[0],
      lambda: x[rows] @ w[group],
      lambda: jnp.zeros((rows.shape[0], w.shape[2]), x.dtype),
    )

  y = jax.lax.map(product, (blocks.group, blocks.rows))
  y = y.reshape(-1, w.shape[2])[blocks.place]
  return jnp.where(_in_a_group(x, sizes), y, 0)


def _blocked_outer(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
  blocks = _cut(x.shape[0], sizes)

  def add(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
    group, rows, valid = block
    outer = jnp.einsum(
      'MD,MF->DF',
      jnp.where(valid[:, None], x[rows], 0),
      g[rows],
      preferred_element_type=jnp.float32,
    )
    return total.at[group].add(outer, mode='drop'), None

  zero = jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32)
  return jax.lax.scan(add, zero, blocks[:3])[0]
