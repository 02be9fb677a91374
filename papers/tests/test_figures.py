"""The figures of the papers: all are listed, those that are drawn are checked."""

import csv
import itertools
import shlex

import numpy as np
import pytest
from matplotlib.figure import Figure

from mupax.experiments.cli import flags
from mupax.experiments.report import style
from papers import __main__ as cli
from papers import catalogue

TP6 = [f"tp6-{k}" for k in range(1, 20)]
BORDELON = [f"bordelon-{k}" for k in (*range(1, 8), "5a")]
BORDELON += [f"bordelon-b.{k}" for k in range(1, 9)] + ["bordelon-m.1"]
DRAWN = [
    name
    for name, figure in catalogue.figures().items()
    if figure.draw and not (figure.parts or figure.base)
]
QUICK = ("jelassi-1", "bordelon-6")


def test_every_figure_of_the_papers_is_listed(capsys):
    assert cli.main(["list"]) == 0
    words = capsys.readouterr().out.split()
    rows = ["mlp-adam", "mlp-sgd", "muon", "vit-branches", "gpt-branches"]
    rows += [f"{data}-batch" for data in ("text", "cnn", "digits")]
    rows += [f"{data}-length" for data in ("text", "cnn", "digits")]
    rows += ["decay", "decay-depth"]
    others = ["jelassi-1", "yaida-1", *rows]
    assert set(TP6 + BORDELON + others) == set(catalogue.figures())
    assert set(catalogue.figures()) <= set(words)


NOT_DRAWN = [name for name, f in catalogue.figures().items() if not f.draw]


@pytest.mark.parametrize("name", NOT_DRAWN)
def test_what_is_not_drawn_says_why_and_its_command_parses(name):
    figure = catalogue.figures()[name]
    assert figure.how
    assert figure.command
    flags.parse(shlex.split(figure.command)[1:])


def test_a_figure_that_is_not_drawn_exits_with_its_command(capsys):
    assert cli.main(["figure", "bordelon-b.6"]) == 2
    assert "--config resnet_sweep" in capsys.readouterr().err


def test_an_unknown_figure_is_one_sentence(capsys):
    assert cli.main(["figure", "tp6-99"]) == 2
    assert capsys.readouterr().err.startswith("papers: there is no figure 'tp6-99'")


def test_a_directory_that_cannot_be_made_is_said_before_drawing(tmp_path, capsys):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "inside")
    assert cli.main(["figure", "jelassi-1", "--workdir", folder]) == 2
    assert "--workdir" in capsys.readouterr().err


def drawn(name, folder, capsys):
    assert cli.main(["figure", name, "--workdir", str(folder)]) == 0
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / f"{name}.svg").read_text()
    with (folder / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return capsys.readouterr().out, rows


def slope(rows, line, count=4):
    points = [(float(r["x"]), float(r["y"])) for r in rows if r["line"] == line]
    x, y = np.log(points[-count:]).T
    return np.polyfit(x, y, 1)[0]


def test_the_largest_rate_falls_as_jelassi_says(tmp_path, capsys):
    out, rows = drawn("jelassi-1", tmp_path, capsys)
    assert out.rstrip().endswith("| agrees")
    assert abs(slope(rows, "width 1,000,000") + 1.5) < 0.01


@pytest.mark.long
def test_the_kernel_converges_as_bordelon_says(tmp_path, capsys):
    out, rows = drawn("bordelon-6", tmp_path, capsys)
    assert out.rstrip().endswith("| agrees")
    assert abs(slope(rows, "recursion") + 2) < 0.1


def test_a_verdict_follows_the_numbers():
    figure = catalogue.figures()["jelassi-1"]
    lines = [catalogue.verdict(figure, "1", agrees) for agrees in (True, False)]
    assert [line.rsplit("| ")[-1] for line in lines] == ["agrees", "DOES NOT AGREE"]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(DRAWN) - set(QUICK)))
def test_figures_are_drawn(name, tmp_path, capsys):
    # Whether it agrees is told in docs/figures.md; that it is told is the test.
    out, rows = drawn(name, tmp_path, capsys)
    assert "agree" in out.rsplit("|")[-1].lower()
    panels = [key for key, _ in itertools.groupby(rows, lambda row: row["panel"])]
    assert panels


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.1), (1.6, 2.3), (0.1, 0.9), (1, 90)])
def test_a_logarithmic_axis_has_labels_at_every_span(low, high):
    axis = Figure().subplots()
    axis.set(yscale="log", ylim=(low, high))
    style.log_ticks(axis.yaxis, low, high)
    ticks = axis.yaxis.get_majorticklocs()
    assert sum(low <= tick <= high for tick in ticks) >= 2
