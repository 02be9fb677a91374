"""The report says what the numbers say, whatever they are."""

import dataclasses
import math
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mupax.experiments.report import ReportData, print_table, write_report
from mupax.experiments.report import findings
from mupax.experiments.report.page import page
from mupax.experiments.sweeps.results import Cell, Optimum

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


if __name__ == "__main__":
    import sys
    import time

    out = Path(sys.argv[1])
    t = time.time()
    print(write_report(made(), out), time.time() - t)
    print_table(made(), Console(), out / "report.html")
