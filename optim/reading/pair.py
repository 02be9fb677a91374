"""Base and target side by side: which parameters, layers and branches correspond."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..scales.declare import Declarations
from .branches import Branch
from .facts import Facts
from .growth import Shapes, twin
from .kinds import Kind, kinds
from .lists import Pairing
from .models import Reading
from .parallel import Parallel, numbers
from .program import Node
from .segments import segmented

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Pair:
    """Base and target, and what of one corresponds to what of the other.

    Args:
      readings: of the base, of the target, and of a model of other widths than the
        base's, if there is one.
      given: parameters whose axes the user declared.
      fractional: whether ratios need not be whole numbers.

    Attributes:
      large, small: the target and the base.
      leaves: the parameters of the target.
      parts: joins the scales of segments.
      twin: {path: that of its counterpart in the base}.
      shapes: of each parameter in the base, in the target, and with other widths.
      growth: the axes of each parameter that grow.
      opened: names a parameter alike in all blocks.
      counts_layers: whether a parameter holds one number for each layer.
      sides: the kernels of base and target that act side by side.
      beside: the growth of their number, in the fan-in and fan-out of a parameter.
    """

    def __init__(
        self,
        readings: Sequence[Reading],
        given: Declarations,
        fractional: bool,
    ):
        base, target, *delta = readings
        large, others, self.parts = segmented(target, [base, *delta], given)
        self.fractional = fractional
        self.leaves, small = large.leaves, others[0].leaves
        wide = others[1].leaves if len(others) > 1 else large.leaves
        to_small, to_wide = (Pairing(self.leaves, x) for x in (small, wide))
        self.opened, self.counts_layers = to_small.opened, to_small.counts_layers
        self.twin: dict[str, str] = {}
        self.shapes: dict[str, Shapes] = {}
        growths: tuple[dict[str, frozenset[int]], ...] = {}, {}
        for path, leaf in self.leaves.items():
            one = twin(path, to_small, small, self.leaves, "base")
            other = twin(path, to_wide, wide, self.leaves, "delta")
            before, after = small[one].shape, wide[other].shape
            axes = frozenset(a for a, n in enumerate(before) if n != after[a])
            self.twin[path], self.shapes[path] = one, (before, leaf.shape, after)
            for growth, name in zip(growths, (path, one), strict=True):
                growth[name] = axes | growth.get(name, frozenset())
        self.growth = growths[0]
        sizes = [
            {(x.spot, x.shape[-1]) for x in m.program.nodes if x.op == "top_k"}
            for m in (large, others[0])
        ]
        few = {spot for spot, _ in sizes[0] & sizes[1]}
        self.large = Facts(large, given, growths[0], self.opened, few)
        # Also of blocks beside the first of their kind.
        like = {self.opened(name): axes for name, axes in growths[1].items()}
        like |= growths[1]
        growth = {x: like.get(x, like.get(self.opened(x), frozenset())) for x in small}
        self.small = Facts(others[0], given, growth, self.opened, few)
        now, then = (m.kernels() for m in (self.large, self.small))
        names = frozenset(x for x in now if now[x] != then[x])
        self.sides = [
            Parallel(m.reading, m.axes, m.branches, m.totals, self.opened, names)
            for m in (self.small, self.large)
        ]
        self.beside = numbers(*self.sides)
        for path, one in self.twin.items():
            heads = self.large.heads_within(path), self.small.heads_within(one)
            if all(heads) and heads[0] != heads[1]:
                more = heads[0] / heads[1]
                into, out = self.beside.get(path, (1.0, 1.0))
                self.beside[path] = into / more, out * more

    def kinds(self, of: Callable[[Facts], Iterable[tuple[K, T]]]) -> dict[K, Kind[T]]:
        """What base and target have, by kind; `of` gives pairs (kind, thing)."""
        return kinds(of(self.small), of(self.large))

    @functools.cached_property
    def deeper(self) -> dict[str, float]:
        """Parameters of layers that the base has fewer of: {path: ratio}."""
        ratios: dict[str, float] = {}
        lists = self.kinds(
            lambda m: [(self.opened(path), path) for path in m.reading.leaves]
        )
        for kind in lists.values():
            if len(kind.now) != len(kind.then):
                ratio = len(kind.now) / len(kind.then)
                deeper = [path for path in kind.now if path not in self.beside]
                ratios |= dict.fromkeys(deeper, ratio)
        for path, role in self.large.roles.items():
            small, large, _ = self.shapes[path]
            stacked = self.large.layer_axes(path) & {*(role.copies if role else ())}
            ratio = math.prod(large[a] / small[a] for a in stacked)
            if ratio != 1 and path not in self.beside:
                ratios[path] = ratio
        return ratios

    def like(self, chosen: list[Branch]) -> list[Branch]:
        """The branches of the base with parameters like those of the target's."""
        names = {self.large.names(b) for b in chosen}
        found = [b for b in self.small.branches.all if self.small.names(b) in names]
        outer = self.small.outermost(found)
        return [b for b in found if b in outer or b.trunk is b.end]

    def branches(
        self, chosen: list[Branch]
    ) -> list[tuple[Branch, Branch | None, float]]:
        """Branches, their counterparts in the base, and the ratios of constants."""
        grouped = kinds(
            (
                ((self.small.kind(b), self.small.evaluated(b)), b)
                for b in self.like(chosen)
                if b.constant
            ),
            (((self.large.kind(b), self.large.evaluated(b)), b) for b in chosen),
        )
        found: dict[int, tuple[Branch, Branch | None, float]] = {
            id(b): (b, None, 1.0) for b in chosen
        }
        for kind in grouped.values():
            ratios = kind.ratios(lambda now, then: now.constant / then.constant)
            if ratios:
                kind.check_known(ratios, kind.now[0].add)
            for (now, then), ratio in zip(kind.twins, ratios, strict=True):
                found[id(now)] = now, then, ratio
        return [*found.values()]


def check_loops(pair: Pair) -> None:
    """Raise a `ValueError` if a loop over layers has no number of its own.

    Their number may be that of an input, which is the same for base and target.
    """
    for (_, axis), kind in pair.kinds(_numbered).items():
        for (path, now), (_, then) in kind.twins:
            small, large = (x.operands[0].shape[axis] for x in (then, now))
            if small == large or then.runs != now.runs:
                continue
            raise ValueError(
                f"a loop takes layer after layer of {path!r} ({now.line}), of "
                f"which the base has {small} and the target {large}, but its "
                "number of iterations is an input or is not known; let each model "
                "count its own layers, e.g. jax.lax.scan(f, x, "
                "jnp.arange(len(w))) for the stacked weights w"
            )


def _numbered(model: Facts) -> Iterator[tuple[tuple[str, int], tuple[str, Node]]]:
    """Where loops take kernels of a stack one by one: ((name, axis), (path, node))."""
    program = model.reading.program
    for node in program.nodes:
        if node.op not in ("dynamic_slice", "gather") or not node.loop:
            continue
        stack, *indices = node.operands
        if stack.param is None or not any(map(program.is_counted, indices)):
            continue
        shape, sizes = stack.shape, node.params["slice_sizes"]
        taken = [a for a, n in enumerate(sizes) if n == 1 and shape[a] != 1]
        if len(taken) == 1 and sum(n > 1 for n in sizes) > 1:
            path = model.reading.path_of[stack.param]
            yield (model.opened(path), taken[0]), (path, node)
