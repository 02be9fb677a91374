"""Download from the Hugging Face hub."""

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
    source: str, filename: str, *, optional: bool = False
) -> pathlib.Path | None:
    """Get a file of a repository from the cache or the hub.

    The token and the place of the cache are those of `huggingface_hub`: HF_TOKEN or
    `hf auth login`, HF_HUB_CACHE, and HF_HUB_OFFLINE=1 to use only the cache.

    Args:
      source: `owner/name`, or `owner/name@revision`: a branch, tag or commit.
      filename: path in the repository.
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
    match = _ID.fullmatch(source)
    assert match is not None, source
    place: dict[str, Any] = {
        "repo_id": match["id"],
        "filename": filename,
        "revision": match["revision"],
    }
    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(**place))
    except errors.LocalEntryNotFoundError:
        known = huggingface_hub.try_to_load_from_cache(**place)
        if optional and known is huggingface_hub._CACHED_NO_EXIST:
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
            "terms on the hub, and pass a token by `hf auth login` or HF_TOKEN; "
            "offline, pass the path of a file"
        ) from None


def _reason(error: Exception) -> str:
    """The type of an error and its first line. Addresses in it may be signed."""
    return f"{type(error).__name__}: {public(files.reason(error))}"
