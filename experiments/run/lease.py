"""A lease on a run in object storage: one process at a time works on it.

Object storage has no locks, and no client adds them. The lease is the object
`.mupax/lease/NUMBER`, and the highest number counts. A number is put only if it is
free, so that of two processes that want it one fails. The holder rewrites the object;
its age, by the clock of the server, tells a process at work from one that was killed.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from mupax.zoo.weights import remote

from ..errors import UserError

_OWN, _LEASES = ".mupax/", ".mupax/lease/"


class Lost(Exception):
    """Another process took the run over."""


class Objects:
    """The objects below an address, by relative name."""

    def __init__(self, address: str):
        self.address = address
        self.system, self._root = remote.connect(address)

    def at(self, name: str) -> str:
        """The path of an object in the file system."""
        return f"{self._root}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """The names of the objects that begin with a prefix, sorted."""
        self.system.invalidate_cache()
        start = f"{self._root}/".lstrip("/")
        try:
            found = self.system.find(self.at(prefix).rstrip("/"))
        except FileNotFoundError:
            return []
        return [
            name[len(start) :]
            for name in sorted(path.lstrip("/") for path in found)
            if name.startswith(start)
            and not name.endswith("/")
            and ".." not in name.split("/")  # it would be copied to another directory
        ]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""

        def one(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm_file(self.at(name))

        remote.in_parallel(one, names)


class _Record(NamedTuple):
    """The content of a lease.

    Attributes:
      number: from 1; 0 if no process ever held the run.
      session: the random name of the process.
      who: that process, for messages.
      seconds: age after which the lease of a silent holder has expired.
      held: False after the process has released the run.
    """

    number: int = 0
    session: str = ""
    who: str = ""
    seconds: float = 0.0
    held: bool = False


class Lease:
    """The lease of this process on the run at an address."""

    def __init__(self, objects: Objects):
        self._objects, self._system = objects, objects.system
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._record = _Record(0, secrets.token_hex(8), who, _seconds(), True)
        self._renewed = 0.0

    @property
    def session(self) -> str:
        """The random name of this process."""
        return self._record.session

    @property
    def seconds(self) -> float:
        return self._record.seconds

    def take(self, ended: str) -> None:
        """Hold the run. `ended` is a session that is known to have ended, if any.

        Raises:
          UserError: another process holds the run, or the address has other files.
        """
        before = self._newest()
        if not before.number and (names := self._objects.names()):
            raise UserError(
                f"{self._objects.address} holds files that do not belong to a mupax "
                f"run, e.g. {names[0]}; choose another --workdir, or an empty one"
            )
        probe = f"{_OWN}{self.session}"
        self._system.pipe_file(self._objects.at(probe), b"")
        left = 0.0
        if before.held and before.session != ended:
            now, then = map(self._written, (probe, f"{_LEASES}{before.number}"))
            left = before.seconds - (now - then)
        # Credentials that may not delete would fail later.
        self._objects.delete([probe])
        if left > 0:
            raise UserError(
                f"{self.busy(before.who)}; if it was killed, start this again in "
                f"{left + 1:.0f} seconds"
            )
        self._record = self._record._replace(number=before.number + 1)
        if not self._create():
            raise UserError(self.busy(self._newest().who))
        self._objects.delete([f"{_LEASES}{before.number}"])

    def busy(self, who: str) -> str:
        end = "wait until it ends, or choose another --workdir"
        return f"another process uses {self._objects.address} ({who}); {end}"

    def _written(self, name: str) -> float:
        self._system.invalidate_cache()
        return float(self._system.modified(self._objects.at(name)).timestamp())

    def _newest(self) -> _Record:
        while names := self._objects.names(_LEASES):
            number = max(int(name.rpartition("/")[2]) for name in names)
            with contextlib.suppress(FileNotFoundError):  # removed after a newer one
                text = self._system.cat_file(self._objects.at(f"{_LEASES}{number}"))
                return _Record(*json.loads(text))
        return _Record()

    def _create(self) -> bool:
        """Put the lease if its number is free; returns whether it was."""
        self._renewed = time.time()
        with contextlib.suppress(FileExistsError):
            self._put(mode="create")
        # It may exist because the answer to the client's first attempt was lost.
        return self._newest() == self._record

    def _put(self, mode: str = "overwrite") -> None:
        at = self._objects.at(f"{_LEASES}{self._record.number}")
        self._system.pipe_file(at, json.dumps(self._record).encode(), mode=mode)

    def renew(self, *, held: bool = True) -> None:
        """Rewrite the lease, or release it; raises Lost if another process has it."""
        now = time.time()
        if self._newest().session != self.session:
            raise Lost(
                f"another process took over {self._objects.address}, because this one "
                "gave no sign of life in time"
            )
        self._record = self._record._replace(held=held)
        self._put()
        self._renewed = now

    def check(self) -> None:
        """Raise Lost if another process took over, e.g. while this one was paused."""
        if abs(time.time() - self._renewed) > self.seconds / 2:
            self.renew()


def _seconds() -> float:
    text = os.environ.get("MUPAX_LEASE", "60")
    with contextlib.suppress(ValueError):
        if 1 <= (seconds := float(text)) < 86400:
            return seconds
    raise UserError(f"MUPAX_LEASE={text!r} must be a number of seconds, e.g. 60")
