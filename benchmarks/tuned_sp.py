"""Compare models tuned at the base only with SP tuned at the size that is trained.

    python -m benchmarks.tuned_sp resmlp     # trains, and adds to the table
    python -m benchmarks.tuned_sp gpt --dataset text:FILE
    python -m benchmarks.tuned_sp cnn --data_dir DIR
    python -m benchmarks.tuned_sp            # writes the page, from the table

Four ways to train a model of some size, each with the same number of seeds:

- `rate`: the learning rate that is best at the base.
- `groups`: the learning rate and the factors of groups of parameters that are best at
  the base.
- `sp`: the standard parametrization at the learning rate that is best *at that size*.
- `sp-groups`: the same, with the factors of `groups`, which the base shares.

An interrupted call resumes. Means over seeds are written to benchmarks/tuned_sp.csv,
with the operations of one run in products and convolutions.
"""

import argparse
import collections
import csv
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping
from types import ModuleType

from matplotlib.figure import Figure
from ml_collections import ConfigDict

from mupax.configs import cnn_sweep, digits_resmlp, gpt_sweep, vit_sweep
from mupax.experiments.sweep import command, cost, grids, space
from papers import pages

FOLDER = pathlib.Path(__file__).parent
TABLE, PAGE = FOLDER / "tuned_sp.csv", FOLDER / "results.md"
README = FOLDER.parent / "README.md"
COMMAND = "python -m benchmarks.tuned_sp"
WAYS = {
    "rate": "tuned at the base: learning rate",
    "groups": "tuned at the base: learning rate and groups",
    "sp": "SP, tuned at this size",
    "sp-groups": "SP with the base's groups, tuned at this size",
}
RATE = "learning_rate"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model, its sizes and what is tuned.

    Attributes:
      config: of the base's sweep.
      law: the parametrization of `rate` and `groups`.
      groups: patterns by name.
      factors: grids of the groups' learning rates, at the base.
      rates: grid of the learning rate at the base.
      sp_rates: grid of the learning rate of SP at each size.
      widths: at the base's depth, the base first.
      depths: at the base's width, the base first.
      tuning_seeds: runs of each grid point of the base's tuning.
      seeds: runs of each grid point at every size.
    """

    config: Callable[[], ConfigDict]
    law: str
    groups: Mapping[str, str]
    factors: Mapping[str, str]
    rates: str
    sp_rates: str
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    tuning_seeds: int = 4
    seeds: int = 4

    def tuning(self, way: str) -> int:
        """The runs in which a way's hyperparameters are found, at one size."""
        if way.startswith("sp"):
            return len(grids.parse(RATE, self.sp_rates)) * self.seeds
        swept = [self.rates, *(self.factors.values() if way == "groups" else ())]
        points = math.prod(len(grids.parse(RATE, grid)) for grid in swept)
        return points * self.tuning_seeds


def _gpt() -> ConfigDict:
    config = gpt_sweep.get_config()
    config.steps = 300
    config.schedule.name = "cosine"
    config.schedule.warmup = 30
    config.model.width = 64
    return config


def _images(module: ModuleType) -> ConfigDict:
    config = module.get_config()
    config.schedule.name = "cosine"
    config.schedule.warmup = 20
    config.model.width = 64
    config.sweep.choices = ()
    return config


_FACTORS = {"hidden": "2**[-2:4:2]", "input": "2**[-2:4:2]"}  # of the images' models

# Sizes, grids and seeds of "cnn" and "vit" were fixed after a pilot of one seed, which
# searched for the learning rate of the base.
COMPARISONS = {
    "resmlp": Comparison(
        config=digits_resmlp.get_config,
        law="depth_mup",
        groups={"hidden": "role:hidden"},
        factors={"hidden": "2**[0:3]"},
        rates="2**[-10:-5:0.5]",
        sp_rates="2**[-13:-6:0.5]",
        widths=(64, 32, 128, 256),
        depths=(8, 4, 16, 32, 64, 128),
    ),
    "gpt": Comparison(
        config=_gpt,
        law="completep",
        groups={"hidden": "role:hidden", "input": "role:input"},
        factors={"hidden": "2**[-1:2]", "input": "2**[-2:2:2]"},
        rates="2**[-9:-4]",
        sp_rates="2**[-9.5:-6.5:0.5]",
        widths=(64, 128, 256),
        depths=(2, 8),
        tuning_seeds=2,
    ),
    "cnn": Comparison(
        config=functools.partial(_images, cnn_sweep),
        law="depth_mup",
        groups={"hidden": "role:hidden", "input": "role:input"},
        factors=_FACTORS,
        rates="2**[-9:-4]",
        sp_rates="2**[-9:-4.5:0.5]",
        widths=(64, 128, 256),
        depths=(3, 12),
        tuning_seeds=2,
    ),
    "vit": Comparison(
        config=functools.partial(_images, vit_sweep),
        law="completep",
        groups={"hidden": "role:hidden", "input": "role:input"},
        factors=_FACTORS,
        rates="2**[-12:-7]",
        sp_rates="2**[-12:-7.5:0.5]",
        widths=(64, 128, 256),
        depths=(2, 8),
        tuning_seeds=2,
    ),
}


def train(
    name: str, folder: pathlib.Path, dataset: str | None, data_dir: str | None
) -> None:
    """Tune the base, train every size in every way, and write the means."""
    compared = COMPARISONS[name]
    axes = {f"{group}/{RATE}": grid for group, grid in compared.factors.items()}
    teraflops: dict[tuple[int, int], float] = {}

    def sweep(
        way: str, law: str, grids: Mapping[str, object], factors: Mapping[str, float]
    ) -> list[dict[str, str]]:
        config = compared.config()
        if "target" in config:
            del config.target
        config.dataset = dataset or config.dataset
        config.data_dir = data_dir
        config.modules = ConfigDict(
            {
                group: {"pattern": pattern}
                | ({RATE: factors[group]} if group in factors else {})
                for group, pattern in compared.groups.items()
                if group in factors or f"{group}/{RATE}" in grids
            }
        )
        config.sweep.parametrizations = ConfigDict({law: {"name": law}})
        config.sweep.axes = ConfigDict(grids)
        config.sweep.base_axes = ConfigDict()
        alone = way == "base"
        config.sweep.widths = compared.widths[:1] if alone else compared.widths
        config.sweep.depths = compared.depths[:1] if alone else compared.depths
        config.sweep.seeds = compared.tuning_seeds if alone else compared.seeds
        command.run(config, folder / way, [])
        teraflops.update(operations(config))
        with (folder / way / "results.csv").open() as file:
            return list(csv.DictReader(file))

    base = means(sweep("base", compared.law, {RATE: compared.rates, **axes}, {}))
    plain = {key: loss for key, (loss, _) in base.items() if set(key[3:]) <= {1.0}}
    best = {"rate": min(plain, key=lambda key: plain[key])}
    best["groups"] = min(base, key=lambda key: base[key][0])
    factors = dict(zip(compared.factors, best["groups"][3:], strict=True))
    for way in WAYS:
        law = "sp" if way.startswith("sp") else compared.law
        tuned = best[way][2] if way in best else None
        near = None if tuned is None else [tuned * 2.0 ** (i / 2) for i in (-1, 0, 1)]
        given = factors if way.endswith("groups") else {}
        runs = sweep(way, law, {RATE: near or compared.sp_rates}, given)
        rows = [
            {
                "model": name,
                "way": way,
                "width": int(width),
                "depth": int(depth),
                "tflop": f"{teraflops[int(width), int(depth)]:.4g}",
                "factors": " ".join(f"{k}={v:g}" for k, v in given.items()),
                "log2_lr": round(math.log2(rate), 3),
                "tuned": "" if tuned is None else round(math.log2(tuned), 3),
                "seeds": compared.seeds,
                "loss": "" if math.isinf(loss) else f"{loss:.5g}",
                "error": f"{error:.2g}",
            }
            for (width, depth, rate), (loss, error) in means(runs).items()
        ]
        others = [r for r in table() if (r["model"], r["way"]) != (name, way)]
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows([*others, *rows])


def operations(config: ConfigDict) -> dict[tuple[int, int], float]:
    """10^12 operations of a run by (width, depth), at every size of a sweep."""
    tasks = space.tasks(space.parse_sweep(config))
    data = tasks[0].dataset()
    return {
        (task.width, task.depth): cost.flops(task, data) / task.runs / 1e12
        for task in tasks
    }


def affordable(model: str, width: int, depth: int, way: str) -> float:
    """Runs at a size that take the operations of a way's tuning at the base."""
    compared = COMPARISONS[model]
    work = {
        (int(row["width"]), int(row["depth"])): float(row["tflop"])
        for row in table()
        if row["model"] == model
    }
    at_base = work[compared.widths[0], compared.depths[0]]
    return compared.tuning(way) * at_base / work[width, depth]


def means(
    rows: list[dict[str, str]],
) -> dict[tuple[float, ...], tuple[float, float]]:
    """Mean and standard error over seeds by (width, depth, learning rate, *factors).

    The mean is infinite if a seed diverged.
    """
    losses = collections.defaultdict(list)
    for row in rows:
        factors = [key for key in row if "/" in key]
        key = tuple(float(row[k]) for k in ("width", "depth", RATE, *factors))
        losses[key].append(float(row["loss"] or "inf"))
    return {
        key: (
            statistics.fmean(values),
            0.0
            if math.inf in values
            else statistics.stdev(values) / math.sqrt(len(values)),
        )
        for key, values in losses.items()
    }


def table() -> list[dict[str, str]]:
    """The lines of the committed table."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def best() -> dict[tuple[str, int, int, str], dict[str, str] | None]:
    """The line of each model, size and way; None where each rate diverges.

    It is that of the base's best learning rate, or for SP that of least loss. The way
    "sp-base" is SP at the base's best learning rate.
    """
    rates = {row["model"]: row["tuned"] for row in table() if row["way"] == "rate"}
    found: dict[tuple[str, int, int, str], dict[str, str] | None] = {}
    for row in table():
        size = row["model"], int(row["width"]), int(row["depth"])
        line = row if row["loss"] else None
        if row["tuned"]:
            if row["log2_lr"] == row["tuned"]:
                found[*size, row["way"]] = line
            continue
        if row["way"] == "sp" and row["log2_lr"] == rates[row["model"]]:
            found[*size, "sp-base"] = line
        before = found.setdefault((*size, row["way"]), line)
        if line and (before is None or float(line["loss"]) < float(before["loss"])):
            found[*size, row["way"]] = line
    return found


def page() -> str:
    """A line for each model and size."""
    lines = best()
    text = [
        f"| model | width x depth | {' | '.join(WAYS.values())} | budget of runs |",
        "|" + "---|" * (3 + len(WAYS)),
    ]
    for model, width, depth in sorted({key[:3] for key in lines}):
        sized = [(model, width, depth, way) for way in WAYS]
        cells = [_cell(lines[key]) if key in lines else "" for key in sized]
        runs = [affordable(model, width, depth, way) for way in ("rate", "groups")]
        cells.append(f"{runs[0]:.0f}, {runs[1]:.0f}")
        text.append(f"| {model} | {width} x {depth} | {' | '.join(cells)} |")
    return "\n".join(text)


def against_sp() -> str:
    """Losses relative to SP's, tuned at that size: with one rate, and with groups."""
    lines = best()
    sizes = {"2x width": (2, 1), "4x width": (4, 1), "4x depth": (1, 4)}
    text = [f"| | {' | '.join(sizes)} |", "|" + "---|" * (1 + len(sizes))]
    for model, name in {"gpt": "GPT", "vit": "ViT", "cnn": "CNN"}.items():
        base = COMPARISONS[model]
        width, depth = base.widths[0], base.depths[0]
        cells = []
        for m, n in sizes.values():
            rate, groups, sp = (
                float((lines[model, m * width, n * depth, way] or {})["loss"])
                for way in ("rate", "groups", "sp")
            )
            shown = f"{100 * (rate / sp - 1):+.1f} %, {100 * (groups / sp - 1):+.1f} %"
            cells.append(shown.replace("-", "−"))
        text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text)


def draw(path: pathlib.Path) -> None:
    """Draw the losses of the residual MLP over depth and over width."""
    lines = best()
    base = COMPARISONS["resmlp"]
    width, depth = base.widths[0], base.depths[0]
    styles = {
        "groups": ("mupax: tuned once, at the base, with groups", "C0", "o-"),
        "rate": ("mupax: one learning rate, tuned at the base", "C0", "o:"),
        "sp": ("standard parametrization, tuned again at each size", "C1", "s-"),
        "sp-base": ("standard parametrization, tuned at the base", "C1", "s:"),
    }
    canvas = Figure(figsize=(9, 3.6), layout="constrained")
    axes = canvas.subplots(1, 2, sharey=True)
    for panel, sizes, at in (
        (axes[0], sorted(base.depths), lambda n: (width, n)),
        (axes[1], sorted(base.widths), lambda n: (n, depth)),
    ):
        for way, (label, color, style) in styles.items():
            rows = [(n, lines[("resmlp", *at(n), way)]) for n in sizes]
            trained = [(n, float(row["loss"])) for n, row in rows if row]
            panel.plot(*zip(*trained, strict=True), style, color=color, label=label)
        panel.set(xscale="log", yscale="log", xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    ticks = (0.25, 0.5, 1, 2)
    axes[0].set(ylabel="training loss", ylim=(0.2, 3), yticks=ticks, yticklabels=ticks)
    axes[0].set_xlabel(f"blocks, at width {width}; base: {depth}")
    axes[1].set_xlabel(f"width, at {depth} blocks; base: {width}")
    axes[1].legend(frameon=False, fontsize=8, loc="upper right")
    canvas.savefig(path, dpi=160)


def _cell(row: Mapping[str, str] | None) -> str:
    if row is None:
        return "diverges"
    return f"{float(row['loss']):.3f} ± {float(row['error']):.3f}"


def main() -> None:
    """Train one comparison, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=list(COMPARISONS))
    parser.add_argument("--workdir", default="runs/tuned_sp")
    parser.add_argument("--dataset")
    parser.add_argument("--data_dir")
    given = parser.parse_args()
    if given.model:
        folder = pathlib.Path(given.workdir, given.model)
        train(given.model, folder, given.dataset, given.data_dir)
    for place, text in {PAGE: page(), README: against_sp()}.items():
        place.write_text(pages.replaced(place, {"": text}, COMMAND))
    draw(FOLDER.parent / "docs" / "tuned_sp.png")


if __name__ == "__main__":
    main()
