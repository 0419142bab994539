import contextlib
import errno
import hashlib
import json
import logging
import math
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax import sharding
from scalerl_jax.training import checkpointing


def train_state(updates):
  rng = np.random.default_rng(updates)
  return {
    'w': jnp.asarray(rng.normal(size=(16, 100)), jnp.float32),
    'b': [jnp.asarray(rng.normal(size=7), jnp.float32)],
  }


def host_state(updates):
  return {
    'name': 'naïve "text"\n',
    'count': 10 * updates,
    'seconds': 0.1 * updates,
    'unknown': None,
    'flags': [True, False],
    'nested': [{'ids': np.arange(updates, dtype=np.int32)}, {}, []],
    'logps': np.random.default_rng(updates).normal(size=(20, 30)),
  }


def opened(directory, keep=2):
  return contextlib.closing(checkpointing.Checkpointer(directory, keep=keep))


def save(directory, *updates, keep=2):
  with opened(directory, keep) as checkpointer:
    for n in updates:
      checkpointer.save(n, train_state=train_state(n), host=host_state(n))


def restore(directory):
  with opened(directory) as checkpointer:
    return checkpointer.restore(train_state(0))


def names(directory):
  return sorted(p.name for p in directory.iterdir())


def same_bits(tree, other):
  def bits(leaf):
    if not hasattr(leaf, 'dtype'):
      return repr(leaf)
    return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()

  return jax.tree.map(bits, tree) == jax.tree.map(bits, other)


def assert_is(restored, updates):
  """Asserts that it is what `save` stored under that number, to the bit."""
  assert restored.updates == updates
  assert same_bits(restored.train_state, train_state(updates))
  assert same_bits(restored.host, host_state(updates))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Checkpoints 3 and 7; read only."""
  directory = tmp_path_factory.mktemp('saved') / 'checkpoints'
  save(directory, 3, 7)
  return directory


@pytest.fixture
def directory(saved, tmp_path):
  """A copy of checkpoints 3 and 7."""
  return shutil.copytree(saved, tmp_path / 'checkpoints')


# --- Round trips. -----------------------------------------------------------


def test_a_checkpoint_is_restored_to_the_bit(saved):
  assert_is(restore(saved), 7)


def test_values_that_are_easily_bent_come_back(tmp_path):
  nan = np.uint32(0x7FC12345).view(np.float32)  # Not the usual one.
  state = {
    'floats': jnp.array([nan, -0.0, math.inf, 1e-45], jnp.float32),
    'halves': jnp.array([math.nan, 0.1, -3e38], jnp.bfloat16),
    'version': jnp.array(2**31 - 1, jnp.int32),
    'layers': [jnp.ones((2, 3)), (jnp.zeros(1, bool),)],
  }
  host = {
    'floats': [math.nan, -math.inf, 5e-324, 0.1 + 0.2],
    'large': 2**100,
    'empty': np.zeros((0, 3), np.float16),
    'scalar': np.array(2**63 - 1),
    'bools': np.array([[True], [False]]),
    'strided': np.arange(12.0).reshape(3, 4)[:, ::2].T,
    'keys': np.arange(4, dtype=np.uint32),
  }
  with opened(tmp_path) as checkpointer:
    checkpointer.save(1, train_state=state, host=host)
    restored = checkpointer.restore(state)
  assert same_bits(restored.train_state, state)
  assert same_bits(restored.host, host)


def test_numpy_scalars_and_tuples_come_back_as_json_has_them(tmp_path):
  host = {'a': np.float64(0.5), 'b': np.int32(2), 'c': (1, (2,))}
  with opened(tmp_path) as checkpointer:
    checkpointer.save(1, train_state=train_state(1), host=host)
    restored = checkpointer.restore(train_state(0))
  assert restored.host == {'a': 0.5, 'b': 2, 'c': [1, [2]]}


def test_host_arrays_can_be_written_to(saved):
  restored = restore(saved)
  restored.host['logps'][0] = 1  # An array over a buffer would refuse.
  assert (restored.host['logps'][0] == 1).all()


def test_shardings_are_those_of_the_template(saved):
  mesh = sharding.make_mesh((2, 1, 1, 1), devices=jax.devices()[:2])
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  template = train_state(0)
  template['w'] = jax.device_put(template['w'], spread)
  with opened(saved) as checkpointer:
    restored = checkpointer.restore(template)
  assert restored.train_state['w'].sharding == spread
  assert_is(restored, 7)


@pytest.mark.parametrize(
  'value',
  [
    np.array([object()]),
    np.ones(2, jnp.bfloat16),
    jnp.ones(2),
    {1, 2},
  ],
  ids=['object', 'bfloat16', 'jax', 'set'],
)
def test_what_would_not_come_back_is_refused(tmp_path, value):
  with opened(tmp_path) as checkpointer:
    with pytest.raises(TypeError, match=r'object|bfloat16|serializable'):
      checkpointer.save(1, train_state=train_state(1), host={'a': [value]})
    assert checkpointer.restore(train_state(0)) is None


# --- Which are kept. --------------------------------------------------------


def test_where_nothing_was_saved_nothing_is_restored(tmp_path):
  assert restore(tmp_path / 'made' / 'on the way') is None
  assert (tmp_path / 'made' / 'on the way').is_dir()


@pytest.mark.parametrize(
  ('keep', 'kept'), [(1, ['11']), (2, ['10', '11']), (3, ['10', '11', '9'])]
)
def test_the_newest_by_number_are_kept(tmp_path, keep, kept):
  # As text, 9 would come after 10 and 11.
  for updates in ([8, 9], [10], [11]):
    save(tmp_path, *updates, keep=keep)
  assert names(tmp_path) == kept
  assert_is(restore(tmp_path), 11)


def test_a_checkpoint_is_never_replaced(directory):
  with (
    opened(directory) as checkpointer,
    pytest.raises(checkpointing.CheckpointError, match='step 7 already exists'),
  ):
    checkpointer.save(7, train_state=train_state(1), host={})
  assert_is(restore(directory), 7)


def test_other_files_are_left_alone(directory):
  (directory / 'notes.txt').write_text('mine')
  (directory / 'old').mkdir()
  assert_is(restore(directory), 7)
  save(directory, 8)
  assert names(directory) == ['7', '8', 'notes.txt', 'old']


# --- Damage. ----------------------------------------------------------------


def largest(directory: pathlib.Path, kind: str) -> pathlib.Path:
  files = [p for p in (directory / kind).rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
  path.write_bytes(b'')


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def assert_falls_back(directory, caplog):
  """Asserts that 7 is passed over, loudly, and can be saved again."""
  with caplog.at_level(logging.WARNING, logger='scalerl_jax'):
    assert_is(restore(directory), 3)
  expected = f'checkpoint {directory / "7"} is passed over: '
  assert sum(m.startswith(expected) for m in caplog.messages) == 1
  caplog.clear()
  save(directory, 7)
  assert_is(restore(directory), 7)
  assert not caplog.messages
  assert names(directory) == ['3', '7']


@pytest.mark.parametrize('damage', [truncate, empty, flip, pathlib.Path.unlink])
@pytest.mark.parametrize('kind', ['train', 'host', 'tree'])
def test_damaged_data_falls_back(directory, caplog, kind, damage):
  damage(largest(directory / '7', kind))
  assert_falls_back(directory, caplog)


@pytest.mark.parametrize('damage', [truncate, empty, pathlib.Path.unlink])
@pytest.mark.parametrize('file', ['train/manifest.ocdbt', 'host/_METADATA'])
def test_damaged_bookkeeping_falls_back(directory, caplog, file, damage):
  damage(directory / '7' / file)
  assert_falls_back(directory, caplog)


@pytest.mark.parametrize('kind', ['train', 'host', 'tree'])
def test_a_checkpoint_without_a_part_falls_back(directory, caplog, kind):
  shutil.rmtree(directory / '7' / kind)
  assert_falls_back(directory, caplog)


def test_an_empty_checkpoint_falls_back(directory, caplog):
  shutil.rmtree(directory / '7')
  (directory / '7').mkdir()
  assert_falls_back(directory, caplog)


@pytest.mark.parametrize(
  ('text', 'other'),
  [
    ('"count": 70', '"count": 71'),
    ('"seconds": 0.7', '"seconds": 0.6'),
    ('"count"', '"coumt"'),
    ('[true, false]', '[true, true ]'),
    ('"shape": [20, 30]', '"shape": [30, 20]'),
    ('"<f8"', '"<i8"'),
  ],
)
def test_a_changed_value_that_still_parses_falls_back(
  directory, caplog, text, other
):
  path = largest(directory / '7', 'tree')
  content = path.read_text()
  assert content.count(text) == 1
  path.write_text(content.replace(text, other))
  json.loads(path.read_text())
  assert_falls_back(directory, caplog)


def test_damage_of_an_older_checkpoint_is_of_no_matter(directory, caplog):
  flip(largest(directory / '3', 'train'))
  assert_is(restore(directory), 7)
  assert not caplog.messages
  assert names(directory) == ['3', '7']


def test_where_all_are_damaged_none_is_deleted(directory, caplog):
  for updates in ('3', '7'):
    flip(largest(directory / updates, 'train'))
  with pytest.raises(
    checkpointing.UnusableCheckpointError,
    match=f'all checkpoints in {directory} are damaged',
  ):
    restore(directory)
  assert len(caplog.messages) == 2
  assert names(directory) == ['3', '7']


def test_a_checkpoint_that_was_never_finished_is_none(directory, caplog):
  # Killed after the arrays and before the digests.
  (directory / '7' / 'digests.json').unlink()
  assert_falls_back(directory, caplog)
  for updates in ('3', '7'):
    (directory / updates / 'digests.json').unlink()
  with caplog.at_level(logging.WARNING, logger='scalerl_jax'):
    assert restore(directory) is None
  assert len(caplog.messages) == 2
  assert names(directory) == []


@pytest.mark.parametrize('damage', [truncate, empty, flip])
def test_damaged_digests_fall_back(directory, caplog, damage):
  damage(directory / '7' / 'digests.json')
  assert_falls_back(directory, caplog)


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'w': jnp.zeros((16, 99))}, r"\['w'\]: float32\[16, 100\] stored"),
    ({'w': jnp.zeros((16, 100), jnp.bfloat16)}, r'bfloat16\[16, 100\] wanted'),
    ({'more': jnp.zeros(3)}, r"\['more'\]: None stored"),
    ({'b': []}, r"\['b'\]\[0\]: float32\[7\] stored, None wanted"),
  ],
  ids=['shape', 'dtype', 'more', 'fewer'],
)
def test_a_state_of_another_form_is_refused(directory, changed, message):
  with (
    opened(directory) as checkpointer,
    pytest.raises(
      checkpointing.UnusableCheckpointError,
      match=f'{directory / "7"} holds.*{message}',
    ),
  ):
    checkpointer.restore(train_state(0) | changed)
  assert_is(restore(directory), 7)


def test_a_file_that_cannot_be_read_for_now_costs_nothing(
  directory, monkeypatch
):
  def fail(*_):
    raise OSError(errno.EIO, 'Input/output error')

  with monkeypatch.context() as patch:
    patch.setattr(hashlib, 'file_digest', fail)
    with pytest.raises(
      checkpointing.CheckpointError,
      match=f'{directory / "7"} could not be read: .*Input/output',
    ):
      restore(directory)
  assert_is(restore(directory), 7)


# --- Interruption and failing disks. ----------------------------------------


def test_what_a_killed_save_left_is_no_checkpoint(directory, caplog):
  # A save works under such a name and ends with the renaming.
  (directory / '7').rename(directory / '7.orbax-checkpoint-tmp')
  truncate(largest(directory / '7.orbax-checkpoint-tmp', 'train'))
  assert_is(restore(directory), 3)
  assert not caplog.messages
  save(directory, 7)
  assert names(directory) == ['3', '7']
  assert_is(restore(directory), 7)


@contextlib.contextmanager
def file_size_limit(num_bytes):
  """Lets every write fail beyond that size, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_says_so_and_harms_no_other_checkpoint(directory):
  # One array: where writing one of several fails, Orbax abandons the others.
  state = {'w': train_state(9)['w']}
  with opened(directory) as checkpointer:
    with (
      file_size_limit(2000),
      pytest.raises(
        checkpointing.CheckpointError,
        match=r'9 could not be written: .*File too large',
      ) as error,
    ):
      checkpointer.save(9, train_state=state, host=host_state(9))
    assert str(directory) in str(error.value)
    assert {'3', '7'} <= set(names(directory))
    assert '9' not in names(directory)
    assert_is(checkpointer.restore(train_state(0)), 7)
    checkpointer.save(9, train_state=state, host=host_state(9))
  assert names(directory) == ['7', '9']
  with opened(directory) as checkpointer:
    assert same_bits(checkpointer.restore(state).train_state, state)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(OSError, match=f'directory.*{tmp_path / "file"}'):
    save(tmp_path / 'file' / 'checkpoints', 1)
  with pytest.raises(
    checkpointing.CheckpointError, match=f'{tmp_path / "file"}.*directory'
  ):
    save(tmp_path / 'file', 1)
  assert (tmp_path / 'file').read_text() == 'mine'
