"""Match the blocks of two models of different depth, where blocks are in lists."""

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

NUMBER = re.compile(r"\d+")

# {list ("blocks/"): {block ("3"): {parameter ("/kernel"): leaf}}}
Lists = dict[str, dict[str, dict[str, Any]]]


def read_lists(leaves: Mapping[str, Any]) -> Lists:
    """Group parameters into lists: paths that differ in one number only."""
    lists: Lists = {}
    for path, leaf in leaves.items():
        for number in NUMBER.finditer(path):
            head, tail = path[: number.start()], path[number.end() :]
            lists.setdefault(head, {}).setdefault(number.group(), {})[tail] = leaf
    return lists


class Pairing:
    """Map each parameter of a target to its counterpart in the base.

    Args:
      large: parameters of the target.
      small: parameters of the base, of another depth.

    Examples:
      >>> import jax
      >>> paths = [f"blocks/{i}/w" for i in range(4)]
      >>> large = dict.fromkeys(paths, jax.ShapeDtypeStruct((16, 16), float))
      >>> small = dict.fromkeys(paths[:2], jax.ShapeDtypeStruct((4, 4), float))
      >>> Pairing(large, small).twin("blocks/3/w")
      'blocks/0/w'
    """

    def __init__(self, large: Mapping[str, Any], small: Mapping[str, Any]):
        first = _first_blocks((*large, *small))
        self._large = {_renamed(path, first): leaf for path, leaf in large.items()}
        self._original = {_renamed(path, first): path for path in small}
        self._lists = read_lists(self._large)
        self._base = read_lists(
            {name: small[path] for name, path in self._original.items()}
        )
        self._first = first
        self._stages = {x for x in self._lists if self._holds_stages(x)}
        self._maps: dict[tuple[str, str], dict[str, str]] = {}
        self._counting: set[str] = set()

    def opened(self, path: str) -> str:
        """The path with "#" for the numbers of blocks, but not for those of stages."""
        path = _renamed(path, self._first)
        return NUMBER.sub(
            lambda x: x.group() if path[: x.start()] in self._stages else "#", path
        )

    def _holds_stages(self, head: str) -> bool:
        """Whether it is a list of as many stages in both, whose depths differ."""
        within = re.compile(re.escape(head) + r"\d+\D+")
        inner = [x for x in self._lists if within.fullmatch(x)]
        return self._lists[head].keys() == self._base.get(head, {}).keys() and any(
            self._lists[x].keys() != self._base.get(x, {}).keys() for x in inner
        )

    def twin(self, path: str) -> str | None:
        """The counterpart of a parameter in the base, or None if there is none.

        Raises:
          ValueError: the blocks of a list differ in kind, and it is ambiguous which
            block of the base corresponds to which block of the target.
        """
        path = _renamed(path, self._first)
        built, at = "", 0
        for number in NUMBER.finditer(path):
            built += path[at : number.start()]
            blocks = self._base.get(built)
            if blocks is None:
                return None
            like = self._map(path[: number.start()], built)
            built += like.get(number.group(), number.group())
            at = number.end()
        return self._original.get(built + path[at:])

    def counts_layers(self, path: str) -> bool:
        """Whether a parameter holds a number for each earlier layer of its own."""
        self.twin(path)
        path = _renamed(path, self._first)
        return any(path[: x.start()] in self._counting for x in NUMBER.finditer(path))

    def _map(self, large: str, small: str) -> dict[str, str]:
        if (large, small) not in self._maps:
            wide, narrow = self._lists[large], self._base[small]
            like: dict[str, str] = {}
            if wide.keys() == narrow.keys():
                pass
            elif _counts_layers(wide, narrow):
                self._counting.add(large)
                like = dict.fromkeys(wide.keys() - narrow.keys(), max(narrow, key=int))
            else:
                like = _match(large, wide, narrow)
            self._maps[large, small] = like
        return self._maps[large, small]


def _match(
    head: str,
    large: Mapping[str, Mapping[str, Any]],
    small: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Map each block of a list to the first block of the same kind in the other list.

    Two blocks of one list are of the same kind if they have the same parameters in the
    same shapes. Kinds of both lists correspond in their order of first appearance.
    """
    many, few = _sorted(large), _sorted(small)
    kinds, others = _kinds(large[i] for i in many), _kinds(small[i] for i in few)
    alike = any(of(kinds) == of(others) for of in (_rhythm, _squeezed))
    if max(kinds) != max(others) or not alike:
        lacking = max(kinds) > max(others)
        raise ValueError(
            f"the blocks {head + '#'!r} are of several kinds: {_letters(others)} in "
            f"the base and {_letters(kinds)} in the target (one letter per block; "
            "blocks of one kind have the same shapes), so it is ambiguous which blocks "
            "correspond; "
            + "build a base with at least one block of each kind, "
            * lacking
            + "put the blocks of each kind into a list of their "
            "own, or repeat or lengthen the same sequence of kinds in both models"
        )
    return {i: few[others.index(kind)] for i, kind in zip(many, kinds, strict=True)}


def _counts_layers(
    large: Mapping[str, Mapping[str, Any]], small: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether blocks hold a number for each earlier layer, so that no two are alike.

    Examples:
      >>> import jax
      >>> many = {str(i): {"": jax.ShapeDtypeStruct((i + 2,), float)} for i in range(4)}
      >>> _counts_layers(many, {i: many[i] for i in "01"})
      True
    """
    both = large, small
    if any(x.keys() != {""} or len(x[""].shape) != 1 for b in both for x in b.values()):
        return False
    many, few = ({i: b[i][""].shape[0] for i in _sorted(b)} for b in both)
    steps = {b - a for a, b in itertools.pairwise(many.values())}
    same = few.items() <= many.items()
    return same and len(few) > 1 and len(steps) == 1 and 0 not in steps


def _sorted(blocks: Iterable[str]) -> list[str]:
    return sorted(blocks, key=int)


def _kinds(blocks: Iterable[Mapping[str, Any]]) -> list[int]:
    """Number the blocks by kind: equal shapes give equal numbers.

    Numbers in the names of parts count by their order: `WeightNorm_3/Dense_3`.
    """
    seen: dict[Hashable, int] = {}

    def key(tail: str) -> list[str | int]:
        parts = re.split(r"(\d+)", tail)
        return [int(x) if x.isdigit() else x for x in parts]

    shapes = (
        tuple((NUMBER.sub("#", tail), b[tail].shape) for tail in sorted(b, key=key))
        for b in blocks
    )
    return [seen.setdefault(block, len(seen)) for block in shapes]


def _rhythm(kinds: list[int]) -> list[int]:
    """The sequence of kinds, without repetitions, cut to its shortest period."""
    runs = [kind for kind, _ in itertools.groupby(kinds)]
    for period in range(1, len(runs)):
        if all(kind == runs[i % period] for i, kind in enumerate(runs)):
            return runs[:period]
    return runs


def _squeezed(kinds: list[int]) -> list[int]:
    """The sequence of kinds with what is repeated in place once.

    Examples:
      >>> _squeezed([0, 1, 1, 0, 1, 1, 2, 3, 3])
      [0, 1, 2, 3]
    """
    found: list[int] = []
    for kind in kinds:
        found.append(kind)
        for size in range(1, len(found) // 2 + 1):
            if found[-size:] == found[-2 * size : -size]:
                del found[-size:]
                break
    return found


def _letters(kinds: list[int]) -> str:
    text = "".join(chr(ord("A") + kind % 26) for kind in kinds)
    return text if len(text) <= 24 else text[:24] + "..."


def _first_blocks(paths: Iterable[str]) -> dict[str, str]:
    """Number Haiku's first blocks: it names them `block`, `block_1`, `block_2`."""
    components = {part for path in paths for part in path.split("/")}
    return {
        part: part + "_0"
        for part in components
        if part + "_1" in components and part + "_0" not in components
    }


def _renamed(path: str, first: Mapping[str, str]) -> str:
    if not first:
        return path
    return "/".join(first.get(part, part) for part in path.split("/"))
