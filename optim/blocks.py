"""Depth: which parameters stand in blocks, and how two depths correspond."""

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
from .patterns import Pattern
from .question import Question


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
        heads = growing_lists(ask, inside, outside)
    listed = frozenset(p for p in ask.large if ask.pairing.block_of(p, heads))
    stacked = frozenset[str]()
    if not inside <= listed:
        stacked = frozenset(
            p for p in ask.large if p not in listed and counts_layers(ask, p)
        )
        if not inside <= stacked | listed and in_stages(ask, inside - listed):
            stacked |= inside - listed
        stacked -= as_wide_as_deep(ask, inside, stacked - inside - outside)
    check_members(ask, inside, listed, stacked, heads)
    check_forgotten_in_lists(ask, inside, outside, listed, heads)
    check_forgotten_in_stacks(ask, inside, outside, stacked)
    base = [p for p in ask.small if within.matches(p) and not without.matches(p)]
    check_count(ask, base, inside, heads)
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
        raise ValueError(not_a_stack(ask, path, inside))
    return Blocks(ratio, inside)


def _without_branches(ask: Question, ratio: float) -> Blocks:
    """The layers of a network without residual branches."""
    if ask.large.keys() != ask.small.keys():
        lists = frozenset(ask.pairing.growing().values())
        paths = [p for p in ask.large if ask.pairing.block_of(p, lists)]
        check_count(ask, ask.small, paths, lists)
        return Blocks(ratio, listed=frozenset(paths))
    stacked = frozenset(p for p in ask.large if ask.layers(p) == tuple(ask.depth))
    if ask.depth[0] == ask.depth[1]:
        return Blocks(ratio)
    for path in sorted(stacked):
        check_distinct(ask, path, stacks=False)
    if not stacked:
        raise ValueError(
            f"depth={ask.depth!r}, but base and target have the same layers, and no "
            "parameter's first axis counts them"
        )
    return Blocks(ratio, stacked=stacked)
