"""What a run writes down of itself: lines of JSON, TensorBoard events, W&B."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from absl import logging

from .. import io
from ..errors import UserError

NAME = "metrics.jsonl"
ASIDE = "metrics.jsonl.damaged"


class Sink(Protocol):
    """Somewhere that numbers of a step are shown."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Write out what is left."""


class Records:
    """The lines of `metrics.jsonl`: for each logged step one, and one per evaluation.

    Lines stand in the order of their steps, the evaluation of a step after its
    training loss, and each carries a checksum. A run that resumes from a step keeps
    the lines up to it and removes later ones, which it is going to write again: so
    the file of a run that was stopped has the lines of one that was not.

    Args:
      folder: of the run.
      upto: the step that the run resumes from; 0 for a fresh start.
      sinks: shown every line, too.
      writes: False in all processes but the first, which only remember.
      known: lines that a checkpoint remembers; those that the file lacks are restored.
      count: how many lines there were up to that checkpoint, if that is known.

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
        self._sinks = sinks if writes else ()
        self._file: Any = None
        with self._usable():
            log = read_log(folder)
            found = {_place(line): line for line in log.lines if line["step"] <= upto}
            found |= {_place(line): line for line in known if _place(line) not in found}
            self.lines = [found[place] for place in sorted(found)]
            if writes:
                if log.damaged:
                    _keep_aside(folder, log)
                if count is not None and len(self.lines) < count:
                    lost = count - len(self.lines)
                    logging.warning(
                        "%s lacks %d of the %d lines up to step %d; training resumes.",
                        *(self._path, lost, count, upto),
                    )
                text = "".join(map(_sealed, self.lines))
                if not self._path.exists() or self._path.read_bytes() != text.encode():
                    io.write_durably(self._path, text)
                self._file = self._path.open("a")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line; "step" is among its keys.

        Raises:
          UserError: the disk is full, or the file is gone.
        """
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
        """Return when all lines are on the disk, before a checkpoint relies on them.

        Raises:
          UserError: the disk is full, or the file is gone.
        """
        if self._file is None:
            return
        with self._usable():
            os.fsync(self._file.fileno())
            # A deleted file can be written to, and is lost.
            self._path.stat()

    def close(self) -> None:
        """Close file and sinks."""
        closing = [sink.close for sink in self._sinks]
        if self._file is not None:
            closing.append(self._file.close)
        for close in closing:
            # What a full disk refuses was said when it was refused first.
            with contextlib.suppress(OSError):
                close()

    def curve(self) -> list[tuple[int, float]]:
        """(step, training loss) of every logged step."""
        return [(r["step"], r["loss"]) for r in self.lines if "loss" in r]

    def evals(self) -> list[tuple[int, float, float]]:
        """(step, test loss, test accuracy) of every evaluation."""
        return [
            (r["step"], r["test_loss"], r["test_accuracy"])
            for r in self.lines
            if "test_loss" in r
        ]

    def recent(self, steps: int) -> list[dict[str, Any]]:
        """The lines of the last steps, and the last line of each kind before."""
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
                f"{self._path} cannot be used ({error.strerror or error}); make room "
                "or put it back, and run the same command again. The last checkpoint "
                "stays."
            ) from None


def _place(line: dict[str, Any]) -> tuple[int, bool]:
    """Where a line stands: by step, the evaluation last."""
    return line["step"], "test_loss" in line


def _sealed(line: dict[str, Any]) -> str:
    return json.dumps(io.seal(line)) + "\n"


class Log(NamedTuple):
    """What `metrics.jsonl` holds.

    Attributes:
      lines: those that are as they were written.
      damaged: the others, by their number from 1. A last line without an end, as a
        killed run leaves, is not among them.
    """

    lines: list[dict[str, Any]]
    damaged: dict[int, bytes]


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's records that are as they were written.

    Raises:
      OSError: the file is there and cannot be read.
    """
    return read_log(folder).lines


def read_log(folder: pathlib.Path) -> Log:
    """The lines of a run's records, and those that were altered since.

    Raises:
      OSError: the file is there and cannot be read.
    """
    path = folder / NAME
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = path.read_bytes()
    except FileNotFoundError:
        return Log([], {})
    # Earlier versions wrote no checksums; where there are some, each line has one.
    is_sealed = f'"{io.SEAL}"'.encode() in content
    texts = content.split(b"\n")
    found: list[dict[str, Any]] = []
    damaged = {}
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = io.parse_sealed(text)
            whole = isinstance(line.get("step"), int) and _is_line(line)
            if not whole or (is_sealed and not text.startswith(_START)):
                raise io.Damaged("it is no line of a log")
        except io.Damaged:
            if number < len(texts):  # the last has no end: its writer was killed
                damaged[number] = text
        else:
            found.append(line)
    return Log(found, damaged)


_START = f'{{"{io.SEAL}": '.encode()


def _is_line(line: dict[str, Any]) -> bool:
    """Whether it has what the curves are made of."""
    keys = ("test_loss", "test_accuracy") if "test_loss" in line else ("loss",)
    return all(isinstance(line.get(key), int | float) for key in keys)


def _keep_aside(folder: pathlib.Path, log: Log) -> None:
    """Name the damaged lines, and keep them in a file of their own."""
    aside = folder / ASIDE
    numbers = ", ".join(map(str, log.damaged))
    logging.warning(
        "%s: line %s is damaged and is not used; it is kept in %s.",
        *(folder / NAME, numbers, ASIDE),
    )
    before = aside.read_bytes() if aside.exists() else b""
    io.write_durably(aside, before + b"".join(t + b"\n" for t in log.damaged.values()))


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: pathlib.Path):
        # Only here: the base install trains without it.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=30)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One scalar a value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases.

    Args:
      project: its name.
      folder: where it writes, and by whose name the run is continued.
      settings: shown beside it.

    Raises:
      UserError: it does not start.
    """

    def __init__(self, project: str, folder: pathlib.Path, settings: dict[str, Any]):
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                name=folder.name,
                config=settings,
                resume="allow",
            )
        except Exception as error:  # of its own, without a common ancestor
            raise UserError(f"Weights & Biases does not start: {error}") from None

    def write(self, step: int, values: dict[str, float]) -> None:
        """One chart a value."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
