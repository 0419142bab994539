import dataclasses
import math

import numpy as np
import pytest

from scalerl_jax import records
from scalerl_jax.training import batching
from tests.training import tiny_batch

ABORTED = {'finish_reason': records.FinishReason.ABORTED}
TRUNCATED = {'finish_reason': records.FinishReason.LENGTH}


def hand_groups():
  """Two prompts; the second response of the first was interrupted."""
  return [
    tiny_batch.group(
      7,
      tiny_batch.rollout([5, 6], [-0.5, -0.25], reward=-1.0),
      tiny_batch.rollout(
        [3, 8, 4],
        [-0.125, 0, -2],
        sampled=[True, False, True],
        policy_versions=np.array([2, 2, 3], np.int32),
      ),
      prompt=(9, 10),
    ),
    tiny_batch.group(3, tiny_batch.rollout([4], [-4], reward=0.5), prompt=(2,)),
  ]


def assemble(groups, *, num_rows=4, row_tokens=6, **kwargs):
  return batching.assemble(
    groups, num_rows=num_rows, row_tokens=row_tokens, **kwargs
  )


def assemble_one(truncated='mask', **changes):
  """A batch of one rollout, of three tokens unless changed."""
  rollout = tiny_batch.rollout([3, 4, 5], **changes)
  return assemble([tiny_batch.group(0, rollout)], truncated=truncated)


def contents(batch):
  """Per rollout, all that the batch holds of it, whatever the layout."""
  names = ('tokens', 'positions', 'loss_mask', 'behavior_logp')
  found = []
  for r in range(len(batch.valid)):
    where = batch.rollout_index == r
    values = {n: getattr(batch, n)[where].tolist() for n in names}
    values['policy_version'] = batch.policy_version[where].tolist()
    values['reward'] = float(batch.rewards[r])
    values['valid'] = bool(batch.valid[r])
    found.append(values)
  return found


# --- One rollout per row. ---------------------------------------------------


def test_every_array_by_hand():
  batch, _ = assemble(hand_groups(), pad_id=1)
  expected = {
    'tokens': [
      [9, 10, 5, 6, 1, 1],
      [9, 10, 3, 8, 4, 1],
      [2, 4, 1, 1, 1, 1],
      [1, 1, 1, 1, 1, 1],
    ],
    'positions': [
      [0, 1, 2, 3, 0, 0],
      [0, 1, 2, 3, 4, 0],
      [0, 1, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 0],
    ],
    'segment_ids': [
      [1, 1, 1, 1, 0, 0],
      [1, 1, 1, 1, 1, 0],
      [1, 1, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 0],
    ],
    'loss_mask': [
      [0, 0, 1, 1, 0, 0],
      [0, 0, 1, 0, 1, 0],
      [0, 1, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 0],
    ],
    'behavior_logp': [
      [0, 0, -0.5, -0.25, 0, 0],
      [0, 0, -0.125, 0, -2, 0],
      [0, -4, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 0],
    ],
    'policy_version': [
      [-1, -1, 0, 0, -1, -1],
      [-1, -1, 2, 2, 3, -1],
      [-1, 0, -1, -1, -1, -1],
      [-1, -1, -1, -1, -1, -1],
    ],
    'rollout_index': [
      [0, 0, 0, 0, -1, -1],
      [1, 1, 1, 1, 1, -1],
      [2, 2, -1, -1, -1, -1],
      [-1, -1, -1, -1, -1, -1],
    ],
    'rewards': [-1, 1, 0.5, 0],
    'valid': [1, 1, 1, 0],
  }
  for name, value in expected.items():
    np.testing.assert_array_equal(
      getattr(batch, name), np.array(value), err_msg=name
    )
  # The prompt of the padding rollout is any that exists for [R] arrays.
  np.testing.assert_array_equal(batch.prompt_index, [0, 0, 1, 3])
  assert batch.reference_logp is None


@pytest.mark.parametrize('packed', [False, True])
def test_dtypes_do_not_depend_on_the_layout(packed):
  batch, _ = assemble(hand_groups(), packed=packed)
  for name in ('tokens', 'positions', 'segment_ids', 'policy_version'):
    assert getattr(batch, name).dtype == np.int32
    assert getattr(batch, name).shape == (4, 6)
  for name in ('behavior_logp', 'rewards'):
    assert getattr(batch, name).dtype == np.float32
  for name in ('loss_mask', 'valid'):
    assert getattr(batch, name).dtype == bool
  for name in ('rollout_index', 'prompt_index'):
    assert getattr(batch, name).dtype == np.int32


def test_a_batch_of_no_groups_is_all_padding():
  batch, stats = assemble([])
  assert not batch.segment_ids.any()
  assert not batch.valid.any()
  assert (batch.rollout_index == -1).all()
  assert stats.padding_fraction == 1
  assert stats.num_rollouts == 0


def test_a_rollout_may_fill_its_row():
  batch, stats = assemble(hand_groups()[:1], num_rows=2, row_tokens=5)
  assert batch.tokens[1].tolist() == [9, 10, 3, 8, 4]
  assert stats.padding_fraction == pytest.approx(1 / 10)


def test_records_are_neither_changed_nor_shared():
  groups = tiny_batch.random_groups()
  before = [records.group_to_state(g) for g in tiny_batch.random_groups()]
  batch, _ = assemble(groups, num_rows=16, row_tokens=10)
  for array in batch:
    if array is not None:
      array[...] = 1
  for group, state in zip(groups, before, strict=True):
    np.testing.assert_equal(records.group_to_state(group), state)


@pytest.mark.parametrize(
  ('row_multiple', 'packed', 'num_rows'),
  [(1, False, 3), (2, False, 4), (8, False, 8), (1, True, 2), (3, True, 3)],
)
def test_as_few_rows_as_are_needed_in_multiples(row_multiple, packed, num_rows):
  # Rows of 6 for lengths of 4, 5 and 2: packed, the first and last share one.
  batch, _ = assemble(
    hand_groups(), num_rows=None, row_multiple=row_multiple, packed=packed
  )
  fixed, _ = assemble(hand_groups(), num_rows=num_rows, packed=packed)
  assert batch.tokens.shape == (num_rows, 6)
  for array, expected in zip(batch, fixed, strict=True):
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize('packed', [False, True])
def test_the_order_of_groups_only_orders_the_rollouts(packed):
  groups = tiny_batch.random_groups()
  order = [2, 0, 3, 1]
  batch, stats = assemble(groups, num_rows=16, row_tokens=10, packed=packed)
  permuted, permuted_stats = assemble(
    [groups[g] for g in order], num_rows=16, row_tokens=10, packed=packed
  )
  moved = [4 * g + i for g in order for i in range(4)]
  expected = contents(batch)
  assert contents(permuted) == [expected[r] for r in moved]
  assert permuted_stats == stats
  for b in (batch, permuted):
    np.testing.assert_array_equal(b.prompt_index, np.repeat(range(4), 4))


# --- What takes part. -------------------------------------------------------


@pytest.mark.parametrize(('truncated', 'valid'), [('mask', 0), ('keep', 1)])
def test_a_truncated_rollout_is_masked_or_keeps_its_reward(truncated, valid):
  batch, stats = assemble_one(truncated, reward=-1.0, **TRUNCATED)
  assert batch.valid.tolist() == [bool(valid), False, False, False]
  assert batch.rewards[0] == -1
  assert batch.loss_mask[0].tolist() == [0, 1, 1, 1, 0, 0]
  assert stats.num_truncated == 1


@pytest.mark.parametrize('truncated', ['mask', 'keep'])
@pytest.mark.parametrize('reward', [None, math.nan, math.inf, -math.inf])
def test_an_unscored_rollout_is_masked_and_counted(truncated, reward):
  batch, stats = assemble_one(truncated, reward=reward)
  assert not batch.valid[0]
  assert batch.rewards[0] == 0
  assert (stats.num_unscored, stats.num_correct) == (1, 0)


def test_a_reward_of_zero_is_a_score():
  batch, stats = assemble_one(reward=0.0)
  assert batch.valid[0]
  assert (stats.num_unscored, stats.num_correct) == (0, 0)


@pytest.mark.parametrize('tokens', [[3, 4], []])
def test_an_aborted_rollout_is_masked_and_counted(tokens):
  group = tiny_batch.group(0, tiny_batch.rollout(tokens, **ABORTED))
  batch, stats = assemble([group], truncated='keep')
  assert not batch.valid[0]
  assert stats.num_aborted == 1
  assert stats.num_truncated == 0
  assert stats.num_sampled_tokens == len(tokens)


@pytest.mark.parametrize('logp', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(('sampled', 'valid'), [(True, False), (False, True)])
def test_a_logp_must_be_finite_where_the_token_was_sampled(
  logp, sampled, valid
):
  batch, stats = assemble_one(
    logps=[-1, logp, -1], sampled=[True, sampled, True]
  )
  assert batch.valid[0] == valid
  assert stats.num_nonfinite == (not valid)


def test_stats_by_hand():
  groups = [
    *hand_groups(),
    tiny_batch.group(
      4,
      tiny_batch.rollout([1, 1], **TRUNCATED),
      tiny_batch.rollout([1], reward=None),
      tiny_batch.rollout([1], reward=-1.0, **ABORTED),
      tiny_batch.rollout([1], [math.nan], reward=-1.0),
    ),
  ]
  _, stats = assemble(groups, num_rows=8, row_tokens=10)
  # With prompts: 4, 5 and 2 tokens; then 3, 2, 2 and 2.
  assert stats == batching.BatchStats(
    num_rollouts=7,
    num_truncated=1,
    num_interrupted=1,
    num_unscored=1,
    num_aborted=1,
    num_nonfinite=1,
    num_sampled_tokens=10,
    num_forced_tokens=1,
    num_tokens=20,
    padding_fraction=0.75,
    num_correct=3,
  )


# --- Packing. ---------------------------------------------------------------


def test_packing_is_first_fit_decreasing():
  # Lengths with prompts, 2, 5, 3 and 4, go into rows of 7 as 5+2 and 4+3.
  groups = [
    tiny_batch.group(visit, tiny_batch.rollout([3 + visit] * (n - 1)))
    for visit, n in enumerate([2, 5, 3, 4])
  ]
  batch, stats = assemble(groups, num_rows=3, row_tokens=7, packed=True)
  np.testing.assert_array_equal(
    batch.rollout_index,
    [[1, 1, 1, 1, 1, 0, 0], [3, 3, 3, 3, 2, 2, 2], [-1] * 7],
  )
  np.testing.assert_array_equal(
    batch.segment_ids,
    [[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2, 2], [0] * 7],
  )
  np.testing.assert_array_equal(
    batch.positions,
    [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2], [0] * 7],
  )
  np.testing.assert_array_equal(
    batch.tokens, [[2, 4, 4, 4, 4, 2, 3], [2, 6, 6, 6, 2, 5, 5], [0] * 7]
  )
  assert batch.prompt_index.tolist() == [0, 1, 2, 3]
  assert stats.padding_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize('seed', range(3))
def test_p02_packed_rows_hold_the_same_rollouts(seed):
  groups = tiny_batch.random_groups(seed)
  one_each, _ = assemble(groups, num_rows=16, row_tokens=10)
  packed, _ = assemble(groups, num_rows=10, row_tokens=20, packed=True)
  assert contents(packed) == contents(one_each)
  np.testing.assert_array_equal(packed.prompt_index, one_each.prompt_index)


def test_what_does_not_pack_is_refused():
  # 9 tokens would fit two rows of 5 only if a rollout of 3 could be cut.
  groups = [tiny_batch.group(v, tiny_batch.rollout([3, 4])) for v in range(3)]
  with pytest.raises(ValueError, match='9 tokens do not pack into 2 rows of 5'):
    assemble(groups, num_rows=2, row_tokens=5, packed=True)
  assemble(groups, num_rows=3, row_tokens=5, packed=True)


# --- What is refused. -------------------------------------------------------


@pytest.mark.parametrize('packed', [False, True])
def test_a_rollout_longer_than_a_row_is_refused(packed):
  with pytest.raises(
    ValueError, match='a rollout of 5 tokens does not fit a row of 4'
  ):
    assemble(hand_groups(), row_tokens=4, packed=packed)


def test_more_rollouts_than_rows_are_refused():
  with pytest.raises(ValueError, match='3 rollouts for 2 rows'):
    assemble(hand_groups(), num_rows=2)


def test_a_visit_given_twice_is_refused():
  group = hand_groups()[0]
  with pytest.raises(ValueError, match=r'given twice: \[7, 7\]'):
    assemble([group, group])


def test_an_unknown_policy_for_truncated_rollouts_is_refused():
  with pytest.raises(ValueError, match=r"truncated='drop' must be one of"):
    assemble(hand_groups(), truncated='drop')


@pytest.mark.usefixtures('unchecked_signatures')
@pytest.mark.parametrize('name', ['logps', 'policy_versions', 'sampled'])
@pytest.mark.parametrize('length', [2, 4])
def test_arrays_that_differ_in_length_are_refused(name, length):
  rollout = tiny_batch.rollout([3, 4, 5])
  array = np.resize(getattr(rollout, name), length)
  damaged = dataclasses.replace(rollout, **{name: array})
  with pytest.raises(
    ValueError, match=f'visit 6: {name} has {length} entries for 3 tokens'
  ):
    assemble([tiny_batch.group(6, damaged)])


# --- Buckets. ---------------------------------------------------------------


@pytest.mark.parametrize(
  ('length', 'expected'),
  [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)],
)
def test_bucket_is_the_next_multiple_within_the_limit(length, expected):
  assert batching.bucket(length, multiple=8, limit=20) == expected


def test_a_length_beyond_the_limit_has_no_bucket():
  with pytest.raises(ValueError, match='21 tokens exceeds the limit of 20'):
    batching.bucket(21, multiple=8, limit=20)
