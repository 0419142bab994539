"""What the pipeline asks of a generator, whatever generates."""

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

from scalerl_jax import records


@runtime_checkable
class Engine(Protocol):
  """A generator that streams rollouts and takes new weights in flight."""

  @property
  def version(self) -> int:
    """Version of the weights that the next token is sampled with."""

  @property
  def num_devices(self) -> int:
    """Devices that generate, for device-hours."""

  @property
  def is_concurrent(self) -> bool:
    """Whether it goes on generating while it is not called."""

  @property
  def num_in_flight(self) -> int:
    """Prompt visits submitted and not yet returned."""

  @property
  def in_flight(self) -> dict[int, int]:
    """Visit → version of its first token, of what is not yet returned."""

  @property
  def has_room(self) -> bool:
    """Whether a new request would find work for its slots soon."""

  def submit(self, request: records.Request) -> None:
    """Queues a request; it starts when slots are free."""

  def step(self) -> list[records.RolloutGroup]:
    """Generates for a while and returns the groups that became complete."""

  def update_weights(self, params: Any, version: int) -> None:
    """Swaps the weights; running rollouts go on and keep their cache."""

  def refresh_cache(self) -> None:
    """Recomputes the cache of running rollouts with the current weights."""

  def metrics(self) -> dict[str, int | float]:
    """Counts since the start, by name; {}: there is nothing to tell."""

  def state(self) -> dict[str, Any]:
    """Everything in flight, as nested dicts of JSON values and arrays."""

  def load_state(self, state: dict[str, Any]) -> None:
    """Continues from `state()`; weights must be set before."""

  def close(self) -> None:
    """Frees what the engine holds."""


def check_request(
  request: records.Request, *, prompt_tokens: int, in_flight: Container[int]
) -> None:
  """Checks a request before it is queued.

  Args:
    request: What to generate.
    prompt_tokens: Longest prompt.
    in_flight: Visits that were not returned.

  Raises:
    ValueError: The prompt is empty or too long, or the visit is in flight.
  """
  length = len(request.prompt_ids)
  if not 1 <= length <= prompt_tokens:
    raise ValueError(
      f'problem {request.problem_id!r}: prompt of {length} tokens must have'
      f' 1 to {prompt_tokens} (data.max_prompt_tokens)'
    )
  if request.visit in in_flight:
    raise ValueError(f'visit {request.visit} is already in flight')
