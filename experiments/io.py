"""Files that survive: durable writes, locks between processes, sealed JSON."""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import stat
import zlib
from collections.abc import Iterator
from typing import Any

SEAL = "crc"  # the key of a record's checksum


class Busy(Exception):
    """Another process holds a lock."""


class Damaged(ValueError):
    """A file that was altered after it was written, or cut short."""


# ----- Durable writes.


def write_durably(path: pathlib.Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a power cut, finds it whole or not at all.

    Args:
      path: the file; one that is there is replaced.
      content: text is written as UTF-8.

    Raises:
      OSError: it cannot be written. What was there stays.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary file that takes the place of `path` when the context ends well.

    For writers that want a path. The file exists, is empty, and is readable like any
    other new file. After an exception it is removed, and `path` is as it was.

    Args:
      path: the file; one that is there is replaced.
    """
    # Names have a length limit of their own, which `path` may use up.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_writable(folder: pathlib.Path) -> None:
    """Raise if files could not be written below a directory; nothing is written.

    Args:
      folder: need not exist: then its nearest parent that does is looked at.

    Raises:
      OSError: as writing would.
    """
    folder = folder.absolute()
    while True:
        try:
            mode = os.stat(folder).st_mode
            break
        except FileNotFoundError:
            folder = folder.parent
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if _read_only(folder) else errno.EACCES
        raise OSError(number, os.strerror(number), str(folder))


def _read_only(folder: pathlib.Path) -> bool:
    flag = getattr(os, "ST_RDONLY", 0)
    return bool(flag and os.statvfs(folder).f_flag & flag)


def sync_folder(folder: pathlib.Path) -> None:
    """Return when the names in a directory are on the disk, where a system can tell."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # not on every file system
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ----- Locks.


@contextlib.contextmanager
def locked(path: pathlib.Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock that a file stands for, against other processes and threads.

    The operating system holds it: it ends with the process, however that ends.

    Args:
      path: the lock file, made if missing. It stays, empty.
      wait: until the lock is free.

    Raises:
      Busy: somebody else holds it, and `wait` is False.
      OSError: the file cannot be used as a lock.
    """
    import filelock  # only here: the base install has no need of it

    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "its lock is not a regular file", str(path))
    # A lock that is a mere file would outlive a killed process.
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except filelock.Timeout:
        raise Busy(str(path)) from None
    try:
        yield
    finally:
        lock.release()


# ----- Sealed JSON.


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """A record as JSON reads it back, with a checksum of all else in it.

    Examples:
      >>> seal({"step": 3})
      {'crc': 590335763, 'step': 3}
    """
    plain = json.loads(json.dumps(record))
    plain.pop(SEAL, None)
    return {SEAL: _checksum(plain), **plain}


def unseal(record: Any, *, required: bool = False) -> dict[str, Any]:
    """A record without its seal, once that was found to fit.

    Args:
      record: from JSON.
      required: refuse a record without a seal. By default it is taken as it is: an
        earlier version wrote none, and people write such files by hand.

    Raises:
      Damaged: it is no record, or not the one that was sealed.
    """
    if not isinstance(record, dict):
        raise Damaged("it is not a JSON object")
    plain = dict(record)
    if required and SEAL not in plain:
        raise Damaged("it has no checksum")
    if SEAL in plain and plain.pop(SEAL) != _checksum(plain):
        raise Damaged("its checksum does not fit what it holds")
    return plain


def parse_sealed(text: str | bytes, *, required: bool = False) -> dict[str, Any]:
    """The record that a text holds, without its seal.

    Args:
      text: JSON.
      required: as in `unseal`.

    Raises:
      Damaged: it is not JSON, or not what was sealed.
    """
    try:
        record = json.loads(text)
    # Noise may be no UTF-8, or nested deeper than the parser goes.
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from None
    return unseal(record, required=required)


def write_sealed(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Write a record as JSON with a checksum, durably."""
    write_durably(path, json.dumps(seal(record), indent=1) + "\n")


def read_sealed(path: pathlib.Path, *, required: bool = False) -> dict[str, Any]:
    """The record that `write_sealed` wrote, without its seal.

    Args:
      path: the file.
      required: as in `unseal`.

    Raises:
      Damaged: it was altered or cut short.
      OSError: it cannot be read.
    """
    if not path.is_file() and path.exists():
        raise Damaged("it is not a regular file")
    return parse_sealed(path.read_bytes(), required=required)


def _checksum(plain: dict[str, Any]) -> int:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())
