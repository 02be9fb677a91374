"""docs/tune.md: the session on one's own model runs as it stands."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "tune.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def session() -> str:
    return snippets()[0]


def test_the_session_has_less_than_sixty_lines_of_code():
    assert len([line for line in session().splitlines() if line.strip()]) < 60


@pytest.mark.long
def test_the_session_runs_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a snippet keeps its runs in a folder
    space: dict = {}
    exec(compile(session(), "docs/tune.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "learning_rate over depth: " in printed
    assert "log |Δ activation| against log depth" in printed
    assert float(space["value"]) < 0.3
    _, _, target, schedule, *_ = snippets()
    exec(compile(target, "docs/tune.md", "exec"), space)
    assert "at width 256, depth 16" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    exec(compile(schedule, "docs/tune.md", "exec"), space)
    # With the optimizer of the last snippet: another program, which trains.
    before = float(space["result"].populations[0].loss.mean())
    exec(compile(target, "docs/tune.md", "exec"), space)
    assert float(space["result"].populations[0].loss.mean()) != before
