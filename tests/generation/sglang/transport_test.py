"""Versions of weights on a disk: whole or not there, written in place."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from scalerl_jax import hf
from scalerl_jax import models
from scalerl_jax import records
from scalerl_jax.generation.sglang import transport
from tests import tiny_checkpoint

pytestmark = pytest.mark.usefixtures('quick_compilation')

_SPEC = tiny_checkpoint.spec()
_ROOT = pathlib.Path(__file__).parents[3]


def write(open_file, params, at_point=lambda: None):
  """Writes each array into a file of its own; `at_point` runs in between."""
  tensors = []
  for name, value in params.items():
    data = safetensors.numpy.save({name: value})
    at_point()
    with open_file(f'{name}.safetensors', len(data)) as put:
      for i in range(0, len(data), 100):
        at_point()
        put(memoryview(data)[i : i + 100])
      at_point()
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    tensors.append(
      records.StoredTensor(
        name=name,
        file=f'{name}.safetensors',
        dtype='F32',
        shape=value.shape,
        checksum=digest[:16],
      )
    )
  at_point()
  return tensors


def _params(version, size=50, names=('a', 'b')):
  return {
    name: np.full((2, size), version + i / 8, np.float32)
    for i, name in enumerate(names)
  }


def _read(published):
  """The arrays of a version, once it was found to be whole."""
  manifest = transport.verify(published.directory)
  assert manifest.version == published.version
  arrays = {}
  for name in manifest.files:
    arrays |= safetensors.numpy.load_file(published.directory / name)
  return arrays


def _assert_holds(published, params):
  arrays = _read(published)
  assert arrays.keys() == params.keys()
  for name, value in params.items():
    np.testing.assert_array_equal(arrays[name], value)


def _names(directory):
  return sorted(p.name for p in directory.iterdir() if p.name != '.lock')


def _inodes(published):
  files = published.directory.glob('*.safetensors')
  return {path.name: path.stat().st_ino for path in files}


@pytest.fixture
def directory(tmp_path):
  return tmp_path / 'weights'


def test_two_versions_take_turns_and_files_are_written_in_place(directory):
  disk = transport.DiskTransport(directory, write)
  all_published = []
  for version in range(5):
    published = disk.publish(_params(version), version)
    _assert_holds(published, _params(version))
    all_published.append((published, _inodes(published)))
    assert len(_names(directory)) == min(version + 1, 2)
  for (_, old), (_, new) in zip(all_published, all_published[2:], strict=False):
    assert old == new
  assert all_published[3][1] != all_published[4][1]
  published, _ = all_published[-1]
  assert published.directory.parent == directory
  assert published.directory.is_absolute()
  assert published.num_bytes == sum(
    path.stat().st_size for path in published.directory.glob('*.safetensors')
  )
  assert published.checksums == {
    name: hashlib.sha256(value.tobytes()).hexdigest()[:16]
    for name, value in _params(4).items()
  }
  disk.close()
  assert not directory.exists()


def test_a_version_needs_no_fresh_page():
  size = 1 << 22  # 32 MB, of pages of 4 kB.
  params = _params(0, size=size, names=('a',))
  data = safetensors.numpy.save(params)

  def write_ready(open_file, params):
    with open_file('a.safetensors', len(data)) as put:
      put(memoryview(data))
    return []

  shared_memory = pathlib.Path('/dev/shm')
  if not shared_memory.is_dir():
    pytest.skip('there is no RAM disk')
  directory = tempfile.mkdtemp(dir=shared_memory)
  disk = transport.DiskTransport(directory, write_ready)
  faults = []
  for version in range(4):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    disk.publish(params, version)
    after = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    faults.append(after - before)
  disk.close()
  assert min(faults[:2]) > 10 * max(faults[2:])


def test_w09_a_reader_finds_whole_versions_only(directory):
  """At every moment of a publication, what has a name is whole."""
  disk = transport.DiskTransport(
    directory, lambda *args: write(*args, at_point=look)
  )
  found = []

  def look():
    found.append(
      [
        transport.verify(path).version
        for path in sorted(directory.iterdir())
        if path.name[0] != '.' and path.suffix != '.part'
      ]
    )

  for version in range(4):
    disk.publish(_params(version), version)
  disk.close()
  num_points = len(found) // 4
  assert num_points > 10
  for version in range(4):
    seen = found[version * num_points : (version + 1) * num_points]
    assert seen == [list(range(version)[-1:])] * num_points


def test_w09_a_thread_that_polls_reads_whole_versions(directory):
  disk = transport.DiskTransport(directory, write)
  done = threading.Event()
  read, wrong = set(), []

  def poll():
    while not done.is_set():
      paths = [p for p in directory.iterdir() if p.suffix != '.part']
      newest = max(p for p in paths if p.name != '.lock')
      try:
        read.add(transport.verify(newest).version)
      except (transport.WeightsError, OSError) as error:
        # It may have been overtaken by two versions while it was read.
        if newest.exists():
          wrong.append(error)

  disk.publish(_params(0), 0)
  reader = threading.Thread(target=poll)
  reader.start()
  deadline = time.monotonic() + 20
  version = 0
  while len(read) < 10 and reader.is_alive() and time.monotonic() < deadline:
    version += 1
    disk.publish(_params(version), version)
  done.set()
  reader.join()
  disk.close()
  assert not wrong
  assert len(read) >= 10


def test_w07_a_failure_anywhere_leaves_the_last_version(directory):
  num_points, fail_at = 0, None

  def at_point():
    nonlocal num_points
    num_points += 1
    if num_points == fail_at:
      raise RuntimeError('cut off')

  disk = transport.DiskTransport(
    directory, lambda *args: write(*args, at_point=at_point)
  )
  last = disk.publish(_params(0), 0)
  assert num_points > 10
  for version in range(1, num_points + 1):
    num_points, fail_at = 0, version
    with pytest.raises(RuntimeError, match='cut off'):
      disk.publish(_params(version), version)
    _assert_holds(last, _params(last.version))
    assert _names(directory) == [last.directory.name]
    num_points, fail_at = 0, None
    last = disk.publish(_params(version), version)
    _assert_holds(last, _params(version))
  disk.close()


@pytest.mark.parametrize(
  ('announced', 'written'), [(10, 9), (10, 11), (10, 0), (1, 2)]
)
def test_files_hold_what_was_announced(directory, announced, written):
  def write_other(open_file, params):
    with open_file('a', announced) as put:
      put(memoryview(bytes([1] * written)))
    return []

  disk = transport.DiskTransport(directory, write_other)
  with pytest.raises(
    transport.WeightsError,
    match=f'a: {written} bytes were written, {announced} were announced',
  ):
    disk.publish({}, 0)
  disk.close()


def test_smaller_and_larger_models(directory):
  disk = transport.DiskTransport(directory, write)
  sizes = [(50, 'ab'), (5000, 'ab'), (20, 'ab'), (20, 'a'), (9, 'c')]
  for version, (size, names) in enumerate([*sizes, *sizes[::-1], *sizes]):
    params = _params(version, size=size, names=names)
    published = disk.publish(params, version)
    _assert_holds(published, params)
    files = {f'{name}.safetensors' for name in names}
    assert set(_names(published.directory)) == files | {'manifest.json'}
  disk.close()


def test_a_version_published_again_overwrites_none_of_its_name(directory):
  disk = transport.DiskTransport(directory, write)
  first = disk.publish(_params(7), 3)
  again = disk.publish(_params(8), 3)
  assert first.directory != again.directory
  _assert_holds(first, _params(7))
  _assert_holds(again, _params(8))
  disk.close()


@pytest.mark.parametrize('keep', [2, 3])
def test_as_many_are_kept_as_was_asked(directory, keep):
  disk = transport.DiskTransport(directory, write, keep=keep)
  all_published = [disk.publish(_params(v), v) for v in range(6)]
  for published in all_published[-keep:]:
    _assert_holds(published, _params(published.version))
  assert _names(directory) == [p.directory.name for p in all_published[-keep:]]
  disk.close()


def _replace(slot):
  path = slot / 'a.safetensors'
  size = path.stat().st_size
  path.unlink()
  path.write_bytes(b'x' * size)


@pytest.mark.parametrize(
  'harm',
  [
    shutil.rmtree,
    lambda slot: shutil.rmtree(slot.parent),
    _replace,
    lambda slot: os.truncate(slot / 'a.safetensors', 10),
    lambda slot: (slot / 'a.safetensors').unlink(),
    lambda slot: (slot / 'old.safetensors').write_bytes(b'x'),
  ],
)
def test_what_others_did_to_an_old_version_is_no_matter(directory, harm):
  disk = transport.DiskTransport(directory, write)
  oldest = disk.publish(_params(0), 0)
  disk.publish(_params(1), 1)
  harm(oldest.directory)
  published = disk.publish(_params(2), 2)
  _assert_holds(published, _params(2))
  disk.close()


_DYING = """
import os, signal
from scalerl_jax.generation.sglang import transport
from tests.generation.sglang import transport_test as test

disk = transport.DiskTransport({directory!r}, test.write)
disk.publish(test._params(0), 0)
disk.publish(test._params(1), 1)
disk._write = lambda *args: test.write(*args, at_point=at_point)
points = iter(range(5))
def at_point():
  if next(points, None) is None:
    os.kill(os.getpid(), signal.SIGKILL)
disk.publish(test._params(2), 2)
"""


def test_what_a_killed_process_left(directory):
  code = _DYING.format(directory=str(directory))
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=_ROOT, timeout=120, check=False
  )
  assert done.returncode == -9
  left = _names(directory)
  assert left == ['00000001-0002', '00000002-0003.part']
  assert transport.verify(directory / left[0]).version == 1
  (directory / 'mine.part').touch()
  disk = transport.DiskTransport(directory, write)
  assert _names(directory) == ['mine.part']
  _assert_holds(disk.publish(_params(2), 2), _params(2))
  disk.close()
  assert _names(directory) == ['mine.part']


def test_a_directory_has_one_transport(directory):
  disk = transport.DiskTransport(directory, write)
  published = disk.publish(_params(0), 0)
  with pytest.raises(transport.WeightsError, match='in use by another run'):
    transport.DiskTransport(directory, write)
  _assert_holds(published, _params(0))
  disk.close()
  transport.DiskTransport(directory, write).close()


def test_bad_directories_are_refused(tmp_path):
  (tmp_path / 'file').touch()
  for bad in (tmp_path / 'file', tmp_path / 'file' / 'in', '/proc/weights'):
    with pytest.raises(transport.WeightsError, match='cannot hold weights'):
      transport.DiskTransport(bad, write)
  with pytest.raises(transport.WeightsError, match='keep=1 must be at least 2'):
    transport.DiskTransport(tmp_path / 'weights', write, keep=1)


def test_a_full_disk_leaves_the_last_version(small_disk):
  disk = transport.DiskTransport(small_disk / 'weights', write)
  last = disk.publish(_params(0), 0)
  for version in (1, 2):
    with pytest.raises(OSError, match=r'b\.safetensors') as caught:
      disk.publish(_params(version, size=80_000), version)  # 2 of 640 kB.
    assert caught.value.errno == errno.ENOSPC
    _assert_holds(last, _params(last.version))
    last = disk.publish(_params(version + 10), version + 10)
    _assert_holds(last, _params(last.version))
  disk.close()


def test_a_file_that_is_too_large_leaves_the_last_version(directory):
  disk = transport.DiskTransport(directory, write)
  last = disk.publish(_params(0), 0)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
  try:
    with pytest.raises(OSError, match=r'a\.safetensors') as caught:
      disk.publish(_params(1, size=80_000), 1)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert caught.value.errno == errno.EFBIG
  _assert_holds(last, _params(0))
  _assert_holds(disk.publish(_params(1, size=80_000), 1), _params(1, 80_000))
  disk.close()


def _edit_manifest(directory, **fields):
  path = directory / 'manifest.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _change(directory, tensors):
  """Replaces a file, and its size in the manifest."""
  path = directory / 'a.safetensors'
  path.write_bytes(safetensors.numpy.save(tensors))
  manifest = transport.read_manifest(directory)
  sizes = manifest.files | {path.name: path.stat().st_size}
  _edit_manifest(directory, files=sizes)


def _flip(directory):
  path = directory / 'a.safetensors'
  data = path.read_bytes()
  path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


_VALUE = _params(0)['a']


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (
      lambda d: os.truncate(d / 'a.safetensors', 100),
      r'a\.safetensors has 100 bytes, the manifest says \d+',
    ),
    (_flip, "a.safetensors: 'a' has the checksum"),
    (
      lambda d: _change(d, {'c': _VALUE}),
      "a.safetensors lacks 1 tensors, against the manifest: 'a'",
    ),
    (lambda d: _change(d, {'a': _VALUE, 'c': _VALUE}), "adds 1 tensors.*'c'"),
    (
      lambda d: _change(d, {'a': _VALUE.T}),
      r"'a' is F32 \(50, 2\), the manifest says F32 \(2, 50\)",
    ),
    (lambda d: _change(d, {'a': _VALUE.view('i4')}), "'a' is I32"),
    (
      lambda d: (d / 'b.safetensors').unlink(),
      "lacks 1 files, against the manifest: 'b.safetensors'",
    ),
    (lambda d: (d / 'c.safetensors').touch(), "adds 1 files.*'c.safetensors'"),
    (
      lambda d: (d / 'a.safetensors').write_bytes(
        b'x' * (d / 'a.safetensors').stat().st_size
      ),
      'a.safetensors is not a safetensors file',
    ),
    (lambda d: (d / 'manifest.json').unlink(), 'never published'),
    (lambda d: (d / 'manifest.json').write_text('{'), 'is not a manifest'),
    (lambda d: (d / 'manifest.json').write_text('[]'), 'is not a manifest'),
    (lambda d: _edit_manifest(d, tensors=[{}]), 'is not a manifest'),
  ],
)
def test_verify_says_what_is_wrong(directory, damage, message):
  disk = transport.DiskTransport(directory, write)
  published = disk.publish(_params(0), 0)
  transport.verify(published.directory)
  damage(published.directory)
  with pytest.raises(transport.WeightsError, match=message):
    transport.verify(published.directory)
  disk.close()


def test_w05_w08_every_version_is_a_whole_checkpoint(directory):
  """It needs no other to be loaded, and says what its bytes are."""

  def write_model(open_file, params):
    return hf.write_params(open_file, params, _SPEC, max_file_bytes=9000)

  disk = transport.DiskTransport(directory, write_model)
  for version in range(3):
    params = models.init_params(_SPEC, jax.random.key(version))
    published = disk.publish(params, version)
    manifest = transport.verify(published.directory)
    assert len(manifest.files) > 3
    got = hf.load_params(published.directory, _SPEC, dtype='bfloat16')
    jax.tree.map(
      lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)),
      got,
      params,
    )
    stored = {}
    for path in published.directory.glob('*.safetensors'):
      stored |= safetensors.numpy.load_file(path)
    assert published.checksums == {
      name: hashlib.sha256(value.tobytes()).hexdigest()[:16]
      for name, value in stored.items()
    }
  disk.close()


def test_without_checksums_the_rest_is_verified(directory):
  def write_model(open_file, params):
    return hf.write_params(open_file, params, _SPEC, checksums=False)

  disk = transport.DiskTransport(directory, write_model)
  params = models.init_params(_SPEC, jax.random.key(0))
  published = disk.publish(params, 0)
  assert published.checksums == {}
  manifest = transport.verify(published.directory)
  renamed = dataclasses.replace(manifest.tensors[0], name='odd')
  tensors = [dataclasses.asdict(t) for t in (renamed, *manifest.tensors[1:])]
  _edit_manifest(published.directory, tensors=tensors)
  with pytest.raises(transport.WeightsError, match="'odd'"):
    transport.verify(published.directory)
  disk.close()
