"""Parse a command line: a command's own flags, and a config with its overrides."""

import argparse
import ast
import importlib.machinery
import importlib.resources
import pathlib
import re
import textwrap
import types
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mupax.zoo.weights import remote

from ..errors import UserError, nearest, reason, short

if TYPE_CHECKING:  # the base install prints help without ml_collections
    from ml_collections import ConfigDict


class Flag(NamedTuple):
    """One flag of a command.

    Attributes:
      name: without the dashes.
      default: its default value.
      help: text for `--help`.
      kind: str, int, float, bool or list; by default the type of `default`, or str.
      required: whether a command line must have it.
    """

    name: str
    default: str | int | float | bool | None
    help: str
    kind: type | None = None
    required: bool = False


class Parsed(NamedTuple):
    """A parsed command line.

    Attributes:
      argv: the command line, from the command's name on.
      config: the config, with its overrides; None for a command that takes none.
      workdir: the run directory; by default runs/<name of the config>, with the
        command behind it unless the command trains or evaluates that config's run.
      flags: the command's own flags, by name.
      words: the arguments without dashes.
    """

    argv: list[str]
    config: Any
    workdir: str
    flags: dict[str, Any]
    words: list[str]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser(
    command: str, known: Iterable[Flag] = (), *, config: bool = True, **texts: Any
) -> argparse.ArgumentParser:
    """The parser of a command's flags, which also formats its help.

    Args:
      command: its name.
      known: its own flags.
      config: whether it takes `--config`, its overrides and `--workdir`.
      **texts: `description` and `epilog` of the help.
    """
    made = _Parser(
        f"mupax {command}",
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, width=79, max_help_position=22
        ),
        **texts,
    )
    if config:
        packaged = ", ".join(list_configs())
        known = (
            Flag("config", None, f"config file, or a packaged config: {packaged}"),
            Flag("config.KEY=V", False, "set a key of the config, e.g. batch_size=64"),
            Flag(
                "workdir",
                None,
                "run directory, also s3://bucket/run or gs://bucket/run; default: "
                + default_workdir(command, "<config>"),
            ),
            *known,
        )
    for flag in known:
        kind = flag.kind or (str if flag.default is None else type(flag.default))
        options: dict[str, Any] = {"help": flag.help.replace("%", "%%")}
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["help"] += " (required)" if flag.required else ""
            options |= {"default": flag.default, "metavar": "V"}
            options |= {"action": "append"} if kind is list else {"type": kind}
        made.add_argument(f"--{flag.name}", **options)
    return made


def parse(
    argv: Sequence[str],
    known: Sequence[Flag] = (),
    *,
    config: bool = True,
    words: int = 0,
) -> Parsed:
    """Parse a command line.

    Args:
      argv: begins with the command's name.
      known: the command's own flags.
      config: whether it takes `--config`, its overrides and `--workdir`.
      words: maximal number of arguments without dashes.

    Raises:
      UserError: an unknown flag, a value of the wrong type, or a config file that does
        not load. Unknown keys of a config are errors when it is parsed.
    """
    _check_words(argv)
    overrides = [x for x in argv[1:] if config and x.startswith("--config.")]
    others = [x for x in argv[1:] if x not in overrides]
    for word in (word for word in overrides if "=" not in word):
        raise UserError(f"{short(word)} has no value; write {short(word)}=...")
    flags_of = parser(argv[0], known, config=config)
    given, rest = flags_of.parse_known_args(others)
    flagged = vars(given)
    for word in rest:
        if word.startswith("-"):
            hint = _key_hint(word) if config else ""
            name, names = word.partition("=")[0], (f"--{flag}" for flag in flagged)
            hint = hint or nearest(name, names)
            raise UserError(
                f"there is no flag {word}{hint or f'; see {flags_of.prog} --help'}"
            )
    if len(rest) > words:
        flags_of.error(f"unexpected argument {rest[words]!r}; flags start with --")
    for name, value in flagged.items():
        if value in ("", [""]) and value != flags_of.get_default(name):
            raise UserError(f"--{name} is empty; give a value, or leave it out")
    for flag in known:
        if flag.required and not flagged[flag.name]:
            flags_of.error(f"--{flag.name} is missing")
    if not config:
        return Parsed(list(argv), None, "", flagged, rest)
    if (path := flagged.pop("config")) is None:
        raise UserError(
            f"--config is missing; packaged configs are: {', '.join(list_configs())}"
        )
    del flagged["config.KEY=V"]
    path = find_config(path)
    loaded = _load(path)
    _check_sections(argv[0], overrides, {*loaded})
    override(loaded, overrides)
    default = default_workdir(argv[0], pathlib.PurePath(path).stem)
    if isinstance(source := loaded.get("transfer_from"), str):
        _check_transferred(overrides, source)
    workdir = flagged.pop("workdir") or default
    return Parsed(list(argv), loaded, workdir, flagged, rest)


def _check_words(argv: Sequence[str]) -> None:
    """Check that no argument contains a NUL byte or bad UTF-8."""
    for word in argv[1:]:
        if "\0" in word:
            raise UserError(f"{word!r} holds a NUL byte; leave it out")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"{word!r} is not UTF-8; rename the file") from None


def _key_hint(word: str) -> str:
    """A hint for a flag that is a key of the config."""
    from ..run.config import defaults

    name = word.lstrip("-").partition("=")[0]
    known = name.partition(".")[0] in defaults("sweep", "target")
    return f"; a key of the config is --config.{name}=..." if known else ""


# ----- Overrides.


# Keys of a path, e.g. sweep.base_axes['hidden/learning_rate'].
_PATH = re.compile(r"[^\W\d]\w*(?:\.\w+|\['[^'\]]+'\]|\[\"[^\"\]]+\"\])*")


def override(config: "ConfigDict", words: Iterable[str]) -> None:
    """Set keys of a config, e.g. --config.model.width=64; whole sections come first.

    A value is a Python literal, or else text; of a key of text, None or text. Keys that
    are missing are added: whether they exist, and which values they take, is checked
    when the config is parsed.

    Raises:
      UserError: a path that is none, or that leads into a value.
    """
    from ..run.config import defaults

    whole = defaults("sweep", "target")
    pairs = [word.removeprefix("--config.").partition("=") for word in words]
    with config.unlocked(), config.ignore_type():
        for path, _, text in sorted(pairs, key=lambda pair: "." in pair[0]):
            if not _PATH.fullmatch(path):
                raise UserError(
                    f"--config.{short(path)} is not a key; write e.g. "
                    "--config.model.width=64"
                )
            keys = re.findall(r"[^.\[\]'\"]+", path)
            section = config
            for i, key in enumerate(keys[:-1]):
                if section.get(key) is None:
                    section[key] = type(config)(whole.get(key) if i == 0 else None)
                section = section[key]
                if not isinstance(section, type(config)):
                    known = ".".join(keys[: i + 1])
                    raise UserError(
                        f"the config has no key {path}: {known} is a value, not a "
                        f"section; set all of it by --config.{known}=..."
                    )
            try:
                section[keys[-1]] = _value(path, text, section, keys[-1])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"--config.{path} cannot be set: {reason(error)}"
                ) from None


def _value(path: str, text: str, section: "ConfigDict", key: str) -> Any:
    """The value of an override, of the kind of the key."""
    before = section.get(key)
    if key in section and section.get_type(key) is str:
        return None if text == "None" else text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    if isinstance(before, tuple) and not isinstance(value, tuple | list):
        return (value,)
    if isinstance(before, float) and type(value) is int and abs(value) < 2**53:
        return float(value)
    if hasattr(before, "to_dict") and not isinstance(value, dict):
        name = f"; --config.{path}.name={text} sets its name"
        raise UserError(
            f"--config.{path}={text} must be a section, e.g. \"{{'name': ...}}\""
            f"{name if text.isidentifier() else ''}"
        )
    return value


# Commands whose default run directory is that of `mupax train`.
_OF_A_RUN = ("train", "eval")


# Commands that use the sections of other runs, if the config file has them.
_OF_A_TARGET = ("explain", "plan", "coord-check")


def _check_sections(command: str, words: Iterable[str], own: Collection[str]) -> None:
    """Check that no flag sets a key of a section that trains other runs.

    `own` are the keys of the config file.
    """
    for word in words:
        section, _, key = word.removeprefix("--config.").partition(".")
        unused = command in _OF_A_TARGET and section not in own
        if section in ("sweep", "target") and (unused or command in _OF_A_RUN):
            raise UserError(
                f"--config.{section}.{key.partition('=')[0]} has no effect on `mupax "
                f"{command}`; set model.width and model.depth, or use `mupax sweep` or "
                "`mupax transfer`"
            )


def _check_transferred(words: Iterable[str], source: str) -> None:
    """Check that no flag sets a key that `transfer_from`, a summary.json, replaces."""
    from ..run.hyperparameters import transferred_keys

    replaced = transferred_keys(remote.local(source))
    for word in words:
        key = word.partition("=")[0].removeprefix("--config.")
        if any(f"{key}.".startswith(f"{known}.") for known in replaced):
            raise UserError(
                f"--config.{key} is set, and transfer_from replaces it; leave one of "
                "them out"
            )


# ----- Configs by name.


def list_configs() -> list[str]:
    """The names of the packaged configs."""
    folder = importlib.resources.files("mupax.configs")
    names = (entry.name for entry in folder.iterdir())
    return sorted(
        n.removesuffix(".py") for n in names if n.endswith(".py") and n[0] != "_"
    )


def find_config(name: str) -> str:
    """The path of a config file, given its path or address, or a packaged name."""
    if remote.is_remote(name):
        return str(remote.local(name))
    if name in list_configs() and not pathlib.Path(name).is_file():
        return str(importlib.resources.files("mupax.configs") / f"{name}.py")
    path = pathlib.Path(name)
    try:
        if path.is_file():
            path.open().close()
            return name
        exists = bool(name) and path.exists()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--config={short(name)} cannot be read: {reason(error)}; check the path "
            "and its permissions"
        ) from None
    if exists:
        raise UserError(f"--config={short(name)} is not a file; give a Python file")
    hint = nearest(name, list_configs()) or "; give a path or a packaged config."
    raise UserError(
        f"there is no config file {short(name)!r}{hint} Packaged configs are: "
        f"{', '.join(list_configs())}"
    )


def _load(path: str) -> "ConfigDict":
    """The config of a file.

    Raises:
      UserError: it raises an error, or makes no config.
    """
    from ml_collections import ConfigDict

    loader = importlib.machinery.SourceFileLoader("mupax_config", path)
    module = types.ModuleType(loader.name)
    module.__file__ = path
    try:
        loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError("the config does not load: it has no function get_config()")
        config = module.get_config()
    except UserError:
        raise
    except SystemExit:
        raise UserError("the config does not load: it calls sys.exit") from None
    # A config file is a program, which can raise anything.
    except Exception as error:
        reported = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"the config does not load: {reported}") from None
    if not isinstance(config, ConfigDict):
        raise UserError(
            "the config does not load: get_config() must return a ConfigDict, and "
            f"returns {type(config).__name__}"
        )
    return config


def default_workdir(command: str, config: str) -> str:
    """The run directory of a command without `--workdir`.

    Examples:
      >>> default_workdir("train", "digits"), default_workdir("sweep", "digits")
      ('runs/digits', 'runs/digits-sweep')
    """
    return f"runs/{config}" + ("" if command in _OF_A_RUN else f"-{command}")


def wrapped(text: str, head: str = "") -> str:
    """Text for a terminal of 80 columns, indented by its first words."""
    return textwrap.fill(
        text,
        width=79,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )
