"""Download from the Hugging Face hub."""

import dataclasses
import os
import pathlib
import re
from typing import Any

from ..addresses import public
from . import files

# Names with these suffixes are files, even if they do not exist. Other names with a
# dot, e.g. timm/resnet50.a1_in1k, may be repositories. The likeliest weights are first.
FILE_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".pkl"),
    *(".pickle", ".h5", ".hdf5", ".msgpack", ".onnx", ".gguf", ".zip", ".tar"),
)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PROCESSOR = "preprocessor_config.json"  # of transformers, for images
# The index of weights that are split into several files.
INDEX = "model.safetensors.index.json"
_ID = re.compile(r"(hf[-_]hub:)?(?P<id>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class HubOptions:
    """How a repository is downloaded; see `huggingface_hub.hf_hub_download`.

    Attributes:
      revision: a branch, tag or commit; None for the main branch.
      token: for private or gated repositories; None for the token that `hf auth login`
        stored or HF_TOKEN holds.
      cache_dir: cache of downloads; None for the hub's default.
      local_files_only: read only the cache, without a network.
    """

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | pathlib.Path | None = None
    local_files_only: bool = False


def is_id(source: str | os.PathLike[str]) -> bool:
    """Whether a source has the form of a repository's id and is not a path on disk.

    Examples:
      >>> is_id("timm/resnet50.a1_in1k"), is_id("timm/resnet50.a1_in1k@main")
      (True, True)
      >>> is_id("weights/resnet50.safetensors"), is_id("resnet50")
      (False, False)
    """
    if not isinstance(source, str) or pathlib.Path(source).exists():
        return False
    return _ID.fullmatch(source) is not None and not is_file_name(source)


def is_file_name(source: str | os.PathLike[str]) -> bool:
    """Whether a source has a suffix of weight files."""
    return pathlib.Path(source).suffix.lower() in FILE_SUFFIXES


def download(
    source: str, filename: str, options: HubOptions, *, optional: bool = False
) -> pathlib.Path | None:
    """Get a file of a repository from the cache or the hub.

    Args:
      source: `owner/name`, or `owner/name@revision` if `options` has no revision.
      filename: path in the repository.
      options: see `HubOptions`.
      optional: return None if the repository has no such file.

    Returns:
      The path of the file in the cache.

    Raises:
      ValueError: huggingface_hub is not installed, or the file cannot be downloaded;
        the message says what to do.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise ValueError(
            f"the path {source!r} does not exist, and reading from the hub needs "
            "huggingface_hub: pip install '.[hub]' in a clone of mupax"
        ) from None
    repository, options = _split(source, options)
    given: dict[str, Any] = dataclasses.asdict(options)
    try:
        file = huggingface_hub.hf_hub_download(repository, filename, **given)
    except errors.LocalEntryNotFoundError:
        if optional and _was_missing(repository, filename, options):
            return None
        raise ValueError(
            f"the path {source!r} does not exist, the hub cannot be reached, and the "
            f"cache holds no {filename} of it; offline, pass the path of a file"
        ) from None
    except errors.EntryNotFoundError:
        if optional:
            return None
        raise ValueError(
            f"{source!r} on the hub holds no {filename}, and pickled weights are not "
            "supported; pass a repository with that file, or the path of a "
            ".safetensors file"
        ) from None
    except Exception as error:  # the hub, the network, proxies and disks raise theirs
        raise ValueError(
            f"{source!r} is not a path on disk, and {filename} of that repository "
            f"cannot be downloaded ({_reason(error)}); check its name, revision and "
            "terms on the hub, and pass a token by `hf auth login`, HF_TOKEN or "
            "token=...; offline, pass the path of a file"
        ) from None
    return pathlib.Path(file)


def _reason(error: Exception) -> str:
    """The type of an error and its first line. Addresses in it may be signed."""
    line, name = public(files.reason(error)), type(error).__name__
    return name if line == name else f"{name}: {line}"


def _split(source: str, options: HubOptions) -> tuple[str, HubOptions]:
    match = _ID.fullmatch(source)
    assert match is not None, source
    inside = match["revision"]
    if inside is None:
        return match["id"], options
    if options.revision not in (None, inside):
        raise ValueError(
            f"{source!r} names a revision, and revision={options.revision!r} another; "
            "give one of them"
        )
    return match["id"], dataclasses.replace(options, revision=inside)


def _was_missing(repository: str, filename: str, options: HubOptions) -> bool:
    """Whether the cache knows that a repository has no such file."""
    import huggingface_hub

    known = huggingface_hub.try_to_load_from_cache(
        repository, filename, cache_dir=options.cache_dir, revision=options.revision
    )
    return known is huggingface_hub._CACHED_NO_EXIST
