"""Write and verify checksums of the files in a directory."""

import hashlib
import json
import pathlib
from collections.abc import Iterable

NAME = "checksums.json"


def write(directory: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Write the SHA-256 of files below a directory into `NAME` in that directory."""
    sums = {
        path.relative_to(directory).as_posix(): sha256(path) for path in sorted(files)
    }
    (directory / NAME).write_text(json.dumps(sums, indent=1) + "\n")


def verify(directory: pathlib.Path) -> None:
    """Compare the files of a directory with its list of checksums.

    Raises:
      ValueError: the list cannot be read, or a listed file is missing or differs.
    """
    try:
        sums = json.loads((directory / NAME).read_text())
        if not isinstance(sums, dict) or not sums:
            raise ValueError("it lists no files")
        pairs = [(str(name), str(digest)) for name, digest in sums.items()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from None
    for name, digest in pairs:
        try:
            actual = sha256(directory / name)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name!r} cannot be read ({error})") from None
        if actual != digest:
            raise ValueError(f"{name!r} has changed since it was written")


def sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
