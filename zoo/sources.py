"""Where a model's variables stand in the files of other libraries, as data."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Shaped

# A variable's path, and the layer of a stacked one, or the layer and the expert; None
# for one that is not stacked.
Leaf = tuple[str, int | tuple[int, int] | None]


class Source(NamedTuple):
    """The array of another library that fills one leaf, or one layer of it.

    Attributes:
      key: its name there.
      order: how `numpy.transpose` takes its axes, after it is cut, to give ours.
      shape: of the whole array.
      leaf: the shape of our leaf, without the layers.
      part: (axis, i, n) where our leaf is the i-th of n equal parts along an axis,
        as queries are of a fused kernel; None for all of it.

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
        """Our leaf, of shape `leaf`, out of their array, of shape `shape`.

        Raises:
          ValueError: an array of another shape.
        """
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"{self.key!r} has shape {tuple(array.shape)}, and must have "
                f"{self.shape}"
            )
        if self.part is not None:
            axis, i, n = self.part
            array = np.split(array, n, axis)[i]
        return np.transpose(array, self.order).reshape(self.leaf)

    def write(self, leaf: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Their array, or the part of it that is ours: the inverse of `read`."""
        cut = list(self.shape)
        if self.part is not None:
            axis, _, n = self.part
            cut[axis] //= n
        ours = leaf.reshape([cut[axis] for axis in self.order])
        return np.transpose(ours, np.argsort(self.order))


class Layout(NamedTuple):
    """How a library names and lays out the modules of a model.

    Attributes:
      modules: our module (or variable) to what its keys begin with there; "{}" is
        the layer, and a second one the expert. A module "a/qkv" holds the fused
        "a/query", "a/key", "a/value"; see `FUSED`.
      leaves: our leaf's name to what its key ends with.
      kernel: "out_in" for matrices (out, in), "in_out" for (in, out), "ours" where
        kernels have our shapes.
    """

    modules: Mapping[str, str]
    leaves: Mapping[str, str]
    kernel: str


TORCH_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
FLAX_LEAVES = {name: name for name in TORCH_LEAVES}
#: Modules that lie side by side along the outputs of one kernel, in this order.
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
    """For every parameter of a model, and every layer of a stacked one, its source.

    Args:
      model: of the zoo.
      layout: of the other library.
      special: for paths of ours, (shape there, order of its axes), where they are
        not those of a matrix or a vector.
      prefix: what stands in front of every key.

    Raises:
      ValueError: a parameter that the layout has no name for.
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
    """The key of a leaf, and which of how many fused ones it is."""
    if path in layout.modules:
        return layout.modules[path], None
    module, _, leaf = path.rpartition("/")
    head, _, last = module.rpartition("/")
    if module in layout.modules:
        return layout.modules[module] + layout.leaves[leaf], None
    for fused, names in FUSED.items():
        if last in names and f"{head}/{fused}" in layout.modules:
            start = layout.modules[f"{head}/{fused}"]
            return start + layout.leaves[leaf], (names.index(last), len(names))
    raise ValueError(f"that layout has no name for {path!r}")
