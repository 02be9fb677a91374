"""Optimizers that see each segment of a fused parameter as a parameter.

Those whose update of an entry depends on other entries of its array: orthogonalization
and the like (Muon, SOAP, ...), trust ratios (LAMB), factored moments and clipping by
array (Adafactor). They may also see each head of an attention's kernel as a matrix.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..rules.roles import ParamScale, Place
from ..scales.paths import flatten, has_base, map_with_paths, nested
from ..scales.probe import Mode, mode
from ..scales.table import Scales


def by_segment(
    scales: Scales,
    make: Callable[[Scales], optax.GradientTransformation],
    *,
    per_head: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Build an optimizer that sees a tuple of segments in place of a fused parameter.

    Its state has the segments' shapes. With `per_head` kernels get an axis that counts
    their heads.
    """
    if not per_head and not any(scale.segments for scale in scales.values()):
        return optax.with_extra_args_support(make(scales))
    whole = _apart(scales)
    heads = {p: s.by_head() for p, s in whole.items() if per_head and s.head_shape}
    inner = optax.with_extra_args_support(
        make(whole.replaced(scales={**whole, **heads}))
    )

    def split(tree: Any) -> Any:
        def shaped(path: str, leaf: Any) -> Any:
            if path not in heads:
                return leaf
            at_base = mode() is Mode.BASE
            return leaf.reshape(whole[path].with_heads(leaf.shape, at_base=at_base))

        return map_with_paths(shaped, _split(tree, scales))

    def init(params: optax.Params) -> optax.OptState:
        scales.check_params(params)
        return inner.init(split(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        pieces = None if params is None else split(params)
        changed, state = inner.update(split(updates), state, pieces, **extra)
        if heads:
            like = _split(updates, scales)
            changed = jax.tree.map(lambda x, y: x.reshape(y.shape), changed, like)
        return _joined(updates, changed, scales), state

    return optax.GradientTransformationExtraArgs(init, update)


def _apart(scales: Scales) -> Scales:
    """The scales with every segment as a parameter."""
    parts = {p: s.named for p, s in scales.items()}
    modules = {n: m for path, m in scales.modules.items() for n in parts[path]}
    found = {name: s for named in parts.values() for name, s in named.items()}
    return scales.replaced(scales=found, modules=modules, base=None)


def _split(tree: Any, scales: Scales) -> Any:
    """The tree with a tuple of segments in place of each fused parameter."""

    def split(path: str, leaf: Any) -> Any:
        scale = scales.get(path)
        if scale is None or not scale.segments:
            return leaf
        scales.check_leaf(path, leaf)
        if mode() is not None:  # it is one segment, which stands for all
            return (leaf,) * len(scale.segments)
        return tuple(place.of(leaf) for place in _places(scale, leaf))

    if has_base(tree, "State"):
        # An NNX state holds no tuples; None stands for what a filter left out.
        tree = nested(dict.fromkeys(scales) | dict(flatten(tree)))
    return map_with_paths(split, tree)


def _joined(like: Any, tree: Any, scales: Scales) -> Any:
    """The tree with fused parameters again."""
    found = dict(flatten(tree))

    def join(path: str, leaf: Any) -> Any:
        scale = scales.get(path)
        if scale is None or not scale.segments:
            return found[path]
        parts = [found[name] for name in scale.named]
        if mode() is not None:
            return parts[scale.segments.index(scale.widest)]
        places = _places(scale, leaf)
        views = [
            x.reshape(at.view(x.shape)) for x, at in zip(parts, places, strict=True)
        ]
        starts = [place.start for place in places]
        return _assembled(views, starts, 0).reshape(scale.shape)

    return map_with_paths(join, like)


def _places(scale: ParamScale, leaf: Any) -> Sequence[Place]:
    if tuple(leaf.shape) != scale.shape:
        raise ValueError(
            f"{scale.path!r} is a fused parameter of shape {scale.shape}, and the "
            f"optimizer got a shard of shape {tuple(leaf.shape)}; call it outside of "
            "jax.shard_map"
        )
    return [segment.place for segment in scale.segments]


def _assembled(
    parts: list[jax.Array], starts: list[tuple[int, ...]], axis: int
) -> jax.Array:
    """A view of its segments' views, which fill it, by where they begin.

    Concatenation of sharded parts needs no all-gather, unlike writing them one by one.
    """
    if len(parts) == 1:
        return parts[0]
    slabs: dict[int, list[int]] = {}
    for i, start in enumerate(starts):
        slabs.setdefault(start[axis], []).append(i)
    each = [
        _assembled([parts[i] for i in at], [starts[i] for i in at], axis + 1)
        for _, at in sorted(slabs.items())
    ]
    return each[0] if len(each) == 1 else jnp.concatenate(each, 2 * axis + 1)
