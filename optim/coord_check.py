"""Coordinate check: do activations move alike at every width and every depth?"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .activations import Activation, collect, is_nnx, tagged
from .coord_verdict import CoordCheck, Facts
from .paths import flatten

Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[..., optax.GradientTransformation]
)

# Where along a stack of layers it is looked: quarters, and the last layer.
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
    """Train a few steps at several sizes, and fit how the changes grow with size.

    Under a right parametrization every layer's activations move by the same amount
    at every width and depth: the slope of log |Δ activation| against log size is
    zero. Layers of a stack are compared at the same relative depth.

    Args:
      build: `build(key, width=...)`, `build(key, depth=...)` or both, as swept:
        returns the model at initialization, from a random key: an NNX module, Linen
        variables, an Equinox module, any pytree.
      optimizer: an `optax.GradientTransformation`, or `optimizer(model, width=...)`
        that makes one for a model of a size.
      loss: `loss(model, batch)`. Best it returns the model's outputs (logits): the
        check then minimizes a loss that is linear in them, with fixed random
        coefficients, whose gradient does not depend on how large the outputs start.
        If it returns a scalar, that is the loss. None calls `model(batch)`, or
        `model(batch[0])` if the batch is a tuple.
      batch: what is trained on, the same at each step.
      widths: the widths to sweep, at the first of `depths`.
      depths: the depths to sweep, at the first of `widths`.
      steps: how many steps are trained.
      seeds: how many initializations, or their numbers.
      activations: `activations(model, batch)`, a pytree of arrays by layer, as what
        `capture_intermediates` of Linen returns. By default the outputs of all
        submodules of NNX and Linen that `loss` calls, and what NNX modules sow,
        inside `jax.lax.scan` too. A first axis as long as the depth counts layers.
      layers: regular expression, searched in the names of layers, to keep only some.
      tolerance: how far from zero a slope may surely be.
      strength: a²·base_depth, with a the multiplier of the residual branches at the
        base depth. Above 1, small slopes of depth are those of finite depth, and the
        check says so instead of calling them wrong. None if it is not known.

    Returns:
      A `CoordCheck`: print it, or read `.verdict`, `.slopes`, `.hints`, `.passed`.

    Raises:
      ValueError: nothing is swept, fewer than two sizes or none of them positive,
        steps or seeds below one, callbacks that do not accept the sizes or return
        something else, a `build` that ignores its key or its size, or no activations
        are found.

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
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ValueError(f"seeds={seeds} must be at least one")
    if batch is None:
        raise ValueError(
            "batch is missing; pass the inputs, as loss(model, batch) gets"
        )
    if strength is not None and not 0 <= strength < math.inf:
        raise ValueError(f"strength={strength} must be a²·base_depth, a number >= 0")
    keys = jnp.stack([jax.random.key(i) for i in numbers])
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
        _check_built(axis, settings, runs, seen, len(set(numbers)))
        sizes[axis] = tuple(s[axis] for s in settings)
        changes[axis] = _compare([f.changes for f in seen], axis, wanted)
        facts[axis] = _facts(runs, seen, changes[axis])
    return CoordCheck(sizes, changes, tolerance, facts, own_loss, strength)


def _quick() -> dict[str, int]:
    # For a few steps, compiling takes longer than running.
    cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 1} if cpu else {}


def _sweeps(
    widths: Sequence[int] | None, depths: Sequence[int] | None
) -> dict[str, list[dict[str, int]]]:
    """For each axis that is swept, the sizes of each model."""
    given = {"width": widths, "depth": depths}
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


class _Seen(NamedTuple):
    """What a run returns for each seed.

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
class _Traced:
    """What is known once a run has been traced."""

    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    outputs: Any = None
    own_loss: bool = False


@dataclasses.dataclass
class _Run:
    """Train a model of one size, and look at its activations after each step."""

    build: Callable[..., Any]
    optimizer: Optimizer
    loss: Callable[[Any, Any], Any] | None
    activations: Callable[[Any, Any], Any] | None
    size: dict[str, int]
    steps: int
    traced: _Traced = dataclasses.field(default_factory=_Traced)

    def __call__(self, key: jax.Array, batch: Any) -> _Seen:
        model = _built(self.build, key, self.size)
        params, assemble = _split(model)
        tx = _transformation(self.optimizer, model, self.size)

        def look(params: Any) -> dict[str, Activation]:
            model = assemble(params)
            if self.activations is None:
                return collect(lambda m: self.objective(m, batch), model)
            values = self.activations(model, batch)
            return _named(values, self.size.get("depth"))

        def objective(params: Any) -> jax.Array:
            # On modules that tag, `sow` stores nothing.
            return self.objective(tagged(assemble(params)), batch)

        def step(carry: Any, _: None) -> tuple[Any, dict[str, jax.Array]]:
            params, state = carry
            grads = jax.grad(objective)(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            now = look(params)
            return (params, state), {k: _rms(now[k], start[k]) for k in start}

        start = look(params)
        if not start:
            raise ValueError(
                "no activations were found: loss calls no submodule of NNX or Linen; "
                "pass activations=function, which returns them from (model, batch)"
            )
        leaves = dict(flatten(params))
        self.traced.shapes = {path: tuple(x.shape) for path, x in leaves.items()}
        begin = (params, tx.init(params))
        return _Seen(
            jax.lax.scan(step, begin, length=self.steps)[1],
            {name: _root(a.value) for name, a in start.items()},
            {path: _root(x) for path, x in leaves.items()},
        )

    def objective(self, model: Any, batch: Any) -> jax.Array:
        """The scalar that is minimized."""
        loss = _forward if self.loss is None else self.loss
        outputs = loss(model, batch)
        if getattr(outputs, "shape", None) == ():
            self.traced.own_loss = True
            return outputs
        self.traced.outputs = jax.tree.map(jnp.shape, outputs)
        return _linear(outputs)


def _root(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(jnp.abs(x.astype(jnp.float32)))))


def _forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping) or isinstance(model, Mapping) or not callable(model):
        raise ValueError(
            "without loss, coord_check calls model(batch), or model(batch[0]) for a "
            f"tuple; the model is a {type(model).__name__} and the batch a "
            f"{type(batch).__name__}: pass loss=function, which returns the model's "
            "outputs from (model, batch)"
        )
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _linear(outputs: Any) -> jax.Array:
    """A loss linear in the outputs; its gradient has norm one for each example.

    The coefficients of each example add up to zero over the last axis, like the
    gradient of cross-entropy.
    """
    leaves = [
        x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)
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


def _built(build: Callable[..., Any], key: jax.Array, size: dict[str, int]) -> Any:
    call = f"build(key, {_arguments(size)})"
    if not callable(build):
        raise ValueError(
            f"build is a {type(build).__name__}; pass a function that {call} can call"
        )
    if not _accepts(build, (key,), size):
        names = ", ".join(size)
        raise ValueError(
            f"coord_check calls {call}, which build does not accept; write it as "
            f"def build(key, {names})"
        )
    try:
        model = build(key, **size)
    except AttributeError as error:
        if "'int' object" not in str(error):
            raise
        raise ValueError(
            f"{call} fails: {error}; random numbers are given to Flax as "
            "rngs=nnx.Rngs(key), not as a number"
        ) from error
    if not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model)):
        raise ValueError(
            f"{call} returns a {type(model).__name__} without arrays; return an NNX or "
            "Equinox module, or what module.init(key, inputs) of Linen returns"
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
            f"or a function that {call} can call"
        )
    if not _accepts(optimizer, (model,), size):
        raise ValueError(
            f"coord_check calls {call}, which optimizer does not accept; write it as "
            f"def optimizer(model, {', '.join(size)})"
        )
    made = optimizer(model, **size)
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{call} returns a {type(made).__name__}, not an "
            "optax.GradientTransformation"
        )
    return made


def _check_built(
    axis: str,
    settings: list[dict[str, int]],
    runs: list[_Run],
    seen: list[_Seen],
    seeds: int,
) -> None:
    """Raise where `build` ignores its size or its key."""
    sizes = [setting[axis] for setting in settings]
    shapes = [run.traced.shapes for run in runs]
    if axis == "width" and all(s == shapes[0] for s in shapes):
        raise ValueError(
            f"build makes parameters of the same shapes at widths {tuple(sizes)}; "
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
            f"build makes the same parameters from {seeds} different keys; use the "
            "key, as in nnx.Rngs(key), or pass seeds=1"
        )


def _facts(
    runs: list[_Run], seen: list[_Seen], changes: Mapping[str, np.ndarray]
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


def _split(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The trained parameters of a model, and what puts them back."""
    if is_nnx(model):
        from flax import nnx

        graph, *states = nnx.split(model, nnx.Param, ...)

        # Copied: batch statistics and random streams change under a trace.
        return states[0], lambda params: nnx.merge(
            graph, params, *states[1:], copy=True
        )
    if isinstance(model, Mapping) and isinstance(model.get("params"), Mapping):
        return model["params"], lambda params: {**model, "params": params}
    leaves, treedef = jax.tree.flatten(model)
    trained = [
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        for x in leaves
    ]
    # None in place of all else, so that paths stay those of the model.
    params = [x if t else None for x, t in zip(leaves, trained, strict=True)]

    def assemble(params: Any) -> Any:
        new = jax.tree.leaves(params, is_leaf=lambda x: x is None)
        both = zip(new, leaves, trained, strict=True)
        return jax.tree.unflatten(treedef, [n if t else x for n, x, t in both])

    return jax.tree.unflatten(treedef, params), assemble


def _named(tree: Any, depth: int | None) -> dict[str, Activation]:
    """What the user's function returned, by path."""
    named = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Linen wraps them: intermediates/Dense_0/__call__/0.
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
    """Line up the layers of all sizes: by name, or by relative depth in a stack."""
    if axis == "depth":
        runs = _stack_lists(runs)
    missing = set.union(*map(set, runs)) ^ set.intersection(*map(set, runs))
    if missing:
        raise ValueError(
            f"layer {min(missing)!r} is not there at every {axis}; pass layers=r'...' "
            "or activations= to choose layers that are"
        )
    changes = {}
    for name in runs[0]:
        if wanted is not None and not wanted.search(name):
            continue
        arrays = [np.asarray(f[name]) for f in runs]  # (seeds, steps[, layers])
        if not all(a.ndim == 3 for a in arrays):
            # A first axis that was as long as the depth by chance.
            flat = [a if a.ndim == 2 else np.sqrt((a**2).mean(-1)) for a in arrays]
            changes[name] = np.stack(flat)
            continue
        counts = [a.shape[-1] for a in arrays]
        for position in _POSITIONS:
            last = [math.ceil(position * count) for count in counts]
            if all(n == position * c for n, c in zip(last, counts, strict=True)):
                there = [a[..., n - 1] for a, n in zip(arrays, last, strict=True)]
                changes[f"{name}@{position:g}"] = np.stack(there)
    # What no parameter moves, as a module that only reshapes the input, says nothing.
    changes = {k: c.swapaxes(1, 2) for k, c in changes.items() if c.any()}
    if not changes and wanted is not None:
        names = ", ".join(map(repr, runs[0]))
        raise ValueError(f"no layer matches {wanted.pattern!r} and moves, of {names}")
    if not changes:
        raise ValueError("no activation moved; is the learning rate zero?")
    return changes


def _stack_lists(runs: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Stack blocks that are numbered in their paths, where their number changes."""
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
    """The name with a star in place of each number of it in turn, and the number."""
    return [
        (f"{name[: m.start()]}*{name[m.end() :]}", int(m.group()))
        for m in re.finditer(r"\d+", name)
    ]
