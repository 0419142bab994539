"""Host-side records that travel between the stages of the loop.

Records are frozen: a stage that changes something makes a new record with
`dataclasses.replace`, so that a rollout in the buffer, in a checkpoint and in a
report is the same rollout. Arrays inside a record are numpy and must not be
written to.

    Problem ──render──> Request ──engine──> Rollout x G = RolloutGroup ──> Batch
"""

import dataclasses
import enum
from typing import Any

from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int
import numpy as np


class FinishReason(enum.StrEnum):
  """Why a rollout ended."""

  STOP = 'stop'  # The policy sampled a stop token.
  LENGTH = 'length'  # A token budget ran out: the rollout is truncated.
  ABORTED = 'aborted'  # The engine gave the request up.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
  """One verifiable problem.

  Attributes:
    problem_id: Unique in its file.
    prompt: What the policy is shown, before tokenization.
    answer: The reference answer, in the form that the verifier parses.
    verifier: Name of the verifier that grades an answer to this problem.
  """

  problem_id: str
  prompt: str
  answer: str
  verifier: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
  """A request for `num_samples` rollouts of one prompt.

  Attributes:
    visit: The number of this prompt visit in the run, from 0. All sampling
      randomness of a rollout derives from (run seed, visit, sample, position).
    problem_id: The problem that is visited.
    prompt_ids: The rendered prompt.
    num_samples: Rollouts to draw: the group size.
  """

  visit: int
  problem_id: str
  prompt_ids: Int[np.ndarray, ' N']
  num_samples: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
  """One sampled response, with the policy version of each of its tokens.

  Attributes:
    token_ids: Response tokens, forced ones and the stop token included.
    logps: Float32 log-prob of each token under the policy that sampled it, at
      the sampling temperature, in nats; 0 where the token was forced.
    policy_versions: Number of updates in the weights that produced the token.
    sampled: False where the token was forced by an interruption.
    finish_reason: Why the rollout ended.
    reward: Verifier's reward; None means unscored (masked and counted, never
      taken for 0).
    routed_experts: Experts that each layer of a mixture passed the token
      through that the response token at the same index was sampled after;
      forced tokens too. None: not recorded.

  Example: the policy thought for two tokens, was interrupted with the phrase
  (7, 8), and answered (5, stop=2); the weights changed before the answer:

      Rollout(token_ids=[3, 4, 7, 8, 5, 2],
              logps=[-.1, -.9, 0, 0, -.2, -.3],
              policy_versions=[6, 6, 6, 7, 7, 7],
              sampled=[True, True, False, False, True, True],
              finish_reason=FinishReason.STOP, reward=1.0)
  """

  token_ids: Int[np.ndarray, ' N']
  logps: Float[np.ndarray, ' N']
  policy_versions: Int[np.ndarray, ' N']
  sampled: Bool[np.ndarray, ' N']
  finish_reason: FinishReason
  reward: float | None = None
  routed_experts: Int[np.ndarray, 'N L k'] | None = None

  @property
  def is_truncated(self) -> bool:
    """True where the rollout ended on a token budget."""
    return self.finish_reason is FinishReason.LENGTH

  @property
  def is_interrupted(self) -> bool:
    """True where the interruption phrase was forced."""
    return not bool(self.sampled.all())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
  """All rollouts of one prompt visit, complete.

  Attributes:
    request: What was asked for.
    rollouts: `request.num_samples` rollouts, in sample order.
    admitted_version: Policy version when the first of them started; no token
      of the group is older.
  """

  request: Request
  rollouts: tuple[Rollout, ...]
  admitted_version: int


def to_state(record: Request | Rollout) -> dict[str, Any]:
  """Turns a record into a dict of JSON values and arrays, for a checkpoint.

  Args:
    record: A request or a rollout.

  Returns:
    Field name → value.
  """
  return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def request_from_state(state: dict[str, Any]) -> Request:
  """Inverts `to_state` for a request.

  Args:
    state: From `to_state`.

  Returns:
    The request.
  """
  return Request(**state)


def rollout_from_state(state: dict[str, Any]) -> Rollout:
  """Inverts `to_state` for a rollout.

  Args:
    state: From `to_state`.

  Returns:
    The rollout.
  """
  reason = FinishReason(state['finish_reason'])
  return Rollout(**{**state, 'finish_reason': reason})


def group_to_state(group: RolloutGroup) -> dict[str, Any]:
  """Turns a group into nested dicts of JSON values and arrays.

  Args:
    group: A complete group.

  Returns:
    Its state.
  """
  return {
    'request': to_state(group.request),
    'rollouts': [to_state(r) for r in group.rollouts],
    'admitted_version': group.admitted_version,
  }


def group_from_state(state: dict[str, Any]) -> RolloutGroup:
  """Inverts `group_to_state`.

  Args:
    state: From `group_to_state`.

  Returns:
    The group.
  """
  return RolloutGroup(
    request=request_from_state(state['request']),
    rollouts=tuple(rollout_from_state(r) for r in state['rollouts']),
    admitted_version=state['admitted_version'],
  )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
  """A tensor of a file of weights.

  Attributes:
    name: In the checkpoint: 'model.norm.weight'.
    file: Name of the file that holds it, in the layout of safetensors.
    dtype: As safetensors says it: 'BF16'.
    shape: Of the tensor, () of a scalar.
    checksum: The first 16 hexadecimal digits of the SHA-256 of its stored
      bytes; None: it was not asked for.
  """

  name: str
  file: str
  dtype: str
  shape: tuple[int, ...]
  checksum: str | None
