"""Runs on disk: each finished one durably, so that a killed sweep goes on."""

import fcntl
import json
import os
import pathlib

from ..io import write_durably
from .results import Population

Run = tuple[int, tuple[float, ...]]  # a seed, and a point of the grid


class Store:
    """The runs of one run directory.

    A job's finished runs are lines of `<job>.runs.jsonl`, each on the disk before the
    next chunk is begun; a job that has all of them is a file `<job>.json` beside it.
    Several processes may write to one store.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def get(self, name: str, key: str) -> Population | None:
        """What a job found, or None where it has not been finished.

        Args:
          name: of the job.
          key: tells what decides the result; what was put under another is left out.
        """
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        if found.pop("key", None) != key:
            return None
        return Population.from_json(found)

    def put(self, name: str, key: str, population: Population) -> None:
        """Keep what a job found, in place of what was there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": key, **population.to_json()})
        write_durably(self._folder / f"{name}.json", text)

    def runs(
        self, name: str, key: str, stopped: int | None = None
    ) -> dict[Run, list[float | None]]:
        """The learning curves of a job's finished runs.

        Args:
          name: of the job.
          key: tells what decides the result; runs under another one are left out.
          stopped: in place of the finished runs those that were kept after so many
            steps.
        """
        path = self._folder / f"{name}.runs.jsonl"
        found = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # written as the power went
            if record["key"] == key and record.get("steps") == stopped:
                at = tuple(map(float, record["at"]))
                found[record["seed"], at] = record["losses"]
        return found

    def add(
        self,
        name: str,
        key: str,
        runs: dict[Run, list[float | None]],
        stopped: int | None = None,
    ) -> None:
        """Keep runs; they are on the disk when this returns.

        Args:
          name: of the job.
          key: as in `runs`.
          runs: learning curves.
          stopped: after how many steps; None for finished runs.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        so_far = {} if stopped is None else {"steps": stopped}
        lines = [
            json.dumps({"key": key, "seed": seed, "at": at, "losses": losses} | so_far)
            for (seed, at), losses in runs.items()
        ]
        # The first newline ends what a killed writer may have left.
        text = "\n" + "\n".join(lines) + "\n"
        with (self._folder / f"{name}.runs.jsonl").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
