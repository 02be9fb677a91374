"""`infer_scales`: roles and ratios of any JAX model, from two abstract shapes."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .axes import Axes, from_axes, from_shapes
from .paths import path_string, trainable
from .scales import ParamScale, Role, Scales

_UNSET: Any = object()


@dataclasses.dataclass(frozen=True)
class _Leaf:
    shape: tuple[int, ...]
    layout: str  # "in_out" or "out_in"
    embedding: bool


def infer_scales(
    base: Any,
    target: Any,
    *,
    depth: tuple[int, int] | None = None,
    branch: str | None = _UNSET,
    layout: str = "auto",
    axes: Mapping[str, Axes] | None = None,
    embeddings: str | None = None,
    tied: str | None = None,
    readout: str | None = _UNSET,
    fractional: bool = False,
) -> Scales:
    """Roles and ratios of every parameter, by comparing two models' shapes.

    Args:
      base: the model that was tuned, or that one would tune: an NNX or Equinox
        module, NNX state, Linen variables, Haiku parameters, any pytree of arrays or
        `jax.ShapeDtypeStruct`s, or a function of no arguments that builds one. A
        function is only traced (`jax.eval_shape`), so the size costs no memory.
      target: the model to train, likewise; wider, deeper or both.
      depth: (base depth, target depth), the number of residual blocks. The blocks
        may be a list (`blocks/3/...`) or a stacked leading axis.
      branch: regular expression, searched in paths, of the parameters inside
        residual branches. None says that the model has none.
      layout: "in_out" for kernels (..., in, out), "out_in" for (out, in, ...).
        "auto" takes "out_in" for layers of Equinox and "in_out" for all else.
      axes: for paths that match a regular expression, the (fan-in axes, fan-out
        axes), where shapes do not tell.
      embeddings: regular expression of tables of shape (entries, features), needed
        under "out_in" where the name does not say it.
      tied: regular expression of the embeddings that also serve as readout. They
        are scaled as embeddings, and the model multiplies its logits by 1/m, with
        m the width ratio.
      readout: regular expression that the readouts match, to accept one that is a
        convolution. None says that the model has no readout.
      fractional: accept ratios that are not whole numbers (or their inverse in
        depth).

    Returns:
      `Scales`, a mapping from path to `ParamScale`.

    Raises:
      ValueError: base and target agree in every shape, or differ in kind; a
        dimension shrinks or does not divide; `branch`, `axes`, `embeddings`, `tied`
        or `readout` match nothing; depth without branches; shapes that do not tell
        the role; a readout that is missing, tied or a convolution without being
        declared. The message names the path and what to write instead.

    Source: the roles are those of Tensor Programs V, Table 8; depth is that of
    Tensor Programs VI, Definition 6.2.

    Examples:
      >>> import jax.numpy as jnp
      >>> def mlp(n, blocks):
      ...     return {"embed": jnp.zeros((8, n)), "blocks": jnp.zeros((blocks, n, n)),
      ...             "head": jnp.zeros((n, 10))}
      >>> scales = infer_scales(lambda: mlp(64, 4), lambda: mlp(256, 64),
      ...                       depth=(4, 64), branch="blocks")
      >>> [(path, s.role.value, s.width_in, s.depth) for path, s in scales.items()]
      [('blocks', 'hidden', 4.0, 16.0), ('embed', 'input', 1.0, 16.0), \
('head', 'output', 4.0, 16.0)]
    """
    if layout not in ("auto", "in_out", "out_in"):
        raise ValueError(f"layout={layout!r} must be 'auto', 'in_out' or 'out_in'")
    small, large = _abstract(base, "base"), _abstract(target, "target")
    if layout != "auto":
        small = {p: dataclasses.replace(s, layout=layout) for p, s in small.items()}
    ratio = _depth_ratio(depth, branch, fractional)
    inside = _Pattern("branch", None if branch is _UNSET else branch)
    tables = _Pattern("embeddings", embeddings)
    given = {key: _Pattern("axes", key) for key in axes or {}}

    found: dict[str, ParamScale] = {}
    used: set[str] = set()
    for path, leaf in large.items():
        in_branch = inside.matches(path)
        twin = _twin(path, small, in_branch)
        used.add(twin)
        first = small[twin]
        if len(first.shape) != len(leaf.shape):
            raise ValueError(
                f"{path!r} has {len(leaf.shape)} axes in the target and "
                f"{len(first.shape)} in the base; base and target must differ only in "
                "size"
            )
        stacked = _stacked(first.shape, leaf.shape, depth, in_branch)
        skip = 1 if stacked else 0
        _check_growth(path, first.shape[skip:], leaf.shape[skip:], fractional)
        more: dict[str, Any] = {"depth": ratio, "in_branch": in_branch}
        named = next((k for k, p in given.items() if p.matches(path)), None)
        if named is not None and axes is not None:
            found[path] = from_axes(path, first.shape, leaf.shape, axes[named], **more)
        else:
            found[path] = from_shapes(
                path,
                first.shape,
                leaf.shape,
                layout=first.layout,
                embedding=first.embedding or tables.matches(path),
                stacked=stacked,
                **more,
            )
    for pattern in (inside, tables, *given.values()):
        pattern.check(large)
    _check_all_used(small, used, ratio)
    grows = any(s.role is not Role.FIXED for s in found.values())
    if not grows and ratio == 1:
        raise ValueError(
            "base and target agree in every shape; build the base with a smaller "
            "width, or a smaller depth and depth=(base depth, target depth)"
        )
    last = _last_width(found, tied, readout) if grows else 1.0
    return Scales(
        {p: dataclasses.replace(s, width_last=last) for p, s in found.items()}
    )


class _Pattern:
    """A regular expression of the user's that has to match something."""

    def __init__(self, name: str, expression: str | None):
        self.name, self.expression, self.hit = name, expression, False
        try:
            self._regex = None if expression is None else re.compile(expression)
        except re.error as error:
            raise ValueError(
                f"{name}={expression!r} is no regular expression: {error}"
            ) from None

    def matches(self, path: str) -> bool:
        hit = self._regex is not None and self._regex.search(path) is not None
        self.hit |= hit
        return hit

    def check(self, paths: Mapping[str, Any]) -> None:
        if self._regex is not None and not self.hit:
            shown = ", ".join(repr(p) for p in list(paths)[:6])
            raise ValueError(
                f"{self.name}={self.expression!r} matches no parameter path; the "
                f"paths are {shown}" + (", ..." if len(paths) > 6 else "")
            )


def _abstract(model: Any, which: str) -> dict[str, _Leaf]:
    """The float parameters of a model: path to shape and layout."""
    if _is_function(model):
        model = _trace(model)
    model = trainable(model)
    pairs, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    leaves = {}
    for path, leaf in pairs:
        if _is_variable(leaf):
            if not _has_base(leaf, "Param"):
                continue  # batch statistics, random state: no optimizer sees them
            inner = jax.tree.leaves(leaf)
            if not inner:
                continue
            leaf = inner[0]
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            continue
        owner = _owner(model, path)
        leaves[path_string(path)] = _Leaf(
            tuple(leaf.shape),
            "out_in" if type(owner).__module__.startswith("equinox.nn") else "in_out",
            _has_base(owner, "Embedding") or _has_base(owner, "Embed"),
        )
    if not leaves:
        raise ValueError(
            f"the {which} has no floating-point parameters; pass a model, its "
            "parameters, or a function that builds one"
        )
    return leaves


def _is_function(model: Any) -> bool:
    # Modules of NNX and Equinox are callable too, and are not to be called.
    return (
        inspect.isroutine(model)
        or inspect.isclass(model)
        or isinstance(model, functools.partial)
    )


def _trace(build: Callable[[], Any]) -> Any:
    """`jax.eval_shape` that lets activation functions and the like pass through."""
    others: list[tuple[int, Any]] = []
    treedef = None

    def arrays() -> list[Any]:
        nonlocal treedef
        leaves, treedef = jax.tree.flatten(build())
        others.extend((i, x) for i, x in enumerate(leaves) if not _is_array(x))
        return [x for x in leaves if _is_array(x)]

    leaves = list(jax.eval_shape(arrays))
    for index, other in others:
        leaves.insert(index, other)
    assert treedef is not None
    return jax.tree.unflatten(treedef, leaves)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_variable(node: Any) -> bool:
    return _has_base(node, "Variable") and type(node).__module__.startswith("flax.nnx")


def _has_base(thing: Any, name: str) -> bool:
    # By name, so that the optimizer side imports no module library.
    return any(c.__name__ == name for c in type(thing).__mro__)


def _owner(model: Any, path: tuple[Any, ...]) -> Any:
    """The object that holds the leaf, or None where the path cannot be walked."""
    node = model
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name, None)
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        else:
            return None
    return node


def _depth_ratio(
    depth: tuple[int, int] | None, branch: str | None, fractional: bool
) -> float:
    if depth is None:
        if branch is not _UNSET and branch is not None:
            raise ValueError(
                f"branch={branch!r} needs depth=(base depth, target depth), the "
                "number of residual blocks of each"
            )
        return 1.0
    if len(depth) != 2 or not all(d > 0 and math.isfinite(d) for d in depth):
        raise ValueError(
            f"depth={depth!r} must be (base depth, target depth), both positive"
        )
    if branch is _UNSET:
        raise ValueError(
            f"depth={depth!r} is given without branches; pass branch=r'...' that "
            "matches the parameters inside residual branches (or branch=None for a "
            "network without any, under 'relu_mlp')"
        )
    if depth[1] < depth[0] and not fractional:
        raise ValueError(
            f"depth={depth!r} shrinks; the base comes first. If the target is meant "
            "to be shallower, pass fractional=True"
        )
    return depth[1] / depth[0]


def _stacked(
    base: tuple[int, ...],
    shape: tuple[int, ...],
    depth: tuple[int, int] | None,
    in_branch: bool,
) -> bool:
    return (
        depth is not None
        and in_branch
        and bool(shape)
        and (base[0], shape[0]) == tuple(depth)
    )


def _twin(path: str, small: Mapping[str, _Leaf], in_branch: bool) -> str:
    """The base's parameter that this one is measured against."""
    if path in small:
        return path
    if in_branch:
        # Block 37 of the target has no namesake in a base of 8: take a block that is
        # there, by putting another number in place of each number of the path.
        for number in re.finditer(r"\d+", path):
            head, tail = path[: number.start()], path[number.end() :]
            like = re.compile(re.escape(head) + r"\d+" + re.escape(tail))
            twins = [p for p in small if like.fullmatch(p)]
            if twins:
                return twins[int(number.group()) % len(twins)]
    raise ValueError(
        f"the target has {path!r}, the base has not; build both by the same code, "
        "and where the target has more blocks pass depth=(base depth, target depth) "
        "and a branch=r'...' that matches them"
    )


def _check_all_used(small: Mapping[str, _Leaf], used: set[str], ratio: float) -> None:
    for path in small:
        if path not in used and ratio >= 1:
            raise ValueError(
                f"the base has {path!r}, the target has not; build both by the same "
                "code"
            )


def _check_growth(
    path: str, base: tuple[int, ...], shape: tuple[int, ...], fractional: bool
) -> None:
    for axis, (small, large) in enumerate(zip(base, shape, strict=True)):
        if small == large or fractional:
            continue
        if large < small:
            raise ValueError(
                f"axis {axis} of {path!r} shrinks from {small} in the base to {large} "
                "in the target; the base comes first: swap the two, or pass "
                "fractional=True if the target is meant to be smaller"
            )
        if large % small:
            raise ValueError(
                f"axis {axis} of {path!r} grows from {small} to {large}, and "
                f"{small} does not divide {large}; choose widths that divide, or "
                "pass fractional=True"
            )


def _last_width(
    found: dict[str, ParamScale], tied: str | None, readout: str | None
) -> float:
    """Ratio of the width that the readout sums over; checks the readouts."""
    table = _Pattern("tied", tied)
    tables = [s for p, s in found.items() if table.matches(p)]
    table.check(found)
    for scale in tables:
        if scale.role is not Role.INPUT:
            raise ValueError(
                f"tied={tied!r} matches {scale.path!r}, which is {scale.role.value}, "
                "not an embedding (entries, features)"
            )
    outputs = [s for s in found.values() if s.role is Role.OUTPUT]
    chosen = _Pattern("readout", None if readout is _UNSET else readout)
    heads = [s for s in outputs if chosen.matches(s.path)]
    if readout is None or tied is not None:
        heads = outputs
    elif readout is not _UNSET:
        if not heads:
            shown = ", ".join(repr(s.path) for s in outputs) or "none"
            raise ValueError(
                f"readout={readout!r} matches no parameter whose fan-in alone grows; "
                f"those are: {shown}"
            )
    else:
        heads = outputs
        if not heads:
            raise ValueError(_no_readout(found))
        for head in heads:
            if len(head.in_axes) > 1 and math.prod(head.shape) > head.fan_in:
                raise ValueError(
                    f"the readout {head.path!r} of shape {head.shape} sums over "
                    f"several axes {head.in_axes}, as a convolution does; if it is "
                    f"the readout, pass readout=r'{re.escape(head.path)}'"
                )
    sources = [s.width_in for s in heads] or [s.width_out for s in tables]
    if not sources:
        sources = [max(s.width_out for s in found.values())]
    return max(sources)


def _no_readout(found: dict[str, ParamScale]) -> str:
    tables = [s.path for s in found.values() if s.role is Role.INPUT]
    name = re.escape(tables[0]) if tables else "embedding"
    return (
        "no parameter is a readout (fan-in grows, fan-out does not); if it is tied to "
        f"an embedding, pass tied=r'{name}' and multiply the logits by 1/m; if the "
        "model has none, pass readout=None"
    )
