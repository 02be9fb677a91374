"""Measure learning-rate transfer to a target with more width, depth, batch and data.

    python -m benchmarks.joint --dataset text:FILE   # train runs missing in the table
    python -m papers pages                           # its part of papers/evidence.md

The target is 2x as wide and 4x as deep, with 4x the batch size and 8x the examples. Its
optimum is searched directly, over base learning rates. Each run is a run of
`mupax train`: an interrupted one resumes, and a finished one adds a line to
papers/data/joint.csv.
"""

import argparse
import csv
import itertools
import pathlib

from mupax.experiments.cli import flags
from mupax.experiments.run import commands

TABLE = pathlib.Path(__file__).parents[1] / "papers" / "data" / "joint.csv"
OCTAVES, SEEDS = range(-9, -3), range(4)
BASE = {"model.width": 32, "model.depth": 2, "batch_size": 16, "steps": 400}
TARGET = {
    "model.width": 64,
    "model.depth": 8,
    "batch_size": 64,
    "base_batch_size": 16,
    "steps": 800,
    "base_examples": 6400,
}
RUNS = {"base": BASE, "target": TARGET}
COLUMNS = ("run", "log2_lr", "seed", "train_loss")


def train(dataset: str, workdir: str) -> None:
    """Train every run that is missing in the table, those of the base first."""
    known = {(r["run"], int(r["log2_lr"]), int(r["seed"])) for r in rows()}
    for place in itertools.product(RUNS, OCTAVES, SEEDS):
        if place in known:
            continue
        run, octave, seed = place
        changes = RUNS[run] | {
            "dataset": dataset,
            "learning_rate": 2.0**octave,
            "schedule.warmup": RUNS[run]["steps"] // 10,
            "seed": seed,
        }
        words = ["train", "--config", "text_batch"]
        words += [f"--config.{key}={value}" for key, value in changes.items()]
        folder = f"{workdir}/{run}{octave}-{seed}"
        config = flags.parse(words).config
        result = commands.run(config, folder, command=["mupax", *words])
        with TABLE.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(
                [*place, f"{result.train_loss:.4f}"]
            )


def rows() -> list[dict[str, str]]:
    """The lines of the table."""
    if not TABLE.exists():
        TABLE.write_text(",".join(COLUMNS) + "\n")
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--workdir", default="runs/joint")
    given = parser.parse_args()
    train(given.dataset, given.workdir)


if __name__ == "__main__":
    main()
