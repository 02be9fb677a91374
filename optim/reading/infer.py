"""`infer_scales`: roles and ratios of any JAX model, from the shapes of two models."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .. import names
from ..apply.transforms import ParametrizationLike
from ..axes import Axes, Kernel, Split, split_axes
from ..blocks import Blocks, check_depth, find_blocks
from ..depth_change import DepthChange, from_front
from ..overrides import Overrides
from ..readouts import InferredModel, choose_readouts, last_width
from ..rules.parametrizations import parametrization as named
from ..rules.roles import ParamScale, Role, param_scale
from ..rules.training import training_scale
from ..scales.paths import biases_of
from ..scales.patterns import UNSET, Pattern
from ..scales.table import Scales
from ..widths import Widths, vector_as_readout
from .compare import read_scales
from .leaves import Leaf, Leaves, leaves
from .lists import Pairing


def infer_scales(
    base: Any,
    target: Any,
    *,
    inputs: tuple[Any, ...] | None = None,
    call: Callable[..., Any] | None = None,
    parametrization: ParametrizationLike | None = None,
    depth: tuple[int, int] | None = None,
    branch: str | None = UNSET,
    stream: str | None = None,
    layers_axis: int | tuple[int, ...] = 0,
    layout: str = "auto",
    axes: Mapping[str, Axes] | None = None,
    copies: str | None = None,
    embeddings: str | None = None,
    tied: str | None = UNSET,
    readout: str | None = UNSET,
    fractional: bool = False,
    delta: Any = None,
    batch: tuple[float, float] | None = None,
    examples: tuple[float, float] | None = None,
    critical_batch: float | None = None,
) -> Scales:
    """Find the role and growth ratios of every parameter by comparing two models.

    With `inputs`, both forward passes are traced (`jax.make_jaxpr`), and everything is
    read from their programs: which axes of a parameter are summed over, the residual
    branches and their number, and the constants on branches, attention logits and
    readouts. Names and shapes do not matter, and the model needs no change: where it
    does not multiply its branches or logits, `rescale_init` and the optimizers give
    the parameters at the end of a branch (and those of the queries) initial sizes and
    learning rates that have the same effect. Where it does, the constant is checked.
    Nothing is computed, so a model of any size needs no memory.

    Without `inputs`, roles come from names and shapes. Where these are ambiguous, the
    function does not guess: it raises a `ValueError` that lists the parameters and the
    argument to pass for each.

    Args:
      base: the model that was tuned, or that you will tune: an NNX or Equinox
        module, NNX state, Linen variables, Haiku parameters, any pytree of arrays or
        `jax.ShapeDtypeStruct`s, or a function of no arguments that builds one. A
        function is only traced (`jax.eval_shape`), so large models need no memory.
        With `inputs` also a Linen module, a Haiku function after `hk.transform`, or a
        pair (forward pass, parameters), where the forward pass is a Linen module or
        a function of the parameters and the inputs.
      target: the model to train, in the same form; wider, deeper or both.
      inputs: the arguments of one forward pass, arrays or `jax.ShapeDtypeStruct`s of
        any batch size. Flags and other Python values are passed on as they are.
      call: the forward pass, a function of the model (or parameters) and the inputs,
        if it is not `model(*inputs)`. A loss will do.
      parametrization: a name, or the result of `optim.parametrization`; only with
        `inputs`. By default, if depth changes, the one that the constants on branches
        belong to; without constants "depth_mup" for branches of one layer and
        "completep" for more.
      depth: (base depth, target depth), the number of residual blocks. The blocks
        may be a list (`blocks/3/...`) or a stacked axis. If they are stacked, give
        `depth` even when both are equal.
      branch: regular expression, searched in paths, of the parameters inside
        residual branches. None if the model has no residual branches.
      stream: regular expression of parameters of the blocks that are on the residual
        stream rather than inside a branch, e.g. norms after the sum.
      layers_axis: the axis that counts blocks where they are stacked, e.g. -1 for the
        last; two axes where they are stacked as (stages, layers of a stage).
      layout: "in_out" for kernels (..., in, out), "out_in" for (out, in, ...).
        "auto" means "out_in" for Equinox layers and "in_out" for everything else.
      axes: {regular expression: (fan-in axes, fan-out axes)} for parameters whose
        shapes are ambiguous. An axis in neither counts copies. Use ((), (0, 1)) for a
        matrix that is not summed over.
      copies: regular expression of parameters whose first axis (after that of the
        layers) counts copies, e.g. experts. It may grow. Do not match routers, norms
        or shared experts beside them.
      embeddings: regular expression of tables of shape (entries, features). Needed
        where neither layer nor name shows it. The number of entries is not a width.
      tied: regular expression of the embeddings that also serve as readout. They
        are scaled as embeddings, and the model must multiply its logits by 1/m, with
        m the width ratio. None if no embedding is tied.
      readout: regular expression of all parameters that sum over a growing axis and
        have outputs that do not grow: heads, routers, keys of multi-query attention.
        It may match a module: hidden kernels, biases and norms in it keep their roles.
        Needed if there are several, if it is a convolution, or if shapes are
        ambiguous. None if the model has no readout.
      fractional: accept ratios that are not whole numbers (or their inverse in
        depth).
      delta: a third model whose every width differs from the base's; its depth does
        not matter. Needed if the target shares a width with the base, e.g. if the
        target is the base: the roles then come from `delta`.
      batch: (base, target) batch size in examples; None if they are equal.
      examples: (base, target) number of examples of the whole training, i.e. batch
        size times steps; None if they are equal. See `TrainingScale` for the rules.
      critical_batch: the critical batch size of the task, if known. A larger target
        batch raises an error.

    Returns:
      `Scales`, a mapping from path to `ParamScale`. Those of a zoo model carry its
      parametrization.

    Raises:
      ValueError: with `inputs`: the forward pass fails; a growing parameter is not
        used, or enters an operation that cannot be read; branches have different
        constants, or other ones than the parametrization needs; a multiplier is
        missing and no parameter can carry it. The message names the line of your code.
        Always: base and target have the same shapes, or different parameters; a
        dimension shrinks or does not divide; a pattern matches nothing; depth without
        branches; `branch` matches parameters outside of the blocks, or not all of
        those inside; the role of a parameter is ambiguous; several parameters may be
        readouts; the readout is missing, tied or a convolution and was not declared.
        The message names the path and what to write instead.

    Source: the roles are those of Tensor Programs V, Table 8; depth is that of
    Tensor Programs VI, Definition 6.2; carrying a multiplier is a change of gauge,
    Yaida eq. 2.8.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def net(n, blocks):
      ...     return {"a": jnp.zeros((8, n)), "b": jnp.zeros((blocks, n, n)),
      ...             "c": jnp.zeros((n, 10))}
      >>> def forward(p, x):
      ...     x, _ = jax.lax.scan(
      ...         lambda x, w: (x + jax.nn.relu(x) @ w, None), x @ p["a"], p["b"])
      ...     return x @ p["c"]
      >>> scales = infer_scales(net(64, 4), net(256, 64), call=forward,
      ...                       inputs=(jax.ShapeDtypeStruct((1, 8), jnp.float32),))
      >>> [(path, s.role.value, s.depth) for path, s in scales.items()]
      [('a', 'input', 16.0), ('b', 'hidden', 16.0), ('c', 'output', 16.0)]
      >>> scales.parametrization.name, scales["b"].ends_branch
      ('depth_mup', True)

      By names and shapes:

      >>> def mlp(n, blocks):
      ...     return {"embed": jnp.zeros((8, n)), "blocks": jnp.zeros((blocks, n, n)),
      ...             "head": jnp.zeros((n, 10))}
      >>> scales = infer_scales(lambda: mlp(64, 4), lambda: mlp(256, 64),
      ...                       depth=(4, 64), branch="blocks")
      >>> [(path, s.role.value, s.width_in, s.depth) for path, s in scales.items()]
      [('blocks', 'hidden', 4.0, 16.0), ('embed', 'input', 1.0, 16.0), \
('head', 'output', 4.0, 16.0)]
    """
    if inputs is not None:
        _check_read(depth, branch, stream, copies, embeddings, tied, readout)
        return read_scales(
            base,
            target,
            inputs,
            call=call,
            given=Overrides(axes, None, None, UNSET, UNSET),
            point=None if parametrization is None else named(parametrization),
            fractional=fractional,
            delta=delta,
            training=training_scale(batch, examples, critical_batch=critical_batch),
        )
    if call is not None or parametrization is not None:
        name = "call" if call is not None else "parametrization"
        raise ValueError(
            f"{name}=... needs inputs=(x,), the arguments of one forward pass"
        )
    if layout not in ("auto", "in_out", "out_in"):
        raise ValueError(f"layout={layout!r} must be 'auto', 'in_out' or 'out_in'")
    if not isinstance(fractional, bool):
        raise ValueError(f"fractional={fractional!r} must be True or False")
    if depth is not None:
        check_depth(depth, fractional)
    _check_depth_and_branch(depth, branch)
    stack = _stack(layers_axis)
    training = training_scale(batch, examples, critical_batch=critical_batch)
    # Batch size or training length may change while the model keeps its size.
    same_width = batch is not None or examples is not None
    overrides = Overrides(axes, copies, embeddings, tied, readout)
    models = _read_models(base, target, delta)
    blocks = _blocks(models, overrides, depth, branch, stream, stack)
    kernels = _kernels(models, overrides, blocks, stack, layout)
    overrides.check_copies(kernels)
    splits = {
        path: overrides.split(path, models.large[path].shape) or split_axes(kernel)
        for path, kernel in kernels.items()
    }
    widths = Widths(kernels, splits, depth)
    scales = {}
    for path, kernel in kernels.items():
        leaf, split = models.large[path], splits[path]
        if split.origin == "axes given":
            widths.check_given(kernel, split)
        else:
            widths.check(kernel, split, fractional=fractional)
            _check_copies(kernel, split, leaf)
        _check_growth(kernel, split, leaf, fractional)
        scales[path] = param_scale(
            path,
            kernel.base,
            leaf.shape,
            split.in_axes,
            split.out_axes,
            grows=widths.growing(kernel, split),
            depth=blocks.ratio,
            in_branch=path in blocks.inside,
            origin=split.origin,
            training=training,
        )
    overrides.check(models.large)
    _check_all_used(models.small, models.large, blocks)
    inferred = InferredModel(scales, splits, kernels, blocks, layout, widths)
    _check_readout_vectors(inferred, overrides)
    scales = _with_readouts(inferred, overrides, delta is not None, same_width)
    return Scales(scales, models.large.parametrization)


def _check_read(*given: Any) -> None:
    """Raise a `ValueError` if an argument is given that the program tells."""
    names_of = ("depth", "branch", "stream", "copies", "embeddings", "tied", "readout")
    for name, value in zip(names_of, given, strict=True):
        if value is not None and value is not UNSET:
            raise ValueError(
                f"{name}={value!r} is read from the program where inputs=... is given; "
                f"leave {name} out"
            )


@dataclasses.dataclass(frozen=True)
class Models:
    """The parameters of base (`small`), target (`large`) and delta (`wide`).

    `to_small` and `to_wide` map a parameter of the target to its counterpart in the
    base and in the delta.
    """

    small: Leaves
    large: Leaves
    wide: Leaves
    to_small: Pairing
    to_wide: Pairing

    def twin(self, path: str) -> str:
        """The counterpart of a parameter in the base."""
        return _twin(path, self.large[path], self.to_small, self.small, "base")

    def other(self, path: str) -> str:
        """The counterpart of a parameter in the delta."""
        return _twin(path, self.large[path], self.to_wide, self.wide, "delta")


def _read_models(base: Any, target: Any, delta: Any) -> Models:
    small, large = leaves(base, "base"), leaves(target, "target")
    wide = large if delta is None else leaves(delta, "delta")
    return Models(small, large, wide, Pairing(large, small), Pairing(large, wide))


def _blocks(
    models: Models,
    overrides: Overrides,
    depth: tuple[int, int] | None,
    branch: str | None,
    stream: str | None,
    stack: tuple[int, ...],
) -> Blocks:
    copies = {}
    for path, leaf in models.large.items():
        split = overrides.split(path, leaf.shape)
        if split is not None:
            used = (*split.in_axes, *split.out_axes)
            copies[path] = tuple(a for a in range(len(leaf.shape)) if a not in used)
    if depth is None:
        for path in models.large:
            if path not in models.small:
                models_lack(path, "base")
    change = DepthChange(
        models.small, models.large, models.to_small, depth or (1, 1), stack, copies
    )
    lines = None if branch is UNSET else branch
    return find_blocks(change, lines, stream, has_depth=depth is not None)


def models_lack(path: str, which: str) -> None:
    """Raise because the base or delta lacks a parameter of the target."""
    raise ValueError(
        f"the target has {path!r}, which the {which} lacks; build both by the same "
        "code, and where the target has more blocks pass depth=(base depth, target "
        "depth) and a branch=r'...' that matches them"
    )


def _check_depth_and_branch(depth: tuple[int, int] | None, branch: str | None) -> None:
    if branch is not UNSET:
        Pattern("branch", branch)
    if depth is None and branch is not UNSET and branch is not None:
        raise ValueError(
            f"branch={branch!r} needs depth=(base depth, target depth), the number of "
            "residual blocks of each"
        )
    if depth is not None and branch is UNSET:
        raise ValueError(
            f"depth={depth!r} needs branch=r'...', a pattern that "
            "matches the parameters inside residual branches (or branch=None for a "
            "network without any, under 'relu_mlp')"
        )


def _stack(layers_axis: int | tuple[int, ...]) -> tuple[int, ...]:
    """The axes that count blocks, as a tuple."""
    axes = layers_axis if isinstance(layers_axis, tuple | list) else (layers_axis,)
    whole = all(isinstance(a, int) and not isinstance(a, bool) for a in axes)
    if not whole or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"layers_axis={layers_axis!r} must be an axis, e.g. 0, or several, e.g. "
            "(0, 1)"
        )
    return tuple(axes)


def _twin(path: str, leaf: Leaf, pairing: Pairing, small: Leaves, which: str) -> str:
    twin = pairing.twin(path)
    if twin is None:
        models_lack(path, which)
        raise AssertionError
    if len(small[twin].shape) != len(leaf.shape):
        raise ValueError(
            f"{path!r} has {len(leaf.shape)} axes in the target and "
            f"{len(small[twin].shape)} in the {which}; build models that differ in "
            "sizes only"
        )
    return twin


def _kernels(
    models: Models,
    overrides: Overrides,
    blocks: Blocks,
    stack: tuple[int, ...],
    layout: str,
) -> dict[str, Kernel]:
    """Collect, for each parameter, everything that determines its axes."""
    kernels = {}
    for path in models.large:
        base = models.small[models.twin(path)]
        wide = models.wide[models.other(path)]
        grow = [a for a, n in enumerate(base.shape) if n != wide.shape[a]]
        if empty := [a for a in grow if not base.shape[a]]:
            raise ValueError(
                f"axis {empty[0]} of {path!r} has size 0 in the base, so that its "
                "growth is no ratio; build a base in which it is at least 1"
            )
        layers = from_front(stack, len(base.shape)) if path in blocks.stacked else ()
        copies, declared, experts = _copies(base, layers, overrides.counts_copies(path))
        kernels[path] = Kernel(
            path,
            base.shape,
            wide.shape,
            layout=base.layout if layout == "auto" else layout,
            layer_axes=base.layer_axes,
            embedding=overrides.is_table(path, alike=grow == [len(base.shape) - 1]),
            readout=overrides.is_readout(path),
            named=overrides.names_readout(path),
            copies=copies,
            declared=declared,
            experts=experts,
        )
    streams = frozenset(
        kernel.pair(axis)
        for kernel in kernels.values()
        for axis in kernel.axes
        if len(kernel.axes) == 1 and kernel.grows(axis)
    )
    for path, kernel in kernels.items():
        kernels[path] = kernel = dataclasses.replace(kernel, streams=streams)
        bias = next((kernels[b] for b in biases_of(path) if b in kernels), None)
        if bias is not None and bias is not kernel:
            shapes = bias.sizes(tuple(a for a in bias.axes if a not in kernel.copies))
            kernels[path] = dataclasses.replace(kernel, bias=shapes)
            if len(bias.axes) == 1 < len(kernel.axes):
                pairs = {kernel.pair(a) for a in range(len(kernel.base))}
                owner = path if bias.pair(bias.axes[0]) in pairs else ""
                kernels[bias.path] = dataclasses.replace(bias, owner=owner)
            elif len(bias.axes) > 1:
                kernels[bias.path] = dataclasses.replace(
                    bias, fits=shapes in _outputs(kernel)
                )
    return kernels


def _copies(
    base: Leaf, layers: tuple[int, ...], matched: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The axes `copies`, `declared` and `experts` of a `Kernel`.

    Args:
      base: the parameter in the base.
      layers: its axes that count blocks.
      matched: whether the option `copies` matches it.
    """
    rest = [a for a in range(len(base.shape)) if a not in layers]
    own = base.layer_axes
    more = 0 if own is None else max(0, len(rest) - own.rank)
    experts = tuple(rest[:1]) if matched else ()
    inner: tuple[int, ...] = ()
    if experts and own is not None and not more:
        # A known layer without an axis for copies, unless it has one of its own.
        inner = experts if 0 not in (*own.in_axes, *own.out_axes) else ()
        experts = ()
    added = tuple(rest[: max(more, len(experts))])
    copies = tuple(sorted((*layers, *added)))
    return copies, (*layers, *experts, *inner), experts or inner


def _outputs(kernel: Kernel) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes in (base, wide) that the outputs of a kernel may have."""
    axes = kernel.axes
    return [kernel.sizes(axes[at:]) for at in range(1, len(axes))]


def _check_copies(kernel: Kernel, split: Split, leaf: Leaf) -> None:
    """Raise a `ValueError` if an axis that counts copies grows and is not declared."""
    used = (*split.in_axes, *split.out_axes, *kernel.declared)
    for axis in range(len(leaf.shape)):
        small, large = kernel.base[axis], leaf.shape[axis]
        if axis not in used and (small != large or kernel.grows(axis)):
            quoted = names.pattern(kernel.path)
            raise ValueError(
                f"axis {axis} of {kernel.path!r} grows from {small} to {large}, and "
                "counts copies of its layer; if it counts blocks, pass depth=(base "
                "depth, target depth) and a branch=r'...' that matches it; if experts, "
                f"copies=r'{quoted}'"
            )


def _check_growth(kernel: Kernel, split: Split, leaf: Leaf, fractional: bool) -> None:
    """Raise a `ValueError` if a width shrinks, does not divide, or differs in delta."""
    path = kernel.path
    entries = split.in_axes if split.table else ()
    for axis in (*split.in_axes, *split.out_axes):
        small, large = kernel.base[axis], leaf.shape[axis]
        if small == large or axis in entries:
            continue
        grows = f"axis {axis} of {path!r} grows from {small} to {large}"
        if not kernel.grows(axis):
            raise ValueError(
                f"{grows}, but not in delta; build a delta whose every width differs "
                "from the base's"
            )
        if large < small and not fractional:
            raise ValueError(
                f"axis {axis} of {path!r} shrinks from {small} in the base to {large} "
                "in the target; the base comes first: swap the two, or pass "
                "fractional=True if the target is meant to be smaller"
            )
        if large % small and not fractional:
            raise ValueError(
                f"{grows}, and {small} does not divide {large}; choose widths that "
                "divide, or pass fractional=True; if the axis counts tokens, classes "
                "or positions, build the base with as many as the target"
            )


def _check_readout_vectors(model: InferredModel, overrides: Overrides) -> None:
    """Raise a `ValueError` if `readout` matches vectors with names of biases only."""
    matched = [s for p, s in model.scales.items() if overrides.is_readout(p)]
    vectors = [
        s.path for s in matched if s.role is Role.VECTOR and s.origin != "axes given"
    ]
    if vectors and not any(s.role in (Role.OUTPUT, Role.HIDDEN) for s in matched):
        kernel = model.kernels[vectors[0]]
        raise ValueError(vector_as_readout(kernel, overrides.readout))


def _check_all_used(small: Leaves, large: Leaves, blocks: Blocks) -> None:
    for path in small:
        if path not in large and blocks.ratio >= 1:
            raise ValueError(
                f"the base has {path!r}, which the target lacks; build both by the "
                "same code"
            )


def _with_readouts(
    inferred: InferredModel, overrides: Overrides, has_delta: bool, same_width: bool
) -> dict[str, ParamScale]:
    """Return the scales with readouts marked and `width_last` filled in."""
    scales = dict(inferred.scales)
    if all(s.role is Role.FIXED for s in scales.values()):
        if not same_width and (inferred.blocks.ratio == 1 or has_delta):
            raise ValueError(
                f"base and {'delta' if has_delta else 'target'} have the same widths; "
                "build the base with a smaller width, or a smaller depth and "
                "depth=(base depth, target depth). For a model that is its own base, "
                "pass a model of another width as delta=..."
            )
        return scales
    chosen = choose_readouts(inferred, overrides.tied, overrides.readout)
    last = last_width(inferred, overrides.tied, chosen)
    for path, scale in scales.items():
        origin = chosen.get(path, scale.origin)
        scales[path] = dataclasses.replace(scale, width_last=last, origin=origin)
    return scales
