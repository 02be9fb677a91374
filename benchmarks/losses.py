"""Tables of losses: what a measurement appends to, and its page is made from."""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import Transfer


@dataclasses.dataclass(frozen=True)
class Table:
    """A CSV file with a line for each value of a hyperparameter, at each place.

    Attributes:
      path: of the file.
      place: names of the columns that say what trained.
      value: name of the column of the hyperparameter, as log2.
    """

    path: pathlib.Path
    place: tuple[str, ...]
    value: str

    def at(self, *place: object) -> dict[float, np.ndarray]:
        """{log2 of the value: the losses of all seeds}, rising; NaN: diverged."""
        if not self.path.exists():
            return {}
        with self.path.open() as file:
            found = {
                float(row[self.value]): np.array(row["losses"].split(), float)
                for row in csv.DictReader(file)
                if [row[name] for name in self.place] == [str(x) for x in place]
            }
        return dict(sorted(found.items()))

    def add(
        self, *place: object, losses: Mapping[float, Sequence[float] | np.ndarray]
    ) -> None:
        """Append the losses of values of the hyperparameter, and say so."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow([*self.place, self.value, "losses"])
            for value, seeds in losses.items():
                written = " ".join(f"{float(loss):.5g}" for loss in seeds)
                writer.writerow([*place, f"{value:g}", written])
        print(*place, len(losses), "values", flush=True)

    def cell(
        self,
        *place: object,
        width: int,
        depth: int,
        values: Sequence[float] | None = None,
        axis: str = "learning_rate",
    ) -> Cell | None:
        """The runs of a place, for the verdict; None if one of `values` is missing."""
        found = self.at(*place)
        kept = sorted(found if values is None else values)
        if not kept or not found.keys() >= set(kept):
            return None
        loss = np.stack([found[value] for value in kept], axis=1)
        curves = loss[..., None]
        return Cell("", width, depth, np.array(kept), loss, curves, 0.0, axis)


def shift(judged: Transfer) -> str:
    """The octaves a doubling by which the optimum moves, with the 90 % interval."""
    low, high = judged.trend.interval
    return f"{judged.trend.slope:+.2f} ({low:+.2f} to {high:+.2f})"


def cost(judged: Transfer) -> str:
    """The share of the loss that the base's best value costs at the largest size."""
    return "unknown" if judged.regret is None else judged.regret.words


def optima(judged: Transfer) -> list[str]:
    """The best value at each size."""
    return ["none" if best is None else f"2^{best:.2f}" for best in judged.optima]


def best(cell: Cell) -> int:
    """The grid point of least mean loss at which no seed diverged."""
    return int(np.nan_to_num(cell.loss.mean(axis=0), nan=np.inf).argmin())


def mean(cell: Cell, point: int) -> str:
    """The mean over seeds at a grid point, and its standard error."""
    loss = cell.loss[:, point]
    return f"{loss.mean():.3f} ± {loss.std(ddof=1) / math.sqrt(len(loss)):.3f}"
