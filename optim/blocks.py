"""Depth: which parameters stand in blocks, and how two depths correspond."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping

from . import names
from .leaves import Leaf
from .lists import Pairing
from .patterns import Pattern

Depth = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the blocks of a target relate to those of its base.

    Attributes:
      ratio: depth ratio M.
      inside: paths of the parameters inside residual branches.
      stacked: paths of the parameters of which an axis counts blocks.
      listed: paths of the parameters in lists of blocks.
    """

    ratio: float = 1.0
    inside: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Question:
    """What `find_blocks` is asked, and of which models.

    Attributes:
      small: parameters of the base.
      large: parameters of the target.
      pairing: which parameter of the base is like which of the target.
      depth: number of blocks of each.
      layers_axis: the axes that count blocks where they are stacked.
      copies: axes that count copies, of the parameters whose axes the user gave.
    """

    small: Mapping[str, Leaf]
    large: Mapping[str, Leaf]
    pairing: Pairing
    depth: Depth
    layers_axis: tuple[int, ...]
    copies: Mapping[str, tuple[int, ...]]

    def layers(self, path: str) -> Depth | None:
        """How many blocks a parameter stacks, in base and target, if it may."""
        twin = self.pairing.twin(path)
        axes = self.copies.get(path, self.layers_axis)
        if twin is None or not axes:
            return None
        small, large = self.small[twin].shape, self.large[path].shape
        if len(small) != len(large) or max(axes) >= len(large):
            return None
        if path in self.copies:
            # Of layers and experts, whose axes are both copies, one counts layers.
            for axis in axes:
                if (small[axis], large[axis]) == tuple(self.depth):
                    return self.depth
        return math.prod(small[a] for a in axes), math.prod(large[a] for a in axes)


def find_blocks(
    ask: Question, branch: str | None, stream: str | None, *, told: bool
) -> Blocks:
    """The blocks of a base and a target, either listed or stacked.

    Blocks are a list where the deeper model has paths that the other lacks
    (`blocks/7/kernel`), else a leading axis of the parameters in branches.

    Args:
      ask: the models and their depths.
      branch: regular expression of the paths in residual branches; None if the
        model has none.
      stream: regular expression of those that stand outside nevertheless.
      told: whether `depth` was given.

    Raises:
      ValueError: `branch` matches nothing, a parameter outside the blocks, or not
        all of the blocks; `depth` is not that of the models.
    """
    within, without = Pattern("branch", branch), Pattern("stream", stream)
    matched = [path for path in ask.large if within.matches(path)]
    outside = frozenset(path for path in ask.large if without.matches(path))
    within.check(ask.large)
    without.check(ask.large)
    inside = frozenset(matched) - outside
    if not told:
        return Blocks(1.0, inside)
    ratio = ask.depth[1] / ask.depth[0]
    if branch is None:
        return _without_branches(ask, ratio)
    if ask.depth[0] == ask.depth[1] and ask.large.keys() == ask.small.keys():
        return _of_equal_depth(ask, ratio, inside, outside)
    if ask.large.keys() == ask.small.keys():
        heads = frozenset[str]()
    else:
        heads = _growing_lists(ask, inside, outside)
    listed = frozenset(p for p in ask.large if ask.pairing.block_of(p, heads))
    stacked = frozenset[str]()
    if not inside <= listed:
        stacked = frozenset(
            p for p in ask.large if p not in listed and _counts_layers(ask, p)
        )
        if not inside <= stacked | listed and _stages(ask, inside - listed):
            stacked |= inside - listed
        stacked -= _as_wide_as_deep(ask, inside, stacked - inside - outside)
    _check_members(ask, inside, listed, stacked, heads)
    _check_forgotten_in_lists(ask, inside, outside, listed, heads)
    _check_forgotten_in_stacks(ask, inside, outside, stacked)
    base = [p for p in ask.small if within.matches(p) and not without.matches(p)]
    _check_count(ask, base, inside, heads)
    return Blocks(ratio, inside, stacked, listed)


def check_depth(depth: object, fractional: bool) -> None:
    """Raise a `ValueError` unless `depth` is (base depth, target depth)."""
    if isinstance(depth, int | float) and not isinstance(depth, bool):
        raise ValueError(
            f"depth={depth!r} must be (base depth, target depth): pass "
            f"depth=({depth}, {depth}) if both models have that many blocks"
        )
    if not (
        isinstance(depth, tuple | list)
        and len(depth) == 2
        and all(isinstance(d, int | float) and d > 0 for d in depth)
        and all(math.isfinite(d) for d in depth)
    ):
        raise ValueError(
            f"depth={depth!r} must be (base depth, target depth), both positive"
        )
    if depth[1] < depth[0] and not fractional:
        raise ValueError(
            f"depth={depth!r} shrinks; the base comes first. If the target is meant "
            "to be shallower, pass fractional=True"
        )


def _growing_lists(
    ask: Question, inside: Collection[str], outside: Collection[str]
) -> frozenset[str]:
    """Names of the lists of blocks, with open numbers."""
    growing = ask.pairing.growing()
    every = frozenset(growing.values())
    found = {ask.pairing.block_of(p, every) for p in inside}
    covered = {block[0] for block in found if block}
    chosen = frozenset(map(names.open_numbers, covered))
    if not chosen and growing:
        raise ValueError(_not_a_member(min(inside), every, ask.depth))
    for path in sorted(set(ask.large) - set(inside) - set(outside)):
        block = ask.pairing.block_of(path, every)
        if block and block[0] in growing and block[0] not in covered:
            raise ValueError(_left_out(ask, path, block[0], chosen))
    return chosen


def _left_out(ask: Question, path: str, head: str, chosen: Collection[str]) -> str:
    name = [names.open_numbers(head)]
    few, many = (
        _counts(ask, [p for p in paths if p.startswith(head)], name).get(head, 0)
        for paths in (ask.small, ask.large)
    )
    return (
        f"branch matches the list {_shown(chosen)} and not {head + '#'!r} (with "
        f"{path!r}), which grows from {few} to {many}: let branch match all blocks, "
        f"and all lists grow by one ratio; or pass stream=r'^{re.escape(head)}' if the "
        "parameters of this list are in no residual branch"
    )


def _check_count(
    ask: Question,
    base: Collection[str],
    target: Collection[str],
    lists: Collection[str],
) -> None:
    """Raise where the lists of blocks do not grow as `depth` says."""
    before, after = (_counts(ask, paths, lists) for paths in (base, target))
    pairs = {head: (before.get(head, 0), many) for head, many in after.items()}
    if not pairs:
        return
    totals = {}
    for name in lists:
        same = [p for head, p in pairs.items() if names.open_numbers(head) == name]
        total = (sum(few for few, _ in same), sum(many for _, many in same))
        totals[name] = same[0] if len(set(same)) == 1 and same else total
    every = (sum(few for few, _ in pairs.values()), sum(n for _, n in pairs.values()))
    depth = tuple(ask.depth)
    ratios = {few * depth[1] == many * depth[0] for few, many in totals.values()}
    if ratios == {True} and (depth == every or depth in totals.values()):
        return
    grown = ", ".join(
        f"of {head + '#'!r} the base has {few} and the target {many}"
        for head, (few, many) in sorted(pairs.items())
    )
    right = next(iter(totals.values())) if len(set(totals.values())) == 1 else every
    remedy = f"pass depth={right}"
    if any(few * right[1] != many * right[0] for few, many in totals.values()):
        remedy = "let all lists of blocks grow by one ratio"
    raise ValueError(f"depth={ask.depth!r}, but {grown}; {remedy}")


def _counts(
    ask: Question, paths: Collection[str], lists: Collection[str]
) -> dict[str, int]:
    """Number of blocks of each list, of which a parameter is among the paths."""
    blocks = {ask.pairing.block_of(p, lists) for p in paths}
    found: dict[str, int] = {}
    for head, _ in filter(None, blocks):
        found[head] = found.get(head, 0) + 1
    return found


def _counts_layers(ask: Question, path: str) -> bool:
    """Whether the layers' axis of a parameter grows as depth does."""
    return ask.depth[0] != ask.depth[1] and ask.layers(path) == tuple(ask.depth)


def _check_members(
    ask: Question,
    inside: Collection[str],
    listed: Collection[str],
    stacked: Collection[str],
    heads: Collection[str],
) -> None:
    """Raise where `branch` matches a parameter that is in no block."""
    strays = sorted(p for p in inside if p not in listed and p not in stacked)
    if strays and heads:
        raise ValueError(_not_a_member(strays[0], heads, ask.depth))
    if strays:
        raise ValueError(_not_a_stack(ask, strays[0], inside))
    within = sorted(p for p in inside if p in stacked and p not in ask.copies)
    stacks = any(len(ask.large[p].shape) > 2 for p in within)
    for path in within:
        _check_distinct(ask, path, stacks=stacks)


def _check_distinct(ask: Question, path: str, *, stacks: bool) -> None:
    """Raise where the width of a stacked parameter grows as the depth does."""
    pairs = _sizes(ask, path)
    others = [p for a, p in enumerate(pairs) if a not in ask.layers_axis]
    # A stacked kernel has three axes; (n, n) may be one kernel, and (n,) one bias.
    one = len(pairs) == 1 and names.is_vector(path)
    if one or (tuple(ask.depth) in others and not stacks):
        raise ValueError(
            f"depth={ask.depth!r} is also how the width of {path!r} grows, so that "
            "the two cannot be told apart; choose a base of another width"
        )


def _stages(ask: Question, inside: Collection[str]) -> bool:
    """Whether the parameters are stacked stage by stage, of the depth in all."""
    prefix = len(_common_prefix([names.parts(p) for p in inside]))
    stages: dict[str, set[Depth | None]] = {}
    for path in inside:
        component = names.parts(path)[prefix : prefix + 1]
        stages.setdefault("".join(component), set()).add(ask.layers(path))
    counts = [next(iter(found)) for found in stages.values() if len(found) == 1]
    if len(stages) < 2 or len(counts) != len(stages) or None in counts:
        return False
    pairs = [pair for pair in counts if pair is not None]
    total = (sum(few for few, _ in pairs), sum(many for _, many in pairs))
    return total == tuple(ask.depth)


def _common_prefix(paths: list[list[str]]) -> list[str]:
    first, last = min(paths), max(paths)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def _not_a_stack(ask: Question, path: str, inside: Collection[str]) -> str:
    twin = ask.pairing.twin(path) or path
    small, large = ask.small[twin].shape, ask.large[path].shape
    shapes = f"of shape {small} in the base and {large} in the target"
    remedy = (
        "let branch=r'...' match the parameters of the blocks only, and depth be "
        "their number"
    )
    counts = {ask.layers(p) for p in inside}
    if len(counts) == 1 and None not in counts:
        (few, many) = next(c for c in counts if c)
        if few * ask.depth[1] == many * ask.depth[0] and few != many:
            remedy = f"pass depth=({few}, {many}) if its first axis counts the blocks"
    for axes in ((0,), (1,), (0, 1), (2,)):
        other = dataclasses.replace(ask, layers_axis=axes)
        counted = {other.layers(p) for p in inside if p not in ask.copies}
        if axes != ask.layers_axis and counted == {tuple(ask.depth)}:
            shown = axes[0] if len(axes) == 1 else axes
            remedy = f"pass layers_axis={shown}, which counts the blocks"
    return (
        f"depth={ask.depth!r}, but {path!r}, {shapes}, is neither in a list of blocks "
        f"of that depth nor does its axis {', '.join(map(str, ask.layers_axis))} count "
        f"them (a block that is applied repeatedly with the same weights is none); "
        f"{remedy}"
    )


def _shown(heads: Collection[str]) -> str:
    return ", ".join(repr(head + "#") for head in sorted(heads))


def _not_a_member(path: str, heads: Collection[str], depth: Depth) -> str:
    starts = [re.escape(head).replace(r"\#", r"\d+") for head in sorted(heads)]
    lists = _shown(heads)
    start = starts[0] if len(starts) == 1 else f"({'|'.join(starts)})"
    return (
        f"branch matches {path!r}, which is not in a list of blocks that grows with "
        f"depth={depth!r}; the lists that grow are {lists}. Match the blocks only: "
        f"branch=r'^{start}\\d+'"
    )


def _check_forgotten_in_lists(
    ask: Question,
    inside: Collection[str],
    outside: Collection[str],
    listed: Collection[str],
    heads: Collection[str],
) -> None:
    """Raise where `branch` leaves out parameters of the blocks."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for path in inside:
        opened = names.open_numbers(path)
        shapes.setdefault(opened, set()).add(ask.large[path].shape)
    for path in sorted(set(listed) - set(inside) - set(outside)):
        same = shapes.get(names.open_numbers(path))
        forgotten = same is None or ask.large[path].shape in same
        if forgotten and not names.on_skip(path):
            raise ValueError(_forgotten(path, f"which is in the list {_shown(heads)}"))


def _check_forgotten_in_stacks(
    ask: Question,
    inside: Collection[str],
    outside: Collection[str],
    stacked: Collection[str],
) -> None:
    few, many = ask.depth
    for path in sorted(set(stacked) - set(inside) - set(outside)):
        raise ValueError(
            _forgotten(path, f"whose layers grow from {few} to {many} as depth does")
            + "; if that is its width, choose a base of another width or depth"
        )


def _as_wide_as_deep(
    ask: Question, inside: Collection[str], paths: Collection[str]
) -> frozenset[str]:
    """Parameters outside of branches whose width is that of the blocks.

    Where width grows as depth does, their one axis of that size is explained.
    """
    depth = (ask.depth[0], ask.depth[1])
    if not any(_sizes(ask, p).count(depth) > 1 for p in inside):
        return frozenset()
    return frozenset(p for p in paths if _sizes(ask, p).count(depth) == 1)


def _sizes(ask: Question, path: str) -> list[tuple[int, int]]:
    """The sizes of the axes of a parameter, in base and target."""
    twin = ask.pairing.twin(path)
    small = ask.small[twin].shape if twin else ()
    return list(zip(small, ask.large[path].shape, strict=False))


def _forgotten(path: str, why: str) -> str:
    quoted = names.pattern(path)
    if any(c.isdigit() for c in path):
        quoted = "^" + re.escape(names.open_numbers(path)).replace(r"\#", r"\d+") + "$"
    return (
        f"branch leaves out {path!r}, {why}: if it is inside the residual branch, as "
        f"the norm before a layer is, let branch match it too, such as "
        f"branch=r'(...)|{quoted}'; if it is on the residual stream, as a norm after "
        f"the sum or a projection of the shortcut is, pass stream=r'{quoted}'"
    )


def _of_equal_depth(
    ask: Question,
    ratio: float,
    inside: frozenset[str],
    outside: frozenset[str],
) -> Blocks:
    """Lists and stacks have the same paths here; the number of blocks tells."""
    lists = ask.pairing.lists_of(ask.depth[1])
    listed = frozenset(p for p in inside if ask.pairing.block_of(p, lists))
    if listed == inside:
        return Blocks(ratio, inside, frozenset(), listed)
    stacked = frozenset(
        p for p in inside | outside if ask.layers(p) == tuple(ask.depth)
    )
    if inside <= stacked:
        return Blocks(ratio, inside, stacked)
    stray = sorted(inside - stacked - listed)
    if stacked or listed or not all(any(map(str.isdigit, p)) for p in inside):
        path = (stray or sorted(inside))[0]
        raise ValueError(_not_a_stack(ask, path, inside))
    return Blocks(ratio, inside)


def _without_branches(ask: Question, ratio: float) -> Blocks:
    """The layers of a network without residual branches."""
    if ask.large.keys() != ask.small.keys():
        lists = frozenset(ask.pairing.growing().values())
        paths = [p for p in ask.large if ask.pairing.block_of(p, lists)]
        _check_count(ask, ask.small, paths, lists)
        return Blocks(ratio, listed=frozenset(paths))
    stacked = frozenset(p for p in ask.large if ask.layers(p) == tuple(ask.depth))
    if ask.depth[0] == ask.depth[1]:
        return Blocks(ratio)
    for path in sorted(stacked):
        _check_distinct(ask, path, stacks=False)
    if not stacked:
        raise ValueError(
            f"depth={ask.depth!r}, but base and target have the same layers, and no "
            "parameter's first axis counts them"
        )
    return Blocks(ratio, stacked=stacked)
