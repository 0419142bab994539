"""One table from our arrays to the tensors of a checkpoint, for both ways."""

from collections.abc import Iterator
import itertools
import math
from typing import NamedTuple

import jax
import numpy as np

from scalerl_jax import models
from scalerl_jax.hf import configs

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
_BLOCK_OF = {
  'qwen3_moe': (
    ('router', 'mlp.gate.weight', 1),
    ('expert_gate', 'mlp.experts.{}.gate_proj.weight', 1),
    ('expert_up', 'mlp.experts.{}.up_proj.weight', 1),
    ('expert_down', 'mlp.experts.{}.down_proj.weight', 1),
  ),
  'llama4_text': (
    ('router', 'feed_forward.router.weight', 1),
    ('expert_gate', 'feed_forward.experts.gate_up_proj', None),
    ('expert_up', 'feed_forward.experts.gate_up_proj', None),
    ('expert_down', 'feed_forward.experts.down_proj', None),
    ('shared_gate', 'feed_forward.shared_expert.gate_proj.weight', 1),
    ('shared_up', 'feed_forward.shared_expert.up_proj.weight', 1),
    ('shared_down', 'feed_forward.shared_expert.down_proj.weight', 1),
  ),
}
# Rotated as pairs (2i, 2i + 1) of channels, where ours are (i, i + H/2).
_PAIRED = {'llama4_text': ('q', 'k')}
_REST = (
  ('embed', 'model.embed_tokens.weight', None),
  ('final_norm', 'model.norm.weight', 0),
  ('head', 'lm_head.weight', 1),
)
HEAD = 'lm_head.weight'
EMBED = 'model.embed_tokens.weight'


class Tensor(NamedTuple):
  """A part of one of our arrays, and the tensor that stores it."""

  path: str  # 'layers/q'.
  at: tuple[int, ...]  # On the leading axes: layer, expert.
  name: str
  shape: tuple[int, ...]  # Of ours, without the axes of `at`.
  inputs: int | None
  part: tuple[int, int] = (0, 1)  # (i, n): i-th of n parts of the last axis.
  paired: bool = False  # Channels of the last axis are stored as pairs.

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """Of the tensor."""
    *rest, last = self._own_shape
    return *rest, last * self.part[1]

  def stored_slice(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of the tensor that holds a part of ours.

    Args:
      index: A slice of each axis of `shape`; of axes that are stored as one,
        only the first may be cut.

    Returns:
      A slice of each axis of `stored_shape`.
    """
    cut, shape = self.inputs, self.shape
    if cut is None:
      axes = zip(index, shape, strict=True)
      found = [_joined((part,), (size,)) for part, size in axes]
    else:
      found = [_joined(index[cut:], shape[cut:])]
      found += [_joined(index[:cut], shape[:cut])] if cut else []
    before = self.part[0] * self._own_shape[-1]
    last = slice(found[-1].start + before, found[-1].stop + before)
    return *found[:-1], last

  def to_ours(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Turns a part of the tensor into the part of ours with this shape."""
    ours = (stored.T if self.inputs else stored).reshape(shape)
    if self.paired:
      ours = np.concatenate([ours[..., ::2], ours[..., 1::2]], axis=-1)
    return ours

  def to_stored(self, ours: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Turns all of ours into the tensor, or into its part of it."""
    if self.paired:
      halves = ours.reshape(*ours.shape[:-1], 2, -1)
      ours = halves.swapaxes(-1, -2).reshape(ours.shape)
    if not self.inputs:
      return ours.reshape(self._own_shape)
    return ours.reshape(self._own_shape[::-1]).T

  @property
  def _own_shape(self) -> tuple[int, ...]:
    if self.inputs is None:
      return self.shape
    if self.inputs == 0:
      return (math.prod(self.shape),)
    rows, columns = self.shape[self.inputs :], self.shape[: self.inputs]
    return math.prod(rows), math.prod(columns)


def tensors(spec: models.ModelSpec) -> Iterator[Tensor]:
  """Lists what a checkpoint of a model holds.

  Args:
    spec: The model.

  Yields:
    Every part of every array of ours; those that one tensor stores follow one
    another, in the order of the tensor.

  Raises:
    HfError: No family has the options of the model.
  """
  kind = configs.family(spec)
  table = models.parameter_table(spec)
  for path, name, inputs in _REST:
    if path in table:
      yield Tensor(path, (), name, table[path].shape, inputs)
  rows = [
    row
    for row in (*_BLOCK, *_BLOCK_OF.get(kind, ()))
    if f'layers/{row[0]}' in table
  ]
  for layer in range(spec.num_layers):
    for name, group in itertools.groupby(rows, key=lambda row: row[1]):
      parts = list(group)
      for i, (short, _, inputs) in enumerate(parts):
        path = f'layers/{short}'
        shape = table[path].shape[1:]
        for index in np.ndindex(shape[: name.count('{}')]):
          yield Tensor(
            path,
            (layer, *index),
            f'model.layers.{layer}.{name.format(*index)}',
            shape[len(index) :],
            inputs,
            (i, len(parts)),
            short in _PAIRED.get(kind, ()),
          )


def _joined(slices: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  inner = math.prod(shape[1:])
  start, stop, _ = slices[0].indices(shape[0])
  for part, size in zip(slices[1:], shape[1:], strict=True):
    if part.indices(size) != (0, size, 1):
      raise ValueError(f'{slices} cuts an axis of {shape} other than the first')
  return slice(start * inner, stop * inner)
