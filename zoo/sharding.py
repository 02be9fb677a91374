"""Shard parameters and batches over a mesh, by rules from axis names to mesh axes.

A batch is split over "data" and "fsdp". Weights are split over "fsdp" (ZeRO-3: each
device stores a part of every weight and gathers the whole when it is used) and over
"tensor" (which splits the inside of each branch).
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from .plan import LAYERS

BATCH_AXES = ("data", "fsdp")
MESH_AXES = ("data", "fsdp", "tensor")

#: {name of a parameter's axis: the mesh axis that splits it, or several, of which the
#: first free one does, or None for an axis that is never split}.
Rules = Mapping[str, str | tuple[str, ...] | None]

# Trailing digits of a name, as in "stage3", are ignored.
RULES: Rules = {
    # The residual stream.
    "embed": "fsdp",
    "stage": "fsdp",
    # The inside of branches.
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mid": ("tensor", "fsdp"),
    "inner": ("tensor", "fsdp"),
    # Expert parallelism: each device along "tensor" holds whole experts.
    "experts": "tensor",
    "stem": "fsdp",
    "top": ("tensor", "fsdp"),
    # Both ends.
    "vocab": "tensor",
    "classes": None,
    "inputs": None,
    "patch": None,
    "channels": None,
    "positions": None,
    "registers": None,
    "pooled": None,
    "pixels": None,
    # Axes that a device needs whole.
    "head_dim": None,
    "kernel": None,
    # Small axes, e.g. the channels of one group.
    "group": None,
    "depthwise": None,
    "squeeze": None,
    "narrow": None,
    LAYERS: None,
}

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=RULES)


def partition_specs(
    model: nnx.Module,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
) -> dict[str, PartitionSpec]:
    """Compute how each parameter of a model is split over a mesh.

    Args:
      model: a zoo model, possibly abstract (from `nnx.eval_shape`).
      mesh: with axes of `MESH_AXES`.
      rules: changes to `RULES`.

    Returns:
      {path: spec} of every variable with axis names. Each mesh axis splits at most one
      axis of an array, the first one with a rule for it.

    Raises:
      ValueError: no rule covers an axis name, the mesh does not divide a size, or a
        mesh axis splits nothing of this model.

    Examples:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=32, depth=4, rngs=nnx.Rngs(0))
      >>> mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
      >>> tuple(zoo.partition_specs(model, mesh)["blocks/layers/0/kernel"])
      (None, 'fsdp', None)
    """
    for axis in mesh.axis_names:
        if axis not in MESH_AXES:
            raise ValueError(f"mesh axis {axis!r} must be one of {MESH_AXES}")
    table = complete_rules(rules)
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    specs = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name = "/".join(map(str, path))
        axes = variable.get_metadata().get("axes")
        if axes is None:
            if isinstance(variable, nnx.Param) and sizes.keys() - {"data"}:
                raise ValueError(
                    f"parameter {name!r} is not one of the zoo and has no axis names, "
                    'so only the mesh axis "data" is possible'
                )
            continue
        axes = (LAYERS,) * (len(variable.shape) - len(axes)) + tuple(axes)
        specs[name] = _spec(name, axes, variable.shape, sizes, table)
    used = {axis for spec in specs.values() for axis in spec if axis}
    for axis in sizes.keys() - {"data"} - used:
        raise ValueError(
            f"no parameter of a {type(model).__name__} is split over the mesh axis "
            f"{axis!r}; move its {sizes[axis]} devices to another axis"
        )
    return specs


def complete_rules(changes: Rules | None = None) -> Rules:
    """Return `RULES` with changes.

    Raises:
      ValueError: a rule has an unknown mesh axis.
    """
    for name, rule in (changes or {}).items():
        known = rule is None or isinstance(rule, str | Sequence)
        for axis in _choices(rule) if known else (rule,):
            if not isinstance(axis, str) or axis not in MESH_AXES:
                raise ValueError(
                    f"the sharding rule of {name!r} names {axis!r}, which must be None "
                    f"or one of {MESH_AXES}"
                )
    return {**RULES, **(changes or {})}


def _spec(
    path: str,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    rules: Rules,
) -> PartitionSpec:
    """Compute and check the spec of one parameter."""
    spec: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        free = [a for a in _rule(name, rules, path) if a in sizes and a not in spec]
        if not free:
            spec.append(None)
            continue
        axis = free[0]
        if size % sizes[axis]:
            raise ValueError(
                f"axis {name!r} of parameter {path!r} has size {size}, which the "
                f"{sizes[axis]} devices of the mesh axis {axis!r} do not divide; "
                f"choose a multiple, another mesh, or the rule {{{name!r}: None}}"
            )
        spec.append(axis)
    return PartitionSpec(*spec)


def _choices(rule: str | Sequence[str] | None) -> tuple[str, ...]:
    if rule is None:
        return ()
    return (rule,) if isinstance(rule, str) else tuple(rule)


def _rule(name: str, rules: Rules, path: str) -> tuple[str, ...]:
    for key in (name, name.rstrip("0123456789")):
        if key in rules:
            return _choices(rules[key])
    raise ValueError(
        f"no sharding rule covers the axis {name!r} of parameter {path!r}; add one, "
        f"e.g. {{{name!r}: None}}"
    )


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules | None = None) -> Iterator[None]:
    """Context in which models, when traced, split their work over a mesh.

    Args:
      mesh: with axes of `MESH_AXES`, of type Auto.
      rules: changes to `RULES`.

    Raises:
      ValueError: a rule has an unknown mesh axis.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> axes = ("data", "fsdp", "tensor")
      >>> mesh = jax.make_mesh((1, 1, 1), axes, (jax.sharding.AxisType.Auto,) * 3)
      >>> model = zoo.create("resmlp", width=8, depth=2, rngs=nnx.Rngs(0))
      >>> with zoo.use_mesh(mesh):
      ...     logits = nnx.jit(model)(jnp.ones((4, 8, 8, 1)))
      >>> logits.shape
      (4, 10)
    """
    token = _rules.set(complete_rules(rules))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _rules.reset(token)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its first axis is split over "data" and "fsdp".

    Args:
      mesh: with axes of `MESH_AXES`, of type Auto.

    Examples:
      >>> import jax
      >>> from mupax import zoo
      >>> mesh = jax.make_mesh((1, 1), ("data", "fsdp"),
      ...                      (jax.sharding.AxisType.Auto,) * 2)
      >>> tuple(zoo.batch_sharding(mesh).spec)
      (('data', 'fsdp'),)
    """
    return NamedSharding(mesh, PartitionSpec(_batch_axes(mesh)))


def shard_batch(x: Float[Array, "batch *rest"]) -> Float[Array, "batch *rest"]:
    """Constrain the residual stream so that each device holds its own examples."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = _batch_axes(mesh)
    devices = _count(mesh, axes)
    # A batch too small to split, e.g. one example, is replicated.
    if devices == 1 or not x.ndim or x.shape[0] % devices:
        return x
    split: Array = jax.lax.with_sharding_constraint(x, PartitionSpec(axes))
    return split


def gather(
    x: Float[Array, "*shape"], names: tuple[str, ...] | None
) -> Float[Array, "*shape"]:
    """Gather a weight along "fsdp"; it stays split along "tensor".

    Its gradient is reduced and scattered in one operation. The backward pass gathers
    the weight again instead of storing it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not is_gathering() or names is None:
        return x
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    spec = _spec("", names, x.shape, sizes, _rules.get())
    if "fsdp" not in spec:
        return x
    whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))
    return _reshard(x, spec, whole)


def weight(variable: nnx.Variable[Any], dtype: Any) -> Array:
    """A parameter's array for use in a layer: gathered, in the computation's dtype.

    It is cast before it is gathered, which halves the traffic in half precision.
    """
    names = variable.get_metadata().get("axes")
    return gather(variable[...].astype(dtype), names)


def platform() -> str:
    """The platform for which a model is traced: "cpu", "gpu" or "tpu".

    It is that of the mesh in use, which may be another machine's; else the default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.default_backend() if device is None else device.platform
    return "gpu" if kind in ("cuda", "rocm") else kind


def is_splitting() -> bool:
    """Whether the mesh in use has several devices, among which XLA splits the work."""
    mesh = jax.sharding.get_abstract_mesh()
    return _count(mesh, _auto(mesh)) > 1


def is_gathering() -> bool:
    """Whether the mesh in use splits weights over "fsdp"."""
    mesh = jax.sharding.get_abstract_mesh()
    return _count(mesh, tuple(a for a in _auto(mesh) if a == "fsdp")) > 1


def saves_no_gathered_weight(
    primitive: Any, *_: Any, call_jaxpr: Any = None, **__: Any
) -> bool:
    """A policy of `jax.checkpoint`: save all but weights that `gather` returned."""
    if call_jaxpr is None:
        return True
    inside = [equation.primitive.name for equation in call_jaxpr.eqns]
    return inside != ["sharding_constraint"]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _reshard(x: Array, before: PartitionSpec, after: PartitionSpec) -> Array:
    resharded: Array = jax.lax.with_sharding_constraint(x, after)
    return resharded


@_reshard.defjvp
def _reshard_jvp(
    before: PartitionSpec, after: PartitionSpec, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    # The constraint of the tangent is that of the gradient, its transpose.
    tangent = jax.lax.with_sharding_constraint(tangents[0], before)
    return _reshard(primals[0], before, after), tangent


def _batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return tuple(axis for axis in _auto(mesh) if axis in BATCH_AXES)


def _auto(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Mesh axes of type Auto; sharding constraints do not apply to others."""
    return tuple(
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    )


def _count(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
