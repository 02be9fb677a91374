"""Run directories in object storage: a lease, and an upload of what changed.

A run works in a local directory (`opened`), and a thread uploads its files. A file is
replaced by one put, so that a reader sees the old content or the new. Of a directory
that appears at once on a disk (a checkpoint or a model), the file that readers look for
is uploaded last: without it, the directory is torn, and is not used. Orbax 0.12.8
writes to gs:// itself, and refuses s3:// ("Checkpoint path should be absolute").
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from absl import logging

from mupax.zoo import addresses
from mupax.zoo.weights import remote

from .. import io
from ..errors import Stopped, UserError, reason
from . import collectives, processes
from .lease import Lease, Lost, Objects

_ATTEMPTS = 4
# Directories that appear by a rename, and do not change afterwards.
_WHOLE = re.compile(r"(?:.*/)?(?:checkpoints/\d+|model)(?=/)")


@contextlib.contextmanager
def opened(
    folder: str, *, writes: bool = True, shared: bool = False
) -> Iterator[pathlib.Path]:
    """The local directory of a run, which may be in object storage.

    In object storage, the run is held until the context ends. What the context writes
    is uploaded every few seconds and at the end. Messages name the address.

    Args:
      folder: the run directory, or its address.
      writes: False only reads the newest state, and does not hold the run.
      shared: the other processes of this run (`processes.joined`) call this, too. Only
        process 0 has the directory.

    Raises:
      UserError: another process holds the run, or the address cannot be used.
    """
    if not remote.is_remote(folder):
        yield pathlib.Path(folder)
        return
    if writes:
        remote.check_scheme(folder)
    address, first = remote.normalized(folder), not shared or jax.process_index() == 0
    key = hashlib.sha256(f"{address} {writes} {first}".encode()).hexdigest()[:24]
    place = remote.cache() / "runs" / key / (address.rpartition("/")[2] or "run")
    run = _opened(address, place, writes) if first else contextlib.nullcontext()
    with addresses.copied(address, str(place)), _waiting(), run:
        collectives.meet()
        yield place


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Wait at the end for process 0, which uploads."""
    try:
        yield
    except Stopped:
        collectives.meet()
        raise
    collectives.meet()


@contextlib.contextmanager
def _opened(address: str, place: pathlib.Path, writes: bool) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            run = _Run(address, place)
            try:
                held.enter_context(io.locked(place.parent / "lock", wait=not writes))
            except io.Busy:
                raise UserError(run.lease.busy("on this machine")) from None
            run.begin(writes)
        except (UserError, remote.RemoteError):
            raise
        except Exception as error:  # of the network, the credentials or the client
            raise UserError(remote.sentence(address, error, "used")) from None
        if writes:
            held.enter_context(run.uploading())
        yield


def is_copy(folder: pathlib.Path) -> bool:
    """Whether a directory is the local one of a run in object storage."""
    return remote.is_remote(addresses.named(str(folder)))


class _Run:
    """A run in object storage, and its local directory."""

    def __init__(self, address: str, place: pathlib.Path):
        self._address, self._place = address, place
        self._objects = Objects(address)
        self.lease = Lease(self._objects)
        self._files: dict[str, tuple[int, ...]] = {}  # versions that are uploaded
        self._folders: set[str] = set()  # directories that are uploaded
        self._uploading, self._done = threading.Lock(), threading.Event()

    def begin(self, writes: bool) -> None:
        """Hold the run, or only look; then copy its newest state here."""
        if not writes:
            self._download()
            return
        last = self._place.with_name("session")  # the last holder on this machine
        # The local directory is locked: the process that used it has ended.
        self.lease.take(ended=last.read_text() if last.exists() else "")
        io.write_durably(last, self.lease.session)
        try:
            torn = self._download()
            self._objects.delete(torn)
        except BaseException:
            self._release()
            raise
        names = _names(self._place)
        self._folders = {_folder(name) for name in names} - {""}
        self._files = {name: _version(self._place / name) for name in names}

    def _download(self) -> set[str]:
        """Copy all files; returns those of torn directories, which stay there."""
        for _ in range(_ATTEMPTS):
            shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(parents=True)
            there = set(self._objects.names())
            torn = {n for n in there if _folder(n) and _last(_folder(n)) not in there}
            names = [name for name in there - torn if _is_uploaded(name)]
            remote.in_parallel(self._get, names)
            lost = {
                _folder(name) for name in names if not (self._place / name).exists()
            }
            if not lost - {""}:
                break
        for folder in lost - {""}:  # the run removed it meanwhile
            shutil.rmtree(self._place / folder, ignore_errors=True)
        return torn

    def _get(self, name: str) -> None:
        path = self._place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._objects.system.get_file(self._objects.at(name), str(path))

    def upload(self) -> None:
        """Upload what changed."""
        with self._uploading:
            self.lease.check()
            names = _names(self._place)
            here = {_folder(name) for name in names} - {""}
            # First the files that grow: no checkpoint is newer than the records.
            remote.in_parallel(self._put, (n for n in names if not _folder(n)))
            for folder in sorted(here - self._folders):
                self._put_folder(folder)
            for folder in self._folders - here:
                # If its neighbours are missing too, all were lost here, and stay there.
                if any(_parent(folder) == _parent(other) for other in here):
                    self._remove(folder)

    def _put(self, name: str) -> None:
        path = self._place / name
        with contextlib.suppress(FileNotFoundError):
            version = _version(path)
            if version != self._files.get(name):
                self.lease.check()
                # Read at once, as it may grow.
                data = path.read_bytes()
                self._objects.system.pipe_file(self._objects.at(name), data)
                self._files[name] = version

    def _put_folder(self, folder: str) -> None:
        """Upload a directory, unless it is removed here meanwhile."""

        def put(name: str) -> None:
            self.lease.check()
            with contextlib.suppress(FileNotFoundError):
                path = str(self._place / name)
                self._objects.system.put_file(path, self._objects.at(name))

        names = _names(self._place, folder)
        remote.in_parallel(put, {*names} - {_last(folder)})
        if names != _names(self._place, folder):
            self._remove(folder)
            return
        put(_last(folder))
        self._folders.add(folder)

    def _remove(self, folder: str) -> None:
        self.lease.check()
        self._objects.delete([_last(folder)])
        self._objects.delete(self._objects.names(f"{folder}/"))
        self._folders.discard(folder)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Upload what changes and renew the lease; then upload the rest and release."""
        threads = [
            threading.Thread(target=self._repeat, args=[do], daemon=True)
            for do in (self.lease.renew, self.upload)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException as error:
            try:
                self._upload_rest()
            except UserError as failed:
                if isinstance(error, Stopped):  # which says that all is saved
                    raise failed from None
                logging.warning("%s", failed)
            raise
        else:
            self._upload_rest()
            print(f"all files are in {self._address}", file=sys.stderr, flush=True)
        finally:
            self._done.set()
            for thread in threads:
                thread.join()
            self._release()

    def _repeat(self, do: Callable[[], None]) -> None:
        failed = False
        while not self._done.wait(self.lease.seconds / 6):
            try:
                do()
                failed = False
            except Lost as lost:
                processes.end(str(lost))
            except Exception as error:
                if not failed and do == self.upload:
                    logging.warning(
                        "%s cannot be written (%s). The run continues, and the upload "
                        "is retried.",
                        self._address,
                        reason(error),
                    )
                failed = True

    def _upload_rest(self) -> None:
        try:
            self.upload()
        except Exception as error:
            raise UserError(
                f"{self._address} could not be written ({reason(error)}); run the same "
                "command again to resume from the last checkpoint there"
            ) from None

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            self.lease.renew(held=False)


def _version(path: pathlib.Path) -> tuple[int, ...]:
    """Changes when a file is replaced or written to."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _names(place: pathlib.Path, folder: str = "") -> list[str]:
    """The files of a directory that are uploaded. It may change meanwhile."""
    names = []
    for parent, _, files in os.walk(place / folder):
        paths = (pathlib.Path(parent, file) for file in files)
        names += [p.relative_to(place).as_posix() for p in paths if not p.is_symlink()]
    return sorted(filter(_is_uploaded, names))


def _is_uploaded(name: str) -> bool:
    """Whether a file is no lock, and neither temporary nor hidden."""
    parts = (_folder(name) or name).split("/")
    return not any(
        part.startswith(".") or part.endswith(".lock") or ".orbax-checkpoint" in part
        for part in parts
    )


def _folder(name: str) -> str:
    """The directory of a file that appears at once; "" if there is none.

    Examples:
      >>> _folder("target/checkpoints/9/state/d"), _folder("metrics.jsonl")
      ('target/checkpoints/9', '')
    """
    found = _WHOLE.match(name)
    return found[0] if found else ""


def _last(folder: str) -> str:
    """The file of a directory that is uploaded last."""
    is_model = folder.rpartition("/")[2] == "model"
    return f"{folder}/{'config.json' if is_model else '_CHECKPOINT_METADATA'}"


def _parent(folder: str) -> str:
    return folder.rpartition("/")[0]
