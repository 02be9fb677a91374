"""Options of `infer_scales` that override the inference for single parameters."""

import dataclasses
from collections.abc import Iterable, Mapping

from . import names
from .axes import Axes, Kernel, Pair, Split, check_axes
from .scales.patterns import UNSET, Pattern


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
        """Whether `readout` matches the parameter, or a module that holds it."""
        return self._readout.matches(path)

    def names_readout(self, path: str) -> bool:
        """Whether `readout` names the parameter itself, not a module that holds it."""
        readout = self._readout
        return readout.matches(path) and not readout.matches(names.renamed(path))

    def check_copies(self, kernels: Mapping[str, Kernel]) -> None:
        """Check that `copies` matches only parameters with an axis of copies.

        Raises:
          ValueError: `copies` matches a parameter whose first axis is a width; the
            message names it, and the pattern to write.
        """
        given = {p for p, k in kernels.items() if self.split(p, k.wide) is not None}
        asked = [p for p in kernels if self.counts_copies(p) and p not in given]
        matched = {p: kernels[p] for p in asked if kernels[p].experts}
        if asked and not matched:
            raise ValueError(
                f"copies={self.copies!r} matches {asked[0]!r}, which has no axis of "
                "copies; match only arrays whose first axis counts copies, e.g. "
                "copies=r'experts/', or pass copies=None"
            )
        # A known layer has such an axis if its shape has one more than the layer.
        unsure = {p: k for p, k in matched.items() if k.layer_axes is None}
        others = [k for p, k in kernels.items() if p not in matched and p not in given]
        counts, widths = _counts(matched), _widths(matched, others)
        clear = counts - widths if len(counts) > 1 else counts
        wrong = [p for p, k in unsure.items() if _is_whole(k, clear, widths)]
        if wrong:
            right = [p for p, k in matched.items() if p not in wrong and k.axes]
            raise ValueError(self._matches_too_much([kernels[p] for p in wrong], right))

    def _matches_too_much(self, wrong: list[Kernel], right: list[str]) -> str:
        kernel, *rest = sorted(wrong, key=lambda k: names.is_vector(k.path))
        (before, after), path = _count(kernel), names.pattern(kernel.path)
        first, axes = kernel.experts[0], kernel.axes
        remedy = f"copies=r'{names.pattern(*right)}'" if right else "copies=None"
        split = (axes[:-1], axes[-1:])
        if kernel.layout == "out_in" and len(axes) > 1:
            split = (axes[1:], axes[:1])
        also = dict.fromkeys(names.open_lists(k.path) for k in rest)
        also.pop(names.open_lists(kernel.path), None)
        more = f", nor that of {', '.join(map(repr, [*also][:4]))}" if also else ""
        return (
            f"copies={self.copies!r} matches {kernel.path!r}, {kernel.base} in the "
            f"base and {kernel.wide} in the target, but its axis {first} ({before} -> "
            f"{after}) does not seem to count copies{more}: copies should match only "
            "the stacked arrays, not routers, norms or shared experts beside them; "
            f"pass {remedy}; if that axis does count copies, pass "
            f"axes={{r'{path}': {split}}}"
        )

    def check(self, paths: Iterable[str]) -> None:
        """Raise a `ValueError` if a pattern matches nothing."""
        axes = (pattern for pattern, _ in self._axes)
        for pattern in (self._tables, self._copies, self._readout, *axes):
            pattern.check(paths)


def _count(kernel: Kernel) -> Pair:
    """Number of copies of a parameter in the base and in the wide model."""
    return kernel.pair(kernel.experts[0])


def _counts(matched: Mapping[str, Kernel]) -> set[Pair]:
    """Numbers of copies of the kernels, which have two more axes."""
    return {_count(k) for k in matched.values() if len(k.axes) > 1}


def _widths(matched: Mapping[str, Kernel], others: Iterable[Kernel]) -> set[Pair]:
    """Sizes of growing axes that kernels sum over, as far as shapes tell."""
    pairs = set()
    for kernel in matched.values():
        if len(kernel.axes) > 1:
            own = set(kernel.axes) - set(kernel.experts)
            pairs |= {kernel.pair(a) for a in own if kernel.grows(a)}
    for kernel in others:
        if len(kernel.axes) > 1:
            fan_in = kernel.axes[1 if kernel.layout == "out_in" else 0]
            pairs |= {kernel.pair(fan_in)} if kernel.grows(fan_in) else set()
    return pairs


def _is_whole(kernel: Kernel, counts: set[Pair], widths: set[Pair]) -> bool:
    """Whether a parameter seems to be a single layer's, without an axis of copies."""
    few = len(kernel.axes) < 2
    if few and names.array(kernel.path) in ("kernel", "w"):
        return True
    fixed = bool(kernel.axes) and not any(map(kernel.grows, kernel.axes))
    if fixed and kernel.readout and not names.is_vector(kernel.path):
        return True
    count, first = _count(kernel), kernel.experts[0]
    if not kernel.grows(first) or count in counts:
        return False
    return (few and bool(counts)) or count in widths
