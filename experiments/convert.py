"""Convert weights between the files of other libraries and directories of the zoo."""

import ast
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import zoo
from mupax.zoo.addresses import public
from mupax.zoo.families.decoder import Decoder
from mupax.zoo.registry import recipe
from mupax.zoo.weights import foreign, hub, remote, saving
from mupax.zoo.weights.pretrained import read_source

from . import io
from .errors import UserError, import_extra, reason, visible
from .loading import find_model

_FILES = (".safetensors", ".npz")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def run(
    source: str,
    out: str,
    *,
    model: str | None = None,
    layout: str | None = None,
    option: Sequence[str] | None = None,
    seed: int = 0,
) -> None:
    """Convert weights, and print a summary; see the flags of `mupax convert`.

    Raises:
      UserError: bad arguments, an unreadable source, weights that do not fit the
        model, or an existing output. Nothing is written.
    """
    if remote.is_remote(out):
        remote.check_free(out)
    elif pathlib.Path(out).exists():
        raise UserError(f"--out={out} exists already; choose another name")
    given, source = source, find_model(source)
    suffix = pathlib.Path(out).suffix
    to_file = suffix in _FILES
    if suffix in _PICKLED:
        raise UserError(
            f"--out={out}: {suffix} files are not written; use a name that ends with "
            f"{' or '.join(_FILES)}, or a directory"
        )
    if layout and not to_file:
        raise UserError(
            f"--layout={layout} is for files, and --out={out} names a directory; use "
            f"a name that ends with {' or '.join(_FILES)}"
        )
    options = _options(option or ())
    is_file = hub.is_file_name(source) and pathlib.Path(source).exists()
    if model is None and is_file:
        raise UserError(
            f"--model is missing: {given} holds weights without a model's name; give "
            "a name of `mupax models`"
        )
    try:
        loaded = read_source(model, source, rngs=nnx.Rngs(seed), **options)
        if to_file:
            # By default, another file of the same library.
            layout = layout or loaded.layout or foreign.layouts(loaded.model)[0]
            arrays = foreign.export(loaded.model, layout)
            if remote.is_remote(out):
                with remote.uploading(out) as target:
                    _write_file(target, arrays)
            else:
                _write_file(pathlib.Path(out), arrays)
        else:
            path = pathlib.Path(given)
            origin = path.name if path.exists() else given
            flags = [("source", given), ("out", out), ("model", model)]
            flags += [("seed", str(seed) if seed else None)]
            flags += [("option", pair) for pair in option or ()]
            command = ["mupax", "convert"]
            for flag, word in flags:
                command += [f"--{flag}", word] if word else []
            training = zoo.Training(source=origin, command=shlex.join(command))
            files = _tokenizer_of(loaded.model, source)
            zoo.save(loaded.model, out, files=files, training=training)
            arrays = saving.arrays_of(loaded.model)
    except (ValueError, TypeError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.errno:
            message = f"{error.filename or out} cannot be used: {reason(error)}"
        if isinstance(error, foreign.Misfit):
            message = error.as_flags("--option ")
        raise UserError(message.replace(source, given)) from None
    count = sum(np.size(array) for array in arrays.values())
    paths, name = visible(public(f"{given} -> {out}")), recipe(loaded.model)[0]
    print(f"{paths}: {name}, {count:,} values")
    if loaded.assumed:
        print(visible(loaded.assumed))
    if unused := loaded.unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        print(f"left unused on purpose, {len(unused)} keys: {visible(shown)}")
    if to_file:
        print(f"names of {layout}")
        if folded := foreign.factors(loaded.model):
            print(f"multipliers are part of the weights of {', '.join(folded)}")


def _tokenizer_of(model: nnx.Module, source: str) -> dict[str, pathlib.Path]:
    """The tokenizer beside the weights of a decoder, to copy; nothing without one."""
    name = "tokenizer.json"
    if not isinstance(model, Decoder):
        return {}
    if hub.is_id(source):
        file = hub.download(source, name, optional=True)
        return {} if file is None else {name: file}
    path = pathlib.Path(source)
    beside = (path if path.is_dir() else path.parent) / name
    return {name: beside} if beside.is_file() else {}


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Options from "key=value" words. Values are Python literals or strings."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--option={word} must be KEY=VALUE")
        if key in options:
            raise UserError(f"--option {key} is given twice")
        if key == "rngs":
            raise UserError("rngs is not an option here; give --seed")
        try:
            options[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[key] = value
        if key in ("dtype", "param_dtype"):
            try:
                options[key] = jnp.dtype(value)
            except TypeError:
                raise UserError(f"--option={word}: there is no such dtype") from None
    return options


def _write_file(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file, completely or not at all."""
    npz = path.suffix == ".npz"
    for key, array in arrays.items():
        if npz and array.dtype.kind != "f":
            raise ValueError(
                f".npz files cannot hold {array.dtype}, the dtype of {key!r}; write a "
                ".safetensors file, or convert with --option param_dtype=float32"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    with io.replacing(path) as temporary:
        if npz:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            return
        safetensors = import_extra("safetensors.numpy", "hub", "a .safetensors file")
        # PyTorch libraries require this metadata.
        try:
            safetensors.save_file(dict(arrays), temporary, metadata={"format": "pt"})
        except Exception as error:  # Rust's, which is no OSError
            raise ValueError(f"{path} cannot be written: {reason(error)}") from None
