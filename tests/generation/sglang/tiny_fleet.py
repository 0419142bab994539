"""Engines of the tiny model on real servers."""

import contextlib
import dataclasses

import numpy as np

from scalerl_jax import hf
from scalerl_jax.generation.sglang import engine as engine_lib
from scalerl_jax.generation.sglang import transport
from tests import tiny_model
from tests.generation import tiny_engine

WIDTH = 256


def spec(**changes) -> engine_lib.SamplingSpec:
  """The sampling of `tiny_engine.spec` of the same arguments."""
  made = tiny_engine.spec(**changes)
  fields = [f.name for f in dataclasses.fields(engine_lib.SamplingSpec)]
  values = {n: getattr(made, n) for n in fields if n != 'vocab_size'}
  return engine_lib.SamplingSpec(vocab_size=made.model.vocab_size, **values)


def write(open_file, params):
  return hf.write_params(open_file, params, tiny_model.spec(), dtype='float32')


@contextlib.contextmanager
def engine(
  urls,
  directory,
  *,
  weights=0,
  version=0,
  temperature=1.0,
  write_fn=write,
  options=None,
  **kind,
):
  """Makes an engine; `weights` is the seed of its parameters, None: none."""

  def score(params, token_ids):
    found = tiny_model.score(
      params, [token_ids], temperature=temperature, width=WIDTH
    )
    return np.asarray(found[0][1:])

  fields = {'max_logp_diff': 1e-4, 'probe_s': 10.0, 'control_s': 60.0}
  made = engine_lib.SglangEngine(
    spec(temperature=temperature, **kind),
    urls,
    transport.DiskTransport(directory, write_fn),
    score=score,
    seed=0,
    **(fields | (options or {})),
  )
  with contextlib.closing(made):
    if weights is not None:
      made.update_weights(tiny_model.params(weights), version)
    yield made
