"""The report of a sweep says what the numbers say, whatever they are."""

import base64
import csv
import dataclasses
import functools
import io
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread
from sweep_populations import BASE, population, populations, swept
from sweep_toys import job, stripes
from test_report import Reader

from mupax.experiments import cli
from mupax.experiments.report import (
    advice,
    curves_figure,
    heatmap_figure,
    report_page,
    tradeoff_figure,
    words,
    write_report,
)
from mupax.experiments.sweep import job as sweep
from mupax.experiments.sweep import shapes, valley
from mupax.experiments.sweep import tradeoff as tradeoffs

FEW = [(64, 8), (64, 16), (64, 32), (32, 8)]


def shapes_of_equal_size(best=12.0, *, exponent=0.4, noise=0.01, seeds=4):
    """Losses with a valley at `best`, the same at every number of parameters."""
    rng = np.random.default_rng(0)
    found = []
    for parameters in (30_000, 120_000, 500_000):
        for depth in (4, 8, 16, 32):
            width = round((parameters / depth) ** 0.5)
            count = depth * width**2
            away = np.log2(depth / best)
            loss = 2.0 * (count / 1e3) ** -exponent * 2 ** (0.08 * away**2)
            drawn = loss * np.exp(rng.normal(0, noise, seeds))
            found.append(tradeoffs.Point(width, depth, count, drawn))
    return found


def tradeoff(points=None, **changes):
    points = shapes_of_equal_size() if points is None else points
    budgets = tradeoffs.budgets([p.parameters for p in points])
    hyper = {"learning_rate": 0.011}
    return tradeoffs.Tradeoff("depth_mup", hyper, points, budgets, **changes)


@functools.cache
def whole_page():
    """A page with everything on it, of a small sweep."""
    found = populations(shapes=FEW, pair=True)
    return report_page(swept(found, tradeoff=tradeoff(target=4_000_000)), dpi=40)


def text(html):
    return Reader(html).text


def dead(found):
    lost = np.full_like(found.loss, np.nan)
    curves = np.full_like(found.curves, np.nan)
    return dataclasses.replace(found, loss=lost, curves=curves)


def test_the_verdict_comes_first_and_follows_the_numbers():
    data = swept()
    assert words.headline(data) == (
        "With Depth-μP, the learning rate transfers across depth and width."
    )
    assert re.fullmatch(
        r"With Standard \(SP\), the learning rate transfers across width and shifts by "
        r"−(0\.9\d|1\.0\d) octaves per doubling of depth\.",
        advice.contrast(data),
    )
    moved = words.headline(swept(populations({"sp": 0.0, "depth_mup": 0.7})))
    assert "transfers across width and shifts by +0." in moved
    html = whole_page()
    assert html.index("<h1>") < html.index('<table class="cards">') < html.index("<img")


def test_a_row_of_the_table_holds_shift_interval_optima_and_cost():
    (group,) = words.groups(swept())
    row = group["rows"][0]
    assert (row["label"], row["axis"], row["sign"]) == ("Standard (SP)", "depth", "↘")
    assert re.fullmatch(r"−\d\.\d\d \[−\d\.\d\d, −\d\.\d\d\]", row["shift"])
    # 2^-6.5 at depth 8, an octave less for each doubling; a grid of octaves and three
    # seeds that vary by 0.1 octaves place it within 20 %.
    for size, value in row["best"]:
        assert float(value) == pytest.approx(2**-6.5 * 8 / size, rel=0.2)
    assert row["cost"] == "diverges"


def test_the_prediction_is_at_the_target_and_only_where_there_is_one():
    sentence = " ".join(advice.advice(swept()))
    assert "At width 256, depth 64, expect the best learning rate at 0.01" in sentence
    assert "expect" not in " ".join(advice.advice(swept(target=None)))


def test_one_seed_cannot_be_judged_and_the_remedy_is_said():
    data = swept(populations(seeds=1))
    assert words.headline(data) == (
        "With Depth-μP, the learning rate cannot be judged across depth and width "
        "(more seeds needed)."
    )
    assert "run it again with more seeds" in advice.advice(data)[-1]
    assert not any(group["predicted"] for group in words.groups(data))
    assert (
        "geometric mean over"
        not in text(report_page(data, dpi=40)).split("learning curves")[0]
    )


def test_one_size_is_no_answer():
    data = swept(populations(shapes=[(64, 8)]))
    assert words.headline(data) == (
        "No answer: with Depth-μP, only one size was swept."
    )
    for wrong in ("nan", "None", "transfers across", "shifts by"):
        assert wrong not in text(report_page(data, dpi=40))


def test_an_axis_of_one_size_is_left_out():
    data = swept(populations(shapes=[(64, d) for d in (4, 8, 16)]))
    assert data.axes == ["depth"]
    assert words.headline(data).endswith("transfers across depth.")


def test_a_sweep_in_which_nothing_trained_is_said_so():
    data = swept([dead(p) for p in populations(shapes=FEW)])
    said = text(report_page(data, dpi=40))
    assert "Nothing trained: every run of the sweep diverged." in said
    for wrong in ("nan", "None", "inf ", "transfers across", "shifts by"):
        assert wrong not in said


def test_where_only_the_featured_one_is_dead_the_other_is_told():
    found = populations(shapes=FEW)
    data = swept([dead(p) if p.parametrization == "depth_mup" else p for p in found])
    assert words.headline(data) == "No answer: with Depth-μP, nothing trained."
    assert "shifts by" in advice.contrast(data)


def test_a_size_at_which_nothing_trained_does_not_transfer():
    found = [dead(p) if p.depth == 64 else p for p in populations()]
    headline = words.headline(swept(found))
    assert "does not transfer across depth (nothing trained at depth 64)" in headline


def test_an_optimum_at_the_edge_asks_for_a_wider_grid():
    data = swept(populations({"sp": 0.0, "depth_mup": 2.2}, shapes=FEW))
    # At depth 32 the optimum would be 4.4 octaves up, at the last value.
    told = advice.advice(data)
    assert told[-1] == "Widen the grid of learning rate."
    assert not any("expect" in sentence for sentence in told)


def test_several_hyperparameters_of_which_the_same_is_said_are_told_together():
    found = populations({"depth_mup": 0.0}, pair=True, noise=0.004)
    assert words.headline(swept(found)) == (
        "With Depth-μP, the learning rate and the branch multiplier transfer across "
        "depth and width."
    )


def test_of_several_choices_the_one_whose_base_does_best_is_featured():
    found = populations({"depth_mup": 0.0}, shapes=FEW)
    slow = [
        dataclasses.replace(p, choices={"schedule.name": name}, loss=p.loss * factor)
        for name, factor in (("constant", 1.0), ("cosine", 0.8))
        for p in found
    ]
    data = swept(slow)
    assert list(data.keys.values()) == [
        "Depth-μP, schedule constant",
        "Depth-μP, schedule cosine",
    ]
    assert words.headline(data).startswith("With Depth-μP, schedule cosine, ")


def test_the_page_is_self_contained_and_holds_the_table():
    html = whole_page()
    reader = Reader(html)
    kinds = [r.split(";")[0] for r in reader.references]
    assert set(kinds) == {"data:image/png", "data:text/csv"}
    assert not reader.tags & {"script", "link", "iframe", "object", "base"}
    (data,) = {r for r in reader.references if r.startswith("data:text/csv")}
    rows = csv.DictReader(
        io.StringIO(base64.b64decode(data.partition(",")[2]).decode())
    )
    assert len(list(rows)) == 2 * len(FEW) * 3 * 12 * 5


def test_every_figure_is_there_with_words_for_who_cannot_see_it():
    reader = Reader(whole_page())
    pair = "learning_rate-branch_multiplier"
    assert reader.ids == [
        *(f"{n}-{a}" for n in pair.split("-") for a in ("depth", "width")),
        *(f"{pair}-{axis}" for axis in ("depth", "width")),
        *("curves-depth", "curves-width", "tradeoff", "settings"),
    ]
    assert len(reader.alts) == 9
    assert all(len(alt) > 40 for alt in reader.alts)


def test_learning_curves_are_those_of_the_bases_best_point():
    data = swept()
    found = curves_figure.find(data, "depth", "depth_mup")
    best = data.at_base("depth_mup").best()
    at = data.at_base("depth_mup").axes["learning_rate"].index(best["learning_rate"])
    for p in data.along("depth_mup", "depth"):
        np.testing.assert_array_equal(found.curves[p.depth], p.curves[:, at])
    assert curves_figure.told(found).startswith("the deeper the better: 0.0")
    # An optimum that falls by 1.5 octaves a doubling: the base's best kills depth 64.
    fallen = swept(populations({"depth_mup": -1.5}))
    worse = curves_figure.find(fallen, "depth", "depth_mup")
    assert curves_figure.told(worse) == "depth 64 diverged"


def test_it_is_said_from_which_step_on_an_optimum_stays():
    # The made curves have their final optimum from their first span on, a 40th of 200.
    assert words.fixed(swept(), "learning_rate", "depth") == (
        "The best learning rate stays where it ends from step 5 of 200 on with "
        "Standard (SP) and Depth-μP."
    )
    # Curves whose optimum is elsewhere than that of the final losses.
    late = [
        dataclasses.replace(p, curves=np.roll(p.curves, 3, axis=1))
        for p in populations({"depth_mup": 0.0}, shapes=FEW)
    ]
    told = words.fixed(swept(late), "learning_rate", "depth")
    assert "not before the end at depth 8, 16 and 32 with Depth-μP" in told
    gone = [dead(p) for p in populations()]
    assert words.fixed(swept(gone), "learning_rate", "depth") == ""


def halved(found):
    """With the upper half of the learning rates stopped after 50 steps."""
    loss, stopped = found.loss.copy(), np.zeros(found.loss.shape, int)
    loss[:, 8:], stopped[:, 8:] = np.nan, 50
    return dataclasses.replace(found, loss=loss, stopped=stopped)


def test_what_was_stopped_early_is_not_told_as_diverged():
    shapes = [(64, 4), (64, 8), (64, 16)]
    found = populations({"depth_mup": 0.0}, shapes=shapes, pair=True)
    data = swept([halved(p) for p in found])
    assert "stopped early" in text(report_page(data, dpi=40))
    # The base's best point, and at depth 4 that point was stopped.
    best = data.at_base("depth_mup").best()
    at = data.at_base("depth_mup").axes["learning_rate"].index(best["learning_rate"])
    loss, stopped = found[0].loss.copy(), np.zeros(found[0].loss.shape, int)
    loss[:, at], stopped[:, at] = np.nan, 50
    first = dataclasses.replace(found[0], loss=loss, stopped=stopped)
    told = curves_figure.told(
        curves_figure.find(swept([first, *found[1:]]), "depth", "depth_mup")
    )
    assert "diverged" not in told
    assert "at depth 8" in told


def test_the_heatmaps_finding_names_the_best_pair():
    data = swept(populations(shapes=FEW, pair=True))
    pair = ("learning_rate", "branch_multiplier")
    assert heatmap_figure.pairs(data) == [pair]
    title = heatmap_figure.title(data, pair, "depth")
    assert re.match(r"With Depth-μP, the best learning rate and branch mul", title)


def test_the_valleys_slope_is_that_of_its_long_axis():
    # log2 loss is 0.11 (x + y)² + 0.05 y² over ln 2: of its matrix ((.11, .11),
    # (.11, .16)) the weak eigenvector has slope -0.797.
    whole = population("depth_mup", 64, 8, pair=True, seeds=6)
    found = valley.slope(whole, ("learning_rate", "branch_multiplier"))
    assert found == pytest.approx(-0.797, abs=0.05)


def test_a_round_valley_has_no_slope():
    found = population("p", 64, 8, pair=True)
    x, y = np.meshgrid(
        np.log2(found.axes["learning_rate"]) + 6.5,
        np.log2(found.axes["branch_multiplier"]),
        indexing="ij",
    )
    round_one = dataclasses.replace(found, loss=np.exp2(0.2 * (x**2 + y**2))[None])
    assert valley.slope(round_one, ("learning_rate", "branch_multiplier")) is None


def test_power_laws_and_the_suggested_depth_are_found():
    found = tradeoff(target=8_000_000)
    for law in found.laws:
        # 12 losses of 1 % over four octaves: the exponent is good to 0.005.
        assert law.exponent == pytest.approx(0.4, abs=0.01)
        assert 0 < law.error < 0.01
    for suggestion in [*found.suggestions, found.predicted]:
        # The parabola through depths 8, 16 and a neighbour, losses good to 0.5 %.
        assert np.log2(suggestion.depth) == pytest.approx(np.log2(12), abs=0.15)
        assert suggestion.interval[0] < suggestion.depth < suggestion.interval[1]
        assert not suggestion.at_edge


@pytest.mark.long
@pytest.mark.parametrize("parameters", [120_000, 8_000_000])
def test_intervals_of_the_suggested_depth_hold_the_truth(parameters):
    held = 0
    for start in range(100):
        rng = np.random.default_rng(start)
        points = [
            dataclasses.replace(p, loss=p.loss * np.exp(rng.normal(0, 0.03, 4)))
            for p in shapes_of_equal_size(noise=0.0)
        ]
        low, high = tradeoffs.suggest(points, parameters).interval
        held += low <= 12 <= high
    # 95 % of 100, with a standard deviation of 2.2.
    assert held >= 88


def test_widths_of_equal_size_are_multiples_of_the_heads():
    vit = (("name", "vit"), ("heads", 3), ("patch_size", 2))
    small, data = job(model=dict(vit), base_width=24, width=24), stripes()
    assert shapes.unit(small, data) == 3
    count = shapes.counter(small, data)
    found = shapes.shapes([30_000], [2, 4, 8], count, shapes.unit(small, data))
    assert [depth for _, depth in found] == [2, 4, 8]
    for width, depth in found:
        assert width % 3 == 0
        assert count(width, depth) == pytest.approx(30_000, rel=tradeoffs.EQUAL)


def test_a_monotone_loss_puts_the_suggested_depth_at_the_edge():
    found = tradeoff(shapes_of_equal_size(best=1024.0))
    assert all(s.at_edge for s in found.suggestions)
    assert "32 or more at 501k parameters" in tradeoff_figure.title(found)
    assert "more depths would tell" in " ".join(tradeoff_figure.sentences(found, "x"))


def test_a_tradeoff_of_one_seed_one_budget_or_none_that_trained_is_told_as_such():
    points = shapes_of_equal_size(seeds=1, noise=0.0)[:4]
    single = tradeoff(points)
    assert "(of one seed)" in tradeoff_figure.title(single)
    told = " ".join(tradeoff_figure.sentences(single, "Depth-μP"))
    assert "no power law" in told
    gone = [dataclasses.replace(p, loss=p.loss * np.nan) for p in points]
    html = report_page(swept(populations(shapes=FEW), tradeoff=tradeoff(gone)), dpi=40)
    assert "Nothing trained at equal parameters" in text(html)
    assert "nan" not in text(html)


TOY = "tests/toy_config.py"


@pytest.mark.long
def test_the_command_writes_the_report(tmp_path):
    folder = tmp_path / "run"
    config = [f"--config.sweep.{k}" for k in ("steps=8", "tradeoff=(700,)", "seeds=1")]
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={folder}", *config]
    assert cli.main(argv) == 0
    reader = Reader((folder / "report.html").read_text())
    assert "tradeoff" in reader.ids
    # Of 4 rates at 3 shapes under 2 parametrizations, and 2 shapes of equal size.
    assert len((folder / "results.csv").read_text().splitlines()) == 1 + 24 + 2
    assert "mupax sweep" in reader.text


def pretended(done):
    """In place of training: bowls, with what was asked for kept in a list."""

    def run_jobs(jobs, **_):
        done.append(jobs)
        return [
            dataclasses.replace(
                population(job.parametrization, job.width, job.depth),
                name=job.name,
                axes=job.grid,
                loss=np.abs(np.log2(job.grid["learning_rate"]) + 6.2)[None] + 0.1,
                curves=np.ones((1, len(job.grid["learning_rate"]), 3)),
            )
            for job in jobs
        ]

    return run_jobs


def test_a_sweep_is_extended_in_its_directory_and_no_other_is(
    monkeypatch, tmp_path, capsys
):
    done = []
    monkeypatch.setattr(sweep, "run_jobs", pretended(done))
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={tmp_path / 'run'}"]
    assert cli.main(argv) == 0
    more = ["seeds=5", "depths=(2,4,8)", "axes.learning_rate=2**[-9:-3:1]"]
    assert cli.main([*argv, *(f"--config.sweep.{text}" for text in more)]) == 0
    assert {job.seeds for job in done[1]} == {5}
    settings = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert settings["sweep"]["depths"] == [2, 4, 8]
    capsys.readouterr()
    for other in ("steps=7", "batch_size=3", "optimizer.name=sgd"):
        assert cli.main([*argv, f"--config.{other}"]) == 2
        error = capsys.readouterr().err
        assert "holds another experiment" in error
        assert "sweep.seeds" not in error
        assert other.split("=")[0] in error
    assert len(done) == 2


def test_shapes_of_equal_size_are_trained_at_the_bases_optimum(monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(sweep, "run_jobs", pretended(done))
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={tmp_path / 'run'}"]
    assert cli.main([*argv, "--config.sweep.tradeoff=(700,(6,3))"]) == 0
    swept_jobs, equal = done
    assert len(swept_jobs) == 6
    assert {job.parametrization for job in equal} == {"depth_mup"}
    assert {job.depth for job in equal} == {2, 3, 4}
    # The fitted optimum lies between the grid's -7 and -5, and not on it.
    ((rate,),) = {job.grid["learning_rate"] for job in equal}
    rate = math.log2(rate)
    assert -7 < rate < -5
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("given", ["(0,)", "(3.5,)", "((4,4,4),)"])
def test_a_tradeoff_that_is_none_is_refused_in_one_sentence(given, capsys, tmp_path):
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={tmp_path / 'x'}"]
    assert cli.main([*argv, f"--config.sweep.tradeoff={given}"]) == 2
    assert "sweep.tradeoff is" in capsys.readouterr().err


def test_a_budget_that_no_depth_can_have_is_refused(capsys, tmp_path):
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={tmp_path / 'x'}"]
    assert cli.main([*argv, "--config.sweep.tradeoff=(3,)"]) == 2
    assert "the smallest model has" in capsys.readouterr().err


def test_transfer_refuses_a_tradeoff(capsys, tmp_path):
    argv = ["mupax", "transfer", f"--config={TOY}", f"--workdir={tmp_path / 'x'}"]
    assert cli.main([*argv, "--config.sweep.tradeoff=(700,)"]) == 2
    assert "sweep.tradeoff is for `mupax sweep`" in capsys.readouterr().err


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_the_screen(width, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    page = tmp_path / "report.html"
    page.write_text(whole_page())
    shot = tmp_path / "shot.png"
    subprocess.run(
        [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={shot}",
            f"--window-size={width},9000",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pixels = imread(shot)[..., :3]
    ink = (pixels < 0.99).any(axis=(0, 2))
    assert ink.any()
    # What sticks out of the column crosses its right margin, which is else white.
    assert not ink[-12:].any()


def test_the_report_replaces_an_older_one(tmp_path):
    (tmp_path / "report.html").write_text("old")
    (written,) = write_report(swept(populations(shapes=[BASE])), tmp_path)
    assert written.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
