"""Runs of a sweep on disk, sealed with checksums, so that a killed sweep resumes."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from absl import logging

from .. import io
from ..errors import UserError
from ..io import write_durably as write_durably
from .results import Population

Run = tuple[int, tuple[float, ...]]  # (seed, values of the grid point)
Losses = list[float | None]


class Store:
    """The runs of one sweep's folder.

    The finished runs of a job are lines of `<job>.runs.jsonl`, each on the disk before
    the next chunk starts. `<job>.json` holds all runs of a job that is complete. Every
    line and every file carries a checksum. A damaged line or file is reported by a
    warning and its runs are trained again; the other lines are used. Damaged lines move
    to `<job>.runs.damaged`. Records without a checksum, as an earlier version
    wrote them, count as damaged: nothing tells whether their numbers changed.

    Several processes may write to one store. The lock is the operating system's, and
    ends with the process that holds it.
    """

    def __init__(
        self, folder: pathlib.Path, on_add: Callable[[int], None] | None = None
    ):
        """Open a store.

        Args:
          folder: its folder, made when the first run is written.
          on_add: called with the number of runs after each write.
        """
        self._folder = folder
        self._on_add = on_add or (lambda count: None)

    def get(self, name: str, key: str) -> Population | None:
        """The population of a complete job; None where there is none.

        Args:
          name: of the job.
          key: describes what decides the result. Results under another key are
            ignored.

        Raises:
          UserError: the file cannot be read.
        """
        path = self._folder / f"{name}.json"
        with _readable(path):
            if not path.exists():
                return None
            try:
                record = _unsealed(_content(path))
                if record.pop("key") != key or record["name"] != name:
                    return None
                return Population.from_json(record)
            except (io.Damaged, KeyError, TypeError, ValueError) as error:
                logging.warning(
                    "%s is damaged (%s). It is written again from the stored runs.",
                    path,
                    _reason(error),
                )
        return None

    def put(self, name: str, key: str, population: Population) -> None:
        """Write the population of a complete job, in place of an older one.

        Raises:
          UserError: the folder cannot be written.
        """
        record = {"key": key, **population.to_json()}
        path = self._folder / f"{name}.json"
        with _writable(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(io.seal(record)))

    def runs(
        self, name: str, key: str, stopped: int | None = None
    ) -> dict[Run, Losses]:
        """The learning curves of a job's finished runs.

        Args:
          name: of the job.
          key: describes what decides the result. Runs under another key are ignored.
          stopped: return the runs that were stopped after this number of steps,
            instead of the finished ones.

        Raises:
          UserError: the file cannot be read.
        """
        path = self._folder / f"{name}.runs.jsonl"
        found, others = {}, 0
        for record in self._records(path):
            if record["key"] != key:
                others += 1
            elif record.get("steps") == stopped:
                at = tuple(map(float, record["at"]))
                found[record["seed"], at] = record["losses"]
        if others and not found and stopped is None:
            logging.warning(
                "%s holds %d runs of another program, other data or other settings. "
                "They are kept and not used; this job trains its own.",
                path,
                others,
            )
        return found

    def add(
        self,
        name: str,
        key: str,
        runs: dict[Run, Losses],
        stopped: int | None = None,
    ) -> None:
        """Write runs; they are on the disk when this returns.

        Args:
          name: of the job.
          key: as in `runs`.
          runs: learning curves.
          stopped: the number of steps of runs that were stopped; None for finished
            runs.

        Raises:
          UserError: the folder cannot be written.
        """
        so_far = {} if stopped is None else {"steps": stopped}
        lines = [
            json.dumps(
                io.seal({"key": key, "seed": seed, "at": at, "losses": losses} | so_far)
            )
            for (seed, at), losses in runs.items()
        ]
        # The first newline ends a line that a killed writer cut short.
        text = "\n" + "\n".join(lines) + "\n"
        path = self._folder / f"{name}.runs.jsonl"
        with _writable(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            with io.locked(_lock(path)), path.open("ab") as file:
                file.write(text.encode())
                _flush(file)
        self._on_add(len(runs))

    def _records(self, path: pathlib.Path) -> list[dict[str, Any]]:
        """The undamaged lines of a file; the others are reported and moved away."""
        with _readable(path):
            if not path.exists():
                return []
            with io.locked(_lock(path)):
                kept, damaged, records = [], [], []
                for number, line in enumerate(_content(path).split(b"\n"), 1):
                    if not line.strip():
                        continue
                    try:
                        records.append(_run(line))
                        kept.append(line)
                    except io.Damaged as error:
                        damaged.append(line)
                        logging.warning(
                            "%s, line %d is damaged (%s). Its run is trained again.",
                            path,
                            number,
                            _reason(error),
                        )
                if damaged:
                    self._move(path, kept, damaged)
        return records

    def _move(
        self, path: pathlib.Path, kept: list[bytes], damaged: list[bytes]
    ) -> None:
        """Take damaged lines out of a file, and keep them in another."""
        with path.with_suffix(".damaged").open("ab") as file:
            file.write(b"\n".join(damaged) + b"\n")
            _flush(file)
        write_durably(path, b"".join(line + b"\n" for line in kept))


class Nowhere(Store):
    """A store that keeps nothing, and only reports how many runs ended."""

    def __init__(self, on_add: Callable[[int], None] | None = None):
        super().__init__(pathlib.Path(), on_add)

    def get(self, name: str, key: str) -> None:
        """None."""

    def put(self, name: str, key: str, population: Population) -> None:
        """Nothing."""

    def runs(
        self, name: str, key: str, stopped: int | None = None
    ) -> dict[Run, Losses]:
        """Empty."""
        return {}

    def add(
        self, name: str, key: str, runs: dict[Run, Losses], stopped: int | None = None
    ) -> None:
        """Report the number of runs."""
        self._on_add(len(runs))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".lock")


def _content(path: pathlib.Path) -> bytes:
    if not path.is_file():
        raise io.Damaged("it is not a regular file")
    return path.read_bytes()


def _run(line: bytes) -> dict[str, Any]:
    """The record of one run.

    Raises:
      Damaged: it is cut short, altered, or not the record of a run.
    """
    record = _unsealed(line)
    if not {"key", "seed", "at", "losses"} <= record.keys():
        raise io.Damaged("it does not describe a run")
    return record


def _unsealed(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise io.Damaged("it is cut short or not JSON") from None
    if isinstance(record, dict) and io.SEAL not in record:
        raise io.Damaged("it has no checksum")
    return io.unseal(record)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, io.Damaged) else "it lacks what it must hold"


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except io.Damaged as error:
        raise UserError(f"{path} cannot be read: {error}; remove it") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {_cause(error)}; make it readable, or remove it, "
            "and its runs are trained again"
        ) from None


@contextlib.contextmanager
def _writable(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {_cause(error)}; what was finished before is "
            "kept, and the same call resumes from it"
        ) from None


def _cause(error: OSError) -> str:
    """What the system says, with the file that it says it of."""
    return f"{error.strerror or error}" + (
        f" ({error.filename})" if error.filename else ""
    )
