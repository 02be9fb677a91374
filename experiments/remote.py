"""Paths in object storage, for the command line: errors are `UserError`s.

A run reads its inputs from object storage through local copies (`local`); see
`mupax.experiments.run.bucket` for what it writes.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from mupax.zoo.weights import remote
from mupax.zoo.weights.remote import cache, in_parallel, is_remote, normalized, sentence

from .errors import UserError

__all__ = [
    "cache",
    "check_free",
    "check_scheme",
    "connect",
    "in_parallel",
    "is_remote",
    "local",
    "normalized",
    "sentence",
    "uploading",
]


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except (remote.RemoteError, FileExistsError) as error:
        raise UserError(str(error)) from None


local = _user_errors()(remote.local)
check_scheme = _user_errors()(remote.check_scheme)
check_free = _user_errors()(remote.check_free)
connect = _user_errors()(remote.connect)


@contextlib.contextmanager
def uploading(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """As `uploading` of the zoo, for one file. A local path is used as it is."""
    if not is_remote(path):
        yield pathlib.Path(path)
        return
    with _user_errors(), remote.uploading(path) as place:
        yield place
