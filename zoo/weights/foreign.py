"""Read and write weights of other libraries, without unpickling."""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..families.decoder import Decoder
from ..families.gpt import GPT, gpt_names
from ..families.llama import Llama, llama_names
from ..families.vit import ViT, resize_positions
from ..families.vit_layouts import LAYOUTS, vit_layout, vit_names, vit_unused
from . import saving
from .convnet_layouts import (
    ConvNet,
    convnet_layout,
    convnet_layouts,
    convnet_names,
)
from .features import OPTIONS as OPTIONS
from .features import Misfit as Misfit
from .features import check_format, explain_mismatch, features
from .folding import factors
from .sources import Leaf, Source

# What torch.compile, FSDP and activation checkpointing insert into names.
_INSERTED = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Heads of decoders that a model without a head does not use.
_HEADS = r"^(lm_head|score|classifier|qa_outputs)\."
# Buffers in files that models of the zoo do not need.
_BUFFERS = re.compile(
    r"num_batches_tracked$|\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
)


# How to convert a pickled state dict, for messages.
PICKLED = (
    "pickles can run code and are not supported; convert it in torch: "
    'python -c "import torch, safetensors.torch as s; s.save_file({{k: '
    "v.contiguous().clone() for k, v in torch.load({path!r}, "
    "weights_only=True).items()}}, 'model.safetensors')\""
)


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a file, by key.

    Args:
      path: a .safetensors or .npz file.

    Raises:
      ValueError: the file does not exist, is damaged, or is a pickle; the message says
        what to do.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.suffix == ".npz":
        return _guarded(_read_npz, path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{str(path)!r} is neither .safetensors nor .npz; "
            + PICKLED.format(path=str(path))
        )
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ValueError(
            "reading .safetensors needs safetensors: pip install 'mupax[hub]'"
        ) from None
    return _guarded(safetensors.numpy.load_file, path)


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    # np.load leaves a file open if it cannot read it.
    with path.open("rb") as opened:
        return dict(np.load(opened, allow_pickle=False))


def _guarded(
    reader: Callable[[pathlib.Path], dict[str, np.ndarray]], path: pathlib.Path
) -> dict[str, np.ndarray]:
    try:
        arrays = reader(path)
    except Exception as error:  # a damaged file can raise anything
        if (narrow := _narrow(path)) is not None:
            key, dtype = narrow
            raise ValueError(
                f"{str(path)!r} holds {dtype} under {key!r}: the weights are "
                "quantized, which is not supported; use the original weights in "
                "bfloat16 or float32"
            ) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{str(path)!r} cannot be read ({reason}); it may be damaged, so download "
            "or write it again"
        ) from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{str(path)!r} holds no array under {key!r}")
    return arrays


def layout(model: nnx.Module, keys: Mapping[str, Any]) -> dict[Leaf, Source]:
    """Map a model's variables to arrays of a file, whose layout follows from its keys.

    Raises:
      ValueError: files of other libraries are not supported for this kind of model.
    """
    if isinstance(model, ConvNet):
        names, prefix = convnet_layout(model, keys)
        return convnet_names(model, names, prefix)
    if isinstance(model, GPT):
        bare = any(key.startswith("h.0.") for key in keys) or (
            not keys and not model.head
        )
        return gpt_names(model, prefix="" if bare else "transformer.")
    if isinstance(model, Llama):
        bare = any(key.startswith("layers.0.") for key in keys) or (
            not keys and not model.head
        )
        mixtral = any("block_sparse_moe" in key for key in keys) if keys else None
        return llama_names(model, prefix="" if bare else "model.", mixtral=mixtral)
    if isinstance(model, ViT):
        if not keys:
            return vit_names(model)
        names, before = vit_layout(keys)
        return vit_names(model, names, prefix=before)
    raise ValueError(
        "weights of other libraries are read for resnet, regnet, convnext, "
        f"efficientnet, vit, gpt and llama, not for {type(model).__name__}; give a "
        "directory that zoo.save wrote"
    )


def _narrow(path: pathlib.Path) -> tuple[str, str] | None:
    """The first key of a .safetensors file with a dtype of 8 bits or less, if any."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        dtypes = {key: str(entry.get("dtype", "")) for key, entry in header.items()}
    except (OSError, ValueError, AttributeError, MemoryError, OverflowError):
        return None
    return next(((k, t) for k, t in dtypes.items() if re.match(r"F[468]_", t)), None)


def unwrapped(
    model: nnx.Module, arrays: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Find the names of the keys of a file without those of wrappers, e.g. of DDP.

    Args:
      model: the model, possibly abstract.
      arrays: arrays, or other objects with a shape, by key.

    Returns:
      ({name: key}, the prefix of every key that is not part of the names). A prefix is
      removed if more names are then those of the model.
    """
    names = {_INSERTED.sub("", key): key for key in arrays}
    if len(names) < len(arrays):  # two keys would have one name
        names = {key: key for key in arrays}
    best, removed, start = names, "", ""
    count = _known_names(model, names, arrays)
    while True:
        first = next(iter(names), "").partition(".")[0] + "."
        if not names or not all(name.startswith(first) for name in names):
            return best, removed
        start += first
        names = {name.removeprefix(first): key for name, key in names.items()}
        fitting = _known_names(model, names, arrays)
        if fitting > count:
            best, removed, count = names, start, fitting


def _known_names(
    model: nnx.Module, names: Mapping[str, str], arrays: Mapping[str, Any]
) -> int:
    """The number of names that the model has."""
    try:
        table = layout(model, {name: arrays[key] for name, key in names.items()})
    except ValueError:
        return 0
    return len({source.key for source in table.values()} & names.keys())


def layout_of(model: nnx.Module, arrays: Mapping[str, Any]) -> str:
    """The layout of a file, one of `layouts(model)`.

    Args:
      model: the model that the file fills, possibly abstract.
      arrays: arrays, or other objects with a shape, by key.
    """
    names, _ = unwrapped(model, arrays)
    arrays = {name: arrays[key] for name, key in names.items()}
    if isinstance(model, ViT):
        return vit_layout(arrays)[0]
    if isinstance(model, ConvNet):
        return convnet_layout(model, arrays)[0]
    return layouts(model)[0]


class Match(NamedTuple):
    """How the arrays of a file fill a model.

    Attributes:
      table: for each leaf that is filled, its array in the file.
      unused: keys that are deliberately not used: buffers, and an old head.
      fresh: the module that keeps its initial values; None for none.
      resized: whether positions are interpolated to another grid of patches.
    """

    table: dict[Leaf, Source]
    unused: list[str]
    fresh: str | None
    resized: bool


def match(
    model: nnx.Module,
    arrays: Mapping[str, np.ndarray],
    *,
    new_head: bool = False,
    resize: bool = False,
) -> Match:
    """Check that a file fits a model, by keys and shapes.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      arrays: of the file, by key.
      new_head: whether the readout may keep its initial values if its shape differs or
        the file has none.
      resize: whether the positions of a ViT may be interpolated.

    Raises:
      ValueError: a key is missing or unknown, or its array has another shape or is not
        of floating point. The message names the feature or the option.
    """
    names, removed = unwrapped(model, arrays)
    try:
        found = _match(
            model,
            {name: arrays[key] for name, key in names.items()},
            new_head=new_head,
            resize=resize,
        )
    except ValueError as error:
        if not removed:
            raise
        parts = error.parts if isinstance(error, Misfit) else (str(error),)
        raise Misfit(*parts, f" (in keys after the prefix {removed!r})") from None
    table = {
        leaf: source._replace(key=names[source.key])
        for leaf, source in found.table.items()
    }
    unused = [names[name] for name in found.unused]
    return found._replace(table=table, unused=unused)


def _match(
    model: nnx.Module,
    arrays: Mapping[str, np.ndarray],
    *,
    new_head: bool,
    resize: bool,
) -> Match:
    check_format(arrays)
    table = layout(model, arrays)
    heads = [s for (path, _), s in table.items() if path.startswith("readout/")]
    headless = bool(heads) and not any(s.key in arrays for s in heads)
    # If the requested number of classes is the file's, its head is used.
    fresh = new_head and (
        headless
        or any(s.key in arrays and arrays[s.key].shape != s.shape for s in heads)
    )
    rest = {k: s for k, s in table.items() if not k[0].startswith("readout/")}
    body = rest if fresh or headless else table
    needed = {source.key for source in body.values()}
    left = sorted(arrays.keys() - needed)
    head = {source.key for source in heads}
    unused = re.compile(r"(?!)")
    if isinstance(model, ViT):
        unused = vit_unused(model, vit_layout(arrays)[0])
    if isinstance(model, Decoder) and not model.head:
        unused = re.compile(_HEADS)
    unexpected = [
        key
        for key in left
        if not (
            _BUFFERS.search(key)
            or unused.search(key)
            or (fresh and key in head)
            or _is_embedding_again(model, key, arrays, table)
        )
    ]
    wrong = explain_mismatch(model, arrays, unexpected, needed - arrays.keys(), needed)
    if wrong:
        raise wrong
    if headless and not fresh:
        names = " and ".join(sorted(head))
        raise Misfit(
            f"the file holds a network without a head (it lacks {names}); pass ",
            *_head_options(model),
        )
    resized = False
    for (path, _), source in body.items():
        given = arrays[source.key]
        if not jnp.issubdtype(given.dtype, jnp.floating):
            raise ValueError(
                f"{source.key!r} holds {given.dtype}, not floating-point numbers; it "
                "may be quantized, so use the original weights"
            )
        if tuple(given.shape) == source.shape:
            continue
        if path == "position" and isinstance(model, ViT):
            grid = _file_grid(model, given.shape)
            if resize and grid is not None:
                resized = True
                continue
            size = "x".join(str(n * model.patch_size) for n in grid or ())
            if grid is not None:
                height, width, channels = _input_shape(model)
                raise Misfit(
                    f"{source.key!r} has positions for images of {size} pixels, but "
                    f"the model takes {height}x{width}; pass ",
                    {"input_shape": f"({height}, {width}, {channels})"},
                    " to interpolate them",
                )
            _check_positions(model, source, given.shape)
        raise Misfit(
            f"{source.key!r} has shape {tuple(given.shape)}, but the model needs "
            f"{source.shape}",
            *_size_options(model, path, source, given.shape),
            *(
                f"; the file has {feature}: give the name or the options of its network"
                for feature in features(arrays, ())
            ),
        )
    return Match(body, left, "readout" if fresh else None, resized)


def fill(
    model: nnx.Module,
    arrays: Mapping[str, np.ndarray],
    *,
    new_head: bool = False,
    resize: bool = False,
) -> list[str]:
    """Fill a model with the arrays of another library's file.

    The model then computes the same function as the other library's network: weights
    are divided by multipliers that are not one, e.g. because the base has another size.

    Args:
      model: the model to fill. It is changed only if everything fits: every variable is
        filled once, and every key is used or deliberately unused.
      arrays: of the file, by key.
      new_head: as in `match`.
      resize: as in `match`.

    Returns:
      The keys that are deliberately unused: buffers, and an old head.

    Raises:
      ValueError: as `match`; an array has NaN or infinity; a multiplier is zero.
    """
    matched = match(model, arrays, new_head=new_head, resize=resize)
    for key in sorted({source.key for source in matched.table.values()}):
        if not np.isfinite(arrays[key]).all():
            raise ValueError(
                f"{key!r} holds NaN or infinity; the file may be damaged, so download "
                "or write it again"
            )
    layers: dict[str, dict[int | tuple[int, int] | None, np.ndarray]] = {}
    for (path, layer), source in matched.table.items():
        array = np.asarray(arrays[source.key])
        if path == "position" and matched.resized and isinstance(model, ViT):
            grid = _file_grid(model, array.shape)
            assert grid is not None
            table = jnp.asarray(array).reshape(array.shape[-2:])
            table = resize_positions(table, grid, model.grid)
            array = np.asarray(table).reshape(source.shape)
        layers.setdefault(path, {})[layer] = source.read(array)
    whole = {path: _joined(parts) for path, parts in layers.items()}
    for path, factor in factors(model).items():
        if path in whole:
            whole[path] = whole[path] / factor
    saving.fill(model, whole, fresh=matched.fresh)
    return matched.unused


def _joined(
    parts: Mapping[int | tuple[int, int] | None, np.ndarray],
) -> np.ndarray:
    """Stack the arrays of a variable's layers, or of its layers and experts."""
    if None in parts:
        return parts[None]
    by_place = {p if isinstance(p, tuple) else (p or 0,): v for p, v in parts.items()}
    places = sorted(by_place)
    stacked = np.stack([by_place[place] for place in places])
    return stacked.reshape(*(n + 1 for n in places[-1]), *stacked.shape[1:])


def _file_grid(model: ViT, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The square grid of patches of a position table (..., positions, width)."""
    if model.position is None:
        return None
    positions, width = model.position.shape
    first = positions - model.grid[0] * model.grid[1]
    if len(shape) < 2 or math.prod(shape[:-2]) != 1 or shape[-1] != width:
        return None
    patches = max(shape[-2] - first, 0)
    side = math.isqrt(patches)
    return (side, side) if side and side * side == patches else None


def _check_positions(model: ViT, source: Source, shape: tuple[int, ...]) -> None:
    """Name the option `class_position` if it explains the number of positions.

    Raises:
      ValueError: the file has one position more or less than the model.
    """
    if model.token is None or len(shape) < 2:
        return
    side = math.isqrt(shape[-2] - int(not model.class_position))
    if side * side == shape[-2] - int(not model.class_position):
        raise Misfit(
            f"{source.key!r} has {shape[-2]} positions, so the class token has "
            f"{'no' if model.class_position else 'a'} position; pass ",
            {"class_position": str(not model.class_position)},
        )


def _input_shape(model: ViT) -> tuple[int, int, int]:
    height, width = (n * model.patch_size for n in model.grid)
    return height, width, model.channels


def _head_options(model: nnx.Module) -> tuple[str | dict[str, str], ...]:
    """The options for a file without a head, as parts of a `Misfit`."""
    if isinstance(model, Decoder):
        tied = ({"tied": "True"}, " if the embedding is the readout")
        return {"head": "False"}, " for features, or ", *tied
    new = ({"out_features": str(saving.model_classes(model))}, " for a new head")
    if isinstance(model, ViT):
        return *new, ", or ", {"out_features": "0"}, " for features"
    return new


def _size_options(
    model: nnx.Module, path: str, source: Source, shape: tuple[int, ...]
) -> tuple[str | dict[str, str], ...]:
    """The option for an array of another size, as parts of a `Misfit`; () if unclear.

    Args:
      model: the model.
      path: of the leaf.
      source: of the leaf.
      shape: of the array in the file.
    """
    if isinstance(model, Decoder):
        options = {"embedding": "vocab_size", "position": "context"}
        axis = 0
    else:
        options = {f"readout/{leaf}": "out_features" for leaf in ("kernel", "bias")}
        axis = source.order[-1]
    other = [i for i in range(len(source.shape)) if i != axis]
    fits = len(shape) == len(source.shape) and all(
        shape[i] == source.shape[i] for i in other
    )
    return (
        ("; pass ", {options[path]: str(shape[axis])})
        if path in options and fits
        else ()
    )


def _is_embedding_again(
    model: nnx.Module,
    key: str,
    arrays: Mapping[str, np.ndarray],
    table: Mapping[Leaf, Source],
) -> bool:
    """Whether a key is a copy of the embedding, stored as readout of a tied model."""
    if not isinstance(model, Decoder) or key != "lm_head.weight":
        return False
    embedding = arrays[table["embedding", None].key]
    return model.readout is None and np.array_equal(arrays[key], embedding)


def layouts(model: nnx.Module) -> tuple[str, ...]:
    """List the layouts of other libraries for a model, the default first.

    Raises:
      ValueError: no other library has this kind of model.

    Examples:
      >>> from mupax import zoo
      >>> from mupax.zoo import foreign
      >>> foreign.layouts(zoo.create("resnet18", width=4, rngs=nnx.Rngs(0)))
      ('timm', 'torchvision', 'transformers')
    """
    if convnet_layouts(model):
        return convnet_layouts(model)
    kinds = {
        ViT: tuple(LAYOUTS),
        Decoder: ("transformers",),
    }
    for kind, names in kinds.items():
        if isinstance(model, kind):
            return names
    raise ValueError(
        f"no other library has names for a {type(model).__name__}, only for resnet, "
        "regnet, convnext, efficientnet, vit, gpt and llama; zoo.save writes a "
        "directory of any model"
    )


def export(model: nnx.Module, layout: str | None = None) -> dict[str, np.ndarray]:
    """Return a model's arrays under the keys of another library.

    Multipliers that are not one, e.g. of a model wider or deeper than its base, are
    multiplied into the weights, so that the other library's network computes the same
    function.

    Args:
      model: a convolutional network, ViT, GPT or Llama.
      layout: one of `layouts(model)`; None for the first.

    Raises:
      ValueError: no other library has this kind of model, or the layout does not fit.
    """
    table = exported_names(model, layout)
    ours = saving.arrays_of(model)
    folded = factors(model)
    out: dict[str, np.ndarray] = {}
    for (path, layer), source in table.items():
        array = np.asarray(ours[path])
        if path in folded:
            array = (array * folded[path]).astype(array.dtype)
        part = source.write(array if layer is None else array[layer])
        if source.part is None:
            out[source.key] = np.ascontiguousarray(part)
            continue
        axis, i, n = source.part
        whole = out.setdefault(source.key, np.empty(source.shape, array.dtype))
        np.split(whole, n, axis)[i][...] = part
    return out


def exported_names(model: nnx.Module, layout: str | None = None) -> dict[Leaf, Source]:
    """Map a model's variables to the arrays that `export` returns.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      layout: as in `export`.

    Raises:
      ValueError: as `export`.
    """
    known = layouts(model)
    layout = known[0] if layout is None else layout
    if layout not in known:
        raise ValueError(
            f"layout={layout!r} must be one of {', '.join(known)} for a "
            f"{type(model).__name__}"
        )
    try:
        return _names(model, layout)
    except ValueError as error:
        others = [name for name in known if _has_names(model, name)]
        remedy = f"use {' or '.join(map(repr, others))}" if others else "use zoo.save"
        if nnx.state(model, nnx.LoRAParam):
            remedy = "call zoo.merge_lora(model) first"
        raise ValueError(
            f"the layout {layout!r} cannot hold this {type(model).__name__}: "
            f"{str(error).partition('; ')[0]}; {remedy}"
        ) from None


def _names(model: nnx.Module, name: str) -> dict[Leaf, Source]:
    if isinstance(model, ViT):
        return vit_names(model, name)
    if isinstance(model, ConvNet):
        return convnet_names(model, name)
    return layout(model, {})


def _has_names(model: nnx.Module, name: str) -> bool:
    try:
        _names(model, name)
    except ValueError:
        return False
    return True
