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
import pathlib

from ml_collections import ConfigDict

from mupax.configs import gpt_sweep, vit_sweep
from mupax.experiments.sweep import command
from mupax.experiments.sweep.verdict import Transfer, transfer
from papers import pages

from . import losses

FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER / "results.md"
TABLE = losses.Table(
    FOLDER / "branch_alpha.csv", ("model", "alpha", "depth"), "log2_lr"
)
COMMAND = "python -m benchmarks.branch_alpha"
ALPHAS = (0.5, 0.625, 0.75, 0.875, 1.0)
MODELS = ("gpt", "vit")
DEPTHS = (2, 4, 8, 16, 32)
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
    """Train the depths that are not in the table."""
    for depth in (depth for depth in DEPTHS if not TABLE.at(model, 1.0, depth)):
        config = _config(model)
        config.dataset = dataset or config.dataset
        config.data_dir = data_dir
        config.sweep.depths = sorted({DEPTHS[0], depth})  # the base, stored
        swept = command.run(config, folder, [])
        assert swept is not None
        for population in swept.populations:
            if population.depth != depth:
                continue
            alpha = int(population.parametrization.removeprefix("alpha_")) / 1000
            cell = population.cell()
            found = dict(zip(cell.log2_lr.tolist(), cell.loss.T, strict=True))
            TABLE.add(model, alpha, depth, losses=found)


def judged(model: str, alpha: float) -> Transfer:
    """The verdict on the learning rate over the depths that have been trained."""
    cells = [TABLE.cell(model, alpha, depth, width=32, depth=depth) for depth in DEPTHS]
    return transfer([cell for cell in cells if cell is not None], "depth", DEPTHS[0])


def page() -> str:
    """A line for each model and exponent; the last depth is the deepest trained."""
    text = []
    for model in MODELS:
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
            last = one.cells[-1]
            cells = [*losses.optima(one), losses.shift(one), losses.cost(one)]
            rates = losses.best(one.cells[one.base]), losses.best(last)
            cells += [losses.mean(last, rate) for rate in rates]
            text.append(f"| {alpha:g} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    """Train one model, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS)
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
