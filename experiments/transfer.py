"""The main job: tune small, train big, and show whether it was right to.

Sweep learning rates on small models, find where each parametrization's optimum
goes, train the target at the base model's optimum, write the report.
"""

import pathlib
import shlex
import time
from typing import Any

import jax
import rich.console
import rich.progress
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mupax import optim, zoo

from . import config as configs
from . import data as datasets
from . import io, report
from . import run as training
from .errors import UserError
from .report import gather as reporting
from .run import workdir
from .sweep import job as sweeping
from .sweep import optima, tasks
from .sweep import plan as plans
from .sweep.results import Cell, Population

AXES = ("depth", "width")


def run(config: ConfigDict, folder: str | None, command: list[str]) -> dict[str, Any]:
    """Do the job; a killed run goes on where it stopped.

    Args:
      config: as `configs/digits_resmlp.py` gives it.
      folder: the run directory; None for runs/<dataset>_<model>.
      command: what was typed, for the report.

    Returns:
      What `summary.json` holds.

    Raises:
      UserError: bad input, said in one sentence; nothing that was there is lost.
    """
    console = rich.console.Console()
    configs.check(config)
    _check_choices(config)
    points = configs.points(config)
    jobs = plan_jobs(config, points)
    settings = configs.plain(config)
    settings.pop("data_dir")  # where the data lies does not change what comes out
    directory = workdir.named(config, folder)
    workdir.check(directory, settings)
    with console.status(f"reading {config.dataset}"):
        data = _images(config)
    sweeping.check_job(jobs[0], data)
    with workdir.claim(directory, settings):
        started = time.perf_counter()
        limits = plans.limits(config, stop_diverged=False)
        populations = sweeping.run_jobs(jobs, data, directory, limits, console)
        swept = reporting.swept(config, populations, command)
        sweeping.write_tables(directory, swept)
        cells = [found.cell() for found in populations]
        base = _base_optimum(config, cells)
        config, points = _tuned(config, points, populations)
        with sweeping.progress(console) as progress:
            model, trained = train_target(
                config, points, data, base.log2_lr, directory / "target", progress
            )
        if not (directory / "model").exists():
            notes = _notes(config, data, trained, command)
            zoo.save(model, directory / "model", notes=notes)
        summary = summarize(config, cells, base.log2_lr, trained)
        checkpoint = trained.checkpoint.relative_to(directory.resolve())
        summary["target"]["checkpoint"] = str(directory / checkpoint)
        summary["seconds"] = {
            "sweep": round(sum(cell.seconds for cell in cells), 1),
            "target": round(trained.seconds, 1),
            "total": round(time.perf_counter() - started, 1),
        }
        summary["runs"] = sum(job.runs for job in jobs)
        summary["verdicts"] = swept.verdicts
        io.write_sealed(directory / "summary.json", summary)

        shown = report.ReportData(
            cells=cells,
            optima={
                (c.parametrization, c.width, c.depth): optima.optimum(c) for c in cells
            },
            summary=summary,
            labels=swept.labels,
            featured=config.target.parametrization,
            base_width=config.base.width,
            base_depth=config.base.depth,
            target_curve=trained.curve,
            target_evals=trained.evals,
            settings={"config": settings, "machine": reporting.machine()},
            subject=swept.subject,
            command=swept.command,
            sweep=swept,
        )
        report.write_report(shown, directory)
        report.print_table(shown, console, directory / "report.html")
        return summary


def plan_jobs(
    config: ConfigDict, points: dict[str, optim.Parametrization]
) -> list[tasks.Job]:
    """The cells to run: both axes under every parametrization, the cross once."""
    return plans.jobs(config, points)


def train_target(
    config: ConfigDict,
    points: dict[str, optim.Parametrization],
    data: datasets.ImageData,
    log2_lr: float,
    folder: pathlib.Path,
    progress: rich.progress.Progress,
) -> tuple[nnx.Module, training.TrainResult]:
    """Train the large model at the transferred learning rate."""
    point = points[config.target.parametrization]
    model = target_model(config, point, data, nnx.Rngs(config.target.seed))
    rate: Any = 2.0**log2_lr
    if schedule := configs.plain(config.get("schedule", {})):
        rate = training.schedule(peak=rate, steps=config.target.steps, **schedule)
    tx = training.build_optimizer(
        configs.plain(config.optimizer), rate, zoo.scales(model), point
    )
    name = f"target, {config.target.width} x {config.target.depth}"
    bar = progress.add_task(name, total=config.target.steps)
    result = training.fit(
        model,
        tx,
        data,
        workdir=folder,
        batch_size=config.batch_size,
        steps=config.target.steps,
        seed=config.target.seed,
        eval_every=config.target.eval_every,
        save_every=config.target.save_every,
        mesh=_mesh(),
        on_step=lambda step, loss: progress.update(bar, completed=step),
        settings={
            "target": configs.plain(config.target),
            "model": configs.plain(config.model),
            "log2_lr": log2_lr,
            **_extras(config),
        },
        label_smoothing=config.get("label_smoothing", 0.0),
    )
    return model, result


def _mesh() -> Mesh:
    """All devices; of a CPU one, for the sweep's share its cores and one has all."""
    devices = jax.devices()
    return training.make_mesh(
        devices=devices[:1] if jax.default_backend() == "cpu" else devices
    )


def _extras(config: ConfigDict) -> dict[str, Any]:
    """What decides a target's training and not every config has."""
    names = ("schedule", "label_smoothing")
    return {name: configs.plain(config[name]) for name in names if name in config}


def target_model(
    config: ConfigDict,
    point: optim.Parametrization,
    data: datasets.ImageData,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """The large model, freshly initialized, by the tuned factor if there is one."""
    model = tasks.build_model(
        configs.plain(config.model),
        data,
        width=config.target.width,
        depth=config.target.depth,
        base_width=config.base.width,
        base_depth=config.base.depth,
        parametrization=point,
        rngs=rngs,
    )
    if "init_scale" in config.target:
        params, factor = nnx.state(model, nnx.Param), config.target.init_scale
        nnx.update(model, tasks.scaled_init(params, zoo.scales(model), factor))
    return model


def summarize(
    config: ConfigDict, cells: list[Cell], log2_lr: float, trained: training.TrainResult
) -> dict[str, Any]:
    """What `summary.json` holds, but for the times."""
    out: dict[str, Any] = {"optimal_log2_lr": {}, "shift_octaves": {}, "regret": {}}
    for axis in AXES:
        fixed = config.base.width if axis == "depth" else config.base.depth
        for key in config.sweep.parametrizations:
            found = optima.along(cells, key, axis, fixed)
            out["optimal_log2_lr"].setdefault(axis, {})[key] = {
                str(size): None if best is None else round(best.log2_lr, 3)
                for size, best in zip(found.sizes, found.optima, strict=True)
            }
            out["shift_octaves"].setdefault(axis, {})[key] = _rounded(found.shift, 3)
            out["regret"].setdefault(axis, {})[key] = _rounded(found.regret, 6)
    out["target"] = {
        "width": config.target.width,
        "depth": config.target.depth,
        "log2_lr": round(log2_lr, 3),
        "train_loss": trained.train_loss,
        "test_accuracy": trained.test_accuracy,
    }
    # What `mupax train --config.transfer_from=.../summary.json` reads.
    out["transfer"] = {
        "log2_learning_rate": log2_lr,
        "base_width": config.base.width,
        "base_depth": config.base.depth,
        "parametrization": configs.plain(
            config.sweep.parametrizations[config.target.parametrization]
        ),
        "optimizer": configs.plain(config.optimizer),
        "branch_multiplier": config.model.get("branch_multiplier", 1.0),
        "init_scale": config.target.get("init_scale", 1.0),
        "warmup": config.get("schedule", {}).get("warmup", 0.0) / config.target.steps,
        "label_smoothing": config.get("label_smoothing", 0.0),
    }
    return out


def explain_target(config: ConfigDict) -> optim.Explanation:
    """How each parameter of a config's target is scaled."""
    configs.check(config)
    point = configs.points(config)[config.target.parametrization]
    data = _images(config)
    model = nnx.eval_shape(lambda: target_model(config, point, data, nnx.Rngs(0)))
    return optim.explain(zoo.scales(model), point, config.optimizer.name)


def _images(config: ConfigDict) -> datasets.ImageData:
    """The config's dataset, with its options; the target's trainer takes images."""
    data = sweeping.source(config).read()
    if not isinstance(data, datasets.ImageData):
        raise UserError(
            f"`transfer` trains on images, and {config.dataset} is text; use `mupax "
            "sweep`, and then `mupax train`"
        )
    return data


def _check_choices(config: ConfigDict) -> None:
    """Refuse to choose what the target could not be trained with."""
    if config.sweep.get("choices", ()):
        raise UserError(
            "sweep.choices is for `mupax sweep`; `transfer` trains one target, of one "
            "kind"
        )
    if config.sweep.get("tradeoff", ()):
        raise UserError(
            "sweep.tradeoff is for `mupax sweep`; leave it empty for `transfer`"
        )


def _tuned(
    config: ConfigDict,
    points: dict[str, optim.Parametrization],
    populations: list[Population],
) -> tuple[ConfigDict, dict[str, optim.Parametrization]]:
    """With the base's best values of what was swept beside the learning rate."""
    key = config.target.parametrization
    best = next(
        p.best()
        for p in populations
        if (p.parametrization, p.width, p.depth)
        == (key, config.base.width, config.base.depth)
    )
    del best["learning_rate"]
    config = config.copy_and_resolve_references()
    with config.unlocked():
        for name, value in best.items():
            if name == "richness":
                config.sweep.parametrizations[key].richness = value
                points = configs.points(config)
            elif name == "branch_multiplier":
                config.model.branch_multiplier = value
            elif name == "init_scale":
                config.target.init_scale = value
            elif name == "warmup":
                schedule = configs.plain(config.get("schedule", {}))
                schedule = {"name": "constant"} | schedule
                schedule["warmup"] = round(value * config.target.steps)
                config.schedule = ConfigDict(schedule)
            elif name == "label_smoothing":
                config.label_smoothing = value
            else:
                config.optimizer[name] = value
    return config, points


def _base_optimum(config: ConfigDict, cells: list[Cell]) -> optima.Optimum:
    key = config.target.parametrization
    along = optima.along(cells, key, "depth", config.base.width)
    base = along.cells[along.sizes.index(config.base.depth)]
    best = optima.optimum(base)
    if best is None:
        raise UserError(
            f"every run of the base model diverged under {key!r}; lower "
            "sweep.axes.learning_rate, in a new --workdir"
        )
    return best


def _notes(
    config: ConfigDict,
    data: datasets.ImageData,
    trained: training.TrainResult,
    command: list[str],
) -> str:
    mean, std = (", ".join(f"{x:.4g}" for x in v) for v in (data.mean, data.std))
    return (
        f"Trained on {config.dataset} for {config.target.steps} steps of "
        f"{config.batch_size} images: {trained.test_accuracy:.1%} of the test split "
        f"right, training loss {trained.train_loss:.2g}. It takes raw pixels less "
        f"{mean}, over {std}. Made by\n\n"
        f"    {shlex.join(command)}"
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
