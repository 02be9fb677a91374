"""`coord_check`: check that activations change by the same amount at every size."""

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..apply.transforms import resolve
from ..reading.leaves import is_nnx
from ..reading.lists import NUMBER, read_lists
from ..rules.multipliers import carried
from ..scales.paths import flatten
from ..scales.patterns import Pattern
from .activations import STREAM, Layer, Recording
from .coord_verdict import CoordCheck, Facts
from .probing import acting

Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[..., optax.GradientTransformation]
)

# Relative depths in a stack of layers at which changes are compared.
_POSITIONS = (0.25, 0.5, 0.75, 1.0)


def coord_check(
    build: Callable[..., Any],
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    *,
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    steps: int = 3,
    seeds: int = 4,
    layers: str | None = None,
    tolerance: float = 0.15,
) -> CoordCheck:
    """Train a few steps at several sizes, and fit how changes scale with size.

    Under a correct parametrization the activations of every layer change by the same
    amount at every width and depth: the slope of log |Δ activation| against log size is
    zero. They are read from the program of `loss`: the product of each parameter, the
    residual stream after each branch, and the outputs, with their lines of code. Layers
    of a stack are compared at the same relative depth.

    Args:
      build: `build(key, width=...)`, `build(key, depth=...)` or both, as swept. Returns
        a model initialized from a random key: an NNX or Equinox module, Linen
        variables, Haiku parameters, any pytree.
      optimizer: an `optax.GradientTransformation`, or a function
        `optimizer(model, width=...)` that returns one for a model of that size.
      loss: `loss(model, batch)`, the model's outputs (logits), of which the check
        minimizes a fixed random linear function, whose gradient does not depend on
        their initial size; or a scalar, which it minimizes. None calls `model(batch)`,
        or `model(batch[0])` for a tuple.
      batch: the training batch, a pytree of arrays, the same at each step.
      widths, depths: the sizes to sweep, each at the first of the other.
      steps: number of training steps.
      seeds: number of initializations; with one, every slope is unclear.
      layers: regular expression, searched in the names of the layers to compare, e.g.
        "^stream" for the residual stream.
      tolerance: the largest |slope| that counts as zero.

    Returns:
      A `CoordCheck`: print it, or read `.verdict`, `.slopes`, `.hints`, `.passed`.

    Raises:
      ValueError: fewer than two sizes; a setting out of range; `build` or `optimizer`
        returns a wrong type, or ignores its key or its size; no layer is found; a
        branch is multiplied by a number that cannot be read.

    Source: Tensor Programs V (arXiv:2203.03466), appendix D.1 (width); Tensor
    Programs VI, Definition 7.2 (depth).

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def build(key, width):
      ...     first, last = jax.random.split(key)
      ...     return {"first": jax.random.normal(first, (8, width)) / 8**0.5,
      ...             "readout": jax.random.normal(last, (width, 1)) / width**0.5}
      >>> check = optim.coord_check(
      ...     build,
      ...     optax.adam(1e-2),  # the standard parametrization
      ...     lambda p, x: jnp.tanh(x @ p["first"]) @ p["readout"],
      ...     jnp.eye(8),
      ...     widths=(64, 256, 1024),
      ... )
      >>> check.verdict.value, ("width", "readout") in check.failed
      ('wrong', True)
    """
    sweeps = _sweeps(widths, depths)
    for name, count in (("steps", steps), ("seeds", seeds)):
        if not isinstance(count, numbers.Integral) or count < 1:
            raise ValueError(f"{name}={count!r} must be at least 1, a whole number")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance} must be a slope, e.g. 0.15")
    if batch is None:
        raise ValueError(
            "batch is missing; pass the batch that loss(model, batch) takes"
        )
    wanted = None if layers is None else Pattern("layers", layers)
    keys = jnp.stack([jax.random.key(i) for i in range(seeds)])
    sizes: dict[str, tuple[int, ...]] = {}
    changes: dict[str, dict[str, np.ndarray]] = {}
    facts: dict[str, Facts] = {}
    # Compiling takes longer than running a few steps.
    quick = {"xla_backend_optimization_level": 1}
    options = quick if jax.default_backend() == "cpu" else {}
    for axis, settings in sweeps.items():
        runs = [_Run(build, optimizer, loss, s, steps) for s in settings]
        for run in runs:
            program = jax.jit(jax.vmap(run, (0, None)), compiler_options=options)
            run.result, run.drawn = jax.device_get(program(keys, batch))
        _check_built(axis, runs, seeds)
        sizes[axis] = tuple(s[axis] for s in settings)
        rows = _compare(runs, axis, wanted)
        changes[axis] = {name: values[:, 1:] for name, (values, _) in rows.items()}
        facts[axis] = Facts(
            {name: values[:, 0].mean(-1) for name, (values, _) in rows.items()},
            {name: layers for name, (_, layers) in rows.items()},
            all(run.carried is not None for run in runs),
        )
    return CoordCheck(sizes, changes, tolerance, facts)


def _sweeps(
    widths: Sequence[int] | None, depths: Sequence[int] | None
) -> dict[str, list[dict[str, int]]]:
    """For each swept axis, the sizes of every model to train."""
    given = {"width": widths, "depth": depths}
    swept = {axis: s for axis, s in given.items() if s is not None}
    if not swept:
        raise ValueError("nothing to compare; pass widths=(...), depths=(...) or both")
    for axis, sizes in swept.items():
        each = sizes if isinstance(sizes, Sequence | np.ndarray) else ()
        whole = all(isinstance(x, numbers.Integral) and x > 0 for x in each)
        if not whole or len(set(each)) < 2:
            raise ValueError(
                f"{axis}s={sizes!r} must be at least two different positive sizes, "
                "whole numbers, e.g. (64, 256, 1024)"
            )
    first = {axis: sizes[0] for axis, sizes in swept.items()}
    return {a: [{**first, a: size} for size in sizes] for a, sizes in swept.items()}


@dataclasses.dataclass
class _Run:
    """Train a model of one size, and measure its activations after each step.

    Tracing it fills in `layers` (with the multiplier that a branch's parameters carry),
    `shapes` of the parameters, `carried` (by path, the multiplier of the model that the
    optimizer's scales put into a parameter; None without scales) and `returned` (shapes
    of the outputs; None for a scalar). After it, `result` has by layer the rms of its
    initial values and of its change after each step, (seeds, 1 + steps, layers of a
    scan), and `drawn` the rms of each parameter's initial entries, for each seed.
    """

    build: Callable[..., Any]
    optimizer: Optimizer
    loss: Callable[[Any, Any], Any] | None
    size: dict[str, int]
    steps: int
    layers: dict[str, Layer] = dataclasses.field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    carried: dict[str, Any] | None = None
    returned: Any = None
    result: Any = None
    drawn: Any = None

    def __call__(self, key: jax.Array, batch: Any) -> tuple[dict[str, jax.Array], Any]:
        model = _built(self.build, key, self.size)
        params, rest, assemble = _split(model)
        tx = _transformation(self.optimizer, model, self.size)
        leaves = dict(flatten(params))
        structure = jax.tree.structure(params)
        others, inside = jax.tree.flatten((rest, batch))
        count = len(jax.tree.leaves(rest))

        def outputs(params: Any, others: Any) -> Any:
            rest, batch = jax.tree.unflatten(inside, others)
            loss = _forward if self.loss is None else self.loss
            call = "model(batch)" if self.loss is None else "loss(model, batch)"
            return _called(call, loss, assemble(params, rest), batch)

        def forward(weights: Any, state: Any, *inputs: Any) -> list[jax.Array]:
            found = outputs(jax.tree.unflatten(structure, weights), [*state, *inputs])
            if getattr(found, "shape", None) != ():
                self.returned = jax.tree.map(jnp.shape, found)
            return _floats(found)

        record = Recording(forward, leaves, others[:count], others[count:])
        self._note(record, tx, params)

        def measure(params: Any) -> dict[str, jax.Array]:
            found = record(jax.tree.leaves(params), others[:count], others[count:])
            return {name: x / self._by(name) for name, x in found.items()}

        def step(carry: Any, _: None) -> tuple[Any, dict[str, jax.Array]]:
            params, state = carry
            grads = jax.grad(lambda p: _scalar(outputs(p, others)))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            now = measure(params)
            return (params, state), {k: _rms(now[k] - start[k]) for k in start}

        start, begin = measure(params), (params, tx.init(params))
        changes = jax.lax.scan(step, begin, length=self.steps)[1]
        found = {k: jnp.stack([_rms(a), *changes[k]]) for k, a in start.items()}
        return found, [_rms(x[None]) for x in leaves.values()]

    def _note(self, record: Recording, tx: Any, params: Any) -> None:
        if not record.layers:
            raise ValueError(
                "no layer was found: loss uses no parameter outside of while_loop and "
                "cond; return the model's outputs from loss"
            )
        found = acting(tx, params)
        if found is not None:
            scales, point = found.scales.items(), resolve(found.scales)
            self.carried = {path: carried(s, point) for path, s in scales}
        carries = self.carried or {}
        for name, layer in record.layers.items():
            factor = layer.multiplier * float(np.mean(carries.get(layer.param, 1.0)))
            self.layers[name] = dataclasses.replace(layer, multiplier=factor)
        self.shapes = {path: tuple(x.shape) for path, x in flatten(params)}

    def _by(self, name: str) -> float:
        """How much smaller a value is than in a model that multiplies by itself."""
        added = name.startswith(STREAM)
        return 1.0 if added else (self.carried or {}).get(self.layers[name].param, 1.0)


def _floats(tree: Any) -> list[jax.Array]:
    return [
        x
        for x in jax.tree.leaves(tree)
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    ]


def _forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping) or isinstance(model, Mapping) or not callable(model):
        raise ValueError(
            "without loss, coord_check calls model(batch), or model(batch[0]) for a "
            f"tuple; the model is a {type(model).__name__} and the batch a "
            f"{type(batch).__name__}: pass loss=function, which takes (model, batch) "
            "and returns the model's outputs"
        )
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _scalar(outputs: Any) -> jax.Array:
    """The user's loss, or one that is linear in the outputs.

    Its gradient has norm one for each example. Like the gradient of cross-entropy, the
    coefficients of each example sum to zero over the last axis.
    """
    leaves = _floats(outputs)
    if not leaves:
        raise ValueError(
            "loss returns no floating-point array; return a scalar or logits"
        )
    if getattr(outputs, "shape", None) == ():
        return jnp.asarray(outputs)
    total = jnp.zeros(())
    for number, leaf in enumerate(leaves):
        drawn = jax.random.normal(jax.random.key(number), leaf.shape)
        if leaf.shape[-1] > 1:
            drawn -= drawn.mean(-1, keepdims=True)
        drawn /= jnp.linalg.norm(drawn, axis=-1, keepdims=True)
        examples = leaf.size / leaf.shape[-1]
        total += (drawn * leaf.astype(jnp.float32)).sum() / examples
    return total


def _rms(x: jax.Array) -> jax.Array:
    """Root mean square, for each layer."""
    squares = jnp.square(jnp.abs(x).astype(jnp.float32))
    return jnp.sqrt(squares.mean(axis=tuple(range(1, x.ndim))))


# --- layers of all sizes ---


_Opened: TypeAlias = tuple[str, tuple[int, ...]]  # a name with "*", and its number


def _compare(
    runs: list[_Run], axis: str, wanted: Pattern | None
) -> dict[str, tuple[np.ndarray, tuple[Layer, ...]]]:
    """Match the layers of all sizes by name, and by relative depth in a stack.

    Returns by layer the initial rms and its changes, (sizes, 1 + steps, seeds), and
    what the program of each size says.
    """
    opened = _opening(runs) if axis == "depth" else lambda name: (name, ())
    each = [_by_depth(run, opened, wanted) for run in runs]
    names = [{label.partition("@")[0] for label in found} for found in each]
    if missing := set.union(*names) ^ set.intersection(*names):
        raise ValueError(
            f"layer {min(missing)!r} does not exist at every {axis}; pass "
            "layers=r'...' to choose layers that do"
        )
    rows = {}
    for label in each[0]:
        if all(label in found for found in each):
            values = np.stack([found[label][0] for found in each]).swapaxes(1, 2)
            # Layers that never change only reshape the input.
            if values[:, 1:].any():
                rows[label] = values, tuple(found[label][1] for found in each)
    if not rows and wanted is not None:
        raise ValueError(
            f"no layer that matches layers={wanted.expression!r} changes in training"
        )
    if not rows:
        raise ValueError("no activation changed; is the learning rate zero?")
    return rows


def _by_depth(
    run: _Run, opened: Callable[[str], _Opened], wanted: Pattern | None
) -> dict[str, tuple[np.ndarray, Layer]]:
    """Values of each layer, (seeds, 1 + steps); in stacks, at each relative depth.

    A layer has a number in its stack: () alone, (3,) in a list or a scan, (3, 0) in a
    list of scans.
    """
    stacks: dict[str, dict[tuple[int, ...], tuple[np.ndarray, Layer]]] = {}
    for name, layer in run.layers.items():
        pattern, number = opened(name)
        if name not in run.result or (wanted and not wanted.matches(pattern)):
            continue
        values = run.result[name]
        layer = dataclasses.replace(layer, branch=opened(layer.branch)[0])
        stack = stacks.setdefault(pattern, {})
        for i in range(values.shape[-1]):
            stack[(*number, i) if layer.stacked else number] = values[..., i], layer
    found = {}
    for name, stack in stacks.items():
        if () in stack:
            found[name] = stack[()]
            continue
        for position in _POSITIONS:
            if (position * len(stack)).is_integer():
                number = sorted(stack)[int(position * len(stack)) - 1]
                found[f"{name}@{position:g}"] = stack[number]
    return found


def _opening(runs: list[_Run]) -> Callable[[str], _Opened]:
    """A function that puts "*" for the number of a block in a list that grows."""
    lists = [read_lists(run.layers) for run in runs]
    heads = {head for each in lists for head in each}
    grows = {h for h in heads if len({len(each.get(h, ())) for each in lists}) > 1}

    def opened(name: str) -> _Opened:
        for number in NUMBER.finditer(name):
            head, tail = name[: number.start()], name[number.end() :]
            if head in grows:
                return f"{head}*{tail}", (int(number.group()),)
        return name, ()

    return opened


# --- the user's functions ---


def _called(call: str, function: Callable[..., Any], *args: Any, **size: int) -> Any:
    """What a function returns; a TypeError in it becomes an error with the call."""
    try:
        return function(*args, **size)
    except TypeError as error:
        raise ValueError(f"{call} fails: {error}") from error


def _text(size: dict[str, int]) -> str:
    return ", ".join(f"{axis}={x}" for axis, x in size.items())


def _built(build: Any, key: jax.Array, size: dict[str, int]) -> Any:
    model = _called(f"build(key, {_text(size)})", build, key, **size)
    if not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model)):
        raise ValueError(
            f"build returns a {type(model).__name__} without arrays; return an NNX or "
            "Equinox module, or the result of Linen's module.init(key, inputs)"
        )
    return model


def _transformation(
    optimizer: Any, model: Any, size: dict[str, int]
) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    tx = _called(f"optimizer(model, {_text(size)})", optimizer, model, **size)
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"optimizer returns a {type(tx).__name__}, not an "
            "optax.GradientTransformation"
        )
    return tx


def _check_built(axis: str, runs: list[_Run], seeds: int) -> None:
    if axis == "width" and all(run.shapes == runs[0].shapes for run in runs):
        sizes = tuple(run.size[axis] for run in runs)
        raise ValueError(
            f"build returns parameters of the same shapes at widths {sizes}; does it "
            "use its width?"
        )
    outputs = [run.returned for run in runs]
    for other in outputs[1:]:
        if other != outputs[0]:
            raise ValueError(
                f"loss returns outputs whose shape changes with {axis}: {outputs[0]} "
                f"and {other}; return the logits, or a scalar"
            )
    drawn = [values for run in runs for values in run.drawn]
    if seeds > 1 and all(np.all(value == value[0]) for value in drawn):
        raise ValueError(
            f"build returns the same parameters for {seeds} different keys; use the "
            "key, as in nnx.Rngs(key)"
        )


def _split(
    model: Any, fixed: Sequence[Any] = ()
) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """(trained parameters, other arrays, a function that builds the model from both)

    `fixed` are arrays of a model of no known library that are not trained.
    """
    if is_nnx(model):
        from flax import nnx

        graph, *states = nnx.split(model, nnx.Param, ...)
        params, others = states
        # A copy, because batch statistics and random streams change under a trace.
        return params, others, lambda p, r: nnx.merge(graph, p, r, copy=True)
    if isinstance(model, Mapping) and isinstance(model.get("params"), Mapping):
        rest = {name: part for name, part in model.items() if name != "params"}
        return model["params"], rest, lambda p, r: {**r, "params": p}

    def is_trained(x: Any) -> bool:
        is_array = isinstance(x, jax.Array | np.ndarray)
        return is_array and bool(_floats(x)) and not any(x is y for y in fixed)

    def part(wanted: Callable[[Any], bool]) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x) if wanted(x) else None, model)

    def assemble(params: Any, rest: Any) -> Any:
        def last(*each: Any) -> Any:
            return next((x for x in each[::-1] if x is not None), None)

        # A None, e.g. the bias of a layer without one, is a leaf here.
        is_none = functools.partial(operator.is_, None)
        return jax.tree.map(last, model, params, rest, is_leaf=is_none)

    # NumPy's whole numbers stay as they are: a model may use them as sizes.
    others = part(lambda x: isinstance(x, jax.Array) and not is_trained(x))
    return part(is_trained), others, assemble
