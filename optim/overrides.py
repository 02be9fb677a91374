"""Options of `infer_scales` that override the inference for single parameters."""

import dataclasses
from collections.abc import Iterable, Mapping

from .axes import Axes, Split, check_axes
from .patterns import UNSET, Pattern


@dataclasses.dataclass
class Overrides:
    """Regular expressions by which the user decides the role of parameters.

    Attributes: as the arguments of the same names of `infer_scales`.
    """

    axes: Mapping[str, Axes] | None
    copies: str | None
    embeddings: str | None
    tied: str | None
    readout: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.axes, Mapping | None):
            raise ValueError(
                f"axes={self.axes!r} must be {{regular expression: (fan-in axes, "
                "fan-out axes)}, e.g. axes={'head': ((0,), (1,))}"
            )
        self._axes = [(Pattern("axes", k), v) for k, v in (self.axes or {}).items()]
        self._copies = Pattern("copies", self.copies)
        self._tables = Pattern("embeddings", self.embeddings)
        tied = None if self.tied is UNSET else self.tied
        readout = None if self.readout is UNSET else self.readout
        self._tied, self._readout = Pattern("tied", tied), Pattern("readout", readout)

    def split(self, path: str, shape: tuple[int, ...]) -> Split | None:
        """The axes that the user gave for this path, or None."""
        matching = [split for pattern, split in self._axes if pattern.matches(path)]
        if not matching:
            return None
        return Split(*check_axes(path, shape, matching[0]), "axes given", proven=True)

    def counts_copies(self, path: str) -> bool:
        """Whether the parameter's first axis counts copies."""
        return self._copies.matches(path)

    def is_table(self, path: str, *, alike: bool) -> bool:
        """Whether the parameter is a table of (entries, features).

        Args:
          path: of the parameter.
          alike: whether only its last axis, the features, grows. Then a match of
            `tied` is enough.
        """
        declared = self._tables.matches(path)
        return (self._tied.matches(path) and alike) or declared

    def is_readout(self, path: str) -> bool:
        """Whether the user named the parameter as a readout."""
        return self._readout.matches(path)

    def check(self, paths: Iterable[str]) -> None:
        """Raise a `ValueError` if a pattern matches nothing."""
        axes = (pattern for pattern, _ in self._axes)
        for pattern in (self._tables, self._copies, self._readout, *axes):
            pattern.check(paths)
