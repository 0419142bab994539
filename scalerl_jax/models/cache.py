"""The key-value cache of the decode loop.

All rows write the same column at the same time, so that a decode step is one
slice update per layer instead of a scatter. Which of the columns a row may see
is the row's own business: `visible` says so, and stale columns of an earlier
tenant of the row are simply not visible. Layers are separate arrays, not one
stack, so that XLA updates each in place inside a loop.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from scalerl_jax.models import spec as spec_lib


class KVCache(NamedTuple):
  """Keys and values of every layer, and what is visible of them."""

  keys: tuple[Float[Array, 'B K S H'], ...]  # One per layer.
  values: tuple[Float[Array, 'B K S H'], ...]
  visible: Bool[Array, 'B S']
  # Of the token in each column, in its sequence; None: no layer asks for it.
  positions: Int[Array, 'B S'] | None
  column: Int[Array, '']  # Where the next tokens of all rows are written.


def empty(
  spec: spec_lib.ModelSpec, *, num_rows: int, num_columns: int
) -> KVCache:
  """Allocates a cache in which nothing is visible.

  Args:
    spec: The model.
    num_rows: Sequences decoded together, B.
    num_columns: Tokens held per sequence, S.

  Returns:
    A cache that writes at column 0.
  """
  shape = (num_rows, spec.num_kv_heads, num_columns, spec.head_dim)
  # Distinct buffers: a donated pytree must not hold one array twice.
  keys, values = (
    tuple(jnp.zeros(shape, spec.dtype) for _ in range(spec.num_layers))
    for _ in range(2)
  )
  return KVCache(
    keys=keys,
    values=values,
    visible=jnp.zeros((num_rows, num_columns), bool),
    positions=None
    if spec.local_attention is None
    else jnp.zeros((num_rows, num_columns), jnp.int32),
    column=jnp.zeros((), jnp.int32),
  )
