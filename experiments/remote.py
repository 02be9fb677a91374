"""Paths in object storage, for the command line: errors are `UserError`s.

A run reads its inputs from object storage through local copies (`local`); see
`mupax.experiments.run.mirror` for what it writes.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from mupax.zoo import remote
from mupax.zoo.remote import (
    cache,
    in_parallel,
    is_remote,
    normalized,
    sentence,
)

from .errors import UserError

__all__ = [
    "cache",
    "check_free",
    "connect",
    "in_parallel",
    "is_remote",
    "local",
    "normalized",
    "refuse",
    "sentence",
    "uploading",
]


def refuse(path: str | os.PathLike[str], name: str) -> None:
    """Refuse an address in object storage where files are shared or mapped.

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
    """As `mupax.zoo.remote.local`.

    Raises:
      UserError: it cannot be read.
    """
    with _refused():
        return remote.local(path)


def check_free(path: str | os.PathLike[str]) -> None:
    """As `mupax.zoo.remote.check_free`.

    Raises:
      UserError: there is something, or the address cannot be used.
    """
    with _refused():
        remote.check_free(path)


def connect(address: str) -> tuple[Any, str]:
    """As `mupax.zoo.remote.connect`.

    Raises:
      UserError: the address cannot be used.
    """
    with _refused():
        return remote.connect(address)


@contextlib.contextmanager
def uploading(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """As `mupax.zoo.remote.uploading`, for one file. A local path is used as it is.

    Raises:
      UserError: the address cannot be written, or there is something.
    """
    if not is_remote(path):
        yield pathlib.Path(path)
        return
    with _refused(), remote.uploading(path) as place:
        yield place


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (remote.RemoteError, FileExistsError) as error:
        raise UserError(str(error)) from None
