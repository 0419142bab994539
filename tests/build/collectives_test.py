"""Bytes of collectives, read from small programs and from text by hand."""

import jax
import jax.numpy as jnp
import pytest

from scalerl_jax import sharding
from scalerl_jax.build import collectives

_TEXT = """HloModule jit_step

%add.1 (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %ar = (f32[8,4]{1,0}, bf16[3]{0}) all-reduce(%x, %y), to_apply=%add.1
  %start = (f32[2], f32[8]) all-gather-start(%z), dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
}

%outer (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%c, body=%body, backend_config={LOOP}
  %p = pred[7]{0} collective-permute(%q), source_target_pairs={{0,1}}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %w = (s32[]) while(%t), body=%outer, backend_config={FIVE}
  %rs = s8[16]{0} reduce-scatter(%v), to_apply=%add.1
  ROOT %r = f32[2] conditional(%i), branch_computations={%add.1, %leaf}
}

%leaf (p: f32[2]) -> f32[2] {
  %aa = (f32[1,2]{1,0}, f32[1,2]{1,0}) all-to-all(%m, %n), dimensions={0}
}
"""


@pytest.mark.parametrize(
  ('loop', 'trips'), [('{"known_trip_count":{"n":"3"}}', 3), ('{}', 1)]
)
def test_operations_count_as_often_as_the_loops_around_them(loop, trips):
  text = _TEXT.replace('{FIVE}', '{"known_trip_count":{"n":"5"}}')
  found = collectives.collective_bytes(text.replace('{LOOP}', loop))
  assert found == {
    'all-gather': 5 * trips * 8 * 4,
    'reduce-scatter': 16,
    'all-reduce': 5 * trips * (8 * 4 * 4 + 3 * 2),
    'all-to-all': 2 * 2 * 4,
    'collective-permute': 5 * 7,
  }
  assert list(found) == list(collectives.KINDS)


@pytest.mark.parametrize('length', [1, 6])
def test_a_scanned_sum_over_devices_counts_each_time(length):
  mesh = sharding.make_mesh((4, 1, 1, 1))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def total(x):
    def add(carry, _):
      # What is summed depends on the carry, so that it stays in the loop.
      return carry + jnp.sum(x * jnp.cos(carry), axis=0), None

    return jax.lax.scan(add, jnp.zeros(32), None, length=length)[0]

  x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=rows)
  with jax.numpy_rank_promotion('allow'):
    compiled = jax.jit(total, out_shardings=whole).lower(x).compile()
  found = collectives.collective_bytes(compiled.as_text())
  assert found == {'all-reduce': length * 32 * 4}
