"""The README's Python runs as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme_run_in_one_session(capsys):
    use, model, chain, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    session: dict = {}
    # The model is shown after its use; a reader has one already.
    for name, code in (("model", model), ("use", use), ("chain", chain)):
        code = code.replace("1024, 32", "256, 8").replace("(4, 32)", "(4, 8)")
        exec(compile(code, f"README {name}", "exec"), session)
    printed = capsys.readouterr().out
    assert "head/kernel" in printed
    assert "blocks/0/kernel *" in printed
    params = session["params"]
    session["tx"].init(params)


def test_the_commands_of_the_readme_are_those_of_the_makefile():
    targets = re.findall(
        r"^(\w[\w-]*):", (README.parent / "Makefile").read_text(), re.M
    )
    for command in re.findall(r"^make (\w+)", README.read_text(), re.M):
        assert command in targets
