"""`load_pretrained`: load models with trained weights, ours or other libraries'."""

import contextlib
import dataclasses
import importlib.resources
import logging
import os
import pathlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mupax.optim.rules.parametrizations import closest

from ..addresses import public
from ..preprocessing import DataConfig, read_timm, read_transformers, remember
from ..registry import (
    abstract,
    complete,
    default_options,
    options_of,
    reads_tokens,
    record_of,
)
from . import foreign, hub, remote, saving
from .architectures import Architecture, identify
from .files import read_json

_SHIPPED = "checkpoints"
_EOS = "eos_token_id"
logger = logging.getLogger("mupax.zoo")


def list_pretrained() -> list[str]:
    """List the trained models that come with the package.

    Examples:
      >>> from mupax import zoo
      >>> zoo.list_pretrained()
      ['cnn_cifar10', 'cnn_mnist', 'gpt_shakespeare', 'resmlp_digits', 'resmlp_fashion']
    """
    folder = importlib.resources.files("mupax.zoo") / _SHIPPED
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def load_pretrained(
    name: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> nnx.Module:
    """Load a model with trained weights.

    Args:
      name: of a model that comes with the package, or of the model that `source`
        holds. A source alone is enough where it says what it holds: a directory of
        ours, or the id of a repository.
      source: a directory that `zoo.save` wrote, which may be in object storage, e.g.
        "gs://bucket/model", as may files; a .safetensors file with the names
        of timm, torchvision or transformers; a .npz file of big_vision; the id of
        such a repository on the Hugging Face hub, e.g. "timm/resnet50.a1_in1k", with
        "@" and a branch, tag or commit behind it if need be; a directory with the files
        of such a repository. Weights may lie in several files, which an index lists.
        None for what comes with the package, which needs no network.
      **overrides: options that replace the saved ones, or the defaults if the source
        holds only weights. With another `out_features`, or if the source has no
        readout, the readout gets new initial values from `rngs`. With another
        `input_shape` a ViT's positions are interpolated.

    Returns:
      The model, in training mode: call `model.eval()` before you predict with batch
      normalization or dropout. One from a directory of `zoo.save` keeps its saved base;
      any other is its own base, unless `base_width` or `base_depth` are given. It
      computes the same function for any base; learning rates are relative to the base.

    Raises:
      ValueError: the name is unknown; the source holds another model, cannot be read,
        or does not fit; or an option would change the function of the weights.

    A repository's `config.json` states the architecture; an unsupported one raises an
    error. A file of weights does not state it: the assumed architecture is logged as a
    warning of the logger "mupax.zoo".

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import zoo
      >>> model = zoo.load_pretrained("resmlp_digits")
      >>> model(jnp.zeros((1, 8, 8, 1))).shape
      (1, 10)
    """
    known: str | None = str(name)
    if revision := overrides.get("revision"):
        raise ValueError(f"write '{source or name}@{revision}' in place of revision=")
    if source is None:
        if name in list_pretrained():
            return saving.load(_shipped(str(name)), **overrides)
        is_path = pathlib.Path(name).exists() or hub.is_file_name(name)
        if not (is_path or hub.is_id(name) or remote.is_remote(name)):
            if "/" in str(name):
                raise ValueError(f"there is no file or directory {str(name)!r}")
            near = closest(str(name), list_pretrained())
            near = f"did you mean {near!r}? Otherwise " if near else ""
            raise ValueError(
                f"no weights of {str(name)!r} come with the package, only of "
                f"{', '.join(list_pretrained())}; {near}give a source"
            )
        source, known = name, None
    loaded = read_source(known, source, **overrides)
    if loaded.assumed:
        logger.warning(loaded.assumed)
    return loaded.model


def _shipped(name: str) -> pathlib.Path:
    """The directory of a model that comes with the package, installed unzipped."""
    return pathlib.Path(str(importlib.resources.files("mupax.zoo") / _SHIPPED / name))


class Loaded(NamedTuple):
    """Result of `read_source`.

    Attributes:
      model: the model with its weights.
      unused: keys of another library's file that were deliberately not used.
      assumed: the architecture that was assumed, for a file that does not state it;
        else "".
      layout: of another library's file, one of `foreign.layouts`; else None.
    """

    model: nnx.Module
    unused: list[str]
    assumed: str
    layout: str | None = None


@dataclasses.dataclass(frozen=True)
class _Repository:
    """Files of another library: on the hub, in a directory, or one file of weights.

    Attributes:
      source: the id, the directory, or the file.
    """

    source: str | os.PathLike[str]

    def get(self, name: str) -> pathlib.Path | None:
        """The local path of a file; None if there is none."""
        if hub.is_id(self.source):
            return hub.download(str(self.source), name, optional=True)
        folder = pathlib.Path(self.source)
        if not folder.is_dir():
            # A renamed file may be in a directory with the config of another one.
            if folder.name != hub.WEIGHTS:
                return None
            folder = folder.parent
        return folder / name if (folder / name).is_file() else None

    def read(self, name: str) -> Mapping[str, Any] | None:
        """The contents of a JSON file; None if there is none."""
        path = self.get(name)
        return None if path is None else _read_json(path)

    def weights(self) -> list[pathlib.Path]:
        """The files of weights.

        Raises:
          ValueError: there are none.
        """
        path = pathlib.Path(self.source)
        if path.is_file():
            return [path]
        if (whole := self.get(hub.WEIGHTS)) is not None:
            return [whole]
        if (index := self.get(hub.INDEX)) is not None:
            return [self.get(part) or index.parent / part for part in _parts(index)]
        if hub.is_id(self.source):
            # Raises, because the repository has no supported weights.
            hub.download(str(self.source), hub.WEIGHTS)
        path = path / hub.WEIGHTS if path.is_dir() else path
        if hub.is_file_name(path):
            raise ValueError(f"there is no file {str(path)!r}")
        raise ValueError(
            f"there is no directory {str(path)!r}; pass one that zoo.save wrote, a "
            ".safetensors or .npz file, or the id of a repository on the hub"
        )

    def data(self) -> DataConfig | None:
        """The preprocessing; None if no config states it."""
        config = self.read(hub.CONFIG)
        if config is None:
            return None
        try:
            if "architecture" in config:
                return read_timm(config)
            if "model_type" in config and "vocab_size" not in config:
                processor = self.read(hub.PROCESSOR)
                return (
                    None if processor is None else read_transformers(config, processor)
                )
        except (ArithmeticError, TypeError, ValueError, KeyError) as error:
            # The weights can be used without it.
            logger.warning(
                f"the preprocessing of {str(self.source)!r} cannot be read ({error}); "
                "set it by zoo.set_data_config(model, zoo.DataConfig(...))"
            )
        return None


def read_source(
    name: str | None,
    source: str | os.PathLike[str],
    **overrides: Any,
) -> Loaded:
    """Read a model from any source; see `load_pretrained`.

    Args:
      name: of the model; None to take it from the source.
      source: a directory, a file, the id of a repository, or the name of a model that
        comes with the package.
      **overrides: options of the model, and `rngs`.

    Raises:
      ValueError: as `load_pretrained`.
    """
    if name is not None:
        options_of(name)
    if remote.is_remote(source):
        with _copied(source) as place:
            return read_source(name, place, **overrides)
    files = _located(source)
    if isinstance(files, pathlib.Path):
        return Loaded(saving.load(files, expected=name, **overrides), [], "")
    # Raise for unsupported architectures before downloading weights.
    config = files.read(hub.CONFIG)
    described = None if config is None else identify(config, str(source))
    weights = files.weights()
    name, options = _resolve(name, described, source)
    if config is not None and reads_tokens(name):
        vocab = {**default_options(name), **options}["vocab_size"]
        options = {**options, **_ends(files, vocab)}
    rngs = overrides.pop("rngs", None) or nnx.Rngs(0)
    resized = "input_shape" in overrides
    arrays = _read_all(weights)
    if described:
        _check_same_function(name, options, overrides, source, arrays)
    options = {**options, **overrides}
    may = {"new_head": "out_features" in overrides, "resize": "input_shape" in options}
    model = abstract(name, **options)
    saving.check_sizes(model, str(source))
    unused = foreign.fill(model, arrays, **may)
    complete(model, rngs)
    remember(model, files.data(), resized=resized)
    layout = foreign.names_of(model, arrays).layout
    assumed = "" if described else _assumption(name, source, layout)
    return Loaded(model, unused, assumed, layout)


def read_data_config(source: str | os.PathLike[str]) -> DataConfig | None:
    """Read the preprocessing of a source, without weights; None if it states none.

    Args:
      source: as in `load_pretrained`, or the name of a model that comes with the
        package.

    Raises:
      ValueError: the source cannot be read.
    """
    if remote.is_remote(source):
        with _copied(source) as place:
            return read_data_config(place)
    files = _located(source)
    if isinstance(files, pathlib.Path):
        return saving.read_config(files).data
    if not hub.is_id(source):
        files.weights()  # raises if there are none
    return files.data()


def _located(source: str | os.PathLike[str]) -> pathlib.Path | _Repository:
    """The directory of a model of `zoo.save`, or the files of another library.

    Raises:
      ValueError: the source is a directory without weights that are read.
    """
    path = _uploaded(source) or pathlib.Path(source)
    if source in list_pretrained() and not path.exists():
        path = _shipped(str(source))
    _check_weights(path)
    ours = path.is_dir() and _is_ours(path)
    return path if ours else _Repository(source)


@contextlib.contextmanager
def _copied(address: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A local copy of what is in object storage; errors name the address."""
    place = remote.local(address)
    try:
        yield place
    except ValueError as error:
        text = str(error).replace(str(place), public(remote.normalized(address)))
        raise ValueError(text) from None


def _uploaded(source: str | os.PathLike[str]) -> pathlib.Path | None:
    """Download a repository of files of `zoo.save`; None for other repositories."""
    if not hub.is_id(source):
        return None
    config = hub.download(str(source), hub.CONFIG, optional=True)
    if config is None or not saving.is_config(_read_json(config)):
        return None
    weights = hub.download(str(source), saving.WEIGHTS)
    return None if weights is None else weights.parent


def _is_ours(directory: pathlib.Path) -> bool:
    """Whether a directory may be from `zoo.save`, rather than a repository's files."""
    return not any((directory / name).is_file() for name in (hub.WEIGHTS, hub.INDEX))


def _check_weights(path: pathlib.Path) -> None:
    """Raise a `ValueError` for a directory of weights of another name or format."""
    config = path / hub.CONFIG
    if not (path.is_dir() and _is_ours(path)):
        return
    if config.is_file() and saving.is_config(_read_json(config)):
        return
    found = [sorted(path.glob(f"*{suffix}")) for suffix in hub.FILE_SUFFIXES]
    files = next(filter(None, found), [])
    if not files and config.is_file() and "model_type" in _read_json(config):
        raise ValueError(f"{str(path)!r} holds no weights; add its {hub.WEIGHTS}")
    if not files or files[0].name == saving.WEIGHTS:  # ours; its config is missing
        return
    first = files[0]
    remedy = foreign.how_to_convert(files)
    if first.suffix in (".safetensors", ".npz"):
        remedy = f"pass {str(first)!r} and the name of its model"
    raise ValueError(
        f"{str(path)!r} holds no {hub.WEIGHTS}, only {first.name!r}: {remedy}"
    )


def _ends(files: _Repository, vocab: int) -> dict[str, tuple[int, ...]]:
    """The option `eos` of a decoder of transformers; empty if no file states it.

    As in transformers, generation_config.json goes before config.json.

    Raises:
      ValueError: a file is damaged.
    """

    def read(name: str) -> Mapping[str, Any]:
        try:
            path = files.get(name)
        except ValueError as error:
            # The weights can be used without it, e.g. offline.
            logger.warning(f"end tokens are read without {name}: {error}")
            return {}
        return {} if path is None else _read_json(path)

    for name in ("generation_config.json", hub.CONFIG):
        given = read(name).get(_EOS)
        if given is None:
            continue
        ends = given if isinstance(given, list) else [given]
        if not all(type(token) is int for token in ends):
            raise ValueError(
                f"the {name} of {str(files.source)!r} says "
                f"{_EOS}={reprlib.repr(given)}, which "
                "must be a token or a list of tokens; download it again"
            )
        # A model with a smaller vocabulary than its tokenizer cannot write the others.
        return {"eos": tuple(token for token in ends if 0 <= token < vocab)}
    return {}


def _parts(index: pathlib.Path) -> list[str]:
    """Read the file names from an index of weights.

    Raises:
      ValueError: the index lists no files, or a path outside of its directory.
    """
    listed = _read_json(index).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    for name in names or [None]:
        plain = isinstance(name, str) and pathlib.PurePath(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{str(index)!r} must list .safetensors files of its directory under "
                f"'weight_map'; it lists {reprlib.repr(name)}, so download it again"
            )
    return sorted(set(names))


def _read_all(paths: list[pathlib.Path]) -> dict[str, np.ndarray]:
    """Read the arrays of all files of one network, by key."""
    arrays: dict[str, np.ndarray] = {}
    for path in paths:
        more = foreign.read(path)
        twice = sorted(arrays.keys() & more.keys())
        if twice:
            raise ValueError(
                f"{str(path)!r} holds {twice[0]!r}, which another file of this model "
                "holds too; download the files again"
            )
        arrays |= more
    return arrays


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error}); it may be damaged, so download "
            "it again"
        ) from None


def _resolve(
    name: str | None,
    described: Architecture | None,
    source: str | os.PathLike[str],
) -> tuple[str, dict[str, Any]]:
    """The name of the model to create, and its options from the source's config."""
    if described is None:
        if name is None:
            raise ValueError(
                f"{str(source)!r} does not state the architecture of its weights; pass "
                "the name of a model too, one of zoo.list_models()"
            )
        return name, {}
    if name is None or name == described.model:
        return described.model, described.options
    kind, defaults = options_of(described.model)
    own, needed = options_of(name)
    if own is kind and not needed:  # a name of the family, e.g. "vit"
        return name, {**defaults, **described.options}
    raise ValueError(f"{str(source)!r} holds a {described.model!r}, not a {name!r}")


def _check_same_function(
    name: str,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    source: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Raise a `ValueError` if options would change the function of weights.

    Where the weights do not fit their config, options may differ from it.
    """
    try:
        saving.check_same_function(name, options, overrides, f"the weights of {source}")
    except ValueError:
        try:
            foreign.match(abstract(name, **options), arrays)
        except ValueError:
            return
        raise


def _assumption(name: str, source: str | os.PathLike[str], layout: str) -> str:
    library = layout.partition("_")[0]
    if library not in ("timm", "torchvision", "transformers"):
        library = "transformers" if reads_tokens(name) else "big_vision"
    owner = f"{library}'" if library.endswith("s") else f"{library}'s"
    return (
        f"{str(source)!r} does not state its architecture; assumed {owner} "
        f"{name}{record_of(name).unseen}"
    )
