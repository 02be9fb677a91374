"""Blocks in lists: whether `branch` and `depth` are those of the lists that grow."""

import re
from collections.abc import Collection

from . import names
from .question import Depth, Question


def growing_lists(
    ask: Question, inside: Collection[str], outside: Collection[str]
) -> frozenset[str]:
    """Names of the lists of blocks, with open numbers."""
    growing = ask.pairing.growing()
    every = frozenset(growing.values())
    blocks = {ask.pairing.block_of(p, every) for p in inside}
    covered = {block[0] for block in blocks if block}
    chosen = frozenset(map(names.open_numbers, covered))
    if not chosen and growing:
        raise ValueError(not_a_member(min(inside), every, ask.depth))
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


def check_count(
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
    counts: dict[str, int] = {}
    for head, _ in filter(None, blocks):
        counts[head] = counts.get(head, 0) + 1
    return counts


def _shown(heads: Collection[str]) -> str:
    return ", ".join(repr(head + "#") for head in sorted(heads))


def not_a_member(path: str, heads: Collection[str], depth: Depth) -> str:
    starts = [re.escape(head).replace(r"\#", r"\d+") for head in sorted(heads)]
    lists = _shown(heads)
    start = starts[0] if len(starts) == 1 else f"({'|'.join(starts)})"
    return (
        f"branch matches {path!r}, which is not in a list of blocks that grows with "
        f"depth={depth!r}; the lists that grow are {lists}. Match the blocks only: "
        f"branch=r'^{start}\\d+'"
    )


def check_forgotten_in_lists(
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
        missed = same is None or ask.large[path].shape in same
        if missed and not names.on_skip(path):
            raise ValueError(forgotten(path, f"which is in the list {_shown(heads)}"))


def forgotten(path: str, why: str) -> str:
    quoted = names.pattern(path)
    if any(c.isdigit() for c in path):
        quoted = "^" + re.escape(names.open_numbers(path)).replace(r"\#", r"\d+") + "$"
    return (
        f"branch leaves out {path!r}, {why}: if it is inside the residual branch, as "
        f"the norm before a layer is, let branch match it too, such as "
        f"branch=r'(...)|{quoted}'; if it is on the residual stream, as a norm after "
        f"the sum or a projection of the shortcut is, pass stream=r'{quoted}'"
    )
