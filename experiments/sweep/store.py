"""Runs of a sweep on disk, so that a killed sweep resumes."""

import json
import os
import pathlib
from typing import NamedTuple

from absl import logging

from mupax.zoo.weights.files import read_bytes

from .. import io
from ..errors import UserError, reason

Run = tuple[int, tuple[float, ...]]  # (seed, values of the grid point)


class Record(NamedTuple):
    """A finished run."""

    losses: list[float | None]  # the final loss, then the curve; None: diverged
    seconds: float = 0.0  # its share of the wall time, compilation included
    guess: float | None = None  # chance-level loss, where it is known


class Store:
    """The finished runs in a sweep's folder.

    The runs of a task are lines of `<task>.runs.jsonl`. A damaged line, e.g. one that
    a kill cut short, is reported by a warning, and its run is trained again.

    Several processes may write to one store: each write appends whole lines.
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
        others, damaged = 0, []
        for number, line in enumerate(_lines(path), 1):
            try:
                record = io.parse(line)
                run = record.pop("seed"), tuple(map(float, record.pop("at")))
                if record.pop("key") == key:
                    runs[run] = Record(**record)
                else:
                    others += 1
            except (ValueError, LookupError, TypeError) as error:
                damaged.append(f"line {number}: {reason(error)}")
        if damaged:
            logging.warning(
                "%s has damaged lines, which are ignored (%s). A run without a whole "
                "line is trained again.",
                path,
                "; ".join(damaged),
            )
        if others and not runs:
            logging.warning(
                "%s holds %d runs of another program, other data or other settings. "
                "They are kept but not used; new runs are trained.",
                path,
                others,
            )
        return runs

    def add(self, name: str, key: str, runs: dict[Run, Record]) -> None:
        """Write finished runs of a task; they are on the disk when this returns.

        Raises:
          UserError: the folder cannot be written.
        """
        lines = [
            json.dumps({"key": key, "seed": seed, "at": at, **record._asdict()})
            for (seed, at), record in runs.items()
        ]
        path = self._path(name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                # The newline ends a line that a killed writer cut short.
                file.write(("\n" + "\n".join(lines) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {reason(error)}; the runs that were stored "
                "before are kept, and the same call resumes from them"
            ) from None

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.runs.jsonl"


def _lines(path: pathlib.Path) -> list[bytes]:
    """The lines of a file that are not empty, without one that is being written."""
    try:
        lines = read_bytes(path, io.LARGEST).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {reason(error)}; make it readable, or remove it, "
            "and its runs are trained again"
        ) from None
    return [line for line in lines if line.strip() and line.endswith(b"\n")]
