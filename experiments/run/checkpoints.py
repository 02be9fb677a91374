"""Checkpoints of a run, which Orbax writes in the background."""

import contextlib
import errno
import functools
import logging
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from .. import io
from ..errors import UserError, reason
from . import processes
from .collectives import as_key, broadcast, gathered, is_key, meet, scattered

# The leaves of a tree by names such as "params.kernel".
_named = functools.partial(ocp.tree.to_flat_dict, sep=".")
_TOGETHER = ocp.options.MultiprocessingOptions()
_ALONE = ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone"
)


class _Manager(ocp.CheckpointManager):
    """Leaves SIGTERM to `stop_requests`.

    Orbax asks JAX in a thread of process 0 whether to stop at the step of a checkpoint,
    after later steps. JAX keeps the number of the last question: process 0 would not
    stop with the others, which wait for it.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
      step: number of trained steps.
      state: pytree of arrays, sharded as requested.
      progress: the JSON data of the checkpoint.
    """

    step: int
    state: Any
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory, each named by its step.

    All processes call these methods. Orbax writes a checkpoint to a temporary directory
    and renames it, so that a killed save leaves no checkpoint.
    """

    def __init__(
        self, manager: ocp.CheckpointManager | None, folder: pathlib.Path, alone: bool
    ):
        """`manager` is None in a process that has no directory."""
        self._manager, self._folder, self._alone = manager, folder, alone

    def save(
        self,
        step: int,
        state: Any,
        progress: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Copy the state off the device, and write it in the background.

        Where only process 0 writes, the processes wait while it gathers the state. It
        needs main memory for the state, and a device of each process needs room for
        the largest array.

        Args:
          step: number of trained steps.
          state: a pytree of JAX arrays, or of NumPy arrays. It may be donated as soon
            as this returns.
          progress: JSON-ready data. It must not change afterwards.
          score: test loss of these weights, if known.

        Raises:
          UserError: this checkpoint, or the one before, could not be written.
        """
        if self._alone:
            self.wait()  # so that process 0 holds one state at most
            state = gathered(jax.tree.map(_words, state))
        if self._manager is None:
            return
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    progress=ocp.args.JsonSave(progress),
                ),
                # Orbax warns if there are no metrics.
                metrics={"score": math.inf if score is None else score},
            )

    def wait(self) -> None:
        """Wait until all checkpoints are written; raise UserError if one cannot be."""
        if self._manager:
            with self._writing():
                self._manager.wait_until_finished()
        if self._alone:
            meet()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint; none in a process without the directory."""
        if self._manager is None:
            return []
        self._manager.reload()
        return list(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest step that has a checkpoint, if any."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the lowest test loss; None if no checkpoint has one."""
        assert self._manager
        self._manager.reload()
        step = self._manager.best_step()
        if step is None or math.isinf(_score(self._manager.metrics(step))):
            return None
        return step

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise whatever they do
            good = None
            with contextlib.suppress(OSError):  # the directory may be gone
                good = self.latest()
            last = f"the last one is of step {good}"
            kept = "there is none" if good is None else last
            why, remedy = reason(error), "Run"
            if full := _full(error):
                why, remedy = full, "Make room, and run"
            elif isinstance(error, TimeoutError):  # Orbax asks the system's clock
                why = "writing took longer than 20 minutes, or the clock was set"
            raise UserError(
                f"A checkpoint could not be written to {self._folder} "
                f"({why}; {kept}). {remedy} the same command again."
            ) from error

    def restore(self, like: Any) -> Restored | None:
        """The newest checkpoint, or None if there are no checkpoints.

        Args:
          like: arrays or `jax.ShapeDtypeStruct`s: shapes and shardings of the state.
            NumPy arrays for NumPy arrays.

        Raises:
          UserError: it cannot be read. Its files are unchanged.
        """
        step = broadcast(self._manager.latest_step() if self._manager else None)
        if step is None:
            return None
        wanted = jax.tree.map(_empty, like) if self._alone else like
        state, progress = wanted, dict[str, Any]()
        try:
            if not self._alone:  # a network disk may hide it from other processes
                io.appears(self.path(step))
            if self._manager:
                path = self.path(step)
                state = _read(path, wanted, alone=self._alone)
                progress = read_progress(path)
        # A damaged file can raise anything, from TensorStore, msgpack or json.
        except Exception as error:
            raise UserError(
                f"the checkpoint {self.path(step)} cannot be read ({reason(error)}); "
                "the model or the optimizer may have changed, or the files are "
                "damaged. Use another workdir, or remove this checkpoint to resume "
                "from the one before"
            ) from error
        if self._alone:
            state, progress = scattered(state, like), broadcast(progress)
        return Restored(step, state, progress)

    def path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)


@contextlib.contextmanager
def open_checkpoints(
    folder: pathlib.Path,
    *,
    keep_last: int = 2,
    keep_best: bool = False,
    alone: bool = False,
    reads: bool = False,
) -> Iterator[Checkpoints]:
    """Opens the checkpoints in a directory, and waits for writes at the end.

    Args:
      folder: the directory.
      keep_last: number of newest checkpoints to keep.
      keep_best: keep the checkpoint of the lowest score too.
      alone: only process 0 has the directory, and writes and reads for all.
      reads: only looks, maybe while another process writes. Only process 0 does.
    """
    folder = folder.absolute()
    if alone and jax.process_index() > 0:
        checkpoints = Checkpoints(None, folder, alone)
        yield checkpoints
        checkpoints.wait()
        return
    policies = ocp.checkpoint_managers
    keep = [policies.LatestN(keep_last)]
    if keep_best:
        best = policies.BestN(
            get_metric_fn=_score,
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        keep.append(best)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        best_fn=_score,
        best_mode="min",
        cleanup_tmp_directories=not reads,
        create=not alone,
        multiprocessing_options=_ALONE if alone else _TOGETHER,
    )
    if alone:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        manager = _Manager(folder, options=options)
        manager.best_step()  # reads the scores
    except Exception as error:  # as in `Checkpoints.restore`
        raise UserError(
            f"the checkpoints in {folder} cannot be read ({reason(error)}); remove the "
            "damaged one to resume from another"
        ) from error
    checkpoints = Checkpoints(manager, folder, alone)
    try:
        yield checkpoints
        if not reads:
            checkpoints.wait()
    except BaseException as error:
        # Closing may wait for other processes, which may wait for this one.
        processes.announce(error)
        # Closing would raise errors of background writes in place of this error.
        with contextlib.suppress(Exception):
            manager.close()
        raise
    manager.close()


def _full(error: BaseException | None) -> str | None:
    """What an error, or its cause, says of a full disk or a limit of sizes, if any."""
    if error is None:
        return None
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # Orbax and TensorStore give no number, only the text of the system.
        text = os.strerror(number)
        if getattr(error, "errno", None) == number or text in str(error):
            return text
    return _full(error.__cause__ or error.__context__)


def _is_news(record: logging.LogRecord) -> bool:
    # `save` and `wait` raise failed writes; Orbax also logs a traceback per thread.
    known = (
        "_SignalingThread",
        "background save thread",
        "Save Finalize thread",
        "Checkpointer failed",
        "Failed to write metadata",
        "Failed to update metadata",
    )
    # Of the rest, e.g. an old checkpoint that cannot be removed, one line is enough.
    if record.exc_info and "orbax" in pathlib.Path(record.pathname).parts:
        error = record.exc_info[1]
        record.exc_info = None
        if error is not None:
            record.msg, record.args = f"{record.getMessage()} ({reason(error)})", ()
    return not any(text in str(record.msg) for text in known)


logging.getLogger("absl").addFilter(_is_news)


def _score(metrics: Any) -> float:
    return float(metrics["score"])


def load_weights(
    model: nnx.Module, checkpoint: pathlib.Path, *, ema: bool = False
) -> None:
    """Load the weights of a checkpoint into a model of the same shape, in place.

    `checkpoint` is the directory of one step, e.g. `TrainResult.checkpoint`. `ema` asks
    for its moving average.

    Raises:
      UserError: not a checkpoint of this model.
    """
    _, *variables = nnx.split(model, nnx.Param, ...)
    nnx.update(model, *read_weights(checkpoint, *variables, ema=ema))


def read_weights(
    checkpoint: pathlib.Path,
    params: Any,
    rest: Any,
    *,
    ema: bool = False,
    alone: bool = False,
) -> tuple[Any, Any]:
    """The weights of a checkpoint: parameters, and the model's other variables.

    Args:
      checkpoint: directory of one step.
      params: arrays, or `jax.ShapeDtypeStruct`s with shardings.
      rest: the same for the other variables.
      ema: read the moving average of the weights.
      alone: only process 0 has the directory.

    Raises:
      UserError: not a checkpoint of this model.
    """
    weights = "ema" if ema else "params"
    wanted = {weights: params, "rest": rest}
    like = jax.tree.map(_empty, wanted) if alone else wanted
    if alone and jax.process_index() > 0:
        found = scattered(like, wanted)
        return found[weights], found["rest"]
    try:
        found = _read(checkpoint, like, alone=alone)
    except Exception as error:  # see Checkpoints.restore
        raise UserError(
            f"{checkpoint} does not hold weights of this model ({reason(error)}); give "
            "the directory of one step, e.g. target/checkpoints/600."
        ) from error
    found = scattered(found, wanted) if alone else found
    return found[weights], found["rest"]


def _read(checkpoint: pathlib.Path, like: Any, *, alone: bool) -> Any:
    """The arrays of a checkpoint, or some of them. Any exception is of a damaged one.

    `like` has NumPy arrays for NumPy arrays.
    """
    abstract = jax.tree.map(
        # NumPy arrays stay, so that Orbax returns such.
        lambda x: (
            x if isinstance(x, np.ndarray) else ocp.utils.to_shape_dtype_struct(x)
        ),
        like,
    )
    _check_shapes(checkpoint, abstract)
    options: Any = {"multiprocessing_options": _ALONE if alone else _TOGETHER}
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler, **options) as reader:
        found = reader.restore(
            checkpoint.absolute() / "state",
            args=ocp.args.PyTreeRestore(
                item=abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=True,
            ),
        )
    # Random keys, where their words were gathered.
    return jax.tree.map(
        lambda leaf, k: as_key(leaf, k) if is_key(k) and not is_key(leaf) else leaf,
        found,
        like,
    )


def read_progress(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The progress that `Checkpoints.save` wrote; raises `io.Damaged`."""
    return io.read_json(checkpoint / "progress" / "metadata")


def _check_shapes(checkpoint: pathlib.Path, like: Any) -> None:
    """Raise ValueError if a checkpoint lacks an array or has it in another shape.

    Orbax would detect this only while it reads, and leave its other reads unfinished.
    """
    stored = ocp.PyTreeCheckpointHandler().metadata(checkpoint.absolute() / "state")
    in_file = _named(stored.tree)
    for name, leaf in _named(like).items():
        if name not in in_file:
            raise ValueError(f"it has no {name}")
        # Orbax stores a key as an array of words.
        stored_as = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        shape = stored_as.shape
        if (actual := in_file[name].shape) != shape:
            raise ValueError(f"its {name} has shape {actual}; expected {shape}")


def _words(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _empty(leaf: Any) -> np.ndarray:
    """A NumPy array of the shape; the memory is not touched."""
    if is_key(leaf):
        words = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        leaf = jax.eval_shape(jax.random.key_data, words)
    return np.empty(leaf.shape, leaf.dtype)
