"""`mupax transfer`: sweep small models, train the target with their hyperparameters.

The sweep finds the base's best hyperparameters, which replace those of the target's
config. Then the target and its baselines (`target.compare`) train as in `mupax train`,
and a report shows all results.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import rich.console
from ml_collections import ConfigDict

from mupax import optim
from mupax.zoo.addresses import public

from . import report
from .errors import Diverged, UserError
from .run import commands, records, workdir
from .run.build import build, open_dataset
from .run.config import RunConfig, defaults
from .run.hyperparameters import transfer_record, tuned
from .run.loop import TrainResult
from .run.mesh import make_mesh
from .run.prepare import PreparedRun
from .run.prepare import prepare as prepare_run
from .sweep import cost, optima, space
from .sweep.at_base import base_tasks
from .sweep.command import check_data, tune_and_train
from .sweep.engine import DIVERGED
from .sweep.results import Population
from .sweep.space import SweepConfig
from .sweep.statistics import BASE
from .sweep.tasks import ZooTask
from .sweep.training import writing

_RATE = "learning_rate"


def run(
    config: ConfigDict, folder: str | pathlib.Path, command: list[str]
) -> dict[str, Any]:
    """Run or resume a transfer.

    Returns:
      The contents of `summary.json`.

    Raises:
      UserError: bad input; existing files are kept.
      Stopped: SIGTERM arrived while the target trained; its state is saved.
    """
    console = rich.console.Console()
    parsed = parse(config)
    untuned = _target(parsed)
    directory = pathlib.Path(folder)
    settings = parsed.settings() | {"target": untuned.settings()}
    workdir.check(directory, settings)
    settings["contents"] = check_data(parsed, console, directory)
    if note := length_note(parsed):
        console.print(note, highlight=False)
    target = prepare(untuned)
    target.check()  # before the sweep
    target.check_memory()
    with workdir.claim(directory, settings):
        parsed, swept = tune_and_train(parsed, directory, command, console)
        populations = swept.populations
        best = best_of_base(parsed, populations)
        tuned_target = tuned(_target(parsed), best)
        # Known long before the target has trained.
        report.print_verdicts(swept, console)
        target = prepare(tuned_target)
        trained_in = directory / "target"
        try:
            trained = commands.train_in(
                target, trained_in, directory / "model", command, console
            )
        except Diverged as error:
            shown = _shown(target, trained_in)
            data = dataclasses.replace(swept, trained=shown)
            page = report.write_report(data, directory)
            size, base = space.sizes_of(tuned_target), parsed.sizes
            raise Diverged(
                f"{error} This was the target, at the base's best learning rate "
                f"{tuned_target.learning_rate:.3g}. The sweep need not run again "
                f"({page}): use `mupax train` with this config, --config.model.width="
                f"{size.width} --config.model.depth={size.depth} --config.base_width="
                f"{base.width} --config.base_depth={base.depth} and a lower "
                "--config.learning_rate"
            ) from None
        shown = _shown(target, trained_in, trained, directory / "model")
        compared = [
            _baseline(key, parsed, tuned_target, directory, command, console)
            for key in parsed.compare
        ]
        summary = summarize(parsed, best, tuned_target, trained)
        summary["baselines"] = {
            key: {
                "train_loss": baseline.train_loss,
                "test_accuracy": baseline.test_accuracy,
                "parameters": baseline.parameters,
            }
            for key, baseline in zip(parsed.compare, compared, strict=True)
        }
        summary["target"]["checkpoint"] = _below(directory, trained)
        summary["seconds"] = {
            "sweep": round(sum(p.seconds for p in populations), 1),
            "target": round(trained.seconds, 1),
            "baselines": round(sum(baseline.seconds for baseline in compared), 1),
        }
        summary["runs"] = swept.tuning_runs + swept.runs
        summary["verdicts"] = swept.verdicts
        data = dataclasses.replace(swept, trained=shown, compared=compared)
        with writing(directory):
            numbers = json.dumps(public(summary), indent=1) + "\n"
            page = report.write_report(data, directory, "summary.json", numbers)
        report.print_target(data, console)
        console.print(f"Report: {page}", highlight=False, soft_wrap=True)
        return summary


def dry_run(config: ConfigDict, folder: str | pathlib.Path) -> None:
    """Print what a transfer would cost; arguments and errors as in `run`."""
    console = rich.console.Console()
    parsed = parse(config)
    target = _target(parsed)
    settings = parsed.settings() | {"target": target.settings()}
    workdir.check(pathlib.Path(folder), settings)
    tasks = base_tasks(parsed) + space.tasks(parsed)
    check_data(parsed, console, pathlib.Path(folder))
    later = {"target": target}
    later |= {key: _baseline_config(key, parsed, target) for key in parsed.compare}
    tasks += [ZooTask(key, one, {}, 1, 1) for key, one in later.items()]
    cost.show(tasks, tasks[0].dataset(), console)


def _below(directory: pathlib.Path, trained: TrainResult) -> str:
    """The path of the last checkpoint, which begins with the run directory."""
    path = directory / trained.checkpoint.relative_to(directory.absolute())
    return str(public(str(path)))


def _baseline(
    key: str,
    config: SweepConfig,
    target: RunConfig,
    directory: pathlib.Path,
    command: list[str],
    console: rich.console.Console,
) -> report.Trained:
    """Train a baseline: the target's run with another size or scaling.

    `key` is "base", or a key of the swept parametrizations.
    """
    prepared = prepare(_baseline_config(key, config, target))
    folder = directory / "baselines" / key
    console.print(f"baseline {key}:", highlight=False)
    trained = None
    try:
        trained = commands.train_in(
            prepared, folder, folder / "model", command, console
        )
    except Diverged as error:  # the report shows diverged baselines too
        console.print(str(error), highlight=False, markup=False)
    return _shown(prepared, folder, trained, folder / "model", key)


def _baseline_config(key: str, config: SweepConfig, target: RunConfig) -> RunConfig:
    if key == BASE:
        return target.sized(*config.sizes)
    return dataclasses.replace(target, parametrization=config.parametrizations[key])


def _shown(
    prepared: PreparedRun,
    folder: pathlib.Path,
    trained: TrainResult | None = None,
    model: pathlib.Path = pathlib.Path(),
    baseline: str | None = None,
) -> report.Trained:
    """A run as the report shows it; `trained` is None if it diverged.

    It also diverged if it ends as a run of the sweep that counts as diverged.
    """
    results: dict[str, Any] = {}
    if trained is not None:
        most = DIVERGED * math.log(prepared.dataset.out_features)
        results = {
            "train_loss": trained.train_loss if trained.train_loss < most else None,
            "test_accuracy": trained.test_accuracy,
            "model": str(public(str(model))),
            "seconds": trained.seconds,
        }
    return report.Trained(
        sizes=space.sizes_of(prepared.config),
        learning_rate=prepared.config.learning_rate,
        parameters=prepared.program.parameters,
        evals=records.evals_of(records.read(folder)),
        baseline=baseline,
        **results,
    )


def parse(config: ConfigDict) -> SweepConfig:
    """Parse the config of a transfer: a sweep config with a target.

    A training config works too if its model is larger than its base.
    """
    parsed = space.parse_sweep(config)
    if parsed.target is None:
        raise UserError(
            "there is no target: the config has no section `target`, and its model has "
            "the base's size; set target.width and target.depth, or use `mupax sweep`"
        )
    if len(parsed.choices) > 1 or parsed.choices[0]:
        raise UserError(
            "sweep.choices must be empty in `mupax transfer`, which trains one target; "
            "use `mupax sweep` to compare choices"
        )
    return parsed


def _target(config: SweepConfig) -> RunConfig:
    assert config.target is not None  # `parse` refuses it
    return config.target


def length_note(config: SweepConfig) -> str:
    """A note if the target trains much longer or shorter than the base, without a rule.

    "Much" is a factor of two in the number of examples.
    """
    target = _target(config)
    ratio = target.examples / config.base.examples
    if target.base_examples is not None or 0.5 <= ratio <= 2:
        return ""
    return (
        f"The target trains on {ratio:.3g} times as many examples as the sweep's runs, "
        "with the same hyperparameters (docs/howto/batch_size.md)"
    )


def prepare(target: RunConfig) -> PreparedRun:
    """Prepare the target on its mesh.

    A sweep has one CPU device per core. Unless the config sets a mesh, the target uses
    one device, which computes on all cores.
    """
    mesh = None
    if jax.default_backend() == "cpu" and target.mesh == defaults().mesh.to_dict():
        mesh = make_mesh(devices=jax.devices()[:1])
    return prepare_run(target, mesh)


def best_of_base(
    config: SweepConfig, populations: Sequence[Population]
) -> dict[str, float]:
    """The base's best hyperparameters.

    The learning rate is the optimum of a fitted parabola, the others are grid values.
    """
    base = next(
        p
        for p in populations
        if p.parametrization == config.featured
        and (p.width, p.depth) == tuple(config.sizes)
    )
    best = optima.optimum(base.cell())
    if best is None:
        raise UserError(
            f"every run of the base model diverged under {config.featured!r}; lower "
            "sweep.axes.learning_rate, in a new --workdir"
        )
    return base.best() | {"learning_rate": 2.0**best.log2_lr}


def summarize(
    config: SweepConfig,
    best: dict[str, float],
    target: RunConfig,
    trained: TrainResult,
) -> dict[str, Any]:
    """The contents of `summary.json`, without times and verdicts."""
    width, depth = space.sizes_of(target)
    return {
        "target": {
            "width": width,
            "depth": depth,
            "log2_lr": round(math.log2(best["learning_rate"]), 3),
            "train_loss": trained.train_loss,
            "test_loss": trained.test_loss,
            "test_accuracy": trained.test_accuracy,
        },
        # What `mupax train --config.transfer_from=.../summary.json` reads.
        "transfer": transfer_record(config.base, best, target.base_examples),
    }


def explain_target(config: ConfigDict) -> optim.Explanation:
    """The scaling of each parameter of the target; without a target, of the base."""
    parsed = space.parse_sweep(config)
    chosen = parsed.target or parsed.base
    built = build(chosen, open_dataset(chosen, stand_in=True))
    return optim.explain(built.scales, chosen.optimizer.name)
