"""The constants on residual branches: checked, or carried by the branches' ends."""

import functools
import itertools
import math
from collections.abc import Sequence

from ..rules.parametrizations import Parametrization, parametrization
from .branches import Branch
from .carry import Carry
from .depth import Depth
from .kinds import alike
from .pair import Pair
from .sums import Sum


class Constants:
    """Checks the constants on residual branches; the branches' ends carry the rest.

    Attributes:
      of_sums: by sum, the constants between it and the end of a branch that are not
        its own.
    """

    def __init__(self, pair: Pair, depth: Depth, carry: Carry):
        self._pair, self._large, self._small = pair, pair.large, pair.small
        self._depth, self._carry = depth, carry
        self.of_sums: dict[int, float] = {}

    def follow(
        self, counted: list[Branch], point: Parametrization | None
    ) -> Parametrization | None:
        """Check the branches' constants, and carry them where there are none."""
        pairs = self._pair.branches(counted)
        parts, found = self._parts_of_widths(pairs, point)
        for (branch, like, _), part in zip(pairs, parts, strict=True):
            if like:
                self._give_to_widths(branch, like, *part)
        ratios = [r / own for (*_, r), (own, _) in zip(pairs, parts, strict=True)]
        if not self._depth.ratios:
            for branch, ratio in zip(counted, ratios, strict=True):
                if not alike(ratio, 1):
                    raise ValueError(
                        f"the {branch.label} is multiplied by "
                        f"{ratio:.4g} times as much in the target as in the base, but "
                        "both have the same depth; use the same constant"
                    )
            return point
        point = found
        expected = [self._depth.of(b) ** -point.alpha for b in counted]
        if not all(isinstance(x, float) for x in expected):
            return point
        multiplied = list(map(alike, ratios, expected))
        plain = [alike(r, 1) for r in ratios]
        if not (all(multiplied) or all(plain)):
            i = (multiplied if any(multiplied) else plain).index(False)
            some = next(iter(self._large.paths(counted[i])), "")
            raise ValueError(
                f"the {counted[i].label}"
                + (f", with {some!r}," if some else "")
                + f" has a constant {ratios[i]:.4g} times that of the base; "
                f"{point.label} needs {expected[i]:.4g}, i.e. (depth / base depth)**-"
                f"{point.alpha:g}, on every branch, or 1 on every branch"
            )
        for branch, ratio in zip(counted, expected, strict=True):
            if not all(multiplied):
                self._let_end_carry(branch, point, ratio)
        if point.alpha or point.gamma:
            self._check_kept(counted)
        return point

    def _check_kept(self, counted: list[Branch]) -> None:
        """Raise a `ValueError` if deep layers forget what the first ones added."""
        before = self._small.branches.kept(self._pair.like(counted))
        after = self._large.branches.kept(counted)
        if abs(math.log(after)) > 1.1 * abs(math.log(before)) + 1e-3:
            raise ValueError(
                f"layers multiply the stream itself ({counted[0].label}), all in all "
                f"by {before:.4g} in the base and by {after:.4g} in the target: the "
                "share of the first layers vanishes with depth, or grows. Write x + "
                "c * f(x), or, in (1 - c) x + c f(x), let c be proportional to 1 / "
                "depth, or write (1 - c**2)**0.5 * x + c * f(x) with c proportional to "
                "1 / depth**0.5, or pass parametrization='mup'"
            )

    def _parts_of_widths(
        self,
        pairs: Sequence[tuple[Branch, Branch | None, float]],
        point: Parametrization | None,
    ) -> tuple[list[tuple[float, bool]], Parametrization]:
        """The parts of branches' constants that belong to widths rather than to depth.

        Where widths and depth grow by the same ratio, the rest of all constants says
        which: all are that of the parametrization, or one.

        Returns:
          Each part, and whether it is that of the kernels which end the branch; and the
          parametrization, or the default where none has the rest of the constants.
        """
        one = max((b.layers for b, *_ in pairs), default=0) == 1
        default = point or parametrization("depth_mup" if one else "completep")
        points = [point] if point else map(parametrization, ("depth_mup", "completep"))
        options = [self._of_widths(*pair) for pair in pairs]
        for power, named in [(0.0, default), *((-p.alpha, p) for p in points)]:
            found = [
                next(
                    (x for x in each if alike(r / x[0], self._depth.of(b) ** power)),
                    None,
                )
                for (b, _, r), each in zip(pairs, options, strict=True)
            ]
            parts = [x for x in found if x is not None]
            if len(parts) == len(found):
                return parts, named
        return [(1.0, False)] * len(pairs), default

    def _of_widths(
        self, branch: Branch, like: Branch | None, ratio: float
    ) -> list[tuple[float, bool]]:
        """The parts of a branch's constant that may belong to widths.

        A sum of products of activations owns the factor that it needs, or its root, up
        to the next kernel. A kernel owns the inverse root of its fan-in, as in the NTK
        parametrization, and what its inputs are divided by, as a softmax's entries. It
        carries the inverse, as it does outside of branches.
        """
        options = [(1.0, False)]
        if like is None or alike(ratio, 1):
            return options
        sums = self._sums_before(branch, like)
        options += [(n**power, False) for _, n, _ in sums for power in (-1.0, -0.5)]
        units = [[e.unit for e in b.ends if e.is_kernel] for b in (branch, like)]
        kernels = [self._large.path(end) for end in branch.ends if end.is_kernel]
        if kernels and self._divides_by_roots(branch):
            fan_in = max(self._carry.found[path].width_in for path in kernels)
            options.insert(0, (fan_in**-0.5, True))
        # The mean of kernels side by side divides by their number.
        number = {self._carry.found[path].heads_in for path in kernels}
        options[:0] = [(1 / x, True) for x in number if x != 1]
        if all(units) and units[0][0] != units[1][0]:
            options.insert(0, (units[0][0] / units[1][0], True))
        return options

    def _give_to_widths(
        self, branch: Branch, like: Branch, own: float, of_kernels: bool
    ) -> None:
        """Let the end of a branch, or its sums, have their part of its constant."""
        for end in branch.ends if of_kernels else ():
            if end.is_kernel:
                self._carry.let_carry(
                    self._large.path(end), branch.ends, carried=1 / own
                )
        for now, _, constant in self._sums_before(branch, like):
            self.of_sums[now.node.id] = constant / (1 if of_kernels else own)

    def _sums_before(
        self, branch: Branch, like: Branch
    ) -> list[tuple[Sum, float, float]]:
        """Sums within a branch that share constants with the kernels that end it.

        Returns:
          Each with its growth, and the ratio of these constants to those of the base.
        """
        found = []
        now, then = self._large.sums_of(branch), self._small.sums_of(like)
        for (one, later), (other, before) in zip(now, then, strict=False):
            if one.size != other.size and not alike(later, before):
                found.append((one, one.size / other.size, later / before))
        return found

    def _divides_by_roots(self, branch: Branch) -> bool:
        """Whether all other kernels are divided by the root of their fan-in.

        Those of the branch, or if it has none, those of the model.
        """
        inside = set(self._large.paths(branch)) & self._roots.keys()
        found = [self._roots[path] for path in inside or self._roots]
        return bool(found) and all(found)

    @functools.cached_property
    def _roots(self) -> dict[str, bool]:
        """Which kernels, but those that end branches, are divided by such a root."""
        ends = {
            path for each in self._large.branches.all for path in self._large.ends(each)
        }
        found = {}
        for now, then in itertools.chain(*(kind.twins for kind in self._pair.layers())):
            fan_in = self._carry.found[now.path].width_in
            if fan_in != 1 and now.path not in ends:
                ratio = self._pair.ratio(now.node, then.node)
                found[now.path] = alike(ratio, fan_in**-0.5)
        return found

    def _let_end_carry(
        self,
        branch: Branch,
        point: Parametrization,
        expected: float,
    ) -> None:
        advice = (
            f"multiply this branch by (depth / base depth)**-{point.alpha:g} (here "
            f"{expected:.4g}), and all others, too"
        )
        if branch.failure is not None:
            line = branch.failure.line or branch.add.line
            raise ValueError(
                f"the {branch.label} does not end in parameters "
                f"that could carry its multiplier, but in {branch.failure.op!r} "
                f"({line}); {advice}"
            )
        every = self._large.branches.all
        nodes = {e.node.id for b in every for e in b.ends}
        readers: dict[tuple[int, int], str] = {}
        for path in map(self._large.path, branch.ends):
            stops = {
                (b.add.id, -1 if b.end.weight else b.end.id)  # -1: a bias on a sum
                for b in every
                if path in self._large.ends(b)
            } | self._large.branches.again
            beside = [e.node for e in branch.ends if e.is_kernel and e.node.data]
            others = [e.node for e in branch.ends if self._large.path(e) == path]
            others = [x for x in beside if x not in others]
            elsewhere = self._large.elsewhere({path}, nodes, stops, others)
            if elsewhere is not None and (readers := self._large.readers(branch)):
                stops |= readers.keys()
                elsewhere = self._large.elsewhere({path}, nodes, stops, others)
            if elsewhere is not None:
                raise ValueError(
                    f"{path!r} ends the {branch.label}, but is "
                    f"also used elsewhere ({elsewhere.line}), so that it cannot carry "
                    f"the branch's multiplier; {advice}"
                )
            self._carry.let_carry(path, branch.ends, in_branch=True, ends_branch=True)
        for path in {*readers.values()}:
            self._carry.multiply(path, 1 / expected)
