"""Every command of the docs, the README and the configs works."""

import contextlib
import json
import pathlib
import re
import shlex
import types

import pytest
from ml_collections import ConfigDict

from mupax.configs import digits_resmlp
from mupax.experiments import cli
from mupax.experiments.run.config import parse
from mupax.experiments.run.hyperparameters import transfer_record
from mupax.experiments.sweep import space
from papers import __main__ as papers
from papers import catalogue

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "papers").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
CONFIGS = sorted((ROOT / "configs").glob("[a-z]*.py"))


def commands(path: pathlib.Path) -> list[str]:
    """The command lines of a page, without comments and continued lines joined."""
    text = re.sub(r"\\\\?\n\s*", " ", path.read_text())
    lines = re.findall(
        r"^(?: {4})?(mupax [a-z].*|python -m (?:benchmarks|papers).*)$", text, re.M
    )
    return [line for line in lines if "COMMAND" not in line and "`" not in line]


COMMANDS = [
    pytest.param(line, id=f"{path.name}: {line[:60]}")
    for path in (*PAGES, *CONFIGS)
    for line in commands(path)
    if line.startswith("mupax ") and not line.startswith("mupax is ")
]
PROCESSES = ("--distributed", "--coordinator", "--process")
ENTRY_POINTS = (
    "convert.run",
    "estimate.plan.run",
    "predict.run",
    "generate.run",
    "run.commands.run",
    "run.commands.evaluate",
    "run.commands.explain",
    "sweep.command.run",
    "transfer.run",
    "transfer.explain_target",
)


@pytest.fixture
def called_with(tmp_path, monkeypatch):
    """What the commands ask for: nothing is trained. The names of files are real."""
    asked: list[object] = []

    def entry(*args: object, **options: object) -> None:
        asked.extend(args)

    for name in ENTRY_POINTS:
        monkeypatch.setattr(f"mupax.experiments.{name}", entry)
    monkeypatch.setattr(
        "mupax.experiments.coord_check.run",
        lambda *args, **_: asked.extend(args) or types.SimpleNamespace(failed=[]),
    )
    monkeypatch.setattr(
        "mupax.experiments.run.bucket.opened",
        lambda folder, **_: contextlib.nullcontext(pathlib.Path(folder)),
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((ROOT / "configs" / "digits.py").read_text())
    (tmp_path / "text.txt").write_text("to be, or not to be\n" * 100)
    return asked


@pytest.mark.parametrize("line", COMMANDS)
def test_a_documented_command_is_understood(called_with, line):
    """Its flags and keys exist, and its config passes every check."""
    for name, value in (
        ("DIR", "data"),
        ("FILE", "text.txt"),
        ("input.txt", "text.txt"),
    ):
        line = line.replace(name, value)
    rest = "" if "--config" in line else " --config=digits"
    words = shlex.split(line.replace(" ...", rest), comments=True)
    # Without other processes there is nobody to join.
    words = [w for w in words if not w.startswith(PROCESSES)]
    for source in re.findall(r"transfer_from=(\S+)", line):
        _write_summary(pathlib.Path(source))
    assert cli.main(words) == 0
    for config in called_with:
        if isinstance(config, ConfigDict):
            parse(config)


def _write_summary(path: pathlib.Path) -> None:
    """What a transfer of residual MLPs would have written."""
    config = digits_resmlp.get_config()
    config.learning_rate = 0.01
    base = space.parse_sweep(config).base
    path.parent.mkdir(parents=True)
    record = transfer_record(base, {"learning_rate": 0.01})
    path.write_text(json.dumps({"transfer": record}))


def test_commands_are_found_where_they_stand():
    assert len(COMMANDS) > 50
    lines = [param.values[0] for param in COMMANDS]
    assert not any("\\" in line for line in lines)
    assert {x.split()[1] for x in lines} >= set(cli.COMMANDS) - {"models"}


@pytest.mark.parametrize(
    "line",
    sorted({x for p in PAGES for x in commands(p) if x.startswith("python -m papers")}),
)
def test_a_documented_command_of_papers_is_understood(line):
    given = papers.parser().parse_args(shlex.split(line, comments=True)[3:])
    assert getattr(given, "id", "ID") in {*catalogue.figures(), "ID"}


# ----- Benchmarks are modules, and know the options that they are shown with.


@pytest.mark.parametrize(
    "line",
    sorted(
        {x for path in PAGES for x in commands(path) if "python -m benchmarks" in x}
    ),
)
def test_a_documented_benchmark_exists(line):
    words = shlex.split(line, comments=True)
    module = ROOT / pathlib.Path(*words[words.index("-m") + 1].split("."))
    source = module.with_suffix(".py").read_text()
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in source
