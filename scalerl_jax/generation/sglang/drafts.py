"""A rollout that grows by the answers of servers, and its interruption.

A server samples up to a given number of tokens and then stops. So the thinking
is asked for first, as many tokens as its budget; where it did not end by then,
the phrase is appended and the answer is asked for, with the cache of the whole
prefix. Where the thinking ended by itself on the way, the answer's budget
counts from there: what is missing of it is asked for, what is too much is cut
off, which leaves the rest as it would have been sampled under the limit.
"""

from collections.abc import Collection, Sequence

from jaxtyping import Float
from jaxtyping import Int
import numpy as np

from scalerl_jax import length_control
from scalerl_jax import records

_UNKNOWN = -1  # The trainer then chooses for itself.


class RolloutDraft:
  """One rollout, from its first request to its end."""

  def __init__(
    self,
    *,
    stop_ids: Collection[int],
    max_tokens: int,
    rule: length_control.Interruption | None = None,
    budget: int = 0,
    routing: tuple[int, int] | None = None,
  ) -> None:
    """Starts empty.

    Args:
      stop_ids: Tokens that end a rollout where they are sampled.
      max_tokens: Longest response; of no meaning with a rule.
      rule: The interruption; None: there is none.
      budget: Thinking tokens that the rule drew.
      routing: Layers and experts per token of what is recorded of a mixture;
        None: nothing is.
    """
    self._stop_ids = frozenset(stop_ids)
    self._rule = rule
    # Tokens up to here may be sampled before something must be decided.
    self._limit = max_tokens if rule is None else budget
    self._thinks = rule is not None
    self._finish: records.FinishReason | None = None
    self.token_ids: list[int] = []
    self._logps: list[float] = []
    self._versions: list[int] = []
    self._sampled: list[bool] = []
    self._routing = routing
    self._experts: list[np.ndarray] = []  # [L, k] of each; forced ones follow.

  @property
  def num_wanted(self) -> int:
    """Tokens that the next request may sample; 0: the rollout is complete."""
    if self._finish is not None:
      return 0
    return self._limit - len(self.token_ids)

  @property
  def num_routed(self) -> int:
    """Tokens of which it is recorded what they were sampled after."""
    return len(self._experts)

  def append(
    self,
    token_ids: Int[np.ndarray, ' N'],
    logps: Float[np.ndarray, ' N'],
    versions: Sequence[int],
    routed_experts: Int[np.ndarray, 'M L k'] | None = None,
  ) -> None:
    """Adds what a request brought, be it all that it was asked for or less.

    Args:
      token_ids: At most `num_wanted` sampled tokens.
      logps: Log-prob of each.
      versions: Version of the weights of each.
      routed_experts: Experts of the token before each that follows the
        `num_routed` first, these included; None: not known.

    Raises:
      ValueError: There are more than were asked for, or not the experts of all.
    """
    if len(token_ids) > self.num_wanted:
      raise ValueError(
        f'{len(token_ids)} tokens came where {self.num_wanted} were asked for'
      )
    self.token_ids += token_ids.tolist()
    self._logps += logps.tolist()
    self._versions += versions
    self._sampled += [True] * len(token_ids)
    # What brought no token tells of none; the next request asks again.
    if self._routing is not None and len(token_ids):
      self._record(routed_experts)
    rule = self._rule
    if self._thinks and rule is not None:
      if end := _end_of_thinking(self.token_ids, rule):
        self._thinks = False
        self._limit = end + rule.answer_tokens
        self._cut()
      elif len(self.token_ids) == self._limit and not self._has_stopped:
        self._force(rule)
    if self._has_stopped:
      self._finish = records.FinishReason.STOP
    elif len(self.token_ids) == self._limit:
      self._finish = records.FinishReason.LENGTH

  def abandon(self) -> None:
    """Gives the rollout up; what it holds is kept."""
    self._finish = records.FinishReason.ABORTED

  def rollout(self) -> records.Rollout:
    """Returns the complete rollout."""
    assert self._finish is not None
    return records.Rollout(
      token_ids=np.array(self.token_ids, np.int32),
      logps=np.array(self._logps, np.float32),
      policy_versions=np.array(self._versions, np.int32),
      sampled=np.array(self._sampled, bool),
      finish_reason=self._finish,
      routed_experts=self._routed(),
    )

  @property
  def _has_stopped(self) -> bool:
    return (
      bool(self.token_ids)
      and self._sampled[-1]
      and self.token_ids[-1] in self._stop_ids
    )

  def _cut(self) -> None:
    for column in (
      self.token_ids,
      self._logps,
      self._versions,
      self._sampled,
      self._experts,
    ):
      del column[self._limit :]

  def _record(self, routed_experts: np.ndarray | None) -> None:
    assert self._routing is not None
    count = len(self.token_ids) - len(self._experts)
    if routed_experts is None:
      routed_experts = np.full((count, *self._routing), _UNKNOWN)
    if len(routed_experts) != count:
      raise ValueError(
        f'experts of {len(routed_experts)} tokens came where {count} were asked'
        ' for'
      )
    self._experts += list(routed_experts)

  def _routed(self) -> np.ndarray | None:
    if self._routing is None:
      return None
    experts = np.full((len(self.token_ids), *self._routing), _UNKNOWN, np.int16)
    if self._experts:
      experts[: len(self._experts)] = self._experts
    return experts

  def _force(self, rule: length_control.Interruption) -> None:
    n = len(rule.phrase_ids)
    self.token_ids += rule.phrase_ids
    self._logps += [0.0] * n
    self._versions += [self._versions[-1]] * n
    self._sampled += [False] * n
    self._thinks = False
    self._limit = len(self.token_ids) + rule.answer_tokens


def _end_of_thinking(
  tokens: list[int], rule: length_control.Interruption
) -> int:
  """Counts the tokens up to and with the first `end_ids`; 0: none came."""
  end_ids = rule.end_ids or (rule.phrase_ids[-1:],)
  n = len(end_ids)
  for end in range(n, len(tokens) + 1):
    latest = zip(tokens[end - n : end], end_ids, strict=True)
    if all(token in ids for token, ids in latest):
      return end
  return 0
