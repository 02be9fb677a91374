"""Read and write weights of other libraries, without unpickling."""

import math
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import optim

from ..plan import scales
from ..registry import record_of, records
from . import positions, saving
from .files import read_npz
from .misfits import Misfit as Misfit
from .misfits import explain_mismatch
from .sources import Layout, Leaf, Source, sources

# What torch.compile, FSDP and activation checkpointing insert into names.
_INSERTED = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Buffers in files that models of the zoo do not need.
_BUFFERS = re.compile(
    r"num_batches_tracked$|\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
)


def how_to_convert(paths: Sequence[pathlib.Path]) -> str:
    """How to convert files of one network to .safetensors, for messages."""
    if paths[0].suffix not in (".bin", ".pt", ".pth", ".ckpt"):
        return "convert it to model.safetensors with the library that wrote it"
    new = paths[0].with_name("model.safetensors")
    return (
        "pickles can run code and are not supported; convert in torch: "
        'python -c "import torch, safetensors.torch as s; s.save_file({k: '
        f"v.contiguous().clone() for path in {[str(path) for path in paths]} for k, v "
        f'in torch.load(path, weights_only=True).items()}}, {str(new)!r})"'
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
        return _guarded(read_npz, path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{str(path)!r} is neither .safetensors nor .npz; {how_to_convert([path])}"
        )
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ValueError(
            "reading .safetensors needs safetensors: pip install '.[hub]' in a clone "
            "of mupax"
        ) from None
    return _guarded(safetensors.numpy.load_file, path)


def _guarded(
    reader: Callable[[pathlib.Path], dict[str, np.ndarray]], path: pathlib.Path
) -> dict[str, np.ndarray]:
    try:
        arrays = reader(path)
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "float8" in reason:  # NumPy lacks the type
            reason = "it holds fp8 numbers"
        raise ValueError(
            f"{str(path)!r} cannot be read ({reason}); it may be damaged, so download "
            "or write it again, or quantized, which is not supported, so use the "
            "original weights in bfloat16 or float32"
        ) from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{str(path)!r} holds no array under {key!r}")
    return arrays


class Names(NamedTuple):
    """How the keys of a file name the variables of a model.

    Attributes:
      layout: one of `layouts(model)`.
      prefix: of the names in this layout.
      keys: {name: key}. Names lack what wrappers such as DDP insert into keys.
      wrapper: the prefix of every key that is not part of the names.
    """

    layout: str
    prefix: str
    keys: dict[str, str]
    wrapper: str


def names_of(model: nnx.Module, arrays: Mapping[str, Any]) -> Names:
    """Read the keys of a file: most modules of its layout have their names in them.

    Args:
      model: the model that the file fills, possibly abstract.
      arrays: arrays, or other objects with a shape, by key.

    Raises:
      ValueError: files of other libraries are not supported for this kind of model.
    """
    keys = {_INSERTED.sub("", key): key for key in arrays}
    if len(keys) < len(arrays):  # two keys would have one name
        keys = {key: key for key in arrays}
    record = record_of(model)
    # Of the names of all blocks, those of one.
    several = list({re.sub(r"\d+", "", name): name for name in keys}.values())

    found = {x: _prefix(record.layout(model, x), several) for x in layouts(model)}
    most = max(count for count, _ in found.values())

    def fitting(name: str) -> int:
        """The number of arrays that have our shape."""
        try:
            chosen = record.layout(model, name)
            needed = sources(model, chosen, found[name][1]).values()
        except ValueError:  # a variable that this layout lacks
            return -1
        shapes = {name: tuple(arrays[key].shape) for name, key in keys.items()}
        return sum(source.shape == shapes.get(source.key) for source in needed)

    tied = [name for name, (count, _) in found.items() if count == most]
    layout = max(tied, key=fitting) if len(tied) > 1 else tied[0]
    chosen, (_, prefix) = record.layout(model, layout), found[layout]
    wrapper = prefix.removesuffix(chosen.prefix)
    while not all(name.startswith(wrapper) for name in keys):
        wrapper = wrapper[: wrapper[:-1].rfind(".") + 1]
    names = {name.removeprefix(wrapper): key for name, key in keys.items()}
    return Names(layout, prefix.removeprefix(wrapper), names, wrapper)


def _prefix(layout: Layout, names: Iterable[str]) -> tuple[int, str]:
    """The number of a layout's modules that have a name, and the names' prefix."""
    counts: Counter[str] = Counter()
    for module in set(layout.modules.values()):
        numbered = re.sub(r"\\\{1?\\\}", r"\\d+", re.escape(module))
        start = re.compile(r"(?<![^./])" + numbered)
        counts.update({m.string[: m.start()] for m in map(start.search, names) if m})
    known = ((n, -len(prefix), prefix) for prefix, n in counts.items())
    count, _, prefix = max(known, default=(0, 0, ""))
    return count, prefix


def _table(model: nnx.Module, names: Names) -> dict[Leaf, Source]:
    record = record_of(model)
    record.check(model, names.layout)
    return sources(model, record.layout(model, names.layout), names.prefix)


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
    names = names_of(model, arrays)
    named = {name: arrays[key] for name, key in names.keys.items()}
    try:
        found = _match(model, named, names, new_head=new_head, resize=resize)
    except ValueError as error:
        if not names.wrapper:
            raise
        parts = error.parts if isinstance(error, Misfit) else (str(error),)
        where = f" (in keys after the prefix {names.wrapper!r})"
        raise Misfit(*parts, where) from None
    table = {
        leaf: source._replace(key=names.keys[source.key])
        for leaf, source in found.table.items()
    }
    return found._replace(table=table, unused=[names.keys[n] for n in found.unused])


def _match(
    model: nnx.Module,
    arrays: Mapping[str, np.ndarray],
    names: Names,
    *,
    new_head: bool,
    resize: bool,
) -> Match:
    table = _table(model, names)
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
    unused = record_of(model).unused(model, names.layout)
    unexpected = [
        key
        for key in left
        if not (_BUFFERS.search(key) or unused.search(key) or (fresh and key in head))
    ]
    if "lm_head.weight" in unexpected and ("embedding", None) in table:
        unexpected.remove("lm_head.weight")
        key = table["embedding", None].key
        if not np.array_equal(arrays["lm_head.weight"], arrays.get(key, np.nan)):
            said = "the file holds 'lm_head.weight', which is not the embedding; pass "
            raise Misfit(said, {"tied": "False"})
    wrong = explain_mismatch(model, arrays, unexpected, needed - arrays.keys(), needed)
    if wrong:
        raise wrong
    if headless and not fresh:
        lacking = " and ".join(sorted(head))
        raise Misfit(
            f"the file holds a network without a head (it lacks {lacking}); pass ",
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
        if path == "position" and positions.fits(model, source, given.shape, resize):
            resized = True
            continue
        raise Misfit(
            f"{source.key!r} has shape {tuple(given.shape)}, but the model needs "
            f"{source.shape}",
            *_size_options(model, path, source, given.shape),
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
      arrays: of the file, by key. The model may share their memory.
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
        if path == "position" and matched.resized:
            array = positions.resized(model, array).reshape(source.shape)
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
    lead, part = tuple(n + 1 for n in max(by_place)), next(iter(parts.values()))
    whole = np.empty((*lead, *part.shape), part.dtype)
    for place, array in by_place.items():
        whole[place] = array
    return whole


def _head_options(model: nnx.Module) -> tuple[str | dict[str, str], ...]:
    """The options for a file without a head, as parts of a `Misfit`."""
    if record_of(model).reads_tokens:
        tied = ({"tied": "True"}, " if the embedding is the readout")
        return {"head": "False"}, " for features, or ", *tied
    new = ({"out_features": str(saving.model_classes(model))}, " for a new head")
    if positions.has_grid(model):
        return *new, ", or ", {"out_features": "0"}, " for features"
    return new


# Options that set the size of an axis.
_OPTION_OF = {"classes": "out_features", "vocab": "vocab_size", "positions": "context"}


def _size_options(
    model: nnx.Module, path: str, source: Source, shape: tuple[int, ...]
) -> tuple[str | dict[str, str], ...]:
    """The option for an array of another size, as parts of a `Misfit`.

    Args:
      model: the model.
      path: of the leaf.
      source: of the leaf.
      shape: of the array in the file.
    """
    unclear = ("; check the width and the other options",)
    variables = nnx.to_flat_state(nnx.state(model, nnx.Param))
    names = {"/".join(map(str, p)): v.get_metadata()["axes"] for p, v in variables}
    sized = [i for i, name in enumerate(names.get(path, ())) if name in _OPTION_OF]
    if len(sized) != 1 or not len(source.leaf) == len(source.shape) == len(shape):
        return unclear
    axis = source.order[sized[0]]
    other = [i for i in range(len(source.shape)) if i != axis]
    if any(shape[i] != source.shape[i] for i in other):
        return unclear
    return "; pass ", {_OPTION_OF[names[path][sized[0]]]: str(shape[axis])}


def layouts(model: nnx.Module) -> tuple[str, ...]:
    """List the layouts of other libraries for a model, the default first.

    Raises:
      ValueError: no other library has this kind of model.

    Examples:
      >>> from mupax import zoo
      >>> from mupax.zoo.weights import foreign
      >>> foreign.layouts(zoo.create("resnet18", width=4, rngs=nnx.Rngs(0)))
      ('timm', 'torchvision', 'transformers')
    """
    known = record_of(model).layouts(model)
    if not known:
        kinds = (r.model.__name__ for r in records() if r.timm or r.transformers)
        raise ValueError(
            f"no other library has names for a {type(model).__name__}, only for "
            f"{', '.join(sorted(kinds))}; use a directory of zoo.save, which holds any "
            "model"
        )
    return known


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
    record = record_of(model)
    try:
        record.check(model, layout)
        return sources(model, record.layout(model, layout))
    except ValueError as error:
        raise ValueError(
            f"the layout {layout!r} cannot hold this {type(model).__name__}: "
            f"{str(error).partition('; ')[0]}; use another layout, or zoo.save"
        ) from None


def factors(model: nnx.Module) -> dict[str, float]:
    """Factors of the parameters in an equivalent network without multipliers.

    Files of other libraries cannot hold a branch multiplier or a scale of logits. Each
    multiplier is next to a linear map, so it can be multiplied into that map's weights.

    Args:
      model: of a family that other libraries have, possibly abstract.

    Returns:
      {path: factor}, without factors of one; empty for a model at its base size.

    Raises:
      ValueError: another kind of model; a multiplier of zero; or a tied readout without
        a norm before it, into which its factor could be folded.

    Examples:
      >>> from mupax import zoo
      >>> from mupax.zoo.weights.foreign import factors
      >>> model = zoo.create("vit", width=32, depth=4, base_width=8, base_depth=1,
      ...                    heads=2, rngs=nnx.Rngs(0))
      >>> for path, factor in factors(model).items():
      ...     print(path, factor)  # a·M^-1 = ¼, and √(4/16) for 1/d_head
      blocks/attention/out/bias 0.25
      blocks/attention/out/kernel 0.25
      blocks/attention/query/bias 0.5
      blocks/attention/query/kernel 0.5
      blocks/mlp/down/bias 0.25
      blocks/mlp/down/kernel 0.25
    """
    layouts(model)  # raises if there are none
    record, plan = record_of(model), saving.plan_of(model)
    by_path = {}
    for path, scale in scales(model).items():
        outer = record.factor(model, path)
        outer *= plan.output if path.startswith("readout/") else 1.0
        factor = optim.multipliers(scale, plan.parametrization).forward * outer
        if factor == 0:
            raise ValueError(
                f"{path!r} is multiplied by zero, which cannot be folded into weights; "
                "use a branch_multiplier other than zero"
            )
        # √d · 1/√d is one up to rounding.
        if not math.isclose(factor, 1, rel_tol=1e-12):
            by_path[path] = factor
    return by_path
