"""docs/tune.md: the session on one's own model runs as it stands."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "tune.md"


def session() -> str:
    return re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1)


def test_the_session_has_less_than_sixty_lines_of_code():
    assert len([line for line in session().splitlines() if line.strip()]) < 60


@pytest.mark.long
def test_the_session_runs_as_written(capsys):
    space: dict = {}
    exec(compile(session(), "docs/tune.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "learning_rate over depth: " in printed
    assert "log |Δ activation| against log depth" in printed
    assert float(space["value"]) < 0.3
