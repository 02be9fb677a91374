"""Compare exponents α of the branch multiplier, for branches of two layers.

    python -m benchmarks.branch_alpha gpt --dataset text:FILE   # trains
    python -m benchmarks.branch_alpha vit --data_dir DIR
    python -m benchmarks.branch_alpha                           # writes the page

A branch is multiplied by M^-α and its updates by M^-(1-α), where M is the depth over
that of the base. The learning rate is swept at each depth. Under the right α, the best
rate stays where it is. Sizes, rates and seeds were fixed before the first run. An
interrupted call resumes. Losses are written to benchmarks/branch_alpha.csv.

Source: α from ½ to 1 and updates by M^-(1-α) are stable (Yang et al. 2023,
arXiv:2310.02244, Claim 7.2; Dey et al. 2025, arXiv:2505.01618).
"""

import argparse
import csv
import math
import pathlib

import numpy as np
from ml_collections import ConfigDict

from mupax.configs import gpt_sweep, vit_sweep
from mupax.experiments.sweep import command
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import Transfer, transfer
from papers import pages

FOLDER = pathlib.Path(__file__).parent
TABLE, PAGE = FOLDER / "branch_alpha.csv", FOLDER / "results.md"
COMMAND = "python -m benchmarks.branch_alpha"
ALPHAS = (0.5, 0.625, 0.75, 0.875, 1.0)
BASE = 2  # blocks
DEPTHS = {"gpt": (4, 8, 16), "vit": (4, 8)}  # beside the base, in this order
RATES = {"gpt": "2**[-8.5:-4.5:0.5]", "vit": "2**[-10.5:-6.5:0.5]"}
SEEDS = 4


def _config(model: str) -> ConfigDict:
    config = {"gpt": gpt_sweep, "vit": vit_sweep}[model].get_config()
    config.steps = 300
    config.schedule.name = "cosine"
    config.schedule.warmup = 30
    config.sweep.choices = ()
    config.sweep.axes.learning_rate = RATES[model]
    config.sweep.seeds = SEEDS
    config.sweep.parametrizations = ConfigDict()
    for alpha in ALPHAS:
        law = {"name": "completep", "alpha": alpha}
        config.sweep.parametrizations[f"alpha_{1000 * alpha:g}"] = law
    return config


def train(
    model: str, folder: pathlib.Path, dataset: str | None, data_dir: str | None
) -> None:
    """Train every depth, from small to large, and write the losses after each."""
    depths = [BASE]
    for depth in DEPTHS[model]:
        depths.append(depth)
        config = _config(model)
        config.dataset = dataset or config.dataset
        config.data_dir = data_dir
        config.sweep.depths = tuple(depths)
        swept = command.run(config, folder, [])
        assert swept is not None
        rows = [
            {
                "model": model,
                "alpha": int(population.parametrization.removeprefix("alpha_")) / 1000,
                "depth": population.depth,
                "log2_lr": f"{rate:g}",
                "losses": " ".join(f"{loss:.5g}" for loss in losses),
            }
            for population in swept.populations
            for rate, losses in zip(
                population.cell().log2_lr, population.cell().loss.T, strict=True
            )
        ]
        others = [row for row in table() if row["model"] != model]
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows([*others, *rows])


def table() -> list[dict[str, str]]:
    """The lines of the committed table; "nan" is the loss of a run that diverged."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def judged(model: str, alpha: float) -> Transfer:
    """The verdict on the learning rate over depth."""
    rows = [
        row for row in table() if row["model"] == model and float(row["alpha"]) == alpha
    ]
    cells = []
    for depth in sorted({int(row["depth"]) for row in rows}):
        own = [row for row in rows if int(row["depth"]) == depth]
        rates = np.array([float(row["log2_lr"]) for row in own])
        loss = np.array([[float(x) for x in row["losses"].split()] for row in own]).T
        cells.append(Cell(f"{alpha}", 32, depth, rates, loss, loss[..., None], 0.0))
    return transfer(cells, "depth", BASE)


def page() -> str:
    """A line for each model and exponent; the last depth is the deepest trained."""
    text = []
    for model in dict.fromkeys(row["model"] for row in table()):
        found = {alpha: judged(model, alpha) for alpha in ALPHAS}
        depths = found[ALPHAS[0]].sizes
        heads = [f"best at {depth}" for depth in depths] + [
            "shift, octaves a doubling",
            f"cost of the base's rate at {depths[-1]}",
            f"loss at {depths[-1]}, base's best rate",
            f"loss at {depths[-1]}, its own best rate",
        ]
        text += [
            f"| {model}, α | {' | '.join(heads)} |",
            "|---" * (1 + len(heads)) + "|",
        ]
        for alpha, one in found.items():
            low, high = one.trend.interval
            cells = ["none" if x is None else f"2^{x:.2f}" for x in one.optima]
            cells += [
                f"{one.trend.slope:+.2f} ({low:+.2f} to {high:+.2f})",
                "unknown" if one.regret is None else one.regret.words,
                _loss(one, one.cells[one.base]),
                _loss(one, one.cells[-1]),
            ]
            text.append(f"| {alpha:g} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _loss(one: Transfer, tuned: Cell) -> str:
    """The deepest model's loss at the grid point that is best for a cell."""
    point = int(
        np.where(tuned.diverged.any(axis=0), np.inf, tuned.loss.mean(0)).argmin()
    )
    loss = one.cells[-1].loss[:, point]
    return f"{loss.mean():.3f} ± {loss.std(ddof=1) / math.sqrt(len(loss)):.3f}"


def main() -> None:
    """Train one model, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=list(DEPTHS))
    parser.add_argument("--workdir", default="runs/branch_alpha")
    parser.add_argument("--dataset")
    parser.add_argument("--data_dir")
    given = parser.parse_args()
    if given.model:
        folder = pathlib.Path(given.workdir, given.model)
        train(given.model, folder, given.dataset, given.data_dir)
    PAGE.write_text(pages.replaced(PAGE, {"": page()}, COMMAND))


if __name__ == "__main__":
    main()
