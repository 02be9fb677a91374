"""Paths in object storage: gs:// and s3:// (and every other scheme of fsspec).

A run reads its inputs from object storage through local copies (`local`); see
`mupax.experiments.run.mirror` for what it writes.
"""

import hashlib
import os
import pathlib
import re
import secrets
import shutil
import urllib.parse
from typing import Any

from .errors import UserError, reason

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/{1,2}.", re.IGNORECASE)
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the address of something in object storage.

    Examples:
      >>> is_remote("gs://bucket/runs"), is_remote("runs/gs"), is_remote("s3:/bucket/x")
      (True, False, True)
    """
    return _URL.match(os.fspath(path)) is not None


def refuse(path: str | os.PathLike[str], name: str) -> None:
    """Refuse an address in object storage where files are written or mapped.

    Args:
      path: of a directory or file.
      name: of the flag or argument.

    Raises:
      UserError: `path` is in object storage.
    """
    if not is_remote(path):
        return
    scheme = os.fspath(path).partition(":")[0]
    copy = {"gs": "gcloud storage cp -r", "s3": "aws s3 cp --recursive"}.get(scheme)
    tool = f" (with `{copy}`)" if copy else ""
    raise UserError(
        f"{name}={os.fspath(path)} is in object storage, which does not work here; "
        "give a directory that all processes share, e.g. on NFS or Lustre, and copy "
        f"from or to {scheme}://{tool}"
    )


def local(path: str | os.PathLike[str]) -> pathlib.Path:
    """A local path with the contents of a path, which may be in object storage.

    A file or directory in object storage is downloaded once, to ~/.cache/mupax/remote
    (or MUPAX_CACHE), and again when it has changed there. A download that was killed
    leaves nothing.

    Args:
      path: of a file or directory, or its address.

    Raises:
      UserError: it does not exist, cannot be read, or needs a package that is missing.
    """
    if not is_remote(path):
        return pathlib.Path(path).expanduser()
    address = normalized(path)
    system, place = connect(address)
    try:
        files = _files(system, place)
        if not files:
            raise UserError(f"there is nothing at {address}")
        return _copied(system, address, place, files)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # of the network, the credentials, the client
        raise UserError(f"{address} cannot be read ({reason(error)})") from None


def normalized(address: str | os.PathLike[str]) -> str:
    """An address with two slashes after the scheme, and none at the end.

    Examples:
      >>> normalized("s3:/bucket/run/")
      's3://bucket/run'
    """
    return re.sub(r":/+", "://", os.fspath(address).rstrip("/"), count=1)


def connect(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it. Nothing is sent yet.

    Args:
      address: normalized.

    Raises:
      UserError: the scheme is unknown, or its package is missing.
    """
    scheme = address.partition(":")[0]
    try:
        import fsspec

        system, place = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(scheme)
        remedy = f"pip install {package}" if package else "use gs:// or s3://"
        raise UserError(f"{address} cannot be used ({error}); {remedy}") from None
    system.invalidate_cache()
    return system, place.rstrip("/")


def _files(system: Any, place: str) -> dict[str, str]:
    """Relative path and fingerprint of each file; a single file's path is ""."""
    found = system.find(place, detail=True)
    out = {}
    for name, info in found.items():
        inside = name.removeprefix(place.rstrip("/")).lstrip("/")
        parts = pathlib.PurePosixPath(inside).parts
        if ".." in parts:
            raise UserError(f"{name!r} is not below {place!r}")
        keys = ("etag", "ETag", "md5Hash", "generation", "size", "created", "mtime")
        out[inside] = repr([(key, str(info[key])) for key in keys if key in info])
    return out


def _copied(
    system: Any, address: str, place: str, files: dict[str, str]
) -> pathlib.Path:
    """The local copy; downloaded where there is none of these fingerprints."""
    text = repr((address, sorted(files.items())))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    name = urllib.parse.unquote(address.rpartition("/")[2]) or "data"
    folder = cache() / "remote" / key
    if not folder.exists():
        building = folder.with_name(f".{key}.{secrets.token_hex(6)}")
        try:
            for inside in files:
                target = building / name / inside if inside else building / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = f"{place.rstrip('/')}/{inside}" if inside else place
                system.get_file(source, str(target))
            if _files(system, place) != files:
                raise UserError(f"{address} changed while it was read; try again")
            try:
                building.rename(folder)
            except OSError:
                if not folder.exists():  # another process was faster
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder / name


def cache() -> pathlib.Path:
    """The directory of local copies: ~/.cache/mupax, or MUPAX_CACHE."""
    given = os.environ.get("MUPAX_CACHE")
    root = pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "mupax"
    return root.expanduser()
