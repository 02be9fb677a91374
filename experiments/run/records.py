"""What a run writes down of itself: lines of JSON, TensorBoard events, W&B."""

import contextlib
import json
import os
import pathlib
from typing import Any, Protocol

from absl import logging

from ..errors import UserError

NAME = "metrics.jsonl"


class Sink(Protocol):
    """Somewhere that numbers of a step are shown."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Write out what is left."""


class Records:
    """The lines of `metrics.jsonl`, one for each logged step or evaluation.

    The file is the run's memory: a run that goes on from a step takes the lines up to
    it as its own, and drops later ones, which it is going to write again.

    Args:
      folder: of the run.
      upto: the step that the run goes on from; 0 for a fresh start.
      sinks: shown every line, too.
      writes: False in all processes but the first, which only remember.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        upto: int,
        sinks: tuple[Sink, ...] = (),
        writes: bool = True,
    ):
        self._path = folder / NAME
        self._sinks = sinks if writes else ()
        self.lines = [line for line in read(folder) if line["step"] <= upto]
        self._file = None
        if writes:
            if len(self.lines) < len(read(folder)) or not self._path.exists():
                temporary = self._path.with_suffix(".tmp")
                text = "".join(json.dumps(line) + "\n" for line in self.lines)
                temporary.write_text(text)
                temporary.replace(self._path)
            self._file = self._path.open("a")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line; "step" is among its keys."""
        self.lines.append(line)
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written ({error.strerror}); make room, and "
                "start the same command again. The last checkpoint stays."
            ) from None
        numbers = {k: v for k, v in line.items() if isinstance(v, float)}
        for sink in self._sinks:
            sink.write(line["step"], numbers)

    def sync(self) -> None:
        """Return when all lines are on the disk, before a checkpoint relies on them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

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


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of a run's records; a line cut short by a kill ends them."""
    found: list[dict[str, Any]] = []
    path = folder / NAME
    if not path.exists():
        return found
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
            line["step"]
        except (ValueError, KeyError, TypeError):
            logging.warning("%s: the lines after %d are cut short.", path, len(found))
            break
        found.append(line)
    return found


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
