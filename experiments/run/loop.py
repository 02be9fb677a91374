"""The training loop: however often it is killed, it ends with the same weights."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Float

from mupax import zoo

from ..data import Dataset, Prefetched, prefetch
from ..errors import Stopped, UserError
from . import workdir as workdirs
from .checkpoints import Checkpoints, open_checkpoints
from .evaluate import means, place_batch, tester
from .mesh import batch_share, check_batch, put, replicated
from .objective import Batch
from .program import Program, parts
from .records import Records, Sink
from .step import State
from .stopping import Stopper

_SHARED_WITHIN = 10  # seconds for a network file system to show a new directory
_AVERAGED = 50  # steps that the reported training loss is the mean of


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do when.

    Attributes:
      batch_size: examples in a step, over all devices.
      steps: how many to train for.
      seed: of the order of the examples.
      eval_every: steps between evaluations on the test split; the last step has one.
      save_every: steps between checkpoints; the last step has one.
      keep_last: newest checkpoints to keep.
      keep_best: keep that of the lowest test loss, too.
      profile: (first, last) step of a profiler's trace; None for none.
      flops: floating-point operations of a step, over all devices; None if unknown.
      peak: operations a second of all devices together; None if unknown.
    """

    batch_size: int
    steps: int
    seed: int = 0
    eval_every: int = 100
    save_every: int = 100
    keep_last: int = 2
    keep_best: bool = False
    profile: tuple[int, int] | None = None
    flops: float | None = None
    peak: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
      train_loss: what was minimized, mean over about the last 50 steps; nats.
      test_loss: mean cross-entropy of the test split after the last step, nats.
      test_accuracy: share of the test split (of its tokens, for text) that is
        right, 0..1.
      curve: (step, training loss) of every logged step, mean since the one before.
      evals: (step, test loss, test accuracy) of every evaluation.
      checkpoint: directory of the last step's checkpoint.
      resumed_from: the step that this call went on from; None for a fresh start.
      seconds: wall time, compilation included, of all calls that led here, each up
        to its last checkpoint.
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
    """What a checkpoint remembers beside the arrays and the order of the examples."""

    losses: list[float] = dataclasses.field(default_factory=list)  # since the last log
    examples: int = 0  # since the last log
    seconds: float = 0.0
    lines: int | None = None  # of the log so far
    recent: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of them


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """What a step computed, which is looked at one step later."""

    step: int
    out: tuple[Array, Array]  # loss, norms
    sums: Float[Array, " 3"] | None  # of an evaluation after the step


def train(
    model: nnx.Module,
    program: Program,
    dataset: Dataset,
    plan: Plan,
    *,
    workdir: pathlib.Path,
    create: Callable[[], nnx.Module] | None = None,
    on_step: Callable[[int, float, dict[str, float]], None] | None = None,
    settings: dict[str, Any] | None = None,
    sinks: Callable[[], tuple[Sink, ...]] = tuple,
    learning_rate: optax.Schedule | None = None,
) -> tuple[TrainResult, State]:
    """Trains a model; a killed run goes on from its last checkpoint.

    On the same devices, a run that was killed ends with the same weights, bit for
    bit, and the same curve as one that was not.

    Args:
      model: whose weights to start from; with `create`, only its shapes matter.
      program: of this model.
      dataset: what to train and test on.
      plan: what to do when.
      workdir: directory of this run alone.
      create: makes the model on the mesh, each device its own part.
      on_step: called with (step, training loss, what was logged) one step late, and
        with the step that a run goes on from.
      settings: JSON-ready; what decides the result. A workdir goes on only with the
        settings that it began with.
      sinks: opened once the workdir is known to be ours.
      learning_rate: for the log.

    Returns:
      The result, and the state, on the mesh.

    Raises:
      UserError: if the workdir holds a run of other settings (nothing in it is
        touched), the batch does not suit the devices or the dataset, a checkpoint
        cannot be written, or the loss stops being finite.
      Stopped: told to stop by SIGTERM; all is saved.
    """
    started = time.perf_counter()

    # ----- Checks and claim: nothing is written before all of it is known to fit.
    check(plan, program, dataset)
    wanted = {
        "settings": settings or {},
        "dataset": dataset.name,
        **{k: getattr(plan, k) for k in ("batch_size", "steps", "seed", "eval_every")},
    }
    with _claimed(workdir, wanted), Stopper() as stopper:
        # ----- State, made on the mesh or copied to it.
        if create is not None:
            state = program.init_on_mesh(create)
        else:
            state = _start(program, model)

        # ----- Resume: first the arrays, then the order of the examples and the
        # history that go with them, all from one checkpoint.
        index, count = batch_share(plan.batch_size, program.mesh)
        sharding = zoo.batch_sharding(program.mesh)
        feed = prefetch(
            dataset.train(
                plan.batch_size, plan.seed, process_index=index, process_count=count
            ),
            lambda batch: place_batch(batch, sharding),
        )
        progress = _Progress()
        done, resumed_from = 0, None
        with open_checkpoints(
            workdir / "checkpoints", keep_last=plan.keep_last, keep_best=plan.keep_best
        ) as checkpoints:
            if restored := checkpoints.restore(like=state):
                state = restored.state
                feed.set_state(restored.progress["examples"])
                progress = _Progress(**restored.progress["progress"])
                done = resumed_from = restored.step
                logging.info("Going on from step %d in %s.", done, workdir)
            first = jax.process_index() == 0
            records = Records(
                workdir,
                done,
                sinks() if first else (),
                writes=first,
                known=progress.recent,
                count=progress.lines,
            )
            if resumed_from and on_step and records.curve():
                on_step(resumed_from, records.curve()[-1][1], {})
            run = _Run(
                program=program,
                dataset=dataset,
                plan=plan,
                feed=feed,
                checkpoints=checkpoints,
                records=records,
                progress=progress,
                stopper=stopper,
                on_step=on_step,
                learning_rate=learning_rate,
                workdir=workdir,
                clock=started - progress.seconds,
            )
            try:
                state = run.go(state, done)
            finally:
                run.stop_tracing()
                feed.close()
                records.close()
        return _result(records, checkpoints, plan, progress, resumed_from), state


@dataclasses.dataclass
class _Run:
    """The loop's own hands: what it feeds from, and where it writes."""

    program: Program
    dataset: Dataset
    plan: Plan
    feed: Prefetched[Batch]
    checkpoints: Checkpoints
    records: Records
    progress: _Progress
    stopper: Stopper
    on_step: Callable[[int, float, dict[str, float]], None] | None
    learning_rate: optax.Schedule | None
    workdir: pathlib.Path
    clock: float  # when the run would have started, had it never been killed
    logged_at: float | None = None  # when the last line was written
    tracing: bool = False

    def go(self, state: State, done: int) -> State:
        """Train from a step to the end."""
        plan = self.plan
        step_fn = self.program.jit_step()
        hyper = put(self.program.hyper, replicated(self.program.mesh))
        test = None
        waiting: _Waiting | None = None
        if done == plan.steps and not any(e[0] == done for e in self.records.evals()):
            # The log was lost after the last step, and so was its evaluation.
            self._evaluated(
                done, tester(self.program, self.dataset, self._at_once)(state)
            )
        for step in range(done + 1, plan.steps + 1):
            with self._traced(step):
                state, out = step_fn(state, next(self.feed), hyper)
            # Fetched one step late, so that the device always has the next to do.
            if waiting:
                self._record(waiting)
            last = step == plan.steps
            sums = None
            if step % plan.eval_every == 0 or last:
                test = test or tester(self.program, self.dataset, self._at_once)
                sums = test(state)
            waiting = _Waiting(step, out, sums)
            stop = self.stopper.now(step) and not last
            if step % plan.save_every == 0 or last or stop:
                # Saving waits for this step in any case: the state is copied.
                score = self._record(waiting)
                waiting = None
                self._save(step, state, score)
            if stop:
                self.checkpoints.wait()
                raise Stopped(step)
        return state

    @property
    def _at_once(self) -> int:
        """Examples that are known to fit into the devices' memory."""
        return self.plan.batch_size // self.program.recipe.accumulate

    def _record(self, waiting: "_Waiting") -> float | None:
        """Look at a step's loss, and write the lines that are due; its test loss."""
        step = waiting.step
        loss, norms = jax.device_get(waiting.out)
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
        return None if waiting.sums is None else self._evaluated(step, waiting.sums)

    def _line(self, step: int, norms: np.ndarray) -> dict[str, float]:
        losses, self.progress.losses = self.progress.losses, []
        line = {"loss": float(np.mean(losses))}
        if self.learning_rate is not None:
            # Not on an accelerator, which would finish its next step first.
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                line["learning_rate"] = float(self.learning_rate(step - 1))
        line |= dict(zip(self.program.norms, norms.tolist(), strict=True))
        now = time.perf_counter()
        if self.logged_at is not None:
            seconds = (now - self.logged_at) / len(losses)
            line["step_seconds"] = seconds
            line["examples_per_second"] = self.plan.batch_size / seconds
            if self.plan.flops and self.plan.peak:
                line["mfu"] = self.plan.flops / seconds / self.plan.peak
        self.logged_at = now
        return line

    def _evaluated(self, step: int, sums: Array) -> float:
        """Write the line of an evaluation; the test loss."""
        loss, accuracy = means(sums)
        self.records.add({"step": step, "test_loss": loss, "test_accuracy": accuracy})
        return loss

    def _save(self, step: int, state: State, score: float | None) -> None:
        self.progress.seconds = time.perf_counter() - self.clock
        self.progress.lines = len(self.records.lines)
        self.progress.recent = self.records.recent(_AVERAGED)
        self.records.sync()
        self.checkpoints.save(
            step,
            state,
            {
                "examples": self.feed.get_state(),
                "progress": dataclasses.asdict(self.progress),
            },
            score,
        )

    def _diverged(self, step: int, value: float) -> None:
        self.checkpoints.wait()
        good = self.checkpoints.latest()
        kept = "" if good is None else f" The checkpoint of step {good} is good."
        raise UserError(
            f"The training loss is {value} at step {step}; lower the learning rate, "
            "warm it up, or clip the gradients (clip_norm), and train in another "
            f"workdir.{kept}"
        )

    def stop_tracing(self) -> None:
        """Write the profiler's trace, if one is being taken."""
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def _traced(self, step: int) -> Any:
        """A step's mark in the profiler's trace, which starts and ends here."""
        if self.plan.profile:
            start, end = self.plan.profile
            if step == start:
                jax.profiler.start_trace(str(self.workdir / "profile"))
                self.tracing = True
            if step == end + 1:
                self.stop_tracing()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)


@contextlib.contextmanager
def _claimed(workdir: pathlib.Path, settings: dict[str, Any]) -> Iterator[None]:
    """The workdir is ours, in all processes once the first has claimed it."""
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            held.enter_context(workdirs.claim(workdir, settings))
        multihost_utils.sync_global_devices("claimed")
        if jax.process_index() > 0:
            _check_shared(workdir)
        yield


def _check_shared(workdir: pathlib.Path) -> None:
    """Raise unless this process sees the directory that process 0 has claimed."""
    until = time.monotonic() + _SHARED_WITHIN
    while workdirs.settings_of(workdir) is None:
        if time.monotonic() > until:
            raise UserError(
                f"process {jax.process_index()} does not see the run directory of "
                f"process 0 at {workdir}; give a --workdir that all machines share"
            )
        time.sleep(0.2)


def check(plan: Plan, program: Program, dataset: Dataset) -> None:
    """Refuse a plan that does not suit the devices or the dataset.

    Raises:
      UserError: in one sentence.
    """
    recipe = program.recipe
    for name, value in (
        ("batch_size", plan.batch_size),
        ("steps", plan.steps),
        ("eval_every", plan.eval_every),
        ("save_every", plan.save_every),
        ("keep_last", plan.keep_last),
        ("log_every", program.log_every),
        ("accumulate", recipe.accumulate),
    ):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more.")
    check_batch(plan.batch_size, program.mesh, recipe.accumulate)
    if plan.batch_size > dataset.train_size:
        raise UserError(
            f"batch_size {plan.batch_size} is more than the {dataset.train_size} "
            f"training examples of {dataset.name}; make it smaller."
        )


def _start(program: Program, model: nnx.Module) -> State:
    """The state of a model whose weights are there, copied to the mesh."""
    params, rest = parts(model)
    params = put(params, program.shardings["params"])
    rest = put(rest, program.shardings["rest"])
    start = jax.jit(program.start, out_shardings=program.shardings)
    return start(params, rest)


def _result(
    records: Records,
    checkpoints: Checkpoints,
    plan: Plan,
    progress: _Progress,
    resumed_from: int | None,
) -> TrainResult:
    curve, evals = records.curve(), records.evals()
    last = [loss for step, loss in curve if step > plan.steps - _AVERAGED]
    return TrainResult(
        train_loss=float(np.mean(last or progress.losses)),
        test_loss=evals[-1][1],
        test_accuracy=evals[-1][2],
        curve=curve,
        evals=evals,
        checkpoint=checkpoints.path(plan.steps),
        resumed_from=resumed_from,
        seconds=progress.seconds,
    )
