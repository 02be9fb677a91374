"""The figures of the papers: all are listed, those that are drawn are checked."""

import shlex

import numpy as np
import pytest

from mupax.experiments.cli import flags
from papers import __main__ as cli
from papers import catalogue, numbers
from papers.catalogue import DATA
from papers.registry import Drawing, Label, judged
from papers.request import Request

TP6 = [f"tp6-{k}" for k in range(1, 20)]
BORDELON = [f"bordelon-{k}" for k in (*range(1, 8), "5a")]
BORDELON += [f"bordelon-b.{k}" for k in range(1, 9)] + ["bordelon-m.1"]
SOLVED = [n for n, f in catalogue.figures().items() if f.measure and not f.base]


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


def test_a_verdict_follows_the_numbers():
    figure = catalogue.figures()["jelassi-1"]
    drawings = [Drawing([], "1", agrees) for agrees in (True, False, None)]
    lines = [catalogue.verdict(figure, drawing) for drawing in drawings]
    words = ["agrees", "evidence against the paper", "undecided"]
    assert [line.rsplit("| ")[-1] for line in lines] == words


@pytest.mark.parametrize(
    ("name", "more", "label", "reason"),
    [
        ("tp6-5", {}, Label.AGAINST, ""),
        ("tp6-5", {"seeds": 2}, Label.UNDECIDED, "two seeds"),
        ("tp6-4", {"seeds": 2}, Label.AGAINST, ""),  # others decide
        ("tp6-16", {}, Label.SMALL, "width 32"),
        ("tp6-16", {"scale": "paper"}, Label.AGAINST, ""),
        ("tp6-10", {"seeds": 2}, Label.UNTESTED, "depth 64"),
        ("tp6-10", {"agrees": True, "scale": "paper"}, Label.AGREES, ""),
        ("decay", {"keeps": True}, Label.CONTROL, ""),
        ("decay", {}, Label.CONTROL, ""),
        ("decay", {"keeps": False}, Label.FAILS, ""),
    ],
)
def test_a_claim_that_fails_says_what_failed(name, more, label, reason):
    figure = catalogue.figures()[name]
    drawing = Drawing(**{"panels": [], "ours": "", "agrees": False} | more)
    found, why = judged(figure, drawing)
    assert found is label
    assert reason in why
    assert bool(reason) == bool(why)


def test_reasons_are_those_of_claims_that_need_them():
    """Seeds and runs that are added later may make a reason untrue."""
    at = Request("laptop", tables=DATA, from_data=True)
    for figure in catalogue.figures().values():
        if figure.untested or figure.small or figure.decided_by:
            drawing = catalogue.from_data(figure, at)
            assert drawing.seeds == 2 or not figure.decided_by, figure.id
            failed = drawing.agrees is not None and not drawing.agrees
            assert failed or not (figure.untested or figure.small), figure.id


def check_solved(name, folder, capsys):
    assert cli.main(["figure", name, "--workdir", str(folder)]) == 0
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / f"{name}.svg").read_text()
    figure = catalogue.figures()[name]
    known = catalogue.drawn(figure, Request("laptop", tables=DATA, from_data=True))
    word = catalogue.verdict(figure, known).rpartition("|")[2]
    assert capsys.readouterr().out.rstrip().endswith(f"|{word}")


def test_a_solver_agrees_with_its_table(tmp_path, capsys):
    check_solved("jelassi-1", tmp_path, capsys)
    again, known = (
        numbers.read(folder / "laptop" / "jelassi-1.csv")
        for folder in (tmp_path / "data", DATA)
    )
    np.testing.assert_allclose(again["rate"], known["rate"], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(SOLVED) - {"jelassi-1"}))
def test_solvers_agree_with_their_tables(name, tmp_path, capsys):
    check_solved(name, tmp_path, capsys)
