"""Claim a run directory for one experiment."""

import contextlib
import json
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

from mupax.zoo.addresses import public
from mupax.zoo.registry import REGULARIZATION, ROUNDING

from .. import io
from ..errors import UserError, reason, short
from .hyperparameters import with_defaults

_NAME = "experiment.json"
_LOCK = ".lock"
# Keys that decide what weights compute, and those that decide how an input is read,
# without those that change no prediction but by rounding.
_FUNCTION = ("model", "parametrization", "base_width", "base_depth", "ema")
_INPUT = ("data", "preprocessing")
_FREE = {
    *(f"model.{option}" for option in (*ROUNDING, *REGULARIZATION)),
    *("data.train_split", "data.test_split", "data.test_path"),
    *("data.threads", "data.workers"),
}


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path, settings: dict[str, Any], free: Collection[str] = ()
) -> Iterator[None]:
    """Claim a run directory for an experiment, or resume the experiment in it.

    The directory is locked until the context ends or the process dies.

    Args:
      workdir: the directory; it need not exist.
      settings: JSON-ready settings that decide the results. Addresses are compared
        and stored without user, password and query. "contents" is the
        fingerprint of the data, compared where both sides have one.
      free: keys, e.g. "sweep.seeds", that may differ from the stored settings and
        replace them.

    Raises:
      UserError: the directory holds another experiment or other files, cannot be
        written, or is in use by another process. Its files are unchanged.
    """
    settings = public(json.loads(json.dumps(settings)))
    check(workdir, settings, free)
    with contextlib.ExitStack() as held:
        with _usable(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            held.enter_context(io.locked(workdir / _LOCK, wait=False))
            # Again: another process may have claimed it since `check`.
            stored = _compared(workdir, settings, free)
            if known := (stored or {}).get("contents"):
                settings.setdefault("contents", known)
            if stored != settings:
                io.write_json(workdir / _NAME, settings)
        yield


def check(
    workdir: pathlib.Path, settings: dict[str, Any] | None, free: Collection[str] = ()
) -> None:
    """Raise the errors of `claim`, without writing anything.

    `settings` is None if the settings are not known yet.
    """
    with _usable(workdir):
        _compared(workdir, public(json.loads(json.dumps(settings))), free)
        io.check_writable(workdir)
        if (workdir / _LOCK).exists():
            with io.locked(workdir / _LOCK, wait=False):
                pass


def _stored(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The settings in a run directory, if any."""
    try:
        return io.read_json(workdir / _NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (io.Damaged, OSError) as error:
        raise UserError(
            f"{workdir / _NAME} is damaged ({reason(error)}), and the settings of this "
            "run are unknown; choose another --workdir, or remove this one to start "
            "again"
        ) from None


def _compared(
    workdir: pathlib.Path, settings: dict[str, Any] | None, free: Collection[str]
) -> dict[str, Any] | None:
    """The stored settings, if any; raises UserError if they are other ones."""
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{workdir} is a file; choose another --workdir")
    stored = _stored(workdir)
    if stored is None:
        # A run that was killed in `claim` leaves a temporary file.
        own = (f".{_NAME}.", _LOCK)
        if workdir.exists() and not all(
            path.name.startswith(own) for path in workdir.iterdir()
        ):
            raise UserError(
                f"{workdir} holds files that do not belong to a mupax run; choose "
                "another --workdir, or an empty one"
            )
        return None
    _check_kind(workdir, stored, settings)
    if settings is None:
        return stored
    found = differences(stored, settings)
    names = {key for key, *_ in found}
    differ = [
        f"{key} ({short(first)}, here {short(second)})"
        for key, first, second in found
        if key != "contents"
        and not any(f"{key}.".startswith(f"{x}.") for x in free)
        # "settings" holds the whole config, and so some keys a second time.
        and key.removeprefix("settings.") not in names - {key}
    ]
    if differ:
        raise UserError(
            f"{workdir} holds another experiment, which differs in "
            f"{', '.join(differ)}; choose another --workdir, or remove that one"
        )
    contents = stored.get("contents"), settings.get("contents")
    if all(contents) and contents[0] != contents[1]:
        raise UserError(
            f"the examples of {settings['dataset']} have changed since the run in "
            f"{workdir} began; choose another --workdir, or bring the old data back"
        )
    return stored


def _check_kind(
    workdir: pathlib.Path, stored: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    """Raise a UserError if another command made the directory."""
    kinds = [_command(stored), "train" if settings is None else _command(settings)]
    if kinds[0] != kinds[1]:
        inside = " (its target's run is in target/)" * (kinds[0] == "transfer")
        raise UserError(
            f"{workdir} is the directory of a `mupax {kinds[0]}`{inside}; resume it "
            f"with that command, or choose another --workdir for `mupax {kinds[1]}`"
        )


def _command(settings: dict[str, Any]) -> str:
    """The command that stores such settings."""
    kinds = {"target": "transfer", "sweep": "sweep"}
    return next((kinds[key] for key in kinds if key in settings), "train")


def check_model(workdir: pathlib.Path, settings: dict[str, Any], dataset: str) -> None:
    """Raise a UserError if the run in a directory computes another function.

    Args:
      workdir: of a training run; one without its settings passes.
      settings: of the config, as `mupax train` stores them.
      dataset: the one to evaluate on; another may be read in another way.
    """
    with _usable(workdir):
        stored = _stored(workdir)
    if stored is None or not stored.get("settings"):
        return
    reads = stored.get("dataset") == dataset
    sides = stored["settings"], json.loads(json.dumps(settings))
    trained, own = (
        {key: side.get(key) for key in (*_FUNCTION, *(_INPUT if reads else ()))}
        | ({"model": with_defaults(model)} if isinstance(model, dict) else {})
        for side in sides
        for model in [side.get("model")]
    )
    differ = [
        f"{key} ({short(first)}, here {short(second)})"
        for key, first, second in differences(trained, own)
        if key not in _FREE
    ]
    if differ:
        raise UserError(
            f"the run in {workdir} was trained with another {', '.join(differ)}, so "
            "that mupax eval may evaluate another function; give it the config and "
            "the flags of the training"
        )


@contextlib.contextmanager
def _usable(workdir: pathlib.Path) -> Iterator[None]:
    """Turn errors of the file system into a UserError."""
    try:
        yield
    except io.Busy:
        raise UserError(
            f"another process uses {workdir}; wait until it ends, or choose another "
            "--workdir"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise UserError(
            f"{short(workdir)} cannot be used ({reason(error)}); choose another "
            "--workdir"
        ) from None


def differences(
    first: Any, second: Any, prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """The keys in which two settings differ, each with both values.

    Examples:
      >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
      [('a.b', 1, 3)]
    """
    if isinstance(first, dict) and isinstance(second, dict):
        out = []
        for key in sorted({*first, *second}):
            out += differences(first.get(key), second.get(key), f"{prefix}.{key}")
        return out
    return [] if first == second else [(prefix[1:], first, second)]
