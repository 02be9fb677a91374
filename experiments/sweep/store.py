"""Runs of a sweep on disk, sealed with checksums, so that a killed sweep resumes."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from absl import logging

from .. import io
from ..errors import UserError

Run = tuple[int, tuple[float, ...]]  # (seed, values of the grid point)


class Record(NamedTuple):
    """A finished run.

    Attributes:
      losses: the final loss, then the learning curve; None where it diverged.
      seconds: its share of the wall time, compilation included.
    """

    losses: list[float | None]
    seconds: float = 0.0


class Store:
    """The finished runs in a sweep's folder.

    The runs of a task are lines of `<task>.runs.jsonl`. Every line carries a checksum.
    A damaged line is reported by a warning, moves to `<task>.runs.damaged`, and its run
    is trained again; the other lines are used. Lines without a checksum, which earlier
    versions wrote, count as damaged: nothing tells whether their numbers changed.

    Several processes may write to one store. The lock is the operating system's, and
    ends with the process that holds it.
    """

    def __init__(self, folder: pathlib.Path):
        """Open a store in a folder, which is made when the first run is written."""
        self._folder = folder

    def runs(self, name: str, key: str) -> dict[Run, Record]:
        """The finished runs of a task.

        Args:
          name: of the task.
          key: of the task. Runs with another key are ignored.

        Raises:
          UserError: the file cannot be read.
        """
        path = self._folder / f"{name}.runs.jsonl"
        runs: dict[Run, Record] = {}
        others = 0
        for record in self._records(path):
            if record["key"] != key:
                others += 1
            elif "steps" not in record:  # earlier versions stored unfinished runs
                at = tuple(map(float, record["at"]))
                seconds = float(record.get("seconds", 0.0))
                runs[record["seed"], at] = Record(record["losses"], seconds)
        if others and not runs:
            logging.warning(
                "%s holds %d runs of another program, other data or other settings. "
                "They are kept but not used; new runs are trained.",
                path,
                others,
            )
        return runs

    def add(self, name: str, key: str, runs: dict[Run, Record]) -> None:
        """Write finished runs; they are on the disk when this returns.

        Args:
          name: of the task.
          key: of the task.
          runs: the runs.

        Raises:
          UserError: the folder cannot be written.
        """
        lines = [
            json.dumps(
                io.seal({"key": key, "seed": seed, "at": at, **record._asdict()})
            )
            for (seed, at), record in runs.items()
        ]
        # The first newline ends a line that a killed writer cut short.
        text = "\n" + "\n".join(lines) + "\n"
        path = self._folder / f"{name}.runs.jsonl"
        with _writable(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            with io.locked(_lock(path)), path.open("ab") as file:
                file.write(text.encode())
                _flush(file)

    def _records(self, path: pathlib.Path) -> list[dict[str, Any]]:
        """The undamaged lines of a file; the others are reported and moved away."""
        with _readable(path):
            if not path.exists():
                return []
            if not path.is_file():
                raise io.Damaged("it is not a regular file")
            with io.locked(_lock(path)):
                kept, damaged, records = [], [], []
                for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                    if not line.strip():
                        continue
                    try:
                        records.append(_unsealed(line))
                        kept.append(line)
                    except io.Damaged as error:
                        damaged.append(line)
                        logging.warning(
                            "%s, line %d is damaged (%s). Its run is trained again.",
                            path,
                            number,
                            error,
                        )
                if damaged:
                    with path.with_suffix(".damaged").open("ab") as file:
                        file.write(b"\n".join(damaged) + b"\n")
                        _flush(file)
                    io.write_durably(path, b"".join(line + b"\n" for line in kept))
        return records


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".lock")


def _unsealed(line: bytes) -> dict[str, Any]:
    """The record of one run.

    Raises:
      Damaged: it is cut short, altered, or not the record of a run.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise io.Damaged("it is cut short or not JSON") from None
    if isinstance(record, dict) and io.SEAL not in record:
        raise io.Damaged("it has no checksum")
    record = io.unseal(record)
    if not {"key", "seed", "at", "losses"} <= record.keys():
        raise io.Damaged("it does not describe a run")
    return record


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
            f"{path} cannot be written: {_cause(error)}; the runs that were stored "
            "before are kept, and the same call resumes from them"
        ) from None


def _cause(error: OSError) -> str:
    """The system's reason, and the file that it names."""
    reason = f"{error.strerror or error}"
    return f"{reason} ({error.filename})" if error.filename else reason
