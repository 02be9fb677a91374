"""Map a model's variables to arrays in the files of other libraries."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Shaped

# (path of a variable, layer); for weights of experts (path, (layer, expert)). The layer
# is None for variables that are not stacked.
Leaf = tuple[str, int | tuple[int, int] | None]


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
    order: tuple[int, ...]
    shape: tuple[int, ...]
    leaf: tuple[int, ...]
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


class Layout(NamedTuple):
    """Names and layouts of a model's modules in another library.

    Attributes:
      modules: {our module or variable: start of its keys}; "{}" is the layer, a second
        "{}" the expert. A module "a/qkv" holds the fused "a/query", "a/key",
        "a/value"; see `FUSED`.
      leaves: {name of our leaf: end of its key}.
      kernel: "out_in" for matrices (out, in), "in_out" for (in, out), "ours" if
        kernels have our shapes.
    """

    modules: Mapping[str, str]
    leaves: Mapping[str, str]
    kernel: str


TORCH_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
FLAX_LEAVES = {name: name for name in TORCH_LEAVES}
#: Modules that are concatenated along the outputs of one kernel, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "gate_up": ("gate", "up"),
}


def sources(
    model: nnx.Module,
    layout: Layout,
    special: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    prefix: str = "",
) -> dict[Leaf, Source]:
    """Map every parameter of a model, and every layer of stacked ones, to its array.

    Args:
      model: of the zoo.
      layout: of the other library.
      special: {our path: (shape in the file, order of its axes)} for parameters whose
        layout is not that of a matrix or vector.
      prefix: of every key.

    Raises:
      ValueError: the layout has no name for a parameter.
    """
    table: dict[Leaf, Source] = {}
    for names, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = "/".join(map(str, names))
        metadata = variable.get_metadata()
        stacked = len(variable.shape) > len(metadata["axes"])
        copies = metadata.get("stacked", 0)
        leaf = variable.shape[int(stacked) + copies :]
        key, fused = _key(path, layout)
        inputs = math.prod(leaf[: metadata["inputs"]])
        outputs = math.prod(leaf[metadata["inputs"] :])
        if path in special:
            shape, order = special[path]
        elif not metadata["inputs"]:
            shape = leaf if layout.kernel == "ours" else (outputs,)
            order = tuple(range(len(shape)))
        elif layout.kernel == "ours":
            shape, order = leaf, tuple(range(len(leaf)))
        elif layout.kernel == "out_in":
            shape, order = (outputs, inputs), (1, 0)
        else:
            shape, order = (inputs, outputs), (0, 1)
        part = None
        if fused is not None:
            axis = len(shape) - 1 if layout.kernel == "in_out" else 0
            i, parts = fused
            shape = tuple(parts * n if a == axis else n for a, n in enumerate(shape))
            part = (axis, i, parts)
        layers = range(variable.shape[0]) if stacked else (None,)
        for layer in layers:
            if not copies:
                name = prefix + key.format(layer)
                table[path, layer] = Source(name, order, shape, leaf, part)
                continue
            assert layer is not None, path
            for expert in range(variable.shape[1]):
                name = prefix + key.format(layer, expert)
                table[path, (layer, expert)] = Source(name, order, shape, leaf, part)
    return table


def _key(path: str, layout: Layout) -> tuple[str, tuple[int, int] | None]:
    """The key of a leaf, and (i, n) if it is the i-th of n fused ones."""
    if path in layout.modules:
        return layout.modules[path], None
    module, _, leaf = path.rpartition("/")
    head, _, last = module.rpartition("/")
    if leaf not in layout.leaves:
        raise ValueError(f"that layout has no name for {path!r}")
    if module in layout.modules:
        return layout.modules[module] + layout.leaves[leaf], None
    for fused, names in FUSED.items():
        if last in names and f"{head}/{fused}" in layout.modules:
            start = layout.modules[f"{head}/{fused}"]
            return start + layout.leaves[leaf], (names.index(last), len(names))
    raise ValueError(f"that layout has no name for {path!r}")
