"""Check `branch` and `depth` for models that stack their blocks along an axis."""

import dataclasses
from collections.abc import Collection

from . import names
from .block_lists import forgotten, not_a_member
from .depth_change import Depth, DepthChange, from_front


def counts_layers(change: DepthChange, path: str) -> bool:
    """Whether the layers' axis of a parameter grows as `depth` says."""
    return change.depth[0] != change.depth[1] and change.layers(path) == tuple(
        change.depth
    )


def check_members(
    change: DepthChange,
    inside: Collection[str],
    listed: Collection[str],
    stacked: Collection[str],
    heads: Collection[str],
) -> None:
    """Raise a `ValueError` if `branch` matches a parameter outside of the blocks."""
    strays = sorted(p for p in inside if p not in listed and p not in stacked)
    if strays and heads:
        raise ValueError(not_a_member(strays[0], heads, change.depth))
    if strays:
        raise ValueError(not_a_stack(change, strays[0], inside))
    within = sorted(p for p in inside if p in stacked and p not in change.copies)
    stacks = any(len(change.large[p].shape) > 2 for p in within)
    for path in within:
        check_distinct(change, path, stacks=stacks)
    if within:
        _check_axis(change, inside, within)


def _check_axis(
    change: DepthChange, inside: Collection[str], within: Collection[str]
) -> None:
    """Raise a `ValueError` if the axis that grows as `depth` does may be a width.

    A width occurs outside of the blocks too, and the number of blocks does not.
    """
    depth = (change.depth[0], change.depth[1])
    outside = _outside(change, inside)
    if depth not in outside:
        return
    for axis in (0, 1, 2, -1, -2):
        sizes = {_size(change, path, axis) for path in within}
        pair = sizes.pop()
        if sizes or pair is None or pair == depth or pair in outside:
            continue
        if pair[0] != pair[1]:
            raise ValueError(
                f"depth={change.depth!r} are sizes of a width too, and axis {axis} of "
                f"every parameter that branch matches, e.g. {min(within)!r}, grows "
                f"from {pair[0]} to {pair[1]}: if that axis counts the blocks, pass "
                f"depth={pair}, layers_axis={axis}; if not, choose a base of another "
                "width or depth"
            )


def _size(change: DepthChange, path: str, axis: int) -> Depth | None:
    pairs = change.sizes(path)
    axes = from_front((axis,), len(pairs))
    return pairs[axes[0]] if axes else None


def _outside(change: DepthChange, inside: Collection[str]) -> set[Depth]:
    """Sizes in base and target of all axes of parameters outside of branches."""
    return {pair for p in change.large if p not in inside for pair in change.sizes(p)}


def check_distinct(change: DepthChange, path: str, *, stacks: bool) -> None:
    """Raise a `ValueError` if a stacked parameter's width grows just as depth does."""
    pairs = change.sizes(path)
    layers = from_front(change.layers_axis, len(pairs))
    others = [p for a, p in enumerate(pairs) if a not in layers]
    # A stacked kernel has three axes; (n, n) may be a single kernel, (n,) a bias.
    one = len(pairs) == 1 and names.is_vector(path)
    if one or (tuple(change.depth) in others and not stacks):
        raise ValueError(
            f"the width of {path!r} also grows by depth={change.depth!r}, so width and "
            "depth cannot be told apart; choose a base of another width"
        )


def in_stages(change: DepthChange, inside: Collection[str]) -> bool:
    """Whether parameters are stacked stage by stage, with `depth` blocks in total."""
    prefix = len(_common_prefix([names.parts(p) for p in inside]))
    stages: dict[str, set[Depth | None]] = {}
    for path in inside:
        component = names.parts(path)[prefix : prefix + 1]
        stages.setdefault("".join(component), set()).add(change.layers(path))
    counts = [next(iter(sizes)) for sizes in stages.values() if len(sizes) == 1]
    if len(stages) < 2 or len(counts) != len(stages) or None in counts:
        return False
    pairs = [pair for pair in counts if pair is not None]
    total = (sum(few for few, _ in pairs), sum(many for _, many in pairs))
    return total == tuple(change.depth)


def _common_prefix(paths: list[list[str]]) -> list[str]:
    first, last = min(paths), max(paths)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def not_a_stack(change: DepthChange, path: str, inside: Collection[str]) -> str:
    """Error message for a path of `branch` that neither a list nor a stack holds."""
    twin = change.pairing.twin(path) or path
    small, large = change.small[twin].shape, change.large[path].shape
    shapes = f"of shape {small} in the base and {large} in the target"
    remedy = (
        "make branch=r'...' match only the parameters of the blocks, and depth their "
        "number"
    )
    counts = {change.layers(p) for p in inside}
    if len(counts) == 1 and None not in counts:
        (few, many) = next(c for c in counts if c)
        same = few * change.depth[1] == many * change.depth[0] and few != many
        if same and (few, many) not in _outside(change, inside):
            remedy = f"pass depth=({few}, {many}) if its first axis counts the blocks"
    for axes in ((-2,), (-1,), (0,), (1,), (0, 1), (2,)):
        other = dataclasses.replace(change, layers_axis=axes)
        counted = {other.layers(p) for p in inside if p not in change.copies}
        if axes != change.layers_axis and counted == {tuple(change.depth)}:
            shown = axes[0] if len(axes) == 1 else axes
            remedy = f"pass layers_axis={shown}, which counts the blocks"
    return (
        f"depth={change.depth!r}, but {path!r}, {shapes}, is not in a list of that "
        f"many blocks, and its axis {', '.join(map(str, change.layers_axis))} does not "
        f"count blocks (one block applied repeatedly with the same weights is not a "
        f"list); {remedy}"
    )


def check_forgotten_in_stacks(
    change: DepthChange,
    inside: Collection[str],
    outside: Collection[str],
    stacked: Collection[str],
) -> None:
    """Raise a `ValueError` if `branch` leaves out stacked parameters."""
    few, many = change.depth
    for path in sorted(set(stacked) - set(inside) - set(outside)):
        raise ValueError(
            forgotten(path, f"whose layers grow from {few} to {many} as depth does")
            + "; if that is its width, choose a base of another width or depth"
        )


def as_wide_as_deep(
    change: DepthChange, inside: Collection[str], paths: Collection[str]
) -> frozenset[str]:
    """Find parameters outside of branches whose only depth-like axis is a width.

    Where the width of the blocks grows by the same sizes as the depth, one such axis
    is explained by the width.
    """
    depth = (change.depth[0], change.depth[1])
    if not any(change.sizes(p).count(depth) > 1 for p in inside):
        return frozenset()
    return frozenset(p for p in paths if change.sizes(p).count(depth) == 1)
