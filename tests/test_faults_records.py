"""A damaged run directory: every outcome is right, recovered, or one sentence."""

import logging
import pathlib
import random

import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.run import records, workdir
from mupax.experiments.run.records import Records

SETTINGS = {"lr": 0.01, "model": {"width": 8, "depth": 2}, "steps": 60}


@pytest.fixture
def warned(caplog):
    """What was logged as a warning."""
    caplog.set_level(logging.WARNING, "absl")
    return lambda: [r.getMessage() for r in caplog.records]


def lines_of(steps: int) -> list[dict]:
    """The lines of a run: a loss every 2 steps, an evaluation every 6."""
    rng = random.Random(0)
    found = []
    for step in range(2, steps + 1, 2):
        found.append({"step": step, "loss": rng.random(), "learning_rate": 0.01})
        if step % 6 == 0:
            loss, right = rng.random(), rng.random()
            found.append({"step": step, "test_loss": loss, "test_accuracy": right})
    return found


def write(folder: pathlib.Path, lines: list[dict]) -> Records:
    """A run's records, closed."""
    folder.mkdir(exist_ok=True)
    written = Records(folder, 0)
    for line in lines:
        written.add(line)
    written.close()
    return written


def resumed(folder: pathlib.Path, upto: int, **options) -> Records:
    """Records as a run that resumes from a step opens them, closed."""
    found = Records(folder, upto, **options)
    found.close()
    return found


def test_a_log_reads_back_what_was_written(tmp_path):
    lines = lines_of(60)
    write(tmp_path, lines)
    assert records.read(tmp_path) == lines
    assert resumed(tmp_path, 60).lines == lines


def test_a_line_cut_short_by_a_kill_does_not_spoil_the_next(tmp_path):
    """A torn line at the end, all whole lines being kept, once merged with the next."""
    lines = lines_of(20)
    write(tmp_path, lines)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 22, "lo')
    again = Records(tmp_path, 20)
    more = {"step": 22, "loss": 0.25}
    again.add(more)
    again.close()
    assert records.read(tmp_path) == [*lines, more]


def test_lines_after_the_checkpoint_are_written_again_once(tmp_path):
    lines = lines_of(20)
    write(tmp_path, lines)
    again = Records(tmp_path, 10)
    for line in lines:
        if line["step"] > 10:
            again.add(line)
    again.close()
    assert records.read(tmp_path) == lines


def test_a_damaged_line_is_named_and_not_used(tmp_path, warned):
    lines = lines_of(20)
    write(tmp_path, lines)
    path = tmp_path / "metrics.jsonl"
    texts = path.read_text().splitlines()
    texts[4] = texts[4].replace('"step": 8', '"st')
    path.write_text("\n".join(texts) + "\n")
    again = resumed(tmp_path, 20)
    assert again.lines == lines[:4] + lines[5:]
    assert "line 5 is damaged" in warned()[0]


def test_the_log_of_another_kind_of_file_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be used"):
        Records(tmp_path, 0)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_run_whose_settings_are_lost_is_refused(tmp_path, text):
    with workdir.claim(tmp_path, SETTINGS):
        pass
    path = tmp_path / "experiment.json"
    path.write_text(text)
    with (
        pytest.raises(UserError, match=r"is damaged .*choose another --workdir"),
        workdir.claim(tmp_path, SETTINGS),
    ):
        pass
    assert path.read_text() == text
