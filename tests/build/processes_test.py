import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import models
from scalerl_jax import sharding
from scalerl_jax.build import processes as processes_lib
from tests import tiny_model


@pytest.mark.parametrize('limit', [1, 300, 5_000, 2**28])
@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_w17_w19_pieces_make_up_the_parameters(limit, dtype):
  params = tiny_model.params(0)
  mesh = sharding.make_mesh((2, 2, 2, 1))
  shardings = sharding.param_shardings(
    models.logical_axes(tiny_model.spec()), mesh
  )
  found = processes_lib.gather(
    jax.device_put(params, shardings), dtype=dtype, limit=limit
  )
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
    assert isinstance(a, np.ndarray)
    expected = b if dtype is None else b.astype(jnp.bfloat16)
    assert a.dtype == expected.dtype
    np.testing.assert_array_equal(a, np.asarray(expected))


def test_with_one_process_an_operation_is_a_call():
  processes = processes_lib.Processes()
  processes.register('double', lambda arrays: 2 * arrays['x'])
  with processes.leading():
    assert processes.leads
    assert processes.count == 1
    assert processes.call('double', {'x': np.array(3)}) == 6
