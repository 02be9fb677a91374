"""The objects of a run in object storage, and its commits."""

import contextlib
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import io, remote
from ..errors import UserError

OWN = ".mupax/"  # the prefix of our objects
COMMITS = f"{OWN}commits/"
ALIVE = f"{OWN}alive/"
_DIGITS = 9  # of a commit's number

Contents = dict[str, list[Any]]  # size and SHA-256 by relative path


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
    whole: dict[str, Contents] = {}  # noqa: RUF012
    token: str = ""


class Lost(Exception):
    """Another process took the run over."""


class Objects:
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
        self._system.put_file(str(path), f"{self._root}/{name}")

    def get(self, name: str, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(f"{self._root}/{name}", str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""

        def one(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._root}/{name}")

        remote.in_parallel(one, names)


def number_of(name: str) -> int:
    digits = name.removeprefix(COMMITS)
    return int(digits) if digits.isdecimal() else 0


def newest_commit(objects: Objects) -> Commit:
    """The newest commit; one of number 0 if there is none."""
    while True:
        number = max(map(number_of, objects.names(COMMITS)), default=0)
        if not number:
            return Commit()
        try:
            record = io.parse_sealed(objects.read(commit_name(number)), required=True)
        except FileNotFoundError:  # removed after a newer one
            continue
        except io.Damaged as error:
            raise UserError(
                f"{objects.address}/{commit_name(number)} is damaged ({error}); "
                "remove it to use the commit before it"
            ) from None
        return Commit(number, **record)


def commit_name(number: int) -> str:
    return f"{COMMITS}{number:0{_DIGITS}}"


def put_commit(objects: Objects, commit: Commit) -> bool:
    """Write a commit; returns False if another process was faster."""
    record = commit._asdict()
    number = record.pop("number")
    data = json.dumps(io.seal(record)).encode()
    return objects.create(commit_name(number), data)
