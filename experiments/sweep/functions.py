"""A task that trains a user's model, and the errors of the user's functions."""

import contextlib
import dataclasses
import functools
import inspect
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.interpreters import partial_eval
from jaxtyping import Array, Float

from mupax.optim.check.coord_check import _split
from mupax.optim.check.probing import acting
from mupax.optim.scales.paths import flatten

from ..errors import UserError
from ..run.step import Hyper, Recipe
from . import fingerprint
from .tasks import Point, Task, Training, keys_of, orders

KEY = "model"  # of the verdicts, in place of a parametrization
_VERSION = "model-1"  # of the seeds' keys and of the order of examples

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
        "lambda step: learning_rate * optax.warmup_cosine_decay_schedule(0.0, 1.0, "
        "warmup_steps, decay_steps)(step)."
    ),
    "loss": "Use jnp.where in place of a Python branch on values of the batch.",
}


def training_of(
    recipe: Recipe,
    init: Callable[[jax.Array, Hyper], tuple[Any, Any]],
    examples: Any,
    task: Task,
    guess: float | None = None,
    prepare: Callable[[Point], None] = lambda point: None,
) -> Training:
    """The training of a recipe on examples in memory, a pytree of arrays.

    `init` is (key, hyper) -> (params, rest); `guess` is chance-level loss, or None;
    `prepare` is called before each step is traced.
    """
    count = len(jax.tree.leaves(examples)[0])

    def start(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
        point = hyper if isinstance(hyper, Point) else Point(hyper)
        return recipe.start(*init(key, point), point), ()

    def step(state: Any, fixed: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
        if not isinstance(hyper, Point):
            hyper = Point(hyper)
            prepare(hyper)
        state, out = recipe.step(state, batch, hyper, key)
        return state, out.plain

    def feed(seeds: Sequence[int]) -> tuple[jax.Array, np.ndarray, Any]:
        rows = orders(count, task.batch_size, seeds, task.steps)
        return keys_of(seeds), rows, examples

    return Training(start, step, feed, guess)


@dataclasses.dataclass(frozen=True)
class FunctionTask(Task):
    """Runs of a user's model of one shape; the functions are those of `mupax.sweep`."""

    width: int
    depth: int
    seeds: int
    steps: int
    batch_size: int
    average_last: int
    grid: Mapping[str, tuple[float, ...]]
    make_model: Callable[..., Any]
    make_optimizer: Callable[..., optax.GradientTransformation]
    loss: Callable[..., Float[Array, ""]]
    guess: float | None  # chance-level loss
    data: str = ""  # fingerprint
    program: str = ""  # fingerprint of what is computed; `bound` sets it
    parametrization: str = KEY

    @property
    def name(self) -> str:
        return f"w{self.width}-d{self.depth}"

    @property
    def key(self) -> str:
        numbers = (self.steps, self.batch_size, self.average_last, self.guess)
        known = f"{numbers}, data {self.data}, {self.program}"
        return f"{_VERSION}, {list(self.grid)}, {known}"

    def bound(self, data: Any) -> "FunctionTask":
        """The same task with the fingerprint of its program.

        Called in the process that trains the task: a worker may have imported a newer
        version of the user's file than the process that sent the task.
        """
        if self.program:
            return self
        program = fingerprint.of_training(
            self.training(data), self.grid, self.batch_size
        )
        if program is None:
            logging.warning(
                "%s calls back into Python (jax.pure_callback or io_callback). mupax "
                "cannot compare the Python code, so it is trained again in every call.",
                self.name,
            )
            program = f"unknown {secrets.token_hex(8)}"
        return dataclasses.replace(self, program=program)

    def is_scaled(self) -> bool:
        """Whether a scaling of mupax acts in the optimizer; found by tracing it."""
        scalings = []

        def trace(key: jax.Array) -> None:
            point = self._point
            params, rest = self._init(key, point)
            tx = self._optimizer(point, params, rest)
            scalings.append(acting(tx, params))

        jax.eval_shape(trace, jax.random.key(0))
        return scalings[-1] is not None

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the model's parameters; found by tracing it."""
        init = lambda key: self._init(key, self._point)[0]  # noqa: E731
        params = jax.eval_shape(init, jax.random.key(0))
        return [x.shape for x in jax.tree.leaves(params)]

    def uses_key(self) -> bool:
        """Whether the key changes the parameters; found by tracing it."""
        init = lambda key: self._init(key, self._point)[0]  # noqa: E731
        traced = jax.make_jaxpr(init)(jax.random.key(0)).jaxpr
        return partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))[1][0]

    @property
    def _point(self) -> Point:
        """The first point of the grid."""
        first = {name: jnp.float32(values[0]) for name, values in self.grid.items()}
        return Point(first)

    def training(self, data: Any) -> Training:
        takes_key = "key" in inspect.signature(self.loss).parameters

        def loss(
            params: Any, rest: Any, batch: Any, hyper: Hyper, key: Any
        ) -> tuple[jax.Array, tuple[Any, Any]]:
            model = self._assemble(params, rest, hyper)
            more = {"key": key} if takes_key else {}
            with self._calling("loss", {}):
                value = self.loss(model, batch, **more)
            if not hasattr(value, "dtype") and not isinstance(value, int | float):
                raise UserError(
                    f"{self._named('loss')} returned a {type(value).__name__} at "
                    f"width={self.width}, depth={self.depth}; return the loss alone, "
                    "one floating-point number"
                )
            shape, dtype = jnp.shape(value), jnp.result_type(value)
            if shape != () or not jnp.issubdtype(dtype, jnp.floating):
                raise UserError(
                    f"{self._named('loss')} returned {dtype}{list(shape)} at "
                    f"width={self.width}, depth={self.depth}; return one "
                    "floating-point number, such as the mean over the batch"
                )
            after = _split(model, jax.tree.leaves(rest))[1]
            self._check_rest(rest, after)
            return value, (value, after)

        recipe = Recipe(loss, self._optimizer)
        return training_of(recipe, self._init, data, self, self.guess, self._prepare)

    def _check_rest(self, before: Any, after: Any) -> None:
        """Raise UserError if a loss adds variables to the model, or removes some."""
        one, other = (dict(flatten(tree)) for tree in (before, after))
        if changed := sorted(one.keys() ^ other.keys()):
            raise UserError(
                f"{self._named('loss')} changes which variables the model has, at "
                f"{changed[0]!r}; remove in the loss what was sown: "
                "nnx.pop(model, nnx.Intermediate)"
            )

    def _build(self, key: jax.Array, hyper: Hyper) -> Any:
        taken = self._taken("make_model", hyper)
        with self._calling("make_model", taken):
            return self.make_model(key, width=self.width, depth=self.depth, **taken)

    def _init(self, key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
        """The model's parameters and other variables."""
        # A swept value that the model keeps is not trained.
        model = self._build(key, hyper)
        params, rest, structure = _split(model, tuple(hyper.values()))
        if isinstance(hyper, Point):
            hyper.structure = structure
        if not jax.tree.leaves(params):
            raise UserError(
                f"{self._named('make_model')} returned a model without parameters; "
                "they are nnx.Param, 'params' of Linen, or floating-point jax.Array"
            )
        return params, rest

    def _prepare(self, hyper: Point) -> None:
        """Build a model, and keep its structure: none of its computation is compiled.

        A model of one trace cannot be used in another.
        """
        model = self._build(jax.random.key(0), hyper)
        hyper.structure = _split(model, tuple(hyper.values()))[2]

    def _assemble(self, params: Any, rest: Any, hyper: Hyper) -> Any:
        """The model with these variables."""
        assert isinstance(hyper, Point)
        return hyper.structure(params, rest)

    def _optimizer(
        self, hyper: Hyper, params: Any, rest: Any
    ) -> optax.GradientTransformation:
        taken = self._taken("make_optimizer", hyper)
        model = self._assemble(params, rest, hyper)
        with self._calling("make_optimizer", taken):
            tx = self.make_optimizer(model, width=self.width, depth=self.depth, **taken)
        if not isinstance(tx, optax.GradientTransformation):
            raise UserError(
                f"{self._named('make_optimizer')} returned {type(tx).__name__}; "
                "return an optax.GradientTransformation, such as optim.adam(...)"
            )
        return self._guarded(tx, taken)

    def _taken(self, role: str, hyper: Hyper) -> Hyper:
        """The hyperparameters that a user's function takes."""
        known = inspect.signature(getattr(self, role)).parameters
        return {name: value for name, value in hyper.items() if name in known}

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
            message = (str(error).strip() or "no message").splitlines()[0]
            remedy = f" {_REMEDIES[role]}" if isinstance(error, _TRACED) else ""
            raise UserError(
                f"{self._named(role)} failed at width={self.width}, "
                f"depth={self.depth}{traced}: {type(error).__name__}: {message}{remedy}"
            ) from error

    def _guarded(
        self, tx: optax.GradientTransformation, hyper: Hyper
    ) -> optax.GradientTransformation:
        """The same optimizer; its errors name the function that made it."""
        inner = optax.with_extra_args_support(tx)

        def init(params: Any) -> Any:
            with self._calling("make_optimizer", hyper):
                return inner.init(params)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            with self._calling("make_optimizer", hyper):
                return inner.update(updates, state, params, **more)

        return optax.GradientTransformationExtraArgs(init, update)
