"""Who may go on, and who waits: the staleness bound as pure functions.

Let P be prompts per update, k the largest lag, u the trainer's version (updates
done) and v ≤ u the version that the generator samples with.

PipelineRL-k. Three rules:

  1. With version v the generator has submitted at most (v + k + 1)·P visits.
  2. Before update u → u + 1 the trainer waits until every group whose first
     token is of version u - k or older is complete.
  3. It takes the P complete groups with the smallest visit numbers.

Then every token is consumed with a lag of at most k. Visits start in order, so
groups that started at version u - k or older are, by rule 1, among the first
(u + 1)·P visits, of which u·P have been consumed: at most P are left, they are
complete by rule 2, and they come first in rule 3. So none of them is left
behind, and what is consumed at u started at u - k or later. With k = 0 training
is synchronous.

PPO-off-policy-k. The generator makes k·P groups with the weights of a version
that is a multiple of k, while the trainer waits; then come k updates on P
groups each. The lag is at most k - 1.

See "The Art of Scaling Reinforcement Learning Compute for LLMs"
(arXiv:2510.13786), §3.1 and A.11.
"""

from collections.abc import Mapping
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
    if self.algorithm == 'ppo_off_policy':
      if version % self.max_lag == 0 and can_generate:
        return None
    else:
      if any(first <= version - self.max_lag for first in incomplete.values()):
        return None
      if can_generate and len(complete) < (self.lead + 1) * self.prompts:
        return None
    return sorted(complete)[: self.prompts]
