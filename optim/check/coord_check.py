"""`coord_check`: check that activations change by the same amount at every size."""

import dataclasses
import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..apply.transforms import resolve
from ..rules.multipliers import carried
from ..scales.paths import flatten
from ..scales.patterns import Pattern
from .activations import Activation, collect, is_nnx, tagged
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
    seeds: int | Sequence[int] = 4,
    activations: Callable[[Any, Any], Any] | None = None,
    layers: str | None = None,
    tolerance: float = 0.15,
    strength: float | None = None,
) -> CoordCheck:
    """Train a few steps at several sizes, and fit how changes scale with size.

    Under a correct parametrization the activations of every layer change by the same
    amount at every width and depth: the slope of log |Δ activation| against log size is
    zero. Layers of a stack are compared at the same relative depth.

    Args:
      build: `build(key, width=...)`, `build(key, depth=...)` or both, as swept. Returns
        a model initialized from a random key: an NNX module, Linen variables, an
        Equinox module, any pytree.
      optimizer: an `optax.GradientTransformation`, or a function
        `optimizer(model, width=...)` that returns one for a model of that size.
      loss: `loss(model, batch)`. Preferably it returns the model's outputs (logits).
        The check then minimizes a loss that is linear in them, with fixed random
        coefficients, so that its gradient does not depend on the outputs' initial
        size. If it returns a scalar, that is the loss. None calls `model(batch)`, or
        `model(batch[0])` if the batch is a tuple.
      batch: the training batch, the same at each step.
      widths: the widths to sweep, at the first of `depths`.
      depths: the depths to sweep, at the first of `widths`.
      steps: number of training steps.
      seeds: number of initializations, or a sequence of seeds.
      activations: `activations(model, batch)` returns a pytree of arrays by layer, e.g.
        the result of Linen's `capture_intermediates`. By default the check takes the
        outputs of all NNX and Linen submodules that `loss` calls, and the values that
        NNX modules sow, inside `jax.lax.scan` too. A first axis as long as the depth
        counts layers.
      layers: regular expression, searched in the names of layers; only layers that
        match are compared.
      tolerance: the largest |slope| that counts as zero.
      strength: a²·base_depth, with a the multiplier of the residual branches at the
        base depth. Above 1, models of finite depth have small slopes of depth under
        every parametrization, and the check reports them as unclear. None if unknown.

    Returns:
      A `CoordCheck`: print it, or read `.verdict`, `.slopes`, `.hints`, `.passed`.

    Raises:
      ValueError: no sizes are given, fewer than two, or one is not positive; steps or
        seeds are below one; a callback does not accept the sizes or returns a wrong
        type; `build` ignores its key or its size; no activations are found.

    Source: Tensor Programs V (arXiv:2203.03466), appendix D.1 (width); Tensor
    Programs VI, Definition 7.2 (depth).

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from mupax import optim
      >>> class MLP(nnx.Module):
      ...     def __init__(self, width, rngs):
      ...         self.first = nnx.Linear(8, width, rngs=rngs)
      ...         self.readout = nnx.Linear(width, 1, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.readout(jnp.tanh(self.first(x)))
      >>> check = optim.coord_check(
      ...     lambda key, width: MLP(width, nnx.Rngs(key)),
      ...     optax.adam(1e-2),  # the standard parametrization
      ...     lambda model, batch: model(batch),
      ...     jnp.eye(8),
      ...     widths=(64, 256, 1024),
      ... )
      >>> check.verdict.value, ("width", "readout") in check.failed
      ('wrong', True)
    """
    sweeps = _sweeps(widths, depths)
    _check_options(steps, tolerance)
    given = _seeds(seeds)
    if batch is None:
        raise ValueError(
            "batch is missing; pass the batch that loss(model, batch) takes"
        )
    number = isinstance(strength, numbers.Real)
    if strength is not None and not (number and 0 <= strength < math.inf):
        raise ValueError(f"strength={strength!r} must be a²·base_depth, a number >= 0")
    keys = jnp.stack([jax.random.key(i) for i in given])
    Pattern("layers", layers)  # checks it
    wanted = None if layers is None else re.compile(layers)

    sizes: dict[str, tuple[int, ...]] = {}
    changes: dict[str, dict[str, np.ndarray]] = {}
    facts: dict[str, Facts] = {}
    own_loss = False
    for axis, settings in sweeps.items():
        runs = [_Run(build, optimizer, loss, activations, s, steps) for s in settings]
        seen = []
        for run in runs:
            program = jax.jit(jax.vmap(run, (0, None)), compiler_options=_quick())
            seen.append(jax.device_get(program(keys, batch)))
            own_loss |= run.traced.own_loss
        _check_built(axis, settings, runs, seen, len(set(given)))
        sizes[axis] = tuple(s[axis] for s in settings)
        changes[axis] = _compare([f.changes for f in seen], axis, wanted)
        facts[axis] = _facts(runs, seen, changes[axis])
    return CoordCheck(sizes, changes, tolerance, facts, own_loss, strength)


def _quick() -> dict[str, int]:
    # Compiling takes longer than running a few steps.
    cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 1} if cpu else {}


def _seeds(seeds: Any) -> list[int]:
    """The seeds, of which a number gives so many."""
    given = range(seeds) if isinstance(seeds, numbers.Integral) else seeds
    texts = isinstance(given, str) or not isinstance(given, Iterable)
    try:
        values = [] if texts else [operator.index(seed) for seed in given]
    except TypeError:
        values = []
    if not values:
        raise ValueError(
            f"seeds={seeds!r} must be a number of seeds, at least one, or a sequence "
            "of whole numbers"
        )
    return values


def _check_options(steps: int, tolerance: float) -> None:
    if not isinstance(steps, numbers.Integral) or steps < 1:
        raise ValueError(f"steps={steps!r} must be at least 1, a whole number")
    if not isinstance(tolerance, numbers.Real) or not 0 <= tolerance < math.inf:
        raise ValueError(
            f"tolerance={tolerance!r} must be the largest slope that counts as zero, "
            "e.g. 0.15"
        )


def _sweeps(
    widths: Sequence[int] | None, depths: Sequence[int] | None
) -> dict[str, list[dict[str, int]]]:
    """For each swept axis, the sizes of every model to train."""
    given = {"width": widths, "depth": depths}
    for axis, sizes in given.items():
        whole = isinstance(sizes, Iterable) and all(
            isinstance(size, numbers.Integral) for size in sizes
        )
        if sizes is not None and not whole:
            raise ValueError(
                f"{axis}s={sizes!r} must be whole numbers, e.g. (4, 8, 16)"
            )
    swept = {axis: list(s) for axis, s in given.items() if s is not None}
    if not swept:
        raise ValueError("nothing to compare; pass widths=(...), depths=(...) or both")
    for axis, sizes in swept.items():
        if len(set(sizes)) < 2 or min(sizes) <= 0:
            raise ValueError(
                f"{axis}s={tuple(sizes)} must be at least two different positive sizes"
            )
    first = {axis: sizes[0] for axis, sizes in swept.items()}
    return {a: [{**first, a: size} for size in sizes] for a, sizes in swept.items()}


class _RunResult(NamedTuple):
    """Measurements of one run, for each seed.

    Attributes:
      changes: by layer, the rms change after each step: (steps,), or (steps, layers)
        where layers are stacked.
      initial: by layer, the rms of its initial values.
      parameters: by path, the rms of its initial entries.
    """

    changes: dict[str, Any]
    initial: dict[str, Any]
    parameters: dict[str, Any]


@dataclasses.dataclass
class _TraceResult:
    """Static properties of a run, filled in while it is traced.

    Attributes:
      shapes: shapes of the parameters, by path.
      outputs: shapes of the model's outputs; None if `loss` returns a scalar.
      own_loss: whether `loss` returns a scalar.
    """

    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    outputs: Any = None
    own_loss: bool = False


@dataclasses.dataclass
class _Run:
    """Train a model of one size, and measure its activations after each step."""

    build: Callable[..., Any]
    optimizer: Optimizer
    loss: Callable[[Any, Any], Any] | None
    activations: Callable[[Any, Any], Any] | None
    size: dict[str, int]
    steps: int
    traced: _TraceResult = dataclasses.field(default_factory=_TraceResult)

    def __call__(self, key: jax.Array, batch: Any) -> _RunResult:
        model = _built(self.build, key, self.size)
        params, rest, assemble = _split(model)
        tx = _transformation(self.optimizer, model, self.size)

        factors = _carried(tx, params)

        def measure(params: Any) -> dict[str, Activation]:
            model = assemble(params, rest)
            if self.activations is not None:
                values = self.activations(model, batch)
                return _named(values, self.size.get("depth"))
            found = collect(lambda m: self.objective(m, batch), model)
            return {
                name: a._replace(value=a.value / factors.get(name, 1.0))
                for name, a in found.items()
            }

        def objective(params: Any) -> jax.Array:
            # Tagged modules do not store the values that they sow.
            return self.objective(tagged(assemble(params, rest)), batch)

        def step(carry: Any, _: None) -> tuple[Any, dict[str, jax.Array]]:
            params, state = carry
            grads = jax.grad(objective)(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            now = measure(params)
            return (params, state), {k: _rms(now[k], start[k]) for k in start}

        start = measure(params)
        if not start:
            raise ValueError(
                "no activations were found: loss calls no submodule of NNX or Linen; "
                "pass activations=function, which takes (model, batch) and returns them"
            )
        leaves = dict(flatten(params))
        self.traced.shapes = {path: tuple(x.shape) for path, x in leaves.items()}
        begin = (params, tx.init(params))
        return _RunResult(
            jax.lax.scan(step, begin, length=self.steps)[1],
            {name: _root(a.value) for name, a in start.items()},
            {path: _root(x) for path, x in leaves.items()},
        )

    def objective(self, model: Any, batch: Any) -> jax.Array:
        """The scalar to minimize."""
        loss = _forward if self.loss is None else self.loss
        outputs = loss(model, batch)
        if getattr(outputs, "shape", None) == ():
            self.traced.own_loss = True
            return outputs
        self.traced.outputs = jax.tree.map(jnp.shape, outputs)
        return _linear(outputs)


def _carried(tx: optax.GradientTransformation, params: Any) -> dict[str, float]:
    """By layer, the branch multiplier that its parameters carry.

    The layer's outputs are as much smaller than those of a model that multiplies.
    """
    scaling = acting(tx, params)[0]
    if scaling is None:
        return {}
    point = resolve(scaling.scales)
    factors = {
        s.path.rpartition("/")[0]: carried(s, point) for s in scaling.scales.values()
    }
    return {layer: factor for layer, factor in factors.items() if factor != 1}


def _root(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(jnp.abs(x.astype(jnp.float32)))))


def _forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping) or isinstance(model, Mapping) or not callable(model):
        raise ValueError(
            "without loss, coord_check calls model(batch), or model(batch[0]) for a "
            f"tuple; the model is a {type(model).__name__} and the batch a "
            f"{type(batch).__name__}: pass loss=function, which takes (model, batch) "
            "and returns the model's outputs"
        )
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _linear(outputs: Any) -> jax.Array:
    """A loss that is linear in the outputs, with a gradient of norm one per example.

    Like the gradient of cross-entropy, the coefficients of each example sum to zero
    over the last axis.
    """
    leaves = [
        x
        for x in jax.tree.leaves(outputs)
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if not leaves:
        raise ValueError(
            "loss returns no floating-point array; return a scalar or logits"
        )
    total = jnp.zeros(())
    for number, leaf in enumerate(leaves):
        drawn = jax.random.normal(jax.random.key(number), leaf.shape)
        if leaf.shape[-1] > 1:
            drawn -= drawn.mean(-1, keepdims=True)
        drawn /= jnp.linalg.norm(drawn, axis=-1, keepdims=True)
        examples = leaf.size / leaf.shape[-1]
        total += (drawn * leaf.astype(jnp.float32)).sum() / examples
    return total


# --- the user's functions ---


def _accepts(function: Any, args: tuple[Any, ...], size: dict[str, int]) -> bool:
    try:
        inspect.signature(function).bind(*args, **size)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _arguments(size: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in size.items())


def _not_accepted(name: str, function: Any, first: str, size: dict[str, int]) -> str:
    """The error for a function that cannot be called as `function(first, **size)`."""
    refused = (
        f"coord_check calls {name}({first}, {_arguments(size)}), which {name} does not "
        "accept; "
    )
    for other in {"width", "depth"} - set(size):
        if _accepts(function, (first,), {**size, other: 1}):
            return f"{refused}give its {other} a default, or pass {other}s=(...)"
    return f"{refused}write it as def {name}({first}, {', '.join(size)})"


def _built(build: Callable[..., Any], key: jax.Array, size: dict[str, int]) -> Any:
    call = f"build(key, {_arguments(size)})"
    if not callable(build):
        raise ValueError(
            f"build is a {type(build).__name__}; pass a function, called as {call}"
        )
    if not _accepts(build, (key,), size):
        raise ValueError(_not_accepted("build", build, "key", size))
    try:
        model = build(key, **size)
    except AttributeError as error:
        if "'int' object" not in str(error):
            raise
        raise ValueError(
            f"{call} fails: {error}; pass random state to Flax as "
            "rngs=nnx.Rngs(key), not as a number"
        ) from error
    if not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model)):
        raise ValueError(
            f"{call} returns a {type(model).__name__} without arrays; return an NNX or "
            "Equinox module, or the result of Linen's module.init(key, inputs)"
        )
    return model


def _transformation(
    optimizer: Optimizer, model: Any, size: dict[str, int]
) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    call = f"optimizer(model, {_arguments(size)})"
    if not callable(optimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; pass an optax transformation, "
            f"or a function, called as {call}"
        )
    if not _accepts(optimizer, (model,), size):
        raise ValueError(_not_accepted("optimizer", optimizer, "model", size))
    tx = optimizer(model, **size)
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"{call} returns a {type(tx).__name__}, not an optax.GradientTransformation"
        )
    return tx


def _check_built(
    axis: str,
    settings: list[dict[str, int]],
    runs: list[_Run],
    seen: list[_RunResult],
    seeds: int,
) -> None:
    """Raise a `ValueError` if `build` ignores its size or its key."""
    sizes = [setting[axis] for setting in settings]
    shapes = [run.traced.shapes for run in runs]
    if axis == "width" and all(s == shapes[0] for s in shapes):
        raise ValueError(
            f"build returns parameters of the same shapes at widths {tuple(sizes)}; "
            "does it use its width?"
        )
    outputs = [run.traced.outputs for run in runs]
    for other in outputs[1:]:
        if other != outputs[0]:
            raise ValueError(
                f"loss returns outputs whose shape changes with {axis}: {outputs[0]} "
                f"and {other}; return the logits, or a scalar"
            )
    if seeds > 1 and all(
        np.all(value == value[0]) for f in seen for value in f.parameters.values()
    ):
        raise ValueError(
            f"build returns the same parameters for {seeds} different keys; use the "
            "key, as in nnx.Rngs(key), or pass seeds=1"
        )


def _facts(
    runs: list[_Run], seen: list[_RunResult], changes: Mapping[str, np.ndarray]
) -> Facts:
    initial = {}
    for name in changes:
        layer = re.escape(re.sub(r"@[\d.]+$", "", name)).replace(r"\*", r"\d+")
        values = [
            [v.mean() for k, v in f.initial.items() if re.fullmatch(layer, k)]
            for f in seen
        ]
        if all(values):
            initial[name] = np.array([np.mean(v) for v in values])
    paths = [p for p in seen[0].parameters if all(p in f.parameters for f in seen)]
    parameters = {
        path: (
            tuple(run.traced.shapes[path] for run in runs),
            np.array([np.sqrt((f.parameters[path] ** 2).mean()) for f in seen]),
        )
        for path in paths
    }
    return Facts(initial, parameters)


def _split(
    model: Any, fixed: Sequence[Any] = ()
) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """(trained parameters, other arrays, a function that builds the model from both)

    `fixed` are arrays that a model of no known library may hold and that are not
    trained.
    """
    if is_nnx(model):
        from flax import nnx

        graph, *states = nnx.split(model, nnx.Param, ...)
        params, others = states
        # A copy, because batch statistics and random streams change under a trace.
        return params, others, lambda p, r: nnx.merge(graph, p, r, copy=True)
    if isinstance(model, Mapping) and isinstance(model.get("params"), Mapping):
        rest = {name: part for name, part in model.items() if name != "params"}
        arrays, put = _taken(rest, lambda x: isinstance(x, jax.Array))
        return model["params"], arrays, lambda p, r: {**put(r), "params": p}

    def trained(x: Any) -> bool:
        is_array = isinstance(x, jax.Array | np.ndarray)
        return is_array and _is_real(x) and not any(x is y for y in fixed)

    def kept(x: Any) -> bool:
        # NumPy's whole numbers stay as they are: a model may use them as sizes.
        return isinstance(x, jax.Array) and not trained(x)

    weights, put = _taken(model, trained)
    arrays, put_arrays = _taken(model, kept)
    return weights, arrays, lambda p, r: put_arrays(r, put(p))


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _taken(tree: Any, wanted: Callable[[Any], bool]) -> tuple[Any, Callable[..., Any]]:
    """Some leaves of a tree, with None for the others, and a function to put them back.

    The function takes such leaves and the tree to put them into, by default this one.
    """
    # A None, e.g. the bias of a layer without one, is a leaf here and below.
    leaves, treedef = _leaves(tree)
    found = [wanted(x) for x in leaves]

    def put(new: Any, into: Any = tree) -> Any:
        both = zip(_leaves(new)[0], _leaves(into)[0], found, strict=True)
        return jax.tree.unflatten(treedef, [n if f else x for n, x, f in both])

    return jax.tree.unflatten(
        treedef,
        [jnp.asarray(x) if f else None for x, f in zip(leaves, found, strict=True)],
    ), put


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


def _named(tree: Any, depth: int | None) -> dict[str, Activation]:
    """Activations that the user's function returned, by path."""
    named = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Linen's paths are intermediates/Dense_0/__call__/0.
        name = re.sub(r"^intermediates/|/?__call__/0$", "", name)
        stacked = value.ndim > 1 and value.shape[0] == depth
        named[name or "output"] = Activation(value, stacked)
    return named


def _rms(now: Activation, start: Activation) -> jax.Array:
    change = jnp.square(now.value - start.value)
    return jnp.sqrt(change.mean(axis=tuple(range(int(now.stacked), change.ndim))))


def _compare(
    runs: list[dict[str, np.ndarray]], axis: str, wanted: re.Pattern[str] | None
) -> dict[str, np.ndarray]:
    """Match the layers of all sizes by name, and by relative depth in a stack."""
    if axis == "depth":
        runs = _stack_lists(runs)
    missing = set.union(*map(set, runs)) ^ set.intersection(*map(set, runs))
    if missing:
        raise ValueError(
            f"layer {min(missing)!r} does not exist at every {axis}; pass "
            "layers=r'...' or activations= to choose layers that do"
        )
    changes = {}
    for name in runs[0]:
        if wanted is not None and not wanted.search(name):
            continue
        arrays = [np.asarray(f[name]) for f in runs]  # (seeds, steps[, layers])
        if not all(a.ndim == 3 for a in arrays):
            # The first axis was as long as the depth by chance.
            flat = [a if a.ndim == 2 else np.sqrt((a**2).mean(-1)) for a in arrays]
            changes[name] = np.stack(flat)
            continue
        counts = [a.shape[-1] for a in arrays]
        for position in _POSITIONS:
            last = [math.ceil(position * count) for count in counts]
            if all(n == position * c for n, c in zip(last, counts, strict=True)):
                there = [a[..., n - 1] for a, n in zip(arrays, last, strict=True)]
                changes[f"{name}@{position:g}"] = np.stack(there)
    # Leave out layers that never change, e.g. those that only reshape the input.
    changes = {k: c.swapaxes(1, 2) for k, c in changes.items() if c.any()}
    if not changes and wanted is not None:
        names = ", ".join(map(repr, runs[0]))
        raise ValueError(
            f"no layer that matches layers={wanted.pattern!r} changes in training; "
            f"the layers are {names}"
        )
    if not changes:
        raise ValueError("no activation changed; is the learning rate zero?")
    return changes


def _stack_lists(runs: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Stack blocks whose paths differ by a number, if their count differs by size."""
    counts: dict[str, list[int]] = {}
    for i, layers in enumerate(runs):
        for name in layers:
            for pattern, _ in _patterns(name):
                counts.setdefault(pattern, [0] * len(runs))[i] += 1
    stacked = []
    for layers in runs:
        merged: dict[str, Any] = {}
        for name, value in layers.items():
            growing = [p for p in _patterns(name) if len(set(counts[p[0]])) > 1]
            if growing:
                pattern, number = growing[0]
                merged.setdefault(pattern, {})[number] = value
            else:
                merged[name] = value
        stacked.append(
            {
                name: np.stack([value[i] for i in sorted(value)], axis=-1)
                if isinstance(value, dict)
                else value
                for name, value in merged.items()
            }
        )
    return stacked


def _patterns(name: str) -> list[tuple[str, int]]:
    """For each number in a name: (the name with "*" in its place, the number)."""
    return [
        (f"{name[: m.start()]}*{name[m.end() :]}", int(m.group()))
        for m in re.finditer(r"\d+", name)
    ]
