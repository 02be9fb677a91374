"""What a run directory holds: files, and directories that appear at once."""

import os
import pathlib
import re
from collections.abc import Iterable

from mupax.zoo.weights.checksums import sha256

from .object_store import OWN, Contents, Objects

# Directories that appear by a rename, and do not change afterwards.
_WHOLE = re.compile(r"(.*/)?(checkpoints/\d+|model)")
# Locks, temporary files of io.replacing, zoo.save and Orbax, and unreadable
# checkpoints.
_SKIPPED = re.compile(
    r".*\.lock|\..*\.[0-9a-f]{12}|\.saving-.*|.*\.orbax-checkpoint-tmp.*|unreadable"
)


def single_files(objects: Objects) -> list[str]:
    """The files of a run that are replaced one by one."""
    return [
        name
        for name in objects.names()
        if not name.startswith(OWN)
        and folder_of(name) is None
        and ".." not in name.split("/")
    ]


def folder_of(name: str) -> str | None:
    """The directory of a file that appears at once, if any."""
    parts = name.split("/")
    for count in range(1, len(parts)):
        if _WHOLE.fullmatch(path := "/".join(parts[:count])):
            return path
    return None


def is_newer(
    place: pathlib.Path, whole: dict[str, Contents], singles: Iterable[str]
) -> bool:
    """Whether a local directory lacks nothing but checkpoints before its newest."""
    if not all((place / name).is_file() for name in singles):
        return False
    for path, contents in whole.items():
        folders = (p for p in (place / path).parent.glob("*") if p.is_dir())
        beside = (folder.relative_to(place).as_posix() for folder in folders)
        if not has_later(path, beside) and contents_of(place / path) != contents:
            return False
    return True


def has_later(path: str, others: Iterable[str]) -> bool:
    """Whether a checkpoint of a later step is among `others`.

    Examples:
      >>> has_later("a/checkpoints/9", ["a/checkpoints/10", "b/checkpoints/3"])
      True
      >>> has_later("model", ["checkpoints/9"])
      False
    """
    folder, _, step = path.rpartition("/")
    pairs = (other.rpartition("/") for other in others)
    return step.isdecimal() and any(
        where == folder and int(later) > int(step)
        for where, _, later in pairs
        if later.isdecimal()
    )


def contents_of(folder: pathlib.Path) -> Contents:
    """Size and checksum of each file; empty if there is no such directory."""
    files = files_in(folder).items()
    return {name: [path.stat().st_size, sha256(path)] for name, path in files}


def files_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files in a directory, by relative path. It may change meanwhile."""
    paths = [pathlib.Path(root, f) for root, _, files in os.walk(folder) for f in files]
    return {p.relative_to(folder).as_posix(): p for p in sorted(paths)}


Version = tuple[int, int, int]


def version_of(path: pathlib.Path) -> Version:
    """Changes when a file is replaced or written to."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def versions_in(folder: pathlib.Path) -> dict[str, Version]:
    """`version_of` each file in a directory."""
    return {name: version_of(path) for name, path in files_in(folder).items()}


def scanned(
    folder: pathlib.Path,
) -> tuple[dict[str, pathlib.Path], dict[str, pathlib.Path]]:
    """The files to upload one by one, and the directories that appear at once."""
    singles, whole = {}, {}
    for name, path in files_in(folder).items():
        top = folder_of(name)
        if any(map(_SKIPPED.fullmatch, (top or name).split("/"))):
            continue
        if top is not None:
            whole[top] = folder / top
        elif not path.is_symlink():
            singles[name] = path
    return singles, whole
