"""Find the parameters in residual blocks, and the depth ratio of two models."""

import dataclasses
import math

from .block_lists import check_count, check_forgotten_in_lists, growing_lists
from .block_stacks import (
    as_wide_as_deep,
    check_distinct,
    check_forgotten_in_stacks,
    check_members,
    counts_layers,
    in_stages,
    not_a_stack,
)
from .depth_change import DepthChange
from .scales.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The depth ratio of a target, and its parameters in blocks.

    Attributes:
      ratio: depth ratio M, target over base.
      inside: paths of the parameters inside residual branches.
      stacked: paths of the parameters with an axis that counts blocks.
      listed: paths of the parameters in lists of blocks.
    """

    ratio: float = 1.0
    inside: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()


def find_blocks(
    change: DepthChange, branch: str | None, stream: str | None, *, has_depth: bool
) -> Blocks:
    """Find the blocks of a base and a target, in lists or stacked along an axis.

    Blocks are in a list if the deeper model has paths that the other lacks
    (`blocks/7/kernel`). Otherwise a leading axis of the parameters counts them.

    Args:
      change: the models and their depths.
      branch: regular expression of the paths in residual branches; None if the
        model has none.
      stream: regular expression of paths in the blocks that are outside of branches.
      has_depth: whether the user gave `depth`.

    Raises:
      ValueError: `branch` matches nothing, a parameter outside the blocks, or not
        all of the blocks; `depth` is not that of the models.
    """
    branches, streams = Pattern("branch", branch), Pattern("stream", stream)
    matched = [path for path in change.large if branches.matches(path)]
    outside = frozenset(path for path in change.large if streams.matches(path))
    branches.check(change.large)
    streams.check(change.large)
    inside = frozenset(matched) - outside
    if not has_depth:
        return Blocks(1.0, inside)
    ratio = change.depth[1] / change.depth[0]
    if branch is None:
        return _without_branches(change, ratio)
    if (
        change.depth[0] == change.depth[1]
        and change.large.keys() == change.small.keys()
    ):
        return _of_equal_depth(change, ratio, inside, outside)
    if change.large.keys() == change.small.keys():
        heads = frozenset[str]()
    else:
        heads = growing_lists(change, inside, outside)
    listed = frozenset(p for p in change.large if change.pairing.block_of(p, heads))
    stacked = frozenset[str]()
    if not inside <= listed:
        stacked = frozenset(
            p for p in change.large if p not in listed and counts_layers(change, p)
        )
        if not inside <= stacked | listed and in_stages(change, inside - listed):
            stacked |= inside - listed
        stacked -= as_wide_as_deep(change, inside, stacked - inside - outside)
    check_members(change, inside, listed, stacked, heads)
    if inside == change.large.keys() and _mixed(change, inside & listed, heads):
        raise ValueError(
            f"branch={branch!r} matches every parameter, but the first layer and the "
            "readout are in no residual branch; match the blocks only, and give them "
            "a name of their own, e.g. nn.Dense(n, name=f'block_{i}')"
        )
    check_forgotten_in_lists(change, inside, outside, listed, heads)
    check_forgotten_in_stacks(change, inside, outside, stacked)
    # A number that is a block of the target may be the readout of the base.
    others = {change.pairing.twin(p) for p in change.large if p not in inside}
    base = [
        path
        for path in change.small
        if branches.matches(path) and not streams.matches(path) and path not in others
    ]
    check_count(change, base, inside, heads)
    return Blocks(ratio, inside, stacked, listed)


def _mixed(change: DepthChange, paths: frozenset[str], heads: frozenset[str]) -> bool:
    """Whether a list has members of different shapes, as blocks and a readout have."""
    shapes: dict[str, tuple[int, ...]] = {}
    places = [(change.pairing.place(p, heads), change.large[p].shape) for p in paths]
    return any(shapes.setdefault(place, shape) != shape for place, shape in places)


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
            f"depth={depth!r} shrinks; the base comes first. Sweep only depths of at "
            "least the base's, or pass fractional=True if the target is meant to be "
            "shallower"
        )


def _of_equal_depth(
    change: DepthChange,
    ratio: float,
    inside: frozenset[str],
    outside: frozenset[str],
) -> Blocks:
    """Find the blocks of two models of one depth, from their number of blocks.

    Both models have the same paths, whether blocks are listed or stacked.
    """
    lists = change.pairing.lists_of(change.depth[1])
    listed = frozenset(p for p in inside if change.pairing.block_of(p, lists))
    if listed == inside:
        return Blocks(ratio, inside, frozenset(), listed)
    stacked = frozenset(
        p for p in inside | outside if change.layers(p) == tuple(change.depth)
    )
    if inside <= stacked:
        return Blocks(ratio, inside, stacked)
    stray = sorted(inside - stacked - listed)
    if stacked or listed or not all(any(map(str.isdigit, p)) for p in inside):
        path = (stray or sorted(inside))[0]
        raise ValueError(not_a_stack(change, path, inside))
    return Blocks(ratio, inside)


def _without_branches(change: DepthChange, ratio: float) -> Blocks:
    """Find the layers of a network without residual branches."""
    if change.large.keys() != change.small.keys():
        lists = frozenset(change.pairing.growing().values())
        paths = [p for p in change.large if change.pairing.block_of(p, lists)]
        check_count(change, change.small, paths, lists)
        return Blocks(ratio, listed=frozenset(paths))
    stacked = frozenset(
        p for p in change.large if change.layers(p) == tuple(change.depth)
    )
    if change.depth[0] == change.depth[1]:
        return Blocks(ratio)
    for path in sorted(stacked):
        check_distinct(change, path, stacks=False)
    if not stacked:
        raise ValueError(
            f"depth={change.depth!r}, but base and target have the same layers, and no "
            "parameter's first axis counts them"
        )
    return Blocks(ratio, stacked=stacked)
