"""Define, parse and print the flags of a command, and find configs."""

import collections
import dataclasses
import importlib.resources
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import remote
from ..checks import shown
from ..errors import UserError, nearest, reason, short
from .overrides import converted, load, override

if TYPE_CHECKING:  # the base install prints help without ml_collections
    pass


_LONGEST = 40  # letters of a name that is compared with others


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
    own: Sequence[Flag] = (),
    *,
    config: bool = True,
    words: int = 0,
) -> Parsed:
    """Parse a command line.

    Args:
      argv: begins with the command's name.
      own: the command's own flags.
      config: whether it takes `--config`, its overrides and `--workdir`.
      words: maximal number of arguments without dashes.

    Raises:
      UserError: an unknown flag or config key, a value of the wrong type, or a config
        file that does not load.
    """
    found = _read(argv, (WORKDIR, *own) if config else own, config=config)
    if len(found.arguments) > words:
        word = shown(found.arguments[words])
        raise UserError(f"unexpected argument {word}; flags start with --")
    given = found.values
    if not config:
        return Parsed(list(argv), None, "", given, found.arguments)
    path = given.pop("config")
    if path is None:
        raise UserError(
            f"--config is missing; packaged configs are: {', '.join(list_configs())}"
        )
    path = find_config(path)
    loaded = load(path)
    for key, text in found.overrides:
        override(loaded, key, text)
    keys = [key for key, _ in found.overrides]
    name = pathlib.PurePath(path).stem
    workdir = given.pop("workdir") or default_workdir(argv[0], name)
    if argv[0] in _OF_A_RUN:
        _check_sections(argv[0], keys)
    if isinstance(source := loaded.get("transfer_from"), str):
        _check_transferred(keys, source)
    return Parsed(list(argv), loaded, workdir, given, found.arguments)


class _Found(NamedTuple):
    """The words of a command line."""

    arguments: list[str]  # without dashes
    overrides: list[tuple[str, str | None]]  # config keys and their texts
    values: dict[str, Any]  # of flags, by name


def _read(argv: Sequence[str], own: Sequence[Flag], *, config: bool) -> _Found:
    """Read the words after a command's name.

    A flag has one dash or two, and its value after "=" or in the next word. A flag that
    is True or False needs no value, and `--noNAME` makes it False.
    """
    known = {flag.name: flag for flag in own}
    if config:
        known["config"] = Flag("config", None, "")
    found = _Found([], [], {name: flag.default for name, flag in known.items()})
    words = collections.deque(argv[1:])
    while words:
        _check_word(word := words.popleft())
        if word == "--":
            found.arguments.extend(words)
            break
        elif not word.startswith("-") or not word.strip("-"):
            found.arguments.append(word)
        else:
            name, equals, text = word.removeprefix("-").removeprefix("-").partition("=")
            _take(found, known, name, text if equals else None, words)
    for flag in own:
        if flag.required and not found.values[flag.name]:
            raise UserError(f"--{flag.name} is missing; {flag.required}")
    return found


def _take(
    found: _Found,
    known: Mapping[str, Flag],
    name: str,
    text: str | None,
    words: collections.deque[str],
) -> None:
    """Add a flag; its value is `text`, or else the next word."""
    key = name.removeprefix("config.")
    if "config" in known and key != name:
        if text is None and words and not words[0].startswith("--"):
            text = words.popleft()
        found.overrides.append((key, text))
        return
    negated = known.get(name.removeprefix("no")) if text is None else None
    if name not in known and negated is not None and negated.type is bool:
        found.values[negated.name] = False
        return
    if name not in known:
        raise UserError(_unknown(name, known))
    flag = known[name]
    if text is None:
        following = words.popleft() if words and flag.type is not bool else None
        text = "true" if flag.type is bool else following
    if text is None:
        raise UserError(f"--{name} needs a value: --{name}=...")
    if not text:
        if flag.required:
            raise UserError(f"--{name} is missing; {flag.required}")
        raise UserError(f"--{name} is empty; give a value, or leave it out")
    if flag.type is list:
        found.values[name] = [*(found.values[name] or ()), text]
    else:
        found.values[name] = converted(f"--{name}", flag.type, text)


def _unknown(name: str, known: Mapping[str, Flag]) -> str:
    text = f"Unknown command line flag {short(name)!r}"
    if "config" in known:
        from ..run.config import defaults

        if name.partition(".")[0] in defaults("sweep", "target"):
            return f"{text}; a key of the config is --config.{short(name)}=..."
    return text + nearest(name[:_LONGEST], known)


# Commands whose default run directory is that of `mupax train`.
_OF_A_RUN = ("train", "eval")


def _check_sections(command: str, keys: Iterable[str]) -> None:
    """Check that no flag sets a key of a section that trains other runs."""
    for key in keys:
        if key.partition(".")[0] in ("sweep", "target"):
            raise UserError(
                f"--config.{short(key)} has no effect on `mupax {command}`; set "
                "model.width and model.depth, or use `mupax sweep` or `mupax transfer`"
            )


def _check_transferred(keys: Iterable[str], source: str) -> None:
    """Check that no flag sets a key that `transfer_from`, a summary.json, replaces."""
    from ..run.hyperparameters import transferred_keys

    replaced = transferred_keys(remote.local(source))
    for key in keys:
        if any(f"{key}.".startswith(f"{known}.") for known in replaced):
            raise UserError(
                f"--config.{key} is set, and transfer_from replaces it; leave one of "
                "them out"
            )


def _check_word(word: str) -> None:
    """Check that an argument contains no NUL byte and no bad UTF-8."""
    if "\0" in word:
        raise UserError(f"{shown(word)} holds a NUL byte; leave it out")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UserError(f"{shown(word)} is not UTF-8; rename the file") from None


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
        head = f"  --{flag.name:<14} "
        rows.append(
            textwrap.fill(
                text,
                width=88,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                break_on_hyphens=False,
            )
        )
    return "\n".join(rows)
