"""Versions of weights on a disk: whole or not there, and in place."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
import safetensors.numpy

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax.generation.sglang import transport
from tests import tiny_checkpoint

_SPEC = tiny_checkpoint.spec()
_FILE = 'model-00001-of-00002.safetensors'


def _params(seed, spec=_SPEC):
  return models.init_params(spec, jax.random.key(seed))


def _writer(spec=_SPEC, **options):
  def write(open_file, params):
    options.setdefault('max_file_bytes', 9000)
    return hf.write_params(open_file, params, spec, **options)

  return write
