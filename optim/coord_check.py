"""Coordinate check: do activations move alike at every width and every depth?"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .activations import Activation, collect, is_nnx, tagged

Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[..., optax.GradientTransformation]
)
Changes = dict[str, jax.Array]

# Where along a stack of layers it is looked: quarters, and the last layer.
_POSITIONS = (0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True)
class CoordCheck:
    """What `coord_check` returns: a verdict when printed.

    Attributes:
      sizes: for each axis ("width", "depth") the sizes that were trained.
      changes: by axis and layer, the root mean square of the activation's change
        since initialization, of shape (sizes, steps, seeds).
      tolerance: how far from zero a slope may be.

    Source: Tensor Programs V (arXiv:2203.03466), appendix D.1.

    Examples:
      >>> import numpy as np
      >>> sizes = {"width": (64, 128, 256)}
      >>> change = np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)  # sizes, steps, seeds
      >>> check = CoordCheck(sizes, {"width": {"readout": change}})
      >>> round(check.slopes["width"]["readout"], 6), check.failed
      (1.0, [('width', 'readout')])
    """

    sizes: Mapping[str, tuple[int, ...]]
    changes: Mapping[str, Mapping[str, np.ndarray]]
    tolerance: float = 0.05

    @property
    def slopes(self) -> dict[str, dict[str, float]]:
        """By axis and layer, the slope of log |Δ activation| against log size.

        Of the steps, the one whose slope is farthest from zero.
        """
        return {
            axis: {
                layer: steps[int(np.argmax(np.abs(steps)))]
                for layer, steps in layers.items()
            }
            for axis, layers in self.by_step.items()
        }

    @property
    def by_step(self) -> dict[str, dict[str, list[float]]]:
        """The slopes after each step."""
        return {
            axis: {
                layer: _slopes(self.sizes[axis], change).mean(axis=-1).tolist()
                for layer, change in layers.items()
            }
            for axis, layers in self.changes.items()
        }

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Standard errors of the slopes over seeds, of the step with the largest."""
        return {
            axis: {
                layer: float(_standard_error(_slopes(self.sizes[axis], change)).max())
                for layer, change in layers.items()
            }
            for axis, layers in self.changes.items()
        }

    @property
    def failed(self) -> list[tuple[str, str]]:
        """The (axis, layer) whose slope is out of tolerance, or not a number."""
        return [
            (axis, layer)
            for axis, layers in self.slopes.items()
            for layer, slope in layers.items()
            if not abs(slope) <= self.tolerance
        ]

    @property
    def passed(self) -> bool:
        """Whether every layer moves alike at every size."""
        return not self.failed

    def __str__(self) -> str:
        failed = set(self.failed)
        lines = []
        for axis, layers in self.slopes.items():
            sizes = ", ".join(map(str, self.sizes[axis]))
            lines.append(f"log |Δ activation| against log {axis} ({sizes})")
            long = max(map(len, layers))
            lines += [
                f"  {layer:<{long}}  {slope:+.3f} ± {self.errors[axis][layer]:.3f}"
                + ("  FAILED" if (axis, layer) in failed else "")
                for layer, slope in layers.items()
            ]
        count = sum(map(len, self.changes.values()))
        verdict = (
            f"passed: {count} slopes within ±{self.tolerance:g} of zero"
            if self.passed
            else f"failed: {len(failed)} of {count} slopes are not within "
            f"±{self.tolerance:g} of zero"
        )
        return "\n".join([*lines, verdict])

    def plot(self, path: str | os.PathLike[str]) -> list[str]:
        """Draw |Δ activation| against size, one picture for each axis.

        Args:
          path: of the picture. With two axes the name of each is put before the
            suffix, as `check-width.png`.

        Returns:
          The paths that were written.

        Raises:
          ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib import figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plotting needs matplotlib: pip install 'mupax[train]'"
            ) from None
        stem, suffix = os.path.splitext(os.fspath(path))
        written = []
        for axis, layers in self.changes.items():
            steps = next(iter(layers.values())).shape[1]
            # Figure alone, not pyplot: no global state, no display.
            canvas = figure.Figure(figsize=(3.2 * steps + 2.4, 3.6))
            panels = canvas.subplots(1, steps, sharex=True, sharey=True, squeeze=False)
            for step, panel in enumerate(panels[0]):
                for layer, change in layers.items():
                    slope = self.by_step[axis][layer][step]
                    mean = np.exp(_log(change[:, step]).mean(axis=-1))
                    label = f"{layer}  {slope:+.2f}"
                    panel.plot(self.sizes[axis], mean, marker="o", label=label)
                panel.set(xscale="log", yscale="log", xlabel=axis)
                panel.set_xticks(self.sizes[axis], map(str, self.sizes[axis]))
                panel.minorticks_off()
                panel.set_title(f"step {step + 1}")
                if step == steps - 1:
                    panel.legend(
                        title="layer  slope", fontsize="x-small", loc="center left",
                        bbox_to_anchor=(1, 0.5),
                    )  # fmt: skip
            panels[0][0].set_ylabel("rms change of the activation")
            name = f"{stem}-{axis}{suffix}" if len(self.changes) > 1 else f"{path}"
            canvas.savefig(name, bbox_inches="tight", dpi=120)
            written.append(name)
        return written


def coord_check(
    build: Callable[..., Any],
    optimizer: Optimizer,
    loss: Callable[[Any, Any], jax.Array],
    batch: Any,
    *,
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    steps: int = 3,
    seeds: int | Sequence[int] = 4,
    activations: Callable[[Any, Any], Any] | None = None,
    layers: str | None = None,
    tolerance: float = 0.05,
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
      loss: `loss(model, batch)`, a scalar.
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
      tolerance: how far from zero a slope may be.

    Returns:
      A `CoordCheck`: print it, or read `.slopes`, `.passed` and `.failed`.

    Raises:
      ValueError: nothing is swept, fewer than two sizes or none of them positive,
        steps or seeds below one, or no activations are found.

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
      >>> x, y = jnp.eye(8), jnp.ones((8, 1))
      >>> check = optim.coord_check(
      ...     lambda key, width: MLP(width, nnx.Rngs(key)),
      ...     optax.adam(1e-2),  # the standard parametrization
      ...     lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2),
      ...     (x, y),
      ...     widths=(64, 256, 1024),
      ... )
      >>> check.passed, ("width", "readout") in check.failed
      (False, True)
    """
    sweeps = _sweeps(widths, depths)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ValueError(f"seeds={seeds} must be at least one")
    keys = jnp.stack([jax.random.key(i) for i in numbers])
    wanted = None if layers is None else re.compile(layers)

    sizes: dict[str, tuple[int, ...]] = {}
    changes: dict[str, dict[str, np.ndarray]] = {}
    for axis, settings in sweeps.items():
        found = []
        for size in settings:
            run = _experiment(build, optimizer, loss, activations, size, steps)
            program = jax.jit(jax.vmap(run, (0, None)), compiler_options=_quick())
            found.append(jax.device_get(program(keys, batch)))
        sizes[axis] = tuple(s[axis] for s in settings)
        changes[axis] = _compare(found, axis, wanted)
    return CoordCheck(sizes, changes, tolerance)


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


def _experiment(
    build: Callable[..., Any],
    optimizer: Optimizer,
    loss: Callable[[Any, Any], jax.Array],
    activations: Callable[[Any, Any], Any] | None,
    size: dict[str, int],
    steps: int,
) -> Callable[[jax.Array, Any], Changes]:
    """Train a model of one size; by layer, its change after each step.

    What it returns gives (steps,), or (steps, layers) where layers are stacked.
    """

    def run(key: jax.Array, batch: Any) -> Changes:
        model = build(key, **size)
        params, assemble = _split(model)
        if isinstance(optimizer, optax.GradientTransformation):
            tx = optimizer
        else:
            tx = optimizer(model, **size)

        def look(params: Any) -> dict[str, Activation]:
            model = assemble(params)
            if activations is None:
                return collect(lambda m: loss(m, batch), model)
            return _named(activations(model, batch), size.get("depth"))

        def objective(params: Any) -> jax.Array:
            # On modules that tag, `sow` stores nothing.
            return loss(tagged(assemble(params)), batch)

        def step(carry: Any, _: None) -> tuple[Any, Changes]:
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
        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[1]

    return run


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
    found = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Linen wraps them: intermediates/Dense_0/__call__/0.
        name = re.sub(r"^intermediates/|/?__call__/0$", "", name)
        stacked = value.ndim > 1 and value.shape[0] == depth
        found[name or "output"] = Activation(value, stacked)
    return found


def _rms(now: Activation, start: Activation) -> jax.Array:
    change = jnp.square(now.value - start.value)
    return jnp.sqrt(change.mean(axis=tuple(range(int(now.stacked), change.ndim))))


def _compare(
    found: list[dict[str, np.ndarray]], axis: str, wanted: re.Pattern[str] | None
) -> dict[str, np.ndarray]:
    """Line up the layers of all sizes: by name, or by relative depth in a stack."""
    if axis == "depth":
        found = _stack_lists(found)
    missing = set.union(*map(set, found)) ^ set.intersection(*map(set, found))
    if missing:
        raise ValueError(
            f"layer {min(missing)!r} is not there at every {axis}; pass layers=r'...' "
            "or activations= to choose layers that are"
        )
    changes = {}
    for name in found[0]:
        if wanted is not None and not wanted.search(name):
            continue
        arrays = [np.asarray(f[name]) for f in found]  # (seeds, steps[, layers])
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
        names = ", ".join(map(repr, found[0]))
        raise ValueError(f"no layer matches {wanted.pattern!r} and moves, of {names}")
    if not changes:
        raise ValueError("no activation moved; is the learning rate zero?")
    return changes


def _stack_lists(found: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Stack blocks that are numbered in their paths, where their number changes."""
    counts: dict[str, list[int]] = {}
    for i, layers in enumerate(found):
        for name in layers:
            for pattern, _ in _patterns(name):
                counts.setdefault(pattern, [0] * len(found))[i] += 1
    stacked = []
    for layers in found:
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


def _slopes(sizes: Sequence[int], change: np.ndarray) -> np.ndarray:
    """Least-squares slopes over sizes: (sizes, steps, seeds) to (steps, seeds)."""
    x = np.log(np.asarray(sizes, dtype=float))
    x -= x.mean()
    # Where nothing moved the logarithm is infinite, and the slope not a number.
    with np.errstate(invalid="ignore"):
        return np.tensordot(x, _log(change), 1) / (x**2).sum()


def _log(change: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(change.astype(float))


def _standard_error(slopes: np.ndarray) -> np.ndarray:
    count = slopes.shape[-1]
    if count == 1:
        return np.full(slopes.shape[:-1], np.nan)
    return slopes.std(axis=-1, ddof=1) / math.sqrt(count)
