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
import os
import pathlib
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator

import jax
from absl import logging

from .. import io, remote
from ..errors import Stopped, UserError, reason
from . import collectives, processes
from .contents import (
    Version,
    contents_of,
    files_in,
    folder_of,
    has_later,
    is_newer,
    scanned,
    single_files,
    version_of,
    versions_in,
)
from .object_store import (
    ALIVE,
    COMMITS,
    Commit,
    Contents,
    Lost,
    Objects,
    newest_commit,
    number_of,
    put_commit,
)

_ATTEMPTS = 4


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
    opening = _opened_by_first if shared else _opened
    with opening(address, writes) as place:
        try:
            yield place
        except UserError as error:
            error.args = (str(error).replace(str(place), address),)
            raise


@contextlib.contextmanager
def _opened_by_first(address: str, writes: bool) -> Iterator[pathlib.Path]:
    """As `_opened` in process 0; the others wait for its begin and end.

    Their path is that of process 0 if they have the same cache, e.g. on a shared disk.
    """
    first = jax.process_index() == 0
    try:
        own = contextlib.nullcontext(_place(address, writes))
        with _opened(address, writes) if first else own as place:
            collectives.meet()
            yield place
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
        objects = Objects(address)
        if not writes:
            yield _read(objects, place)
            return
        with _usable(address):
            mirror = _Mirror(objects, place)
        try:
            yield place
        except BaseException as error:
            try:
                mirror.close()
            except UserError as failed:
                if isinstance(error, Stopped):  # which says that all is saved
                    raise failed from None
                logging.warning("%s", failed)
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
    except (UserError, Lost):
        raise
    except Exception as error:
        raise UserError(remote.sentence(address, error, verb)) from None


def _busy(address: str, who: str) -> str:
    return (
        f"another process uses {address} ({who}); wait until it ends, or choose "
        "another --workdir"
    )


# ----- Restoring.


def _read(objects: Objects, place: pathlib.Path) -> pathlib.Path:
    """A local directory with the newest state of a run."""
    with _usable(objects.address):
        for _ in range(_ATTEMPTS):
            commit = newest_commit(objects)
            if not commit.number:  # copied there by other means
                return remote.local(objects.address)
            missing = _restore(objects, commit, place)
            if not missing or newest_commit(objects).number == commit.number:
                break
        _warn(objects, missing)
        return place


def _warn(objects: Objects, missing: Iterable[str]) -> None:
    for path in missing:
        logging.warning(
            "%s/%s is incomplete or altered and is not used.", objects.address, path
        )


def _restore(objects: Objects, commit: Commit, place: pathlib.Path) -> list[str]:
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
        if contents_of(place / path) == contents:
            (place / path).rename(target)
            continue
        with contextlib.suppress(FileNotFoundError):
            names = [f"{path}/{name}" for name in contents]
            remote.in_parallel(objects.get, names, map(building.joinpath, names))
        if contents_of(target) != contents:
            shutil.rmtree(target, ignore_errors=True)
            missing.append(path)

    def fetch_single(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed since
            objects.get(name, building / name)

    remote.in_parallel(fetch_single, single_files(objects))
    shutil.rmtree(place, ignore_errors=True)
    building.rename(place)
    return missing


class _Mirror:
    """Holds a run in object storage, and uploads its local directory."""

    def __init__(self, objects: Objects, place: pathlib.Path):
        self._objects, self._place = objects, place
        self._staging = place.with_name(".staging")
        self._lease = _lease()
        self._session = secrets.token_hex(8)
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._alive = f"{ALIVE}{self._session}"
        self._single: dict[str, Version] = {}  # of what was uploaded
        self._whole: dict[str, dict[str, Version]] = {}
        self._closing, self._released = threading.Event(), threading.Event()
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
        before = newest_commit(objects)
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
        self._heard = time.time()
        self._has_newest = before.session in self._sessions_before()
        try:
            # This machine's copy is locked: a holder that used it is dead.
            if before.held and not self._has_newest:
                self._check_dead(before)
            if self._has_newest:
                # It still has if this process ends before `_begin` does.
                io.write_durably(self._marker, f"{before.session} {self._session}")
            # The next commit says what is complete; this one repeats it.
            self._commit = before
            self._put(whole=before.whole)
        except BaseException as error:
            with contextlib.suppress(Exception):
                objects.delete([self._alive])
            if isinstance(error, Lost):
                who = newest_commit(objects).who
                raise UserError(_busy(objects.address, who)) from None
            raise
        if before.session:
            objects.delete([f"{ALIVE}{before.session}"])
        self._before = before

    def _check_dead(self, holder: Commit) -> None:
        """Raise UserError if the holder gave a sign of life within its lease."""
        now = self._objects.modified(self._alive)
        try:
            heard = self._objects.modified(f"{ALIVE}{holder.session}")
        except FileNotFoundError:
            return
        left = holder.lease - (now - heard)
        if left > 0:
            raise UserError(
                f"{_busy(self._objects.address, holder.who)}; if it was killed, start "
                f"this again in {left + 1:.0f} seconds"
            )

    def _sessions_before(self) -> list[str]:
        """The sessions whose files this machine's copy has; none if it lacks some."""
        with contextlib.suppress(OSError):
            if self._place.is_dir():
                return self._marker.read_text().split()
        return []

    @property
    def _marker(self) -> pathlib.Path:
        return self._place.with_name("session")

    def _put(self, whole: dict[str, Contents], *, held: bool = True) -> None:
        """Write the next commit.

        Raises:
          Lost: another process wrote one.
        """
        number, token = self._commit.number + 1, secrets.token_hex(8)
        commit = Commit(
            number, self._session, self._who, self._lease, held, whole, token
        )
        if not put_commit(self._objects, commit):
            raise Lost
        names = self._objects.names(COMMITS)
        # A number is free again when a later holder has removed its commit.
        if max(map(number_of, names)) > number:
            raise Lost
        self._commit = commit
        self._objects.delete(name for name in names if number_of(name) < number)

    def _check_held(self) -> Commit:
        """The newest commit, which is this process's; raises Lost."""
        number = self._commit.number
        newest = newest_commit(self._objects)
        if newest.number > number and newest.session != self._session:
            raise Lost
        return newest

    def _show_life(self) -> None:
        """Write the sign of life; raises Lost if another process took over."""
        now = time.time()
        self._objects.write(self._alive, b"")
        self._check_held()
        self._heard = now

    def _beat(self) -> None:
        """Show that this process is alive, and end it if another took over."""
        while not self._released.wait(self._lease / 6):
            try:
                self._show_life()
            except Lost:
                self._end()
            except Exception as error:
                address = self._objects.address
                logging.warning("%s cannot be reached (%s).", address, reason(error))

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
        singles = single_files(objects)
        if not (self._has_newest and is_newer(self._place, before.whole, singles)):
            self._marker.unlink(missing_ok=True)
            _warn(objects, _restore(objects, before, self._place))
        _, whole = scanned(self._place)
        for path, folder in whole.items():
            if contents_of(folder) == before.whole.get(path):
                self._whole[path] = versions_in(folder)
        io.write_durably(self._marker, self._session)
        # Left by uploads that were killed.
        known = {f"{p}/{n}" for p, names in before.whole.items() for n in names}
        objects.delete(
            name
            for name in objects.names()
            if folder_of(name) is not None and name not in known
        )

    def _upload(self) -> None:
        failed = False
        while not self._closing.wait(self._lease / 6):
            try:
                self._sync()
                failed = False
            except Lost:
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
        newest = self._check_held()
        if newest.number > self._commit.number:
            self._commit = newest  # the answer to its upload was lost
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            self._sync_staged(held)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _sync_staged(self, held: bool) -> None:
        here, whole_here = scanned(self._place)
        before = self._commit.whole
        # First the directories: no file is then older than the checkpoints.
        whole, new = dict(before), {}
        for path, folder in whole_here.items():
            if not self._is_known(path, folder) and (
                staged := self._stage(path, folder)
            ):
                new[path] = staged
                whole.pop(path, None)
        if any(path in before for path in new):
            # An earlier checkpoint of the same step: it is no longer complete.
            self._put(dict(whole))
        remote.in_parallel(self._put_single, here, here.values())
        for path, versions in new.items():
            whole[path] = contents_of(self._staging / path)
            names = [f"{path}/{name}" for name in whole[path]]
            files = map(self._staging.joinpath, names)
            remote.in_parallel(self._put_file, files, names)
            self._put(dict(whole))
            self._whole[path] = versions
        # What is gone here without a successor was lost, and stays there.
        both = whole_here.keys() & whole.keys()
        dropped = [p for p in before if p not in whole_here and has_later(p, both)]
        for path in dropped:
            del whole[path]
        if whole != self._commit.whole or held != self._commit.held:
            self._put(whole, held=held)
        self._objects.delete(f"{p}/{name}" for p in dropped for name in before[p])
        for path in dropped:
            self._whole.pop(path, None)

    def _is_known(self, path: str, folder: pathlib.Path) -> bool:
        """Whether a directory is uploaded. It may have lost files since."""
        if path not in self._commit.whole or path not in self._whole:
            return False
        with contextlib.suppress(FileNotFoundError):
            return versions_in(folder).items() <= self._whole[path].items()
        return False

    def _stage(self, path: str, folder: pathlib.Path) -> dict[str, Version] | None:
        """Make hard links to the files of a directory; None if it is being removed."""
        try:
            versions = versions_in(folder)
            for name, file in files_in(folder).items():
                target = self._staging / path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file, target)
                except FileNotFoundError:
                    raise
                except OSError:  # a file system without hard links
                    shutil.copyfile(file, target)
            return versions if versions_in(folder) == versions else None
        except FileNotFoundError:
            return None

    def _put_file(self, path: pathlib.Path, name: str) -> None:
        # Another process may have taken over while this one was paused.
        if abs(time.time() - self._heard) > self._lease / 2:
            self._show_life()
        self._objects.put(path, name)

    def _put_single(self, name: str, path: pathlib.Path) -> None:
        # A copy: the file may grow during the upload.
        copy = self._staging / "singles" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            version = version_of(path)
            if version != self._single.get(name):
                shutil.copyfile(path, copy)
                self._put_file(copy, name)
                self._single[name] = version

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
            except Lost:
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
