"""What the benchmarks share: the toy's sizes, random work, paired timing."""

from collections.abc import Callable
import pathlib
import runpy
import statistics
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from scalerl_jax import config as config_lib
from scalerl_jax import length_control
from scalerl_jax import records
from scalerl_jax.generation import decode

STOP_ID = 259
PHRASE_IDS = (83, 258)


def toy_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the toy run."""
  path = pathlib.Path(__file__).parent.parent / 'configs' / 'toy.py'
  return runpy.run_path(str(path))['get_config']()


CONFIG = config_lib.from_config_dict(toy_config())
SPEC = CONFIG.model.spec(vocab_size=260)


def compare(
  ours: Callable[[], Any], reference: Callable[[], Any], *, pairs: int
) -> tuple[float, float]:
  """Times two functions in interleaved pairs; both were run once before.

  Args:
    ours: Returns what must be ready.
    reference: The same.
    pairs: How many.

  Returns:
    Median seconds of each.
  """
  times: tuple[list[float], list[float]] = ([], [])
  for fn in (ours, reference):
    jax.block_until_ready(fn())  # Compiles.
  for _ in range(pairs):
    for fn, seconds in zip((ours, reference), times, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(fn())
      seconds.append(time.perf_counter() - start)
  return statistics.median(times[0]), statistics.median(times[1])


def decode_spec(*, num_slots: int, response_tokens: int) -> decode.DecodeSpec:
  """A decode loop whose rollouts end at a drawn thinking budget.

  Random weights hardly ever stop by themselves, so the budgets, uniform over
  the response, are what makes lengths differ.

  Args:
    num_slots: Slots.
    response_tokens: Longest response.

  Returns:
    The loop.
  """
  answer = 2
  interruption = length_control.Interruption(
    min_tokens=4,
    max_tokens=response_tokens - answer - len(PHRASE_IDS),
    phrase_ids=PHRASE_IDS,
    answer_tokens=answer,
  )
  return decode.DecodeSpec(
    model=SPEC,
    num_slots=num_slots,
    prompt_tokens=16,
    response_tokens=response_tokens,
    steps_per_dispatch=8,
    temperature=1.0,
    stop_ids=(STOP_ID,),
    interruption=interruption,
  )


def requests(
  num: int, *, group_size: int, first: int = 0
) -> list[records.Request]:
  """Requests for random prompts.

  Args:
    num: How many.
    group_size: Samples of each.
    first: Number of the first visit.

  Returns:
    The requests.
  """
  rng = np.random.default_rng(first)
  return [
    records.Request(
      visit=first + i,
      problem_id=str(i),
      prompt_ids=rng.integers(0, 256, 12).astype(np.int32),
      num_samples=group_size,
    )
    for i in range(num)
  ]
