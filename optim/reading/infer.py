"""`infer_scales`: roles and ratios of any JAX model, from two models' programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..rules.parametrizations import Parametrization
from ..rules.parametrizations import parametrization as named
from ..rules.roles import Role
from ..scales.declare import Declarations, declared
from ..scales.table import Scales
from .compare import compare
from .growth import check_something_grows, grown, same_parametrization, twin
from .leaves import leaves
from .lists import Pairing
from .models import initialized, trace
from .roles import from_declaration


def infer_scales(
    base: Any,
    target: Any,
    *,
    inputs: tuple[Any, ...] | None = None,
    call: Callable[..., Any] | None = None,
    axes: Mapping[str, str] | Declarations | None = None,
    parametrization: str | Parametrization | None = None,
    delta: Any = None,
    fractional: bool = False,
    batch: tuple[float, float] | None = None,
    examples: tuple[float, float] | None = None,
) -> Scales:
    """Find the role and growth ratios of every parameter by comparing two models.

    Both forward passes are traced (`jax.make_jaxpr`), and everything is read from
    their programs: which axes of a parameter are summed over, the residual branches
    and their number, and the constants on branches, attention logits and readouts.
    Names and shapes do not matter, and the model needs no change: where it does not
    multiply its branches or logits, `rescale_init` and the optimizers give the
    parameters at the end of a branch (and those of the queries) initial sizes and
    learning rates that have the same effect. Where it does, the constant is checked.
    Nothing is computed, so a model of any size needs no memory.

    A parameter that the program splits (one kernel of queries, keys and values; gates),
    or that sums over joined values, is read by segments; see `ParamScale.segments`.

    Args:
      base: the model that was tuned, or that you will tune: an NNX or Equinox module,
        NNX state, Equinox's (module, state) with `call`, a Linen module, a Haiku
        function after `hk.transform`, a pair (forward pass, parameters), where the
        forward pass is a Linen module or a function of the parameters and the inputs,
        any pytree of arrays or `jax.ShapeDtypeStruct`s with `call`, or a function of no
        arguments that builds one of these. A function is only traced, so large models
        need no memory, unless it branches on values of arrays, which are computed.
      target: the model to train, in the same form; wider, deeper or both.
      inputs: the arguments of one forward pass, arrays or `jax.ShapeDtypeStruct`s of
        any batch size. Flags and other Python values are passed on as they are. None
        if `axes` declares every parameter.
      call: the forward pass, a function of the model and the inputs, if it is not
        `model(*inputs)`; the model is a module (for Linen a bound one), a function of
        the inputs (for Haiku and pairs), or the parameters. A loss, or a whole training
        step, will do.
      axes: axes of parameters that enter an operation that cannot be read, or of all
        parameters where there are no `inputs`; see `optim.declare`.
      parametrization: a name, or the result of `optim.parametrization`. By default
        "mup" if depth stays; if it changes, the one that the constants on branches
        belong to; without constants "depth_mup" for branches of one layer and
        "completep" for more.
      delta: a third model whose every width differs from the base's; its depth does
        not matter. Needed if the target shares a width with the base, e.g. if the
        target is the base: the roles then come from `delta`.
      fractional: accept ratios that are not whole numbers (or their inverse in
        depth).
      batch: (base, target) batch size in examples; None if they are equal.
      examples: (base, target) number of examples of the whole training, i.e. batch
        size times steps; None if they are equal. See `TrainingScale` for the rules.

    Returns:
      `Scales`, a mapping from path to `ParamScale`, with the parametrization.

    Raises:
      ValueError: the forward pass fails; a growing parameter is not used, or enters
        an operation that cannot be read; branches have different constants, or other
        ones than the parametrization needs; a multiplier is missing and no parameter
        can carry it; base and target have the same shapes, or different parameters; a
        width shrinks or does not divide; a declaration contradicts the program,
        matches nothing or names another number of axes. The message names the path,
        the line of your code and what to write instead.

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
    """
    if not isinstance(fractional, bool):
        raise ValueError(f"fractional={fractional!r} must be True or False")
    given = declared(axes)
    point = None if parametrization is None else named(parametrization)
    if inputs is None:
        if call is not None:
            raise ValueError(
                "call=... needs inputs=(x,), the arguments of one forward pass"
            )
        scales = _declared_scales(base, target, delta, given, point, fractional)
    else:
        models = {"base": base, "target": target} | (
            {} if delta is None else {"delta": delta}
        )
        readings = [trace(model, inputs, call, k) for k, model in models.items()]
        scales = compare(readings, given, point, fractional=fractional)
    given.check(scales)
    if batch is None and examples is None:
        check_something_grows(scales.values())
    scales = scales.for_training(batch=batch, examples=examples)
    return scales.replaced(base=initialized(base, inputs, call))


def _declared_scales(
    base: Any,
    target: Any,
    delta: Any,
    given: Declarations,
    point: Parametrization | None,
    fractional: bool,
) -> Scales:
    """The scales of a target whose parameters are all declared."""
    small, large = leaves(base, "base"), leaves(target, "target")
    wide = large if delta is None else leaves(delta, "delta")
    to_small, to_wide = Pairing(large, small), Pairing(large, wide)
    depth = given.depth(
        *({p: x.shape for p, x in model.items()} for model in (small, large))
    )
    scales = {}
    for path, leaf in large.items():
        told = given.axes(path, leaf.shape)
        if told is None:
            raise ValueError(
                f"the axes of {path!r} are not known; pass inputs=(x,), the arguments "
                "of one forward pass (arrays or jax.ShapeDtypeStructs)"
                + (", or declare them in axes" if given else "")
            )
        before = small[twin(path, to_small, small, large, "base")].shape
        scales[path] = grown(
            from_declaration(path, told),
            (
                before,
                leaf.shape,
                wide[twin(path, to_wide, wide, large, "delta")].shape,
            ),
            fractional=fractional,
            depth=depth,
            in_branch=given.in_branch(path),
            head_shape=told.head_shape(leaf.shape),
            base_head_shape=told.head_shape(before),
        )
    own = large.parametrization
    point = same_parametrization(own, point) or own
    readouts = [s.width_in for s in scales.values() if s.role is Role.OUTPUT]
    last = readouts[-1] if readouts else 1.0
    return Scales(
        {p: dataclasses.replace(s, width_last=last) for p, s in scales.items()},
        point,
        multiplied=own is not None,
    )
