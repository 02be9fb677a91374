"""The value of the base for each of the target: the same function of the same."""

from collections.abc import Hashable, Iterator, Sequence, Set

from .facts import Facts
from .kinds import Kind
from .pair import Pair
from .program import Node, earlier

Place = tuple[int, Kind[Node]]  # the number of a value among those of its kind


def twins(pair: Pair) -> dict[int, Node]:
    """The value of the base for each of the target, by its id.

    Of layers, which the base may have fewer of, parameters say which are the same.
    """
    small, large, kinds = pair.small, pair.large, _kinds(pair)
    found = {large.param(p).id: small.param(one) for p, one in pair.twin.items()}
    for node in large.reading.program.nodes:
        i, kind = kinds.get(node.id, (0, Kind([], [])))
        if len(kind.then) == len(kind.now):
            found |= {node.id: kind.then[i]} if kind.then else {}
            continue
        before = [found.get(x.id) for x in node.operands]
        like = [x for x in kind.then if _may_be(before, x)]
        if len({x.shape for x in like}) > 1:
            like = [x for x in like if x.shape == node.shape]
        # What comes of values without a counterpart has none, if there are stages.
        known = all(x.id in found for x in earlier(node) if x.op != "literal")
        if like and (known or len({x.shape for x in kind.then}) == 1):
            found[node.id] = max(like, key=lambda x: _same(before, x))
    for node in large.reading.program.nodes:  # arrays say nothing of themselves
        twin = found.get(node.id)
        pairs = zip(node.operands, twin.operands, strict=True) if twin else ()
        for x, like_x in pairs:
            if x.op == like_x.op == "literal":
                found.setdefault(x.id, like_x)
    return found


def _kinds(pair: Pair) -> dict[int, Place]:
    """The kind of each value of the target."""
    sides = dict(zip((pair.small, pair.large), pair.sides, strict=True))
    every = pair.kinds(lambda model: _computed(model, sides[model].adds)).values()
    return {x.id: (i, kind) for kind in every for i, x in enumerate(kind.now)}


def _may_be(before: Sequence[Node | None], node: Node) -> bool:
    """Whether operands have the shapes of those of a node."""
    pairs = zip(before, node.operands, strict=True)
    return all(x is None or x.shape == y.shape for x, y in pairs)


def _same(before: Sequence[Node | None], node: Node) -> int:
    """How many operands are those of a node; the last count most."""
    pairs = zip(before, node.operands, strict=True)
    return sum(x.id + 1 for x, y in pairs if x is y)


def _computed(model: Facts, adds: Set[int]) -> Iterator[tuple[int, Node]]:
    """The values of a program, each with a number for how it is computed from streams.

    Or from sums of kernels side by side (`adds`), or from parameters, of which those of
    one name in all blocks count as one.
    """
    branches = *model.branches.all, *model.branches.around
    streams = {b.add.id for b in branches} | adds
    found: dict[int, int] = {}
    for node in model.reading.program.nodes:
        # What layers leave out at random is a stream, too.
        if node.op == "select_n" and any(x.id in streams for x in node.operands[1:]):
            streams.add(node.id)
        how: list[Hashable] = [node.op, len(node.shape), node.params.get("y")]
        if node.param is not None:
            how.append(model.opened(model.reading.path_of[node.param]))
        elif node.op != "literal":
            how.append(node.spot)
        if node.id not in streams:
            how += [found[x.id] for x in earlier(node)]
        found[node.id] = hash(tuple(how))
        if node.op not in ("param", "literal"):
            yield found[node.id], node
