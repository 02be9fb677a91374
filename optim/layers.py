"""Fan-in and fan-out axes of parameters of known Flax NNX and Equinox layers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

_LIBRARIES = ("flax.nnx", "equinox.nn", "equinox._")
_NORMS = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
# In the origin of a parameter's role: the kernel computes the queries of an attention
# that divides its logits by the root of the head dimension, which grows.
ROOT_OF_HEAD_DIM = "logits / √d"


@dataclasses.dataclass(frozen=True)
class LayerAxes:
    """Axes of a parameter as its layer created it, before any stacking.

    Attributes:
      rank: number of axes.
      in_axes: the axes that are summed over.
      out_axes: the axes that index outputs.
      embedding: whether it is a table of (entries, features).
      queries: whether it computes the queries of an attention that divides its logits
        by the root of its last axis, the head dimension.
      normalized: whether the layer's wrapper (WeightNorm, SpectralNorm) divides it by
        its norm.
    """

    rank: int
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    embedding: bool = False
    queries: bool = dataclasses.field(default=False, repr=False)
    normalized: bool = dataclasses.field(default=False, repr=False)


def axes_in_model(owners: Sequence[Any], name: str) -> LayerAxes | None:
    """The axes of `owners[-1].name`, with what the objects around the layer do to it.

    Args:
      owners: the objects that hold the parameter, from the model to the layer.
      name: the attribute of the layer.
    """
    axes = axes_of_layer(owners[-1], name)
    if axes is None or len(owners) < 2 or name not in ("kernel", "weight"):
        return axes
    layer, holder = owners[-1], owners[-2]
    queries = _divides_by_root(holder) and layer is getattr(holder, "query", None)
    normalized = any(is_layer(x, "WeightNorm", "SpectralNorm") for x in owners[:-1])
    return dataclasses.replace(axes, queries=queries, normalized=normalized)


def _divides_by_root(owner: Any) -> bool:
    """Whether an object is an attention of NNX with its default `attention_fn`."""
    if not is_layer(owner, "MultiHeadAttention"):
        return False
    function = getattr(owner, "attention_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    # A subclass with a `__call__` of its own may scale the queries there.
    return all(
        str(getattr(f, "__module__", "")).startswith("flax.nnx")
        for f in (function, type(owner).__call__)
    )


def axes_of_layer(owner: Any, name: str) -> LayerAxes | None:
    """The axes of `owner.name`, or None if the layer is unknown.

    Examples:
      >>> import equinox as eqx
      >>> import jax
      >>> axes_of_layer(eqx.nn.Linear(2, 3, key=jax.random.key(0)), "weight")
      LayerAxes(rank=2, in_axes=(1,), out_axes=(0,), embedding=False)
    """
    if is_layer(owner, "Linear", "Embed", "Embedding"):
        return _plain(owner, name)
    if is_layer(owner, "LinearGeneral"):
        return _general(owner, name)
    if is_layer(owner, "Einsum"):
        return _einsum(owner, name)
    if is_layer(owner, "Conv", "ConvTranspose"):
        return _convolution(owner, name)
    if is_layer(owner, "GRUCell", "LSTMCell") and in_equinox(owner):
        matrix = name in ("weight_ih", "weight_hh")
        return LayerAxes(2, (1,), (0,)) if matrix else LayerAxes(1, (), (0,))
    if is_layer(owner, "LoRA") and name in ("lora_a", "lora_b"):
        return LayerAxes(2, (0,), (1,))
    if is_layer(owner, *_NORMS) and name in ("scale", "bias", "weight"):
        shape = getattr(owner, "shape", None)
        rank = len(shape) if isinstance(shape, tuple) else 1
        return LayerAxes(rank, (), tuple(range(rank)))
    return None


def is_layer(owner: Any, *names: str) -> bool:
    """Whether an object is a Flax NNX or Equinox layer of one of these class names."""
    # By name, so that `optim` does not import Flax or Equinox.
    return any(
        c.__name__ in names and c.__module__.startswith(_LIBRARIES)
        for c in type(owner).__mro__
    )


def in_equinox(owner: Any) -> bool:
    """Whether an object is an Equinox layer, or an instance of a subclass of one."""
    return any(
        c.__module__.startswith("equinox.nn") or c.__module__.startswith("equinox._nn")
        for c in type(owner).__mro__
    )


def _plain(owner: Any, name: str) -> LayerAxes | None:
    if name in ("lora_a", "lora_b"):
        return LayerAxes(2, (0,), (1,))
    if name == "bias":
        return LayerAxes(1, (), (0,))
    if is_layer(owner, "Embed", "Embedding"):
        return LayerAxes(2, (0,), (1,), embedding=True)
    if name == "weight":
        return LayerAxes(2, (1,), (0,))
    return LayerAxes(2, (0,), (1,)) if name == "kernel" else None


def _general(owner: Any, name: str) -> LayerAxes | None:
    ins, outs = len(_tuple(owner.in_features)), len(_tuple(owner.out_features))
    batch = len(getattr(owner, "batch_axis", ()))
    if name == "bias":
        return LayerAxes(batch + outs, (), tuple(range(batch, batch + outs)))
    if name != "kernel":
        return None
    cut = batch + ins
    return LayerAxes(
        cut + outs, tuple(range(batch, cut)), tuple(range(cut, cut + outs))
    )


def _einsum(owner: Any, name: str) -> LayerAxes | None:
    equation = str(getattr(owner, "einsum_str", "")).replace(" ", "")
    terms, arrow, out = equation.partition("->")
    sources = terms.split(",")
    if name != "kernel" or not arrow or len(sources) != 2 or "." in sources[1]:
        return None
    data, kernel = sources
    summed = tuple(i for i, axis in enumerate(kernel) if axis not in out)
    made = tuple(i for i, axis in enumerate(kernel) if axis in out and axis not in data)
    return LayerAxes(len(kernel), summed, made)


def _convolution(owner: Any, name: str) -> LayerAxes | None:
    size = getattr(owner, "kernel_size", None)
    if not isinstance(size, tuple | list):
        return None
    rank = len(size) + 2
    if in_equinox(owner):
        if name == "weight":
            return LayerAxes(rank, tuple(range(1, rank)), (0,))
        return LayerAxes(rank - 1, (), tuple(range(rank - 1)))
    if name == "bias":
        return LayerAxes(1, (), (0,))
    out = rank - 1
    if is_layer(owner, "ConvTranspose") and getattr(owner, "transpose_kernel", False):
        out = rank - 2
    return LayerAxes(rank, tuple(a for a in range(rank) if a != out), (out,))


def _tuple(features: Any) -> tuple[Any, ...]:
    return tuple(features) if isinstance(features, tuple | list) else (features,)
