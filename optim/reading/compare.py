"""Compare the programs of base and target: roles, depth, branches and constants."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import ParamScale, Role
from ..rules.training import TrainingScale
from ..scales.declare import Declarations
from ..scales.paths import open_numbers
from ..scales.table import Scales
from .axes import Axes, Event, Use
from .branches import Branch, Branches, End, Failure
from .growth import grown, same_parametrization, twin
from .lists import Pairing
from .models import Reading, trace
from .program import Node
from .roles import Found, find_roles, remedy
from .segments import Parts, segmented

_ALIKE = 0.01  # constants count as equal if their logarithms differ by less


@dataclasses.dataclass
class _Model:
    """A model, its program, and what was read from it."""

    reading: Reading
    axes: Axes
    branches: Branches
    roles: dict[str, Found | None]

    def events(self, path: str) -> list[Event]:
        return self.axes.events[self.reading.path_of.index(path)]

    def path(self, end: End) -> str:
        return self.reading.path_of[end.param]


def _model(reading: Reading, given: Declarations) -> _Model:
    axes = Axes(reading.program)
    roles = find_roles(reading, axes, given)
    return _Model(reading, axes, Branches(reading.program, axes), roles)


def read_scales(
    base: Any,
    target: Any,
    inputs: tuple[Any, ...],
    *,
    call: Callable[..., Any] | None,
    given: Declarations,
    point: Parametrization | None,
    fractional: bool,
    delta: Any,
    training: TrainingScale,
) -> Scales:
    """The scales of a target, from the programs of base and target."""
    models = {"base": base, "target": target, "delta": delta}
    if delta is None:
        del models["delta"]
    readings = [trace(model, inputs, call, k) for k, model in models.items()]
    large, (small, *more), parts = segmented(
        readings[1], [readings[0], *readings[2:]], given
    )
    now = _model(large, given)
    wide = _model(more[0], given) if more else now
    small_model = _model(small, given)
    comparison = _Comparison(small_model, now, wide, given, fractional, training)
    return comparison.scales(point, parts)


class _Comparison:
    def __init__(
        self,
        small: _Model,
        large: _Model,
        wide: _Model,
        given: Declarations,
        fractional: bool,
        training: TrainingScale,
    ):
        self.small, self.large, self.given = small, large, given
        self.fractional, self.training = fractional, training
        self._wide = wide
        self._leaves = large.reading.leaves
        to_small = Pairing(self._leaves, small.reading.leaves)
        to_wide = Pairing(self._leaves, wide.reading.leaves)
        self.twin = {
            p: twin(p, to_small, small.reading.leaves, self._leaves, "base")
            for p in self._leaves
        }
        self.other = {
            p: twin(p, to_wide, wide.reading.leaves, self._leaves, "delta")
            for p in self._leaves
        }

    def scales(self, point: Parametrization | None, parts: Parts) -> Scales:
        """Roles from the programs, depth from their branches."""
        counted, depth = self._counted()
        inside = self._inside(counted)
        own = self._leaves.parametrization
        point = same_parametrization(own, point) or own
        found = {
            path: self._scale(path, depth, path in inside) for path in self._leaves
        }
        if not counted and self._deeper():
            depth = self._plain_depth(point)
            found = {p: dataclasses.replace(s, depth=depth) for p, s in found.items()}
        elif own is None:
            point = self._follow_branches(found, counted, depth, point)
        if own is None:
            self._follow_logits(found)
            self._follow_readouts(found)
        last = self._last_width(found)
        found = {p: dataclasses.replace(s, width_last=last) for p, s in found.items()}
        return Scales(
            parts.joined(found),
            point or parametrization("mup"),
            multiplied=own is not None,
        )

    def _scale(self, path: str, depth: float, inside: bool) -> ParamScale:
        leaf = self._leaves[path]
        small = self.small.reading.leaves[self.twin[path]]
        wide = self._wide.reading.leaves[self.other[path]]
        role = self.large.roles[path]
        grows = frozenset(a for a, n in enumerate(small.shape) if n != wide.shape[a])
        if role is None:
            if grows:
                raise ValueError(
                    f"the forward pass does not use {path!r}; pass call=lambda model, "
                    "*inputs: ... that does (the loss, for example), or declare its "
                    f"axes: {remedy(path, leaf.shape)}"
                )
            role = Found(path, (), (), (), False, False, None)
        only_in = grows & set(role.in_axes) and not grows & set(role.out_axes)
        if role.tied and not role.table and only_in:
            # First a readout, then an input.
            role = self.large.roles[path] = role.reversed
            other = self.small.roles[self.twin[path]]
            if other is not None:
                self.small.roles[self.twin[path]] = other.reversed
        before = self.small.roles[self.twin[path]]
        if before is not None and (before.in_axes, before.table) != (
            role.in_axes,
            role.table,
        ):
            raise ValueError(
                f"base and target use {path!r} differently: the base sums over axes "
                f"{before.in_axes} ({before.line}), the target over {role.in_axes} "
                f"({role.line}); build both by the same code"
            )
        return grown(
            role,
            (small.shape, leaf.shape, wide.shape),
            fractional=self.fractional,
            depth=depth,
            in_branch=inside,
            training=self.training,
        )

    def _last_width(self, found: Mapping[str, ParamScale]) -> float:
        """Ratio of the last hidden layer's width: the fan-in of the last readout."""
        last, width = -1, 1.0
        for path, scale in found.items():
            role = self.large.roles[path]
            if role is None:
                continue
            if scale.role is Role.OUTPUT and role.at > last:
                last, width = role.at, scale.width_in
            elif role.tied and role.tied_at > last:
                last, width = role.tied_at, scale.width_out
        return width

    def _paths(self, model: _Model, branch: Branch) -> list[str]:
        """The parameters that are used inside a branch."""
        found = []
        for path, events in zip(model.reading.path_of, model.axes.events, strict=True):
            role = model.roles[path]
            if role is not None and role.table:
                # Rows that were looked up before are not used again by what they meet.
                events = [e for e in events if e.axes(Use.TABLE) or e.axes(Use.IN)]
            if any(event.node.id in branch.inside for event in events):
                found.append(path)
        return found

    def _groups(self, model: _Model) -> dict[tuple[frozenset[str], bool], list[Branch]]:
        """Branches by their parameters, and by whether they hold other branches."""
        groups: dict[tuple[frozenset[str], bool], list[Branch]] = {}
        every = model.branches.all
        for branch in every:
            names = frozenset(map(open_numbers, self._paths(model, branch)))
            holds = any(x.add.id in branch.inside for x in every if x is not branch)
            groups.setdefault((names, holds), []).append(branch)
        return groups

    def _counted(self) -> tuple[list[Branch], float]:
        """The target's branches whose number is its depth, and the depth ratio."""
        small, large = self._groups(self.small), self._groups(self.large)
        counts = {
            key: tuple(sum(b.runs for b in g.get(key, [])) for g in (small, large))
            for key in {**small, **large}
        }
        if all(a == b for a, b in counts.values()):
            return self._outermost(self.large.branches.all), 1.0
        # A branch that stands once in both, e.g. in the stem, is no depth; nor is one
        # around others whose number does not grow, as the skips of a U-Net.
        kept = {key for key, (a, b) in counts.items() if a != b or max(a, b) > 1}
        growing = [
            b for k, g in large.items() for b in g if counts[k][0] != counts[k][1]
        ]
        around = {
            key
            for key in kept
            if counts[key][0] == counts[key][1]
            and any(x.add.id in b.inside for b in large.get(key, []) for x in growing)
        }
        kept -= around
        chosen = [
            self._outermost([b for k in kept for b in groups.get(k, [])])
            for groups in (small, large)
        ]
        before, after = (sum(b.runs for b in each) for each in chosen)
        if not before:
            raise ValueError(
                "the target has residual branches and the base has none; build a base "
                "with at least one block"
            )
        if after < before and not self.fractional:
            raise ValueError(
                f"the target has {after} residual additions and the base {before}; the "
                "base comes first: swap the two, or pass fractional=True if the target "
                "is meant to be shallower"
            )
        if not after:
            raise ValueError(
                "the base has residual branches and the target has none; build both by "
                "the same code"
            )
        return sorted(chosen[1], key=lambda b: b.add.id), after / before

    @staticmethod
    def _outermost(branches: list[Branch]) -> list[Branch]:
        return [
            b
            for b in branches
            if not any(b.add.id in x.inside for x in branches if x is not b)
        ]

    def _inside(self, counted: list[Branch]) -> set[str]:
        """The parameters inside residual branches."""
        inside = {p for b in counted for p in self._paths(self.large, b)}
        ids = {i for b in counted for i in b.inside}
        for path in self._leaves:
            if path in inside:
                continue
            events = self.large.events(path)
            if not events or any(e.node.id in ids for e in events):
                continue
            fed: set[int] = set()
            for event in events:
                feeds = self.large.branches.feeding(event.node, counted)
                if feeds is None:
                    break
                fed |= {b.add.id for b in feeds}
            else:
                # Conditioning of one block; what many blocks share is outside.
                if 0 < len(fed) <= 2 < max(3, len(counted)):
                    inside.add(path)
        return inside

    def _deeper(self) -> dict[str, float]:
        """Parameters of layers that the base has fewer of: {path: ratio}."""
        names = [open_numbers(p) for p in self._leaves]
        before = [open_numbers(p) for p in self.small.reading.leaves]
        ratios = {}
        for path in self._leaves:
            name = open_numbers(path)
            if names.count(name) != before.count(name):
                ratios[path] = names.count(name) / before.count(name)
            for event in self.large.events(path):
                if event.node.op == "unstack" and not event.is_use:
                    small = self.small.reading.leaves[self.twin[path]].shape
                    for axis in event.axes(Use.COPY):
                        if small[axis] != self._leaves[path].shape[axis]:
                            ratios[path] = self._leaves[path].shape[axis] / small[axis]
        return ratios

    def _plain_depth(self, point: Parametrization | None) -> float:
        """The depth ratio of a network without residual branches."""
        path, ratio = next(iter(self._deeper().items()))
        if point is None or (point.branches_only and point.name not in ("sp", "mup")):
            raise ValueError(
                f"the target has {ratio:g} times as many layers like {path!r} as the "
                "base, and the program has no residual branch: x + f(x). Pass "
                "parametrization='relu_mlp' for a plain ReLU network, or build both "
                "with the same depth"
            )
        return ratio

    def _follow_branches(
        self,
        found: dict[str, ParamScale],
        counted: list[Branch],
        depth: float,
        point: Parametrization | None,
    ) -> Parametrization | None:
        """Check the branches' constants, and carry them where there are none."""
        before = self._constants_of_base()
        ratios = []
        for branch in counted:
            twins = [self.twin[p] for p in self._paths(self.large, branch)]
            known = [before[t] for t in twins if t in before]
            ratios.append(branch.constant / known[0] if known and known[0] else 1.0)
            self._check_ends_agree(branch)
        if depth == 1:
            for branch, ratio in zip(counted, ratios, strict=True):
                if not _alike(ratio, 1):
                    raise ValueError(
                        f"the residual branch at {branch.add.line} is multiplied by "
                        f"{ratio:.4g} times as much in the target as in the base, but "
                        "both have the same depth; use the same constant"
                    )
            return point
        point = point or self._implied(counted, ratios, depth)
        expected = depth**-point.alpha
        if not isinstance(expected, float):
            return point
        multiplied = [_alike(r, expected) for r in ratios]
        plain = [_alike(r, 1) for r in ratios]
        for i, branch in enumerate(counted):
            if multiplied[i] and (any(multiplied) == all(multiplied)):
                continue
            if plain[i] and all(plain):
                continue
            if multiplied[i]:
                continue
            raise ValueError(
                f"the residual branch at {branch.add.line} has a constant "
                f"{ratios[i]:.4g} times that of the base; {point.label} needs "
                f"{expected:.4g}, i.e. (depth / base depth)**-{point.alpha:g}, on "
                + ("every branch" if any(multiplied) else "it, or none on any branch")
            )
        if all(multiplied):
            return point
        for branch in counted:
            self._carry(found, branch, point, expected)
        return point

    def _check_ends_agree(self, branch: Branch) -> None:
        """Raise a `ValueError` if only a part of a branch is multiplied."""
        before = {
            self.small.path(e): e.factor
            for b in self.small.branches.all
            for e in b.ends
        }
        ratios = {
            path: end.factor / factor
            for end in branch.ends
            if (factor := before.get(self.twin[path := self.large.path(end)]))
        }
        if ratios and not _alike(max(ratios.values()), min(ratios.values())):
            low, *_, high = sorted(ratios, key=ratios.__getitem__)
            raise ValueError(
                f"the residual branch at {branch.add.line} is multiplied in parts: "
                f"{high!r} by {ratios[high]:.4g} times as much as in the base, {low!r} "
                f"by {ratios[low]:.4g}; multiply the whole branch, biases included"
            )

    def _constants_of_base(self) -> dict[str, float]:
        constants: dict[str, float] = {}
        for branch in self.small.branches.all:
            for path in self._paths(self.small, branch):
                constants.setdefault(path, branch.constant)
        return constants

    def _implied(
        self, counted: list[Branch], ratios: list[float], depth: float
    ) -> Parametrization:
        """The parametrization whose constants the branches have, or the default."""
        layers = max(b.layers for b in counted)
        default = "depth_mup" if layers == 1 else "completep"
        for name in (default, "depth_mup", "completep"):
            if all(_alike(r, depth ** -parametrization(name).alpha) for r in ratios):
                return parametrization(name)
        return parametrization(default)

    def _carry(
        self,
        found: dict[str, ParamScale],
        branch: Branch,
        point: Parametrization,
        expected: float,
    ) -> None:
        advice = (
            f"multiply this branch by (depth / base depth)**-{point.alpha:g} (here "
            f"{expected:.4g})"
        )
        if branch.failure is not None:
            line = branch.failure.line or branch.add.line
            raise ValueError(
                f"the residual branch at {branch.add.line} does not end in parameters "
                f"that could carry its multiplier, but in {branch.failure.op!r} "
                f"({line}); {advice}"
            )
        nodes = {e.node.id for b in self.large.branches.all for e in b.ends}
        for end in branch.ends:
            path = self.large.path(end)
            elsewhere = [e for e in self._uses(path) if e.node.id not in nodes]
            part = end.part and not self._enters(end.node, branch.add)
            if part or elsewhere:
                line = elsewhere[0].node.line if elsewhere else end.node.line
                raise ValueError(
                    f"{path!r} ends the residual branch at {branch.add.line}, but is "
                    f"also used elsewhere ({line}), so that it cannot carry the "
                    f"branch's multiplier; {advice}"
                )
            found[path] = dataclasses.replace(found[path], ends_branch=True)

    def _follow_logits(self, found: dict[str, ParamScale]) -> None:
        """Check attention logits; the queries carry what is missing."""
        before = {self._ends_key(self.small, x): x for x in _contractions(self.small)}
        for node in _contractions(self.large):
            twin = before.get(self._ends_key(self.large, node))
            if twin is None:
                continue
            growth = _contracted(node) / _contracted(twin)
            if growth == 1:
                continue
            scale = self.large.branches.logits(node)
            first = self.small.branches.logits(twin)
            if scale is None or first is None:
                continue
            sides = [self._side(self.large, x) for x in node.operands[:2]]
            others = [self._side(self.small, x) for x in twin.operands[:2]]
            ratio = scale / first
            for (_, now), (_, then) in zip(sides, others, strict=True):
                ratio *= now / then
            if _alike(ratio, 1 / growth):
                continue
            ends = next((e for e, _ in sides if self._can_carry(e, node)), None)
            wanted = 1 / growth / ratio
            cosine = all(self.large.branches.is_unit(x) for x in node.operands[:2])
            if ends is None and cosine and _alike(ratio, 1):
                continue  # cosines do not grow
            if ends is None:
                raise ValueError(
                    f"the attention logits at {node.line} are a sum over a head "
                    f"dimension that grows {growth:g}x, and their constant changes by "
                    f"{ratio:.4g}; it must change by {1 / growth:.4g}. No parameter of "
                    f"the queries can carry the rest: multiply the logits by "
                    f"{wanted:.4g} at the target, e.g. divide them by the head "
                    "dimension instead of its root"
                )
            for path in {self.large.path(e) for e in ends}:
                scale_of = found[path]
                found[path] = dataclasses.replace(
                    scale_of, carried=scale_of.carried * wanted
                )

    def _can_carry(self, ends: list[End], node: Node) -> bool:
        allowed = {e.node.id for e in ends}
        return bool(ends) and all(
            (not e.part or self._enters(e.node, node))
            and all(x.node.id in allowed for x in self._uses(self.large.path(e)))
            for e in ends
        )

    def _enters(self, start: Node, end: Node) -> bool:
        """Whether all of a value enters another one, if in parts, as in a rotation."""
        outputs = {x.id for x in self.large.reading.program.outputs}
        seen, stack = {end.id}, [start]
        while stack:
            at = stack.pop()
            if at.id in seen:
                continue
            if at.id in outputs:
                return False
            seen.add(at.id)
            stack += self.large.axes.uses(at)
        return True

    def _uses(self, path: str) -> list[Event]:
        return [event for event in self.large.events(path) if event.is_use]

    def _side(self, model: _Model, node: Node) -> tuple[list[End], float]:
        """The parameters that queries or keys are linear in, and their constant."""
        try:
            ends = model.branches.ends(node)
        except Failure:
            return [], model.branches.inner(node)
        kernels = [e for e in ends if e.node.op not in ("add", "sub")] or ends
        return ends, kernels[0].factor

    def _ends_key(self, model: _Model, node: Node) -> tuple[Any, ...]:
        return tuple(
            tuple(sorted(open_numbers(p) for p in self._sources(model, x)))
            for x in node.operands[:2]
        )

    def _sources(self, model: _Model, node: Node) -> set[str]:
        """The parameters of the nearest kernels before a node."""
        found: set[str] = set()
        stack, seen = [node], set()
        while stack:
            at = stack.pop()
            if at.id in seen:
                continue
            seen.add(at.id)
            weights = [x for x in at.operands if x.weight]
            if weights and at.data:
                for x in weights:
                    for axes in model.axes.labels.get(x.id, ()):
                        found |= {model.reading.path_of[p] for p, _ in axes}
                if at.op in ("dot_general", "conv_general_dilated"):
                    continue
            stack += [x for x in model.branches.before(at) if x.data]
        return found

    def _follow_readouts(self, found: dict[str, ParamScale]) -> None:
        """Constants beside first and last layers are forward multipliers of theirs."""
        # Constants at the ends of branches and on logits were looked at before.
        known = {self.large.path(e) for b in self.large.branches.all for e in b.ends}
        for node in _contractions(self.large):
            for operand in node.operands[:2]:
                known |= {
                    self.large.path(e) for e in self._side(self.large, operand)[0]
                }
        for path, scale in found.items():
            role, before = self.large.roles[path], self.small.roles[self.twin[path]]
            if role is None or before is None or role.node is None or path in known:
                continue
            if before.node is None:
                continue
            if role.tied:
                self._follow_tied(found, path)
                continue
            if scale.role not in (Role.INPUT, Role.HIDDEN, Role.OUTPUT):
                continue
            ratio = self._constant(self.large, role.node) / self._constant(
                self.small, before.node
            )
            if not _alike(ratio, 1):
                found[path] = dataclasses.replace(scale, carried=scale.carried / ratio)

    def _constant(self, model: _Model, node: Node) -> float:
        """The constants on the result and on the input of a layer."""
        factor = model.branches.outer(node) * model.branches.on_weight(node)
        data = [x for x in node.operands if x.data]
        if node.op in ("dot_general", "conv_general_dilated") and data:
            factor *= model.branches.inner(data[0])
        return factor

    def _follow_tied(self, found: dict[str, ParamScale], path: str) -> None:
        """A tied readout needs a multiplier of 1/m, which the last norm may carry."""
        scale, role = found[path], self.large.roles[path]
        width = scale.width_out
        if scale.role is not Role.INPUT or width == 1:
            return
        assert role is not None
        before = self.small.roles[self.twin[path]]
        assert role.node is not None
        assert before is not None
        assert before.node is not None
        first = self._constant(self.large, role.node) / self._constant(
            self.small, before.node
        )
        if not _alike(first, 1):
            raise ValueError(
                f"what {path!r} looks up ({role.line}) is multiplied by {first:.4g} "
                "times as much in the target as in the base, and it is the readout "
                "too, so that it cannot carry this; use the same constant in both, "
                "e.g. that of the base"
            )
        now, then = (
            next(
                e.node
                for e in m.events(p)
                if set(e.axes(Use.IN)) & set(m.roles[p].out_axes)  # type: ignore[union-attr]
            )
            for m, p in ((self.large, path), (self.small, self.twin[path]))
        )
        ratio = self._constant(self.large, now) / self._constant(self.small, then)
        if _alike(ratio, 1 / width):
            return
        data = next(x for x in now.operands if x.data)
        ends, _ = self._side(self.large, data)
        if not self._can_carry(ends, now):
            raise ValueError(
                f"the embedding {path!r} is also the readout ({now.line}); its logits "
                f"need a multiplier of base width / width (here {1 / width:.4g}), and "
                f"have {ratio:.4g}: multiply the logits by it, or the input of this "
                "product"
            )
        for last in {self.large.path(e) for e in ends}:
            known = found[last]
            found[last] = dataclasses.replace(
                known, carried=known.carried / width / ratio
            )


def _contractions(model: _Model) -> Iterable[Node]:
    """Products of two activations."""
    for node in model.reading.program.nodes:
        activations = all(x.data for x in node.operands[:2])
        if (
            node.op == "dot_general"
            and activations
            and model.branches.logits(node) is not None
        ):
            yield node


def _contracted(node: Node) -> float:
    (axes, _), _ = node.params["dimension_numbers"]
    return math.prod(node.operands[0].shape[a] for a in axes)


def _alike(one: float, other: float) -> bool:
    return one > 0 and other > 0 and abs(math.log(one / other)) < _ALIKE
