"""The job of `mupax train`: from a config to a trained model."""

import dataclasses
import pathlib
import shlex
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import rich.console
import rich.progress
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mupax import optim, zoo

from .. import data as datasets
from ..config import plain
from ..data import Dataset, mixing
from ..errors import UserError
from ..estimate.flops import count_flops
from ..estimate.hardware import peak_flops
from . import (
    Classification,
    NextToken,
    Plan,
    Program,
    Recipe,
    TrainResult,
    build_optimizer,
    make_mesh,
    make_program,
    open_checkpoints,
    read_weights,
    train,
    workdir,
)
from . import config as configs
from .evaluate import means, tester
from .loop import check
from .objective import Objective
from .records import Sink, TensorBoard, WandB


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a config says, built but not begun.

    Attributes:
      config: checked.
      dataset: opened.
      create: makes the model, untrained.
      model: its abstract twin; the pretrained model itself where there is one.
      pretrained: whether there is one.
      rate: the learning rate's schedule.
      program: the training step.
      plan: what to do when.
    """

    config: ConfigDict
    dataset: Dataset
    create: Callable[[], nnx.Module]
    model: nnx.Module
    pretrained: bool
    rate: optax.Schedule
    program: Program
    plan: Plan


def build(
    config: ConfigDict, mesh: Mesh | None = None, *, stand_in: bool = False
) -> Job:
    """A config's job.

    Args:
      config: as `training.config.defaults` gives it, and a config file changed it.
      mesh: in place of the config's own, as one of devices that are not here.
      stand_in: take the config's stand-in for data that is not prepared.

    Raises:
      UserError: bad input, said in one sentence.
    """
    config = configs.check(config)
    mesh = mesh or make_mesh(plain(config.mesh))
    dataset = open_dataset(config, stand_in)
    name, options = configs.model_options(config)
    options |= _shapes(dataset, name)

    def create() -> nnx.Module:
        return zoo.create(name, **options, rngs=nnx.Rngs(config.seed))

    try:
        if config.init_from:
            # What is not said is as it was saved.
            options = {k: v for k, v in options.items() if v is not None}
            model = zoo.load_pretrained(name, config.init_from, **options)
        else:
            model = nnx.eval_shape(create)
        point, scales = configs.point(config), zoo.scales(model)
        rate = configs.rate(config)
        tx = build_optimizer(
            plain(config.optimizer), rate, scales, point, clip_norm=config.clip_norm
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"the model cannot be built: {error}") from None
    recipe = Recipe(
        tx,
        make_objective(config, dataset),
        config.seed,
        config.accumulate,
        config.ema,
        config.log_every,
    )
    program = make_program(model, recipe, mesh, plain(config.sharding))
    peak = peak_flops(list(mesh.devices.flat))
    plan = Plan(
        batch_size=config.batch_size,
        steps=config.steps,
        seed=config.seed,
        eval_every=config.eval_every,
        save_every=config.save_every,
        keep_last=config.keep_last,
        keep_best=config.keep_best,
        profile=tuple(config.profile) or None,
        flops=_flops(program, dataset, config) if peak else None,
        peak=peak,
    )
    pretrained = bool(config.init_from)
    return Job(config, dataset, create, model, pretrained, rate, program, plan)


def _flops(program: Program, dataset: Dataset, config: ConfigDict) -> float:
    batch = dataset.spec(config.batch_size)
    return count_flops(program.step, program.abstract, batch)


def check_job(job: Job) -> None:
    """Refuse a batch that does not suit the devices or the dataset."""
    check(job.plan, job.program, job.dataset)


def open_dataset(config: ConfigDict, stand_in: bool = False) -> Dataset:
    """The dataset of a config, or its stand-in where it is not prepared."""
    datasets.augment.parse(plain(config.augment))
    if stand_in and config.stand_in:
        try:
            return open_dataset(config)
        except UserError:
            return datasets.open_dataset(config.stand_in)
    options = plain(config.data)
    if config.augment:
        options["augment"] = plain(config.augment)
    try:
        return datasets.open_dataset(config.dataset, config.data_dir, **options)
    except TypeError as error:
        raise UserError(f"data: {error}") from None


def make_objective(config: ConfigDict, dataset: Dataset) -> Objective:
    """What a config minimizes on a dataset."""
    if dataset.kind == "text":
        for key in ("mixup", "cutmix"):
            if config[key]:
                raise UserError(f"{key} mixes images; {config.dataset} is text")
        return NextToken(config.label_smoothing)
    mix = None
    if config.mixup or config.cutmix:

        def mix(key: Any, images: Any, labels: Any) -> Any:
            return mixing.mix(
                key,
                images,
                labels,
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
            )

    return Classification(
        lambda images: dataset.normalize({"image": images})["image"],
        dataset.out_features,
        mix,
        config.label_smoothing,
    )


def run(
    config: ConfigDict,
    folder: str | None,
    *,
    command: list[str],
    dry_run: bool = False,
) -> TrainResult | None:
    """Train; a killed run goes on where it stopped.

    Args:
      config: of the run.
      folder: the run directory; None for runs/<dataset>_<model>.
      command: what was typed, for the model card.
      dry_run: print the plan and stop.

    Raises:
      UserError: bad input, said in one sentence; nothing that was there is lost.
      Stopped: told to stop; all is saved.
    """
    first = jax.process_index() == 0
    console = rich.console.Console(quiet=not first)
    if folder and first and not dry_run:  # before data is read
        workdir.check(pathlib.Path(folder), None)
    job = build(config, stand_in=dry_run)
    check_job(job)
    directory = workdir.named(job.config, folder)
    console.print(describe(job), highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        return None
    with _Progress(console, job.plan.steps) as progress:
        result, state = train(
            job.model,
            job.program,
            job.dataset,
            job.plan,
            workdir=directory,
            create=None if job.pretrained else job.create,
            on_step=progress.step,
            settings=_settings(job.config),
            sinks=lambda: _sinks(job.config, directory),
            learning_rate=job.rate,
        )
    console.print(
        f"{job.config.dataset}: test loss {result.test_loss:.4f}, "
        f"{result.test_accuracy:.2%} right; {directory}/metrics.jsonl",
        highlight=False,
        soft_wrap=True,
    )
    if jax.process_count() == 1 and not (directory / "model").exists():
        weights = state["ema"] if "ema" in state else state["params"]
        _save(job, weights, state["rest"], directory / "model", result, command)
        console.print(f"the model: {directory}/model", highlight=False, soft_wrap=True)
    return result


def evaluate(
    config: ConfigDict, folder: str | None, checkpoint: str
) -> tuple[float, float]:
    """Print and return (loss, accuracy) of a checkpoint on the test split.

    Args:
      config: that the run was trained with.
      folder: its run directory.
      checkpoint: "latest", "best" or a step.

    Raises:
      UserError: there is no such checkpoint, or it is one of another model.
    """
    job = build(config)
    directory = workdir.named(job.config, folder)
    step = _find_checkpoint(directory, checkpoint)
    check_job(job)
    program = job.program
    params, rest = read_weights(
        directory / "checkpoints" / str(step),
        *(_placed(program, part) for part in ("params", "rest")),
        ema=bool(config.ema),
    )
    state = jax.jit(program.start, out_shardings=program.shardings)(params, rest)
    at_once = job.plan.batch_size // config.accumulate
    loss, accuracy = means(tester(program, job.dataset, at_once)(state))
    if jax.process_index() == 0:
        print(
            f"{job.config.dataset}, step {step}: test loss {loss:.4f}, "
            f"{accuracy:.2%} right"
        )
    return loss, accuracy


def _placed(program: Program, part: str) -> Any:
    """Shapes of a part of the state, and where it lies."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        program.abstract[part],
        program.shardings[part],
    )


def describe(job: Job) -> str:
    """The plan of a run, for a reader: model, devices, optimizer, data."""
    config, program = job.config, job.program
    abstract = program.abstract
    sizes = {axis: n for axis, n in program.mesh.shape.items() if n > 1} or {"data": 1}
    devices = program.mesh.devices.size
    kind = program.mesh.devices.flat[0].device_kind
    mine = sum(
        np.prod(sharding.shard_shape(leaf.shape), dtype=int) * _itemsize(leaf)
        for leaf, sharding in zip(
            jax.tree.leaves(abstract), jax.tree.leaves(program.shardings), strict=True
        )
    )
    weights = sum(leaf.size for leaf in jax.tree.leaves(abstract["params"]))
    steps, batch = job.plan.steps, job.plan.batch_size
    size = job.dataset.train_size
    amount = f"{size:,} examples, {steps * batch / size:.1f} epochs"
    if job.dataset.name != config.dataset:
        amount = f"not prepared ({job.dataset.name} stands in)"
    rows = [
        ("model", f"{config.model.name}, {weights:,} parameters"),
        ("scaling", _scaling(job)),
        (
            "data",
            f"{config.dataset}, {amount}, {steps:,} steps of {batch}",
        ),
        (
            "optimizer",
            f"{config.optimizer.name}, {config.schedule.name} learning rate "
            f"{config.learning_rate:.3g} at the base",
        ),
        (
            "devices",
            f"{devices} x {kind}: "
            + ", ".join(f"{axis} {n}" for axis, n in sizes.items()),
        ),
        ("state", f"{mine / 2**20:,.1f} MiB of weights and optimizer on each device"),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _scaling(job: Job) -> str:
    """The ratios that the rules see."""
    plan: Any = job.model.plan  # type: ignore[attr-defined]
    name = plan.parametrization.name
    return f"{name}, width x {plan.width:g}, depth x {plan.depth:g} of the base"


def _itemsize(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8
    return leaf.dtype.itemsize


def _shapes(dataset: Dataset, name: str) -> dict[str, Any]:
    """What a model has to know of a dataset."""
    text = dataset.kind == "text"
    if text != name.startswith("gpt"):
        raise UserError(
            f"{name} takes {'images' if text else 'text'}, and {dataset.name} is "
            f"{dataset.kind}; choose another model or dataset"
        )
    if text:
        return {"vocab_size": dataset.out_features, "context": dataset.input_shape[0]}
    return {"input_shape": dataset.input_shape, "out_features": dataset.out_features}


def _settings(config: ConfigDict) -> dict[str, Any]:
    """What decides the result of a run."""
    found = plain(config)
    return {key: found[key] for key in found if key not in configs.INCIDENTAL}


def _sinks(config: ConfigDict, directory: pathlib.Path) -> tuple[Sink, ...]:
    found: list[Sink] = []
    if config.tensorboard:
        found.append(TensorBoard(directory / "tensorboard"))
    if config.wandb:
        found.append(WandB(config.wandb, directory, _settings(config)))
    return tuple(found)


def _save(
    job: Job,
    weights: nnx.State,
    rest: nnx.State,
    directory: pathlib.Path,
    result: TrainResult,
    command: list[str],
) -> None:
    """The trained model, as `zoo.load_pretrained` reads it."""
    model = job.model if job.pretrained else job.create()
    nnx.update(model, weights, rest)
    notes = (
        f"Trained on {job.config.dataset} for {job.plan.steps} steps of "
        f"{job.plan.batch_size} examples: {result.test_accuracy:.2%} of the test split "
        f"right, test loss {result.test_loss:.4g}.{_inputs(job.dataset)} Made by\n\n"
        f"    {shlex.join(command)}"
    )
    zoo.save(model, directory, notes=notes)


def _inputs(dataset: Dataset) -> str:
    """How pixels become what the model takes, for its card."""
    if not isinstance(dataset, datasets.ImageDataset):
        return ""
    mean, std = (", ".join(f"{x:.4g}" for x in v) for v in dataset.statistics)
    return f" It takes raw pixels less {mean}, over {std}."


def _find_checkpoint(directory: pathlib.Path, which: str) -> int:
    folder = directory / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{directory} holds no checkpoints; give a --workdir that does")
    with open_checkpoints(folder, keep_last=1_000_000) as checkpoints:
        steps = checkpoints.steps()
        found = {"latest": max(steps, default=None), "best": checkpoints.best()}
    step = found.get(which, int(which) if which.isdigit() else None)
    if step is None or step not in steps:
        raise UserError(
            f"there is no checkpoint {which!r} in {folder}; there are "
            f"{', '.join(map(str, sorted(steps))) or 'none'}"
        )
    return step


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: rich.console.Console, steps: int):
        self._console = console
        self._steps = steps
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> "_Progress":
        self._bar.__enter__()
        self._task = self._bar.add_task("compiling", total=self._steps)
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def step(self, step: int, loss: float, line: dict[str, float]) -> None:
        """What is shown of a step."""
        self._bar.update(self._task, completed=step)
        if not line:
            return
        text = f"loss {line['loss']:.4f}"
        if "examples_per_second" in line:
            text += f", {line['examples_per_second']:,.0f}/s"
            text += f", {1000 * line['step_seconds']:,.1f} ms a step"
        if "mfu" in line:
            text += f", MFU {line['mfu']:.1%}"
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"step {step:,}: {text}", highlight=False)


def explain(config: ConfigDict) -> optim.Explanation:
    """How each parameter of a config's model is scaled."""
    job = build(config)
    return optim.explain(
        zoo.scales(job.model), configs.point(job.config), config.optimizer.name
    )
