"""Optax's optimizers with learning rates, eps and weight decay scaled by size.

Every optimizer takes the learning rate and the scales, then the arguments of the Optax
optimizer of the same name, if there is one, which it equals bit for bit at base size.
All hyperparameters are those of the base model; a learning rate or weight decay may be
a schedule. Masks of weight decay are those of Optax, or "matrices" for the weights that
sum over inputs, without biases, norm scales and tokens.

LAMB, Adafactor, Muon and all others of hidden matrices, whose update of an entry
depends on the other entries of its array, see each segment of a fused kernel
(`ParamScale.segments`) as a parameter.

If the scales carry another batch size or training length (`Scales.for_training`),
learning rates, betas, eps and weight decay follow the rules of `TrainingScale`. The
momentum of SGD is never changed (the linear rule).

Source: the multipliers of `optim.multipliers`; Tensor Programs V, Table 3, and Tensor
Programs VI, Definition 6.1 and Table 1.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from ..rules.multipliers import Family, family_of, multipliers
from ..rules.optimizers import is_hidden_matrix, optimizer_rule
from ..scales.paths import flatten
from ..scales.table import Scales
from .chain_warning import ChainWarning
from .groups import averaged, decay_weights, gradients_of, refuse, updates_of
from .hyperparameters import checked
from .masks import Mask, decay_mask
from .matrices import (
    beside,
    descends,
    hidden_matrices,
    keep_norms,
    orthogonalize,
    scale_by_kronecker,
    scale_by_shape,
    scale_by_spectral_norm,
    scale_to_weights,
)
from .segments import by_segment
from .transforms import normalize_gradients, resolve, scale_updates

Transform: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


def _build(
    name: str,
    scales: Scales,
    precondition: Transform,
    rate: optax.ScalarOrSchedule | Transform,
    *,
    clip: Transform | None = None,
    decay: Transform | None = None,
    average: Transform | None = None,
    rule: str | None = None,
    normalize: bool = True,
    betas: bool = False,
    decays: bool = False,
    least: float | None = None,
    last: Transform | None = None,
    **options: Any,
) -> Optimizer:
    """Chain the parts of an optimizer in the one order that is right.

    Args:
      name: of the optimizer, for messages.
      scales: of the model.
      precondition: gives updates their size.
      rate: the learning rate, or a transform that applies it.
      clip: acts on gradients before everything else.
      decay: adds weight decay, which is not scaled.
      average: averages the scaled updates.
      rule: the optimizer or family whose rule holds; by default `name`.
      normalize: whether gradients are normalized, for eps.
      betas: whether `precondition` has the β1 and β2 of groups.
      decays: whether another part than `decay` decays weights.
      least: weights below this size, or at zero, have updates of a fixed size.
      last: acts on the whole update, of weights that keep their norm.
      **options: of `optimizer_rule`.
    """
    point, rule = resolve(scales), rule or name
    refuse(scales, name, betas=betas, decay=decays or decay is not None)
    rates = {
        path: optimizer_rule(rule, scale, point, **options).learning_rate
        for path, scale in scales.items()
    }
    scaling = scale_updates(rates, scales)

    def init(params: optax.Params) -> optax.OptState:
        if least is not None:
            _warn_of_small(params, scales, name, least)
        zeros = [p for p, x in flatten(params) if last and _below(x, 0.0)]
        if zeros:
            raise ValueError(
                f"{zeros[0]!r} starts at zero, and {name} keeps its norm: start it at "
                "random (zero_queries=False in models of the zoo), use optim.muon, or "
                "give this parameter another optimizer by optax.partition"
            )
        return scaling.init(params)

    slots = (
        clip,
        *((normalize_gradients(scales), gradients_of(scales)) if normalize else ()),
        precondition,
        Transform(init, scaling.update),
        updates_of(scales, family_of(rule)),
        average,
        decay,
        rate if isinstance(rate, tuple) else optax.scale_by_learning_rate(rate),
        last,
    )
    return optax.chain(*(slot for slot in slots if slot is not None))


@checked
def build_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    precondition: Transform,
    family: str,
    *,
    clip: Transform | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    mask: Mask = None,
) -> Optimizer:
    """Build an optimizer from a transform of your own, in the right order.

    The order is: `clip`, normalization of gradients, `precondition`, scaling, weight
    decay, learning rate.

    Args:
      learning_rate: that of the base model; a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      precondition: the transform that gives updates their size, without learning rate
        and weight decay, e.g. `optax.scale_by_adam()` or `optax.trace(0.9)`.
      family: that of its updates: "sgd" if they are proportional to the gradient,
        "adam" if their entries have size one, "spectral" if their spectral norm is
        one, "relative" if they are proportional to the weight, or another `Family`.
        `optim.check_chain` measures whether it is right.
      clip: a transform of gradients, e.g. `optax.clip_by_global_norm(1.0)`.
      weight_decay: decoupled weight decay of the base model; None for none.
      mask: what decays, as in `adamw`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.build_optimizer(0.1, scales, optax.trace(0.9), "sgd",
      ...                            weight_decay=1e-2)
      >>> optim.check_chain(tx, scales).passed
      True

    Source: Tensor Programs VI, Definition 6.1.
    """
    geometry = family_of(family)
    return _build(
        *("this optimizer", scales, precondition, learning_rate),
        clip=clip,
        decay=None if weight_decay is None else _decay(weight_decay, mask, scales),
        rule=geometry.value,
        normalize=geometry is not Family.SGD,
    )


@checked
def sgd(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> Optimizer:
    """`optax.sgd` with scaled learning rates, the same at any depth under Depth-μP.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      momentum, nesterov, accumulator_dtype: as in `optax.sgd`.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that SGD cannot use; see
        `scale_by_parametrization` for the rest.

    Source: Tensor Programs V, Table 3; Tensor Programs VI, Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.sgd(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.4, -0.025)
    """
    trace = optax.identity()
    if momentum is not None:
        trace = optax.trace(momentum, nesterov, accumulator_dtype)
    return _build("sgd", scales, trace, learning_rate, normalize=False)


@checked
def adam(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> Optimizer:
    """`optax.adam` with scaled learning rates, and gradients normalized against eps.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, eps, eps_root, mu_dtype, nesterov: as in `optax.adam`, those of the
        base model.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that Adam cannot use; see
        `scale_by_parametrization` for the rest.

    Source: Tensor Programs VI, Definition 6.1 and Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adam(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    moments = _moments(scales, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return _build("adam", scales, moments, learning_rate, betas=True)


@checked
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
) -> Optimizer:
    """`optax.adamw`, scaled; learning rate times weight decay is the same at any size.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, eps, eps_root, mu_dtype, weight_decay, nesterov: as in `optax.adamw`,
        those of the base model. The decay is added after the scaling.
      mask: what decays, as in Optax; or "matrices" for the weights that sum over
        inputs, without biases, norm scales and tokens.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that AdamW cannot use; see
        `scale_by_parametrization` for the rest.

    Source: Wang & Aitchison 2024 (arXiv:2405.13698); for α = 1 also Dey et al. 2025,
    Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adamw(0.1, scales, weight_decay=1.0)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["out"][0, 0]), 4)  # -0.1 (1/4 + 1)
      -0.125
    """
    moments = _moments(scales, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    decay = _decay(weight_decay, mask, scales)
    return _build("adamw", scales, moments, learning_rate, decay=decay, betas=True)


@checked
def lion(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Mask = None,
) -> Optimizer:
    """`optax.lion` with learning rates scaled as Adam's: its updates have size one.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, mu_dtype, weight_decay: as in `optax.lion`, those of the base model.
      mask: as in `optim.adamw`.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that Lion cannot use; see
        `scale_by_parametrization` for the rest.

    Source: Tensor Programs VI, section 6.1 (entrywise optimizers).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.lion(0.1, scales, weight_decay=0.0)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    signs = functools.partial(optax.scale_by_lion, mu_dtype=mu_dtype)
    beta, decay = scales.training.beta, _decay(weight_decay, mask, scales)
    signs = averaged(signs, scales, beta(b1), beta(b2))
    return _build(
        *("lion", scales, signs, learning_rate),
        decay=decay,
        normalize=False,
        betas=True,
    )


@checked
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Optimizer:
    """`optax.lamb` with learning rates scaled for updates relative to the weight.

    The trust ratio normalizes update and decay together. Each parameter's decay is
    multiplied so that the weight decays by the same factor per step at every size.
    LAMB gives a weight that starts at zero a trust ratio of one; the scaling rule does
    not cover that case, and `init` warns of it.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, eps, eps_root, weight_decay: as in `optax.lamb`, those of the base.
      mask: as in `optim.adamw`.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that LAMB cannot use; see
        `scale_by_parametrization` for the rest.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.lamb(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.1)
    """

    def build(scales: Scales) -> Transform:
        point = resolve(scales)
        decays = {
            p: optimizer_rule("lamb", s, point).weight_decay for p, s in scales.items()
        }
        added = optax.add_decayed_weights(weight_decay, decay_mask(mask, scales))
        trusted = optax.chain(
            _moments(scales, b1, b2, eps, eps_root),
            decay_weights(added, scales, decays),
            optax.scale_by_trust_ratio(),
        )
        return _build(
            *("lamb", scales, trusted, learning_rate),
            betas=True,
            decays=True,
            least=0.0,
        )

    return by_segment(scales, build)


@checked
def adafactor(
    learning_rate: optax.ScalarOrSchedule | None,
    scales: Scales,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    dtype_momentum: Any = jnp.float32,
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask = None,
) -> Optimizer:
    """`optax.adafactor` with scaled learning rates.

    They follow the rule for updates relative to the weight, or Adam's with
    `multiply_by_parameter_scale=False`. Optax takes the size of a weight to be at least
    1e-3; the scaling rule does not cover smaller weights, and `init` warns of them. As
    in Optax, the weight decay is a rate per step, not multiplied by the learning rate,
    which may be None.

    Args:
      learning_rate: that of the base model, a number, a schedule or None.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      weight_decay_mask: as `mask` of `optim.adamw`.

    All further arguments are as in `optax.adafactor`, those of the base model.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that Adafactor cannot use; see
        `scale_by_parametrization` for the rest.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adafactor(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.1)
    """
    size = min_dim_size_to_factor
    parts = [optax.scale_by_factored_rms(factored, decay_rate, decay_offset, size, eps)]
    if clipping_threshold is not None:
        parts.append(optax.clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        parts.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    average = None
    if momentum is not None:
        memory = scales.training.beta(momentum)
        average = optax.ema(memory, debias=False, accumulator_dtype=dtype_momentum)

    def build(scales: Scales) -> Transform:
        decay = None
        if weight_decay_rate is not None:
            decay = _decay(weight_decay_rate, weight_decay_mask, scales)
        return _build(
            *("adafactor", scales, optax.chain(*parts), optax.scale(-1)),
            average=average,
            decay=decay,
            rule="adafactor" if multiply_by_parameter_scale else "adam",
            least=1e-3 if multiply_by_parameter_scale else None,
        )

    return by_segment(scales, build)


def _beside(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    precondition: Callable[[Scales], Transform],
    *,
    decay: tuple[optax.ScalarOrSchedule, Mask] | None = None,
    partner: str | Transform = "adamw",
    signs: Transform | None = None,
    partner_rate: optax.ScalarOrSchedule | None = None,
    partner_decay: tuple[optax.ScalarOrSchedule, Mask] = (0.0, None),
    partner_options: Mapping[str, Any] | None = None,
    per_head: bool = False,
    split_fused: bool = True,
    on_sphere: bool = False,
    **options: Any,
) -> Optimizer:
    """Build an optimizer of hidden matrices, beside a partner for the rest.

    Args:
      name: of the optimizer, as in `RECIPES`.
      learning_rate: of the matrices.
      scales: of the model.
      precondition: builds the transform of the matrices' updates from their scales.
      decay: weight decay of the matrices, and its mask.
      partner: as in `muon`; or "sign", for `signs`.
      signs: a transform of gradients to signs, beside Scion.
      partner_rate: learning rate of the partner; None for that of the matrices.
      partner_decay: weight decay of the partner, and its mask.
      partner_options: arguments of the partner, of which it takes those that it has.
      per_head, split_fused: as in `muon`.
      on_sphere: whether the matrices keep their norm.
      **options: of `optimizer_rule`.
    """
    rate = learning_rate if partner_rate is None else partner_rate
    whole, raw = None, signs
    if not isinstance(partner, str):
        is_whole = descends(partner, scales)
        whole, raw = (partner, None) if is_whole else (None, partner)
    if per_head and not any(s.head_shape for w in scales.values() for s in w.parts):
        raise ValueError(
            "per_head=True, but no parameter has heads: pass inputs=(x,) to "
            "infer_scales, so that they are read from the program, or declare them: "
            "axes={'query': 'd -> heads size'}"
        )

    def build(scales: Scales) -> Transform:
        matrices = hidden_matrices(scales, name)
        added = None if decay is None else _decay(*decay, scales)
        own = _build(
            *(name, scales, precondition(scales), learning_rate),
            decay=added,
            last=keep_norms(scales) if on_sphere else None,
            decays=True,
            split_fused=split_fused,
            **options,
        )
        return beside(scales, matrices, own, others(scales))

    def others(scales: Scales) -> Transform:
        named: Callable[..., Optimizer]
        if whole is not None or partner == "adamw":
            named = adamw
        elif partner == "lion":
            named = lion
        elif isinstance(partner, str) and raw is None:
            known = "'adamw', 'lion', or a transform"
            raise ValueError(f"partner={partner!r} must be {known}")
        else:
            return build_optimizer(
                *(rate, scales, raw, "adam"),
                weight_decay=partner_decay[0],
                mask=partner_decay[1],
            )
        taken = inspect.signature(named).parameters
        given = (partner_options or {}).items()
        return named(
            *(rate, scales),
            weight_decay=partner_decay[0],
            mask=partner_decay[1],
            **{key: value for key, value in given if key in taken},
        )

    fused = [p for p, s in scales.items() if s.segments]
    if fused and not split_fused:
        if per_head:
            raise ValueError(
                f"per_head=True splits {fused[0]!r}, and split_fused=False does not; "
                "leave one of them out"
            )
        unlike = [
            path
            for path in fused
            if len({(s.width_in, s.width_out) for s in scales[path].segments}) > 1
        ]
        if unlike:
            raise ValueError(
                f"the segments of {unlike[0]!r} grow by different ratios, so that no "
                "learning rate is right for their update as a whole; leave out "
                "split_fused=False"
            )
        both = optax.with_extra_args_support(build(scales))
    else:
        both = by_segment(scales, build, per_head=per_head)
    if whole is None:
        return both
    count = any if split_fused else all
    hidden = {p for p, s in scales.items() if count(map(is_hidden_matrix, s.parts))}
    return beside(scales, frozenset(hidden), both, whole)


@checked
def muon(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Any = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: float | None = None,
    partner: str | Transform = "adamw",
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """`optax.contrib.muon`, scaled: Muon for hidden matrices, a partner for the rest.

    The scales say which parameters are hidden matrices, and their axes, so there are
    no dimension numbers to pass. Embeddings, readouts and vectors are trained by AdamW
    or another partner. Stacked kernels (layers, d, d) are orthogonalized layer by
    layer, convolutions as (height·width·in, out), and fused kernels segment by segment.
    If base and target have the same widths, only matrices in residual branches count as
    hidden; pass `delta` to `infer_scales` to find the rest.

    Over batch size and training length, Muon's learning rate follows the square-root
    rule, and its beta and decay follow Adam's. This is our extension: measured optima
    agree with the square root (e.g. Sato et al. 2025, arXiv:2507.01598, on the critical
    batch size), but no SDE of Muon is published, and no rule for beta.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      weight_decay_mask: which hidden matrices decay, as in Optax; or "matrices" for
        all weights that sum over inputs, of Muon and of Adam.
      partner: what trains all other parameters: "adamw" or "lion", with the arguments
        `adam_...`; a transform that gives updates entries of size one, such as
        `optax.scale_by_lion()`, with the learning rate and decay `adam_...`; or a whole
        optimizer, e.g. `optim.lion(1e-4, scales)`, used as it is. A transform counts as
        whole if its updates point against the gradient.
      per_head: orthogonalize each head of attention by itself. `infer_scales` reads
        heads from the program, or from an axis that is declared as `heads`. In an axis
        of heads and their entries, one head follows the other.
      split_fused: orthogonalize each segment of a fused kernel by itself. Without it,
        all segments must grow alike.

    All further arguments are as in `optax.contrib.muon`, those of the base model.

    Raises:
      ValueError: no parameter is a hidden matrix; a hyperparameter is not finite or out
        of range; see `scale_by_parametrization` for the rest.

    Source: the desired update of Tensor Programs V, Table 3, as a spectral norm,
    Δ (m_in m_out)^½, divided by the shape factor that Optax applies.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.muon(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["mid"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.071, -0.037)
    """
    memory = scales.training.beta(beta)

    def precondition(scales: Scales) -> Transform:
        updates = orthogonalize(
            *(scales, ns_coeffs, ns_steps, memory, eps, mu_dtype),
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
        )
        return optax.chain(updates, scale_by_shape("muon", scales, consistent_rms))

    return _beside(
        *("muon", learning_rate, scales, precondition),
        decay=(weight_decay, weight_decay_mask),
        partner=partner,
        partner_rate=adam_learning_rate,
        partner_decay=(adam_weight_decay, _shared(weight_decay_mask)),
        partner_options={
            "b1": adam_b1,
            "b2": adam_b2,
            "eps": eps,
            "eps_root": adam_eps_root,
            "mu_dtype": mu_dtype,
            "nesterov": nesterov,
        },
        per_head=per_head,
        split_fused=split_fused,
        consistent_rms=consistent_rms,
        adaptive=adaptive,
    )


@checked
def soap(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    shampoo_beta: float = 0.95,
    precondition_frequency: int = 10,
    block_size: int | None = None,
    partner: str | Transform = "adamw",
    partner_learning_rate: optax.ScalarOrSchedule | None = None,
    partner_weight_decay: optax.ScalarOrSchedule = 0.0,
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """SOAP with spectral normalization, for hidden matrices: Adam in Shampoo's basis.

    Each update is divided by its spectral norm (from twelve power iterations), and
    multiplied by Optax's shape factor of Muon, (fan_out/fan_in)^½ where above one. So
    its learning rate has the size of Muon's, and transfers by the same rule. The first
    gradient only gives the basis, and moves no matrix. Each change of the basis is one
    step of orthogonal iteration, and is not distributed over devices.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, eps: as in Adam, those of the base model.
      weight_decay, mask: of the hidden matrices, as in `adamw`.
      mu_dtype: dtype of the average of gradients.
      shampoo_beta: memory of G Gᵀ and Gᵀ G.
      precondition_frequency: steps between two changes of the eigenvectors.
      block_size: largest size of the blocks that are preconditioned one by one, as the
        largest divisor of each side; None for whole matrices.
      partner, per_head, split_fused: as in `muon`; AdamW and Lion beside it have their
        own betas and eps.
      partner_learning_rate, partner_weight_decay: of a partner that is not a whole
        optimizer; None for `learning_rate`.

    Raises:
      ValueError: no parameter is a hidden matrix; a hyperparameter is not finite or out
        of range; see `scale_by_parametrization` for the rest.

    Source: Vyas et al. 2024 (arXiv:2409.11321), Algorithm 3; Qiu et al. 2025
    (arXiv:2512.05620) for spectral normalization.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.soap(0.1, scales)
      >>> _, state = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> updates, _ = tx.update(mlp(16), state, mlp(16))
      >>> round(float(updates["mid"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    return _kronecker(
        *("soap", learning_rate, scales, (weight_decay, mask)),
        {"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype, "adam": True},
        (shampoo_beta, precondition_frequency, block_size),
        partner=partner,
        partner_rate=partner_learning_rate,
        partner_decay=(partner_weight_decay, _shared(mask)),
        per_head=per_head,
        split_fused=split_fused,
    )


@checked
def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.95,
    eps: float = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    shampoo_beta: float = 0.95,
    precondition_frequency: int = 10,
    block_size: int | None = None,
    partner: str | Transform = "adamw",
    partner_learning_rate: optax.ScalarOrSchedule | None = None,
    partner_weight_decay: optax.ScalarOrSchedule = 0.0,
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """Shampoo with spectral normalization, for hidden matrices: L^-¼ M R^-¼.

    Args:
      eps: added to L and R, times their spectral norms.

    All further arguments are as in `soap`.

    Raises:
      ValueError: as `soap`.

    Source: Gupta et al. 2018 (arXiv:1802.09568), Algorithm 1, with moving averages; Qiu
    et al. 2025 (arXiv:2512.05620) for spectral normalization.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.shampoo(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["mid"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    return _kronecker(
        *("shampoo", learning_rate, scales, (weight_decay, mask)),
        {"b1": b1, "b2": 0.0, "eps": eps, "mu_dtype": mu_dtype, "adam": False},
        (shampoo_beta, precondition_frequency, block_size),
        partner=partner,
        partner_rate=partner_learning_rate,
        partner_decay=(partner_weight_decay, _shared(mask)),
        per_head=per_head,
        split_fused=split_fused,
    )


def _kronecker(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    decay: tuple[optax.ScalarOrSchedule, Mask],
    moments: Mapping[str, Any],
    blocks: tuple[float, int, int | None],
    **options: Any,
) -> Optimizer:
    """SOAP and Shampoo; see `scale_by_kronecker` for moments and blocks."""
    memory = scales.training.beta
    shampoo_beta, frequency, block_size = blocks
    for key, size in (
        ("precondition_frequency", frequency),
        ("block_size", block_size),
    ):
        if size is not None and size < 1:
            raise ValueError(f"{key}={size} must be at least 1")
    b1, b2 = memory(moments["b1"]), memory(moments["b2"])

    def precondition(scales: Scales) -> Transform:
        return optax.chain(
            scale_by_kronecker(
                scales,
                **{**moments, "b1": b1, "b2": b2},
                shampoo_beta=memory(shampoo_beta),
                frequency=frequency,
                block_size=block_size,
            ),
            scale_by_spectral_norm(scales),
            scale_by_shape(name, scales),
        )

    return _beside(name, learning_rate, scales, precondition, decay=decay, **options)


@checked
def scion(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    eps: float = 1e-8,
    sign_learning_rate: optax.ScalarOrSchedule | None = None,
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """Scion: the steepest step in a norm that the role of each parameter decides.

    The average of gradients becomes (fan_out/fan_in)^½ U Vᵀ for hidden matrices, and
    its sign for all other parameters, times 1/m_in for readouts. In these norms the
    learning rate is the same at every width (with `per_head`: if the number of heads
    stays). The paper's radii are learning rates of groups (`for_modules`, or
    `sign_learning_rate`); constrained Scion has the weight decay 1/radius.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1: memory of the average of gradients, 1 - α of the paper.
      weight_decay, mask: as in `adamw`.
      mu_dtype, ns_coeffs, ns_steps, eps: as in `muon`.
      sign_learning_rate: of all parameters but hidden matrices; None for the same.
      per_head, split_fused: as in `muon`.

    Raises:
      ValueError: as `muon`.

    Source: Pethick et al. 2025 (arXiv:2502.07529), Algorithm 1 and Table 2.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.scion(0.1, scales)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    memory = scales.training.beta(b1)

    def precondition(scales: Scales) -> Transform:
        updates = orthogonalize(
            *(scales, ns_coeffs, ns_steps, memory, eps, mu_dtype), nesterov=False
        )
        return optax.chain(updates, scale_by_shape("scion", scales))

    return _beside(
        *("scion", learning_rate, scales, precondition),
        decay=(weight_decay, mask),
        partner="sign",
        signs=optax.chain(
            optax.ema(memory, debias=False, accumulator_dtype=mu_dtype),
            optax.scale_by_sign(),
        ),
        partner_rate=sign_learning_rate,
        partner_decay=(weight_decay, mask),
        per_head=per_head,
        split_fused=split_fused,
    )


@checked
def adam_h(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    *,
    partner: str | Transform = "adamw",
    partner_learning_rate: optax.ScalarOrSchedule | None = None,
    partner_weight_decay: optax.ScalarOrSchedule = 0.0,
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """Adam on a sphere: hidden matrices keep their Frobenius norm (hyperball).

    W ← R·norm(W - η R·norm(u)), with u the update of Adam and R the norm of W, so that
    the learning rate η is the angle of a step. Weight decay would have no effect on
    these matrices. A matrix that starts at zero would stay there: `init` outside of
    `jax.jit` raises an error. Queries of the zoo's transformers start at zero; pass
    `zero_queries=False` to the model, or give them another optimizer by
    `optax.partition`.
    Wen et al. report that learning rates transfer better than with weight decay; Ren et
    al. (arXiv:2603.28743) show that depth still needs a rule. Here the angle follows Δ
    over the weight's size; `docs/rules.md` derives it.

    Args:
      learning_rate: angle of a step at the base model, in radians: a number or a
        schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, b2, eps, eps_root, mu_dtype: as in `adam`.
      partner, per_head, split_fused: as in `muon`; a partner "adamw" has b1, b2, eps
        and mu_dtype too.
      partner_learning_rate, partner_weight_decay: as in `soap`.

    Raises:
      ValueError: as `muon`; from `init`, a hidden matrix is zero.

    Source: Wen et al. 2026 (arXiv:2606.16899).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adam_h(0.1, scales)
      >>> grads = {**mlp(16), "mid": jnp.ones((16, 16))}
      >>> updates, _ = tx.update(grads, tx.init(mlp(16)), mlp(16))
      >>> round(float(jnp.linalg.norm(mlp(16)["mid"] + updates["mid"])), 4)
      4.0
    """
    moments = (b1, b2, eps, eps_root, mu_dtype)
    return _beside(
        *("adam_h", learning_rate, scales),
        lambda scales: optax.chain(
            _moments(scales, *moments), scale_to_weights(scales, orthogonal=False)
        ),
        partner=partner,
        partner_rate=partner_learning_rate,
        partner_decay=(partner_weight_decay, None),
        partner_options={"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype},
        per_head=per_head,
        split_fused=split_fused,
        on_sphere=True,
        betas=True,
    )


@checked
def muon_h(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    beta: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    nesterov: bool = True,
    partner: str | Transform = "adamw",
    partner_learning_rate: optax.ScalarOrSchedule | None = None,
    partner_weight_decay: optax.ScalarOrSchedule = 0.0,
    per_head: bool = False,
    split_fused: bool = True,
) -> Optimizer:
    """Muon on a sphere: as `adam_h`, with orthogonalized updates.

    Args:
      learning_rate: angle of a step at the base model, in radians.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      beta, eps, mu_dtype, ns_coeffs, ns_steps, nesterov: as in `muon`.

    All further arguments are as in `soap`.

    Raises:
      ValueError: as `adam_h`.

    Source: Wen et al. 2026 (arXiv:2606.16899).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.muon_h(0.1, scales)
      >>> grads = {**mlp(16), "mid": jnp.ones((16, 16))}
      >>> updates, _ = tx.update(grads, tx.init(mlp(16)), mlp(16))
      >>> round(float(jnp.linalg.norm(mlp(16)["mid"] + updates["mid"])), 4)
      4.0
    """
    memory = scales.training.beta(beta)

    def precondition(scales: Scales) -> Transform:
        updates = orthogonalize(
            *(scales, ns_coeffs, ns_steps, memory, eps, mu_dtype), nesterov=nesterov
        )
        return optax.chain(updates, scale_to_weights(scales, orthogonal=True))

    return _beside(
        *("muon_h", learning_rate, scales, precondition),
        partner=partner,
        partner_rate=partner_learning_rate,
        partner_decay=(partner_weight_decay, None),
        per_head=per_head,
        split_fused=split_fused,
        on_sphere=True,
    )


def schedule_free(
    optimizer: Callable[..., Transform],
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
    state_dtype: Any | None = None,
    **options: Any,
) -> Optimizer:
    """`optax.contrib.schedule_free` around an optimizer of `mupax.optim`.

    It averages weights, so that every rule holds as it is. The optimizer has no average
    of gradients of its own unless you pass one: its `b1`, `beta` and `adam_b1` are
    zero. Only the AdamW beside SOAP and Shampoo keeps its average. Evaluate at
    `optax.contrib.schedule_free_eval_params(state, params)`.

    Args:
      optimizer: e.g. `optim.adamw`; not `adam_h` or `muon_h`, since averages leave the
        sphere.
      learning_rate: that of the base model, a number or a schedule without decay.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      b1, weight_lr_power, state_dtype: as in `optax.contrib.schedule_free`.
      **options: of the optimizer.

    Raises:
      ValueError: the optimizer keeps weights on a sphere.

    Source: Defazio et al. 2024 (arXiv:2405.15682).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.schedule_free(optim.adamw, 0.1, scales, weight_decay=0.0)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 3), round(float(updates["out"][0, 0]), 3)
      (-0.1, -0.025)
    """
    if optimizer in (adam_h, muon_h):
        raise ValueError(
            "schedule_free averages weights, which leave the sphere of adam_h and "
            "muon_h; use optim.adamw or optim.muon"
        )
    arguments = inspect.signature(optimizer).parameters
    none = {name: 0.0 for name in ("b1", "beta", "adam_b1") if name in arguments}
    base = optimizer(learning_rate, scales, **{**none, **options})
    return contrib.schedule_free(base, learning_rate, b1, weight_lr_power, state_dtype)


def _shared(mask: Mask) -> Mask:
    """The mask of the partner: trees and functions are those of the matrices alone."""
    return mask if isinstance(mask, str) else None


def _moments(
    scales: Scales,
    b1: Any,
    b2: Any,
    eps: float,
    eps_root: float,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> Transform:
    """Adam's moments, with the betas of groups, of batch size and of length."""
    adam = functools.partial(
        optax.scale_by_adam,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    beta = scales.training.beta
    return averaged(adam, scales, beta(b1), beta(b2))


def _decay(
    weight_decay: optax.ScalarOrSchedule, mask: Mask, scales: Scales
) -> Transform:
    """Decoupled weight decay, with the factors of groups, batch size and length."""
    decay = scales.training.weight_decay(weight_decay)
    added = optax.add_decayed_weights(decay, decay_mask(mask, scales))
    return decay_weights(added, scales)


def _warn_of_small(params: Any, scales: Scales, optimizer: str, least: float) -> None:
    """Warn of weights that are too small for updates relative to them."""
    point = resolve(scales)
    differs = {
        path
        for path, s in scales.items()
        if multipliers(s, point, "relative").learning_rate
        != multipliers(s, point, "adam").learning_rate
    }
    small = [p for p, x in flatten(params) if p in differs and _below(x, least)]
    if small:
        size = f"smaller than {least:g}" if least else "at zero"
        more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
        warnings.warn(
            f"{small[0]!r}{more} starts {size}, where the updates of {optimizer} "
            "do not follow the size of the weight, so its learning rate does not "
            "transfer over width; start it larger, or train it by optim.adamw",
            ChainWarning,
            stacklevel=5,
        )


def _below(array: Any, least: float) -> bool:
    """Whether the size of an array is known, and zero or below `least`."""
    is_known = isinstance(array, np.ndarray) or (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and array.is_fully_addressable
    )
    if not is_known or not array.size:
        return False
    rms = float(jnp.sqrt(jnp.mean(jnp.square(jnp.asarray(array, jnp.float32)))))
    return rms < least or rms == 0
