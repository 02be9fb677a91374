"""Define, parse and print the flags of a command, and find configs."""

import dataclasses
import importlib.machinery
import importlib.resources
import itertools
import pathlib
import re
import textwrap
import types
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import remote
from ..errors import UserError, nearest, reason, short

if TYPE_CHECKING:  # the base install prints help without ml_collections
    from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command.

    Attributes:
      name: without the dashes.
      default: its default value.
      help: text for `--help`.
      kind: str, int, float, bool or list; by default the type of `default`, or str.
      required: end of the error if the flag is missing; empty: the flag is optional.
    """

    name: str
    default: str | int | float | bool | None
    help: str
    kind: type | None = None
    required: str = ""

    @property
    def type(self) -> type:
        """The type of the flag's values."""
        return self.kind or (str if self.default is None else type(self.default))


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
      UserError: an unknown flag or config key, a value of the wrong type, or a config
        file that does not load.
    """
    from absl import flags

    _check_words(argv)
    values = flags.FlagValues()
    loaded: Any = None
    path, given = "", list(argv)
    if config:
        given, path = _without_config(argv)
        loaded = _load(path)
        own = {*loaded}
        known = (WORKDIR, *known)
    _define(known, values)
    try:
        left = given
        if config:
            left = _override_sections(loaded, given)
            _define_overrides(loaded, left, values)
        rest = values(left)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_one_line(error)) from None
    if len(rest) > 1 + words:
        word = rest[1 + words]
        raise UserError(f"unexpected argument {word!r}; flags start with --")
    flagged = _values(known, values)
    workdir = ""
    if config:
        name = pathlib.PurePath(path).stem
        workdir = flagged.pop("workdir") or default_workdir(argv[0], name)
        _check_sections(argv[0], given, own)
        if isinstance(source := loaded.get("transfer_from"), str):
            _check_transferred(given, source)
    return Parsed(list(argv), loaded, workdir, flagged, rest[1:])


def _without_config(argv: Sequence[str]) -> tuple[list[str], str]:
    """A command line without `--config`, and the path of the config."""
    out, path, rest = [], "", iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in ("-config", "--config"):
            path = find_config(value if equals else next(rest, ""))
        else:
            out.append(word)
    if not path:
        raise UserError(
            f"--config is missing; packaged configs are: {', '.join(list_configs())}"
        )
    return out, path


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


# Sections whose keys depend on a name, e.g. that of the model. A flag may add keys.
_OPEN = (
    *("model", "optimizer", "schedule", "parametrization", "data", "sharding"),
    "modules",
)
_OPEN_IN_SWEEP = ("parametrizations", "base_axes")


def _override_sections(config: "ConfigDict", argv: list[str]) -> list[str]:
    """Override whole sections, e.g. --config.model={...}; returns the other words.

    Overrides of keys follow, and may add keys to the new sections.
    """
    from absl import flags
    from ml_collections import ConfigDict, config_flags

    def is_section(word: str) -> bool:
        key = word.removeprefix("--config.").partition("=")[0]
        named = word.startswith("--config.") and key.isidentifier()
        return named and isinstance(config.get(key), ConfigDict)

    words = [argv[0], *filter(is_section, argv)]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict(
        "config", config, flag_values=values, sys_argv=words
    )
    values(words)
    return list(itertools.filterfalse(is_section, argv))


def _define_overrides(config: "ConfigDict", argv: list[str], values: Any) -> None:
    """Define a flag for each key of a config that a command line overrides.

    Adds missing sections, and missing keys of open sections.
    """
    from ml_collections import config_flags

    from ..run.config import defaults

    whole = defaults("sweep", "target")
    with config.unlocked():
        for word in argv:
            path, equals, _ = word.removeprefix("--config.").partition("=")
            section, *keys = path.split(".")
            if not word.startswith("--config.") or not equals or not keys:
                continue
            if section not in ("sweep", "target", *_OPEN):
                continue
            if section not in config:
                config[section] = whole[section]
            if "/" in path and "[" not in path:
                raise ValueError(
                    f"{path} has a slash; write its last key in brackets and quotes: "
                    f"\"--config.{path.rpartition('.')[0]}['{keys[-1]}']=...\""
                )
            _check_key(section, keys, config)
            unset = section == "target" and not config.target.get(keys[0])
            if section in _OPEN or keys[0] in _OPEN_IN_SWEEP or unset:
                _add(config, path)
    for word in argv:
        if word.startswith("--config."):
            _check_path(config, word.removeprefix("--config.").partition("=")[0])
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)


def _check_path(config: "ConfigDict", path: str) -> None:
    """Raise a ValueError for a key of a value, or an item of a tuple."""
    from ml_collections import ConfigDict
    from ml_collections.config_flags import config_path

    try:
        keys = config_path.split(path)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"--config.{short(path)} is not a key; write e.g. --config.model.width=64"
        ) from None
    value: Any = config
    for i, key in enumerate(keys):
        if isinstance(value, ConfigDict | dict):
            if key not in value:
                return  # the override raises an error
        elif value is not None:
            item = isinstance(value, tuple) and key in range(len(value))
            if not item or i == len(keys) - 1:
                whole = "".join(
                    f".{k}" if isinstance(k, str) else f"[{k}]" for k in keys[:i]
                )[1:]
                raise ValueError(
                    f"the config has no key {path}: {whole} is a value, not a section; "
                    f"set all of it by --config.{whole}=..."
                )
        else:
            return
        value = value[key]


def _check_key(section: str, keys: Sequence[str], config: "ConfigDict") -> None:
    """Raise a ValueError for keys that a sweep or a target lacks."""
    from ..run.config import KEYS

    head = keys[0].partition("[")[0]
    if section == "sweep" and head == "axes" and len(keys) > 1:
        known = sorted(config.sweep.axes)
        if (axis := keys[1].partition("[")[0]) not in known:
            raise ValueError(
                f"a sweep has no axis {axis!r}; its axes are {', '.join(known)}"
                f"{nearest(axis, known)}"
            )
    known = sorted({*config[section], *(KEYS if section == "target" else ())})
    if section not in _OPEN and head not in known:
        hint = nearest(head, known) or "; docs/reference/config.md lists all keys"
        raise ValueError(f"the config has no key {section}.{head}{hint}")


def _add(config: "ConfigDict", path: str) -> None:
    """Add the key of an override, and sections on the way to it, if missing."""
    from ml_collections import ConfigDict
    from ml_collections.config_dict import placeholder

    *sections, key = path.split(".")
    for name in sections:
        if name not in config and name.isidentifier():
            config[name] = ConfigDict()
        if not isinstance(config.get(name), ConfigDict):
            return  # the override raises an error
        config = config[name]
    if key.isidentifier() and key not in config:
        config[key] = placeholder(object)


def _values(known: Iterable[Flag], values: Any) -> dict[str, Any]:
    """The values of flags by name; UserError if a required flag has none."""
    for flag in known:
        if flag.required and not values[flag.name].value:
            raise UserError(f"--{flag.name} is missing; {flag.required}")
        if values[flag.name].present and values[flag.name].value in ("", [""]):
            raise UserError(f"--{flag.name} is empty; give a value, or leave it out")
    return {flag.name: values[flag.name].value for flag in known}


def _define(known: Iterable[Flag], values: Any) -> None:
    from absl import flags

    define: dict[type, Any] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_bool,
        list: flags.DEFINE_multi_string,
    }
    for flag in known:
        define[flag.type](flag.name, flag.default, flag.help, flag_values=values)


# Flags that absl defines: read flags from a file; ignore unknown flags.
_OF_ABSL = ("flagfile", "undefok")


def _check_words(argv: Sequence[str]) -> None:
    """Check that no argument contains a NUL byte, bad UTF-8 or a flag of absl."""
    for word in argv[1:]:
        if "\0" in word:
            raise UserError(f"{word!r} holds a NUL byte; leave it out")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"{word!r} is not UTF-8; rename the file") from None
        name = word.lstrip("-").partition("=")[0]
        # absl compares long names letter by letter, in a recursion.
        if word.startswith("-") and (name in _OF_ABSL or len(name) > 200):
            raise UserError(f"Unknown command line flag {short(name)!r}")


def _one_line(error: BaseException) -> str:
    text = str(error)
    if found := re.match(r"flag --([^=]+)=(.*): invalid literal for int", text):
        return f"--{found[1]} is {found[2]!r}; it must be a whole number"
    if found := re.match(r"flag --([^=]+)=(.*): could not convert string to", text):
        return f"--{found[1]} is {found[2]!r}; it must be a number"
    if found := re.match(r"flag --([^=]+)=(.*): \('Non-boolean argument", text, re.S):
        return f"--{found[1]} is {found[2]!r}; it must be True or False"
    if found := re.match(r"flag --([^=]+)=(.*): Failed to parse .* a ConfigDict", text):
        flag, value = found.groups()
        name = f"; --{flag}.name={value} sets its name" if value.isidentifier() else ""
        return f"--{flag}={value} must be a section, e.g. \"{{'name': ...}}\"{name}"
    if found := re.match(r"Unknown command line flag '([\w.]+)'", text):
        from ..run.config import defaults

        if found[1].partition(".")[0] in defaults("sweep", "target"):
            return f"{text.strip()}; a key of the config is --config.{found[1]}=..."
    text = text.replace("\\n", " ").replace("\\'", "'").replace('\\"', '"')
    if isinstance(error, AttributeError | KeyError):
        while len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]  # KeyError quotes its argument
        near = re.search(r"\s*Did you mean ['\"](\w+)['\"] instead of .*", text, re.S)
        if near:
            text = f"{text[: near.start()]}; did you mean {near[1]!r}?"
        else:
            from ..run.config import KEYS

            text += nearest(text, KEYS) or "; docs/reference/config.md lists all keys"
        text = f"the config has no key {text}"
    return " ".join(text.split()) or type(error).__name__


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


# ----- Help.


CONFIG = (
    Flag("config", None, "config file, or the name of a packaged config: {configs}"),
    Flag("config.KEY=V", None, "override a key of the config: --config.batch_size=64"),
)
WORKDIR = Flag(
    "workdir",
    None,
    "run directory, also s3://bucket/run or gs://bucket/run; default: {workdir}",
)


def default_workdir(command: str, config: str) -> str:
    """The run directory of a command without `--workdir`.

    Examples:
      >>> default_workdir("train", "digits"), default_workdir("sweep", "digits")
      ('runs/digits', 'runs/digits-sweep')
    """
    return f"runs/{config}" + ("" if command in _OF_A_RUN else f"-{command}")


def describe(flags: Iterable[Flag], command: str) -> str:
    """One paragraph per flag of a command, wrapped to the width of a terminal."""
    workdir = default_workdir(command, "<config>")
    rows = []
    for flag in flags:
        text = flag.help.format(configs=", ".join(list_configs()), workdir=workdir)
        text += " (required)" if flag.required else ""
        rows.append(wrapped(text, head=f"  --{flag.name:<14} "))
    return "\n".join(rows)


def wrapped(text: str, head: str = "") -> str:
    """Text for a terminal of 80 columns, indented by its first words."""
    return textwrap.fill(
        text,
        width=79,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )
