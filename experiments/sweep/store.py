"""Runs of a sweep on disk, sealed with checksums, so that a killed sweep resumes."""

import json
import os
import pathlib
from typing import Any, NamedTuple

from absl import logging

from mupax.zoo.weights.files import is_finite

from .. import io
from ..errors import UserError

Run = tuple[int, tuple[float, ...]]  # (seed, values of the grid point)


class Record(NamedTuple):
    """A finished run."""

    losses: list[float | None]  # the final loss, then the curve; None: diverged
    seconds: float = 0.0  # its share of the wall time, compilation included


class Store:
    """The finished runs in a sweep's folder.

    The runs of a task are lines of `<task>.runs.jsonl`. Every line carries a checksum.
    A damaged line is reported by a warning, moves to `<task>.runs.damaged`, and its run
    is trained again; the other lines are used.

    Several processes may write to one store. The operating system releases the lock of
    a process that ends.
    """

    def __init__(self, folder: pathlib.Path):
        """Open a store in a folder, which is made when the first run is written."""
        self._folder = folder

    def runs(self, name: str, key: str) -> dict[Run, Record]:
        """The finished runs of a task; runs with another key are ignored.

        Raises:
          UserError: the file cannot be read.
        """
        path = self._path(name)
        runs: dict[Run, Record] = {}
        others = 0
        for record in _read(path)[0]:
            if record["key"] != key:
                others += 1
            else:
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
        """Write finished runs of a task, as `append` does."""
        lines = [
            json.dumps(
                io.seal({"key": key, "seed": seed, "at": at, **record._asdict()})
            )
            for (seed, at), record in runs.items()
        ]
        self.append(name, ("\n".join(lines) + "\n").encode())

    def content(self, name: str) -> bytes:
        """The undamaged lines of a task's file, for a store on another disk."""
        return _read(self._path(name))[1]

    def append(self, name: str, content: bytes) -> None:
        """Write lines of a task; they are on the disk when this returns.

        Raises:
          UserError: the folder cannot be written.
        """
        path = self._path(name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with io.locked(path.with_suffix(".lock")):
                # The newline ends a line that a killed writer cut short.
                _append(path, b"\n" + content)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {_cause(error)}; the runs that were stored "
                "before are kept, and the same call resumes from them"
            ) from None

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.runs.jsonl"


def _read(path: pathlib.Path) -> tuple[list[dict[str, Any]], bytes]:
    """The records of the undamaged lines of a file, and these lines."""
    try:
        if not path.exists():
            return [], b""
        if not path.is_file():
            raise UserError(
                f"{path} cannot be read: it is not a regular file; remove it"
            )
        with io.locked(path.with_suffix(".lock")):
            kept, damaged, records = [], [], []
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                if not line.strip():
                    continue
                try:
                    records.append(_parse(line))
                    kept.append(line + b"\n")
                except io.Damaged as error:
                    damaged.append(line + b"\n")
                    logging.warning(
                        "%s, line %d is damaged (%s). Its run is trained again.",
                        path,
                        number,
                        error,
                    )
            if damaged:
                _append(path.with_suffix(".damaged"), b"".join(damaged))
                io.write_durably(path, b"".join(kept))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {_cause(error)}; make it readable, or remove it, "
            "and its runs are trained again"
        ) from None
    return records, b"".join(kept)


def _parse(line: bytes) -> dict[str, Any]:
    record = io.parse_sealed(line, required=True)
    at, losses, seed = (record.get(key) for key in ("at", "losses", "seed"))
    fits = isinstance(at, list) and isinstance(losses, list) and type(seed) is int
    if fits and isinstance(record.get("key"), str):
        known = [loss for loss in losses if loss is not None]
        numbers = [record.get("seconds", 0.0), *at, *known]
        # Losses may be infinite.
        if all(isinstance(n, float) or is_finite(n) for n in numbers):
            return record
    raise io.Damaged("it does not describe a run")


def _append(path: pathlib.Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _cause(error: OSError) -> str:
    """The system's reason, and the file that it names."""
    reason = f"{error.strerror or error}"
    return f"{reason} ({error.filename})" if error.filename else reason
