"""One table from our arrays to the tensors of a checkpoint, for both ways."""

from collections.abc import Iterator
import math
from typing import NamedTuple

import numpy as np

from scalerl_jax import models

# (array of a block, tensor, leading axes that a linear layer reads). A linear
# layer is stored as [outputs, inputs]; 0: stored flat; None: stored as it is.
_BLOCK = (
  ('attention_norm', 'input_layernorm.weight', 0),
  ('q', 'self_attn.q_proj.weight', 1),
  ('k', 'self_attn.k_proj.weight', 1),
  ('v', 'self_attn.v_proj.weight', 1),
  ('q_bias', 'self_attn.q_proj.bias', 0),
  ('k_bias', 'self_attn.k_proj.bias', 0),
  ('v_bias', 'self_attn.v_proj.bias', 0),
  ('q_norm', 'self_attn.q_norm.weight', 0),
  ('k_norm', 'self_attn.k_norm.weight', 0),
  ('o', 'self_attn.o_proj.weight', 2),
  ('mlp_norm', 'post_attention_layernorm.weight', 0),
  ('gate', 'mlp.gate_proj.weight', 1),
  ('up', 'mlp.up_proj.weight', 1),
  ('down', 'mlp.down_proj.weight', 1),
)
_REST = (
  ('embed', 'model.embed_tokens.weight', None),
  ('final_norm', 'model.norm.weight', 0),
  ('head', 'lm_head.weight', 1),
)
HEAD = 'lm_head.weight'
EMBED = 'model.embed_tokens.weight'


class Tensor(NamedTuple):
  """One array of ours, of one layer, and the tensor that stores it."""

  path: str  # 'layers/q'.
  layer: int | None  # Index on the leading axis; None: not stacked.
  name: str
  shape: tuple[int, ...]  # Of ours, without the axis of layers.
  inputs: int | None

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """Of the tensor."""
    if self.inputs is None:
      return self.shape
    if self.inputs == 0:
      return (math.prod(self.shape),)
    rows, columns = self.shape[self.inputs :], self.shape[: self.inputs]
    return math.prod(rows), math.prod(columns)

  def stored_slice(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of the tensor that holds a part of ours.

    Args:
      index: A slice of each axis of `shape`; of axes that are stored as one,
        only the first may be cut.

    Returns:
      A slice of each axis of `stored_shape`.
    """
    if self.inputs is None:
      return index
    parts = [(index, self.shape)]
    if self.inputs:
      cut = self.inputs
      parts = [
        (index[cut:], self.shape[cut:]),
        (index[:cut], self.shape[:cut]),
      ]
    return tuple(_joined(slices, shape) for slices, shape in parts)

  def to_ours(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Turns a part of the tensor into the part of ours with this shape."""
    if not self.inputs:
      return stored.reshape(shape)
    return stored.T.reshape(shape)

  def to_stored(self, ours: np.ndarray) -> np.ndarray:
    """Turns all of ours into the tensor."""
    if not self.inputs:
      return ours.reshape(self.stored_shape)
    return np.ascontiguousarray(ours.reshape(self.stored_shape[::-1]).T)


def tensors(spec: models.ModelSpec) -> Iterator[Tensor]:
  """Lists what a checkpoint of a model holds.

  Args:
    spec: The model.

  Yields:
    Every tensor, layer by layer within each array of ours.
  """
  table = models.parameter_table(spec)
  for path, name, inputs in _REST:
    if path in table:
      yield Tensor(path, None, name, table[path].shape, inputs)
  for short, name, inputs in _BLOCK:
    path = f'layers/{short}'
    if path in table:
      num_layers, *shape = table[path].shape
      for i in range(num_layers):
        full = f'model.layers.{i}.{name}'
        yield Tensor(path, i, full, tuple(shape), inputs)


def _joined(slices: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  inner = math.prod(shape[1:])
  start, stop, _ = slices[0].indices(shape[0])
  for part, size in zip(slices[1:], shape[1:], strict=True):
    if part.indices(size) != (0, size, 1):
      raise ValueError(f'{slices} cuts an axis of {shape} other than the first')
  return slice(start * inner, stop * inner)
