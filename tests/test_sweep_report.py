"""The report of a sweep says what the numbers say, whatever they are."""

import base64
import csv
import dataclasses
import functools
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console
from sweep_populations import population, populations, swept
from test_report import Reader, trained

from mupax.experiments import cli
from mupax.experiments.report import (
    print_verdicts,
    sentences,
)
from mupax.experiments.report.page import report_page
from mupax.experiments.sweep import training
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import Verdict, transfer

FEW = [(64, 8), (64, 16), (64, 32), (32, 8)]


@functools.cache
def whole_page():
    """A page with everything on it, of a small sweep."""
    found = populations(shapes=FEW, pair=True)
    return report_page(swept(found), dpi=40)


def text(html):
    return Reader(html).text


def dead(found):
    lost = np.full_like(found.loss, np.nan)
    curves = np.full_like(found.curves, np.nan)
    return dataclasses.replace(found, loss=lost, curves=curves)


def sure(shifts=None, **options):
    """Populations whose seeds leave no doubt."""
    return populations(shifts, seeds=8, noise=0.01, **options)


def test_the_verdict_comes_first_and_follows_the_numbers():
    data = swept(sure())
    assert sentences.headline(data) == (
        "With Depth-μP, the learning rate transfers across depth and width."
    )
    moved = sentences.headline(swept(sure({"sp": 0.0, "depth_mup": 0.7})))
    assert "transfers across width and does not transfer across depth (costs" in moved
    html = whole_page()
    assert html.index("<h1>") < html.index('<table class="cards">') < html.index("<img")


def test_a_row_of_the_table_holds_verdict_change_shift_and_optima():
    (group,) = sentences.groups(swept())
    row = group["rows"][0]
    assert (row["label"], row["axis"], row["sign"]) == ("Standard (SP)", "depth", "✗")
    assert row["words"].startswith("does not transfer: costs ")
    assert row["words"].endswith(" of the loss at depth 64")
    assert re.fullmatch(
        r"falls 1\d\.\dx over depth 4 to 64 "
        r"\(−\d\.\d\d \[−\d\.\d\d, −\d\.\d\d\] octaves per doubling\)",
        row["change"],
    )
    # 2^-6.5 at depth 8, an octave less for each doubling; a grid of octaves and three
    # seeds that vary by 0.1 octaves place it within 20 %.
    for size, value in row["best"]:
        assert float(value) == pytest.approx(2**-6.5 * 8 / size, rel=0.2)


def test_one_seed_cannot_be_judged_and_the_remedy_is_said():
    data = swept(populations(seeds=1))
    assert sentences.headline(data) == (
        "With Depth-μP, the learning rate cannot be judged across depth and width "
        "(at least 3 seeds needed)."
    )
    assert sentences.next_steps(data) == [
        "To judge the learning rate across depth and width, use at least 3 seeds "
        "instead of 1: run the command again with --config.sweep.seeds=3; it keeps its "
        "runs."
    ]
    transfer = dataclasses.replace(data, command="mupax transfer --config x")
    assert sentences.next_steps(transfer)[0].endswith("; give it a new --workdir.")
    assert "geometric mean over" not in text(report_page(data, dpi=40))


def test_one_size_is_no_answer():
    data = swept(populations(shapes=[(64, 8)]))
    assert sentences.headline(data) == (
        "No answer: with Depth-μP, only one size was swept."
    )
    for wrong in ("nan", "None", "transfers across", "costs at most"):
        assert wrong not in text(report_page(data, dpi=40))


def test_an_axis_of_one_size_is_left_out():
    data = swept(sure(shapes=[(64, d) for d in (4, 8, 16)]))
    assert data.axes == ["depth"]
    assert sentences.headline(data).endswith("transfers across depth.")


def test_a_sweep_in_which_nothing_trained_is_said_so():
    data = swept([dead(p) for p in populations(shapes=FEW)])
    said = text(report_page(data, dpi=40))
    assert "Nothing trained: every run of the sweep diverged." in said
    for wrong in ("nan", "None", "inf ", "transfers across", "costs at most"):
        assert wrong not in said


def test_where_only_the_featured_one_is_dead_the_other_is_told():
    found = populations(shapes=FEW)
    data = swept([dead(p) if p.parametrization == "depth_mup" else p for p in found])
    assert sentences.headline(data) == "No answer: with Depth-μP, nothing trained."
    assert "does not transfer: costs" in text(report_page(data, dpi=40))


def test_an_optimum_at_the_edge_asks_for_a_wider_grid():
    data = swept(populations(shapes=FEW, best=-1.0))
    told = sentences.next_steps(data)
    assert told[0] == (
        "To judge the learning rate across depth and width, extend the grid of the "
        "learning rate above 0.25."
    )


@pytest.mark.parametrize("seeds", [1, 3, 8])
@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05, 0.3])
@pytest.mark.parametrize("shift", [-1.5, -0.1, 0.05, 2.2])
def test_headline_table_and_next_steps_say_the_same(shift, noise, seeds):
    shifts = {"depth_mup": shift}
    data = swept(populations(shifts, shapes=FEW, seeds=seeds, noise=noise))
    headline, steps = sentences.headline(data), " ".join(sentences.next_steps(data))
    console = Console(file=io.StringIO(), width=80)
    print_verdicts(data, console)
    printed = " ".join(console.file.getvalue().split())
    for t in sentences.featured(data):
        verb = {True: "transfers", False: "does not transfer"}.get(t.verdict.known)
        assert t.words.startswith(f"{verb}: " if verb else f"cannot tell ({t.reason})")
        assert t.words in printed
        one = sentences.phrase([t])
        cost = t.at_most
        told = (
            f"can be kept at a cost of {cost}" if cost else verb or "cannot be judged"
        )
        assert one.startswith(f"{told} across {t.axis}")
        assert cost in one if cost else t.reason in one
        assert "can be kept at a cost" in headline if cost else t.reason in headline
        assert (t.remedy == "") == (t.verdict is Verdict.TRANSFERS)
        judge = re.search(rf"To judge the learning rate across [^,]*{t.axis}", steps)
        assert bool(judge) == (t.verdict.known is None and not cost)
        if t.verdict is Verdict.SEEDS and t.seeds_needed:
            assert t.seeds_needed > seeds
            advised = int(re.search(r"--config\.sweep\.seeds=(\d+)", steps)[1])
            assert t.seeds_needed <= advised
        elif cost:
            assert "Keep the base's learning rate, which costs at most" in steps
        else:
            assert t.remedy.lower() in steps.lower()
    said = " ".join([printed, headline, steps])
    for wrong in (
        r"(?<![\d.])1x",
        r"\bnan",
        r"\binf\b",
        r"\b1 seeds",
        "None",
        r"\(\)",
        r"e\+",
    ):
        assert not re.search(wrong, said), wrong
    every = all(t.verdict.known for t in sentences.featured(data))
    assert ("Use the base's best learning rate" in steps) == every


def test_a_cost_that_seeds_would_not_judge_opens_the_report_of_a_transfer():
    found = populations({"depth_mup": 0.0}, shapes=FEW, seeds=2, noise=0.1)
    data = swept(found, trained=trained())
    (unsure,) = (t for t in data.shown if t.axis == "depth")
    assert unsure.verdict is Verdict.SEEDS
    assert unsure.at_most.startswith("at most ")
    cost = f"can be kept at a cost of {unsure.at_most} across depth"
    assert sentences.result(data).startswith(f"The learning rate {cost}")
    assert cost in sentences.headline(data)
    (step,) = (x for x in sentences.next_steps(data) if unsure.at_most in x)
    assert step == (
        f"Keep the base's learning rate, which costs {unsure.at_most}, or use more "
        "than 100 seeds."
    )


def test_the_advised_number_of_seeds_decides():
    decided = []
    for start in range(12):
        few = told_again(start, 3)
        if few.verdict is Verdict.SEEDS and few.seeds_needed:
            decided.append(
                told_again(start, few.seeds_needed).verdict.known is not None
            )
    assert len(decided) > 5
    assert np.mean(decided) > 0.6


def told_again(start, seeds):
    """The verdict over depth of valleys whose places differ between seeds."""
    rng = np.random.default_rng(start)
    grid = np.arange(-13.0, -1.0)
    cells = []
    for depth in (8, 16, 32):
        place = grid + 7 + rng.normal(0, 0.4, (seeds, 1))
        loss = np.exp2(0.1 * place**2)
        cells.append(Cell("p", 64, depth, grid, loss, loss[..., None], 0.0))
    return transfer(cells, "depth")


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
    assert sentences.headline(data).startswith("With Depth-μP, schedule cosine, ")


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
    names = ("learning_rate", "branch_multiplier")
    assert reader.ids == [
        *(f"{name}-{axis}" for name in names for axis in ("depth", "width")),
        "settings",
    ]
    assert len(reader.alts) == 4
    assert all(len(alt) > 40 for alt in reader.alts)


TOY = "tests/toy_config.py"


def pretended(done):
    """In place of training: bowls, with what was asked for kept in a list."""

    def train(tasks, *_, **__):
        done.append(tasks)
        return [
            dataclasses.replace(
                population(task.parametrization, task.width, task.depth),
                name=task.name,
                axes=task.grid,
                loss=np.abs(np.log2(task.grid["learning_rate"]) + 6.2)[None] + 0.1,
                curves=np.ones((1, len(task.grid["learning_rate"]), 3)),
            )
            for task in tasks
        ]

    return train


def test_a_sweep_is_extended_in_its_directory_and_no_other_is(
    monkeypatch, tmp_path, capsys
):
    done = []
    monkeypatch.setattr(training, "run_all", pretended(done))
    argv = ["mupax", "sweep", f"--config={TOY}", f"--workdir={tmp_path / 'run'}"]
    assert cli.main(argv) == 0
    more = ["seeds=5", "depths=(2,4,8)", "axes.learning_rate=2**[-9:-3:1]"]
    assert cli.main([*argv, *(f"--config.sweep.{text}" for text in more)]) == 0
    assert {task.seeds for task in done[1]} == {5}
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
