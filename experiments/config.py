"""The command line: a config, found by name, its overrides and a command's flags."""

import importlib.resources
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from .errors import UserError


def list_configs() -> list[str]:
    """The names of the packaged configs."""
    folder = importlib.resources.files("mupax.configs")
    names = (entry.name for entry in folder.iterdir())
    return sorted(
        n.removesuffix(".py") for n in names if n.endswith(".py") and n[0] != "_"
    )


def find_config(name: str) -> str:
    """The path of a config: a file, or the bare name of a packaged one.

    Raises:
      UserError: there is neither.
    """
    if pathlib.Path(name).is_file():
        return name
    if name in list_configs():
        return str(importlib.resources.files("mupax.configs") / f"{name}.py")
    raise UserError(
        f"there is no config file {name!r}; give a path, or one of the packaged "
        f"configs: {', '.join(list_configs())}"
    )


class Parsed(NamedTuple):
    """A command line.

    Attributes:
      config: with its overrides.
      workdir: where to write; by default runs/<name of the config>.
      flags: the command's own, by name.
    """

    config: ConfigDict
    workdir: str
    flags: dict[str, Any]


def parse(argv: list[str], extra: Mapping[str, Any] | None = None) -> Parsed:
    """Read `--config`, its overrides, `--workdir`, and a command's own flags.

    Args:
      argv: the command's name and its flags.
      extra: defaults of the command's own flags, by name; False and True make flags
        of yes or no.

    Raises:
      UserError: an unknown flag or config key, or a value of the wrong type.
    """
    argv = _with_config_path(argv)
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file(
        "config", None, "Config file, or name of a packaged one.", flag_values=values
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Where to write; by default runs/<config>.", flag_values=values
    )
    for name, default in (extra or {}).items():
        define: Any = flags.DEFINE_string
        if isinstance(default, bool):
            define = flags.DEFINE_bool
        elif isinstance(default, int):
            define = flags.DEFINE_integer
        define(name, default, "", flag_values=values)
    before = sys.argv
    # ml_collections finds the overrides of config keys in sys.argv.
    sys.argv = argv
    try:
        rest = values(argv)
        found = config.value
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_one_line(error)) from None
    except Exception as error:
        raise UserError(f"the config does not load: {_one_line(error)}") from None
    finally:
        sys.argv = before
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not understood; flags start with --")
    if found is None:
        raise UserError(
            f"--config is missing; packaged configs are: {', '.join(list_configs())}"
        )
    own = {name: values[name].value for name in extra or {}}
    return Parsed(found, workdir.value or _folder(argv), own)


def _folder(argv: list[str]) -> str:
    """The default run directory: runs/<name of the config>."""
    path = next(w for w in argv[1:] if w.lstrip("-").startswith("config="))
    return f"runs/{pathlib.PurePath(path.partition('=')[2]).stem}"


def _with_config_path(argv: list[str]) -> list[str]:
    """`argv` with the config's name replaced by its path, as one argument."""
    out, rest = argv[:1], iter(argv[1:])
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag.lstrip("-") == "config" and word.startswith("-"):
            value = value if equals else next(rest, "")
            out.append(f"--config={find_config(value)}")
        else:
            out.append(word)
    return out


def _one_line(error: BaseException) -> str:
    text = str(error).replace("\\n", " ").replace("\\'", "'").replace('\\"', '"')
    if isinstance(error, AttributeError | KeyError):
        while len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]  # a KeyError quotes what it is given
        text = f"the config has no key {text}"
    return " ".join(text.split())
