"""The report of a sweep or a transfer: a self-contained page, and a table.

`write_report` writes report.html; `print_verdicts` prints the same in a terminal.
Module `page` imports Matplotlib; this package does not.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from ..io import write_durably
from .data import SweepData, Trained, machine
from .terminal import print_target, print_verdicts

__all__ = [
    "SweepData",
    "Trained",
    "machine",
    "print_target",
    "print_verdicts",
    "write_report",
]


def write_report(data: SweepData, workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Write report.html, unless the page there shows these results already.

    Args:
      data: results of a sweep or transfer.
      workdir: an existing directory; a file of the same name is replaced.

    Returns:
      The path of the page.
    """
    path = pathlib.Path(workdir) / "report.html"
    digest = _digest(data)
    end = path.read_bytes()[-_END:] if path.is_file() else b""
    if not (digest in end and end.endswith(b"-->\n")):
        from .page import report_page  # Matplotlib takes a second to import

        # The page of a transfer shows its sweep too.
        swept = _digest(dataclasses.replace(data, trained=None, compared=()))
        page = report_page(data)
        write_durably(path, f"{page}\n<!-- {digest.decode()} {swept.decode()} -->\n")
    return path


_END = 200  # bytes of a page that hold the digests


def _digest(data: SweepData) -> bytes:
    """A digest of what a page shows, and of the code that draws it."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    digest = hashlib.sha256(
        json.dumps(dataclasses.asdict(data), default=plain).encode()
    )
    here = pathlib.Path(__file__).parent
    for file in sorted([*here.glob("*.*"), *here.with_name("sweep").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest().encode()
