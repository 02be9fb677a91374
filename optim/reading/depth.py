"""How much deeper each residual stream gets, and which parameters that concerns."""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Set

from ..rules.parametrizations import Parametrization
from .branches import Branch, place
from .facts import Facts, Key
from .kinds import Kind, alike
from .pair import Pair
from .program import Node, earlier, reach


class Depth:
    """The residual additions of the target whose number grows, and what they concern.

    Raises:
      ValueError: branches of one model have no counterpart in the other, or what gets
        deeper is no residual stream.

    Attributes:
      ratios: of depths, by the id of a branch, where they are not 1.
      averaged: terms of means over layers, which are no branches.
      counted: the branches whose number is the depth of their stream.
      inside: the depth ratio of each parameter inside of branches.
      on_stream: that of each parameter that acts on a stream itself in each layer.
      shared: in how many times as many layers each copy of a parameter is.
    """

    def __init__(self, pair: Pair):
        self._pair, self._large, self._small = pair, pair.large, pair.small
        self.ratios: dict[int, float] = {}
        self.averaged: list[Branch] = []
        self.on_stream: dict[str, float] = {}
        self.shared: dict[str, float] = {}
        self._check_whole()
        counted = self._counted()
        has_streams = bool(self.ratios)
        added = self._added(counted)
        if added and not has_streams:
            counted = []
            self._check_only_sums_deepen(added)
        self.counted = sorted([*counted, *added], key=place)
        self.inside = self._find_inside(self.counted)

    @property
    def largest(self) -> float:
        """The largest depth ratio of all streams."""
        return max(self.ratios.values(), default=1.0)

    def of(self, branch: Branch) -> float:
        """How much deeper the stream of a branch gets."""
        return self.ratios.get(id(branch), 1.0)

    def _check_whole(self) -> None:
        """Raise a `ValueError` if more values of one stream add up in another.

        Or if only some layers add what earlier layers added.
        """
        for spot, number in self._large.branches.unlike.items():
            if number == self._small.branches.unlike.get(spot):
                continue
            raise ValueError(
                f"layers add again what earlier layers added ({spot[0]}), but the "
                "first of them does not; let all do the same, e.g. v = jnp.zeros_like"
                "(x) before the first, and v = 0.9 * v + f(x); x = x + v in each"
            )
        for spot, (number, constant) in self._large.branches.whole.items():
            few, other = self._small.branches.whole.get(spot, (0, 0.0))
            if number != few and not alike(constant * number, other * few):
                raise ValueError(
                    f"each layer adds all that earlier layers added ({spot[0]}), so "
                    "that the sum grows as the square of their number; damp that by a "
                    "number below 1, as in v = 0.9 * v + f(x); x = x + v, with v = "
                    "jnp.zeros_like(x) before the first layer, or multiply "
                    "it: v = v + f(x); x = x + (base depth / depth) * v"
                )

    def _counted(self) -> list[Branch]:
        """The target's branches whose number is the depth of their stream.

        Notes the ratio of each, if it is not 1.
        """
        groups = self._pair.kinds(
            lambda m: [((m.names(b), m.holds(b)), b) for b in m.branches.all]
        )
        grown = {key for key, kind in groups.items() if kind.growth != 1}
        if not grown:
            return self._large.outermost(self._large.branches.all)
        # What stands once in both, e.g. in the stem, is no depth, unless it is added by
        # the code of deep branches, or between them; nor is what is around others, as
        # the skips of a U-Net.
        deep = [b for key in grown for b in groups[key].now]
        spots = {b.add.spot for b in deep if b.add.line}
        ends = [(x[0], x[-1]) for x in (groups[key].now for key in grown) if x]
        outer = self._large.outermost(deep)

        def is_around(b: Branch) -> bool:
            left = self._large.outermost([*deep, b])
            return any(x not in left for x in outer)

        def is_between(b: Branch) -> bool:
            """Whether it stands between layers of a kind, e.g. in the first of them."""
            trunks = {x.id for x in reach([b.trunk], lambda x: x.operands)}
            return any(
                first.add.id in trunks
                and any(x is b.add for x in reach([last.trunk], lambda x: x.operands))
                for first, last in ends
            )

        # Nor what is added between them by code that also adds before or after them.
        single = [b for key, x in groups.items() if key not in grown for b in x.now]
        single = [b for b in single if b.add.line and b.add.spot not in spots]
        apart = {b.add.spot for b in single if not is_between(b)}
        kept = [
            kind
            for key, kind in groups.items()
            if key in grown
            or (
                any(
                    b.add.spot in spots or (b.add.spot not in apart and is_between(b))
                    for b in kind.now
                )
                and not any(map(is_around, kind.now))
            )
        ]
        streams = self._deep_streams(
            self._small.outermost([b for kind in kept for b in kind.then]),
            self._large.outermost([b for kind in kept for b in kind.now]),
        )
        for stream in streams:
            before, after = stream.numbers
            first = min(stream.then, key=place)
            if not after:
                raise ValueError(
                    f"the target has no branch like the {first.label} of the base; "
                    "build both by the same code"
                )
            if after < before and not self._pair.fractional:
                raise ValueError(
                    f"the target has {after} residual additions and the base {before} "
                    f"({first.add.line}); the base comes first: swap the two, or pass "
                    "fractional=True if the target is meant to be shallower"
                )
            for b in stream.now:
                few, many = (_beside(b, x) for x in (stream.then, stream.now))
                if 0 < few < many:
                    raise ValueError(
                        f"{many} branches like the {b.label} read the same value in "
                        f"the target, and {few} in the base, so they are not layers; "
                        "add them up first: x = x + sum(branches)"
                    )
            growth = self._growth(stream, streams)
            self.ratios |= dict.fromkeys(map(id, stream.now), growth)
        return sorted((b for stream in streams for b in stream.now), key=place)

    def _growth(self, stream: Kind[Branch], streams: list[Kind[Branch]]) -> float:
        """How much deeper a stream gets, or one that it exchanges values with.

        The latter if it only lacks additions of one layer, e.g. of the last.
        """
        before, after = stream.numbers
        lacking = range(1, len({b.add.spot for b in stream.now}) + 1)
        whole = [(after + n) / (before + n) for n in lacking if before]

        def reads(one: Kind[Branch], other: Kind[Branch]) -> bool:
            first, last = min(other.now, key=place), max(one.now, key=place)
            return any(x is first.add for x in reach([last.end], lambda x: x.operands))

        for other in streams:
            fits = any(alike(x, other.growth) for x in whole)
            if fits and reads(stream, other) and reads(other, stream):
                return other.growth
        return stream.growth

    def _deep_streams(
        self, small: list[Branch], large: list[Branch]
    ) -> list[Kind[Branch]]:
        """The branches of both models, by stream, of the streams that get deeper.

        Stages whose branches the same code adds count as one stream, but for those that
        a kernel without a skip separates and that do not get deeper.
        """
        deep: list[Kind[Branch]] = []
        number: dict[Key, int] = {}
        for _ in range(2):
            number = self._streams(sorted(large, key=place), number)
            streams: dict[int | None, Kind[Branch]] = {}
            for b in large:
                at = number[self._large.kind(b)]
                streams.setdefault(at, Kind([], [])).now.append(b)
            for b in small:
                key = self._small.kind(b)
                # Else the stream of branches with its parameters on another line.
                like = [at for (_, names), at in number.items() if names & key[1]]
                found = number.get(key, min(like, default=None))
                streams.setdefault(found, Kind([], [])).then.append(b)
            deep = [stream for stream in streams.values() if stream.growth != 1]
            large = [b for stream in deep for b in stream.now]
            small = [b for stream in deep for b in stream.then]
        for stream in deep:
            known = {self._small.names(b) for b in stream.then}
            for b in stream.now:
                if self._large.names(b) not in known:
                    raise ValueError(
                        f"the base has no branch like the {b.label} of the target; "
                        "build a base with at least two blocks of each kind"
                    )
        return deep

    def _streams(
        self, branches: list[Branch], apart: Mapping[Key, int]
    ) -> dict[Key, int]:
        """The number of the stream of each kind of branch.

        A stream is that of a chain of branches: a decoder reads the encoder's within
        its branches, and has its own. So has one whose stream starts with the encoder's
        results beside tokens of its own.

        Args:
          branches: of the target, in the order of the program.
          apart: the streams that kernels outside of branches separate, of which those
            of the same code are one; none if these streams are to be found.
        """
        kind_at = {b.add.id: self._large.kind(b) for b in branches}
        axes = self._large.axes
        follows = {x.id for x in reach([b.add for b in branches], axes.uses)}

        def sources(node: Node) -> list[Node]:
            if node.id in kind_at or (not apart and self._large.is_kernel(node)):
                return []
            at, parts = node.params.get("dimension"), earlier(node)
            units = at is not None and any(axes.entries(x)[at] for x in node.operands)
            if units or node.op not in ("concatenate", "select_n", "scatter"):
                return parts
            parts = parts[1:] if node.op == "select_n" else parts
            parts = parts[::2] if node.op == "scatter" else parts
            return parts if all(x.id in follows for x in parts if x.data) else []

        code: dict[int, set[Hashable]] = {}
        for (spot, _), stream in apart.items():
            code.setdefault(stream, set()).add(spot)
        found: dict[Key, int] = {}
        for i, b in enumerate(branches):
            own = kind_at[b.add.id]
            chain = [
                kind_at[x.id] for x in reach([b.trunk], sources) if x.id in kind_at
            ]
            one = (x for x in chain if not apart or code[apart[x]] & code[apart[own]])
            linked = {own, *one}
            same = {found[key] for key in linked & found.keys()}
            linked |= {key for key, number in found.items() if number in same}
            found |= dict.fromkeys(linked, i)
        return found

    def _added(self, counted: list[Branch]) -> list[Branch]:
        """The target's terms of sums whose number grows. Notes the ratio of numbers.

        From here on they are branches of both models.
        """
        small, large = (m.numbers() for m in (self._small, self._large))
        groups = self._pair.kinds(Facts.most_terms)
        ratios: dict[int, float] = {}
        for key, kind in groups.items():
            before, after = small[key], large[key]
            terms = [b for b in kind.now if b.add.id not in self._pair.sides[1].adds]
            new = [b for b in terms if not any(b.add.id in x.inside for x in counted)]
            if before == after or not new:
                continue
            if before:
                ratios |= dict.fromkeys(map(id, new), after / before)
                self._small.branches.all += kind.then
                self._large.branches.all += kind.now
            elif new[0].layers and after > 1:
                raise ValueError(
                    f"the {new[0].label} is one of {after} in the target, and the base "
                    "has no such sum; build a base with at least two of these layers"
                )
        for model in (self._small, self._large):
            model.branches.all.sort(key=place)
        added = [b for b in self._large.branches.all if id(b) in ratios]
        # Terms that are divided by their number, unless all branches are, too.
        means = [
            b
            for b, like, constant in self._pair.branches(added)
            if like and alike(constant, 1 / ratios[id(b)])
        ]
        if means and counted:
            ratio = ratios[id(means[0])]
            streams = [x for _, like, x in self._pair.branches(counted) if like]
            if streams and all(alike(x, 1 / ratio) for x in streams):
                means = []
        self.averaged = means
        self._large.branches.all = [
            b for b in self._large.branches.all if b not in means
        ]
        added = [b for b in added if b not in means]
        self.ratios |= {id(b): ratios[id(b)] for b in added}
        return added

    def _find_inside(self, counted: list[Branch]) -> dict[str, float]:
        """The parameters inside residual branches, and the depth ratio of each.

        Raises:
          ValueError: it is in branches of streams that get deeper by different factors.
        """
        after, before = (m.branches.around for m in (self._large, self._small))
        numbers = [sum(b.add.runs for b in each) for each in (after, before)]
        acts: dict[str, list[Branch]] = {}
        model = self._large
        own = [b for b in model.branches.all if b.trunk is not b.end]
        streams = model.on_streams(own)
        # A branch may read another stream, and the gains that act on that. Those after
        # its last addition act as the others, if other code reads the stream, too.
        on = {
            path
            for path in {path for b in counted for path in model.paths(b)}
            if {x.node.id for x in model.events(path)} <= streams
        }
        names = set(map(model.opened, on))
        for b in counted:
            for path in model.paths(b):
                last = model.opened(path) in names and not model.fed(counted, path)
                if path not in on and not last:
                    acts.setdefault(path, []).append(b)
        small = self._pair.like(counted)
        for path in acts.keys() - self._pair.deeper.keys():
            few = self._small.spread(small, self._pair.twin[path])
            if not model.spread(counted, path) <= few < math.inf:
                del acts[path]  # all layers read what it makes of the stream's start

        @functools.cache
        def is_condition(name: str) -> bool:
            """Whether it acts through as many branches in the base, e.g. of one block.

            What all blocks share acts through more of them, and the norms of a stream
            that other streams read act through other numbers each.
            """
            return model.all_fed(counted, name) == self._small.all_fed(small, name)

        for path in self._pair.leaves.keys() - acts.keys():
            now = model.fed(counted, path)
            if now and is_condition(model.opened(path)):
                acts[path] = now[1]
        found = {path: self._ratio_of(path, acts[path]) for path in acts}
        if numbers[0] != numbers[1]:
            for path in (p for b in after for p in self._large.paths(b)):
                found.setdefault(path, self.largest)
        self._find_repeated(found, counted, small)
        return found

    def _find_repeated(
        self, inside: Mapping[str, float], counted: list[Branch], small: list[Branch]
    ) -> None:
        """Find what all layers share, and what acts on a stream itself in each."""
        # Some layers of a stream may be as many in the base, e.g. in its middle.
        kinds = self._pair.kinds(lambda m: [(m.names(b), b) for b in m.branches.all])
        ratios = [m for m in self.ratios.values() if not alike(m, 1)]
        growths = [kind.growth for kind in kinds.values()]
        depths = [*ratios, *(m for m in growths if not alike(m, 1))]
        opened, large, base = self._pair.opened, self._large, self._small
        within = large.inside(counted), base.inside(small)
        outside = large.outside(counted), base.outside(small, ahead=False)
        # Those of a name that are outside of branches: more than the first layer's.
        rest = self._pair.leaves.keys() - inside.keys()
        names = set(map(opened, inside))
        before = {x for x in base.reading.leaves if opened(x) not in names}
        before |= {self._pair.twin[path] for path in rest}
        alone = (
            large.outside(counted, rest),
            base.outside(small, before, ahead=False),
        )
        apart: dict[int, str] = {}  # kernels outside of branches, whose number grows
        for path in self._pair.leaves:
            counts = within if path in inside else outside
            now, then = (x.get(opened(path)) for x in counts)
            if not (now and then):
                continue
            uses, layers = now[0] / then[0], now[1] / then[1]
            is_shared = alike(layers, 1)  # one for all layers
            if path in inside:
                if is_shared and not alike(uses, 1):
                    self.shared[path] = inside[path]
                continue
            own, few = (x.get(opened(path)) for x in alone)
            if own != few:
                used = (e.node for e in large.events(path))
                apart |= {x.id: path for x in used if large.is_kernel(x)}
            if own != few and any(alike(uses, m) for m in depths):
                near = min((abs(math.log(m / uses)), m) for m in ratios or [uses])
                self.on_stream[path] = near[1]
                self.shared[path] = uses if is_shared else 1.0

        self._check_no_stack(apart, {b.add.id for b in counted})

    def _check_no_stack(self, kernels: Mapping[int, str], adds: Set[int]) -> None:
        """Raise a `ValueError` if several kernels in a row are between branches."""
        stops = adds | kernels.keys()

        def values(x: Node) -> list[Node]:  # but for the condition of a choice
            return [] if x.id in stops else x.operands[x.op == "select_n" :]

        for node in self._large.reading.program.nodes:
            sources = node.operands if node.id in kernels else []
            for x in reach(sources, values):
                if x.id in kernels:
                    raise ValueError(
                        f"{kernels[x.id]!r} ends a residual network and "
                        f"{kernels[node.id]!r} ({node.line}) starts the next, and the "
                        "target has more such networks; build both with as many, and "
                        "let only the layers within each grow"
                    )

    def _ratio_of(self, path: str, branches: list[Branch]) -> float:
        """The depth ratio of the branches that a parameter is in."""
        # A layer's branch, rather than what it adds to a sum over layers.
        own = [b for b in branches if b.trunk is not b.end] or branches
        first, *rest = own
        other = next((b for b in rest if not alike(*map(self.of, (b, first)))), None)
        if other is not None:
            raise ValueError(
                f"{path!r} is in the {first.label}, whose stream gets "
                f"{self.of(first):g} times as deep, and in the {other.label}, whose "
                f"gets {self.of(other):g} times as deep, so that it needs two "
                "multipliers; build a base whose streams have the same ratio of depths "
                "to the target's"
            )
        return self.of(first)

    def _check_only_sums_deepen(self, added: list[Branch]) -> None:
        """Raise a `ValueError` if layers that are no terms of a sum are in a row."""
        inside = self._find_inside(added)
        for path, ratio in self._pair.deeper.items():
            if path not in inside:
                raise ValueError(
                    f"the target has {ratio:g} times as many layers like {path!r} as "
                    f"the base and adds their results up (the {added[0].label}), but "
                    "has no residual branch: x + f(x). Build both with the same depth, "
                    "or add each layer to its input: x = x + f(x)"
                )

    def plain(self, point: Parametrization | None) -> float:
        """The depth ratio of layers without residual branches."""
        path, ratio = next(iter(self._pair.deeper.items()))
        if point is None or (point.branches_only and point.name not in ("sp", "mup")):
            raise ValueError(
                f"the target has {ratio:g} times as many layers like {path!r} as the "
                "base, and no residual stream x + f(x) gets deeper. Where gates g "
                "shrink x, write x + c * (g * (f(x) - x)) with c = base depth / depth; "
                "for layers without residual branches, pass parametrization='mup', or "
                "build both with the same depth"
            )
        return ratio


def _beside(branch: Branch, every: list[Branch]) -> int:
    """How many branches at one place read the same value, if others read another."""
    spot = branch.add.spot
    numbers = Counter(b.trunk.id for b in every if b.add.spot == spot)
    return min(numbers.values()) if len(numbers) > 1 else 0
