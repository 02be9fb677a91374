"""Train one model to the end: on every device, killed and started again at will."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from .checkpoints import open_checkpoints
from .data import ImageData, batches, normalize
from .errors import UserError
from .workdir import claim

_AVERAGED = 50  # steps that the reported training loss is the mean of


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
      train_loss: cross-entropy in nats, mean over the last 50 steps.
      test_loss: mean cross-entropy of the test split after the last step.
      test_accuracy: share of the test split that is classified right, 0..1.
      curve: (step, training loss) of every step, counted from 1.
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
class _History:
    """All that is remembered of the steps so far, on the host."""

    losses: list[float] = dataclasses.field(default_factory=list)
    evals: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def train(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    data: ImageData,
    *,
    workdir: pathlib.Path,
    batch_size: int,
    steps: int,
    seed: int,
    eval_every: int,
    save_every: int,
    mesh: Mesh | None = None,
    on_step: Callable[[int, float], None] | None = None,
    fingerprint: dict[str, Any] | None = None,
) -> TrainResult:
    """Trains a classifier of images; a killed run goes on from its last checkpoint.

    On the same devices, a run that was killed ends with the same weights, bit for
    bit, and the same curve as one that was not.

    Args:
      model: takes float32 (batch, height, width, channels), normalized, and gives
        logits (batch, classes). Its `nnx.Param`s are trained, in place; its other
        variables (frozen weights, statistics, random streams) are carried along.
      tx: the optimizer, with its learning rate.
      data: the dataset.
      workdir: directory of this run alone.
      batch_size: examples in a step, over all devices.
      steps: how many to train for.
      seed: of the order of the examples. The model comes initialized.
      eval_every: steps between evaluations on the test split; the last step has one.
      save_every: steps between checkpoints; the last step has one.
      mesh: its axis "data" shards the batch; all devices by default.
      on_step: called with (step, training loss) one step late, and with the step that
        a run goes on from.
      fingerprint: JSON-ready settings that decide the result, learning rate and model
        among them. A workdir goes on only with the settings that it began with.

    Raises:
      UserError: if the workdir holds a run of other settings (nothing in it is
        touched), the batch does not suit the devices or the dataset, or the loss
        stops being finite.
    """
    started = time.perf_counter()

    # ----- Checks and claim: nothing is written before all of it is known to fit.
    mesh = mesh or data_mesh()
    _check(data, batch_size, mesh, steps, eval_every, save_every)
    settings = {
        "settings": fingerprint or {},
        "dataset": data.name,
        "batch_size": batch_size,
        "steps": steps,
        "seed": seed,
        "eval_every": eval_every,
    }
    if jax.process_index() == 0:
        claim(workdir, settings)
    multihost_utils.sync_global_devices("claimed")
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("data"))

    # ----- Model and optimizer, replicated. Copied, for the steps donate their input
    # and a caller whose run fails still holds the model.
    model.train()
    graph, *variables = nnx.split(model, nnx.Param, ...)
    params, rest = _replicate(variables, replicated)
    optimizer = _replicate(jax.jit(tx.init)(params), replicated)
    state = {"params": params, "rest": rest, "optimizer": optimizer}

    def step_fn(
        state: dict[str, Any], batch: dict[str, Array]
    ) -> tuple[dict[str, Any], Float[Array, ""]]:
        def loss_fn(params: nnx.State) -> tuple[Float[Array, ""], nnx.State]:
            net = nnx.merge(graph, params, state["rest"], copy=True)
            logits = net(normalize(batch["image"], data.mean, data.std))
            loss = cross_entropy(logits, batch["label"]).mean()
            return loss, nnx.state(net, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, optimizer = tx.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "optimizer": optimizer}, loss

    train_step = jax.jit(
        step_fn,
        donate_argnums=0,
        in_shardings=(replicated, sharded),
        out_shardings=replicated,
    )

    # ----- Resume: first the arrays, then the order of the examples and the history
    # that go with them, all from one checkpoint; last the first new step.
    examples = batches(data, batch_size, seed)
    history = _History()
    first, resumed_from = 1, None
    with open_checkpoints(workdir / "checkpoints") as checkpoints:
        if restored := checkpoints.restore(like=state):
            state = restored.state
            examples.set_state(restored.progress["examples"])
            history = _History(**restored.progress["history"])
            history.evals = [(int(n), loss, acc) for n, loss, acc in history.evals]
            first, resumed_from = restored.step + 1, restored.step
            logging.info("Going on from step %d in %s.", resumed_from, workdir)
            if on_step:
                on_step(resumed_from, history.losses[-1])
        before = history.seconds

        def record(step: int, loss: Float[Array, ""]) -> None:
            value = float(jax.device_get(loss))
            if not math.isfinite(value):
                raise UserError(
                    f"The training loss is {value} at step {step}; lower the learning "
                    "rate, warm it up, or clip the gradients "
                    "(optax.clip_by_global_norm), and train in another workdir."
                )
            history.losses.append(value)
            if on_step:
                on_step(step, value)

        # ----- Loop. Losses are fetched one step late, so that the device always has
        # the next step to do; evaluations when there is a checkpoint to write.
        test = None
        last_loss: Float[Array, ""] | None = None
        scores: list[tuple[int, Float[Array, " 2"]]] = []
        for step in range(first, steps + 1):
            state, loss = train_step(state, _place(next(examples), sharded))
            if last_loss is not None:
                record(step - 1, last_loss)
            last_loss = loss
            if step % eval_every == 0 or step == steps:
                test = test or _tester(model, data, 4 * batch_size, mesh)
                scores.append((step, test(state["params"], state["rest"])))
            if step % save_every == 0 or step == steps:
                # Saving waits for this step in any case: the state is copied.
                record(step, last_loss)
                last_loss = None
                for when, score in scores:
                    test_loss, accuracy = jax.device_get(score).tolist()
                    history.evals.append((when, test_loss, accuracy))
                scores.clear()
                history.seconds = before + time.perf_counter() - started
                progress = {
                    "examples": examples.get_state(),
                    "history": dataclasses.asdict(history),
                }
                checkpoints.save(step, state, progress)
        examples.close()

    # ----- Result.
    nnx.update(model, state["params"], state["rest"])
    _, test_loss, accuracy = history.evals[-1]
    return TrainResult(
        train_loss=float(np.mean(history.losses[-_AVERAGED:])),
        test_loss=test_loss,
        test_accuracy=accuracy,
        curve=list(enumerate(history.losses, start=1)),
        evals=history.evals,
        checkpoint=checkpoints.path(steps),
        resumed_from=resumed_from,
        seconds=history.seconds,
    )


def evaluate(
    model: nnx.Module,
    data: ImageData,
    *,
    batch_size: int = 256,
    mesh: Mesh | None = None,
) -> tuple[float, float]:
    """Mean cross-entropy (nats) and accuracy (0..1) on the whole test split.

    Raises:
      UserError: if the batch does not divide over the devices.
    """
    mesh = mesh or data_mesh()
    _check_divides(batch_size, mesh)
    _, *variables = nnx.split(model, nnx.Param, ...)
    params, rest = _replicate(variables, NamedSharding(mesh, PartitionSpec()))
    test = _tester(model, data, batch_size, mesh)
    loss, accuracy = jax.device_get(test(params, rest))
    return float(loss), float(accuracy)


def data_mesh() -> Mesh:
    """All devices along one axis, "data"."""
    # Auto: the compiler shards what lies between the shardings that we give.
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def cross_entropy(
    logits: Float[Array, "batch classes"], labels: Int32[Array, " batch"]
) -> Float[Array, " batch"]:
    """Cross-entropy of each example, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _tester(
    model: nnx.Module, data: ImageData, batch_size: int, mesh: Mesh
) -> Callable[[nnx.State, nnx.State], Float[Array, " 2"]]:
    """A function of (params, rest) to (loss, accuracy), which does not wait for it.

    The test split is put on the devices once. The last batch is padded, and masked, so
    that all have one shape and one compilation does.
    """
    model.eval()
    graph, *_ = nnx.split(model, nnx.Param, ...)
    model.train()
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("data"))

    n = len(data.test_labels)
    staged = []
    for start in range(0, n, batch_size):
        # This process's part of the batch.
        share = batch_size // jax.process_count()
        index = start + share * jax.process_index() + np.arange(share)
        clipped = np.minimum(index, n - 1)
        part = {
            "image": data.test_images[clipped],
            "label": data.test_labels[clipped],
            "counts": (index < n).astype(np.float32),
        }
        staged.append(_place(part, sharded))

    def sums(
        params: nnx.State, rest: nnx.State, batch: dict[str, Array]
    ) -> Float[Array, " 2"]:
        net = nnx.merge(graph, params, rest, copy=True)
        logits = net(normalize(batch["image"], data.mean, data.std))
        losses = cross_entropy(logits, batch["label"])
        hits = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        return jnp.stack([losses, hits]) @ batch["counts"]

    summed = jax.jit(sums, out_shardings=replicated)
    mean = jax.jit(lambda parts: sum(parts) / n)
    return lambda params, rest: mean([summed(params, rest, b) for b in staged])


def _replicate(tree: Any, sharding: NamedSharding) -> Any:
    """A copy of every array on every device; what is donated is never the original."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding, may_alias=False)
    # device_put does not reach the devices of other processes; a program does.
    copy = jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=sharding)
    return copy(tree)


def _place(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, Array]:
    return {
        key: jax.make_array_from_process_local_data(sharding, value)
        for key, value in batch.items()
    }


def _check(
    data: ImageData,
    batch_size: int,
    mesh: Mesh,
    steps: int,
    eval_every: int,
    save_every: int,
) -> None:
    for name, value in (
        ("batch_size", batch_size),
        ("steps", steps),
        ("eval_every", eval_every),
        ("save_every", save_every),
    ):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more.")
    _check_divides(batch_size, mesh)
    if batch_size > len(data.train_labels):
        raise UserError(
            f"batch_size {batch_size} is more than the {len(data.train_labels)} "
            f"training examples of {data.name}; make it smaller."
        )


def _check_divides(batch_size: int, mesh: Mesh) -> None:
    devices = mesh.shape["data"]
    if batch_size % devices:
        above = math.ceil(batch_size / devices) * devices
        raise UserError(
            f"batch_size {batch_size} does not divide over {devices} devices; use a "
            f"multiple of {devices}, such as {above}."
        )
