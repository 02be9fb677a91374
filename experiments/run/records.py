"""The records of a run: metrics.jsonl. Trackers receive the same metrics."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from absl import logging

from .. import io
from ..errors import UserError, reason

NAME = "metrics.jsonl"
ASIDE = "metrics.jsonl.damaged"


class Sink(Protocol):
    """Receives the metrics of each logged step."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Records:
    """The lines of `metrics.jsonl`: one per logged step and one per evaluation.

    Lines are in the order of their steps, training before evaluation, and each has a
    checksum. A run that resumes from a step removes the lines of later steps, so that
    its file becomes the same as that of an uninterrupted run.

    Args:
      folder: the run directory.
      upto: step that the run resumes from; 0 for a fresh start.
      sinks: receive every line too.
      writes: False to use the lines of `known` alone, and no file.
      known: lines in the checkpoint. Those that the file lacks are restored.
      count: number of lines up to the checkpoint, if known.

    Raises:
      UserError: the file cannot be read or written.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        upto: int,
        sinks: tuple[Sink, ...] = (),
        writes: bool = True,
        known: Sequence[dict[str, Any]] = (),
        count: int | None = None,
    ):
        self._path = folder / NAME
        self._sinks = sinks
        self._file: Any = None
        if not writes:
            self.lines = list(known)
            return
        with self._usable():
            undamaged, damaged = _read(folder)
            lines = {_place(line): line for line in undamaged if line["step"] <= upto}
            lines = {_place(line): line for line in known} | lines
            self.lines = [lines[place] for place in sorted(lines)]
            if damaged:
                _keep_aside(folder, damaged)
            if count is not None and len(self.lines) < count:
                lost = count - len(self.lines)
                logging.warning(
                    "%s lacks %d of the %d lines up to step %d; training resumes.",
                    self._path,
                    lost,
                    count,
                    upto,
                )
            text = "".join(map(_sealed, self.lines))
            if not self._path.exists() or self._path.read_bytes() != text.encode():
                io.write_durably(self._path, text)
            self._file = self._path.open("a")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, which has a key "step"."""
        self.lines.append(line)
        if self._file is None:
            return
        with self._usable():
            self._file.write(_sealed(line))
            self._file.flush()
        numbers = {k: v for k, v in line.items() if isinstance(v, float)}
        for sink in self._sinks:
            sink.write(line["step"], numbers)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        if self._file is None:
            return
        with self._usable():
            os.fsync(self._file.fileno())
            # Writing to a deleted file succeeds; stat does not.
            self._path.stat()

    def close(self) -> None:
        closing = [sink.close for sink in self._sinks]
        if self._file is not None:
            closing.append(self._file.close)
        for close in closing:
            # A full disk has already raised an error in `add` or `sync`.
            with contextlib.suppress(OSError):
                close()

    def recent(self, steps: int) -> list[dict[str, Any]]:
        """The lines of the last `steps` steps, and the last line of each kind."""
        last = self.lines[-1]["step"] if self.lines else 0
        kept = {_place(r): r for r in self.lines if r["step"] > last - steps}
        for kind in (False, True):
            newest = [r for r in self.lines if ("test_loss" in r) is kind][-1:]
            kept |= {_place(r): r for r in newest}
        return [kept[place] for place in sorted(kept)]

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


def _sealed(line: dict[str, Any]) -> str:
    return json.dumps(io.seal(line)) + "\n"


def _place(line: dict[str, Any]) -> tuple[int, bool]:
    """Sort key of a line: by step, evaluations last."""
    return line["step"], "test_loss" in line


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The undamaged lines of a run's records."""
    return _read(folder)[0]


def _read(folder: pathlib.Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """The undamaged lines, and the damaged lines by line number from 1.

    An incomplete last line, which a killed run leaves, is in neither.
    """
    path = folder / NAME
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = path.read_bytes()
    except FileNotFoundError:
        return [], {}
    texts = content.split(b"\n")
    lines: list[dict[str, Any]] = []
    damaged = {}
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = io.parse_sealed(text, required=True)
            if not _is_line(line):
                raise io.Damaged("it is not a line of a log")
        except io.Damaged:
            if number < len(texts):  # an incomplete last line: the writer was killed
                damaged[number] = text
        else:
            lines.append(line)
    return lines, damaged


def _is_line(line: dict[str, Any]) -> bool:
    """Whether a line has the keys of the curves."""
    keys = ("test_loss", "test_accuracy") if "test_loss" in line else ("loss",)
    numbers = all(isinstance(line.get(key), int | float) for key in keys)
    return numbers and isinstance(line.get("step"), int)


def _keep_aside(folder: pathlib.Path, damaged: dict[int, bytes]) -> None:
    """Warn of damaged lines, and move them to a file of their own."""
    aside = folder / ASIDE
    numbers = ", ".join(map(str, damaged))
    logging.warning(
        "%s: line %s is damaged and is not used; it is kept in %s.",
        folder / NAME,
        numbers,
        ASIDE,
    )
    before = aside.read_bytes() if aside.exists() else b""
    io.write_durably(aside, before + b"".join(t + b"\n" for t in damaged.values()))
