"""Command lines of every kind: what is asked for, or one sentence and status 2."""

import contextlib
import errno
import io
import itertools
import os
import subprocess
import sys
import types

import hypothesis
import pytest
from commands import HERE, mupax, refused
from commands import TOY_TRAIN as TOY
from hypothesis import strategies as st

from mupax import zoo
from mupax.experiments import cli, coord_check
from mupax.experiments.cli import command, flags
from mupax.experiments.errors import UserError
from mupax.experiments.run import workdir

CONFIGURED = [name for name, one in cli.COMMANDS.items() if one.config]


@pytest.mark.parametrize(("failed", "status"), [([("depth", "blocks")], 1), ([], 0)])
def test_the_status_of_a_coordinate_check(monkeypatch, tmp_path, failed, status):
    result = types.SimpleNamespace(failed=failed)
    monkeypatch.setattr(coord_check, "run", lambda *given, **options: result)
    assert mupax("coord-check", TOY, f"--workdir={tmp_path}") == status


# ----- Every command refuses what it does not know.


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_an_unknown_flag_is_refused_by_every_command(capsys, name):
    given = [TOY] if name in CONFIGURED else []
    assert "zzz" in refused(capsys, name, *given, "--zzz=1")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_unexpected_words_are_refused_by_every_command(capsys, name):
    given = [TOY] if name in CONFIGURED else []
    refused(capsys, name, *given, "one", "two")


@pytest.mark.parametrize("name", [*CONFIGURED, "convert"])
def test_a_flag_without_its_value_is_refused(capsys, name):
    flag = "--source" if name == "convert" else "--workdir"
    given = [TOY] if name in CONFIGURED else []
    assert flag[2:] in refused(capsys, name, *given, flag)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_names_each_of_its_flags(capsys, name):
    assert mupax(name, "--help") == 0
    out = capsys.readouterr().out
    assert cli.COMMANDS[name].summary in " ".join(out.split())
    for flag in cli.COMMANDS[name].flags:
        assert f"--{flag.name} " in out
    assert max(map(len, out.splitlines())) < 80


def test_models_prints_the_names_that_match(capsys):
    assert mupax("models", "res*", "--names") == 0
    assert capsys.readouterr().out.split() == zoo.list_models("res*")


# ----- Files that cannot be read.


@pytest.mark.parametrize(
    "words",
    [
        *(["{}"], ["train", TOY, "{}"], ["train", TOY, "--{}=1"], ["models", "{}"]),
        *(["train", TOY, "--config.{}=1"], ["train", TOY, "--config.seed={}"]),
        ["coord-check", TOY, "--widths={}"],
    ],
)
def test_a_very_long_word_is_shortened(capsys, words):
    said = refused(capsys, *(word.format("x" * 5000) for word in words))
    assert "xxx" in said
    assert len(said) < 500


def test_a_workdir_whose_name_is_too_long_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"too long.*choose another --workdir"):
        workdir.claim(tmp_path / ("x" * 5000), {}).__enter__()


def test_a_config_that_may_not_be_read_says_so(capsys, tmp_path, monkeypatch):
    config = tmp_path / "mine.py"
    config.write_text("")

    def denied(path):  # the superuser, who runs some tests, can read every file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(flags.pathlib.Path, "open", denied)
    assert "Permission denied" in refused(capsys, "train", f"--config={config}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no function get_config()"),
        (
            "def get_config():\n    return 3",
            "must return a ConfigDict, and returns int",
        ),
        ("def get_config():\n    pass", "returns NoneType"),
        ("def get_config():\n    return int('x')", "invalid literal for int"),
        ("def get_config():\n    return open('/nowhere')", "/nowhere"),
        ("def get_config():\n    1 / 0", "division by zero"),
        ("import sys\nsys.exit(3)", "calls sys.exit"),
        ("def get_config(:", "invalid syntax"),
        ("\0", "null bytes"),
        ("x = 'é'".encode("latin-1"), "codec can't decode"),
        ("raise KeyboardInterrupt", None),
    ],
)
def test_a_config_that_does_not_load_is_one_sentence(capsys, tmp_path, text, said):
    config = tmp_path / "mine.py"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    if said is None:
        assert mupax("train", f"--config={config}") == 130
    else:
        assert said in refused(capsys, "train", f"--config={config}")


def test_a_config_that_is_a_pipe_is_one_sentence(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused(capsys, "train", f"--config={tmp_path}/pipe")


def test_a_lock_that_is_a_pipe_does_not_hang(tmp_path):
    with workdir.claim(tmp_path / "run", {"a": 1}):
        pass
    (tmp_path / "run" / ".lock").unlink()
    os.mkfifo(tmp_path / "run" / ".lock")
    with pytest.raises(UserError, match="its lock is not a regular file"):
        workdir.claim(tmp_path / "run", {"a": 1}).__enter__()


def test_a_workdir_in_use_is_refused_by_check_and_by_claim(tmp_path):
    with workdir.claim(tmp_path / "run", {"a": 1}):
        for take in (
            lambda: workdir.check(tmp_path / "run", {"a": 1}),
            lambda: workdir.claim(tmp_path / "run", {"a": 1}).__enter__(),
        ):
            with pytest.raises(UserError, match="another process uses"):
                take()
    workdir.check(tmp_path / "run", {"a": 1})
    with pytest.raises(UserError, match=r"a \(1, here 2\)"):
        workdir.check(tmp_path / "run", {"a": 2})


def test_a_lock_ends_with_a_process_that_is_killed(tmp_path):
    program = (
        "import pathlib, sys, time\n"
        "from mupax.experiments import io\n"
        "with io.locked(pathlib.Path(sys.argv[1]), wait=False):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(100)\n"
    )
    path = tmp_path / "lock"
    child = subprocess.Popen(
        [sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    from mupax.experiments import io as files

    with pytest.raises(files.Busy), files.locked(path, wait=False):
        pass
    child.kill()
    child.communicate()
    with files.locked(path, wait=False):
        pass


def test_what_the_system_refuses_is_one_sentence(capsys, monkeypatch):
    def run(given):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/run/report.html")

    monkeypatch.setitem(cli.COMMANDS, "train", command.Command("", run, config=False))
    assert refused(capsys, "train") == (
        "mupax: '/mnt/run/report.html' cannot be used: Read-only file system\n"
    )


def test_a_reader_that_has_enough_ends_the_command_quietly():
    program = f"{sys.executable} -m mupax models | head -n 1"
    done = subprocess.run(program, shell=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


# ----- Command lines by chance.

NUMBERS = ["0", "1", "-1", "3", "1e9", "nan", "inf", "-inf", "1e400", "9" * 40, "0x10"]
WORDS = ["", " ", "none", "None", "x", "é", "a,b", "64,128", "'", '"', "{}", "[1, 2]"]
KEYS = ["steps", "seed", "learning_rate", "model", "model.width", "optimizer.name"]
KEYS += ["augment", "mesh.data", "sweep.seeds", "sweep.axes.learning_rate", "nope", ""]
VALUES = ["(1, 2)", "{'a': 1}", "2**[-9:-3]", "True", "lambda: 0", "__import__('os')"]
CONFIGS = [str(HERE / "toy_train.py"), str(HERE / "toy_config.py"), "digits", "digts"]
CONFIGS += [str(HERE), "/dev/null", "/nowhere.py", "digits_resmlp", ""]
OWN = sorted({flag.name for c in cli.COMMANDS.values() for flag in c.flags})

value = st.one_of(
    st.sampled_from(NUMBERS + WORDS + VALUES),
    st.text(max_size=8),
    st.floats().map(str),
    st.integers().map(str),
)


def spelled(name: st.SearchStrategy, values: st.SearchStrategy) -> st.SearchStrategy:
    """A flag with a value, in one word or two, with one dash or two, or without."""
    return st.one_of(
        st.builds("--{}={}".format, name, values).map(lambda word: [word]),
        st.builds(lambda n, v: [f"--{n}", v], name, values),
        name.map(lambda n: [f"--{n}"]),
        st.builds("-{}={}".format, name, values).map(lambda word: [word]),
        name.map(lambda n: [f"--no{n}"]),
    )


piece = st.one_of(
    spelled(st.just("config"), st.sampled_from(CONFIGS)),
    spelled(st.sampled_from(KEYS).map("config.{}".format), value),
    spelled(st.sampled_from([*OWN, "workdir", "source", "out", "scale"]), value),
    value.map(lambda word: [word]),
    st.sampled_from(["--", "-", "--=", "---", "--help", "-h", "list"]).map(
        lambda w: [w]
    ),
)
line = st.builds(
    lambda command, config, pieces: [command, *config, *itertools.chain(*pieces)],
    st.one_of(st.sampled_from(list(cli.COMMANDS)), value),
    st.sampled_from([[f"--config={name}"] for name in CONFIGS[:4]] + [[]]),
    st.lists(piece, max_size=5),
)


@pytest.fixture(scope="module")
def closed_doors(tmp_path_factory):
    """Behind the parsing of a command line nothing is done."""

    def nothing(*args, **options):
        return None

    patch = pytest.MonkeyPatch()
    sound = types.SimpleNamespace(failed=False)
    patch.setattr("mupax.experiments.coord_check.run", lambda *a, **o: sound)
    for door in (
        "convert.run",
        "estimate.plan.run",
        "run.commands.run",
        "run.commands.evaluate",
        "run.commands.explain",
        "sweep.command.run",
        "transfer.run",
        "transfer.explain_target",
    ):
        patch.setattr(f"mupax.experiments.{door}", nothing)
    patch.chdir(tmp_path_factory.mktemp("here"))
    patch.setattr("jax.distributed.initialize", refuse)
    yield
    patch.undo()


def refuse(**options):
    raise RuntimeError("there are no other processes")


def check_line(words: list[str]) -> None:
    """Run a command line; it does what it says, or refuses in one sentence."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["mupax", *words])
    assert status in (0, 2)
    if status == 2:
        said = err.getvalue()
        assert said.startswith("mupax: "), said
        assert len(said.splitlines()) == 1, said
        assert len(said) > len("mupax: ") + 10, said
    assert "Traceback" not in out.getvalue() + err.getvalue()


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(line)
def test_any_command_line_is_done_or_refused_in_one_sentence(closed_doors, words):
    check_line(words)


def test_the_directory_of_another_command_is_named(tmp_path):
    with workdir.claim(tmp_path / "run", {"seed": 0, "sweep": {}, "target": {}}):
        pass
    for settings in (None, {"seed": 0}):  # not known yet, and of `mupax train`
        with pytest.raises(UserError, match="the directory of a `mupax transfer`"):
            workdir.check(tmp_path / "run", settings)
