"""Run a gradient transformation on known gradients, at base and at target size.

A probe is a small tree with the parameters' paths and growth ratios. While it runs,
the transforms of this package accept its shapes, and their multipliers can be off.
"""

import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..rules.multipliers import is_zero
from ..scales.paths import flatten, map_with_paths
from ..scales.probe import Acting, Mode, Recorder, running

# Most elements of a probe's target tree.
_SIZE = 2**16
# Axes up to this size are never reduced: windows of convolutions, heads, experts.
_SMALL = 8
_STEPS = 32
Shape: TypeAlias = tuple[int, ...]


def acting(tx: Any, params: Any) -> Acting | None:
    """Find a scaling inside of `tx`, which is only traced, not compiled or run."""
    recorder = Recorder(Mode.TARGET)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def step(grads: Any) -> Any:
        return tx.update(grads, tx.init(grads), grads, **_extra(tx, grads))[0]

    with running(recorder):
        jax.eval_shape(step, shapes)
    return next((next(iter(each)) for each in recorder.scalings.values()), None)


def _extra(tx: Any, grads: Any) -> dict[str, Any]:
    """Extra arguments of `update` that some Optax transforms need."""
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return {}
    one = jnp.float32(1)
    return {"value": one, "grad": grads, "value_fn": lambda *_, **__: one}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of a probe; its shapes are as small as the ratios allow."""

    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    gradient: float = 1.0  # size of the target's gradient, relative to the base's
    weight: float = 1.0  # and of its weight


def probe_shapes(
    shapes: Mapping[str, tuple[Shape, Shape]],
) -> dict[str, tuple[Shape, Shape]]:
    """Smaller (base, target) shapes with the same ratio along every axis.

    One divisor for all, as shape factors (Muon's) depend on the ratio of two axes.

    Examples:
      >>> probe_shapes({"w": ((1024, 512), (8192, 512))})
      {'w': ((128, 64), (1024, 64))}
    """
    divisor = 1
    while True:
        smaller = {p: _reduced(*pair, divisor) for p, pair in shapes.items()}
        size = sum(math.prod(target) for _, target in smaller.values())
        if size <= _SIZE or divisor > 2**20:
            return smaller
        divisor *= 2


def _reduced(base: Shape, target: Shape, divisor: int) -> tuple[Shape, Shape]:
    pairs = []
    for small, large in zip(base, target, strict=True):
        if small > _SMALL and large:
            target_units, units = fractions.Fraction(large, small).as_integer_ratio()
            # Not much below the size up to which axes are kept.
            kept = max(small // (units * divisor), math.ceil(_SMALL / 2 / units))
            small, large = kept * units, kept * target_units
        pairs.append((small, large))
    return tuple(b for b, _ in pairs), tuple(t for _, t in pairs)


_GRADIENT = (1.0, -0.5, 0.75, -1.25)
_WEIGHT = (-0.8, 0.6, 1.2, 0.9, -1.1)


class Unchecked(ValueError):
    """Raised if a check is not possible."""


class TracedError(Unchecked):
    """Raised if a hyperparameter is a traced value."""

    def __init__(self) -> None:
        super().__init__(
            "a hyperparameter of tx is a traced value; check the optimizer outside of "
            "jit and vmap, with numbers"
        )


class Condition(NamedTuple):
    """One run of a probe, in two steps."""

    gradient: float  # size of the base's gradients
    weight: float = 1.0  # size of the base's weights
    then: float = 0.0  # size of its gradients in the step after the first update
    odd: float = 1.0  # factor of the first gradients of every second parameter
    loud: float = 1.0  # factor of the factors by which scalings multiply updates


class Run(NamedTuple):
    """Updates by path: of the first step that depends on gradients, and the next."""

    first: Mapping[str, np.ndarray]
    second: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A transformation, and the tree on which it runs."""

    tx: Any  # any object with Optax's `init` and `update`
    params: Any  # a tree of the parameters' structure; its leaves are not read
    leaves: Mapping[str, Leaf]
    shifts: Mapping[str, Any]  # how much less the target stores; see `shift`

    def slope(self, name: str) -> np.ndarray:
        """The base's gradient, of size one."""
        return self._filled(name, True, _GRADIENT)

    def weight(self, name: str) -> np.ndarray:
        """The base's weight, of size one."""
        return self._filled(name, True, _WEIGHT)

    def norm(self, which: Mode) -> float:
        """The global norm of gradients of size one; 1 if all are empty."""
        at_base = which is Mode.BASE
        slopes = (self._filled(name, at_base, _GRADIENT) for name in self.leaves)
        return math.sqrt(sum(float(np.vdot(x, x)) for x in slopes)) or 1.0

    def run(
        self, which: Mode, conditions: Sequence[Condition]
    ) -> tuple[dict[Condition, Run], Recorder]:
        """Updates by condition and path, with the shapes and sizes of base or target.

        All conditions take as many steps. The first two must differ in the size of
        gradients alone: the first update is that in which they differ.

        Raises:
          Unchecked, jax.errors.JAXTypeError: a hyperparameter of `tx` is traced.
        """
        at_base, recorder = which is Mode.BASE, Recorder(which)
        paths = [path for path, _ in flatten(self.params)]
        odd = {path: bool(i % 2) for i, path in enumerate(paths)}

        def tree(pattern: tuple[float, ...]) -> Any:
            with jax.ensure_compile_time_eval():
                return map_with_paths(
                    lambda path, _: self._filled(path, at_base, pattern), self.params
                )

        slopes, weights = tree(_GRADIENT), tree(_WEIGHT)

        def stored(c: Condition) -> Any:
            def fill(path: str, x: jax.Array) -> jax.Array:
                by = 0.0 if at_base else self.shifts.get(path, 0.0)
                return x * c.weight if is_zero(by) else x * c.weight - by

            return map_with_paths(fill, weights)

        def update(c: Condition, state: Any, moved: jax.Array) -> Any:
            recorder.loudness = c.loud

            def gradient(path: str, slope: jax.Array) -> jax.Array:
                first = c.gradient * c.odd if odd[path] else c.gradient
                return slope * jnp.where(moved, c.then, first)

            grads = map_with_paths(gradient, slopes)
            return self.tx.update(grads, state, stored(c), **_extra(self.tx, grads))

        def runs(table: Condition) -> Any:
            def step(carry: Any) -> Any:
                first, _, state, moved, count = carry
                updates, state = jax.vmap(update, (0, 0, None))(table, state, moved)
                first = jax.tree.map(
                    lambda a, b: jnp.where(moved, a, b), first, updates
                )
                differ = [jnp.any(u[0] != u[1]) for u in jax.tree.leaves(updates)]
                count = jnp.where(moved, _STEPS, count + 1)
                return first, updates, state, moved | jnp.any(jnp.array(differ)), count

            none = jax.vmap(lambda c: jax.tree.map(jnp.zeros_like, slopes))(table)
            start = jax.vmap(lambda c: self.tx.init(stored(c)))(table)
            carry = none, none, start, jnp.asarray(False), 0
            return jax.lax.while_loop(lambda carry: carry[-1] < _STEPS, step, carry)[:2]

        table = Condition(*np.asarray(conditions, np.float32).T)
        on_cpu = jax.default_backend() == "cpu"
        # Compiling takes longer than running.
        fast: Any = {"xla_backend_optimization_level": 0} if on_cpu else {}
        # Compiled ahead of time, so that it runs inside of an outer jit too.
        with running(recorder):
            lowered = jax.jit(runs).lower(table)
        compiled = lowered.compile(compiler_options=fast)
        try:
            first, second = compiled(table)
        except TypeError as error:
            # Traced values of an outer jit have become inputs.
            raise TracedError from error

        def by_path(updates: Any, i: int) -> dict[str, np.ndarray]:
            return {p: np.asarray(x, np.float32)[i] for p, x in flatten(updates)}

        each = enumerate(conditions)
        found = {c: Run(by_path(first, i), by_path(second, i)) for i, c in each}
        return found, recorder

    def _filled(
        self, name: str, at_base: bool, pattern: tuple[float, ...]
    ) -> np.ndarray:
        """A matrix of rank one whose entries have the same sizes at base and target."""
        leaf = self.leaves[name]
        shape = leaf.base_shape if at_base else leaf.shape
        size = leaf.gradient if pattern is _GRADIENT else leaf.weight
        array = np.full(shape, 1.0 if at_base else size, np.float32)
        for axis, small in enumerate(leaf.base_shape):
            # A pattern repeated a whole number of times keeps its mean and norm.
            if small and leaf.shape[axis] % small == 0:
                row = np.tile(np.resize(pattern, small), shape[axis] // small)
                array *= row.reshape([-1] + [1] * (array.ndim - 1 - axis))
        return array


def rms(array: np.ndarray) -> float:
    """Root mean square in float64."""
    if not array.size:
        return 0.0
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
