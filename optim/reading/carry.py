"""What parameters carry where the program does not multiply.

The numbers that matter must be one (`numbers`): those of logits and readouts, and of
the end of each residual branch beside its stream, where a power of the depth belongs.
Constants on branches are checked; where there are none, the ends of branches carry it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import ParamScale
from ..scales.declare import Declarations
from ..scales.table import some
from .branches import Branch
from .depth import Depth
from .kinds import alike
from .logs import Rule
from .numbers import Numbers
from .pair import Pair
from .program import earlier
from .roles import remedy
from .solve import FREE, Row, UnsolvedError, solve

# What carrying costs, beside a kernel: gains, biases (which follow their kernels), keys
# (queries carry instead), what is part of both, and what is far from what lacks.
_GAIN, _BIAS, _KEY, _BOTH, _OTHER = 1.2, 1e-4, 50.0, 3.0, 100.0


class Carry:
    """Finds what parameters carry.

    Args:
      pair, depth: base and target, and how much deeper the target is.
      found: the scales of its parameters, which change.
      given: parameters whose axes the user declared.
    """

    def __init__(
        self,
        pair: Pair,
        depth: Depth,
        found: dict[str, ParamScale],
        given: Declarations,
    ):
        self._pair, self._large, self._depth = pair, pair.large, depth
        self.found, self._given = found, given
        self._numbers = Numbers(pair, depth, found)
        counted = {b.add.id for b in depth.counted}
        # By the ids of additions: those whose constants are checked.
        self._checked = {
            x.node.id: x
            for x in self._numbers.rules
            if x.branch and x.node.id in counted and self._owns(x)
        }
        self._order = self._numbers.first_uses()
        self._alpha = 0.0

    def _owns(self, rule: Rule) -> bool:
        """Whether constants at the end of a branch are its own.

        What only the first layer reads may have others, e.g. a scaled embedding.
        """
        own = {*(self._large.paths(rule.branch) if rule.branch else ())}
        ends = rule.branch and self._large.ends(rule.branch)
        carried = rule.end.carried.keys()
        like = [x for x in self._numbers.rules if x.branch and x is not rule]
        ends_like = [x.end for x in like if x.node.spot == rule.node.spot]
        differs = [abs(x.constant - rule.end.constant) > FREE for x in ends_like]
        alone = (carried - own).difference(*(x.carried for x in ends_like))
        if alone and differs and all(differs):
            return False
        return bool(ends or not carried or carried & own)

    def check(self, point: Parametrization) -> None:
        """Raise a `ValueError` if a number is not one in a model that multiplies."""
        for rule in self._numbers.rules:
            # Parameters may be stored with the multiplier of their branch.
            known, depth = rule.number.known, point.alpha * rule.number.depth
            lacking = min(known, known + depth, key=abs)
            if rule.whole and abs(lacking) > FREE and not self._is_declared(rule):
                raise self._lacks(rule, lacking)

    def follow(self, point: Parametrization | None) -> Parametrization | None:
        """Let parameters carry what the program lacks.

        Returns:
          The parametrization that the constants on branches are those of.
        """
        point, multiplied = self._check_constants(point)
        alpha = self._alpha = point.alpha if point else 0.0

        def has(rule: Rule) -> bool:
            """Whether the program multiplies by the power of the depth."""
            if rule.branch and rule.node.id in self._checked:
                return multiplied
            depth = rule.number.depth
            return bool(depth) and self._explains(rule, -alpha * depth)

        def of_widths(rule: Rule) -> float:
            known = rule.number.known + has(rule) * alpha * rule.number.depth
            return known if rule.whole else 0.0

        def of_depth(rule: Rule) -> float:
            matters = rule.number.is_known or rule.branch is not None
            return alpha * rule.number.depth * (matters and not has(rule))

        rules = [*self._numbers.rules, *self._numbers.results]
        for path, x in self._solved(rules, of_widths, self._costs()).items():
            self._let_carry(path, carried=self._carried(path, x))
        ends = {x for b in self._depth.counted for x in self._large.ends(b)}
        rules = [x for x in rules if not x.of_widths]
        costs = {
            path: 2 - i / len(self._order) if path in ends else 1e3 + i
            for i, path in enumerate(self._order)
            if path in self._depth.inside
        }
        for path, x in self._solved(rules, of_depth, costs).items():
            multiplier = self._depth.inside[path] ** -alpha
            if path in ends and alike(math.exp(x), multiplier):
                self._let_carry(path, in_branch=True, ends_branch=True)
            else:
                self._let_carry(path, carried=self._carried(path, x))
        if self._depth.ratios and point and (point.alpha or point.gamma):
            self._check_kept()
        return point

    def _carried(self, path: str, more: float) -> float:
        """What a parameter carries, without errors of rounding."""
        return float(f"{self.found[path].carried * math.exp(more):.9g}")

    def _costs(self) -> dict[str, float]:
        """What carrying costs: less for what is used first, and for queries."""
        biases, keys, found = self._numbers.biases, self._numbers.keys, {}
        for i, (path, is_kernel) in enumerate(self._order.items()):
            cost = (1.0 if is_kernel else _GAIN) + i / (100 * len(self._order))
            cost = _KEY if path in keys else cost
            found[path] = _BIAS if path in biases else cost
        return found

    def _solved(
        self,
        rules: list[Rule],
        lacking: Callable[[Rule], float],
        costs: dict[str, float],
    ) -> dict[str, float]:
        """The logarithms of what parameters carry, so that no number lacks anything.

        Raises:
          ValueError: nothing can carry what one lacks.
        """
        values = [(x.carried, x.known) for x in self._numbers.values if x.is_known]
        while True:
            rows: list[Row] = [(x.number.carried, lacking(x)) for x in rules]
            near = self._near(rules, lacking)
            prices = {p: x * near.get(p, _OTHER) for p, x in costs.items()}
            try:
                return solve(rows, values, prices)
            except UnsolvedError as reason:
                rule = rules[reason.row]
                results = [x for x in self._numbers.results if x in rules]
                fine = [x for x in results if abs(lacking(x)) < FREE]
                if self._is_declared(rule):
                    rules.remove(rule)
                elif rule in results and (shown := self._features(results)):
                    rules = [x for x in rules if x not in shown]
                elif rule in results and fine:  # those with units are of a loss
                    rules = [x for x in rules if x not in results or x in fine]
                elif rule.branch and lacking(rule) != rule.number.known:
                    raise self._ends_in_none(rule.branch, lacking(rule)) from None
                else:
                    raise self._lacks(rule, reason.lacking) from None

    def _features(self, results: list[Rule]) -> list[Rule]:
        """The results that others are computed from, e.g. what a readout reads."""
        leads = self._large.reading.program.leads
        others = {x.node.id: x.node for x in results}
        return [
            x
            for x in results
            if any(y is not x.node and leads(x.node, y) for y in others.values())
        ]

    @staticmethod
    def _near(rules: list[Rule], lacking: Callable[[Rule], float]) -> dict[str, float]:
        """The parameters of numbers that lack something, and of what is added to them.

        More expensive are those of several factors, e.g. of queries and of keys.
        """
        near: dict[str, float] = {}
        numbers = [x.number.carried for x in rules if abs(lacking(x)) >= FREE]
        joins = ("add", "complex", "concatenate", "join", "sum")
        sums = [x for x in rules if x.node.op in joins and not x.branch]
        for carried in numbers:  # which gets longer
            for path, power in carried.items():
                price = 1.0 if abs(power) <= 1 else _BOTH
                near[path] = max(near.get(path, price), price)
            one = {path for path, price in near.items() if price == 1}
            beside = [x for x in sums if x.number.carried.keys() & one]
            sums = [x for x in sums if x not in beside]
            numbers += [x.number.carried for x in beside]
        return near

    def _is_declared(self, rule: Rule) -> bool:
        """Whether all parameters that a value is computed from are declared."""
        shapes = self._shapes(rule)
        axes = (self._given.axes(path, shape) for path, shape in shapes.items())
        return bool(shapes) and all(axes)

    def _shapes(self, rule: Rule) -> dict[str, tuple[int, ...]]:
        return {
            path: self._large.reading.leaves[path].shape
            for x in (rule.node, *earlier(rule.node))
            for path in sorted(self._large.sources(x))
        }

    def _lacks(self, rule: Rule, lacking: float) -> ValueError:
        """A number is not one, and nothing can carry the rest."""
        node, shapes = rule.node, self._shapes(rule)
        what = rule.branch.label if rule.branch else f"values of {node.op!r}"
        where = "beside its stream" if rule.branch else f"at {node.line}"
        remedies = [
            f"multiply them by {math.exp(-lacking):.4g} in the target"
            + self._formula(-lacking)
        ]
        if shapes:
            remedies.append(
                f"if the axes of {some([*shapes])} were not read rightly, declare "
                f"{remedy(shapes)}"
            )
        if self._large.decides_steps(node):
            remedies.append(
                "if they only set the steps of a solver, pass call=lambda model, "
                "*inputs: ... with a fixed number of steps"
            )
        return ValueError(
            f"the {what} {where} become {math.exp(lacking):.4g} times as large in the "
            "target as in the base, where they should stay as large, and no parameters "
            f"can carry the inverse: {'; or, '.join(remedies)}"
        )

    def _formula(self, lacking: float) -> str:
        """A factor as a power of the width, if only one width grows."""
        widths = {x for s in self.found.values() for x in (s.width_in, s.width_out)}
        widths = {x for x in widths if x != 1}
        if len(widths) != 1:
            return ""
        power = -lacking / math.log(widths.pop())
        if abs(4 * power - round(4 * power)) > FREE:
            return ""
        return f", i.e. by (base width / width)**{power:g}"

    def _ends_in_none(self, branch: Branch, lacking: float) -> ValueError:
        line = branch.failure.line if branch.failure else branch.add.line
        return ValueError(
            f"the {branch.label} does not end in parameters that could carry its "
            f"multiplier and are used for nothing else ({line}); multiply this branch "
            f"by (depth / base depth)**-{self._alpha:g} (here {math.exp(-lacking):.4g})"
            ", and all others, too"
        )

    def _let_carry(self, path: str, **changes: float) -> None:
        """Let a parameter carry a multiplier, with the number that is added to it."""
        offsets = self._numbers.offsets.get(path, {0.0})
        if len(offsets) > 1:
            raise ValueError(
                f"{path!r} is used with several numbers added to it, so that it can "
                "carry no multiplier of a branch or of logits; multiply them yourself"
            )
        (offset,) = offsets
        scale = dataclasses.replace(self.found[path], offset=offset)
        self.found[path] = dataclasses.replace(scale, **changes)  # type: ignore[arg-type]

    def _check_constants(
        self, point: Parametrization | None
    ) -> tuple[Parametrization | None, bool]:
        """Check the constants on branches.

        Where widths and depth grow by the same ratio, the rest of all constants says
        which: all are that of the parametrization, or one.

        Returns:
          The parametrization that they are those of, or the default; and whether the
          program multiplies.
        """
        rules = [*self._checked.values()]
        if not self._depth.ratios:
            for rule in rules:
                if not self._explains(rule, 0.0):
                    ratio = math.exp(rule.end.constant)
                    raise ValueError(
                        f"the {self._label(rule)} is multiplied by {ratio:.4g} times "
                        "as much in the target as in the base, but both have the same "
                        "depth; use the same constant"
                    )
            return point, False
        for rule in rules:
            self._check_known(rule)
        one = max((b.layers for b in self._depth.counted), default=0) == 1
        default = point or parametrization("depth_mup" if one else "completep")
        points = [point] if point else map(parametrization, ("depth_mup", "completep"))
        for power, named in [(0.0, default), *((p.alpha, p) for p in points)]:
            if all(self._explains(x, -power * x.number.depth) for x in rules):
                return named, power != 0
        plain = [self._explains(x, 0.0) for x in rules]
        power = default.alpha
        multiplied = [self._explains(x, -power * x.number.depth) for x in rules]
        rule = rules[(multiplied if any(multiplied) else plain).index(False)]
        paths = self._large.paths(rule.branch) if rule.branch else []
        raise ValueError(
            f"the {self._label(rule)}"
            + (f", with {paths[0]!r}," if paths else "")
            + " has a constant"
            + ", beside that of its stream,"
            * bool(rule.branch and rule.branch.skip > 1)
            + f" {math.exp(rule.end.constant):.4g} times that of the "
            f"base; {default.label} needs {math.exp(-power * rule.number.depth):.4g}, "
            f"i.e. (depth / base depth)**-{power:g}, on every branch, or 1 on every "
            "branch"
        )

    def _check_known(self, rule: Rule) -> None:
        """Raise a `ValueError` if the ratio of a branch's constants is not known."""
        nodes = self._large.reading.program.nodes
        for node in (nodes[x] for x in rule.end.parts if isinstance(x, int) and x >= 0):
            arrays = any(x.value is None and x.array is not None for x in node.operands)
            if node.op in ("mul", "div") and arrays:
                raise ValueError(
                    f"the constants at {node.line}, on the {self._label(rule)}, are "
                    "not those of the base times one number, so that it is not known "
                    "how they change with depth; multiply all layers by the same number"
                )

    @staticmethod
    def _label(rule: Rule) -> str:
        return rule.branch.label if rule.branch else f"sum at {rule.node.line}"

    def _explains(self, rule: Rule, depth: float) -> bool:
        """Whether a constant is a power of the depth, but for a part of widths.

        A sum of products of activations owns the factor that it needs, or its root. A
        kernel owns the inverse root of its fan-in, as in the NTK parametrization.
        """
        number = rule.number
        ends = [rule.end.constant] if rule.branch else []
        for constant in (*ends, number.constant):
            grown = number.known - number.constant
            options = [0.0, -grown, -grown / 2]
            options.append(-self._log(rule, "heads_in"))
            options += self._roots(rule) if rule.branch else ()
            if any(abs(constant - x - depth) < FREE for x in options):
                return True
        return False

    def _log(self, rule: Rule, name: str) -> float:
        """The logarithm of how the fan-in of the kernels of a number grows."""
        number = rule.end if rule.branch else rule.number
        return sum(
            power * math.log(getattr(self.found[path], name))
            for path, power in number.carried.items()
        )

    def _roots(self, rule: Rule) -> list[float]:
        """What kernels of a branch may be divided by, as in the NTK parametrization.

        Each by its fan-in or the root of it; where depth grows, all by the root, unless
        the constant might be that of the depth.
        """
        fans = [self.found[path].width_in for path in rule.end.carried]
        if not self._depth.ratios:
            sums = {0.0}
            for fan in fans[:4]:
                sums |= {x + y * math.log(fan) for x in sums for y in (-0.5, -1.0)}
            return [*sums]
        root = -self._log(rule, "width_in") / 2
        powers = (rule.number.depth * p for p in (0.5, 1.0))
        is_clear = all(abs(root + x) > FREE for x in powers)
        return [root] if is_clear or self._divides_by_roots else []

    @functools.cached_property
    def _divides_by_roots(self) -> bool:
        """Whether all kernels outside of branches are divided by their root."""
        rules = [*self._numbers.rules, *self._numbers.results]
        found = [
            abs(rule.number.constant + self._log(rule, "width_in") / 2) < FREE
            for rule in rules
            if rule.whole and not rule.branch and self._log(rule, "width_in")
            if abs(rule.number.known - rule.number.constant) < FREE
        ]
        return bool(found) and all(found)

    def _check_kept(self) -> None:
        """Raise a `ValueError` if deep layers forget what the first ones added."""
        counted = self._depth.counted
        before = self._pair.small.branches.kept(self._pair.like(counted))
        after = self._large.branches.kept(counted)
        # (1 - 1 / depth)**depth is bounded; the power of a number is not.
        bound = self._depth.of(counted[0]) ** 0.25
        if abs(math.log(after)) > bound * abs(math.log(before)) + 1e-3:
            raise ValueError(
                f"layers multiply the stream itself ({counted[0].label}), all in all "
                f"by {before:.4g} in the base and by {after:.4g} in the target: the "
                "share of the first layers vanishes with depth, or grows. Write x + "
                "c * f(x), or, in (1 - c) x + c f(x), let c be proportional to 1 / "
                "depth, or write (1 - c**2)**0.5 * x + c * f(x) with c proportional to "
                "1 / depth**0.5, or pass parametrization='mup'"
            )
