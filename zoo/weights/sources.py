"""Map a model's variables to arrays in the files of other libraries."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Shaped

# (path of a variable, layer); for weights of experts (path, (layer, expert)). The layer
# is None for variables that are not stacked.
Leaf = tuple[str, int | tuple[int, int] | None]
Shape = tuple[int, ...]


class Source(NamedTuple):
    """The array of another library that fills one leaf, or one layer of it.

    Attributes:
      key: its name in the file.
      order: axes for `numpy.transpose`, from the array (after `part`) to our leaf.
      shape: of the whole array in the file.
      leaf: the shape of our leaf, without the axis of layers.
      part: (axis, i, n) if our leaf is the i-th of n equal parts along an axis, e.g.
        the queries of a fused kernel; None for the whole array.

    Examples:
      >>> fused = np.arange(12.0).reshape(6, 2)  # queries, keys, values; (out, in)
      >>> source = Source("qkv.weight", (1, 0), (6, 2), (2, 1, 2), (0, 2, 3))
      >>> source.read(fused).tolist()
      [[[8.0, 10.0]], [[9.0, 11.0]]]
      >>> np.array_equal(source.write(source.read(fused)), fused[4:])
      True
    """

    key: str
    order: Shape
    shape: Shape
    leaf: Shape
    part: tuple[int, int, int] | None = None

    def read(self, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Convert the file's array, of shape `shape`, to our leaf, of shape `leaf`.

        Raises:
          ValueError: the array has another shape.
        """
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"{self.key!r} has shape {tuple(array.shape)}, but the model needs "
                f"{self.shape}"
            )
        if self.part is not None:
            axis, i, n = self.part
            array = np.split(array, n, axis)[i]
        return np.transpose(array, self.order).reshape(self.leaf)

    def write(self, leaf: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Convert our leaf to the file's array or our part of it; inverts `read`."""
        cut = list(self.shape)
        if self.part is not None:
            axis, _, n = self.part
            cut[axis] //= n
        ours = leaf.reshape([cut[axis] for axis in self.order])
        return np.transpose(ours, np.argsort(self.order))


TORCH = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
# Axis orders for `numpy.transpose` from torch to ours, e.g. CONV takes (out, in,
# height, width) to (height, width, in, out).
CONV, POINTWISE, MATRIX = (2, 3, 1, 0), (1, 0, 2, 3), (1, 0)
#: Modules that are concatenated along the outputs of one kernel, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "gate_up": ("gate", "up"),
}


class Layout(NamedTuple):
    """Names and layouts of a model's modules in another library.

    Attributes:
      modules: {our module or variable: start of its keys}. Numbers are "*" in ours, the
        number of a block among them, which counts the first block of a stage: the path
        "stages/1/rest/convs/0" is "stages/*/*/convs/*". In order they fill the "{}" of
        theirs, plus 1 for "{1}"; the last one is that of an expert. Or only the number
        of the block is "*" and fills theirs: "stages/1/*/convs/0". A module "a/qkv"
        holds the fused "a/query", "a/key" and "a/value"; see `FUSED`.
      leaves: {name of our leaf: end of its key}.
      kernel: "out_in" for matrices (out, in), "in_out" for (in, out), "ours" if
        kernels have our shapes.
      special: {our variable: (shape in the file, order of its axes)}, or a function of
        our shape that returns these, where the layout is not that of a matrix, a
        convolution or a vector.
      pointwise: pattern of our modules whose matrices are convolutions of one pixel.
      prefix: of every key, by default.
      heads: whether the readout has the prefix too.
    """

    modules: Mapping[str, str]
    leaves: Mapping[str, str] = TORCH
    kernel: str = "out_in"
    special: Mapping[
        str, tuple[Shape, Shape] | Callable[[Shape], tuple[Shape, Shape]]
    ] = {}
    pointwise: str = r"(?!)"
    prefix: str = ""
    heads: bool = False


def sources(
    model: nnx.Module, layout: Layout, prefix: str | None = None
) -> dict[Leaf, Source]:
    """Map the parameters and batch statistics of a model, layer by layer, to arrays.

    Args:
      model: of the zoo, possibly abstract (from `nnx.eval_shape`).
      layout: of the other library.
      prefix: of the keys; None for the layout's.

    Raises:
      ValueError: the layout has no name for a variable.
    """
    prefix = layout.prefix if prefix is None else prefix
    table: dict[Leaf, Source] = {}
    kinds = nnx.Any(nnx.Param, nnx.BatchStat)
    for path, variable in nnx.to_flat_state(nnx.state(model, kinds)):
        parts = tuple(map(str, path))
        name, metadata = "/".join(parts), variable.get_metadata()
        lead = int("rest" in parts or "blocks" in parts) + metadata.get("stacked", 0)
        leaf = variable.shape[lead:]
        pattern, plain = _pattern(parts, r"\d+"), _pattern(parts, r"(?!)")
        found = _key(pattern, layout) or _key(plain, layout)
        if found is None:
            raise ValueError(f"that layout has no name for {name!r}")
        key, part, are_counted = *found, _key(pattern, layout) is not None
        shape, order = _shape(layout, pattern, leaf, metadata.get("inputs", 0))
        fused = None
        if part is not None:
            axis = len(shape) - 1 if layout.kernel == "in_out" else 0
            shape = tuple(n * part[1] if a == axis else n for a, n in enumerate(shape))
            fused = (axis, *part)
        start = prefix if layout.heads or parts[0] != "readout" else ""
        for place in np.ndindex(*variable.shape[:lead]):
            at = place if len(place) > 1 else place[0] if place else None
            whole = start + _filled(key, _numbers(parts, place, are_counted))
            table[name, at] = Source(whole, order, shape, leaf, fused)
    return table


def _pattern(parts: tuple[str, ...], starred: str) -> str:
    """The path with "*" for the number of its block, and for parts of this pattern."""
    names = {"first": "*", "rest": "*", "blocks": "blocks/*"}
    return "/".join("*" if re.fullmatch(starred, p) else names.get(p, p) for p in parts)


def _numbers(parts: tuple[str, ...], place: Shape, are_counted: bool) -> Iterator[int]:
    """The numbers of a path, if they are counted, and of a layer of it, in order."""
    layer, expert = iter(place[:1]), place[1:]
    for part in parts:
        if part == "first":
            yield 0
        elif part == "rest":
            yield next(layer) + 1
        elif part == "blocks":
            yield next(layer)
        elif are_counted and part.isdecimal():
            yield int(part)
    yield from expert


def _filled(key: str, numbers: Iterator[int]) -> str:
    return re.sub(r"\{(\d*)\}", lambda m: str(next(numbers) + int(m[1] or 0)), key)


def _shape(
    layout: Layout, pattern: str, leaf: Shape, inputs: int
) -> tuple[Shape, Shape]:
    """The shape of a leaf in the file, and the order of its axes there."""
    given = layout.special.get(pattern)
    if given is not None:
        return given(leaf) if callable(given) else given
    ins, outs = math.prod(leaf[:inputs]), math.prod(leaf[inputs:])
    if layout.kernel == "ours":
        return leaf, tuple(range(len(leaf)))
    if not inputs:
        return (outs,), (0,)
    if inputs == 3:
        return tuple(leaf[i] for i in (3, 2, 0, 1)), CONV
    if re.search(layout.pointwise, pattern):
        return (outs, ins, 1, 1), POINTWISE
    return ((outs, ins), MATRIX) if layout.kernel == "out_in" else ((ins, outs), (0, 1))


def _key(pattern: str, layout: Layout) -> tuple[str, tuple[int, int] | None] | None:
    """The key of a leaf, and (i, n) if it is the i-th of n fused ones; None without."""
    if pattern in layout.modules:
        return layout.modules[pattern], None
    module, _, leaf = pattern.rpartition("/")
    head, _, last = module.rpartition("/")
    if leaf in layout.leaves:
        if module in layout.modules:
            return layout.modules[module] + layout.leaves[leaf], None
        for fused, names in FUSED.items():
            if last in names and f"{head}/{fused}" in layout.modules:
                start = layout.modules[f"{head}/{fused}"]
                return start + layout.leaves[leaf], (names.index(last), len(names))
    return None
