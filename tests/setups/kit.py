"""What one row of the table of set-ups is, and how it is judged.

A set-up is a pair of trees as a real code base spells them, the options that a
careful user passes, and the right multipliers of every parameter, derived by hand.
Nothing here looks at how `infer_scales` decides.

Each leaf is written with its shape and with what it *is*:

    I  sums over a fixed number, its outputs grow    (1, m_out, 1)
    H  sums over a width, its outputs grow           (1/m_in, m_out/m_in, m_in^-1/2)
    O  sums over a width, its outputs do not grow    (1/m_in, 1/m_in, 1/m_in)
    V  sums over nothing, has an entry of each unit  (1, m_out, 1)
    F  nothing of it grows                           (1, 1, 1)

The triple is (Adam's learning rate, SGD's learning rate, initial size), each a ratio
to the base under `mup`: Tensor Programs V, Tables 3 and 8.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mupax import optim
from mupax.optim import rules

WIDTH = (64, 256)  # of base and target, where a row does not say


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its shape, what it is, and ratios other than the row's."""

    kind: str
    shape: tuple[int, ...]
    into: float | None = None  # ratio of what it sums over; None: of the row's width
    out: float | None = None  # ratio of its outputs; None: of the row's width
    copies: float = 1  # ratio of an axis of copies or entries

    def ratios(self, m: float) -> tuple[float, float]:
        """(m_in, m_out) where the row's width grows by m."""
        into = m if self.into is None else self.into
        out = m if self.out is None else self.out
        return into if self.kind in "HO" else 1.0, out if self.kind in "IHV" else 1.0

    def triple(self, m: float) -> tuple[float, float, float]:
        """(Adam's learning rate, SGD's learning rate, initial size)."""
        into, out = self.ratios(m)
        size = into if self.kind == "O" else into**0.5
        return 1 / into, out / into, 1 / size


def _maker(kind: str) -> Callable[..., Leaf]:
    def leaf(*shape: int, **ratios: float) -> Leaf:
        return Leaf(kind, shape, **ratios)

    return leaf


I, H, O, V, F = (_maker(kind) for kind in "IHOVF")  # noqa: E741


@dataclasses.dataclass(frozen=True)
class Setup:
    """One row.

    Args:
      name: unique.
      source: the project and the module that the tree is of.
      tree: from sizes, a dictionary from path to `Leaf`; or, where `leaves` is given,
        from sizes, a real module or its parameters.
      options: what a careful user passes to `infer_scales`.
      grow: (base, target) of every argument of `tree`; `n` alone where not given.
      leaves: for a real module, from regular expression to `Leaf` (without shape).
        Every path has to match exactly one of them, in full.
      style: "nested" splits paths at slashes, and makes lists of whole numbers;
        "haiku" splits at the last slash; "flat" does not split.
      inside: regular expression of what is in branches; `options["branch"]` where
        not given.
      asks: the set-up does not tell: the error has to match this regular expression.
      remedies: options that answer the question, each added to `options`. Under
        each, everything has to be right.
      either: being right at once is as good as asking.
      instead: where no option answers the question, the tree that a user has to
        write; the remedies are then tried on it.
    """

    name: str
    source: str
    tree: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grow: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Leaf] | None = None
    style: str = "nested"
    inside: str | None = None
    asks: str | None = None
    remedies: tuple[Mapping[str, Any], ...] = ()
    either: bool = False
    instead: Callable[..., Any] | None = None

    def sizes(self, end: int) -> dict[str, int]:
        """Arguments of `tree` for the base (0) or the target (1)."""
        grow = dict(self.grow)
        if "n" in inspect.signature(self.tree).parameters:
            grow.setdefault("n", WIDTH)
        return {name: pair[end] for name, pair in grow.items()}

    @property
    def m(self) -> float:
        """Ratio of the widths."""
        base, target = self.grow.get("n", WIDTH)
        return target / base

    def models(self) -> tuple[Any, Any]:
        """Base and target as `infer_scales` takes them."""
        if self.leaves is not None:
            return self._build(0), self._build(1)
        return tuple(nest(self.tree(**self.sizes(end)), self.style) for end in (0, 1))

    def _build(self, end: int) -> Callable[[], Any]:
        """A function that makes the base (0) or the target (1)."""

        def build() -> Any:
            # Haiku and Linen add biases of one axis, which the tests forbid elsewhere.
            with jax.numpy_rank_promotion("allow"):
                return self.tree(**self.sizes(end))

        return build

    def right(self, paths) -> dict[str, Leaf]:
        """What every path is."""
        if self.leaves is None:
            return {_bare(path): x for path, x in self.tree(**self.sizes(1)).items()}
        rows = {}
        for path in paths:
            matches = [x for p, x in self.leaves.items() if re.fullmatch(p, path)]
            assert len(matches) == 1, f"the table has {len(matches)} rows for {path}"
            rows[path] = matches[0]
        return rows


def _bare(path: str) -> str:
    """Without the name of Linen's collection, which both spellings may lack."""
    return path.removeprefix("params/")


def nest(flat: Mapping[str, Leaf], style: str = "nested") -> Any:
    """The tree of abstract arrays, in the container of the code base."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        if style == "flat":
            keys = [path]
        elif style == "haiku":
            keys = path.rsplit("/", 1)
        else:
            keys = path.split("/")
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
    return _lists(tree) if style == "nested" else tree


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    node = {key: _lists(value) for key, value in node.items()}
    if node and set(node) == {str(i) for i in range(len(node))}:
        return [node[str(i)] for i in range(len(node))]
    return node


# --- judging ---


def got(scale: Any) -> tuple[float, float, float]:
    """(Adam's learning rate, SGD's learning rate, initial size) under `mup`."""
    point = optim.parametrization("mup")
    adam, sgd = (rules.multipliers(scale, point, name) for name in ("adam", "sgd"))
    return adam.learning_rate, sgd.learning_rate, adam.init_std


def mistakes(setup: Setup, options: Mapping[str, Any]) -> list[str]:
    """What is wrong under these options; raises what `infer_scales` raises."""
    inferred = optim.infer_scales(*setup.models(), **options)
    scales = {_bare(path): scale for path, scale in inferred.items()}
    right = setup.right(scales)
    wrong = [f"{path}: missing" for path in right if path not in scales]
    wrong += [f"{path}: not in the table" for path in scales if path not in right]
    inside = setup.inside or options.get("branch")
    small, large = options.get("depth") or (1, 1)
    for path in sorted(set(right) & set(scales)):
        scale = scales[path]
        triple, want = got(scale), right[path].triple(setup.m)
        if not all(math.isclose(x, y) for x, y in zip(triple, want, strict=True)):
            wrong.append(f"{path}: got {triple}, right is {want}")
        in_branch = bool(inside and re.search(inside, path))
        if scale.in_branch != in_branch:
            wrong.append(f"{path}: in_branch is to be {in_branch}")
        if scale.depth != large / small:
            wrong.append(f"{path}: depth is to be {large / small}")
    return wrong


def judge(setup: Setup) -> str | None:
    """None where the outcome is an allowed one, or else what is wrong with it."""
    try:
        wrong = mistakes(setup, setup.options)
    except ValueError as error:
        if setup.asks is None:
            return f"RAISED, though the set-up tells: {error}"
        # A message may quote a path as an escaped pattern.
        if not re.search(setup.asks, str(error).replace("\\", "")):
            return f"MISLEADS, it does not name {setup.asks}: {error}"
    else:
        if wrong:
            return "SILENTLY WRONG: " + "; ".join(wrong)
        if setup.asks is not None and not setup.either:
            return f"GUESSED {setup.asks}, which the set-up does not tell"
    remedied = setup
    if setup.instead is not None:
        remedied = dataclasses.replace(setup, tree=setup.instead)
    for remedy in setup.remedies:
        options = {**setup.options, **remedy}
        try:
            wrong = mistakes(remedied, options)
        except ValueError as error:
            return f"REMEDY {remedy} raises: {error}"
        if wrong:
            return f"REMEDY {remedy} is SILENTLY WRONG: " + "; ".join(wrong)
    return None


def inconsistencies(setup: Setup) -> list[str]:
    """Leaves of the table whose shapes do not grow as their kind says."""
    if setup.leaves is not None:
        return []
    base, target = (setup.tree(**setup.sizes(end)) for end in (0, 1))
    depths = {1.0}
    for options in (setup.options, *setup.remedies):
        if options.get("depth"):
            small, large = options["depth"]
            depths.add(large / small)
    wrong = []
    for path in set(base) & set(target):
        into, out = target[path].ratios(setup.m)
        grown = math.prod(target[path].shape) / math.prod(base[path].shape)
        counted = into * out * target[path].copies
        if not any(math.isclose(grown, counted * ratio) for ratio in depths):
            wrong.append(f"{path}: grows by {grown}, the table counts {counted}")
    return wrong
