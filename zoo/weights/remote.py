"""Paths in object storage: gs:// and s3:// (and every other scheme of fsspec).

What is read is copied here first (`local`); what is written is built here, and then
uploaded (`uploading`).
"""

import contextlib
import errno
import hashlib
import logging
import os
import pathlib
import re
import secrets
import shutil
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..addresses import name_copy, public
from .files import reason

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/{1,2}.", re.IGNORECASE)
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
_LOGIN = {
    "gcs": "run `gcloud auth application-default login`, or set "
    "GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
_THREADS = 8


class RemoteError(ValueError):
    """Something in object storage cannot be read or written.

    The message names addresses without secrets.
    """

    def __init__(self, message: str):
        super().__init__(public(message))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the address of something in object storage.

    Examples:
      >>> is_remote("gs://bucket/runs"), is_remote("runs/gs"), is_remote("s3:/bucket/x")
      (True, False, True)
    """
    return _URL.match(os.fspath(path)) is not None


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
      RemoteError: the scheme is unknown, or its package is missing; an address of a
        bucket holds a password or a query.
    """
    if public(address) != address and (client := _EXTRAS.get(_scheme(address))):
        raise RemoteError(
            f"{address} was given with a user, a password or a query; leave them out, "
            f"and {_LOGIN[client]}"
        )
    try:
        import fsspec

        system, place = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(_scheme(address))
        remedy = (
            f"pip install '.[{extra}]' in a clone of mupax"
            if extra
            else "use gs:// or s3://"
        )
        raise RemoteError(f"{address} cannot be used ({error}); {remedy}") from None
    except Exception as error:  # of the client, e.g. bad credentials
        raise RemoteError(sentence(address, error, "used")) from None
    # It would print a traceback of an error that is raised anyway.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    system.invalidate_cache()
    return system, place.rstrip("/")


def cache() -> pathlib.Path:
    """The directory of local copies: ~/.cache/mupax, or MUPAX_CACHE."""
    given = os.environ.get("MUPAX_CACHE")
    root = pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "mupax"
    return root.expanduser()


# ----- Errors.


def sentence(address: str, error: BaseException, verb: str) -> str:
    """What went wrong with an address, and what to do.

    Args:
      address: normalized.
      error: of the network, the credentials or the client.
      verb: what could not be done: "read", "written" or "used".

    Examples:
      >>> sentence("s3://bucket/run", PermissionError("Access Denied"), "written")
      's3://bucket/run cannot be written (Access Denied); the storage refuses your \
credentials: they must be valid, and allow to list, read, write and delete the objects \
of this bucket'
    """
    why = f"{address} cannot be {verb} ({reason(error)})"
    if _is_local(error):
        return f"{why}; make room on this machine's disk, or set MUPAX_CACHE"
    if isinstance(error, FileNotFoundError):
        return (
            f"{address} cannot be used (there is no such bucket); create it first, "
            "or check its name"
        )
    if "Credentials" in type(error).__name__ or "Anonymous caller" in str(error):
        login = _LOGIN.get(_EXTRAS.get(_scheme(address), ""), "log in")
        return f"{why}; no credentials were found: {login}"
    code = str(getattr(error, "code", ""))
    if (
        isinstance(error, PermissionError)
        or code in ("401", "403")
        or "Forbidden" in str(error)
    ):
        needed = "list and read" if verb == "read" else "list, read, write and delete"
        return (
            f"{why}; the storage refuses your credentials: they must be valid, and "
            f"allow to {needed} the objects of this bucket"
        )
    return f"{why}; check the network and your credentials"


def _is_local(error: BaseException) -> bool:
    """Whether an error is of this machine's disk: it is full, or names a path."""
    if not isinstance(error, OSError):
        return False
    named = isinstance(error.filename, str) and os.path.isabs(error.filename)
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or named


@contextlib.contextmanager
def _explained(address: str, verb: str) -> Iterator[None]:
    """Turn errors of the network, the credentials and the client into one sentence."""
    try:
        yield
    except (RemoteError, FileExistsError):
        raise
    except Exception as error:
        raise RemoteError(sentence(address, error, verb)) from None


def _scheme(address: str) -> str:
    return address.partition(":")[0].lower()


# ----- Reading.


def local(path: str | os.PathLike[str]) -> pathlib.Path:
    """A local path with the contents of a path, which may be in object storage.

    A file or directory in object storage is downloaded once, to ~/.cache/mupax/remote
    (or MUPAX_CACHE), and again when it has changed there. A download that was killed
    leaves nothing.

    Args:
      path: of a file or directory, or its address.

    Raises:
      RemoteError: it does not exist, cannot be read, or needs a package that is
        missing.
    """
    if not is_remote(path):
        return pathlib.Path(path).expanduser()
    address = normalized(path)
    system, place = connect(address)
    with _explained(address, "read"):
        files = _fingerprints(system, place)
        if not files:
            raise RemoteError(f"there is nothing at {address}")
        return _copied(system, address, place, files)


def _fingerprints(system: Any, place: str) -> dict[str, str]:
    """Relative path and fingerprint of each file; a single file's path is ""."""
    found = system.find(place, detail=True)
    out = {}
    for name, info in found.items():
        inside = name.removeprefix(place.rstrip("/")).lstrip("/")
        parts = pathlib.PurePosixPath(inside).parts
        if ".." in parts:
            raise RemoteError(f"{name!r} is not below {place!r}")
        keys = ("etag", "ETag", "md5Hash", "generation", "size", "created", "mtime")
        out[inside] = repr([(key, str(info[key])) for key in keys if key in info])
    return out


def _copied(
    system: Any, address: str, place: str, files: dict[str, str]
) -> pathlib.Path:
    """The local copy; downloaded where there is none of these fingerprints."""
    text = repr((address, sorted(files.items())))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = cache() / "remote" / key
    if not folder.exists():
        building = folder.with_name(f".{key}.{secrets.token_hex(6)}")
        try:
            for inside in files:
                target = building / _name(address) / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                source = f"{place.rstrip('/')}/{inside}" if inside else place
                system.get_file(source, str(target))
            if _fingerprints(system, place) != files:
                raise RemoteError(f"{address} changed while it was read; try again")
            try:
                building.rename(folder)
            except OSError:
                if not folder.exists():  # another process was faster
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    name_copy(address, str(folder / _name(address)))
    return folder / _name(address)


def _name(address: str) -> str:
    return urllib.parse.unquote(public(address).rpartition("/")[2]) or "data"


# ----- Writing.


@contextlib.contextmanager
def uploading(
    path: str | os.PathLike[str], *, last: str = ""
) -> Iterator[pathlib.Path]:
    """A local path; what the context writes there is uploaded at its end.

    An upload that fails is undone. The local files then stay, and the error names them.

    Args:
      path: an address where there is nothing yet, for a file or a directory.
      last: a file of a directory without which readers see nothing.

    Raises:
      FileExistsError: there is something at the address.
      RemoteError: the address cannot be used.
    """
    check_free(path)
    address = normalized(path)
    system, root = connect(address)
    folder = cache() / "uploads" / secrets.token_hex(6)
    folder.mkdir(parents=True)
    place = folder / _name(address)
    kept = False
    try:
        yield place
        try:
            with _explained(address, "written"):
                _upload(system, root, place, last)
        except (RemoteError, FileExistsError) as error:
            kept = True
            raise type(error)(f"{error}; the files are in {place}") from None
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def check_scheme(address: str) -> None:
    """Raise RemoteError for a scheme that can only be read."""
    if _scheme(address) in ("http", "https"):
        raise RemoteError(
            f"{address} can only be read; write to a directory, gs:// or s3://"
        )


def check_free(path: str | os.PathLike[str]) -> None:
    """Check that there is nothing at an address yet.

    Raises:
      FileExistsError: there is something.
      RemoteError: the address cannot be used.
    """
    address = normalized(path)
    check_scheme(address)
    system, root = connect(address)
    with _explained(address, "written"):
        if system.find(root):
            raise FileExistsError(
                f"{public(address)} is there already; choose another name"
            )


def _upload(system: Any, root: str, place: pathlib.Path, last: str) -> None:
    if place.is_file():
        system.put_file(str(place), root)
        return
    files = [p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()]

    def put(name: str) -> None:
        system.put_file(str(place / name), f"{root}/{name}")

    def remove(name: str) -> None:
        with contextlib.suppress(Exception):
            system.rm_file(f"{root}/{name}")

    try:
        in_parallel(put, [name for name in files if name != last])
        put(last)
    except BaseException:
        in_parallel(remove, files)
        raise


def in_parallel(do: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    """Call a function that waits for the network, as `map` does."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(do, *arguments))
