"""Which problem is visited next: seeded epochs over what is not yet solved.

The position is counted in prompts, and an epoch's order depends only on the
seed, the epoch and the pass rates known when it began, so that a resumed run
visits the same problems in the same order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax import curriculum
from scalerl_jax import records
from scalerl_jax.data import problems as problems_lib


class Visit(NamedTuple):
  """One visit of one problem."""

  number: int  # Of the run, from 0.
  epoch: int
  problem_index: int


class PromptSampler:
  """Draws visits, and learns which problems are solved."""

  def __init__(
    self,
    problems: Sequence[records.Problem],
    *,
    seed: int,
    max_pass_rate: float,
  ) -> None:
    """Starts before the first epoch.

    Args:
      problems: The training problems.
      seed: Of the run.
      max_pass_rate: Pass rate from which a problem leaves the later epochs;
        above 1: none leaves.
    """
    self._problems = problems
    self._fingerprint = problems_lib.fingerprint(problems)
    self._seed = seed
    self._max_pass_rate = max_pass_rate
    self._pass_rates = curriculum.init(len(problems))
    self._epoch = -1
    self._order = np.zeros(0, np.int64)
    self._position = 0
    self._num_visits = 0

  @property
  def num_visits(self) -> int:
    """Visits drawn so far."""
    return self._num_visits

  @property
  def num_active(self) -> int:
    """Problems in the current epoch."""
    return len(self._order)

  @property
  def epoch(self) -> int:
    """The current epoch; -1 before the first visit."""
    return self._epoch

  def visit(self, number: int, epoch: int, problem_index: int) -> Visit:
    """Rebuilds a visit that was drawn before, from a checkpoint."""
    return Visit(number, epoch, problem_index)

  def next(self) -> Visit:
    """Draws the next visit.

    Returns:
      The visit.

    Raises:
      problems_lib.DataError: Every problem is solved, so nothing is left.
    """
    if self._position == len(self._order):
      self._start_epoch()
    index = int(self._order[self._position])
    visit = Visit(self._num_visits, self._epoch, index)
    self._position += 1
    self._num_visits += 1
    return visit

  def record(self, visit: Visit, *, num_correct: int, num_scored: int) -> None:
    """Learns the result of a complete visit.

    Args:
      visit: What was visited.
      num_correct: Correct rollouts.
      num_scored: Scored rollouts.
    """
    self._pass_rates = curriculum.update(
      self._pass_rates,
      visit.problem_index,
      num_correct=num_correct,
      num_scored=num_scored,
      epoch=visit.epoch,
    )

  def state(self) -> dict[str, Any]:
    """Everything that a resumed run needs."""
    return {
      'fingerprint': self._fingerprint,
      'epoch': self._epoch,
      'order': self._order,
      'position': self._position,
      'num_visits': self._num_visits,
      'pass_rates': self._pass_rates._asdict(),
    }

  def load_state(self, state: dict[str, Any]) -> None:
    """Continues from `state()`.

    Args:
      state: Of a sampler over the same problems.

    Raises:
      problems_lib.DataError: The training problems are not the same.
    """
    if state['fingerprint'] != self._fingerprint:
      raise problems_lib.DataError(
        'data.train_path: the problems changed since the checkpoint; restore'
        ' the file or start in a new --workdir'
      )
    self._epoch = state['epoch']
    self._order = np.asarray(state['order'])
    self._position = state['position']
    self._num_visits = state['num_visits']
    self._pass_rates = curriculum.PassRates(**state['pass_rates'])

  def _start_epoch(self) -> None:
    self._epoch += 1
    active = np.flatnonzero(
      curriculum.active(
        self._pass_rates, epoch=self._epoch, threshold=self._max_pass_rate
      )
    )
    if not len(active):
      raise problems_lib.DataError(
        f'all {len(self._problems)} training problems reached a pass rate of'
        f' {self._max_pass_rate}: nothing is left for epoch {self._epoch}; use'
        ' harder problems, fewer updates or a higher curriculum.max_pass_rate'
      )
    rng = np.random.default_rng([self._seed, self._epoch])
    self._order = rng.permutation(active)
    self._position = 0
