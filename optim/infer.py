"""`infer_scales`: roles and ratios of any JAX model, from two abstract shapes."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from .axes import Axes, Kernel, check_axes, split_axes
from .blocks import Blocks, find_blocks, namesake
from .leaves import Leaf, leaves
from .patterns import Pattern
from .scales import ParamScale, Role, Scales, param_scale

_UNSET: Any = object()

Leaves = Mapping[str, Leaf]


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
    delta: Any = None,
) -> Scales:
    """Roles and ratios of every parameter, by comparing two models' shapes.

    Args:
      base: the model that was tuned, or that one would tune: an NNX or Equinox
        module, NNX state, Linen variables, Haiku parameters, any pytree of arrays or
        `jax.ShapeDtypeStruct`s, or a function of no arguments that builds one. A
        function is only traced (`jax.eval_shape`), so the size costs no memory.
      target: the model to train, likewise; wider, deeper or both.
      depth: (base depth, target depth), the number of residual blocks. The blocks
        may be a list (`blocks/3/...`) or a stacked leading axis; where they are
        stacked, give it also when the two are equal.
      branch: regular expression, searched in paths, of the parameters inside
        residual branches. None says that the model has none.
      layout: "in_out" for kernels (..., in, out), "out_in" for (out, in, ...).
        "auto" takes "out_in" for layers of Equinox and "in_out" for all else.
      axes: for paths that match a regular expression, the (fan-in axes, fan-out
        axes), where shapes do not tell. An axis in neither, as that of experts or
        layers, counts copies.
      embeddings: regular expression of tables of shape (entries, features), needed
        under "out_in" where the name does not say it.
      tied: regular expression of the embeddings that also serve as readout. They
        are scaled as embeddings, and the model multiplies its logits by 1/m, with
        m the width ratio.
      readout: regular expression that the readouts match, to accept one that is a
        convolution. None says that the model has no readout.
      fractional: accept ratios that are not whole numbers (or their inverse in
        depth).
      delta: a third model, of which every width is another than the base's; its
        depth does not matter. It tells the roles where the target cannot: one that
        has a width of the base's, or is the base itself.

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
    _check_depth_and_branch(depth, branch)
    small, large = leaves(base, "base"), leaves(target, "target")
    wide = large if delta is None else leaves(delta, "delta")
    lines = None if branch is _UNSET else branch
    blocks = find_blocks(small, large, depth, lines, fractional)
    tables = Pattern("embeddings", embeddings)
    given = [(Pattern("axes", key), split) for key, split in (axes or {}).items()]

    found: dict[str, ParamScale] = {}
    for path, leaf in large.items():
        listed = depth is not None and (lines is None or path in blocks.inside)
        twin = _twin(path, leaf, small, "base", listed)
        other = _twin(path, leaf, wide, "delta", True)
        kernel = _kernel(
            path,
            (small[twin], wide[other]),
            (small.get(_bias_of(twin)), wide.get(_bias_of(other))),
            stacked=path in blocks.stacked,
            layout=layout,
            embedding=tables.matches(path),
        )
        _check_growth(kernel, leaf, path in blocks.stacked, fractional)
        told = [split for pattern, split in given if pattern.matches(path)]
        if told:
            split, origin = check_axes(path, leaf.shape, told[0]), "axes given"
        else:
            split, origin = split_axes(kernel)
        found[path] = param_scale(
            path,
            kernel.base,
            leaf.shape,
            *split,
            grows=frozenset(filter(kernel.grows, kernel.axes)),
            depth=blocks.ratio,
            in_branch=path in blocks.inside,
            origin=origin,
        )
    for pattern in (tables, *(pattern for pattern, _ in given)):
        pattern.check(large)
    _check_all_used(small, large, blocks)
    if any(s.role is not Role.FIXED for s in found.values()):
        last = _last_width(found, tied, readout)
    elif blocks.ratio == 1 or delta is not None:
        raise ValueError(
            f"base and {'target' if delta is None else 'delta'} agree in every width; "
            "build the base with a smaller width, or a smaller depth and depth=(base "
            "depth, target depth). For a model that is its own base, pass as delta="
            "... a model of another width"
        )
    else:
        last = 1.0
    return Scales(
        {p: dataclasses.replace(s, width_last=last) for p, s in found.items()}
    )


def _check_depth_and_branch(depth: tuple[int, int] | None, branch: str | None) -> None:
    if depth is None and branch is not _UNSET and branch is not None:
        raise ValueError(
            f"branch={branch!r} needs depth=(base depth, target depth), the number of "
            "residual blocks of each"
        )
    if depth is not None and branch is _UNSET:
        raise ValueError(
            f"depth={depth!r} is given without branches; pass branch=r'...' that "
            "matches the parameters inside residual branches (or branch=None for a "
            "network without any, under 'relu_mlp')"
        )


def _twin(path: str, leaf: Leaf, small: Leaves, which: str, listed: bool) -> str:
    """The parameter of the base (or delta) that this one is measured against."""
    twin = namesake(path, small) if listed else path
    if twin is None or twin not in small:
        raise ValueError(
            f"the target has {path!r}, the {which} has not; build both by the same "
            "code, and where the target has more blocks pass depth=(base depth, target "
            "depth) and a branch=r'...' that matches them"
        )
    if len(small[twin].shape) != len(leaf.shape):
        raise ValueError(
            f"{path!r} has {len(leaf.shape)} axes in the target and "
            f"{len(small[twin].shape)} in the {which}; both must differ only in size"
        )
    return twin


def _kernel(
    path: str,
    leaf: tuple[Leaf, Leaf],
    bias: tuple[Leaf | None, Leaf | None],
    *,
    stacked: bool,
    layout: str,
    embedding: bool,
) -> Kernel:
    """What tells the axes of a parameter; each pair is of base and delta."""
    base, wide = leaf
    copies = max(int(stacked), len(base.shape) - (base.rank or len(base.shape)))
    small, large = bias
    return Kernel(
        path,
        base.shape,
        wide.shape,
        (small.shape[copies:], large.shape[copies:]) if small and large else None,
        layout=base.layout if layout == "auto" else layout,
        embedding=base.embedding or embedding,
        batch=copies,
    )


def _bias_of(path: str) -> str:
    """Where the bias of a kernel stands, by the names that libraries give."""
    head, slash, name = path.rpartition("/")
    for kernel, bias in (("kernel", "bias"), ("weight", "bias"), ("w", "b")):
        if re.match(kernel + r"(?![a-z])", name):
            return head + slash + name.replace(kernel, bias, 1)
    return ""


def _check_growth(kernel: Kernel, leaf: Leaf, stacked: bool, fractional: bool) -> None:
    path = kernel.path
    for axis in range(int(stacked), len(leaf.shape)):
        small, large = kernel.base[axis], leaf.shape[axis]
        if small == large:
            continue
        grows = f"axis {axis} of {path!r} grows from {small} to {large}"
        if axis < kernel.batch:
            raise ValueError(
                f"{grows}, and counts copies of its layer; pass depth=(base depth, "
                "target depth) and a branch=r'...' that matches it"
            )
        if not kernel.grows(axis):
            raise ValueError(
                f"{grows}, and not in delta; build the delta with every width another "
                "than the base's"
            )
        if fractional:
            continue
        if large < small:
            raise ValueError(
                f"axis {axis} of {path!r} shrinks from {small} in the base to {large} "
                "in the target; the base comes first: swap the two, or pass "
                "fractional=True if the target is meant to be smaller"
            )
        if large % small:
            raise ValueError(
                f"{grows}, and {small} does not divide {large}; choose widths that "
                "divide, or pass fractional=True"
            )


def _check_all_used(small: Leaves, large: Leaves, blocks: Blocks) -> None:
    for path in small:
        if path not in large and blocks.ratio >= 1:
            raise ValueError(
                f"the base has {path!r}, the target has not; build both by the same "
                "code"
            )


def _last_width(
    found: dict[str, ParamScale], tied: str | None, readout: str | None
) -> float:
    """Ratio of the width that the readout sums over; checks the readouts."""
    table = Pattern("tied", tied)
    tables = [s for p, s in found.items() if table.matches(p)]
    table.check(found)
    for scale in tables:
        if scale.role is not Role.INPUT:
            raise ValueError(
                f"tied={tied!r} matches {scale.path!r}, which is {scale.role.value}, "
                "not an embedding (entries, features)"
            )
    outputs = [s for s in found.values() if s.role is Role.OUTPUT]
    chosen = Pattern("readout", None if readout is _UNSET else readout)
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
            if len(head.in_axes) > 1:
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
