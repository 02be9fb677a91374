"""The sentences of evidence.md that its generated tables do not show are true."""

import csv
import itertools
import math

import numpy as np
import pytest
import scipy.stats

from benchmarks import (
    branch_alpha,
    drift,
    embedding_rate,
    every_layer,
    grouped_queries,
    joint,
    optimizers_transfer,
    tuned_sp,
)
from papers import catalogue, pages, summaries, tables

DATA = catalogue.DATA


@pytest.fixture(scope="module")
def sections():
    return summaries.sections(DATA)


def rows(section, table=0):
    """The rows of a section's table: its other cells, by the first."""
    lines = section.split("\n\n")[table].splitlines()[2:]
    cells = [line.strip("| ").split("|") for line in lines]
    return {first.strip(): [x.strip(" *") for x in rest] for first, *rest in cells}


def number(cell):
    """The first number of a cell, e.g. of "−0.02 [−0.06, +0.02]"."""
    return float(cell.replace("−", "-").replace(",", "").split()[0].rstrip("%"))


def test_a_quarter_is_close_to_the_best_branch_multiplier(sections):
    own = rows(sections["branch multiplier"])
    over = {name.split("]")[0][1:]: number(x[-1]) for name, x in own.items()}
    assert over.pop("features-base, medium") == pytest.approx(1.56)  # at width 256
    assert max(over.values()) < 0.15  # rounds to 0.1 %
    best = {name for name, share in over.items() if share == 0}
    assert over.keys() - best == {"one-relu-both, long"}


def test_seeds_disagree_whether_an_eighth_is_better_after_50_epochs():
    table = tables.read(DATA / "long" / "one-relu-both.csv")
    base = table.data.at_base("depth_mup")
    at = [base.at("branch_multiplier", a).loss for a in (0.25, 0.125)]
    best = [loss[:, np.exp(np.log(loss).mean(0)).argmin()] for loss in at]
    signs = np.sign(best[0] - best[1])
    assert sorted(signs) == [-1, 1]


def test_the_best_points_are_on_a_line(sections):
    own = rows(sections["branch multiplier and learning rate"])
    best = [min((number(x), -i) for i, x in enumerate(own[a])) for a in "⅛¼½"]
    assert [-i for _, i in best] == [3, 2, 1]  # the rate halves as a doubles
    assert number(own["1"][1]) - number(own["¼"][2]) == pytest.approx(0.08, abs=5e-3)


def test_how_the_drift_depends_on_the_branch_multiplier(sections):
    own = rows(sections["drift"])
    after_300 = [number(own[a][1]) for a in ("1/16", "⅛", "¼", "½", "1")]
    assert after_300 == sorted(after_300)
    after_1560 = [number(own[a][2]) for a in ("¼", "½", "1")]
    assert max(after_1560) - min(after_1560) < 0.05
    eighth, quarter, half = (number(own[a][3]) for a in ("⅛", "¼", "½"))
    assert abs(eighth - quarter) < 0.03
    assert half < 0 < 0.08 < quarter


def test_why_the_learning_rate_falls_where_both_are_tuned():
    runs = tables.read(DATA / "long" / "one-relu-both.csv").data
    best = [p.best()["branch_multiplier"] for p in runs.along("depth_mup", "depth")]
    assert best == [0.125, 0.5, 0.5]


def test_what_the_rules_do(sections):
    change = rows(sections["batch size"], 1)
    shares = {name: change[f"{name}, change by the rule"] for name in ("CNN", "GPT")}
    assert [number(x) for x in shares["CNN"] if x] == [-2, 0, 2, 12]
    assert [number(x) for x in shares["GPT"] if x] == [14, 0, -8, -3]
    assert number(change["digits, change by the rule"][4]) == pytest.approx(33, abs=4)
    during = rows(sections["batch size during training"])
    ratios = {name: [number(x) for x in cells] for name, cells in during.items()}
    assert max(ratios["GPT"]) < 1 < min(ratios["CNN"])
    lower = [10 * (i + 1) for i, ratio in enumerate(ratios["digits"]) if ratio < 1]
    assert lower == [40, 50]
    after = rows(sections["length"], 1)
    fell = {k: number(x[0]) - number(x[2]) for k, x in after.items() if "GPT" in k}
    assert fell["GPT, without the rule"] == pytest.approx(1.0, abs=0.05)
    assert fell["GPT, with the rule"] == pytest.approx(0.2, abs=0.05)
    digits = [number(after[f"digits, {x} the rule"][2]) for x in ("without", "with")]
    assert 4.5 < digits[0] / digits[1] < 5


def test_copied_runs_are_of_one_network():
    assert ("long", "cnn") in pages._NOTES
    losses = {}
    with (DATA / "long" / "cnn.csv").open() as file:
        next(file)
        for row in csv.DictReader(file):
            if row["depth"] == "3":
                key = row["width"], row["learning_rate"], row["seed"]
                losses.setdefault(key, []).append(row["loss"])
    assert len(losses) == 56 + 28
    assert all(a == b for a, b in losses.values())


def test_the_joint_table_is_of_the_models_that_were_trained():
    sizes = {
        name: (run["model.width"], run["model.depth"])
        for name, run in joint.RUNS.items()
    }
    assert sizes == summaries.JOINT
    assert {(r["run"], int(r["log2_lr"]), int(r["seed"])) for r in joint.rows()} == {
        (run, octave, seed)
        for run in joint.RUNS
        for octave in joint.OCTAVES
        for seed in joint.SEEDS
    }


def test_the_rate_of_keys_and_values_as_docs_howto_architectures_says():
    at_best = grouped_queries.verdict(-6)
    assert at_best.seeds == 4
    costs = [grouped_queries.verdict(rate).regret.high for rate in (-7, -6)]
    assert max(costs) == pytest.approx(0.009, abs=0.0005)
    for cell, least in zip(at_best.cells, (2.275, 2.330), strict=True):
        others = [grouped_queries.verdict(rate) for rate in (-7, -5)]
        assert cell.loss.mean(axis=0).min() == pytest.approx(least, abs=1e-3)
        assert all(x.least > 2.275 for x in others)
    one, two = (at_best.cells[1].loss[:, i].mean() for i in (2, 3))
    assert two / one - 1 == pytest.approx(0.012, abs=0.001)


@pytest.mark.parametrize("bench", [tuned_sp, branch_alpha, drift, every_layer])
def test_the_page_of_results_holds_what_the_table_says(bench):
    page = pages.replaced(bench.PAGE, {"": bench.page()}, bench.COMMAND)
    assert page == bench.PAGE.read_text(), f"run: {bench.COMMAND}"


def test_the_table_of_optimizers_is_that_of_the_runs():
    docs = optimizers_transfer.TABLE.path.parents[1] / "docs"
    page = (docs / "howto/parametrization.md").read_text()
    for axis in optimizers_transfer.AXES:
        assert optimizers_transfer.table(axis) in page


def test_what_the_readme_says_of_sp_tuned_at_each_size():
    best = tuned_sp.best()

    def more(way, model, width, depth):  # of SP's loss, in percent
        ours, own = best[model, width, depth, way], best[model, width, depth, "sp"]
        return 100 * (float(own["loss"]) / float(ours["loss"]) - 1)

    assert round(more("groups", "resmlp", 64, 16)) == 22
    assert round(more("groups", "resmlp", 256, 8)) == 24
    assert best["resmlp", 64, 128, "sp"] is None
    readme = tuned_sp.README
    page = pages.replaced(readme, {"": tuned_sp.against_sp()}, tuned_sp.COMMAND)
    assert page == readme.read_text(), f"run: {tuned_sp.COMMAND}"


def test_what_tuning_costs():
    wide = [
        (model, 256, compared.depths[0])
        for model, compared in tuned_sp.COMPARISONS.items()
        if 256 in compared.widths
    ]
    for way, least, most in (("rate", 1, 3), ("groups", 11, 13)):
        runs = [round(tuned_sp.affordable(*size, way)) for size in wide]
        assert (min(runs), max(runs)) == (least, most)
    grids = [compared.tuning("sp") for compared in tuned_sp.COMPARISONS.values()]
    assert (min(grids), max(grids)) == (28, 60)


def test_what_the_docs_say_of_the_rate_of_embeddings():
    for tokens, falls, gains in (
        (256, (0.0, 0.96), (1.7, 2.9)),
        (2048, (0.06, 0.91), (11, 12.8)),
    ):
        judged = embedding_rate.judged(tokens)
        assert judged.trend.interval == pytest.approx((-falls[1], -falls[0]), abs=0.006)
        assert judged.regret.high < 0.005
        means = [cell.loss.mean(axis=0) for cell in judged.cells]
        found = [100 * (1 - mean[4] / mean[0]) for mean in means]
        assert (min(found), max(found)) == pytest.approx(gains, abs=0.06)


def test_what_the_results_say_of_alpha():
    for model, gain, error in (("gpt", 1.7, 0.4), ("vit", 1.2, 0.3)):
        half, *_, one = (branch_alpha.judged(model, x) for x in branch_alpha.ALPHAS)
        at = half.cells[0].loss.mean(axis=0).argmin()  # the base's best
        last = [np.log(x.cells[-1].loss[:, at]) for x in (half, one)]
        fell = 100 * (last[0] - last[1])
        assert round(fell.mean(), 1) == gain
        assert round(fell.std(ddof=1) / 2, 1) == error  # of four seeds
    everything = [
        branch_alpha.judged(*x)
        for x in itertools.product(("gpt", "vit"), branch_alpha.ALPHAS)
    ]
    assert max(x.regret.share for x in everything) < 0.0045
    sure = [x.trend.interval for x in everything if math.prod(x.trend.interval) > 0]
    # The GPT's rate at ⅝ and ⅞, and the ViT's at 1.
    assert [low > 0 for low, _ in sure] == [True, True, False]
    gpt, vit = everything[4], everything[-1]
    assert gpt.trend.interval == pytest.approx((-0.09, 0.04), abs=0.005)
    assert vit.trend.interval == pytest.approx((-0.46, -0.10), abs=0.005)
    assert (round(100 * vit.regret.share, 1), round(100 * vit.regret.high, 1)) == (
        0.4,
        1.1,
    )


def test_wider_transformers_depend_less_on_the_branch_multiplier():
    """By 1.2 to 3.2 points of the loss, at depth 2 (papers/figures.md, `tp6-14`)."""
    differences = []
    for scale in ("long", "wide"):
        table = tables.read(DATA / scale / "gpt-multiplier.csv")
        base = table.data.at_base("depth_mup")
        logs = [np.log(base.at("branch_multiplier", a).loss) for a in (0.25, 4.0)]
        low, high = (loss[:, loss.mean(0).argmin()] for loss in logs)
        differences.append(100 * (high - low))
    test = scipy.stats.ttest_ind(*differences, equal_var=False)
    assert test.confidence_interval() == pytest.approx((1.2, 3.2), abs=0.05)
