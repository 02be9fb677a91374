"""Depth: which parameters stand in blocks, and how two depths correspond."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from .leaves import Leaf
from .patterns import Pattern

Depth = tuple[int, int]

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the blocks of a target relate to those of its base.

    Attributes:
      ratio: depth ratio M.
      inside: paths of the parameters inside residual branches.
      stacked: paths of the parameters whose first axis counts blocks.
    """

    ratio: float = 1.0
    inside: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()


def find_blocks(
    small: Mapping[str, Leaf],
    large: Mapping[str, Leaf],
    depth: Depth | None,
    branch: str | None,
    fractional: bool,
) -> Blocks:
    """The blocks of a base and a target, either listed or stacked.

    Blocks are a list where the deeper model has paths that the other lacks
    (`blocks/7/kernel`), else a leading axis of the parameters in branches.

    Args:
      small: parameters of the base.
      large: parameters of the target.
      depth: number of blocks of each, or None if the same and not stacked.
      branch: regular expression of the paths in residual branches; None if the
        model has none.
      fractional: accept a target that is shallower than the base.

    Raises:
      ValueError: `branch` matches nothing; `depth` is not that of the models.
    """
    pattern = Pattern("branch", branch)
    inside = frozenset(path for path in large if pattern.matches(path))
    pattern.check(large)
    if depth is None:
        return Blocks(1.0, inside)
    if len(depth) != 2 or not all(d > 0 and math.isfinite(d) for d in depth):
        raise ValueError(
            f"depth={depth!r} must be (base depth, target depth), both positive"
        )
    if depth[1] < depth[0] and not fractional:
        raise ValueError(
            f"depth={depth!r} shrinks; the base comes first. If the target is meant "
            "to be shallower, pass fractional=True"
        )
    ratio = depth[1] / depth[0]
    if large.keys() != small.keys():
        counted = inside if branch is not None else large.keys() - small.keys()
        _check_lists(small, large, counted, depth)
        stacked = frozenset[str]()
    elif branch is None:
        stacked = _stack_without_branches(small, large, depth)
    else:
        stacked = _stack_in_branches(small, large, inside, depth)
    return Blocks(ratio, inside, stacked)


def namesake(path: str, leaves: Mapping[str, Leaf]) -> str | None:
    """The parameter of another depth that stands where this one does.

    Block 37 of the target has none in a base of 8 blocks: it takes a block that is
    there, by another number in the path. The last number comes first, so that block
    5 of stage 3 is like another block of stage 3.

    Examples:
      >>> paths = (f"stage_{s}/block_{b}/w" for s in (0, 1) for b in (0, 1))
      >>> base = dict.fromkeys(paths, Leaf((4, 4)))
      >>> namesake("stage_1/block_5/w", base)
      'stage_1/block_1/w'
    """
    if path in leaves:
        return path
    for number in reversed(list(_NUMBER.finditer(path))):
        twins = _numbered(path, number, leaves)
        if twins:
            return twins[int(number.group()) % len(twins)]
    return None


def _numbered(
    path: str, number: re.Match[str], leaves: Mapping[str, Leaf]
) -> list[str]:
    """The paths that differ from this one in that number alone."""
    head, tail = path[: number.start()], path[number.end() :]
    like = re.compile(re.escape(head) + r"\d+" + re.escape(tail))
    # Haiku's first block goes without a number.
    first = head.removesuffix("_") + tail
    return [p for p in leaves if like.fullmatch(p) or p == first]


def _check_lists(
    small: Mapping[str, Leaf],
    large: Mapping[str, Leaf],
    paths: Iterable[str],
    depth: Depth,
) -> None:
    """Raise where all lists of blocks agree on another ratio than that of depth.

    Stages of different lengths do not agree, and only their sum is the depth.
    """
    before, after = _counts(small), _counts(large)
    found = {}
    for path in paths:
        lists = ((before[key], after[key]) for key in _lists(path))
        found[next((pair for pair in lists if pair[0] != pair[1]), (0, 0))] = path
    if len(found) == 1:
        ((few, many), path), *_ = found.items()
        if many * depth[0] != few * depth[1]:
            raise ValueError(
                f"depth={depth!r}, but of blocks as that of {path!r} the base has "
                f"{few} and the target {many}; pass depth=({few}, {many})"
            )


def _counts(paths: Iterable[str]) -> Counter[str]:
    """How many paths there are of each pattern, one number left open."""
    return Counter(key for path in paths for key in _lists(path))


def _lists(path: str) -> list[str]:
    """The path with each of its numbers left open, the last one first."""
    numbers = reversed(list(_NUMBER.finditer(path)))
    return [f"{path[: n.start()]}#{path[n.end() :]}" for n in numbers]


def _stack_in_branches(
    small: Mapping[str, Leaf],
    large: Mapping[str, Leaf],
    inside: frozenset[str],
    depth: Depth,
) -> frozenset[str]:
    leading = {p: (small[p].shape[:1], large[p].shape[:1]) for p in inside}
    if depth[0] == depth[1]:
        # A list of blocks and a stack have the same paths here.
        is_stack = all(pair == ((depth[0],),) * 2 for pair in leading.values())
        return inside if is_stack else frozenset()
    for path, (before, after) in leading.items():
        if not before or after[0] * depth[0] != before[0] * depth[1]:
            raise ValueError(
                f"depth={depth!r}, but {path!r}, of shape {small[path].shape} in the "
                f"base and {large[path].shape} in the target, is neither in a list of "
                "blocks nor does its first axis count them; let branch=r'...' match "
                "the parameters of the blocks only, and depth be their number"
            )
    return inside


def _stack_without_branches(
    small: Mapping[str, Leaf], large: Mapping[str, Leaf], depth: Depth
) -> frozenset[str]:
    stacked = frozenset(
        p for p in large if (*small[p].shape[:1], *large[p].shape[:1]) == tuple(depth)
    )
    if depth[0] == depth[1]:
        return frozenset()
    for path in stacked:
        if (
            tuple(depth)
            in list(zip(small[path].shape, large[path].shape, strict=False))[1:]
        ):
            raise ValueError(
                f"depth={depth!r} is also how the width of {path!r} grows, so that "
                "the two cannot be told apart; choose a base of another width"
            )
    if not stacked:
        raise ValueError(
            f"depth={depth!r}, but base and target have the same layers, and no "
            "parameter's first axis counts them"
        )
    return stacked
