"""The training loop: steps, evaluations, records and checkpoints of one run."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from flax import nnx
from jaxtyping import Array, Float

from mupax import zoo

from ..checks import whole
from ..data import Dataset, placed_ahead
from ..errors import Diverged, Stopped, UserError
from . import bucket, collectives
from . import workdir as workdirs
from .checkpoints import Checkpoints, open_checkpoints
from .evaluate import means, place_batch, tester
from .loss import Batch
from .mesh import batch_share, check_batch, put, replicated
from .program import Program
from .records import Records, curve_of, evals_of
from .step import State
from .stopping import stop_requests
from .trackers import Tracker

_AVERAGED = 50  # steps in the mean of the reported training loss
# Options that decide the result of a run, beside its settings.
IDENTITY = ("batch_size", "steps", "seed", "eval_every")

OnStep = Callable[[int, float, dict[str, float]], None]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """Length of a run, and how often it evaluates, saves and traces.

    Attributes:
      batch_size: examples per step, over all devices.
      steps: number of training steps.
      seed: of the order of the examples.
      eval_every: steps between evaluations; the last step is always evaluated.
      save_every: steps between checkpoints; the last step is always saved.
      keep_last: number of newest checkpoints to keep.
      keep_best: keep the checkpoint of the lowest test loss too.
      profile: (first, last) step of a profiler trace; empty: none.
      flops: floating-point operations of a step, over all devices, if known.
      peak: floating-point operations per second of all devices, if known.
    """

    batch_size: int
    steps: int
    seed: int = 0
    eval_every: int = 100
    save_every: int = 100
    keep_last: int = 2
    keep_best: bool = False
    profile: tuple[int, ...] = ()
    flops: float | None = None
    peak: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The results of a finished run.

    Attributes:
      train_loss: mean training loss of about the last 50 steps, nats.
      test_loss: mean cross-entropy on the test split after the last step, nats.
      test_accuracy: on the test split (of tokens, for text), 0..1.
      curve: (step, mean training loss since the last logged step) per logged step.
      evals: (step, test loss, test accuracy) per evaluation.
      checkpoint: directory of the last checkpoint.
      resumed_from: step that this call resumed from; None for a fresh start.
      seconds: wall time, including compilation, of this call and of the calls that it
        resumed, each up to its last checkpoint.
    """

    train_loss: float
    test_loss: float
    test_accuracy: float
    curve: list[tuple[int, float]]
    evals: list[tuple[int, float, float]]
    checkpoint: pathlib.Path
    resumed_from: int | None
    seconds: float


@dataclasses.dataclass
class _Progress:
    """The part of a checkpoint that is not arrays."""

    losses: list[float] = dataclasses.field(default_factory=list)  # since the last log
    seconds: float = 0.0


# A step, its loss and norms, and the sums of an evaluation after it; all on the device.
_Pending = tuple[int, tuple[Array, Array], Float[Array, " 3"] | None]


def train(
    model: nnx.Module,
    program: Program,
    dataset: Dataset,
    options: LoopOptions,
    *,
    workdir: pathlib.Path,
    create: Callable[[], nnx.Module] | None = None,
    on_step: OnStep | None = None,
    settings: dict[str, Any] | None = None,
    trackers: Callable[[], tuple[Tracker, ...]] = tuple,
    learning_rate: optax.Schedule | None = None,
) -> tuple[TrainResult, State]:
    """Train a model, or resume from the last checkpoint in `workdir`.

    On the same devices, a resumed run has the same weights, bit for bit, and the same
    curve as an uninterrupted run.

    Args:
      model: holds the initial weights; with `create`, only shapes are used.
      program: of this model.
      dataset: to train and test on.
      options: of the loop.
      workdir: directory of this run only.
      create: creates the model on the mesh, sharded.
      on_step: called with (step, training loss, logged values) one step late, and
        with the step that the run resumes from.
      settings: JSON-ready settings that decide the result. A run resumes only if they
        are the same.
      trackers: opens the trackers of the run, after the workdir was claimed.
      learning_rate: for the log.

    Returns:
      The result, and the state on the mesh.

    Raises:
      UserError: the workdir holds a run of other settings (its files are unchanged),
        the batch does not suit the devices or the dataset, a checkpoint cannot be
        written, or the loss is not finite.
      Stopped: SIGTERM arrived; a checkpoint was saved.
    """
    started = time.perf_counter()

    # ----- Checks before anything is written.
    check(options, program, dataset)
    claimed = _identity(options, dataset, settings)
    with _claimed(workdir, claimed) as shared, stop_requests() as stop_now:
        # ----- State: initialized on the mesh, or copied to it.
        if create is None:
            state = program.start_on_mesh(model)
        else:
            state = program.init_on_mesh(create)

        # ----- Resume: arrays and history of one checkpoint, then the examples.
        index, count = batch_share(options.batch_size, program.mesh)
        sharding = zoo.batch_sharding(program.mesh)
        progress = _Progress()
        done, resumed_from = 0, None
        with open_checkpoints(
            workdir / "checkpoints",
            alone=not shared,
            keep_last=options.keep_last,
            keep_best=options.keep_best,
        ) as checkpoints:
            if restored := checkpoints.restore(like=state):
                state = restored.state
                progress = _Progress(**restored.progress)
                done = resumed_from = restored.step
                logging.info("Resuming from step %d in %s.", done, workdir)
            first = jax.process_index() == 0
            if first:
                records = Records(workdir, done, trackers())
            known = collectives.broadcast(records.lines if first else None)
            if not first:
                records = Records(workdir, done, known=known)
            losses = [loss for _, loss in curve_of(records.lines)] + progress.losses
            if resumed_from and on_step and losses:
                on_step(resumed_from, losses[-1], {})
            batches = dataset.train(
                options.batch_size,
                options.seed,
                start=done,
                process_index=index,
                process_count=count,
            )
            feed = placed_ahead(batches, lambda batch: place_batch(batch, sharding))
            loop = _Loop(
                program=program,
                dataset=dataset,
                options=options,
                feed=feed,
                checkpoints=checkpoints,
                records=records,
                progress=progress,
                stop_now=stop_now,
                on_step=on_step,
                learning_rate=learning_rate,
                trace=workdir / "profile" if first or shared else None,
                clock=started - progress.seconds,
            )
            try:
                state = loop.run(state, done)
            finally:
                loop.stop_tracing()
                feed.close()
                records.close()
        last = checkpoints.path(options.steps)
        return _result(options, records.lines, progress, last, resumed_from), state


def _identity(
    options: LoopOptions, dataset: Dataset, settings: dict[str, Any] | None
) -> dict[str, Any]:
    """What decides the result of a run, as its directory stores it."""
    claimed = {key: getattr(options, key) for key in IDENTITY}
    claimed |= {"settings": settings or {}, "dataset": dataset.name}
    if jax.process_index() == 0:
        claimed["contents"] = dataset.fingerprint
    return claimed


def _result(
    options: LoopOptions,
    lines: Sequence[dict[str, Any]],
    progress: _Progress,
    checkpoint: pathlib.Path,
    resumed_from: int | None,
) -> TrainResult:
    """The result of a run whose records have these lines."""
    curve, evals = curve_of(lines), evals_of(lines)
    last = [loss for step, loss in curve if step > options.steps - _AVERAGED]
    return TrainResult(
        train_loss=float(np.mean(last or progress.losses or [math.nan])),
        test_loss=evals[-1][1],
        test_accuracy=evals[-1][2],
        curve=curve,
        evals=evals,
        checkpoint=checkpoint,
        resumed_from=resumed_from,
        seconds=progress.seconds,
    )


@dataclasses.dataclass
class _Loop:
    program: Program
    dataset: Dataset
    options: LoopOptions
    feed: Iterator[Batch]
    checkpoints: Checkpoints
    records: Records
    progress: _Progress
    stop_now: Callable[[int], bool]
    on_step: OnStep | None
    learning_rate: optax.Schedule | None
    trace: pathlib.Path | None  # directory of a profiler trace, if this process has one
    clock: float  # start of the whole run
    logged_at: float | None = None  # time of the last line
    tracing: bool = False

    def run(self, state: State, done: int) -> State:
        """Train from step `done` to the last step."""
        options = self.options
        step_fn = self.program.jit_step()
        hyper = put(self.program.hyper, replicated(self.program.mesh))
        test = None
        pending: _Pending | None = None
        evaluated = {at for at, _, _ in evals_of(self.records.lines)}
        if done == options.steps and done not in evaluated:
            # The log lost the evaluation of the last step.
            self._add_evaluation(done, self._tester()(state))
        for step in range(done + 1, options.steps + 1):
            with self._traced(step):
                state, out = step_fn(state, next(self.feed), hyper)
            # Outputs are fetched one step late, so that the device is never idle.
            if pending:
                self._record(*pending)
            last = step == options.steps
            sums = None
            if step % options.eval_every == 0 or last:
                test = test or self._tester()
                sums = test(state)
            pending = step, out, sums
            stop = self.stop_now(step) and not last
            if step % options.save_every == 0 or last or stop:
                # Saving copies the state and therefore waits for this step.
                score = self._record(*pending)
                pending = None
                self._save(step, state, score)
            if stop:
                self.checkpoints.wait()
                raise Stopped(step)
        return state

    def _tester(self) -> Callable[[State], Float[Array, " 3"]]:
        # Training has shown that batches of this size fit into memory.
        batch_size = self.options.batch_size // self.program.recipe.accumulate
        return tester(self.program, self.dataset, batch_size)

    def _record(
        self, step: int, out: tuple[Array, Array], sums: Float[Array, " 3"] | None
    ) -> float | None:
        """Fetch the outputs of a step and log them; returns the test loss, if any."""
        loss, norms = jax.device_get(out)
        value = float(loss)
        if not math.isfinite(value):
            self._diverged(step, value)
        self.progress.losses.append(value)
        line = {}
        if step % self.program.log_every == 0:
            line = self._line(step, norms)
            self.records.add({"step": step, **line})
        if self.on_step:
            self.on_step(step, value, line)
        return None if sums is None else self._add_evaluation(step, sums)

    def _line(self, step: int, norms: np.ndarray) -> dict[str, float]:
        losses, self.progress.losses = self.progress.losses, []
        line = {"loss": float(np.mean(losses))}
        if self.learning_rate is not None:
            # On the CPU: an accelerator would first finish its next step.
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                line["learning_rate"] = float(self.learning_rate(step - 1))
        line |= dict(zip(self.program.norms, norms.tolist(), strict=True))
        now = time.perf_counter()
        if self.logged_at is not None:
            seconds = (now - self.logged_at) / len(losses)
            line["step_seconds"] = seconds
            line["examples_per_second"] = self.options.batch_size / seconds
            if self.options.flops and self.options.peak:
                line["mfu"] = self.options.flops / seconds / self.options.peak
        self.logged_at = now
        return line

    def _add_evaluation(self, step: int, sums: Array) -> float:
        """Log an evaluation; returns the test loss."""
        loss, accuracy = means(sums)
        self.records.add({"step": step, "test_loss": loss, "test_accuracy": accuracy})
        return loss

    def _save(self, step: int, state: State, score: float | None) -> None:
        self.progress.seconds = time.perf_counter() - self.clock
        self.records.sync()
        progress = dataclasses.asdict(self.progress)
        self.checkpoints.save(step, state, progress, score)

    def _diverged(self, step: int, value: float) -> None:
        self.checkpoints.wait()
        good = self.checkpoints.latest()
        kept = "" if good is None else f" The checkpoint of step {good} is good."
        raise Diverged(
            f"The training loss is {value} at step {step}; lower the learning rate, "
            "warm it up, or clip the gradients (clip_norm), and train in another "
            f"workdir.{kept}"
        )

    def stop_tracing(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def _traced(self, step: int) -> Any:
        """Start or stop the profiler trace, and annotate a step in it."""
        if self.options.profile and self.trace:
            start, end = self.options.profile
            if step == start:
                jax.profiler.start_trace(str(self.trace))
                self.tracing = True
            if step == end + 1:
                self.stop_tracing()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)


@contextlib.contextmanager
def _claimed(workdir: pathlib.Path, settings: dict[str, Any]) -> Iterator[bool]:
    """Claim the workdir in process 0; the other processes wait for it.

    Yields whether all processes have it. In object storage, only process 0 has.
    """
    alone = jax.process_count() == 1
    first = jax.process_index() == 0
    with workdirs.claim(workdir, settings) if first else contextlib.nullcontext():
        collectives.meet()
        is_copy = bucket.is_copy(workdir)
        if not is_copy and (others := collectives.processes_without(workdir)):
            raise UserError(
                f"process {others[0]} does not see the run directory of process 0 at "
                f"{workdir}; give a --workdir that all machines share, or one in "
                "object storage (gs://BUCKET/run or s3://BUCKET/run)"
            )
        yield alone or not is_copy


def check(options: LoopOptions, program: Program, dataset: Dataset) -> None:
    """Raise UserError if the options do not suit the devices and the dataset."""
    accumulate = program.recipe.accumulate
    keys = ("batch_size", "steps", "eval_every", "save_every", "keep_last")
    values = {key: getattr(options, key) for key in keys}
    values |= {"log_every": program.log_every, "accumulate": accumulate}
    for name, value in values.items():
        whole()(name, value)
    check_batch(options.batch_size, program.mesh, accumulate)
    dataset.check_batch(options.batch_size)
