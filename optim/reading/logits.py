"""The factors of sums of products of activations, e.g. of attention logits."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Set

from ..rules.parametrizations import Parametrization
from .carry import Carry
from .depth import Depth
from .kinds import Kind, alike
from .links import indices
from .pair import Pair
from .program import Node
from .sums import Sum

Lacking = tuple[Sum, float, float]  # a sum, what it lacks, the growth of its terms
# Parameters, the factor of sums that they carry, and the sums.
Carrier = tuple[frozenset[str], float, list[Sum]]


class Logits:
    """Checks the factors of sums; the parameters of one side carry the rest.

    Args:
      pair: base and target.
      depth: of their streams.
      carry: lets parameters carry.
      of_branches: by sum, the constants of a branch around it that are not its own.
    """

    def __init__(
        self,
        pair: Pair,
        depth: Depth,
        carry: Carry,
        of_branches: Mapping[int, float],
        of_kernels: Set[int],
    ):
        self._pair, self._large, self._small = pair, pair.large, pair.small
        self._depth, self._carry = depth, carry
        self._of_branches, self._of_kernels = of_branches, of_kernels
        self._summed_over_layers: set[int] = set()

    def follow(self, point: Parametrization | None) -> list[Sum]:
        """Check sums of products of activations; a factor's parameters carry the rest.

        Those that layers add to the ones of the layers before, e.g. attention logits,
        also need the multiplier of residual branches. Returns those over axes that
        grow, other than means.
        """
        growing, lacking = [], []
        for kind in self._pair.sums:
            share, terms = 1.0, self._terms(kind)
            if point is not None and any(
                alike(terms, x) for x in self._depth.ratios.values()
            ):
                has = any(map(self._has_multiplier, kind.now[0].sides))
                share = 1.0 if has else terms**-point.alpha
            if share == 1 and len({x.size for x in (*kind.then, *kind.now)}) < 2:
                continue
            ratios = kind.ratios(functools.partial(self._lacks, share=share))
            kind.check_known(ratios, kind.now[0].node)
            for (each, then), wanted in zip(kind.twins, ratios, strict=True):
                self._check_generated(each, then)
                growth = each.size / then.size / share
                if growth == 1:
                    continue
                if not alike(wanted, 1):
                    lacking.append((each, wanted, growth))
                    self._summed_over_layers |= {each.node.id} if share != 1 else set()
                if not alike(wanted, 1) or len(set(each.sides)) > 1:
                    growing.append(each)

        def choice(of: Sum) -> tuple[int, int]:
            return len({*map(self._large.params, of.sides)}), of.node.id

        lacking.sort(key=lambda each: choice(each[0]))
        for paths, wanted, sums in self._carriers(lacking):
            self._carry.carry_sums(paths, wanted, sums)
        return growing

    def _has_multiplier(self, side: Node) -> bool:
        """Whether a factor has that of a branch: its end, or a gradient of it."""
        paths = self._large.params(side)
        ends = bool(paths) and all(self._carry.found[x].ends_branch for x in paths)
        return side.backward or ends

    def _check_generated(self, now: Sum, then: Sum) -> None:
        """Raise a `ValueError` for a kernel that a parameter makes, if a norm follows.

        Where the size of the kernel has no effect, only the ratio of its initial size
        and its rate matters. It is the root of the fan-in, which a multiplier cannot
        give to a parameter whose own fan-in is another one.
        """
        if now.size == then.size or self._large.sums.constant(now) is not None:
            return
        for k, (side, other) in enumerate(zip(now.sides, then.sides, strict=True)):
            labels = self._large.axes.entries(side)
            into, out = (
                {
                    axis
                    for index in indices(now.node)
                    if set(index.axes) == among and (index.out is None) == summed
                    for a in (index.axes[k],)
                    if side.shape[a] != other.shape[a]
                    for axis in labels[a]
                }
                for among, summed in (({0, 1}, True), ({k}, False))
            )
            for param in {p for p, _ in into} & {p for p, _ in out}:
                advice = (
                    "store it with an axis for the inputs and one for the outputs of "
                    "the kernel, e.g. (k, n, m) in place of (k, n * m), and let k not "
                    "grow"
                    if into & out
                    else "compute the kernel from a fixed number of values, or leave "
                    "the norm out"
                )
                raise ValueError(
                    f"{self._large.reading.path_of[param]!r} makes a kernel for each "
                    f"input ({now.node.line}) whose result is normalized: its initial "
                    f"size and its rate need different powers of the width; {advice}"
                )

    def _terms(self, kind: Kind[Sum]) -> float:
        """Growth of the number of sums that are added up."""
        then, now = (
            max(x[every[0].node.spot] for x in m.sums.totals.values() or [Counter()])
            for m, every in ((self._small, kind.then), (self._large, kind.now))
        )
        return now / then if now and then else 1.0

    def _lacks(self, now: Sum, then: Sum, share: float = 1.0) -> float:
        """The factor that a sum needs beside the constants of the program."""
        if now.node.id in self._of_kernels:
            return 1.0
        scale, first = self._large.sums.constant(now), self._small.sums.constant(then)
        if scale is None or first is None:
            return 1.0
        ratio = scale / first
        if len(set(now.sides)) == 1 and alike(then.size / now.size, ratio):
            return 1.0  # a mean of squares, e.g. of a norm
        for one, other in zip(now.sides, then.sides, strict=True):
            ratio *= self._large.side(one)[1] / self._small.side(other)[1]
        ratio /= self._of_branches.get(now.node.id, 1.0)
        return share * then.size / now.size / ratio

    def _carriers(self, lacking: list[Lacking]) -> list[Carrier]:
        """Parameters of one factor of each sum that can carry what it lacks.

        Raises:
          ValueError: there are none.
        """
        every = [self._large.params(x) for s, _, _ in lacking for x in s.sides]
        stuck = lacking[:1]

        @functools.cache  # other choices leave the same sums
        def chosen(left: tuple[Lacking, ...]) -> list[Carrier] | None:
            if not left:
                return []
            of, wanted, _ = left[0]
            for side in self._large.sums.queries_first(of):
                paths = self._large.params(side)
                # With the other segments of a value, where another sum takes them all.
                paths = paths.union(*(x for x in every if x & paths))
                same = [x for x in lacking if paths & self._large.all_params(x[0])]
                equal = all(x in left and alike(x[1], wanted) for x in same)
                sums = [s for s, _, _ in same]
                if equal and self._carry.can_carry(paths, sums):
                    rest = chosen(tuple(x for x in left if x not in same))
                    if rest is not None:
                        return [(paths, wanted, sums), *rest]
            stuck[:] = left[:1]
            return None

        found = chosen(tuple(lacking))
        if found is None:
            raise self._error(*stuck[0])
        return found

    def _error(self, of: Sum, wanted: float, growth: float) -> ValueError:
        """No parameter can carry what a sum lacks."""
        if of.node.id in self._summed_over_layers:
            missing = (
                f"{wanted:.4g} in the target. Layers add such sums up, so that they "
                "also need the multiplier of residual branches, e.g. base depth / depth"
            )
        else:
            power = math.log(wanted) / -math.log(growth)
            missing = "(number of terms in the base / in the target)"
            missing += "" if alike(wanted, 1 / growth) else f"**{power:.4g}"
            missing += ", e.g. divide logits by the head dimension instead of its root"
            if self._large.decides_steps(of.node):
                missing += (
                    "; or, if it only sets the steps of a solver, pass call=lambda "
                    "model, *inputs: ... with a fixed number of steps"
                )
        return ValueError(
            f"the sum over products of activations at {of.node.line} has {growth:g} "
            f"times as many terms in the target as in the base, and needs a factor of "
            f"{1 / growth:.4g}, of which {wanted:.4g} is missing. No parameter of its "
            f"factors can carry it: multiply the sum by {missing}"
        )


def settle_states(pair: Pair) -> set[int]:
    """Find whether what states start from is a kernel, or has entries of size one.

    It is a kernel where what data add is as small as a kernel, e.g. (k v / n) in
    linear attention, or the steps of an inner optimizer. Otherwise their sum needs
    a factor of 1/n beside queries or results, and is an activation.

    Returns the sums over such kernels, by the ids of their nodes.
    """
    found: set[int] = set()
    for now, then in itertools.chain(*(kind.twins for kind in pair.sums)):
        at, params = pair.large.axes.states.get(now.node.id, (0, ()))
        if not params or now.size == then.size:
            continue
        term = pair.large.factors.gained(now.sides[at])
        other = pair.small.factors.gained(then.sides[at])
        ratio = pair.large.side(term)[1] / pair.small.side(other)[1]
        step = pair.large.axes.is_step(term)
        if step or alike(ratio, then.size / now.size):
            found.add(now.node.id)
            continue
        for param in params:
            path = pair.large.reading.path_of[param]
            for model, name in ((pair.large, path), (pair.small, pair.twin[path])):
                role = model.roles[name]
                if role is not None:
                    axes = tuple(sorted((*role.in_axes, *role.out_axes)))
                    model.roles[name] = dataclasses.replace(
                        role, in_axes=(), out_axes=axes
                    )
    return found
