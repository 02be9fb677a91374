"""Blocks stacked along an axis: whether `branch` and `depth` are those of the stack."""

import dataclasses
from collections.abc import Collection

from . import names
from .block_lists import forgotten, not_a_member
from .question import Depth, Question


def counts_layers(ask: Question, path: str) -> bool:
    """Whether the layers' axis of a parameter grows as depth does."""
    return ask.depth[0] != ask.depth[1] and ask.layers(path) == tuple(ask.depth)


def check_members(
    ask: Question,
    inside: Collection[str],
    listed: Collection[str],
    stacked: Collection[str],
    heads: Collection[str],
) -> None:
    """Raise where `branch` matches a parameter that is in no block."""
    strays = sorted(p for p in inside if p not in listed and p not in stacked)
    if strays and heads:
        raise ValueError(not_a_member(strays[0], heads, ask.depth))
    if strays:
        raise ValueError(not_a_stack(ask, strays[0], inside))
    within = sorted(p for p in inside if p in stacked and p not in ask.copies)
    stacks = any(len(ask.large[p].shape) > 2 for p in within)
    for path in within:
        check_distinct(ask, path, stacks=stacks)


def check_distinct(ask: Question, path: str, *, stacks: bool) -> None:
    """Raise where the width of a stacked parameter grows as the depth does."""
    pairs = ask.sizes(path)
    others = [p for a, p in enumerate(pairs) if a not in ask.layers_axis]
    # A stacked kernel has three axes; (n, n) may be one kernel, and (n,) one bias.
    one = len(pairs) == 1 and names.is_vector(path)
    if one or (tuple(ask.depth) in others and not stacks):
        raise ValueError(
            f"depth={ask.depth!r} is also how the width of {path!r} grows, so that "
            "the two cannot be told apart; choose a base of another width"
        )


def in_stages(ask: Question, inside: Collection[str]) -> bool:
    """Whether the parameters are stacked stage by stage, of the depth in all."""
    prefix = len(_common_prefix([names.parts(p) for p in inside]))
    stages: dict[str, set[Depth | None]] = {}
    for path in inside:
        component = names.parts(path)[prefix : prefix + 1]
        stages.setdefault("".join(component), set()).add(ask.layers(path))
    counts = [next(iter(sizes)) for sizes in stages.values() if len(sizes) == 1]
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


def not_a_stack(ask: Question, path: str, inside: Collection[str]) -> str:
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


def check_forgotten_in_stacks(
    ask: Question,
    inside: Collection[str],
    outside: Collection[str],
    stacked: Collection[str],
) -> None:
    few, many = ask.depth
    for path in sorted(set(stacked) - set(inside) - set(outside)):
        raise ValueError(
            forgotten(path, f"whose layers grow from {few} to {many} as depth does")
            + "; if that is its width, choose a base of another width or depth"
        )


def as_wide_as_deep(
    ask: Question, inside: Collection[str], paths: Collection[str]
) -> frozenset[str]:
    """Parameters outside of branches whose width is that of the blocks.

    Where width grows as depth does, their one axis of that size is explained.
    """
    depth = (ask.depth[0], ask.depth[1])
    if not any(ask.sizes(p).count(depth) > 1 for p in inside):
        return frozenset()
    return frozenset(p for p in paths if ask.sizes(p).count(depth) == 1)
