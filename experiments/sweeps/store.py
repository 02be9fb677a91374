"""Cells on disk: each finished one durably, so that a killed sweep goes on."""

import json
import os
import pathlib
import tempfile

from .results import Cell

# It can only be read by setting it, which is not safe once threads run.
_UMASK = os.umask(0)
os.umask(_UMASK)


class Store:
    """The finished cells of one run directory, a JSON file each."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def get(self, name: str) -> Cell | None:
        """The cell of this name, or None where it has not been finished."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        return Cell.from_json(json.loads(path.read_text()))

    def put(self, name: str, cell: Cell) -> None:
        """Keep a cell."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / f"{name}.json", json.dumps(cell.to_json()))


def write_durably(path: pathlib.Path, text: str) -> None:
    """Write a file so that a reader, or a power cut, finds it whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            # mkstemp makes files private; these are as readable as any other.
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
