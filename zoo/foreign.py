"""Weights of other libraries: read from their files, never unpickled."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import saving
from .folding import factors
from .gpt import GPT, gpt_names
from .resnet import ResNet, resnet_names
from .sources import Leaf, Source
from .vit import LAYOUTS, ViT, vit_names

# Buffers that files carry beside the weights, and that nothing here needs.
_BUFFERS = re.compile(r"num_batches_tracked$|\.attn\.(masked_)?bias$")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_foreign(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a file, or looks like a name on the hub."""
    path = pathlib.Path(source)
    return path.is_file() or (
        not path.exists()
        and (path.suffix != "" or _HUB_ID.fullmatch(str(source)) is not None)
    )


def read(source: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a file, by their keys.

    Args:
      source: a .safetensors or .npz file, or the id of a repository on the Hugging
        Face hub that holds a model.safetensors.

    Raises:
      ValueError: a file that is not there, truncated, or a pickle; a hub that
        cannot be reached; the sentence says what to do.
    """
    path = pathlib.Path(source)
    if not path.exists() and _HUB_ID.fullmatch(str(source)) and not path.suffix:
        path = _download(str(source))
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        except Exception as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{str(path)!r} is neither .safetensors nor .npz; pickled state dicts can "
            "run code and are not read: where it was made, write it by "
            "safetensors.torch.save_file(state_dict, 'weights.safetensors')"
        )
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ValueError(
            "reading .safetensors needs safetensors: pip install 'mupax[hub]'"
        ) from None
    try:
        return safetensors.numpy.load_file(path)
    except Exception as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None


def _download(repository: str) -> pathlib.Path:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise ValueError(
            f"{repository!r} is no path here, and reading from the hub needs "
            "huggingface_hub: pip install 'mupax[hub]'"
        ) from None
    try:
        return pathlib.Path(
            huggingface_hub.hf_hub_download(repository, "model.safetensors")
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{repository!r} is no path here, and the hub does not give its "
            f"model.safetensors ({reason}); offline, give the path of a file"
        ) from None


def layout(model: nnx.Module, keys: Mapping[str, Any]) -> dict[Leaf, Source]:
    """Where a model's variables stand in a file, told from the file's keys.

    Raises:
      ValueError: a kind of model that no other library's files are read for.
    """
    if isinstance(model, ResNet):
        return _resnet(model)
    if isinstance(model, GPT):
        bare = any(key.startswith("h.0.") for key in keys)
        return gpt_names(model, prefix="" if bare else "transformer.")
    if isinstance(model, ViT):
        prefix = "params/" if any(k.startswith("params/") for k in keys) else ""
        return vit_names(model, _vit_layout(keys), prefix=prefix)
    raise ValueError(
        f"weights of other libraries are read for resnet, vit and gpt, not for "
        f"{type(model).__name__}; give a directory that zoo.save wrote"
    )


def _resnet(model: ResNet) -> dict[Leaf, Source]:
    shapes = {path: array.shape for path, array in saving.arrays_of(model).items()}
    table = {}
    for (path, layer), (key, order) in resnet_names(model).items():
        leaf = shapes[path] if layer is None else shapes[path][1:]
        shape = tuple(leaf[order.index(axis)] for axis in range(len(leaf)))
        table[path, layer] = Source(key, order, shape, leaf)
    return table


def _vit_layout(keys: Mapping[str, Any]) -> str:
    flat = {key.removeprefix("params/") for key in keys}
    if any(key.startswith("Transformer/") for key in flat):
        return "augreg" if any("posembed_input" in k for k in flat) else "big_vision"
    return "torchvision" if any(k.startswith("encoder.") for k in flat) else "timm"


def fill(
    model: nnx.Module,
    arrays: Mapping[str, np.ndarray],
    *,
    new_head: bool = False,
) -> list[str]:
    """Fill a model from the arrays of another library's file.

    The model computes what the other library's network does: where it has multipliers
    that are not one, as a base of another size gives it, weights are divided by them.

    Args:
      model: changed only if all fits: every variable is filled once, and every key
        is used, or deliberately left.
      arrays: by key.
      new_head: whether a readout of another shape starts anew.

    Returns:
      The keys that were left unused on purpose: buffers, and an old head.

    Raises:
      ValueError: a key that is missing, unknown, of another shape, or not of
        floating-point numbers; a model with a multiplier of zero.
    """
    table = layout(model, arrays)
    heads = [s for (path, _), s in table.items() if path.startswith("readout/")]
    head = {source.key for source in heads}
    # A new number of classes that is the old one is no new head.
    new_head = new_head and any(
        s.key in arrays and arrays[s.key].shape != s.shape for s in heads
    )
    if new_head:
        table = {k: s for k, s in table.items() if not k[0].startswith("readout/")}
    needed = {source.key for source in table.values()}
    for key in sorted(needed - arrays.keys()):
        raise ValueError(
            f"the file lacks {key!r}, which a {type(model).__name__} of this size has"
        )
    for key in sorted(needed):
        if not jnp.issubdtype(arrays[key].dtype, jnp.floating):
            raise ValueError(
                f"{key!r} holds {arrays[key].dtype}, not floating-point numbers, as "
                "quantized weights do; write them out in full where they were made"
            )
    left = sorted(arrays.keys() - needed)
    for key in left:
        if not (
            _BUFFERS.search(key)
            or (new_head and key in head)
            or _is_embedding_again(model, key, arrays, table)
        ):
            raise ValueError(
                f"the file holds {key!r}, which this {type(model).__name__} has not; "
                "check its size and options"
            )
    layers: dict[str, dict[int | None, np.ndarray]] = {}
    for (path, layer), source in table.items():
        layers.setdefault(path, {})[layer] = source.read(np.asarray(arrays[source.key]))
    whole = {
        path: found[None]
        if None in found
        else np.stack([found[i] for i in range(len(found))])
        for path, found in layers.items()
    }
    for path, factor in factors(model).items():
        if path in whole:
            whole[path] = whole[path] / factor
    saving.fill(model, whole, fresh="readout" if new_head else None)
    return left


def _is_embedding_again(
    model: nnx.Module,
    key: str,
    arrays: Mapping[str, np.ndarray],
    table: Mapping[Leaf, Source],
) -> bool:
    """Whether a key is the readout of a tied model, which files may repeat."""
    if not isinstance(model, GPT) or key != "lm_head.weight":
        return False
    embedding = arrays[table["embedding", None].key]
    return model.readout is None and np.array_equal(arrays[key], embedding)


def layouts(model: nnx.Module) -> tuple[str, ...]:
    """The libraries whose names a model's arrays can take, the usual one first.

    Raises:
      ValueError: a kind of model that has no names elsewhere.

    Examples:
      >>> from mupax import zoo
      >>> from mupax.zoo import foreign
      >>> foreign.layouts(zoo.create("resnet18", width=4, rngs=nnx.Rngs(0)))
      ('timm', 'torchvision')
    """
    kinds = {
        ResNet: ("timm", "torchvision"),
        ViT: tuple(LAYOUTS),
        GPT: ("transformers",),
    }
    for kind, names in kinds.items():
        if isinstance(model, kind):
            return names
    raise ValueError(
        f"no other library has names for a {type(model).__name__}, only for resnet, "
        "vit and gpt; zoo.save writes a directory of any model"
    )


def export(model: nnx.Module, layout: str | None = None) -> dict[str, np.ndarray]:
    """A model's arrays under the keys of another library.

    Multipliers that are not one, as of a model wider or deeper than its base, are
    multiplied into the weights: the other library's network computes what the model
    computes.

    Args:
      model: a ResNet, ViT or GPT.
      layout: one of `layouts(model)`; None for the first.

    Raises:
      ValueError: a kind of model that has no names elsewhere, or not in that layout.
    """
    known = layouts(model)
    layout = known[0] if layout is None else layout
    if layout not in known:
        raise ValueError(
            f"layout={layout!r} must be one of {', '.join(known)} for a "
            f"{type(model).__name__}"
        )
    table = vit_names(model, layout) if isinstance(model, ViT) else _table(model)
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


def _table(model: nnx.Module) -> dict[Leaf, Source]:
    return layout(model, {})
