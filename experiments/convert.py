"""Weights between other libraries' files and directories of ours."""

import ast
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from mupax import zoo
from mupax.zoo import foreign, hub, saving
from mupax.zoo.pretrained import Loaded, read_source
from mupax.zoo.registry import recipe

from .errors import UserError

HELP = """\
  --source         a directory that zoo.save wrote, a .safetensors or .npz file, or the
                   id of a repository on the Hugging Face hub. HF_TOKEN, HF_HUB_CACHE
                   and HF_HUB_OFFLINE=1 work as for the hub's own tools
  --revision       a branch, tag or commit of that repository
  --out            where to write, which must not be there yet: a name that ends in
                   .safetensors or .npz is a file for other libraries, any other a
                   directory for zoo.load_pretrained
  --model          a name of `mupax models`; a directory of ours and a repository on
                   the hub know their own
  --layout         whose names a file gets: timm, torchvision, big_vision or augreg for
                   a ViT, timm or torchvision for a ResNet, transformers for a GPT
  --option KEY=V   an option of the model other than its default; may be repeated.
                   With another out_features the readout starts anew
  --seed           of a new readout

  mupax convert --model resnet50 --source weights.safetensors --out runs/resnet50
  mupax convert --source timm/resnet50.a1_in1k --out runs/resnet50
  mupax convert --source runs/resnet50 --out resnet50.safetensors --layout timm"""
_FILES = (".safetensors", ".npz")


def run(argv: list[str]) -> None:
    """Convert as the flags say, and print what was done.

    Args:
      argv: the command's name and its flags; see `HELP`.

    Raises:
      UserError: bad flags, a source that cannot be read or does not fit, an output
        that is there already. Nothing is written then.
    """
    given = _parse(argv)
    out = pathlib.Path(given.out)
    to_file = out.suffix in _FILES
    if out.exists():
        raise UserError(f"--out={out} is there already; choose another name")
    if given.layout and not to_file:
        raise UserError(
            f"--layout={given.layout} is for files, and --out={out} names a "
            f"directory; let it end in {' or '.join(_FILES)}"
        )
    options = _options(given.option)
    try:
        loaded = _read(given, options)
        model, left = loaded.model, loaded.unused
        if to_file:
            count = _write_file(out, foreign.export(model, given.layout))
        else:
            zoo.save(model, out, notes=f"Converted from {_name(given.source)}.")
            count = sum(np.size(a) for a in saving.arrays_of(model).values())
    except (ValueError, TypeError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from None
    name, _ = recipe(model)
    print(f"{given.source} -> {out}: {name}, {count:,} values")
    if loaded.assumed:
        print(loaded.assumed)
    if left:
        shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        print(f"left unused on purpose, {len(left)} keys: {shown}")
    if to_file:
        print(f"names of {given.layout or foreign.layouts(model)[0]}")
        folded = foreign.factors(model)
        if folded:
            print(f"multipliers went into the weights of {', '.join(folded)}")


def _parse(argv: list[str]) -> Any:
    values = flags.FlagValues()
    for name in ("source", "out", "model", "layout", "revision"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_multi_string("option", [], "", flag_values=values)
    flags.DEFINE_integer("seed", 0, "", flag_values=values)
    try:
        rest = values(argv)
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not understood; flags start with --")
    for name in ("source", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing; see mupax convert --help")
    return values


def _options(words: list[str]) -> dict[str, Any]:
    """Options of a model from "key=value"; values are Python's literals, or words."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--option={word} must be KEY=VALUE")
        if key in found:
            raise UserError(f"--option {key} is given twice")
        if key == "rngs":
            raise UserError("rngs is no option here; give --seed")
        try:
            found[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[key] = value
        if key in ("dtype", "param_dtype"):
            try:
                found[key] = jnp.dtype(value)
            except TypeError:
                raise UserError(f"--option={word}: there is no such dtype") from None
    return found


def _read(given: Any, options: Mapping[str, Any]) -> Loaded:
    """The model that the flags name, and what was left or assumed."""
    is_file = hub.is_file_name(given.source)
    if given.model is None and is_file and pathlib.Path(given.source).exists():
        raise UserError(
            f"--model is missing: {given.source} holds weights, and does not say what "
            "they are of; give a name of `mupax models`"
        )
    source_options = hub.HubOptions(revision=given.revision)
    rngs = nnx.Rngs(given.seed)
    return read_source(given.model, given.source, source_options, rngs=rngs, **options)


def _name(source: str) -> str:
    """A source without the folders that it lies in; the id of a repository whole."""
    path = pathlib.Path(source)
    return path.name if path.exists() else source


def _write_file(out: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> int:
    """Write a file whole or not at all; how many values it holds."""
    if out.suffix == ".npz":
        for key, array in arrays.items():
            if array.dtype.kind != "f":
                raise ValueError(
                    f".npz files cannot hold {array.dtype}, which {key!r} is; write "
                    "a .safetensors file, or convert with param_dtype=float32"
                )
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=".converting-")
    os.close(handle)
    beside = pathlib.Path(name)
    try:
        if out.suffix == ".npz":
            with beside.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            _save_safetensors(arrays, beside)
        beside.chmod(0o644)
        beside.rename(out)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return sum(array.size for array in arrays.values())


def _save_safetensors(arrays: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise UserError(
            "writing .safetensors needs safetensors: pip install 'mupax[hub]'"
        ) from None
    # Libraries of torch ask for this note.
    safetensors.numpy.save_file(dict(arrays), path, metadata={"format": "pt"})
