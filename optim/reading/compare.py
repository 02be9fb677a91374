"""Compare the programs of base and target: roles, depth, branches and constants."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import ParamScale, Role
from ..scales.declare import Declarations
from ..scales.table import Scales, some
from .carry import Carry
from .depth import Depth
from .facts import Facts
from .growth import grown, same_parametrization
from .kinds import alike
from .models import Reading
from .numbers import POWERS
from .pair import Pair, check_loops
from .roles import Found, remedy
from .states import settle_states


def compare(
    readings: Sequence[Reading],
    given: Declarations,
    point: Parametrization | None,
    *,
    fractional: bool,
) -> Scales:
    """Roles from the programs, depth from their branches.

    Args:
      readings: of the base, of the target, and of a model of other widths than the
        base's, if there is one.
      given: parameters whose axes the user declared.
      point: the parametrization; None for the one that the program implies.
      fractional: whether ratios need not be whole numbers.
    """
    pair = Pair(readings, given, fractional)
    check_loops(pair)
    settle_states(pair)
    depth = Depth(pair)
    own = pair.leaves.parametrization
    point = same_parametrization(own, point) or own
    like = _used_elsewhere(pair)
    found = {path: _scale(pair, depth, like.get(path, path)) for path in pair.leaves}
    carry, beyond = Carry(pair, depth, found, given), depth.largest
    if pair.deeper and not (depth.ratios or depth.averaged):
        beyond = depth.plain(point)
    try:
        if own is None:
            point = carry.follow(point)
        else:
            carry.check(own)
    finally:  # what an inner optimizer lacks explains other numbers
        _check_inner_steps(pair, found)
    _warn_of_uncalled(pair, found)
    last, depths = _last_width(pair, found), depth.inside | depth.on_stream
    found = {
        path: dataclasses.replace(
            scale, depth=depths.get(path, beyond), width_last=last
        )
        for path, scale in found.items()
    }
    found |= {p: dataclasses.replace(found[x], path=p) for p, x in like.items()}
    point = point or parametrization("mup")
    return Scales(
        pair.parts.joined(found, pair.twin),
        point,
        multiplied=own is not None,
    )


def _scale(pair: Pair, depth: Depth, path: str) -> ParamScale:
    role, grows = pair.large.roles[path], pair.growth[path]
    if grows and _is_unknown(pair, path):
        raise ValueError(_unused(pair))
    if role is None:
        role = Found(path)
    if grows & set(role.mixed):
        raise ValueError(
            f"axis {role.mixed[0]} of {path!r} holds both the inputs and the "
            f"outputs of a kernel ({role.line}), so that it has no fan-in of its "
            "own; store each kernel with an axis for its inputs and one for its "
            "outputs, e.g. by call=lambda params, *inputs: ... that flattens them"
        )
    before = pair.small.roles[pair.twin[path]]
    differs = before and (grows & {*before.in_axes}, before.table) != (
        grows & {*role.in_axes},
        role.table,
    )
    if before is not None and grows and differs:
        raise ValueError(
            f"base and target use {path!r} differently: the base sums over axes "
            f"{before.in_axes} ({before.line}), the target over {role.in_axes} "
            f"({role.line}); build both by the same code. An einsum of several "
            "operands multiplies them in an order that depends on sizes: split it "
            "into einsums of two operands"
        )
    if pair.counts_layers(path):
        every = tuple(range(len(pair.leaves[path].shape)))
        role = dataclasses.replace(role, in_axes=(), out_axes=(), copies=every)
    heads = pair.large.heads.get(path, ())
    small_heads = pair.small.heads.get(pair.twin[path], ())
    heads_in, heads_out = pair.beside.get(path, (1.0, 1.0))
    carried = 1.0
    if not role.in_axes:  # a bias, of which the sum of all is to stay
        heads_in, carried = 1.0, 1 / heads_in
    scale = grown(
        role,
        pair.shapes[path],
        fractional=pair.fractional,
        in_branch=path in depth.inside,
        on_stream=path in depth.on_stream,
        shared=depth.shared.get(path, 1.0),
        head_shape=heads if small_heads else (),
        base_head_shape=small_heads if heads else (),
        heads_in=heads_in,
        heads_out=heads_out,
        carried=carried,
    )
    # The kernel whose entries it multiplies is as small as one of its role.
    power = POWERS.get(scale.role, 0.0) if pair.large.scales_entries(path) else 0.0
    return dataclasses.replace(scale, carried=scale.carried * scale.width_in**power)


def _check_inner_steps(pair: Pair, found: Mapping[str, ParamScale]) -> None:
    """Raise a `ValueError` if the rates of an inner optimizer are not those of SGD."""
    wanted, line = dict[str, str](), ""
    for kind in pair.kinds(Facts.inner_steps).values():
        for (path, node, now), (*_, then) in kind.twins:
            scale = found[path]
            ratio = scale.width_out / scale.width_in / scale.carried**2 * then / now
            if not alike(ratio, 1):
                wanted[path] = f"{ratio:.4g} for {path!r}"
                line = line or node.line
    if wanted:
        raise ValueError(
            f"steps of an inner optimizer ({line}) need the factors of SGD: multiply "
            "the gradients by (number of outputs / number of inputs) of what grows, "
            f"over those of the base. Here that is {', '.join(wanted.values())}"
        )


def _is_unknown(pair: Pair, path: str) -> bool:
    """Whether the program does not use a parameter, and its layer says too little.

    A layer says nothing of branches, which matter where the target has more of it.
    """
    role = pair.large.roles[path]
    return role is None or (role.uncalled and path in pair.deeper)


def _used_elsewhere(pair: Pair) -> dict[str, str]:
    """Parameters that one layer does not use, and those of layers that do."""
    kind = {p: (pair.opened(p), pair.shapes[p]) for p in pair.leaves}
    unknown = {p for p in kind if _is_unknown(pair, p)}
    used = {kind[p]: p for p in kind if p not in unknown}
    return {p: used[kind[p]] for p in unknown if kind[p] in used}


def _unused(pair: Pair) -> str:
    """Which parameters' use is not known, and what to do."""
    known = _used_elsewhere(pair)
    unused = (p for p in pair.leaves if _is_unknown(pair, p) and p not in known)
    shapes = {p: pair.leaves[p].shape for p in unused if pair.growth[p]}
    deep = next((p for p in shapes if p in pair.deeper), None)
    return (
        f"the forward pass does not use {some([*shapes])}; pass "
        "call=lambda model, *inputs: ... that does (the loss, for example), "
        + (
            f"so that the multipliers of {deep!r}, of which the target has more, "
            "are known; or, if training never uses them, "
            if deep
            else "or "
        )
        + f"declare the axes: {remedy(shapes)}"
    )


def _warn_of_uncalled(pair: Pair, found: Mapping[str, ParamScale]) -> None:
    """Warn of kernels whose layer's class says what they do, and no more.

    A loss may multiply what such a layer makes, e.g. by 1 / width.
    """
    roles = pair.large.roles
    paths = [
        path
        for path, scale in found.items()
        if (role := roles[path]) and role.uncalled and scale.in_axes
        if scale.role is not Role.FIXED
    ]
    if paths:
        warnings.warn(
            f"the forward pass does not call the layers of {some(paths)}. Their "
            "classes say what they sum over, but a constant that other code puts "
            "on their results, e.g. 1 / width in a loss, is not seen: pass "
            "call=lambda model, *inputs: ... that calls them, too",
            stacklevel=4,
        )


def _last_width(pair: Pair, found: Mapping[str, ParamScale]) -> float:
    """Ratio of the last hidden layer's width: the fan-in of the last readout."""
    last, width = -1, 1.0
    ends, out = -1, 1.0  # of a model without a readout
    for path, scale in found.items():
        role = pair.large.roles[path]
        if role is None:
            continue
        if scale.role is Role.OUTPUT and role.at > last:
            last, width = role.at, scale.width_in
        elif role.tied_node and role.tied_node.id > last:
            last, width = role.tied_node.id, scale.width_out
        if scale.width_out != 1 and role.at > ends:
            ends, out = role.at, scale.width_out
    return width if last >= 0 else out
