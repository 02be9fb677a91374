"""Run directories in object storage: a local copy, uploaded during the run.

Object storage has no locks, renames or appends. A run therefore works in a local
directory (`opened`), and a thread uploads what changed. Below the address are

- the files of the run directory, under their own names. A file is replaced by one put,
  so that a reader sees the old content or the new.
- `.mupax/commits/<number>`. The highest number counts. It says who holds the run, and
  which directories are complete: those that appear at once on a disk, by a rename
  (checkpoints and models), with size and SHA-256 of each file. Others are not read.
  A commit is put only if its number is free, so that of two processes that
  want the same number one fails. This is the lock.
- `.mupax/alive/<session>`, which the holder rewrites. Its age, by the clock of the
  server, tells a process at work from one that was killed.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from absl import logging

from .. import io, remote
from ..errors import Stopped, UserError, reason
from . import processes

_OWN = ".mupax/"  # the prefix of our objects
_COMMITS = f"{_OWN}commits/"
_ALIVE = f"{_OWN}alive/"
_DIGITS = 9  # of a commit's number
_ATTEMPTS = 4
# Directories that appear by a rename, and do not change afterwards.
_WHOLE = re.compile(r"(.*/)?(checkpoints/\d+|model)")
# Locks, temporary files of io.replacing, zoo.save and Orbax, and unreadable
# checkpoints.
_SKIPPED = re.compile(
    r".*\.lock|\..*\.[0-9a-f]{12}|\.saving-.*|.*\.orbax-checkpoint-tmp.*|unreadable"
)

_Contents = dict[str, list[Any]]  # size and SHA-256 by relative path


class Commit(NamedTuple):
    """The state of a run in object storage.

    Attributes:
      number: from 1; 0 before the first commit.
      session: the random name of the process that wrote it.
      who: that process, for messages.
      lease: seconds after which a silent holder counts as killed.
      held: whether that process still holds the run.
      whole: the contents of each complete directory.
      token: random.
    """

    number: int = 0
    session: str = ""
    who: str = ""
    lease: float = 0.0
    held: bool = False
    whole: dict[str, _Contents] = {}  # noqa: RUF012
    token: str = ""


class _Lost(Exception):
    """Another process took the run over."""


@contextlib.contextmanager
def opened(
    folder: str, *, writes: bool = True, shared: bool = False
) -> Iterator[pathlib.Path]:
    """The local directory of a run, which may be in object storage.

    In object storage, the run is held until the context ends. What the context writes
    is uploaded every few seconds and at the end.

    Args:
      folder: the run directory, or its address.
      writes: False only reads the newest state, and does not hold the run.
      shared: the other processes of this run (`processes.joined`) call this, too. Only
        process 0 has the directory, unless they share it.

    Raises:
      UserError: another process holds the run, or the address cannot be used.
    """
    if not remote.is_remote(folder):
        yield pathlib.Path(folder)
        return
    address = remote.normalized(folder)
    with contextlib.ExitStack() as held:
        if shared:
            place = held.enter_context(_opened_by_first(address, writes))
        else:
            place = held.enter_context(_opened(address, writes))
        try:
            yield place
        except UserError as error:
            error.args = (str(error).replace(str(place), address),)
            raise


@contextlib.contextmanager
def _opened_by_first(address: str, writes: bool) -> Iterator[pathlib.Path]:
    """As `_opened` in process 0; the others get its path, and wait for its end."""
    import jax

    from . import collectives

    first = jax.process_index() == 0
    try:
        with _opened(address, writes) if first else contextlib.nullcontext() as place:
            yield pathlib.Path(collectives.told(str(place)))
    except Stopped:
        collectives.meet()
        raise
    collectives.meet()


@contextlib.contextmanager
def _opened(address: str, writes: bool) -> Iterator[pathlib.Path]:
    place = _place(address, writes)
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(io.locked(place.parent / "lock", wait=not writes))
        except io.Busy:
            raise UserError(_busy(address, "on this machine")) from None
        objects = _Objects(address)
        if not writes:
            yield _read(objects, place)
            return
        with _usable(address):
            mirror = _Mirror(objects, place)
        try:
            yield place
        except BaseException:
            with contextlib.suppress(UserError):
                mirror.close()
            raise
        mirror.close()
        print(f"all files are in {address}", file=sys.stderr, flush=True)


def _place(address: str, writes: bool) -> pathlib.Path:
    """The local directory of an address. Readers use one of their own."""
    key = hashlib.sha256(address.encode()).hexdigest()[:24]
    name = address.rpartition("/")[2] or "run"
    return remote.cache() / "runs" / (key if writes else f"{key}-read") / name


@contextlib.contextmanager
def _usable(address: str, verb: str = "used") -> Iterator[None]:
    """Turn errors of the network, the credentials and the client into a UserError."""
    try:
        yield
    except (UserError, _Lost):
        raise
    except Exception as error:
        raise UserError(remote.sentence(address, error, verb)) from None


def _busy(address: str, who: str) -> str:
    return (
        f"another process uses {address} ({who}); wait until it ends, or choose "
        "another --workdir"
    )


# ----- Objects.


class _Objects:
    """The objects below an address, by relative name."""

    def __init__(self, address: str):
        self.address = address
        self._system, self._root = remote.connect(address)

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin with a prefix, sorted."""
        self._system.invalidate_cache()
        below = f"{self._root}/{prefix}".rstrip("/")
        start = f"{self._root}/"
        try:
            paths = self._system.find(below)
        except FileNotFoundError:
            return []
        names = (name.removeprefix("/" * (not start.startswith("/"))) for name in paths)
        inside = [name[len(start) :] for name in names if name.startswith(start)]
        return sorted(name for name in inside if name and not name.endswith("/"))

    def read(self, name: str) -> bytes:
        """The content of an object."""
        return self._system.cat_file(f"{self._root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        """Replace an object."""
        self._system.pipe_file(f"{self._root}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none; returns whether it was written."""
        try:
            self._system.pipe_file(f"{self._root}/{name}", data, mode="create")
        except Exception as error:  # the name is taken, or the answer was lost
            try:
                return self.read(name) == data
            except FileNotFoundError:
                if isinstance(error, FileExistsError):  # removed since
                    return False
                raise error from None
        return True

    def modified(self, name: str) -> float:
        """When an object was written, in seconds on the server's clock."""
        self._system.invalidate_cache()
        return self._system.modified(f"{self._root}/{name}").timestamp()

    def put(self, path: pathlib.Path, name: str) -> None:
        """Upload a file."""
        self._system.put_file(str(path), f"{self._root}/{name}")

    def get(self, name: str, path: pathlib.Path) -> None:
        """Download a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(f"{self._root}/{name}", str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""

        def one(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._root}/{name}")

        remote.in_parallel(one, names)


def _number(name: str) -> int:
    digits = name.removeprefix(_COMMITS)
    return int(digits) if digits.isdecimal() else 0


def _newest(objects: _Objects) -> Commit:
    """The newest commit; one of number 0 if there is none."""
    while True:
        number = max(map(_number, objects.names(_COMMITS)), default=0)
        if not number:
            return Commit()
        try:
            record = io.parse_sealed(objects.read(_commit_name(number)), required=True)
        except FileNotFoundError:  # removed after a newer one
            continue
        except io.Damaged as error:
            raise UserError(
                f"{objects.address}/{_commit_name(number)} is damaged ({error}); "
                "remove it to use the commit before it"
            ) from None
        return Commit(number, **record)


def _commit_name(number: int) -> str:
    return f"{_COMMITS}{number:0{_DIGITS}}"


def _try(objects: _Objects, commit: Commit) -> bool:
    """Write a commit; returns False if another process was faster."""
    record = commit._asdict()
    number = record.pop("number")
    data = json.dumps(io.seal(record)).encode()
    return objects.create(_commit_name(number), data)


# ----- Restoring.


def _read(objects: _Objects, place: pathlib.Path) -> pathlib.Path:
    """A local directory with the newest state of a run."""
    with _usable(objects.address):
        for _ in range(_ATTEMPTS):
            commit = _newest(objects)
            if not commit.number:  # copied there by other means
                return remote.local(objects.address)
            missing = _restore(objects, commit, place)
            if not missing or _newest(objects).number == commit.number:
                break
        _warn(objects, missing)
        return place


def _warn(objects: _Objects, missing: Iterable[str]) -> None:
    for path in missing:
        logging.warning(
            "%s/%s is incomplete or altered and is not used.", objects.address, path
        )


def _singles(objects: _Objects) -> list[str]:
    """The files of a run that are replaced one by one."""
    return [
        name
        for name in objects.names()
        if not name.startswith(_OWN)
        and _top(name) is None
        and ".." not in name.split("/")
    ]


def _top(name: str) -> str | None:
    """The directory of a file that appears at once, if any."""
    parts = name.split("/")
    for count in range(1, len(parts)):
        if _WHOLE.fullmatch(path := "/".join(parts[:count])):
            return path
    return None


def _restore(objects: _Objects, commit: Commit, place: pathlib.Path) -> list[str]:
    """Make a local directory equal to a state; returns the directories that it lacks.

    It is built beside the present one, from which complete directories are taken.
    """
    building = place.with_name(".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    missing = []
    for path, contents in commit.whole.items():
        target = building / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if _contents(place / path) == contents:
            (place / path).rename(target)
            continue
        with contextlib.suppress(FileNotFoundError):
            names = [f"{path}/{name}" for name in contents]
            remote.in_parallel(objects.get, names, [building / n for n in names])
        if _contents(target) != contents:
            shutil.rmtree(target, ignore_errors=True)
            missing.append(path)

    def fetch_single(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed since
            objects.get(name, building / name)

    remote.in_parallel(fetch_single, _singles(objects))
    shutil.rmtree(place, ignore_errors=True)
    building.rename(place)
    return missing


def _is_newer(
    place: pathlib.Path, whole: dict[str, _Contents], singles: Iterable[str]
) -> bool:
    """Whether a local directory lacks nothing but checkpoints before its newest."""
    if not all((place / name).is_file() for name in singles):
        return False
    for path, contents in whole.items():
        step = (place / path).name
        beside = (p.name for p in (place / path).parent.glob("*") if p.is_dir())
        later = step.isdecimal() and any(
            name.isdecimal() and int(name) > int(step) for name in beside
        )
        if not later and _contents(place / path) != contents:
            return False
    return True


def _contents(folder: pathlib.Path) -> _Contents:
    """Size and checksum of each file; empty if there is no such directory."""
    out = {}
    for name, path in _files(folder).items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        out[name] = [path.stat().st_size, digest]
    return out


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files in a directory, by relative path. It may change meanwhile."""
    paths = [pathlib.Path(root, f) for root, _, files in os.walk(folder) for f in files]
    return {p.relative_to(folder).as_posix(): p for p in sorted(paths)}


# ----- Uploading.

_Signature = tuple[Any, ...]


def _signature(paths: Iterable[pathlib.Path]) -> _Signature:
    """Changes when a file is replaced or written to."""
    stats = [path.stat() for path in paths]
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)


class _Scan(NamedTuple):
    """The files to upload one by one, and the directories that appear at once."""

    singles: dict[str, pathlib.Path]
    whole: dict[str, pathlib.Path]


def _scan(folder: pathlib.Path) -> _Scan:
    singles, whole = {}, {}
    for name, path in _files(folder).items():
        top = _top(name)
        if any(map(_SKIPPED.fullmatch, (top or name).split("/"))):
            continue
        if top is not None:
            whole[top] = folder / top
        elif not path.is_symlink():
            singles[name] = path
    return _Scan(singles, whole)


class _Mirror:
    """Holds a run in object storage, and uploads its local directory."""

    def __init__(self, objects: _Objects, place: pathlib.Path):
        self._objects, self._place = objects, place
        self._staging = place.with_name(".staging")
        self._lease = _lease()
        self._session = secrets.token_hex(8)
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._alive = f"{_ALIVE}{self._session}"
        self._single: dict[str, _Signature] = {}  # of what was uploaded
        self._whole: dict[str, _Signature] = {}
        self._closing, self._released = threading.Event(), threading.Event()
        self._syncing = threading.Lock()
        self._hold()
        beats = threading.Thread(target=self._beat, daemon=True)
        beats.start()
        self._threads = [beats]
        try:
            self._begin()
        except BaseException:
            self._release()
            raise
        self._threads.append(threading.Thread(target=self._upload, daemon=True))
        self._threads[-1].start()

    # ----- The lock.

    def _hold(self) -> None:
        """Take the run; raise UserError if another process holds it."""
        objects = self._objects
        before = _newest(objects)
        if not before.number and (names := objects.names()):
            raise UserError(
                f"{objects.address} holds files that do not belong to a mupax run, "
                f"e.g. {names[0]}; choose another --workdir, or an empty one"
            )
        with _usable(objects.address, "written"):
            objects.write(self._alive, b"")
            # Credentials that may not delete would fail later.
            objects.delete([self._alive])
            objects.write(self._alive, b"")
        try:
            # This machine's copy is locked: a holder that used it is dead.
            if before.held and before.session != self._session_before():
                self._check_dead(before)
            # The next commit says what is complete; this one repeats it.
            self._commit = before
            self._put(whole=before.whole)
        except BaseException as error:
            with contextlib.suppress(Exception):
                objects.delete([self._alive])
            if isinstance(error, _Lost):
                who = _newest(objects).who
                raise UserError(_busy(objects.address, who)) from None
            raise
        if before.session:
            objects.delete([f"{_ALIVE}{before.session}"])
        self._before = before

    def _check_dead(self, holder: Commit) -> None:
        """Raise UserError if the holder gave a sign of life within its lease."""
        now = self._objects.modified(self._alive)
        try:
            heard = self._objects.modified(f"{_ALIVE}{holder.session}")
        except FileNotFoundError:
            return
        left = holder.lease - (now - heard)
        if left > 0:
            raise UserError(
                f"{_busy(self._objects.address, holder.who)}; if it was killed, start "
                f"this again in {left + 1:.0f} seconds"
            )

    def _session_before(self) -> str:
        """The session of this machine's copy; empty if the copy is incomplete."""
        with contextlib.suppress(OSError):
            if self._place.is_dir():
                return self._marker.read_text()
        return ""

    @property
    def _marker(self) -> pathlib.Path:
        return self._place.with_name("session")

    def _put(self, whole: dict[str, _Contents], *, held: bool = True) -> None:
        """Write the next commit.

        Raises:
          _Lost: another process wrote one.
        """
        commit = Commit(
            self._commit.number + 1,
            self._session,
            self._who,
            self._lease,
            held,
            whole,
            secrets.token_hex(8),
        )
        if not _try(self._objects, commit):
            raise _Lost
        names = self._objects.names(_COMMITS)
        # A number is free again when a later holder has removed its commit.
        if max(map(_number, names)) > commit.number:
            raise _Lost
        self._commit = commit
        self._objects.delete(n for n in names if _number(n) < commit.number)

    def _check_held(self) -> None:
        number = self._commit.number
        newest = _newest(self._objects)
        if newest.number > number and newest.session != self._session:
            raise _Lost

    def _beat(self) -> None:
        """Show that this process is alive, and end it if another took over."""
        while not self._released.wait(self._lease / 6):
            try:
                self._objects.write(self._alive, b"")
                self._check_held()
            except _Lost:
                self._end()
            except Exception as error:
                logging.warning(
                    "%s cannot be reached (%s).",
                    self._objects.address,
                    reason(error),
                )

    def _end(self) -> None:
        if not self._closing.is_set():
            processes.end(
                f"another process took over {self._objects.address}, because this one "
                "gave no sign of life in time"
            )

    # ----- The contents.

    def _begin(self) -> None:
        """Restore the newest state of the run to the local directory."""
        objects, before = self._objects, self._before
        singles = _singles(objects)
        if not (
            before.session
            and before.session == self._session_before()
            and _is_newer(self._place, before.whole, singles)
        ):
            self._marker.unlink(missing_ok=True)
            _warn(objects, _restore(objects, before, self._place))
        for path, folder in _scan(self._place).whole.items():
            if _contents(folder) == before.whole.get(path):
                self._whole[path] = self._signature_of(folder)
        self._single = dict.fromkeys(singles, ())
        io.write_durably(self._marker, self._session)
        # Left by uploads that were killed.
        known = {f"{p}/{n}" for p, names in before.whole.items() for n in names}
        objects.delete(
            name
            for name in objects.names()
            if _top(name) is not None and name not in known
        )

    @staticmethod
    def _signature_of(folder: pathlib.Path) -> _Signature:
        files = _files(folder)
        return (tuple(files), *_signature(files.values()))

    def _upload(self) -> None:
        failed = False
        while not self._closing.wait(self._lease / 6):
            try:
                self._sync()
                failed = False
            except _Lost:
                self._end()
            except Exception as error:
                if not failed:
                    logging.warning(
                        "%s cannot be written (%s). The run continues, and the upload "
                        "is retried.",
                        self._objects.address,
                        reason(error),
                    )
                failed = True

    def _sync(self, *, held: bool = True) -> None:
        """Upload what changed, and commit it."""
        with self._syncing:
            self._check_held()
            shutil.rmtree(self._staging, ignore_errors=True)
            try:
                self._sync_staged(held)
            finally:
                shutil.rmtree(self._staging, ignore_errors=True)

    def _sync_staged(self, held: bool) -> None:
        objects = self._objects
        scan = _scan(self._place)
        before = self._commit.whole
        # First the directories: no file is then older than the checkpoints.
        whole = {p: c for p, c in before.items() if p in scan.whole}
        new = {}
        for path, folder in scan.whole.items():
            if self._is_known(path, folder):
                continue
            if (signature := self._stage(path, folder)) is not None:
                new[path] = signature
                whole.pop(path, None)
        if any(path in before for path in new):
            # An earlier checkpoint of the same step: it is no longer complete.
            self._put(dict(whole))
        self._put_singles(scan.singles)
        for path, signature in new.items():
            whole[path] = self._put_whole(path)
            self._put(dict(whole))
            self._whole[path] = signature
        dropped = before.keys() - whole.keys()
        if whole != self._commit.whole or held != self._commit.held:
            self._put(whole, held=held)
        objects.delete(f"{path}/{name}" for path in dropped for name in before[path])
        for path in dropped:
            self._whole.pop(path, None)

    def _is_known(self, path: str, folder: pathlib.Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return path in self._commit.whole and self._whole.get(
                path
            ) == self._signature_of(folder)
        return False

    def _stage(self, path: str, folder: pathlib.Path) -> _Signature | None:
        """Hard links to the files of a directory; None if it is being removed."""
        try:
            signature = self._signature_of(folder)
            for name, file in _files(folder).items():
                target = self._staging / path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file, target)
                except FileNotFoundError:
                    raise
                except OSError:  # a file system without hard links
                    shutil.copyfile(file, target)
            if self._signature_of(folder) != signature or len(signature) == 1:
                return None
        except FileNotFoundError:
            return None
        return signature

    def _put_whole(self, path: str) -> _Contents:
        """Upload a staged directory."""
        contents = _contents(self._staging / path)
        names = [f"{path}/{name}" for name in contents]
        files = [self._staging / name for name in names]
        remote.in_parallel(self._objects.put, files, names)
        return contents

    def _put_singles(self, singles: dict[str, pathlib.Path]) -> None:
        def put(name: str) -> None:
            # A copy: the file may grow during the upload.
            copy = self._staging / "singles" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                signature = _signature([singles[name]])
                if signature != self._single.get(name):
                    shutil.copyfile(singles[name], copy)
                    self._objects.put(copy, name)
                    self._single[name] = signature

        remote.in_parallel(put, singles)
        gone = self._single.keys() - singles.keys()
        self._objects.delete(gone)
        for name in gone:
            del self._single[name]

    def close(self) -> None:
        """Upload the rest, and release the run.

        Raises:
          UserError: it could not be uploaded.
        """
        self._closing.set()
        for thread in self._threads[1:]:
            thread.join()
        try:
            self._sync_last()
        finally:
            self._released.set()
            self._threads[0].join()
        with contextlib.suppress(Exception):
            self._objects.delete([self._alive])

    def _sync_last(self) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._sync(held=False)
                return
            except _Lost:
                raise UserError(
                    f"another process took over {self._objects.address}, because this "
                    f"one gave no sign of life in time; its files are in {self._place}"
                ) from None
            except Exception as error:
                if attempt == _ATTEMPTS - 1:
                    raise UserError(
                        f"{self._objects.address} could not be written "
                        f"({reason(error)}); the missing files are in "
                        f"{self._place}: run the same command on this machine to "
                        "upload them"
                    ) from None
                time.sleep(2**attempt)

    def _release(self) -> None:
        """Release the run as it was."""
        self._closing.set()
        self._released.set()
        with contextlib.suppress(Exception):
            self._put(self._commit.whole, held=False)
            self._objects.delete([self._alive])


def _lease() -> float:
    text = os.environ.get("MUPAX_LEASE", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 86400:
        raise UserError(f"MUPAX_LEASE={text!r} must be a number of seconds, e.g. 60")
    return seconds
