"""Measured numbers as CSV: a figure is drawn from them without measuring again.

A table has no words: titles, sentences and verdicts are made of its numbers.
"""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mupax.experiments.errors import UserError
from mupax.experiments.io import csv_text, write_durably

Row = dict[str, Any]  # of floats, and names of networks


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Rows of a table, by the names of their columns.

    Examples:
      >>> rates = Numbers([{"depth": 2, "rate": 0.3}, {"depth": 4, "rate": 0.1}])
      >>> rates["rate"], rates.where(depth=4)["rate"]
      (array([0.3, 0.1]), array([0.1]))
    """

    rows: Sequence[Row]

    def where(self, **values: float | str) -> "Numbers":
        """The rows with these values."""
        return Numbers(
            [r for r in self.rows if all(r.get(k) == v for k, v in values.items())]
        )

    def finite(self, column: str) -> "Numbers":
        """The rows whose value is not infinite; the others are those of a limit."""
        return Numbers([r for r in self.rows if np.isfinite(float(r[column]))])

    def having(self, column: str) -> "Numbers":
        """The rows that have a value in a column."""
        return Numbers([row for row in self.rows if column in row])

    def distinct(self, column: str) -> list[int]:
        """The whole numbers in a column, small to large."""
        return sorted({int(value) for value in self.having(column)[column]})

    def __getitem__(self, column: str) -> np.ndarray:
        return np.array([float(row[column]) for row in self.rows])


def write(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Write a table, with seven digits of each number."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns.sort(key=lambda name: name == "standard_error")  # last
    body = [[_text(row.get(name, "")) for name in columns] for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, csv_text([columns, *body]))


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.7g}"


def read(path: pathlib.Path) -> Numbers:
    """A table. Rows lack the columns in which they are empty.

    Raises:
      UserError: there is no such file.
    """
    try:
        body = path.read_text()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); leave --from_data out to "
            "compute the figure"
        ) from None
    rows = csv.DictReader(io.StringIO(body))
    return Numbers([{k: _value(v) for k, v in row.items() if v} for row in rows])


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
