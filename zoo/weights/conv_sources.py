"""Names of a convolutional network's variables in the files of torch's libraries."""

from collections.abc import Callable

from flax import nnx

from .sources import Leaf, Source

TORCH = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
# Axis orders for `numpy.transpose` from torch to ours, e.g. CONV takes (out, in,
# height, width) to (height, width, in, out).
CONV, POINTWISE, MATRIX, VECTOR = (2, 3, 1, 0), (1, 0, 2, 3), (1, 0), (0,)
_STACKED = ("rest", "blocks")

Shape = tuple[int, ...]


def conv_sources(
    model: nnx.Module,
    key: Callable[[tuple[str, ...], int | None], str],
    *,
    pointwise: Callable[[tuple[str, ...]], bool] = lambda parts: False,
    special: Callable[[tuple[str, ...], Shape], tuple[Shape, Shape] | None] = (
        lambda parts, leaf: None
    ),
) -> dict[Leaf, Source]:
    """Map every parameter and batch statistic to its array in torch's files.

    Args:
      model: of the zoo, possibly abstract (from `nnx.eval_shape`).
      key: returns torch's key for the parts of a path and a layer; the layer is None
        for variables that are not stacked.
      pointwise: whether our matrix at a path is a convolution of 1x1 pixels in torch.
      special: returns (shape in torch, order of its axes) for the path and shape of
        one of our leaves, or None for the usual layout.

    Returns:
      {(path, layer): `Source`}; the layer is None for variables that are not stacked.
    """
    table: dict[Leaf, Source] = {}
    kinds = nnx.Any(nnx.Param, nnx.BatchStat)
    for path, variable in nnx.to_flat_state(nnx.state(model, kinds)):
        parts = tuple(map(str, path))
        stacked = any(name in parts for name in _STACKED)
        leaf = tuple(variable.shape[int(stacked) :])
        given = special(parts, leaf)
        shape: Shape
        order: Shape
        if given is not None:
            shape, order = given
        elif len(leaf) == 4:
            shape, order = tuple(leaf[i] for i in (3, 2, 0, 1)), CONV
        elif len(leaf) == 2 and pointwise(parts):
            shape, order = (*leaf[::-1], 1, 1), POINTWISE
        elif len(leaf) == 2:
            shape, order = leaf[::-1], MATRIX
        else:
            shape, order = leaf, VECTOR
        for layer in range(variable.shape[0]) if stacked else (None,):
            table["/".join(parts), layer] = Source(
                key(parts, layer), order, shape, leaf
            )
    return table
