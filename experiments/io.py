"""Durable writes, locks between processes, and JSON."""

import contextlib
import csv
import errno
import io
import json
import os
import pathlib
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mupax.zoo.addresses import public
from mupax.zoo.weights.files import read_bytes

APPEARS_WITHIN = 10.0  # seconds
LARGEST = 2**30  # bytes of a file of records


class Busy(Exception):
    """Another process holds a lock."""


class Damaged(ValueError):
    """A file holds no such record, e.g. because it was truncated."""


# ----- Durable writes.


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as the text of a CSV file; None becomes an empty field.

    Addresses lose user, password and query.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(public, rows))
    return out.getvalue()


def write_durably(path: pathlib.Path, content: str | bytes) -> None:
    """Write a file so that a reader sees all of it or none, even after a power cut.

    An existing file is replaced; after an error it is unchanged. Text is written as
    UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary file that replaces `path` at the end of the context.

    For writers that need a path. The file exists, is empty, and has the usual
    permissions. After an exception it is removed, and `path` is unchanged.
    """
    # Shortened, because the length of file names is limited.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a full disk names none
        raise
    sync_folder(path.parent)


def appears(path: pathlib.Path, within: float | None = None) -> bool:
    """Wait until a file exists; False if it does not exist after `within` seconds.

    For files of other machines, which network file systems show with a delay. By
    default it waits for `APPEARS_WITHIN`.
    """
    until = time.monotonic() + (APPEARS_WITHIN if within is None else within)
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def check_writable(folder: pathlib.Path) -> None:
    """Check that files can be written in a directory, by one without a name.

    If the directory does not exist, its nearest existing parent is checked.

    Raises:
      OSError: as a write would.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        error.filename = str(place)  # it names a temporary file
        raise


def sync_folder(folder: pathlib.Path) -> None:
    """Wait until the names in a directory are on the disk."""
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
    """Hold a lock against other processes and threads.

    The operating system releases the lock when the process ends.

    Args:
      path: of the lock file, an empty file that is created and stays.
      wait: wait until the lock is free.

    Raises:
      Busy: the lock is held elsewhere, and `wait` is False.
      OSError: the file cannot be used as a lock.
    """
    import filelock  # the base install lacks it

    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "its lock is not a regular file", str(path))
    # A soft lock (the file itself) would outlive a killed process.
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except filelock.Timeout:
        raise Busy(str(path)) from None
    try:
        yield
    finally:
        lock.release()


# ----- JSON.


def parse(text: str | bytes) -> dict[str, Any]:
    """A JSON object; raises `Damaged` for any other text."""
    try:
        record = json.loads(text)
    # Damaged text may be invalid UTF-8, or nested too deeply.
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Damaged("it is not a JSON object")
    return record


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, durably. Addresses lose user, password and query."""
    write_durably(path, json.dumps(public(record), indent=1) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
      Damaged: it is none, e.g. a part of one.
      OSError: the file cannot be read.
    """
    try:
        text = read_bytes(path, LARGEST)
    except ValueError as error:
        raise Damaged(str(error)) from None
    return parse(text)
