"""Who may go on, and who waits: the staleness bound as pure functions.

Let P be prompts per update, k the largest lag, u the trainer's version (updates
done) and v ≤ u the version that the generator samples with.

PipelineRL-k. A group whose first token is of version g is due: it must be
consumed at update g + k at the latest. Three rules:

  1. With version v the generator has submitted at most (v + k + 1)·P visits.
  2. Update u takes the P complete groups with the smallest visit numbers.
  3. It waits for more complete groups where what it leaves, P groups an update
     from the oldest on, would not all be consumed in time.

Then every token is consumed with a lag of at most k, and nothing waits for
ever. Call a state at u sound if the i-th oldest group that is not consumed
(i = 0, 1, ...) is due at u + ⌊i / P⌋ or later. Rule 3 leaves a sound state at
u + 1. What is submitted at v comes last, because visits start in order, and by
rule 1 there are at most (v + k + 1 - u)·P groups not consumed, so the last is
due in time: the state stays sound. And once all groups are complete, rule 2
takes the P oldest, after which each of the others moves up by P: rule 3 is met.
With k = 0 training is synchronous.

PPO-off-policy-k. The generator makes k·P groups with the weights of a version
that is a multiple of k, while the trainer waits; then come k updates on P
groups each. The lag is at most k - 1.

See "The Art of Scaling Reinforcement Learning Compute for LLMs"
(arXiv:2510.13786), §3.1 and A.11.
"""

from collections.abc import Iterable, Mapping
import dataclasses

ALGORITHMS = ('pipeline_rl', 'ppo_off_policy')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
  """The rules for one run.

  Attributes:
    algorithm: One of `ALGORITHMS`.
    max_lag: k.
    prompts: P.
    num_updates: Updates of the run; no visit is started beyond them.
    lead: Only PipelineRL in lockstep: complete batches, beyond the one to be
      consumed, that the generator stays ahead. A real generator has a lead of
      its own; in lockstep it must be set, at most k.
  """

  algorithm: str
  max_lag: int
  prompts: int
  num_updates: int
  lead: int = 0

  @property
  def lag_bound(self) -> int:
    """The largest lag that a consumed token can have."""
    if self.algorithm == 'ppo_off_policy':
      return self.max_lag - 1
    return self.max_lag

  def max_visits(self, version: int) -> int:
    """Visits that may have been submitted while the generator has `version`."""
    if self.algorithm == 'ppo_off_policy':
      updates = (version // self.max_lag + 1) * self.max_lag
    else:
      updates = version + self.max_lag + 1
    return min(updates, self.num_updates) * self.prompts

  def publishes(self, version: int) -> bool:
    """Whether the generator takes the weights of `version`."""
    if self.algorithm == 'ppo_off_policy':
      return version % self.max_lag == 0
    return True

  def select(
    self,
    version: int,
    *,
    complete: Mapping[int, int],
    incomplete: Mapping[int, int],
    can_generate: bool,
  ) -> list[int] | None:
    """Chooses the visits of the update from `version`, or says to wait.

    Args:
      version: The trainer's, u.
      complete: Visit → version of the first token, of complete groups that
        were not consumed.
      incomplete: The same for started groups that are not complete.
      can_generate: Whether waiting would bring further groups.

    Returns:
      P visits in ascending order; None: wait.
    """
    if len(complete) < self.prompts:
      return None
    chosen = sorted(complete)[: self.prompts]
    if self.algorithm == 'ppo_off_policy':
      starts_phase = version % self.max_lag == 0
      return None if starts_phase and can_generate else chosen
    if can_generate and len(complete) < (self.lead + 1) * self.prompts:
      return None
    left = {**complete, **incomplete}
    for visit in chosen:
      del left[visit]
    return chosen if self._in_time(version + 1, left.values()) else None

  def _in_time(self, version: int, first_versions: Iterable[int]) -> bool:
    """Whether P groups an update, oldest first, are all consumed in time."""
    return all(
      version + i // self.prompts <= first + self.max_lag
      for i, first in enumerate(sorted(first_versions))
    )
