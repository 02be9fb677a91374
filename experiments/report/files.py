"""Write the files of a report where its data or its code changed."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np

from ..io import write_durably
from .data import SweepData

_CODE = ("report", "sweep")  # the folders whose code makes a report


def write_report(data: SweepData, workdir: str | os.PathLike) -> Path:
    """Write report.html into a run directory, unless it has the report of this data.

    The page ends with a fingerprint of itself, of the data and of mupax's code.

    Args:
      data: results of a sweep or transfer. With a trained target, depth.png, width.png,
        regret.png and target.png are written too, and with baselines demo.png.
      workdir: an existing directory; files of the same name are replaced.

    Returns:
      The path of the page.
    """
    path = Path(workdir) / "report.html"
    inputs = _fingerprint(data)
    if not _is_current(path, inputs):
        from .page import pictures, report_page  # matplotlib, which takes a second

        for name, picture in pictures(data).items():
            write_durably(path.with_name(name), picture)
        page = report_page(data).encode()
        write_durably(path, page + _mark(page, inputs))
    return path


def _is_current(page: Path, inputs: bytes) -> bool:
    """Whether a page is undamaged and was made of these inputs."""
    if not page.is_file():
        return False
    content = page.read_bytes()
    size = len(_mark(b"", inputs))
    return content[-size:] == _mark(content[:-size], inputs)


def _mark(page: bytes, inputs: bytes) -> bytes:
    """The last line of a page."""
    return b"\n<!-- %s -->\n" % hashlib.sha256(inputs + page).hexdigest().encode()


def _fingerprint(data: SweepData) -> bytes:
    """A fingerprint of all that a report shows, and of the code that makes it."""
    digest = hashlib.sha256()
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    populations = fields.pop("populations")
    digest.update(repr(fields).encode())
    for population in populations:
        for field in dataclasses.fields(population):
            value = getattr(population, field.name)
            array = isinstance(value, np.ndarray)
            digest.update(value.tobytes() if array else repr(value).encode())
    for folder in _CODE:
        for path in sorted((Path(__file__).parents[1] / folder).glob("*.*")):
            digest.update(path.read_bytes())
    return digest.digest()
