"""Pages of the docs: their snippets run, and notebooks are those of their scripts."""

import doctest
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mupax
from mupax import zoo

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["index.md", "howto/*.md", "coming-from/*.md", "zoo/use.md"]
FOUND = sorted(path for pattern in PAGES for path in DOCS.glob(pattern))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))


def snippets(path: pathlib.Path) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", path.read_text(), re.S | re.M)


@pytest.mark.parametrize("path", FOUND, ids=lambda p: str(p.relative_to(DOCS)))
def test_the_snippets_of_a_page_run_in_one_session(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    codes = snippets(path)
    assert codes, "a page shows code that works"
    session: dict = {}
    for code in codes:
        exec(compile(code, str(path), "exec"), session)
    printed = capsys.readouterr().out
    if path.stem == "failures":
        assert "is 1 times the base's and should be 0.125" in printed
    if path.stem == "coordinate_check":
        assert "head" in printed


@pytest.mark.parametrize("page", ["rules.md", "chains.md"])
def test_examples_of_a_page_print_what_they_show(page):
    test = doctest.DocTestParser().get_doctest(
        "".join(snippets(DOCS / page)), {}, page, page, 0
    )
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.long
def test_the_snippets_of_the_zoo_run(monkeypatch):
    """What names a file or the hub gets a model of that name without weights."""
    load = zoo.load_pretrained
    asked = []

    def stand_in(*args: str, **options: object) -> object:
        if args == ("resmlp_digits",):
            return load(*args, **options)
        asked.append(args)
        return None

    monkeypatch.setattr(mupax.zoo, "load_pretrained", stand_in)
    session = {"jax": jax, "optax": optax}
    for page in ("zoo.md", "zoo/language.md", "zoo/small.md"):
        for code in snippets(DOCS / page):
            exec(code, session)
    assert len(asked) == 7
    images, labels = jnp.zeros((2, 32, 32, 3)), jnp.zeros(2, int)
    model = zoo.create("cnn", width=8, depth=1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert np.isfinite(session["step"](model, optimizer, images, labels))


@pytest.mark.long
def test_the_session_of_the_page_on_tuning_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a snippet keeps its runs in a folder
    session, target, schedule, *_ = snippets(DOCS / "tune.md")
    assert len([line for line in session.splitlines() if line.strip()]) < 60
    space: dict = {}
    exec(compile(session, "docs/tune.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "learning_rate over depth: " in printed
    assert "log |Δ activation| against log depth" in printed
    assert float(space["value"]) < 0.3
    exec(compile(target, "docs/tune.md", "exec"), space)
    assert "at width 256, depth 16" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    exec(compile(schedule, "docs/tune.md", "exec"), space)
    # With the optimizer of the last snippet: another program, which trains.
    before = float(space["result"].populations[0].loss.mean())
    exec(compile(target, "docs/tune.md", "exec"), space)
    assert float(space["result"].populations[0].loss.mean()) != before


def test_hand_written_groups_are_what_the_shapes_give():
    """coming-from/optax.md: both optimizers make the same first update."""
    session: dict = {}
    by_hand, from_shapes, *_ = snippets(DOCS / "coming-from" / "optax.md")
    for code in (by_hand, from_shapes):
        exec(code, session)
    params = session["params"](512)
    grads = jax.tree.map(jnp.ones_like, params)
    updates = []
    for name in ("by_hand", "tx"):
        tx = session[name]
        updates.append(tx.update(grads, tx.init(params), params)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), *updates)


def test_code_of_other_libraries_is_marked_as_such():
    """Fences are `python`, which runs, a titled block of a rival, or no Python."""
    kinds = set()
    for path in DOCS.rglob("*.md"):
        kinds |= set(re.findall(r"^```(\S[^\n]*)$", path.read_text(), re.M))
    ours = {"python", 'python title="mupax"', "sh", "text"}
    assert kinds <= ours | {'{.python title="mup"}'}


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda p: p.stem)
def test_a_notebook_has_the_code_of_its_script_and_ran(script):
    """`make notebooks` writes it. Outputs are stored, and are small."""
    stored = script.with_suffix(".ipynb")
    text = stored.read_text()
    assert len(text) < 101_000
    cells = json.loads(text)["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    shown = ["".join(c["source"]).strip() for c in code]
    assert shown == cells_of(script), f"edit {script.name}; then run: make notebooks"

    assert any(c["outputs"] for c in code)
    assert not any(o["output_type"] == "error" for c in code for o in c["outputs"])


def cells_of(script: pathlib.Path) -> list[str]:
    parts = re.split(r"^# %%(.*)$", script.read_text(), flags=re.M)[1:]
    kinds, bodies = parts[::2], parts[1::2]
    pairs = zip(kinds, bodies, strict=True)
    return [b.strip() for k, b in pairs if "[markdown]" not in k]


@pytest.mark.long
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs(script, tmp_path):
    """As a script, which needs no Jupyter."""
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "HOME": "/tmp"},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_tutorial_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for script in TUTORIALS:
        assert f"tutorials/{script.stem}.ipynb" in navigation


def test_the_link_check_finds_what_leads_nowhere(tmp_path):
    check = DOCS / "check_site.py"
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="good.html#top">')

    def run() -> tuple[int, str]:
        words = [sys.executable, str(check), str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run() == (0, "")
    (tmp_path / "bad.html").write_text(
        '<a href="none.html"><a href="good.html#no">'
        '<img src="https://example.com/x.png"><a href="https://example.com">'
    )
    status, said = run()
    assert status == 1
    assert said.splitlines() == [
        "bad.html links to none.html, which does not exist",
        "bad.html links to good.html#no, and there is no such anchor",
        "bad.html loads https://example.com/x.png from another host",
    ]


# ----- Community files.


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == mupax.__version__
    assert f"version: {mupax.__version__}\n" in citation


def test_papers_of_the_readme_are_cited():
    ids = set(re.findall(r"arxiv.org/abs/(\S+?)\)", (ROOT / "README.md").read_text()))
    cited = set(re.findall(r"arxiv.org/abs/(\S+)", (ROOT / "CITATION.cff").read_text()))
    assert len(cited) == 4
    assert cited <= ids


def test_every_extra_is_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (DOCS / "install.md").read_text()
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in page


def test_the_page_of_config_keys_lists_them_all():
    from mupax.experiments.run.config import KEYS, defaults

    page = (DOCS / "reference" / "config.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    listed = {key for row in rows for key in re.findall(r"`([\w.]+)`", row)}
    config = defaults("sweep", "target")
    expected = {f"sweep.{key}" for key in config.sweep}
    expected |= {f"target.{key}" for key in config.target}
    expected |= {f"schedule.{key}" for key in config.schedule}
    assert listed == expected | set(KEYS)
