"""Length control: forced interruptions, and the overlong penalty.

An interruption ends a rollout's thinking after a drawn number of tokens by
forcing a phrase, after which the policy writes its answer. The phrase is not
sampled: its tokens are in no loss, ratio, entropy or token count.

See arXiv:2510.13786, §2 and A.10.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def overlong_penalty(
  num_tokens: Int[Array, ' R'], *, max_tokens: int, tolerance_tokens: int
) -> Float[Array, ' R']:
  """Penalises length, linearly over the last `tolerance_tokens` tokens.

      R_len(y) = clip((L_max - |y|) / L_cache - 1, -1, 0)

  See arXiv:2510.13786, Eq. 9. To be added to the reward of correct answers
  only.

  Args:
    num_tokens: |y|, in tokens.
    max_tokens: L_max, where the penalty reaches -1.
    tolerance_tokens: L_cache, length of the slope; positive.

  Returns:
    Penalty of each rollout, in [-1, 0].

  Raises:
    ValueError: tolerance_tokens is not in [1, max_tokens].
  """
  if not 1 <= tolerance_tokens <= max_tokens:
    raise ValueError(
      f'tolerance_tokens={tolerance_tokens} must be in [1, max_tokens='
      f'{max_tokens}]'
    )
  slope = (max_tokens - num_tokens).astype(jnp.float32) / tolerance_tokens
  return jnp.clip(slope - 1.0, -1.0, 0.0)


class InterruptionState(NamedTuple):
  """Where each of N slots is between thinking and the end of its answer."""

  budget: Int[Array, ' N']  # Thinking tokens allowed.
  thinking_tokens: Int[Array, ' N']  # Sampled so far, before the answer.
  phrase_position: Int[Array, ' N']  # Forced phrase tokens so far.
  end_position: Int[Array, ' N']  # Tokens of `end_ids` just sampled in a row.
  answering: Bool[Array, ' N']
  answer_tokens: Int[Array, ' N']  # Sampled so far, after the thinking.


@dataclasses.dataclass(frozen=True)
class Interruption:
  """The rule; pure functions over slots, for use inside a decode loop.

  Attributes:
    min_tokens: Smallest thinking budget, in tokens.
    max_tokens: Largest thinking budget, inclusive; drawn uniformly.
    phrase_ids: Tokens that are forced.
    answer_tokens: Tokens allowed after the thinking ended, forced or not.
    end_ids: Tokens that end the thinking where the policy samples them in a
      row, each given by its alternatives; those of the first are in no other.
      (): the last of `phrase_ids`.
  """

  min_tokens: int
  max_tokens: int
  phrase_ids: tuple[int, ...]
  answer_tokens: int
  end_ids: tuple[tuple[int, ...], ...] = ()

  def __post_init__(self) -> None:
    """Checks the budgets; raises ValueError."""
    if not 1 <= self.min_tokens <= self.max_tokens:
      raise ValueError(
        f'min_tokens={self.min_tokens} must be in [1, max_tokens='
        f'{self.max_tokens}]'
      )
    if not isinstance(self.phrase_ids, tuple) or not self.phrase_ids:
      raise ValueError(
        f'phrase_ids={self.phrase_ids!r} must be a tuple of token ids, not'
        ' empty'
      )
    if min(self.phrase_ids) < 0 or self.answer_tokens < 1:
      raise ValueError(
        f'phrase_ids={self.phrase_ids} must not be negative and answer_tokens='
        f'{self.answer_tokens} must be at least 1'
      )
    # Else a match that fails might have begun another one.
    first, *others = self.end_ids or ((),)
    if set(first) & set().union(*others):
      raise ValueError(
        f'end_ids={self.end_ids} must not have a first token among the others'
      )

  @property
  def max_response_tokens(self) -> int:
    """Longest possible response, forced tokens included."""
    return self.max_tokens + len(self.phrase_ids) + self.answer_tokens

  def draw_budget(self, uniform: Float[Array, ' N']) -> Int[Array, ' N']:
    """Maps uniform numbers to budgets, each of the range equally likely.

    Args:
      uniform: In [0, 1).

    Returns:
      Budgets in [min_tokens, max_tokens].
    """
    width = self.max_tokens - self.min_tokens + 1
    offset = jnp.floor(uniform * width).astype(jnp.int32)
    return self.min_tokens + jnp.minimum(offset, width - 1)

  def init(self, budget: Int[Array, ' N']) -> InterruptionState:
    """Starts slots at the beginning of their thinking.

    Args:
      budget: From `draw_budget`.

    Returns:
      The state.
    """
    # Distinct buffers: a donated pytree must not hold one array twice.
    return InterruptionState(
      budget=budget,
      thinking_tokens=jnp.zeros_like(budget),
      phrase_position=jnp.zeros_like(budget),
      end_position=jnp.zeros_like(budget),
      answering=jnp.zeros(budget.shape, bool),
      answer_tokens=jnp.zeros_like(budget),
    )

  def forced_token(
    self, state: InterruptionState
  ) -> tuple[Int[Array, ' N'], Bool[Array, ' N']]:
    """Tells which slots must take a token of the phrase now, and which.

    Args:
      state: Before the token.

    Returns:
      (token, is_forced); the token means nothing where not forced.
    """
    is_forced = ~state.answering & (state.thinking_tokens >= state.budget)
    phrase = jnp.asarray(self.phrase_ids, jnp.int32)
    last = len(self.phrase_ids) - 1
    return phrase[jnp.minimum(state.phrase_position, last)], is_forced

  def advance(
    self,
    state: InterruptionState,
    token: Int[Array, ' N'],
    is_forced: Bool[Array, ' N'],
  ) -> InterruptionState:
    """Moves on by one token, sampled or forced.

    Args:
      state: Before the token.
      token: What was appended.
      is_forced: Whether it was of the phrase.

    Returns:
      The state after.
    """
    position = state.phrase_position + is_forced.astype(jnp.int32)
    end_ids = self.end_ids or (self.phrase_ids[-1:],)
    last = len(end_ids) - 1
    matches = jnp.stack(
      [jnp.isin(token, jnp.asarray(ids, jnp.int32)) for ids in end_ids]
    )
    expected = jnp.minimum(state.end_position, last)[None, :]
    follows = jnp.take_along_axis(matches, expected, axis=0)[0]
    begins = matches[0].astype(jnp.int32)
    end_position = jnp.where(follows, state.end_position + 1, begins)
    ended = ~is_forced & (end_position > last)
    forced_out = is_forced & (position >= len(self.phrase_ids))
    thinks = ~state.answering & ~is_forced
    return InterruptionState(
      budget=state.budget,
      thinking_tokens=state.thinking_tokens + thinks.astype(jnp.int32),
      phrase_position=position,
      end_position=end_position,
      answering=state.answering | ended | forced_out,
      answer_tokens=state.answer_tokens + state.answering.astype(jnp.int32),
    )

  def exhausted(self, state: InterruptionState) -> Bool[Array, ' N']:
    """Tells which slots have used up their answer budget.

    Args:
      state: After a token.

    Returns:
      True: no further token may follow.
    """
    return state.answer_tokens >= self.answer_tokens
