"""Train models of growing size at the learning rate that was tuned for the smallest.

    python -m benchmarks.ladder FAMILY [--data_dir DIR] [--dataset text:FILE]
        [--parametrization sp] [--seeds 2]       # train runs missing in results.csv
    python -m benchmarks.ladder                  # table and figure of results.md

Each run is a run of `mupax train`, with the config of its family and another width and
depth. All other hyperparameters are those of the smallest model. An interrupted run
resumes, and a finished one adds a line to benchmarks/results.csv.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import statistics
from typing import Any

import jax
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from mupax import zoo
from mupax.experiments.cli import flags
from mupax.experiments.run import commands
from mupax.zoo.registry import default_parametrization

FOLDER = pathlib.Path(__file__).parent
TABLE, PAGE = FOLDER / "results.csv", FOLDER / "results.md"
BEGIN, END = "<!-- begin: python -m benchmarks.ladder -->", "<!-- end -->"
KEYS = ("config", "parametrization", "width", "depth", "seed")


@dataclasses.dataclass(frozen=True)
class Ladder:
    """A family of models.

    Attributes:
      title: of its panel.
      model: its name in the zoo.
      sizes: (width, depth), the base first.
    """

    title: str
    model: str
    sizes: tuple[tuple[int, int], ...]


LADDERS = {
    "fashion_resmlp": Ladder(
        "Residual MLP, Fashion-MNIST",
        "resmlp",
        ((32, 4), (64, 8), (128, 16), (256, 32)),
    ),
    "cifar10_cnn_small": Ladder(
        "Residual CNN, CIFAR-10 of 16 x 16", "cnn", ((32, 3), (64, 6), (128, 12))
    ),
    "text_gpt_small": Ladder(
        "GPT, bytes of tinyshakespeare", "gpt", ((32, 2), (64, 4), (128, 8))
    ),
}


def train(name: str, given: argparse.Namespace) -> None:
    """Train the runs of one family that are missing in the table, small ones first."""
    ladder = LADDERS[name]
    law = given.parametrization or default_parametrization(ladder.model)
    for seed in range(given.seeds):
        for width, depth in ladder.sizes:
            place = (name, law, width, depth, seed)
            if any(
                tuple(row[k] for k in KEYS) == tuple(map(str, place)) for row in rows()
            ):
                continue
            overrides = {"model.width": width, "model.depth": depth, "seed": seed}
            for key in ("parametrization.name", "dataset", "data_dir"):
                if value := getattr(given, key.partition(".")[0]):
                    overrides[key] = value
            words = ["train", "--config", name]
            words += [f"--config.{key}={value}" for key, value in overrides.items()]
            folder = f"{given.workdir}/{'-'.join(map(str, place))}"
            parsed = flags.parse(words)
            result = commands.run(parsed.config, folder, command=["mupax", *words])
            model = zoo.load_pretrained(ladder.model, f"{folder}/model")
            weights = jax.tree.leaves(nnx.state(model, nnx.Param))
            add(
                dict(zip(KEYS, place, strict=True))
                | {
                    "parameters": sum(math.prod(w.shape) for w in weights),
                    "steps": parsed.config.steps,
                    "train_loss": f"{result.train_loss:.4f}",
                    "test_loss": f"{result.test_loss:.4f}",
                    "test_accuracy": f"{result.test_accuracy:.4f}",
                }
            )


def rows() -> list[dict[str, str]]:
    """The lines of the table."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def add(row: dict[str, Any]) -> None:
    """Write one more line."""
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def grouped() -> dict[tuple[str, str], dict[tuple[int, int], list[dict[str, str]]]]:
    """Lines by (config, parametrization) and by (width, depth)."""
    out: dict[Any, Any] = {}
    for row in rows():
        family = out.setdefault((row["config"], row["parametrization"]), {})
        family.setdefault((int(row["width"]), int(row["depth"])), []).append(row)
    return out


def page() -> str:
    """The table of results.md."""
    lines = [
        "| config | parametrization | width x depth | parameters | steps | seeds "
        "| training loss | test loss | test accuracy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (config, law), sizes in sorted(grouped().items()):
        for (width, depth), runs in sorted(sizes.items()):
            cells = [
                f"`{config}`",
                f"`{law}`",
                f"{width} x {depth}",
                f"{int(runs[0]['parameters']):,}",
                f"{int(runs[0]['steps']):,}",
                ", ".join(sorted(run["seed"] for run in runs)),
                *(mean(runs, key) for key in ("train_loss", "test_loss")),
                f"{statistics.fmean(float(r['test_accuracy']) for r in runs):.1%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(runs: list[dict[str, str]], key: str) -> str:
    """Mean over seeds, and half of their range."""
    values = [float(run[key]) for run in runs]
    if max(values) > 1000:
        return f"{statistics.fmean(values):.0e} (diverged)"
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.3f}" + (f" ± {half:.3f}" if half else "")


def draw(path: pathlib.Path) -> None:
    """A panel for each family: training loss against the number of parameters."""
    known = [name for name in LADDERS if any(key[0] == name for key in grouped())]
    canvas = Figure(figsize=(3.7 * len(known), 3.4), layout="constrained")
    axes = canvas.subplots(1, len(known), squeeze=False)[0]
    panels = dict(zip(known, axes, strict=True))
    ruled: dict[str, list[float]] = {name: [] for name in known}
    for (config, law), sizes in sorted(grouped().items()):
        points = sorted(
            (int(run["parameters"]), float(run["train_loss"]))
            for runs in sizes.values()
            for run in runs
        )
        counts = sorted({count for count, _ in points})
        means = [statistics.fmean(y for x, y in points if x == n) for n in counts]
        label = "standard parametrization" if law == "sp" else "with the rules"
        (line,) = panels[config].plot(counts, means, "o-", label=label)
        panels[config].plot(*zip(*points, strict=True), ".", color=line.get_color())
        ruled[config] += means if law != "sp" else []
    for name, panel in panels.items():
        panel.set(title=LADDERS[name].title, xlabel="parameters", xscale="log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        # Diverged runs of the standard parametrization would flatten the panel.
        low, high = min(ruled[name]), max(ruled[name])
        panel.set_ylim(low - 0.4 * (high - low), high + 0.4 * (high - low))
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Train a family, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="?", choices=list(LADDERS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workdir", default="runs/ladder")
    for name in ("--parametrization", "--dataset", "--data_dir"):
        parser.add_argument(name)
    given = parser.parse_args()
    if given.family:
        train(given.family, given)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.split(END)[1]}")
    draw(FOLDER / "results.png")


if __name__ == "__main__":
    main()
