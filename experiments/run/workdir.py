"""The run directory: whose it is, before anything is written to it."""

import contextlib
import json
import pathlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from absl import logging

from .. import io
from ..errors import UserError

_NAME = "experiment.json"
_COPY = ".experiment.json.copy"
_LOCK = ".lock"


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path, settings: dict[str, Any], free: Collection[str] = ()
) -> Iterator[None]:
    """Make the run directory this experiment's, or resume the one that it holds.

    It is held until the context is left, or the process dies.

    Args:
      workdir: the directory; it need not exist yet.
      settings: JSON-ready settings that decide the results.
      free: of them, as "sweep.seeds", those that may differ from what is there, and
        take its place.

    Raises:
      UserError: it holds another experiment, or somebody else's files, or cannot be
        written, or another process is at work in it. Nothing in it is touched.
    """
    settings = json.loads(json.dumps(settings))
    check(workdir, settings, free)
    with contextlib.ExitStack() as held:
        with _usable(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            held.enter_context(io.locked(workdir / _LOCK, wait=False))
            # Again, for another process may have been quicker.
            found = _compared(workdir, settings, free)
            if found.settings != settings or not found.whole:
                for name in (_NAME, _COPY):
                    io.write_sealed(workdir / name, settings)
        yield


def check(
    workdir: pathlib.Path, settings: dict[str, Any] | None, free: Collection[str] = ()
) -> None:
    """Raise what `claim` would raise, before work that would be lost.

    Nothing is written. Another process may still take the directory afterwards.

    Args:
      workdir: the directory; it need not exist yet.
      settings: as in `claim`; None where they are not known yet.
      free: as in `claim`.

    Raises:
      UserError: as `claim`.
    """
    with _usable(workdir):
        _compared(workdir, json.loads(json.dumps(settings)), free)
        io.check_writable(workdir)
        if (workdir / _LOCK).exists():
            with io.locked(workdir / _LOCK, wait=False):
                pass


def settings_of(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The settings that a run directory was claimed with; None where it is none.

    Raises:
      UserError: they are damaged, and so is their copy.
    """
    return _stored(workdir).settings


class _Stored(NamedTuple):
    """The settings in a run directory, and whether both files of them are whole."""

    settings: dict[str, Any] | None
    whole: bool


def _stored(workdir: pathlib.Path) -> _Stored:
    first, why = _read(workdir / _NAME)
    copy, _ = _read(workdir / _COPY)
    if first is not None:
        return _Stored(first, copy is not None)
    if copy is not None:
        logging.warning(
            "%s/%s is damaged (%s); its copy is used.", workdir, _NAME, why or "missing"
        )
        return _Stored(copy, False)
    # An earlier version wrote one file, without a checksum.
    if not (workdir / _COPY).exists():
        first, why = _read(workdir / _NAME, required=False)
        if first is not None or why is None:
            return _Stored(first, False)
    raise UserError(
        f"{workdir / _NAME} is damaged ({why or 'missing'}), so that the settings of "
        "this run are not known; choose another --workdir, or remove this one to start "
        "again"
    )


def _read(
    path: pathlib.Path, *, required: bool = True
) -> tuple[dict[str, Any] | None, str | None]:
    """Settings; or None and what is wrong with the file, None where it is missing."""
    try:
        return io.read_sealed(path, required=required), None
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (io.Damaged, OSError) as error:
        return None, str(getattr(error, "strerror", None) or error)


def _compared(
    workdir: pathlib.Path, settings: dict[str, Any] | None, free: Collection[str]
) -> _Stored:
    """What is stored, once it is known to be of this experiment, or nothing."""
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{workdir} is a file; choose another --workdir")
    found = _stored(workdir)
    if found.settings is None:
        if workdir.exists() and not _is_free(workdir):
            raise UserError(
                f"{workdir} holds files that are not a mupax run's; choose another "
                "--workdir, or an empty one"
            )
        return found
    if settings is None:
        return found
    differ = [
        f"{d.key} ({short(d.found)}, here {short(d.wanted)})"
        for d in differences(found.settings, settings)
        if not any(f"{d.key}.".startswith(f"{x}.") for x in free)
    ]
    if differ:
        raise UserError(
            f"{workdir} holds another experiment, which differs in "
            f"{', '.join(differ)}; choose another --workdir, or remove that one"
        )
    return found


@contextlib.contextmanager
def _usable(workdir: pathlib.Path) -> Iterator[None]:
    """Make a sentence of what the system refuses."""
    try:
        yield
    except io.Busy:
        raise UserError(
            f"another process is at work in {workdir}; wait for its end, or choose "
            "another --workdir"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{short(str(workdir))} cannot be used ({reason}); choose another --workdir"
        ) from None


def _is_free(workdir: pathlib.Path) -> bool:
    # A run that was killed while it claimed the directory leaves a temporary file.
    starts = (f".{_NAME}.", _LOCK)
    return all(p.name.startswith(starts) for p in workdir.iterdir())


class Difference(NamedTuple):
    """A setting that two experiments have not in common.

    Attributes:
      key: as "sweep.seeds".
      found: its value in the first.
      wanted: its value in the second.
    """

    key: str
    found: Any
    wanted: Any


def differences(found: Any, wanted: Any, prefix: str = "") -> list[Difference]:
    """Where two settings differ.

    Examples:
      >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
      [Difference(key='a.b', found=1, wanted=3)]
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        out = []
        for key in sorted({*found, *wanted}):
            out += differences(found.get(key), wanted.get(key), f"{prefix}.{key}")
        return out
    return [] if found == wanted else [Difference(prefix[1:], found, wanted)]


def short(value: Any) -> str:
    """A value in a message, cut where it is long.

    Examples:
      >>> short("x" * 300)[-8:]
      'xxxxx...'
    """
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
