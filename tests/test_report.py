"""The report of a transfer says what the numbers say, whatever they are."""

import dataclasses
import io
import math
import os
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from sweep_populations import BASE, LABELS, population, populations, swept

from mupax.experiments.report import (
    Trained,
    print_target,
    print_verdicts,
    sentences,
    style,
    target_figures,
    write_report,
)
from mupax.experiments.report.page import report_page
from mupax.experiments.sweep.results import Sizes
from mupax.experiments.sweep.verdict import Verdict


def trained(**changes):
    """The target of a made transfer."""
    given = {
        "sizes": Sizes(256, 64),
        "learning_rate": 2**-6.5,
        "train_loss": 0.0104,
        "test_accuracy": 0.972,
        "evals": [
            (s, 2.0 * math.exp(-s / 110) + 0.09, 0.972 - 0.6 * math.exp(-s / 60))
            for s in range(100, 601, 100)
        ],
        "model": "runs/demo/model",
        "seconds": 41.0,
    }
    return Trained(**given | changes)


def made(population=None, **changes):
    """A whole transfer."""
    command = "mupax transfer --config digits_resmlp --workdir runs/demo"
    return swept(population, **{"trained": trained(), "command": command} | changes)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The path of a written page."""
    return write_report(made(), tmp_path_factory.mktemp("report"))


def test_a_page_is_drawn_again_if_its_runs_changed(tmp_path, monkeypatch):
    """And a transfer's, if its sweep has drawn a page of its own since."""
    drawn = []
    monkeypatch.setattr(
        "mupax.experiments.report.page.report_page",
        lambda data: drawn.append("transfer" if data.trained else "sweep") or "page",
    )
    sweep, transfer = (swept(), tmp_path, "runs"), (made(), tmp_path, "summary", "1")
    for numbers in ("3 runs", "3 runs", "4 runs"):
        write_report(*sweep, numbers)
        write_report(*transfer)
    assert drawn == ["sweep", "transfer", "sweep", "transfer"]


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


def text_of(data):
    return Reader(report_page(data, dpi=40)).text


def test_one_page_is_written_and_no_drafts_stay(report):
    assert os.listdir(report.parent) == ["report.html"]


def test_the_page_has_its_sections_alternatives_and_command(report):
    reader = Reader(report.read_text())
    assert reader.ids == [
        *("learning_rate-depth", "learning_rate-width"),
        "settings",
    ]
    assert len(reader.alts) == 3
    assert all(len(alt) > 40 for alt in reader.alts)
    assert "mupax transfer --config digits_resmlp --workdir runs/demo" in reader.text
    for said in ("97.2%", "sweep.depths", "runs/demo/model", *LABELS.values()):
        assert said in reader.text


@pytest.mark.parametrize("accuracy", [None, math.nan, 0.5])
def test_a_target_that_diverged_is_said_so(accuracy):
    data = made(trained=trained(train_loss=None, test_accuracy=accuracy))
    assert "diverged at the transferred learning rate 0.011" in sentences.target(data)
    assert sentences.result(data).endswith(" a large one diverges.")


def test_what_people_name_is_escaped():
    # "$\\frac$" is a formula that Matplotlib cannot read.
    labels = LABELS | {"sp": "<i>SP$\\frac$</i>", "depth_mup": "[red]μP"}
    data = made(populations(shapes=[(64, 4), (64, 8)]), subject="<b>&", labels=labels)
    html = report_page(data, dpi=40)
    assert "<b>" not in html
    assert "<i>SP" not in html
    assert "[red]μP" in printed(data)


def printed(data, width=120):
    console = Console(file=io.StringIO(), width=width)
    print_verdicts(data, console)
    print_target(data, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 250])
def test_the_terminal_shows_headline_verdicts_next_step_and_target(width):
    lines = printed(made(), width=width).splitlines()
    assert lines[1].startswith("With Depth-μP, the learning rate ")
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "Standard (SP): does not transfer: " in line]
    assert len(rows) == 1
    text = " ".join(" ".join(lines).split())
    for said in ("✗ Standard (SP): does not transfer: costs ", "best at 4: 0.0", "−0."):
        assert said in text
    assert "To judge the learning rate" in text
    assert "The target (width 256, depth 64), trained once" in text


def baselines(**changes):
    """The base model, and the target without mupax's scaling."""
    sizes = {"base": Sizes(64, 8), "sp": Sizes(256, 64)}
    count = {"base": 40_000, "sp": 4_000_000}
    return [
        trained(
            sizes=sizes[key],
            parameters=count[key],
            baseline=key,
            seconds=4.0,
            **{"test_accuracy": 0.944, **changes.get(key, {})},
        )
        for key in ("base", "sp")
    ]


def opened(**changes):
    target = trained(parameters=4_000_000, **changes.pop("target", {}))
    return made(trained=target, compared=baselines(**changes))


@pytest.mark.parametrize(
    ("choice", "axis"), [("batch_size", "batch size"), ("steps",) * 2]
)
def test_a_sweep_over_training_has_a_verdict_over_it(choice, axis):
    made = [
        population(key, *BASE, choices={choice: size}, best=-6.5 + shift * octaves)
        for key, shift in (("depth_mup", 0.0), ("sp", 0.5))
        for octaves, size in enumerate((16, 32, 64, 128))
    ]
    config = {"batch_size": 16, "base_examples": 256}
    data = swept(made, settings={"config": config})
    assert sentences.headline(data) == (
        f"With Depth-μP, the learning rate transfers across {axis}."
    )
    # The verdicts of the only depth and width would say nothing.
    (moving, same) = data.shown  # in the order of labels
    assert (same.sizes, same.base) == ((16, 32, 64, 128), 0)
    assert moving.verdict is Verdict.COSTS
    assert moving.trend.slope == pytest.approx(0.5, abs=0.1)
    told = printed(data, width=160)
    at = {"steps": "128 steps"}.get(axis, f"{axis} 128")
    assert re.search(f"costs at most .* at {at}", told)
    assert axis in report_page(data, dpi=20)
    assert data.verdicts["learning_rate"]["sp"][axis]["verdict"] == "does not transfer"


def test_the_tuned_batch_size_may_lie_between_the_others():
    made = [
        population("sp", *BASE, choices={"batch_size": size}) for size in (16, 64, 256)
    ]
    config = {"batch_size": 16, "base_batch_size": 64}
    data = swept(made, featured="sp", settings={"config": config})
    (only,) = data.shown
    assert only.sizes[only.base] == 64


def test_a_transfer_with_baselines_opens_with_a_picture_and_a_sentence():
    data = opened(sp={"test_accuracy": 0.1})
    html = report_page(data, dpi=40)
    body = html[html.index("<main>") :]
    said = (
        "The learning rate cannot be judged across depth (about 7 seeds needed) and "
        "can be kept at a cost of at most 2.3% of the loss across width. With that of "
        "a small network, a network 100 times larger is better: 97.2% test accuracy "
        "instead of 94.4%; without mupax's scaling, 10.0%."
    )
    assert body.index("<img") < body.index("<h1>")
    assert Reader(body[: body.index("<h1>")]).text.strip() == ""
    assert Reader(body[body.index("<h1>") : body.index("</h1>")]).text == said
    assert html.count("<h1>") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"base": {"test_accuracy": 0.98}},
            "is worse: 97.2% test accuracy instead of 98",
        ),
        ({"base": {"test_accuracy": 0.97199}}, "larger is about as good: 97.2%"),
        (
            {"base": {"train_loss": None}},
            "is better: 97.2% test accuracy instead of div",
        ),
        ({"base": {"test_accuracy": 0.8915}}, "97.2% test accuracy instead of 89.2%"),
        ({"sp": {"train_loss": None}}, "; without mupax's scaling, it diverges."),
        ({"target": {"train_loss": None}}, "a network 100 times larger diverges."),
    ],
)
def test_the_opening_says_what_the_numbers_say(changes, said):
    assert said in sentences.result(opened(**changes))


def test_a_baseline_of_another_parametrization_is_named():
    base, other = baselines()
    compared = [base, dataclasses.replace(other, baseline="depth_mup")]
    said = sentences.result(made(trained=trained(), compared=compared))
    assert said.endswith("; with Depth-μP, 94.4%.")


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (0.0, "The learning rate transfers across depth and width. With that of a "),
        (-0.75, "The learning rate transfers across width and does not transfer acr"),
    ],
)
def test_the_opening_begins_with_the_verdict(shift, said):
    found = populations({"depth_mup": shift}, seeds=8, noise=0.01)
    data = dataclasses.replace(opened(), populations=found)
    assert sentences.result(data).startswith(said)


def test_a_language_model_is_judged_by_loss_and_perplexity():
    config = {"config": {"dataset": "text:input.txt"}}
    small = {"base": {"evals": [(600, 1.6, 0.5)]}, "sp": {"evals": [(600, 2.0, 0.4)]}}
    large = {"evals": [(300, 1.7, 0.4), (600, 1.5, 0.5)]}
    data = dataclasses.replace(opened(target=large, **small), settings=config)
    assert "is better: a test loss of 1.5 (perplexity 4.48) instead of 1.6; wi" in (
        sentences.result(data)
    )
    text = text_of(data)
    assert "accuracy" not in text


def test_without_a_small_network_the_report_says_how_to_train_one():
    assert "--config.target.compare=\"('base',)\"" in sentences.target(made())


def test_one_evaluation_draws_no_picture_of_the_result():
    once = {"evals": [(600, 0.1, 0.97)]}
    data = opened(target=once, base=once, sp=once)
    assert not target_figures.has_result(data)
    body = report_page(data, dpi=20).partition("<main>")[2]
    assert body.index("<h1>") < body.index("<img")


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.1), (1.6, 2.3), (0.1, 0.9), (1, 90)])
def test_a_logarithmic_axis_has_labels_at_every_span(low, high):
    axis = Figure().subplots()
    axis.set(yscale="log", ylim=(low, high))
    style.log_ticks(axis.yaxis, low, high)
    ticks = axis.yaxis.get_majorticklocs()
    assert sum(low <= tick <= high for tick in ticks) >= 2
