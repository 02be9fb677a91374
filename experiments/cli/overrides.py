"""Load a config file, and set keys of the config from text."""

import ast
import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..errors import UserError, nearest, reason, short

if TYPE_CHECKING:  # the base install prints help without ml_collections
    from ml_collections import ConfigDict

# Sections whose keys depend on a name, e.g. that of the model. A flag may add keys.
_OPEN = (
    *("model", "optimizer", "schedule", "parametrization", "data", "sharding"),
    "modules",
)
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def load(path: str) -> "ConfigDict":
    """Run a config file, and return the config that its `get_config` makes.

    Raises:
      UserError: the file raises an error, or returns something else.
    """
    from ml_collections import ConfigDict

    try:
        spec = importlib.util.spec_from_file_location("config", pathlib.Path(path))
        assert spec is not None  # of a file whose name ends in .py
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        make = getattr(module, "get_config", None)
        config = make() if make is not None else None
    except SystemExit:
        raise UserError("the config does not load: it calls sys.exit") from None
    except Exception as error:  # a config file is a program, which can raise anything
        at = f" ({error.filename})" if isinstance(error, OSError) else ""
        raise UserError(f"the config does not load: {reason(error)}{at}") from None
    if make is None:
        raise UserError("the config does not load: it has no function get_config()")
    if not isinstance(config, ConfigDict):
        raise UserError(
            "the config does not load: get_config() must return a ConfigDict, and "
            f"returns {type(config).__name__}"
        )
    return config


def override(config: "ConfigDict", path: str, text: str | None) -> None:
    """Set a key of a config.

    Args:
      config: is changed. The sections `sweep` and `target` are added if missing.
      path: sections and key, e.g. "model.width".
      text: a Python literal, or text; None sets a key that is True or False to True.

    Raises:
      UserError: there is no such key, or the value has another type.
    """
    from ml_collections import ConfigDict
    from ml_collections.config_dict import placeholder

    from ..run.config import defaults

    *sections, key = path.split(".")
    with config.unlocked():
        if sections[:1] in (["sweep"], ["target"]) and sections[0] not in config:
            config[sections[0]] = defaults("sweep", "target")[sections[0]]
        adds = _adds(config, path)
        section = config
        for i, name in enumerate(sections):
            if adds and i and name not in section:
                section[name] = ConfigDict()
            if name not in section:
                raise UserError(f"the config has no key {short(path)}{_hint(path)}")
            section = section.get(name) if name in section else ConfigDict()
            if not isinstance(section, ConfigDict):
                raise UserError(
                    f"the config has no key {short(path)}: "
                    f"{short('.'.join(sections[: i + 1]))} is a value, not a section"
                )
        if key not in section:
            if not (adds and key):
                raise UserError(f"the config has no key {short(path)}{_hint(path)}")
            section[key] = placeholder(object)
        section[key] = _converted(path, section.get_type(key), text)


def _adds(config: "ConfigDict", path: str) -> bool:
    """Whether a flag may add the key; raises if a sweep or a target has no such key."""
    from ..run.config import KEYS

    section, _, rest = path.partition(".")
    head, _, axis = rest.partition(".")
    if section not in ("sweep", "target") or not rest:
        return section in _OPEN and bool(rest)
    if section == "sweep" and head == "axes" and axis:
        known = sorted(config.sweep.axes)
        if axis not in known:
            raise UserError(
                f"a sweep has no axis {shown(axis)}; its axes are {', '.join(known)}"
                f"{nearest(axis, known)}"
            )
    known = sorted({*config[section], *(KEYS if section == "target" else ())})
    if head not in known:
        hint = nearest(head, known) or "; docs/reference/config.md lists all keys"
        raise UserError(f"the config has no key {section}.{short(head)}{hint}")
    unset = section == "target" and config.target.get(head) is None
    return head == "parametrizations" or unset or (section == "target" and bool(axis))


def _hint(path: str) -> str:
    from ..run.config import KEYS

    return nearest(path, KEYS) or "; docs/reference/config.md lists all keys"


def _converted(path: str, kind: type, text: str | None) -> Any:
    """The value of a flag, of the key's type."""
    from ml_collections import ConfigDict

    flag = f"--config.{short(path)}"
    if text is None:
        if kind not in (bool, object):
            raise UserError(f"{flag} needs a value: {flag}=...")
        return True
    if kind is str:
        return text
    if kind in (int, float, bool):
        return converted(flag, kind, text)
    try:
        value = ast.literal_eval(text.capitalize() if text in _TRUTHS else text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        value = text
    if kind is tuple:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if issubclass(kind, ConfigDict):
        if not isinstance(value, dict):
            name = f"; {flag}.name={text} sets its name" if text.isidentifier() else ""
            raise UserError(
                f"{flag}={short(text)} must be a section, e.g. "
                f"\"{{'name': ...}}\"{short(name)}"
            )
        return ConfigDict(value)
    return value


def converted(flag: str, kind: type, text: str) -> Any:
    """The value of a flag that is a bool, an int, a float or text.

    Raises:
      UserError: the text is something else.
    """
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    try:
        return _TRUTHS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{flag} is {shown(text)}; it must be {words[kind]}") from None
