"""A user's own model as a task of a sweep, and what is said when its code fails."""

import contextlib
import dataclasses
import inspect
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from flax import nnx
from jaxtyping import Array, Float

from mupax.optim.coord_check import _split

from ..errors import UserError
from ..run.step import Hyper, Recipe
from . import fingerprint
from .tasks import Task, Training, own_training

_VERSION = "own-2"  # of the seeds' keys and of the order of examples

_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_REMEDIES = {
    "make_model": (
        "Use the hyperparameter in arithmetic only. One that decides a shape or a "
        "Python branch cannot be in the grid: call sweep once for each of its values."
    ),
    "make_optimizer": (
        "Use the hyperparameter in arithmetic only. An Optax schedule that compares "
        "its learning rate with 0 is written for a peak of 1: "
        "optim.scale_schedule(learning_rate, optax.warmup_cosine_decay_schedule(0.0, "
        "1.0, warmup_steps, decay_steps))."
    ),
    "loss": "Use jnp.where in place of a Python branch on values of the batch.",
}


@dataclasses.dataclass(frozen=True)
class OwnTask(Task):
    """One shape of the user's model.

    Attributes:
      width: of the model.
      depth: of the model.
      seeds: number of seeds.
      steps: of each run.
      batch_size: examples a step.
      average_last: a run's loss is the mean over its last steps.
      axes: the hyperparameters and their values, as pairs.
      make_model: as `api.sweep` takes it.
      make_optimizer: likewise.
      loss: likewise.
      guess: loss of a guesser; None where it is unknown.
      data: fingerprint of the data.
      settings: the user's own description of the code, as text; None to compare the
        lowered program.
      stop_diverged: as in `engine.Limits`; it changes the losses of diverged runs.
      program: fingerprint of what is computed; filled in by `bound`.
    """

    width: int
    depth: int
    seeds: int
    steps: int
    batch_size: int
    average_last: int
    axes: tuple[tuple[str, tuple[float, ...]], ...]
    make_model: Callable[..., Any]
    make_optimizer: Callable[..., optax.GradientTransformation]
    loss: Callable[[Any, Any], Float[Array, ""]]
    guess: float | None
    data: str = ""
    settings: str | None = None
    stop_diverged: bool = False
    program: str = ""
    parametrization: str = "own"

    @property
    def name(self) -> str:
        """The stem of its files."""
        return f"w{self.width}-d{self.depth}"

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The axes and their values."""
        return dict(self.axes)

    @property
    def chosen(self) -> dict[str, Any]:
        """Empty: no choices besides the grid."""
        return {}

    @property
    def key(self) -> str:
        """All that decides a run, but for its seed and place in the grid."""
        names = [name for name, _ in self.axes]
        numbers = (self.steps, self.batch_size, self.average_last, self.guess)
        code = self.program if self.settings is None else f"settings {self.settings}"
        stops = ", stop_diverged" if self.stop_diverged else ""
        return f"{_VERSION}, {names}, {numbers}{stops}, data {self.data}, {code}"

    def bound(self, data: Any) -> "OwnTask":
        """With the fingerprint of its program, made in the process that trains it.

        A worker may have imported a newer version of the user's file than the process
        that sent the task.
        """
        if self.settings is not None or self.program:
            return self
        found = fingerprint.of_training(self.training(data), self.grid, self.batch_size)
        if found is None:
            logging.warning(
                "%s calls functions outside of its compiled program "
                "(jax.pure_callback, io_callback or ffi_call). Whether they changed "
                "cannot be told, so it is trained again in every call. To reuse its "
                "results, pass settings=... with all that decides them.",
                self.name,
            )
            found = f"unknown {secrets.token_hex(8)}"
        return dataclasses.replace(self, program=found)

    def training(self, data: Any) -> Training:
        """The functions that are compiled."""
        sizes = {"width": self.width, "depth": self.depth}
        wanted = inspect.signature(self.make_model).parameters
        used = inspect.signature(self.make_optimizer).parameters

        def build(key: jax.Array, hyper: Hyper) -> Any:
            mine = {k: x for k, x in hyper.items() if k in wanted}
            with self._calling("make_model", mine):
                return self.make_model(key, **sizes, **mine)

        # One trace's model may not be used in another: each makes its own structure.
        def init(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
            params, rest, _ = _parts(build(key, hyper))
            if not jax.tree.leaves(params):
                raise UserError(
                    f"{self._named('make_model')} returned a model without parameters; "
                    "they are nnx.Param, 'params' of Linen, or floating-point jax.Array"
                )
            return params, rest

        def assemble(params: Any, rest: Any, hyper: Hyper) -> Any:
            # Of this one only the structure is used, so nothing else is compiled.
            twin = build(jax.random.key(0), hyper)
            return _parts(twin)[2](params, rest)

        def loss(
            params: Any, rest: Any, batch: Any, hyper: Hyper, key: Any
        ) -> tuple[jax.Array, tuple[Any, Any]]:
            model = assemble(params, rest, hyper)
            with self._calling("loss", {}):
                value = self.loss(model, batch)
            self._check_loss(value)
            return value, (value, _parts(model)[1])

        def optimizer(
            hyper: Hyper, params: Any, rest: Any
        ) -> optax.GradientTransformation:
            mine = {k: x for k, x in hyper.items() if k in used}
            model = assemble(params, rest, hyper)
            with self._calling("make_optimizer", mine):
                found = self.make_optimizer(model, **sizes, **mine)
            if not isinstance(found, optax.GradientTransformation):
                raise UserError(
                    f"{self._named('make_optimizer')} returned "
                    f"{type(found).__name__}; return an optax.GradientTransformation, "
                    "such as optim.adam(...)"
                )
            return _Guarded(self, mine, found).transformation

        return own_training(Recipe(loss, optimizer), init, data, self, self.guess)

    def _named(self, role: str) -> str:
        """A user's function in a sentence: its role, and its name and line."""
        function = getattr(self, role)
        while hasattr(function, "func"):  # a functools.partial
            function = function.func
        name = getattr(function, "__qualname__", type(function).__name__)
        code = getattr(function, "__code__", None)
        line = f", line {code.co_firstlineno} of {code.co_filename}" if code else ""
        return f"{role} ({name}{line})"

    @contextlib.contextmanager
    def _calling(self, role: str, hyper: Hyper) -> Iterator[None]:
        """Say which function failed, for which shape, with which values traced."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            traced = f" and traced {', '.join(hyper)}" if hyper else ""
            said = (str(error).strip() or "no message").splitlines()[0]
            remedy = _REMEDIES[role] if isinstance(error, _TRACED) else ""
            raise UserError(
                f"{self._named(role)} failed at width={self.width}, "
                f"depth={self.depth}{traced}: {type(error).__name__}: {said}"
                + (f" {remedy}" if remedy else "")
            ) from error

    def _check_loss(self, value: Any) -> None:
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            raise UserError(
                f"{self._named('loss')} returned {dtype}{list(shape)} at "
                f"width={self.width}, depth={self.depth}; return one floating-point "
                "number, such as the mean over the batch"
            )


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """An optimizer whose errors name the function that made it."""

    task: OwnTask
    hyper: Hyper
    inner: optax.GradientTransformation

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The same transformation."""
        inner = optax.with_extra_args_support(self.inner)

        def init(params: Any) -> Any:
            with self.task._calling("make_optimizer", self.hyper):
                return inner.init(params)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            with self.task._calling("make_optimizer", self.hyper):
                return inner.update(updates, state, params, **more)

        return optax.GradientTransformationExtraArgs(init, update)


def _parts(model: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """(parameters, variables that change beside them, what puts both back)."""
    if isinstance(model, nnx.Module):
        graph, params, *others = nnx.split(model, nnx.Param, ...)
        rest = others[0]
        return params, rest, lambda p, r: nnx.merge(graph, p, r, copy=True)
    params, assemble = _split(model)
    return params, (), lambda p, _: assemble(p)
