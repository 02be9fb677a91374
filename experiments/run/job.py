"""`mupax train` and `mupax eval`: from a config to a trained model."""

import dataclasses
import math
import os
import pathlib
import shlex
from typing import Any

import jax
import optax
import rich.console
import rich.progress
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mupax import optim, zoo

from .. import data as datasets
from ..data import Dataset
from ..errors import UserError
from ..estimate.flops import count_flops
from ..estimate.hardware import peak_flops
from . import workdir
from .build import Built, build, open_dataset
from .checkpoints import open_checkpoints, read_weights
from .config import RunConfig, parse
from .evaluate import means, tester
from .loop import Plan, TrainResult, check, train
from .mesh import make_mesh
from .program import Program, make_program
from .records import Sink, TensorBoard, WandB


@dataclasses.dataclass(frozen=True)
class Job:
    """A run on a mesh, ready to begin.

    Attributes:
      built: the run.
      program: its step and evaluation on the mesh.
      plan: what to do when.
    """

    built: Built
    program: Program
    plan: Plan

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        return self.built.config

    @property
    def dataset(self) -> Dataset:
        """Opened."""
        return self.built.dataset

    @property
    def rate(self) -> optax.Schedule:
        """The learning rate over the steps."""
        return self.config.rate


def prepare(
    config: RunConfig, mesh: Mesh | None = None, *, stand_in: bool = False
) -> Job:
    """A config's run on a mesh; nothing is computed or written yet.

    Args:
      config: of the run.
      mesh: in place of the config's own, e.g. one of devices that are not here.
      stand_in: take the config's stand-in for data that is not prepared.

    Raises:
      UserError: bad input, in one sentence.
    """
    mesh = mesh or make_mesh(config.mesh)
    built = build(config, open_dataset(config, stand_in=stand_in))
    program = make_program(
        built.model,
        built.recipe,
        built.objective,
        mesh,
        hyper={"learning_rate": config.learning_rate},
        seed=config.seed,
        log_every=config.log_every,
        rules=config.plain()["sharding"],
    )
    peak = peak_flops(list(mesh.devices.flat))
    plan = Plan(
        batch_size=config.batch_size,
        steps=config.steps,
        seed=config.seed,
        eval_every=config.eval_every,
        save_every=config.save_every,
        keep_last=config.keep_last,
        keep_best=config.keep_best,
        profile=(config.profile[0], config.profile[1]) if config.profile else None,
        flops=flops(program, built.dataset.spec(config.batch_size)) if peak else None,
        peak=peak,
    )
    return Job(built, program, plan)


def flops(program: Program, batch: Any) -> float:
    """Operations of a step, over all devices."""
    return count_flops(program.step, program.abstract, batch, program.hyper)


def check_job(job: Job) -> None:
    """Refuse a batch that does not suit the devices or the dataset."""
    check(job.plan, job.program, job.dataset)


def check_memory(job: Job) -> None:
    """Refuse a state that a device cannot hold.

    Raises:
      UserError: with the sizes.
    """
    device = job.program.mesh.local_devices[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    limit = limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := state_bytes(job)) > limit:
        raise UserError(
            f"the model and its optimizer take {needed / 2**30:,.1f} GiB on each "
            f"device, which has {limit / 2**30:,.1f} GiB; make the model smaller, or "
            "use more devices along mesh.fsdp or mesh.tensor"
        )


def state_bytes(job: Job) -> int:
    """Bytes of the state on each device."""
    leaves = jax.tree.leaves(job.program.abstract)
    shardings = jax.tree.leaves(job.program.shardings)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def run(
    config: ConfigDict,
    folder: str,
    *,
    command: list[str],
    dry_run: bool = False,
) -> TrainResult | None:
    """Train; the same command resumes a run that was stopped or killed.

    Args:
      config: of the run.
      folder: the run directory.
      command: what was typed, for the model card.
      dry_run: print what the run would do, and stop.

    Raises:
      UserError: bad input, in one sentence; nothing that was there is lost.
      Stopped: told to stop; everything is saved.
    """
    first = jax.process_index() == 0
    console = rich.console.Console(quiet=not first)
    directory = pathlib.Path(folder)
    if first and not dry_run:  # before data is read
        workdir.check(directory, None)
    job = prepare(parse(config), stand_in=dry_run)
    check_job(job)
    console.print(describe(job), highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        return None
    return train_in(job, directory, directory / "model", command, console)


def train_in(
    job: Job,
    directory: pathlib.Path,
    model: pathlib.Path,
    command: list[str],
    console: rich.console.Console,
) -> TrainResult:
    """Train a job in its directory, with records, checkpoints and the model's weights.

    Args:
      job: the run.
      directory: of this run alone.
      model: where the trained model is saved.
      command: what was typed, for the model card.
      console: where progress is shown.

    Raises:
      UserError: see `mupax.experiments.run.loop.train`.
      Stopped: likewise.
    """
    check_memory(job)
    with _Bar(console, job.plan.steps) as bar:
        result, state = train(
            job.built.model,
            job.program,
            job.dataset,
            job.plan,
            workdir=directory,
            create=None if job.built.pretrained else job.built.create,
            on_step=bar.step,
            settings=job.config.settings(),
            sinks=lambda: _sinks(job.config, directory),
            learning_rate=job.rate,
        )
    console.print(
        f"{job.config.dataset}: test loss {result.test_loss:.4f}, "
        f"test accuracy {result.test_accuracy:.2%}; {directory}/metrics.jsonl",
        highlight=False,
        soft_wrap=True,
    )
    if jax.process_count() == 1 and not model.exists():
        weights = state["ema"] if "ema" in state else state["params"]
        _save(job, weights, state["rest"], model, result, command)
        console.print(f"the model: {model}", highlight=False, soft_wrap=True)
    return result


def evaluate(config: ConfigDict, folder: str, checkpoint: str) -> tuple[float, float]:
    """Print and return (loss, accuracy) of a checkpoint on the test split.

    Args:
      config: that the run was trained with.
      folder: its run directory.
      checkpoint: "latest", "best" or a step.

    Raises:
      UserError: there is no such checkpoint, or it is one of another model.
    """
    job = prepare(parse(config))
    directory = pathlib.Path(folder)
    step = _find_checkpoint(directory, checkpoint)
    check_job(job)
    program = job.program
    params, rest = read_weights(
        directory / "checkpoints" / str(step),
        *(_placed(program, part) for part in ("params", "rest")),
        ema=bool(job.config.ema),
    )
    state = jax.jit(program.start, out_shardings=program.shardings)(params, rest)
    at_once = job.plan.batch_size // job.config.accumulate
    loss, accuracy = means(tester(program, job.dataset, at_once)(state))
    if jax.process_index() == 0:
        print(
            f"{job.config.dataset}, step {step}: test loss {loss:.4f}, "
            f"test accuracy {accuracy:.2%}"
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
            f"{config.learning_rate:.3g} at the base"
            + (f" (from {config.transfer_from})" if config.transfer_from else ""),
        ),
        (
            "devices",
            f"{devices} x {kind}: "
            + ", ".join(f"{axis} {n}" for axis, n in sizes.items()),
        ),
        (
            "state",
            f"{state_bytes(job) / 2**20:,.1f} MiB of weights and optimizer on each "
            "device",
        ),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _scaling(job: Job) -> str:
    """The ratios that the rules see."""
    plan: Any = job.built.model.plan  # type: ignore[attr-defined]
    name = plan.parametrization.name
    return f"{name}, width x {plan.width:g}, depth x {plan.depth:g} of the base"


def _itemsize(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8
    return leaf.dtype.itemsize


def _sinks(config: RunConfig, directory: pathlib.Path) -> tuple[Sink, ...]:
    found: list[Sink] = []
    if config.tensorboard:
        found.append(TensorBoard(directory / "tensorboard"))
    if config.wandb:
        found.append(WandB(config.wandb, directory, config.settings()))
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
    model = job.built.model if job.built.pretrained else job.built.create()
    nnx.update(model, weights, rest)
    notes = (
        f"Trained on {job.config.dataset} for {job.plan.steps} steps of "
        f"{job.plan.batch_size} examples: test accuracy {result.test_accuracy:.2%}, "
        f"test loss {result.test_loss:.4g}.{_inputs(job.dataset)} Made by\n\n"
        f"    {shlex.join(command)}"
    )
    zoo.save(model, directory, notes=notes)


def _inputs(dataset: Dataset) -> str:
    """How pixels become what the model takes, for its card."""
    if not isinstance(dataset, datasets.ImageDataset):
        return ""
    mean, std = (", ".join(f"{x:.4g}" for x in v) for v in dataset.statistics)
    return f" Input: (pixel - {mean}) / {std}, by channel."


def _find_checkpoint(directory: pathlib.Path, which: str) -> int:
    folder = directory / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{directory} holds no checkpoints; give a --workdir that does")
    with open_checkpoints(folder, keep_last=1_000_000) as checkpoints:
        steps = checkpoints.steps()
        found = {"latest": max(steps, default=None), "best": checkpoints.best()}
    step = found.get(which, int(which) if which.isdecimal() else None)
    if step is None or step not in steps:
        raise UserError(
            f"there is no checkpoint {which!r} in {folder}; there are "
            f"{', '.join(map(str, sorted(steps))) or 'none'}"
        )
    return step


class _Bar:
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

    def __enter__(self) -> "_Bar":
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
    built = build(parse(config))
    return optim.explain(built.scales, built.config.point, built.config.optimizer.name)
