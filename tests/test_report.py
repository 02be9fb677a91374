"""The report says what the numbers say, whatever they are."""

import dataclasses
import io
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from mupax.experiments.report import ReportData, findings, print_table, write_report
from mupax.experiments.report.page import page
from mupax.experiments.sweep.results import Cell, Optimum

LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "depth_mup": "Depth-μP",
}
BASE_WIDTH, BASE_DEPTH = 64, 8
GRID = np.arange(-13.0, -1.0)


def made_cell(key, width, depth, optimum, edge, *, floor, seeds=2, seed=0):
    """A cell whose log-loss is a quadratic in log2 lr, and diverges above `edge`."""
    noise = np.random.default_rng([seed, width, depth, len(key)])
    offsets = noise.normal(0, 0.12, (seeds, 1))
    away = GRID - optimum - offsets
    log_loss = math.log(floor) + 0.11 * away**2 + noise.normal(0, 0.03, away.shape)
    loss = np.minimum(np.exp(log_loss), 2.4)
    loss = np.where(edge + 2 * offsets < GRID, np.nan, loss)
    steps = np.linspace(0, 1, 40)
    curves = 2.3 * (loss[..., None] / 2.3) ** steps
    return Cell(key, width, depth, GRID, loss, curves, 3.0)


def made(
    *,
    shifts=((-1.0, 0.0), (-0.5, 0.0), (0.08, 0.06)),
    depths=(4, 8, 16, 32, 64),
    widths=(32, 64, 128, 256),
    seeds=2,
    dead=(),
    keys=tuple(LABELS),
):
    """A whole report.

    `shifts` holds, for each parametrization, how many octaves its optimum moves per
    doubling of depth and of width; `dead` the (key, width, depth) where all diverged.
    """
    cells, optima = [], {}
    for key, (per_depth, per_width) in zip(keys, shifts, strict=False):
        shapes = dict.fromkeys(
            [(BASE_WIDTH, d) for d in depths] + [(w, BASE_DEPTH) for w in widths]
        )
        for width, depth in shapes:
            over = math.log2(depth / BASE_DEPTH), math.log2(width / BASE_WIDTH)
            best = -6.5 + per_depth * over[0] + per_width * over[1]
            floor = 0.02 * 0.75 ** (over[0] + over[1])
            cell = made_cell(
                key, width, depth, best, best + 3, floor=floor, seeds=seeds
            )
            found = Optimum(best, 0.12 if seeds > 1 else 0.0, floor)
            if (key, width, depth) in dead:
                gone = np.full_like(cell.loss, np.nan)
                cell = dataclasses.replace(
                    cell, loss=gone, curves=np.full_like(cell.curves, np.nan)
                )
                found = None
            cells.append(cell)
            optima[key, width, depth] = found
    return ReportData(
        cells=cells,
        optima=optima,
        summary=summarized(cells, optima, keys),
        labels=LABELS,
        featured="depth_mup",
        base_width=BASE_WIDTH,
        base_depth=BASE_DEPTH,
        target_curve=[(s, 2.3 * math.exp(-s / 90) + 0.01) for s in range(1, 601)],
        target_evals=[
            (s, 2.0 * math.exp(-s / 110) + 0.09, 0.972 - 0.6 * math.exp(-s / 60))
            for s in range(100, 601, 100)
        ],
        settings={
            "config": {
                "dataset": "digits",
                "batch_size": 64,
                "data_dir": None,
                "base": {"width": 64, "depth": 8},
                "sweep": {"depths": list(depths), "seeds": seeds},
            },
            "versions": {"jax": "0.10.2", "flax": "0.12.8"},
            "devices": ["cpu"],
        },
        subject="residual MLP on digits, Adam",
        command="mupax transfer --config digits_resmlp --workdir runs/demo",
    )


def summarized(cells, optima, keys):
    """The summary of a made sweep, by the definitions of summary.json."""
    summary = {
        "optimal_log2_lr": {"depth": {}, "width": {}},
        "shift_octaves": {"depth": {}, "width": {}},
        "regret": {"depth": {}, "width": {}},
        "target": {
            "width": 256,
            "depth": 64,
            "log2_lr": -6.5,
            "train_loss": 0.0104,
            "test_accuracy": 0.972,
            "checkpoint": "runs/demo/target/600",
        },
        "seconds": {"sweep": 310.0, "target": 41.0, "total": 356.0},
        "runs": sum(c.loss.size for c in cells),
    }
    for axis, held, base in (("depth", "width", 64), ("width", "depth", 8)):
        for key in keys:
            line = [
                c
                for c in cells
                if c.parametrization == key and getattr(c, held) == base
            ]
            line.sort(key=lambda c: getattr(c, axis))
            best = [optima[key, c.width, c.depth] for c in line]
            rates = [None if o is None else o.log2_lr for o in best]
            whole = line and None not in rates
            summary["optimal_log2_lr"][axis][key] = {
                str(getattr(c, axis)): r for c, r in zip(line, rates, strict=True)
            }
            summary["shift_octaves"][axis][key] = (
                max(rates) - min(rates) if whole else None
            )
            regret = None
            if line and rates[0] is not None and rates[-1] is not None:
                mean = line[-1].loss.mean(axis=0)
                given = np.interp(rates[0], GRID, mean)
                regret = None if np.isnan(given) else float(given - best[-1].loss)
            summary["regret"][axis][key] = regret
    return summary


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The paths of one written report."""
    return write_report(made(), tmp_path_factory.mktemp("report"))


class Reader(HTMLParser):
    """Collects what a page refers to, its images and its words."""

    def __init__(self, html):
        super().__init__()
        self.references, self.alts, self.tags, self.ids = [], [], set(), []
        self.words, self._silent = [], False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.add(tag)
        self._silent = tag == "style"
        self.references += [
            v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")
        ]
        if tag == "img":
            self.alts.append(named.get("alt", ""))
        if tag == "section":
            self.ids.append(named["id"])

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        if not self._silent:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def all_dead():
    """A sweep in which nothing trained, and so no target."""
    whole = made()
    data = made(dead={(c.parametrization, c.width, c.depth) for c in whole.cells})
    target = dict.fromkeys(("width", "depth", "log2_lr", "train_loss"))
    summary = data.summary | {"target": target}
    return dataclasses.replace(data, summary=summary, target_curve=[], target_evals=[])


def text_of(data):
    return Reader(page(data)).text


def test_everything_is_written_and_no_drafts_stay(report):
    names = ["depth.png", "width.png", "regret.png", "target.png", "report.html"]
    assert [p.name for p in report] == names
    assert sorted(os.listdir(report[0].parent)) == sorted(names)
    for picture in report[:4]:
        assert imread(picture).shape[1] > 2000


def test_the_page_is_self_contained(report):
    html = report[-1].read_text()
    reader = Reader(html)
    assert len(reader.references) == 8  # four pictures, each for page and phone
    assert all(r.startswith("data:image/png;base64,") for r in reader.references)
    assert not reader.tags & {"script", "link", "iframe", "object", "base"}
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in style


def test_the_page_has_its_sections_alternatives_and_command(report):
    reader = Reader(report[-1].read_text())
    assert reader.ids == ["depth", "width", "regret", "target", "settings"]
    assert len(reader.alts) == 4
    assert all(len(alt) > 40 for alt in reader.alts)
    assert "mupax transfer --config digits_resmlp --workdir runs/demo" in reader.text
    for words in (
        "97.2%",
        "sweep.depths",
        "4, 8, 16, 32, 64",
        "0.10.2",
        *LABELS.values(),
    ):
        assert words in reader.text


def test_the_verdict_follows_the_numbers():
    stays = findings.headline(made())
    assert stays.startswith("The learning rate transfers: with Depth-μP, its optimum ")
    assert "within 0.3 octaves from depth 4 to 64" in stays
    moves = findings.headline(made(shifts=((-1, 0), (-0.5, 0), (-0.75, 0.5))))
    assert moves.startswith("The learning rate does not transfer: with Depth-μP")
    assert "moves by 3.0 octaves from depth 4 to 64" in moves
    half = findings.headline(made(shifts=((-1, 0), (-0.5, 0), (-0.75, 0.0))))
    assert half.startswith("The learning rate transfers across width, but not across d")


def test_the_verdict_is_about_the_featured_parametrization():
    data = dataclasses.replace(made(), featured="sp")
    assert findings.headline(data).startswith("The learning rate transfers across wid")
    assert "moves by 4.0 octaves with Standard (SP)" in findings.title(data, "depth")


def test_titles_say_what_the_numbers_say():
    title = findings.title(made(), "depth")
    assert "stays within 0.3 octaves with Depth-μP, but moves by 4.0 octaves" in title
    title = findings.title(made(shifts=((0.1, 0), (0, 0), (-0.75, 0))), "depth")
    assert "moves by 3.0 octaves with Depth-μP, but stays within 0.4 octaves" in title


def test_regret_is_told_as_extra_loss_or_divergence():
    data = made()
    f = findings.find(data, "depth", "half_alpha")
    assert f.regret == data.summary["regret"]["depth"]["half_alpha"]
    assert f.transferred == pytest.approx(f.own + f.regret)
    assert findings.cost(f) == f"{1 + f.regret / f.own:.2f}×"
    assert findings.cost(findings.find(data, "depth", "sp")) == "diverges"
    assert "with Standard (SP) it diverges" in findings.consequence(data, "depth")


def test_a_size_where_nothing_trained_is_named():
    dead = {("depth_mup", 64, 64), ("sp", 64, 16), ("sp", 64, 32)}
    data = made(dead=dead, seeds=1, widths=(64,))
    assert findings.headline(data) == (
        "No answer: with Depth-μP, nothing trained at depth 64."
    )
    text = text_of(data)
    assert "with Standard (SP), nothing trained at depth 16 and 32" in text
    assert "with Depth-μP, only width 64 was swept" in text
    assert "± standard error" not in text


def test_a_sweep_in_which_nothing_trained_is_said_so(tmp_path):
    data = all_dead()
    text = Reader(write_report(data, tmp_path)[-1].read_text()).text
    assert "Nothing trained: every run of the sweep diverged." in text
    assert "The target was not trained" in text
    for wrong in ("nan", "None", "inf ", "stays", "moves"):
        assert wrong not in text


@pytest.mark.parametrize("accuracy", [None, math.nan, 0.5])
def test_a_target_that_diverged_is_said_so(accuracy):
    data = made()
    lost = data.summary["target"] | {"train_loss": None, "test_accuracy": accuracy}
    data = dataclasses.replace(data, summary=data.summary | {"target": lost})
    assert "diverged at the transferred learning rate 0.011" in findings.target(data)


def test_an_optimum_at_the_edge_of_the_grid_is_noted():
    data = made()
    data.optima["depth_mup", 64, 64] = Optimum(GRID[-1], 0.0, 0.01)
    (note,) = findings.notes(data, "depth")
    assert note.startswith("Depth-μP: at depth 64 the optimum lies at the edge")
    assert findings.notes(data, "width") == []


def test_what_people_name_is_escaped():
    data = dataclasses.replace(
        made(widths=(64,), depths=(4, 8)),
        subject="<b>&",
        labels=LABELS | {"sp": "<i>SP</i>", "depth_mup": "[red]μP"},
    )
    html = page(data)
    assert "<b>" not in html
    assert "<i>" not in html
    assert "[red]μP" in printed(data)


def printed(data, width=80):
    console = Console(file=io.StringIO(), width=width)
    print_table(data, console, "runs/a rather long name of a run/demo/report.html")
    return console.file.getvalue()


@pytest.mark.parametrize("data", [made(), all_dead(), made(widths=(64,), seeds=1)])
def test_the_table_ends_with_where_to_look(data):
    lines = printed(data).splitlines()
    assert lines[-1] == "Report: runs/a rather long name of a run/demo/report.html"
    assert all(len(line) <= 80 for line in lines)
    for label in LABELS.values():
        assert sum(label in line for line in lines if line.startswith("  ")) == 2


def test_the_table_shows_optimum_shift_and_regret():
    (row, _) = [r for r in printed(made()).splitlines() if "Standard (SP)" in r]
    assert row.split()[2:] == ["2^-5.5", "2^-9.5", "4.0", "oct", "diverges"]


def test_the_page_fits_a_phone(report, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    shot = tmp_path / "phone.png"
    subprocess.run(
        [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={shot}",
            "--window-size=390,7000",
            report[-1].as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (7000, 390)
    ink = (pixels < 0.99).any(axis=(0, 2))
    assert ink.any()
    # What sticks out of the column crosses its right margin, which is else white.
    assert not ink[-12:].any()
