"""Tables of runs: what is written is read, and the pages are what the tables say."""

import csv
import json
import math
import shlex
import types

import numpy as np
import pytest

from mupax.experiments.cli import flags
from mupax.experiments.errors import UserError
from mupax.experiments.report import SweepData
from mupax.experiments.sweep import space
from mupax.experiments.sweep.results import Population, Sizes
from papers import catalogue, numbers, pages, tables

DATA = catalogue.DATA
# Of sweeps; the others hold numbers.
TRAINED = sorted(
    str(path.relative_to(DATA))
    for path in DATA.glob("*/*.csv")
    if '"command"' in path.read_text().partition("\n")[0]
)
RATES, MULTIPLIERS = [0.25, 0.5, 1.0], [0.5, 1.0]


def made(key="depth_mup", depth=8, seeds=2, choices=None):
    """A population of random losses; one run of it diverged half-way."""
    rng = np.random.default_rng(depth)
    shape = (seeds, len(RATES), len(MULTIPLIERS))
    curves = rng.uniform(1, 2, (*shape, 40))
    loss = curves[..., -1].copy()
    loss[0, 2, 1], curves[0, 2, 1, 20:] = np.nan, np.nan
    axes = {"learning_rate": RATES, "branch_multiplier": MULTIPLIERS}
    name = f"{key}-w16-d{depth}"
    return Population(name, key, 16, depth, choices or {}, axes, loss, curves, 1.0)


def data(*populations, **config):
    settings = {"batch_size": 8, "dataset": "digits", "steps": 40, **config}
    settings |= {"model": {"name": "resmlp"}, "optimizer": {"name": "adam"}}
    return SweepData(
        populations=populations,
        base=Sizes(16, 8),
        labels={"depth_mup": "Depth-μP", "ode": "ode"},
        featured="depth_mup",
        steps=40,
        settings={"config": settings},
        subject="resmlp on digits, adam",
        command="mupax sweep --config resmlp_sweep",
    )


def facts(swept):
    return tables.facts(swept, epochs=0.2, measured="2026-11-22")


def test_a_table_comes_back():
    known = {"model.norm": "batch", "model.layer_norm": True}
    swept = data(made(choices=known), made("ode", 32, choices=known))
    again = tables.parse(tables.text(swept.populations, facts(swept)), "it")
    assert again.data.base == swept.base
    assert again.data.subject == swept.subject
    assert again.data.steps == 40
    for old, new in zip(swept.populations, again.data.populations, strict=True):
        assert (old.parametrization, old.depth) == (new.parametrization, new.depth)
        assert new.choices == old.choices
        assert new.axes == old.axes
        np.testing.assert_allclose(new.loss, old.loss, rtol=1e-4)
        halves = old.curves.reshape(*old.loss.shape, 20, 2).mean(-1)
        np.testing.assert_allclose(new.curves, halves, rtol=1e-4)


def test_a_table_without_runs_of_the_featured_parametrization_features_another():
    swept = data(made("ode"), made("ode", 32))
    again = tables.parse(tables.text(swept.populations, facts(swept)), "it")
    assert again.data.featured == "ode"
    assert again.facts["featured"] == "depth_mup"
    assert again.data.main == "ode"


def test_a_table_says_how_long_its_runs_are():
    swept = data(made())
    told = tables.parse(tables.text(swept.populations, facts(swept)), "it").length
    assert told == "40 steps (0.2 epochs), width 16, depth 8, 2 seeds"


def test_sizes_have_the_same_seeds_and_parametrizations_their_own():
    swept = data(made(seeds=3), made(depth=32, seeds=2), made("ode", 32, seeds=4))
    again = tables.parse(tables.text(swept.populations, facts(swept)), "it")
    seeds = [(p.parametrization, len(p.loss)) for p in again.data.populations]
    assert seeds == [("depth_mup", 2), ("depth_mup", 2), ("ode", 4)]
    assert again.length.endswith("2 to 4 seeds")


def test_a_population_without_its_whole_grid_is_left_out():
    swept = data(made(), made("ode", 32))
    lines = tables.text(swept.populations, facts(swept)).splitlines(keepends=True)
    again = tables.parse("".join(lines[:-8]), "it")
    assert [p.parametrization for p in again.data.populations] == ["depth_mup"]


def test_later_sweeps_add_to_a_table(tmp_path):
    path = tmp_path / "medium" / "it.csv"
    first, more = data(made()), data(made("ode", 32))
    tables.add(path, first, facts(first))
    both = tables.add(path, more, facts(more))
    assert [p.parametrization for p in both.data.populations] == ["depth_mup", "ode"]
    other = data(made(), batch_size=16)
    alone = tables.add(path, other, facts(other))
    assert len(alone.data.populations) == 1


def test_a_table_covers_what_it_holds():
    swept = data(made())
    table = tables.parse(tables.text(swept.populations, facts(swept)), "it")
    axes = {"learning_rate": RATES, "branch_multiplier": MULTIPLIERS}

    def task(depth=8, **grid):
        return types.SimpleNamespace(
            parametrization="depth_mup", width=16, depth=depth, choices=(), grid=grid
        )

    assert tables.covers(table, [task(**axes)], 2)
    assert not tables.covers(table, [task(**axes)], 3)
    assert not tables.covers(table, [task(16, **axes)], 2)
    wider = axes | {"learning_rate": [0.125, *RATES]}
    assert not tables.covers(table, [task(**wider)], 2)


def test_a_file_that_is_no_table_is_refused():
    with pytest.raises(UserError, match="it is not a table of runs"):
        tables.parse("a,b\n1,2\n", "it")


def test_numbers_come_back(tmp_path):
    rows = [
        {"network": "ode", "depth": 2, "kappa": 0.25, "standard_error": 1e-9},
        {"network": "ode", "depth": math.inf, "gain": 1 / 3},
    ]
    numbers.write(tmp_path / "it.csv", rows)
    again = numbers.read(tmp_path / "it.csv")
    assert again.rows == [rows[0], rows[1] | {"gain": 0.3333333}]
    assert again.finite("depth").rows == again.where(depth=2).rows == [rows[0]]
    assert again.having("gain").rows == again.rows[1:]


def test_tables_hold_no_words():
    """A sentence, a label or a verdict that changes leaves every table as it is."""
    for path in DATA.glob("*/*.csv"):
        head, *body = path.read_text().splitlines()
        if head.startswith("# "):
            facts = json.loads(head.removeprefix("# "))
            known = "epochs guess base featured command measured settings choices axes"
            assert set(facts) == set(known.split()), path
            continue
        words = {x for row in csv.reader(body) for x in row if not is_number(x)}
        assert words <= {"", "depth_mup", "ode", "relu", "abs"}, path


def is_number(text):
    try:
        return isinstance(float(text), float)
    except ValueError:
        return False


def test_a_page_without_markers_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(UserError, match="lacks the lines"):
        pages.replaced(tmp_path / "page.md", {"": "new"})


def test_each_generated_part_has_its_own_markers(tmp_path):
    page = tmp_path / "page.md"
    parts = [f"{pages.begin(name)}\nold\n{pages.END}\n" for name in ("", "drift")]
    page.write_text(f"before\n{parts[0]}between\n{parts[1]}after\n")
    text = pages.replaced(page, {"": "main", "drift": "table"})
    assert "old" not in text
    assert text.index("main") < text.index("between") < text.index("table")
    with pytest.raises(UserError, match=r"lacks the lines .*joint"):
        pages.replaced(page, {"joint": "table"})


@pytest.fixture(scope="module")
def generated():
    return pages.generated(DATA, pages.drawings(DATA))


@pytest.mark.parametrize("name", ["figures", "evidence"])
def test_the_pages_hold_what_the_tables_say(name, generated):
    """If you meant this: python -m papers pages."""
    page = DATA.parent / f"{name}.md"
    text = page.read_text()
    assert pages.replaced(page, generated[name]) == text, "run: python -m papers pages"
    # No part has markers that the command does not know.
    assert text.count("<!-- begin: ") == len(generated[name])


@pytest.mark.parametrize("where", TRAINED)
def test_the_command_that_a_page_prints_trains_the_runs_of_its_table(where):
    table = tables.read(DATA / where)
    printed = "\n".join(pages.command_lines(table.data.command))
    assert printed.startswith("mupax sweep --config ")
    words = shlex.split(printed.replace("\\\n", " "))
    config = space.parse_sweep(flags.parse(words[1:]).config)
    assert tables.same_settings(table, config.settings())
    tasks = {
        (t.parametrization, t.width, t.depth, *t.choices.items()): t.grid
        for t in space.tasks(config)
    }
    for runs in table.data.populations:
        grid = tasks[runs.parametrization, *runs.sizes, *runs.choices.items()]
        for name, values in runs.axes.items():
            np.testing.assert_allclose(values, grid[name], rtol=1e-9)
        assert grid.keys() == runs.axes.keys()


def test_every_table_belongs_to_a_figure():
    known = {part.name for part in pages.parts()}
    figures = catalogue.figures().values()
    known |= {figure.table or figure.id for figure in figures if figure.measure}
    held = {path.stem for path in DATA.glob("*/*.csv")}
    assert held <= known
