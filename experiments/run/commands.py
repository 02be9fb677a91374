"""`mupax train`, `mupax eval` and `mupax explain` for one run."""

import contextlib
import math
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import rich.console
import rich.progress
from flax import nnx
from ml_collections import ConfigDict

import mupax
from mupax import optim, zoo
from mupax.zoo.addresses import public
from mupax.zoo.weights import saving

from .. import data as datasets
from .. import progress
from ..errors import UserError, visible
from . import bucket, collectives, workdir
from .build import build, open_dataset
from .checkpoints import open_checkpoints, read_weights
from .config import parse, plain
from .evaluate import means, tester
from .loop import IDENTITY, OnStep, TrainResult, train
from .prepare import PreparedRun, prepare
from .trackers import open_trackers

_COMPILING = "compiling"  # the bar's text before the first step


def run(
    config: ConfigDict | Mapping[str, Any],
    folder: str | pathlib.Path,
    *,
    command: list[str],
    dry_run: bool = False,
) -> TrainResult | None:
    """Train a run in a directory, or resume it. `dry_run` only prints its description.

    `command` is for the model card. For the errors, see
    `mupax.experiments.run.loop.train`.
    """
    first = jax.process_index() == 0
    console = rich.console.Console(quiet=not first)
    directory = pathlib.Path(folder)
    parsed = parse(config)
    if first and not dry_run:  # before data is read
        claimed = {key: getattr(parsed, key) for key in IDENTITY}
        claimed |= {"settings": parsed.settings()}
        workdir.check(directory, claimed, free=("dataset",))
    prepared = prepare(parsed, stand_in=dry_run)
    prepared.check()
    text = visible(describe(prepared), keep="\n")
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        return None
    model = directory / "model"
    return train_in(prepared, directory, model, command, console)


def train_here(
    config: Mapping[str, Any] | ConfigDict,
    workdir: str | pathlib.Path,
    *,
    data: Any = None,
) -> TrainResult:
    """Train a model of the zoo in a directory, or resume its run; as `mupax train`.

    Args:
      config: keys of a training config; missing keys have their defaults.
      workdir: the run directory. The model is saved in its directory `model`.
      data: in place of the config's dataset; see
        `mupax.experiments.register_dataset`. Its name is then "data".

    Raises:
      UserError: bad input; names the key.

    Examples:
      >>> import numpy as np, tempfile
      >>> x, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
      >>> splits = {"train": (x, y), "test": (x[:8], y[:8])}
      >>> config = {"model": {"name": "mlp", "width": 8, "depth": 2}, "steps": 2}
      >>> config |= {"batch_size": 8, "learning_rate": 0.1}
      >>> folder = tempfile.mkdtemp()
      >>> result = train_here(config, folder, data=splits)  # doctest: +ELLIPSIS
      model      mlp, 592 parameters
      ...
      >>> 0 <= result.test_accuracy <= 1
      True
    """
    given = plain(config)
    if data is not None:
        datasets.register_dataset("data", data)
        given["dataset"] = "data"
    result = run(given, workdir, command=[])
    assert result is not None
    return result


def train_in(
    prepared: PreparedRun,
    directory: pathlib.Path,
    model: pathlib.Path,
    command: list[str],
    console: rich.console.Console,
) -> TrainResult:
    """Train a prepared run in a directory, and save the model in the directory `model`.

    For `command`, see `run`.
    """
    config, dataset = prepared.config, prepared.dataset
    prepared.check_memory()
    wanted = {x: getattr(config, x) for x in ("tensorboard", "wandb", "mlflow")}
    with _shown_steps(console, config.steps) as show:
        result, state = train(
            prepared.built.model,
            prepared.program,
            dataset,
            prepared.options,
            workdir=directory,
            create=None if prepared.built.pretrained else prepared.built.create,
            on_step=show,
            settings=config.settings(),
            trackers=lambda: open_trackers(directory, config.settings(), **wanted),
            learning_rate=config.learning_rates,
        )
    if result.resumed_from == config.steps:
        console.print("This run had finished already. Its results:", highlight=False)
    console.print(
        f"{dataset.name}: {_scores(result.test_loss, result.test_accuracy)}; "
        f"{directory}/metrics.jsonl",
        highlight=False,
        soft_wrap=True,
    )
    # All processes must take the same branch, because saving uses collectives.
    if not collectives.broadcast(model.exists()):
        weights = state["ema"] if "ema" in state else state["params"]
        weights, rest = collectives.gathered((weights, state["rest"]))
        if jax.process_index() == 0:
            _save(prepared, weights, rest, model, result, command)
        collectives.meet()
        console.print(f"the model: {model}", highlight=False, soft_wrap=True)
    else:
        _check_saved(model)
    return result


def _check_saved(model: pathlib.Path) -> None:
    """Compare the saved model of a finished run with its checksums.

    Raises:
      UserError: a file is damaged or missing.
    """
    damage = None
    if jax.process_index() == 0:
        try:
            saving.verify(model)
        except ValueError as error:
            damage = (
                f"{error}; or delete {model}, and run the command that trained it "
                "again: it writes the model from the last checkpoint"
            )
    if damage := collectives.broadcast(damage):
        raise UserError(damage)


def evaluate(
    config: ConfigDict, folder: str | pathlib.Path, checkpoint: str
) -> tuple[float, float]:
    """Print and return (loss, accuracy) of a checkpoint on the test split.

    `checkpoint` is "latest", "best" or a step.

    Raises:
      UserError: there is no such checkpoint, or it belongs to another model or to one
        that computes another function.
    """
    prepared = prepare(parse(config))
    directory = pathlib.Path(folder)
    first = jax.process_index() == 0
    if first:
        settings = prepared.config.settings()
        workdir.check_model(directory, settings, prepared.dataset.name)
    if collectives.broadcast((directory / "model").exists()):
        _check_saved(directory / "model")
    step = collectives.broadcast(
        _find_checkpoint(directory, checkpoint) if first else None
    )
    prepared.check()
    program = prepared.program
    params, rest = read_weights(
        directory / "checkpoints" / str(step),
        program.abstract["params"],
        program.abstract["rest"],
        ema=bool(prepared.config.ema),
        alone=jax.process_count() > 1 and bucket.is_copy(directory),
    )
    state = jax.jit(program.start, out_shardings=program.shardings)(params, rest)
    batch_size = prepared.config.batch_size // prepared.config.accumulate
    loss, accuracy = means(tester(program, prepared.dataset, batch_size)(state))
    if first:
        print(f"{prepared.dataset.name}, step {step}: {_scores(loss, accuracy)}")
    return loss, accuracy


def _scores(loss: float, accuracy: float) -> str:
    return f"test loss {loss:.4f}, test accuracy {accuracy:.2%}"


def explain(config: ConfigDict) -> optim.Explanation:
    """The scaling of each parameter of a config's model."""
    run = parse(config)
    built = build(run, open_dataset(run, stand_in=True))
    return optim.explain(built.scales, built.config.optimizer.name)


def describe(prepared: PreparedRun) -> str:
    """Model, scaling, data, optimizer and devices of a run, one per line."""
    config, program, dataset = prepared.config, prepared.program, prepared.dataset
    mesh = program.mesh
    axes = {axis: n for axis, n in mesh.shape.items() if n > 1} or {"data": 1}
    sizes = ", ".join(f"{axis} {n}" for axis, n in axes.items())
    scaling: Any = prepared.built.model.plan  # type: ignore[attr-defined]
    ratios = {"batch size": config.training.batch, "examples": config.training.examples}
    training = "".join(f", {name} x {x:g}" for name, x in ratios.items() if x != 1)
    steps, batch, size = config.steps, config.batch_size, dataset.train_size
    amount = f"{size:,} examples, {steps * batch / size:.1f} epochs"
    if dataset.name != public(config.dataset):
        amount = f"not prepared (described with {dataset.name})"
    origin = f" (from {public(config.transfer_from)})" if config.transfer_from else ""
    rows = {
        "model": f"{config.model.name}, {program.parameters:,} parameters",
        "scaling": f"{scaling.parametrization.name}, width x {scaling.width:g}, "
        f"depth x {scaling.depth:g} of the base{training}",
        "data": f"{public(config.dataset)}, {amount}, {steps:,} steps of {batch}",
        "optimizer": f"{config.optimizer.name}, {config.schedule.name} learning rate "
        f"{config.learning_rate:.3g} at the base{origin}",
        "devices": f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}: {sizes}",
        "state": f"{prepared.state_bytes / 2**20:,.1f} MiB of weights and optimizer on "
        "each device",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def _save(
    prepared: PreparedRun,
    weights: nnx.State,
    rest: nnx.State,
    directory: pathlib.Path,
    result: TrainResult,
    command: list[str],
) -> None:
    """Save the trained model for `zoo.load_pretrained`."""
    built, dataset = prepared.built, prepared.dataset
    several = jax.process_count() > 1
    # A model of several processes may not fit on one device.
    memory = jax.local_devices(backend="cpu")[0] if several else None
    with jax.default_device(memory):
        model = built.model if built.pretrained else built.create()
        nnx.update(model, weights, rest)
    if dataset.kind == "images":
        zoo.set_data_config(model, dataset.data_config)
    tokenizer = dataset.tokenizer
    files = {} if tokenizer is None else {"tokenizer.json": tokenizer}
    training = _training_of(prepared, result, command)
    zoo.save(model, directory, files=files, training=training)


def _training_of(
    prepared: PreparedRun, result: TrainResult, command: list[str]
) -> zoo.Training:
    """The description of a run on the model card."""
    config, devices = prepared.config, prepared.program.mesh.devices
    metrics = {"accuracy": result.test_accuracy, "loss": result.test_loss}
    if prepared.dataset.kind == "text":
        metrics["perplexity"] = math.exp(min(result.test_loss, 700))
    settings = {
        "steps": f"{config.steps:,}",
        "batch size": config.batch_size,
        "optimizer": config.optimizer.name,
        "learning rate at the base": f"{config.learning_rate:.4g}",
        "schedule": config.schedule.name,
        "parametrization": config.rules.name,
        "base width, base depth": f"{config.base_width}, {config.base_depth}",
        "hyperparameters from": _public(config.transfer_from or "") or None,
        "moving average of the weights": config.ema,
        "seed": config.seed,
        "training loss at the end": f"{result.train_loss:.4g}",
        "time": f"{result.seconds:,.0f} s, with compilation",
        "devices": f"{devices.size} x {devices.flat[0].device_kind}",
        "versions": f"mupax {mupax.__version__}, jax {jax.__version__}",
    }
    return zoo.Training(
        dataset=_public(config.dataset),
        metrics=metrics,
        settings={k: v for k, v in settings.items() if v is not None},
        source=_public(config.init_from or "") or None,
        command=shlex.join(map(_public, command)),
    )


def _public(word: str) -> str:
    """A word of a command without the directories of this machine.

    Examples:
      >>> _public("--config.dataset=text:/home/me/a.txt"), _public("s3://bucket/a.txt")
      ('--config.dataset=text:a.txt', 's3://bucket/a.txt')
    """
    return re.sub(r"(^|[=:])/(?!/)[^=:]*/", r"\1", public(word))


def _find_checkpoint(directory: pathlib.Path, which: str) -> int:
    folder = directory / "checkpoints"
    if not folder.is_dir():
        target = directory / "target"
        run = "the --workdir of a training run"
        if (target / "checkpoints").is_dir():
            run = f"--workdir={target}, the run of this transfer's target"
        raise UserError(f"{directory} holds no checkpoints; give {run}")
    with open_checkpoints(
        folder, keep_last=1_000_000, alone=True, reads=True
    ) as checkpoints:
        steps = checkpoints.steps()
        by_name = {"latest": max(steps, default=None), "best": checkpoints.best()}
    step = by_name.get(which, int(which) if which.isdecimal() else None)
    if step is None or step not in steps:
        raise UserError(
            f"there is no checkpoint {which!r} in {folder}; --checkpoint can be "
            f"{', '.join(['latest', 'best', *map(str, sorted(steps))])}"
        )
    return step


@contextlib.contextmanager
def _shown_steps(console: rich.console.Console, steps: int) -> Iterator[OnStep]:
    """Show steps: a progress bar on a terminal, otherwise a line per logged step."""
    bar = progress.bar(
        "{task.description}", rich.progress.MofNCompleteColumn(), console
    )
    task = bar.add_task(_COMPILING, total=steps)

    def show(step: int, loss: float, line: dict[str, float]) -> None:
        bar.update(task, completed=step)
        if not line:
            if bar.tasks[0].description == _COMPILING:
                bar.update(task, description=f"loss {loss:.4f}")
            return
        text = f"loss {line['loss']:.4f}"
        if "examples_per_second" in line:
            text += f", {line['examples_per_second']:,.0f}/s"
            text += f", {1000 * line['step_seconds']:,.1f} ms a step"
        if "mfu" in line:
            text += f", MFU {line['mfu']:.1%}"
        bar.update(task, description=text)
        if not console.is_terminal:
            console.print(f"step {step:,}: {text}", highlight=False)

    with bar:
        yield show
