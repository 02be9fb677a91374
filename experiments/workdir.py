"""The run directory: whose it is, before anything is written to it."""

import json
import pathlib
from typing import Any

from .errors import UserError
from .sweeps.store import write_durably

_NAME = "experiment.json"


def claim(workdir: pathlib.Path, settings: dict[str, Any]) -> None:
    """Make the run directory this experiment's, or go on in it if it is already.

    Args:
      workdir: the directory; it need not be there yet.
      settings: JSON-ready settings that decide the results.

    Raises:
      UserError: it holds another experiment, or somebody else's files, or cannot be
        written. Nothing in it is touched.
    """
    settings = json.loads(json.dumps(settings))
    file = workdir / _NAME
    try:
        if file.exists():
            found = json.loads(file.read_text())
            if found != settings:
                raise UserError(
                    f"{workdir} holds another experiment, which differs in "
                    f"{', '.join(differences(found, settings))}; choose another "
                    "--workdir, or remove that one"
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
        raise UserError(
            f"{workdir} cannot be used ({error.strerror}); choose another --workdir"
        ) from None
    except json.JSONDecodeError:
        raise UserError(
            f"{file} is not readable as JSON; choose another --workdir, or remove it"
        ) from None


def _is_free(workdir: pathlib.Path) -> bool:
    # A run that was killed while it claimed the directory leaves a temporary file.
    return all(p.name.startswith(f".{_NAME}.") for p in workdir.iterdir())


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
