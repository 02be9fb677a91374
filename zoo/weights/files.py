"""Read files that may be damaged or hostile: regular files of a bounded size only."""

import json
import math
import os
import pathlib
import stat
import zipfile
from io import BufferedReader
from typing import Any

import numpy as np

# Configs have kilobytes; a thousand labels, tens of kilobytes.
_LARGEST_JSON = 64 * 2**20


def open_regular(path: pathlib.Path) -> BufferedReader:
    """Open a file for reading, or a symbolic link to one.

    Raises:
      OSError: it cannot be opened.
      ValueError: it is a directory, a device, a pipe or a socket. Reading from these
        may never end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: pathlib.Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
      OSError: it cannot be read.
      ValueError: it is larger, or not a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes; at most {most:,} are read")
        return file.read()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
      ValueError: it cannot be read, or holds something else. The message does not name
        the file.
    """
    try:
        data = json.loads(read_bytes(path, _LARGEST_JSON))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file, by key, and compare them with its checksums.

    Raises:
      Exception: NumPy and zipfile raise various errors for a damaged file.
    """
    # np.load leaves a file open if it cannot read it.
    with open_regular(path) as file:
        if not zipfile.is_zipfile(file):  # np.load would take it for a pickle
            raise ValueError("it is no .npz file")
        file.seek(0)
        return dict(np.load(file, allow_pickle=False))


def reason(error: BaseException) -> str:
    """The first line of an error, or its type."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


def is_finite(value: Any) -> bool:
    """Whether a value is a number, not a bool, that a float can hold.

    Examples:
      >>> is_finite(1), is_finite(10**400), is_finite(True)
      (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
