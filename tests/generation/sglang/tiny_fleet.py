"""Engines of the tiny model on real servers."""

import contextlib
import dataclasses
import functools

import numpy as np

from scalerl_jax import hf
from scalerl_jax.generation.sglang import engine as engine_lib
from scalerl_jax.generation.sglang import transport
from tests import tiny_model
from tests.generation import tiny_engine

WIDTH = 256


def spec(*, model=None, **changes) -> engine_lib.SamplingSpec:
  """The sampling of `tiny_engine.spec` of the same arguments."""
  model = model or tiny_model.spec()
  made = tiny_engine.spec(model=model, **changes)
  others = ('vocab_size', 'routing')
  fields = [f.name for f in dataclasses.fields(engine_lib.SamplingSpec)]
  values = {n: getattr(made, n) for n in fields if n not in others}
  routing = None
  if model.moe is not None:
    routing = (model.num_layers, model.moe.experts_per_token)
  return engine_lib.SamplingSpec(
    vocab_size=model.vocab_size, routing=routing, **values
  )


def write(open_file, params, model=None):
  model = model or tiny_model.spec()
  return hf.write_params(open_file, params, model, dtype='float32')


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
  model=None,
  **kind,
):
  """Makes an engine; `weights` is the seed of its parameters, None: none."""
  if model is not None:
    write_fn = functools.partial(write_fn, model=model)

  def score(params, token_ids):
    found = tiny_model.score(
      params, [token_ids], temperature=temperature, width=WIDTH, model=model
    )
    return np.asarray(found[0][1:])

  fields = {'max_logp_diff': 1e-4, 'probe_s': 10.0, 'control_s': 60.0}
  made = engine_lib.SglangEngine(
    spec(temperature=temperature, model=model, **kind),
    urls,
    transport.DiskTransport(directory, write_fn),
    score=score,
    seed=0,
    **(fields | (options or {})),
  )
  with contextlib.closing(made):
    if weights is not None:
      made.update_weights(tiny_model.params(weights, model), version)
    yield made
