"""Check `branch` and `depth` for models that keep their blocks in lists."""

import re
from collections.abc import Collection

from . import names
from .depth_change import Depth, DepthChange


def growing_lists(
    change: DepthChange, inside: Collection[str], outside: Collection[str]
) -> frozenset[str]:
    """Find the lists of blocks whose length grows and that `branch` matches.

    Returns:
      Their names with numbers replaced by "#".

    Raises:
      ValueError: `branch` matches no growing list, or not all of them.
    """
    growing = change.pairing.growing()
    every = frozenset(growing.values())
    blocks = {change.pairing.block_of(p, every) for p in inside}
    covered = {block[0] for block in blocks if block}
    chosen = frozenset(map(names.open_numbers, covered))
    if not chosen and growing:
        raise ValueError(not_a_member(min(inside), every, change.depth))
    for path in sorted(set(change.large) - set(inside) - set(outside)):
        block = change.pairing.block_of(path, every)
        if block and block[0] in growing and block[0] not in covered:
            raise ValueError(_left_out(change, path, block[0], chosen))
    return chosen


def _left_out(
    change: DepthChange, path: str, head: str, chosen: Collection[str]
) -> str:
    name = [names.open_numbers(head)]
    few, many = (
        _counts(change, [p for p in paths if p.startswith(head)], name).get(head, 0)
        for paths in (change.small, change.large)
    )
    return (
        f"branch matches the list {_shown(chosen)} but not {head + '#'!r} (with "
        f"{path!r}), which grows from {few} to {many}: make branch match all blocks, "
        f"and grow all lists by one ratio; or pass stream=r'^{re.escape(head)}' if the "
        "parameters of this list are not in a residual branch"
    )


def check_count(
    change: DepthChange,
    base: Collection[str],
    target: Collection[str],
    lists: Collection[str],
) -> None:
    """Raise a `ValueError` if the lists of blocks do not grow as `depth` says."""
    before, after = (_counts(change, paths, lists) for paths in (base, target))
    pairs = {head: (before.get(head, 0), many) for head, many in after.items()}
    if not pairs:
        return
    totals = {}
    for name in lists:
        same = [p for head, p in pairs.items() if names.open_numbers(head) == name]
        total = (sum(few for few, _ in same), sum(many for _, many in same))
        totals[name] = same[0] if len(set(same)) == 1 and same else total
    every = (sum(few for few, _ in pairs.values()), sum(n for _, n in pairs.values()))
    depth = tuple(change.depth)
    ratios = {few * depth[1] == many * depth[0] for few, many in totals.values()}
    if ratios == {True} and (depth == every or depth in totals.values()):
        return
    grown = ", ".join(
        f"{head + '#'!r} has {few} blocks in the base and {many} in the target"
        for head, (few, many) in sorted(pairs.items())
    )
    right = next(iter(totals.values())) if len(set(totals.values())) == 1 else every
    remedy = f"pass depth={right}"
    if any(few * right[1] != many * right[0] for few, many in totals.values()):
        remedy = "grow all lists of blocks by one ratio"
    elif right[1] < right[0] and depth[0] < depth[1]:
        remedy = "are base and target swapped?"
    raise ValueError(f"depth={change.depth!r}, but {grown}; {remedy}")


def _counts(
    change: DepthChange, paths: Collection[str], lists: Collection[str]
) -> dict[str, int]:
    """For each list, the number of its blocks that hold one of these paths."""
    blocks = {change.pairing.block_of(p, lists) for p in paths}
    counts: dict[str, int] = {}
    for head, _ in filter(None, blocks):
        counts[head] = counts.get(head, 0) + 1
    return counts


def _shown(heads: Collection[str]) -> str:
    return ", ".join(repr(head + "#") for head in sorted(heads))


def not_a_member(path: str, heads: Collection[str], depth: Depth) -> str:
    """Error message for a path that `branch` matches outside of the growing lists."""
    starts = [re.escape(head).replace(r"\#", r"\d+") for head in sorted(heads)]
    lists = _shown(heads)
    start = starts[0] if len(starts) == 1 else f"({'|'.join(starts)})"
    return (
        f"branch matches {path!r}, which is not in a list of blocks that grows with "
        f"depth={depth!r}; the lists that grow are {lists}. Match the blocks only: "
        f"branch=r'^{start}\\d+'"
    )


def check_forgotten_in_lists(
    change: DepthChange,
    inside: Collection[str],
    outside: Collection[str],
    listed: Collection[str],
    heads: Collection[str],
) -> None:
    """Raise a `ValueError` if `branch` leaves out parameters of the blocks."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for path in set(inside) & set(listed):
        place = change.pairing.place(path, heads)
        shapes.setdefault(place, set()).add(change.large[path].shape)
    for path in sorted(set(listed) - set(inside) - set(outside)):
        same = shapes.get(change.pairing.place(path, heads))
        missed = same is None or change.large[path].shape in same
        if missed and not names.on_skip(path):
            raise ValueError(forgotten(path, f"which is in the list {_shown(heads)}"))


def forgotten(path: str, why: str) -> str:
    """Error message for a parameter of a block that `branch` does not match."""
    quoted = names.pattern(path)
    if any(c.isdigit() for c in path):
        quoted = "^" + re.escape(names.open_numbers(path)).replace(r"\#", r"\d+") + "$"
    return (
        f"branch leaves out {path!r}, {why}: if it is inside the residual branch (e.g. "
        f"a norm before a layer), make branch match it too: "
        f"branch=r'(...)|{quoted}'; if it is on the residual stream (e.g. a norm after "
        f"the sum, or a projection of the shortcut), pass stream=r'{quoted}'"
    )
