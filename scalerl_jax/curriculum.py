"""No-positive-resampling: prompts that are solved leave the later epochs.

See arXiv:2510.13786, §3.2: a prompt whose pass rate reaches 0.9 is not sampled
in subsequent epochs. Here the pass rate is that of its last complete visit: a
prompt that has left is not visited, so it stays out. Visits may complete out
of order; the one of the latest epoch counts.
"""

from typing import NamedTuple

from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int
import numpy as np


class PassRates(NamedTuple):
  """What is known of every problem; host arrays, replaced, never written."""

  last_pass_rate: Float[np.ndarray, ' M']  # NaN: never visited.
  last_visit_epoch: Int[np.ndarray, ' M']  # Of that visit; -1: never visited.


def init(num_problems: int) -> PassRates:
  """Starts with every problem unvisited.

  Args:
    num_problems: M.

  Returns:
    The state.
  """
  return PassRates(
    last_pass_rate=np.full(num_problems, np.nan, np.float64),
    last_visit_epoch=np.full(num_problems, -1, np.int64),
  )


def update(
  state: PassRates,
  problem_index: int,
  *,
  num_correct: int,
  num_scored: int,
  epoch: int,
) -> PassRates:
  """Records a complete visit.

  Args:
    state: Before.
    problem_index: The problem, in [0, M).
    num_correct: Correct rollouts of the visit, at most num_scored.
    num_scored: Scored rollouts of the visit; 0 leaves the state as it is.
    epoch: Epoch of the visit; before the last one known: changes nothing.

  Returns:
    The state after.

  Raises:
    ValueError: A count or the index is out of its range.
  """
  num_problems = len(state.last_pass_rate)
  if not 0 <= problem_index < num_problems:
    raise ValueError(
      f'problem_index={problem_index} must be in [0, {num_problems})'
    )
  if not 0 <= num_correct <= num_scored:
    raise ValueError(
      f'num_correct={num_correct} must be in [0, num_scored={num_scored}]'
    )
  if num_scored == 0 or epoch < state.last_visit_epoch[problem_index]:
    return state
  rates, epochs = state.last_pass_rate.copy(), state.last_visit_epoch.copy()
  rates[problem_index] = num_correct / num_scored
  epochs[problem_index] = epoch
  return PassRates(rates, epochs)


def active(
  state: PassRates, *, epoch: int, threshold: float = 0.9
) -> Bool[np.ndarray, ' M']:
  """Tells which problems an epoch visits.

  Args:
    state: What is known.
    epoch: The epoch about to be drawn; only visits of earlier epochs count.
    threshold: Pass rate from which a problem leaves; above 1: none leaves.

  Returns:
    True where the problem is visited.
  """
  visited = state.last_visit_epoch
  known = (visited >= 0) & (visited < epoch)
  solved = np.nan_to_num(state.last_pass_rate, nan=0.0) >= threshold
  return ~(known & solved)
