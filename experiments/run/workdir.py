"""The run directory: whose it is, before anything is written to it."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

from ml_collections import ConfigDict

from ..errors import UserError
from ..io import write_durably

_NAME = "experiment.json"
_LOCK = ".lock"


def named(config: ConfigDict, folder: str | None) -> pathlib.Path:
    """Where a run is written: as asked, or runs/<dataset>_<model>."""
    data = pathlib.PurePath(config.dataset.replace(":", "_")).name
    return pathlib.Path(folder or f"runs/{data}_{config.model.name}")


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path, settings: dict[str, Any], free: Collection[str] = ()
) -> Iterator[None]:
    """Make the run directory this experiment's, or go on in it if it is already.

    It is held until the context is left, or the process dies.

    Args:
      workdir: the directory; it need not be there yet.
      settings: JSON-ready settings that decide the results.
      free: of them, as "sweep.seeds", those that may differ from what is there, and
        take its place.

    Raises:
      UserError: it holds another experiment, or somebody else's files, or cannot be
        written, or another process is at work in it. Nothing in it is touched.
    """
    settings = json.loads(json.dumps(settings))
    _claim(workdir, settings, free)
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context((workdir / _LOCK).open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is at work in {workdir}; wait for its end, or choose "
                "another --workdir"
            ) from None
        except OSError as error:
            raise UserError(_unusable(workdir, error)) from None
        try:
            if settings_of(workdir) != settings:
                write_durably(workdir / _NAME, json.dumps(settings, indent=1))
        except OSError as error:
            raise UserError(_unusable(workdir, error)) from None
        yield


def settings_of(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The settings that a run directory was claimed with; None where it is none."""
    try:
        return json.loads((workdir / _NAME).read_text())
    except (OSError, ValueError):
        return None


def _claim(
    workdir: pathlib.Path, settings: dict[str, Any], free: Collection[str]
) -> None:
    file = workdir / _NAME
    try:
        if file.exists():
            found = json.loads(file.read_text())
            differ = [
                text
                for text in differences(found, settings)
                if not any(f"{text} ".startswith((f"{x} ", f"{x}.")) for x in free)
            ]
            if differ:
                raise UserError(
                    f"{workdir} holds another experiment, which differs in "
                    f"{', '.join(differ)}; choose another --workdir, or remove that one"
                )
            return
        if workdir.exists() and not (workdir.is_dir() and _is_free(workdir)):
            raise UserError(
                f"{workdir} holds files that are not a mupax run's; choose another "
                "--workdir, or an empty one"
            )
        workdir.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps(settings, indent=1))
    except OSError as error:
        raise UserError(_unusable(workdir, error)) from None
    except json.JSONDecodeError:
        raise UserError(
            f"{file} is not readable as JSON; choose another --workdir, or remove it"
        ) from None


def _unusable(workdir: pathlib.Path, error: OSError) -> str:
    return f"{workdir} cannot be used ({error.strerror}); choose another --workdir"


def _is_free(workdir: pathlib.Path) -> bool:
    # A run that was killed while it claimed the directory leaves a temporary file.
    starts = (f".{_NAME}.", _LOCK)
    return all(p.name.startswith(starts) for p in workdir.iterdir())


def differences(found: Any, wanted: Any, prefix: str = "") -> list[str]:
    """Where two settings differ, as `"sweep.seeds (2, here 3)"`.

    Examples:
      >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
      ['a.b (1, here 3)']
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        out = []
        for key in sorted({*found, *wanted}):
            out += differences(found.get(key), wanted.get(key), f"{prefix}.{key}")
        return out
    return [] if found == wanted else [f"{prefix[1:]} ({found}, here {wanted})"]
