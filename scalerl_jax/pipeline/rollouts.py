"""The generator's side: visits in, graded groups out."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import numpy as np

from scalerl_jax import records
from scalerl_jax.generation import engine as engine_lib
from scalerl_jax.models import spec as spec_lib
from scalerl_jax.pipeline import pacing as pacing_lib
from scalerl_jax.pipeline import weights as weights_lib
from scalerl_jax.reporting import compute

Grade = Callable[[records.RolloutGroup, int], records.RolloutGroup]


def group_flops(
  spec: spec_lib.ModelSpec,
  group: records.RolloutGroup,
  *,
  shares_prompt: bool,
) -> float:
  """Counts the forward FLOPs of a group.

  Args:
    spec: The model.
    group: A complete group.
    shares_prompt: True: the prompt passes once for all samples, as in
      generation; False: once for each, as in unpacked training.

  Returns:
    FLOPs of one forward pass over every token.
  """
  p = len(group.request.prompt_ids)
  lengths = [len(r.token_ids) for r in group.rollouts]
  num_prompts = 1 if shares_prompt else len(lengths)
  num_tokens = num_prompts * p + sum(lengths)
  num_pairs = num_prompts * p * (p + 1) // 2
  num_pairs += sum(n * p + n * (n + 1) // 2 for n in lengths)
  return compute.forward_flops(spec, num_tokens=num_tokens, num_pairs=num_pairs)


class RolloutProducer:
  """Keeps an engine busy within the pacing rules, and buffers what it makes."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    sampler: Any,
    *,
    prompts: Sequence[np.ndarray],
    problem_ids: Sequence[str],
    group_size: int,
    grade: Grade,
    pacing: pacing_lib.Pacing,
    store: weights_lib.WeightStore,
    spec: spec_lib.ModelSpec,
  ) -> None:
    """Starts without work.

    Args:
      engine: The generator.
      sampler: Draws visits; see `data.PromptSampler`.
      prompts: Token ids of each problem.
      problem_ids: Id of each problem.
      group_size: G.
      grade: (group, problem index) → group with rewards.
      pacing: The rules.
      store: Where new weights come from.
      spec: The model, for the FLOP count.
    """
    self._engine = engine
    self.sampler = sampler
    self._prompts = prompts
    self._problem_ids = problem_ids
    self._group_size = group_size
    self._grade = grade
    self._pacing = pacing
    self._store = store
    self._spec = spec
    self._visits: dict[int, Any] = {}  # Submitted and not consumed.
    self._complete: dict[int, records.RolloutGroup] = {}
    self.meter = compute.ComputeMeter()
    # Up to when the work of a concurrent engine was metered; None: it had none.
    self._metered_until: float | None = None

  def pump(self) -> bool:
    """Takes new weights, submits what is allowed, generates one dispatch.

    Returns:
      False where there was nothing to do.
    """
    start = time.monotonic()
    if self._engine.is_concurrent and self._metered_until is not None:
      start = self._metered_until
    weights = self._store.latest()
    if weights.version != self._engine.version:
      self._engine.update_weights(weights.params, weights.version)
    # Not the newest version: another may be published at this moment.
    while self._engine.has_room and self._may_submit(weights.version):
      self._submit()
    if not self._engine.num_in_flight:
      return False
    for group in self._engine.step():
      self._finish(group)
    end = time.monotonic()
    self.meter = self.meter.add(
      generation_seconds=(end - start) * self._engine.num_devices
    )
    self._metered_until = end if self._engine.num_in_flight else None
    return True

  def leave_out(self, seconds: float) -> None:
    """Does not meter time in which the engine worked for somebody else.

    Args:
      seconds: How long, since the last `pump`.
    """
    if self._metered_until is not None:
      self._metered_until += seconds

  def select(self, version: int) -> list[records.RolloutGroup] | None:
    """Takes the groups of the trainer's next update out of the buffer.

    Args:
      version: The trainer's.

    Returns:
      P groups; None: the trainer must wait.
    """
    chosen = self._pacing.select(
      version,
      complete={v: g.admitted_version for v, g in self._complete.items()},
      incomplete=self._engine.in_flight,
      can_generate=bool(self._engine.num_in_flight)
      or self._may_submit(self._store.latest().version),
    )
    if chosen is None:
      return None
    groups = [self._complete.pop(v) for v in chosen]
    # One that the engine gave up at once has no tokens.
    rollouts = [r for g in groups for r in g.rollouts if len(r.token_ids)]
    oldest = min(
      (int(r.policy_versions.min()) for r in rollouts), default=version
    )
    if version - oldest > self._pacing.lag_bound:
      raise AssertionError(
        f'a token of version {oldest} is consumed at version {version}: beyond'
        f' the bound of {self._pacing.lag_bound}'
      )
    return groups

  def metrics(self) -> dict[str, int | float]:
    """What the generator's side tells of itself, by name."""
    return {
      'num_buffered': self.num_buffered,
      'epoch': self.sampler.epoch,
      'num_active_problems': self.sampler.num_active,
      **self._engine.metrics(),
    }

  @property
  def num_buffered(self) -> int:
    """Complete groups that wait for the trainer."""
    return len(self._complete)

  def state(self) -> dict[str, Any]:
    """Everything that a resumed run needs."""
    return {
      'sampler': self.sampler.state(),
      'engine': self._engine.state(),
      'visits': [list(v) for v in self._visits.values()],
      'complete': [records.group_to_state(g) for g in self._complete.values()],
      'meter': self.meter._asdict(),
    }

  def load_state(self, state: dict[str, Any]) -> None:
    """Continues from `state()`; the weights must have been published.

    Args:
      state: Of a producer of the same configuration.
    """
    weights = self._store.latest()
    self._engine.update_weights(weights.params, weights.version)
    self.sampler.load_state(state['sampler'])
    self._engine.load_state(state['engine'])
    visits = [self.sampler.visit(*v) for v in state['visits']]
    self._visits = {v.number: v for v in visits}
    groups = [records.group_from_state(g) for g in state['complete']]
    self._complete = {g.request.visit: g for g in groups}
    self.meter = compute.ComputeMeter(**state['meter'])

  def refresh(self) -> None:
    """Makes the engine's cache a function of the checkpointed state."""
    weights = self._store.latest()
    self._engine.update_weights(weights.params, weights.version)
    self._engine.refresh_cache()

  def _may_submit(self, version: int) -> bool:
    return self.sampler.num_visits < self._pacing.max_visits(version)

  def _submit(self) -> None:
    visit = self.sampler.next()
    self._visits[visit.number] = visit
    self._engine.submit(
      records.Request(
        visit=visit.number,
        problem_id=self._problem_ids[visit.problem_index],
        prompt_ids=self._prompts[visit.problem_index],
        num_samples=self._group_size,
      )
    )

  def _finish(self, group: records.RolloutGroup) -> None:
    visit = self._visits.pop(group.request.visit)
    group = self._grade(group, visit.problem_index)
    scored = [r.reward for r in group.rollouts if r.reward is not None]
    self.sampler.record(
      visit, num_correct=sum(r > 0 for r in scored), num_scored=len(scored)
    )
    self._complete[group.request.visit] = group
    self.meter = self.meter.add(
      generation_flops=group_flops(self._spec, group, shares_prompt=True),
      tokens=sum(int(r.sampled.sum()) for r in group.rollouts),
    )
