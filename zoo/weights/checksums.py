"""Write and verify sizes and checksums of the files in a directory."""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable

from .files import open_regular, read_json

NAME = "checksums.json"


def write(directory: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Write size and SHA-256 of files below a directory into `NAME` in it."""
    entries = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in sorted(files)
    }
    (directory / NAME).write_text(json.dumps(entries, indent=1) + "\n")


def read(path: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Read a list of checksums: {name: (size in bytes, SHA-256)}.

    Raises:
      ValueError: the list cannot be read, or names a file outside of its directory.
    """
    try:
        given = read_json(path)
        if not given:
            raise ValueError("it lists no files")
        return {name: _entry(name, entry) for name, entry in given.items()}
    except ValueError as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from None


def _entry(name: str, entry: object) -> tuple[int, str]:
    place = pathlib.PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or not place.parts or "\0" in name:
        raise ValueError(f"it lists {name!r}, which is outside of its directory")
    match entry:
        case {"size": int(size), "sha256": str(digest)} if (
            size is not True and size >= 0 and re.fullmatch("[0-9a-f]{64}", digest)
        ):
            return size, digest
    raise ValueError(f"{name!r} must have a size in bytes and a sha256")


def verify(directory: pathlib.Path, required: Iterable[pathlib.Path]) -> None:
    """Compare the files of a directory with its list of checksums.

    Args:
      directory: with the list.
      required: files, and directories of files, that must be listed.

    Raises:
      ValueError: the list cannot be read, or a file is missing, differs, is not a
        regular file, or is required and not listed.
    """
    listed = read(directory / NAME)
    for path in _files(required):
        name = path.relative_to(directory).as_posix()
        if name not in listed:
            raise ValueError(f"{name!r} is not listed in {NAME}")
    for name, (size, digest) in listed.items():
        try:
            with open_regular(directory / name) as file:
                # Before it is read: another size cannot have the checksum.
                same = os.fstat(file.fileno()).st_size == size
                same = (
                    same and hashlib.file_digest(file, "sha256").hexdigest() == digest
                )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{name!r} cannot be read ({reason})") from None
        if not same:
            raise ValueError(f"{name!r} has changed since it was written")


def _files(paths: Iterable[pathlib.Path]) -> Iterable[pathlib.Path]:
    """The paths that are not directories, and everything in those that are."""
    left = list(paths)
    while left:
        path = left.pop()
        if path.is_dir() and not path.is_symlink():
            left += path.iterdir()
        else:
            yield path


def _sha256(path: pathlib.Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
