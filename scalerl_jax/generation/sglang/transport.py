"""Weights on their way to servers: whole versions in a directory that they see.

    directory/00000012-0007/    version, number of the publication
      config.json
      model-*.safetensors
      manifest.json             what the rest must hold; written last

A version is written to a `.part`, synced, and renamed: it appears whole or not
at all. On a RAM disk fresh pages are what costs, so the files of the oldest are
overwritten in place, through mappings that are kept: as fast as a copy in
memory. On other disks a version is written the same way, at their own speed.
"""

import collections
from collections.abc import Callable, Iterator, Sequence, Set
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import pathlib
import re
import shutil
import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from scalerl_jax import records

_MANIFEST = 'manifest.json'
_LOCK = '.lock'
_NAME = re.compile(r'\d{8,}-\d{4,}(\.part)?')

_Put = Callable[[memoryview], object]
OpenFile = Callable[[str, int], contextlib.AbstractContextManager[_Put]]
WriteFn = Callable[[OpenFile, Any], Sequence[records.StoredTensor]]


class WeightsError(ValueError):
  """Weights that cannot be published or used; the message is one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
  """Weights that servers can load.

  Attributes:
    version: Updates that they contain.
    directory: Where they are; absolute.
    num_bytes: Of all files.
    seconds: That it took to publish them.
    checksums: Of each tensor by its name in the checkpoint, the first 16
      hexadecimal digits of the SHA-256 of its stored bytes. A server on a CPU
      says the same (`/weights_checker`) of what it neither fuses nor pads; on a
      GPU its hash is another. Empty: none were taken.
  """

  version: int
  directory: pathlib.Path
  num_bytes: int
  seconds: float
  checksums: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
  """What a published directory holds.

  Attributes:
    version: Updates that the weights contain.
    files: Bytes of each file, by its name.
    tensors: The weights.
  """

  version: int
  files: dict[str, int]
  tensors: tuple[records.StoredTensor, ...]


@runtime_checkable
class WeightTransport(Protocol):
  """Brings weights to where servers can load them."""

  def publish(self, params: Any, version: int) -> Published:
    """Publishes weights; at a failure what was published before stays.

    Args:
      params: The trainer's parameters, not donated before this returns.
      version: Updates that they contain.

    Returns:
      Where they are.
    """
    ...

  def discard(self, published: Published) -> None:
    """Gives up a version that servers could not load, in favour of older ones.

    Args:
      published: From `publish`.
    """
    ...

  def close(self) -> None:
    """Takes back what was published."""
    ...


class DiskTransport:
  """Publishes through a directory on a RAM disk or a shared file system.

  A transport has its directory to itself and is used by one thread. A version
  is overwritten by the one `keep` later, so no server may be loading it by
  then: publish the next when all have loaded the last, or were left out.
  """

  def __init__(
    self, directory: str | os.PathLike[str], write: WriteFn, *, keep: int = 2
  ) -> None:
    """Creates the directory; removes what a process that died left in it.

    Args:
      directory: Where versions appear, under a path that servers know too; what
        else it holds is left alone.
      write: Writes parameters: `write(open_file, params)`, where
        `with open_file(name, num_bytes) as put` opens a file, and `put` takes
        its bytes in order; returns the tensors.
      keep: Versions that there are at a time, at least 2: the room that is
        needed, in models.

    Raises:
      WeightsError: `keep` is too small, or the directory is another
        transport's, or it cannot be used.
    """
    if keep < 2:
      raise WeightsError(
        f'keep={keep} must be at least 2: one is loaded while one is written'
      )
    self._directory = pathlib.Path(directory).absolute()
    self._write = write
    self._keep = keep
    self._count = 0
    self._is_closed = False
    self._slots: collections.deque[_Slot] = collections.deque()
    with contextlib.ExitStack() as stack:
      try:
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((self._directory / _LOCK).open('w'))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in self._directory.iterdir():
          if _NAME.fullmatch(path.name):
            shutil.rmtree(path)
      except BlockingIOError:
        raise WeightsError(
          f'{self._directory} is in use by another run; give each its own'
        ) from None
      except OSError as error:
        raise WeightsError(
          f'{self._directory} cannot hold weights: {error.strerror}; give a'
          ' directory that can be created and written to'
        ) from None
      self._unlock = stack.pop_all()

  def publish(self, params: Any, version: int) -> Published:
    """Writes a version over the oldest.

    Args:
      params: The trainer's parameters, not donated before this returns.
      version: Updates that they contain. One that was published before appears
        once more under another name, and the first of that stays.

    Returns:
      Where they are.

    Raises:
      OSError: There is no room, for example. All versions but the oldest stay,
        and the next can be published.
      WeightsError: `write` did not write what it announced; as above.
    """
    start = time.perf_counter()
    self._count += 1
    target = self._directory / f'{version:08d}-{self._count:04d}'
    part = target.with_name(f'{target.name}.part')
    full = len(self._slots) == self._keep
    slot = self._slots.popleft() if full else _Slot(part)
    try:
      slot.begin(part)
      manifest = slot.finish(version, self._write(slot.open_file, params))
      slot.move(target)
      _sync(self._directory)
    except BaseException:
      slot.remove()
      raise
    self._slots.append(slot)
    return Published(
      version=version,
      directory=target,
      num_bytes=sum(manifest.files.values()),
      seconds=time.perf_counter() - start,
      checksums={
        t.name: t.checksum for t in manifest.tensors if t.checksum is not None
      },
    )

  def discard(self, published: Published) -> None:
    """Makes a version the next one to be written over.

    Args:
      published: From `publish`.
    """
    for slot in list(self._slots):
      if slot.path == published.directory:
        self._slots.remove(slot)
        self._slots.appendleft(slot)

  def close(self) -> None:
    """Removes the versions; the directory too if nothing else is in it."""
    while self._slots:
      self._slots.pop().remove()
    if self._is_closed:
      return  # Another run may have the directory by now.
    self._is_closed = True
    (self._directory / _LOCK).unlink(missing_ok=True)
    self._unlock.close()
    with contextlib.suppress(OSError):
      self._directory.rmdir()


class _Slot:
  """A directory whose files are overwritten in place."""

  def __init__(self, path: pathlib.Path) -> None:
    self.path = path
    self._maps: dict[str, _Map] = {}
    self._sizes: dict[str, int] = {}

  def begin(self, path: pathlib.Path) -> None:
    self._sizes = {}
    try:
      self.move(path)
    except FileNotFoundError:  # It is new, or somebody removed it.
      self.path = path
      path.mkdir(parents=True)
    (path / _MANIFEST).unlink(missing_ok=True)

  def move(self, path: pathlib.Path) -> None:
    self.path.rename(path)
    self.path = path

  @contextlib.contextmanager
  def open_file(self, name: str, num_bytes: int) -> Iterator[_Put]:
    view = self._mapped(name, num_bytes)
    end = 0

    def put(data: memoryview) -> None:
      nonlocal end
      piece = np.frombuffer(data, np.uint8)
      start, end = end, end + piece.size
      if end <= num_bytes:
        np.copyto(view[start:end], piece)  # Other threads run meanwhile.

    try:
      yield put
    finally:
      del view  # Who keeps `put` would keep the pages of a removed file.
    if end != num_bytes:
      raise WeightsError(
        f'{name}: {end} bytes were written, {num_bytes} were announced'
      )
    self._sizes[name] = num_bytes

  def _mapped(self, name: str, num_bytes: int) -> np.ndarray:
    path = self.path / name
    try:
      with path.open('r+b' if path.exists() else 'x+b') as file:
        found = os.fstat(file.fileno())
        kept = self._maps.pop(name, None)
        if kept and (found.st_ino, found.st_size) == (kept.inode, num_bytes):
          self._maps[name] = kept
          return kept.view
        del kept
        os.ftruncate(file.fileno(), num_bytes)
        # A page that a mapping finds no room for kills the process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        view = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    except OSError as error:
      raise OSError(error.errno, error.strerror, str(path)) from None
    self._maps[name] = _Map(found.st_ino, view)
    return view

  def finish(
    self, version: int, tensors: Sequence[records.StoredTensor]
  ) -> Manifest:
    # A server loads every file of weights that it finds.
    for path in self.path.iterdir():
      if path.name not in self._sizes:
        path.unlink()
    self._maps = {name: self._maps[name] for name in self._sizes}
    for name in self._sizes:
      _sync(self.path / name)
    manifest = Manifest(
      version=version, files=self._sizes, tensors=tuple(tensors)
    )
    path = self.path / _MANIFEST
    path.write_text(json.dumps(dataclasses.asdict(manifest)), encoding='utf-8')
    _sync(path)
    _sync(self.path)
    return manifest

  def remove(self) -> None:
    self._maps.clear()
    shutil.rmtree(self.path, ignore_errors=True)


class _Map(NamedTuple):
  inode: int
  view: np.ndarray


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
  """Reads what a published directory must hold.

  Args:
    directory: Of a version.

  Returns:
    The manifest.

  Raises:
    WeightsError: There is none, or it cannot be read.
  """
  path = pathlib.Path(directory) / _MANIFEST
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
    return Manifest(
      version=int(fields['version']),
      files={name: int(size) for name, size in fields['files'].items()},
      tensors=tuple(
        records.StoredTensor(**{**t, 'shape': tuple(t['shape'])})
        for t in fields['tensors']
      ),
    )
  except OSError as error:
    raise WeightsError(
      f'{path} cannot be read: {error.strerror}; the version was never'
      ' published, or is there no more'
    ) from None
  except (ValueError, KeyError, TypeError, AttributeError):
    raise WeightsError(f'{path} is not a manifest of weights') from None


def verify(directory: str | os.PathLike[str]) -> Manifest:
  """Checks a published directory against its manifest, all bytes of it.

  Args:
    directory: Of a version, or a copy of it.

  Returns:
    The manifest, which is true.

  Raises:
    WeightsError: What is wrong, of the first file or tensor that is.
  """
  root = pathlib.Path(directory)
  manifest = read_manifest(root)
  sizes = {path.name: path.stat().st_size for path in root.iterdir()}
  _same(root, 'files', sizes.keys() - {_MANIFEST}, manifest.files.keys())
  for name, size in manifest.files.items():
    if sizes[name] != size:
      raise WeightsError(
        f'{root / name} has {sizes[name]} bytes, the manifest says {size}'
      )
  for file, group in itertools.groupby(manifest.tensors, lambda t: t.file):
    _verify_file(root / file, {tensor.name: tensor for tensor in group})
  return manifest


def _verify_file(
  path: pathlib.Path, tensors: dict[str, records.StoredTensor]
) -> None:
  with (
    path.open('rb') as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
  ):
    start = 8 + int.from_bytes(mapping[:8], 'little')
    try:
      header = json.loads(mapping[8:start])
      header.pop('__metadata__', None)
      found = {
        name: (t['dtype'], tuple(t['shape']), tuple(t['data_offsets']))
        for name, t in header.items()
      }
    except (ValueError, KeyError, TypeError, AttributeError):
      raise WeightsError(f'{path} is not a safetensors file') from None
    _same(path, 'tensors', found.keys(), tensors.keys())
    for name, tensor in tensors.items():
      dtype, shape, (first, last) = found[name]
      if (dtype, shape) != (tensor.dtype, tensor.shape):
        raise WeightsError(
          f'{path}: {name!r} is {dtype} {shape}, the manifest says'
          f' {tensor.dtype} {tensor.shape}'
        )
      with memoryview(mapping)[start + first : start + last] as data:
        checksum = hashlib.sha256(data).hexdigest()[:16]
      if tensor.checksum not in (None, checksum):
        raise WeightsError(
          f'{path}: {name!r} has the checksum {checksum}, the manifest says'
          f' {tensor.checksum}'
        )


def _same(
  path: pathlib.Path, what: str, found: Set[str], wanted: Set[str]
) -> None:
  for verb, names in (('lacks', wanted - found), ('adds', found - wanted)):
    if names:
      raise WeightsError(
        f'{path} {verb} {len(names)} {what}, against the manifest:'
        f' {min(names)!r}'
      )


def _sync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
