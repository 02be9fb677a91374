"""The records of a run: metrics.jsonl. Trackers receive the same metrics."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from mupax.zoo.weights.files import read_bytes

from .. import io
from ..errors import UserError, reason
from .trackers import Tracker

NAME = "metrics.jsonl"


class Records:
    """The lines of `metrics.jsonl`: one per logged step and one per evaluation.

    Lines are in the order of their steps, training before evaluation. A run that
    resumes from a step removes the lines of later steps, so that its file becomes the
    same as that of an uninterrupted run.

    Args:
      folder: the run directory.
      upto: step that the run resumes from; 0 for a fresh start.
      trackers: receive every line too.
      known: the lines that another process has read. No file is written.

    Raises:
      UserError: the file cannot be read or written.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        upto: int,
        trackers: tuple[Tracker, ...] = (),
        known: Sequence[dict[str, Any]] | None = None,
    ):
        self._path = folder / NAME
        self._trackers = trackers
        self._file: Any = None
        if known is not None:
            self.lines = list(known)
            return
        with self._usable():
            self.lines = [line for line in read(folder) if line["step"] <= upto]
            text = "".join(map(_text, self.lines))
            if not self._path.exists() or self._path.read_bytes() != text.encode():
                io.write_durably(self._path, text)
            self._file = self._path.open("a")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, which has a key "step"."""
        self.lines.append(line)
        if self._file is None:
            return
        with self._usable():
            self._file.write(_text(line))
            self._file.flush()
        numbers = {k: v for k, v in line.items() if isinstance(v, float)}
        for tracker in self._trackers:
            tracker.write(line["step"], numbers)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        if self._file is None:
            return
        with self._usable():
            os.fsync(self._file.fileno())
            # Writing to a deleted file succeeds; stat does not.
            self._path.stat()

    def close(self) -> None:
        closing = [tracker.close for tracker in self._trackers]
        if self._file is not None:
            closing.append(self._file.close)
        for close in closing:
            # A full disk has already raised an error in `add` or `sync`.
            with contextlib.suppress(OSError):
                close()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be used ({reason(error)}); free some "
                "space or restore the file, and run the same command again. The last "
                "checkpoint is kept."
            ) from None


def curve_of(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, training loss) of every logged step."""
    return [(x["step"], x["loss"]) for x in lines if "loss" in x]


def evals_of(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, test loss, test accuracy) of every evaluation."""
    return [
        (x["step"], x["test_loss"], x["test_accuracy"])
        for x in lines
        if "test_loss" in x
    ]


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's records; a damaged line is left out, with a warning.

    An incomplete last line, which a killed run leaves, is left out too.
    """
    path = folder / NAME
    try:
        texts = read_bytes(path, io.LARGEST).split(b"\n")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    lines: dict[tuple[int, bool], dict[str, Any]] = {}
    for number, text in enumerate(texts, 1):
        try:
            if text:
                line = _parse(text)
                lines[line["step"], "test_loss" in line] = line
        except io.Damaged as error:
            if number < len(texts):
                logging.warning(
                    "%s: line %d is damaged (%s) and is not used.", path, number, error
                )
    return [lines[place] for place in sorted(lines)]


def _parse(text: bytes) -> dict[str, Any]:
    """A line that has the keys of the curves; raises Damaged."""
    line = io.parse(text)
    keys = ("test_loss", "test_accuracy") if "test_loss" in line else ("loss",)
    numbers = all(isinstance(line.get(key), int | float) for key in keys)
    if not (numbers and isinstance(line.get("step"), int)):
        raise io.Damaged("it is not a line of a log")
    return line
