"""Optax's optimizers with learning rates, eps and weight decay scaled by size.

Every optimizer takes the learning rate and the scales, then the arguments of the Optax
optimizer of the same name, which it equals bit for bit at base size. All
hyperparameters are those of the base model; a learning rate or weight decay may be a
schedule. Masks of weight decay are those of Optax, or "matrices" for the weights that
sum over inputs, without biases, norm scales and tokens.

Muon, LAMB and Adafactor, whose update of an entry depends on the other entries of its
array, see each segment of a fused kernel (`ParamScale.segments`) as a parameter.

If the scales carry another batch size or training length (`Scales.for_training`),
learning rates, betas, eps and weight decay follow the rules of `TrainingScale`. The
momentum of SGD is never changed (the linear rule).

Source: the multipliers of `optim.multipliers`; Tensor Programs V, Table 3, and Tensor
Programs VI, Definition 6.1 and Table 1.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from ..rules.multipliers import Family, family_of, multipliers
from ..rules.parametrizations import Parametrization
from ..rules.roles import ParamScale, Role
from ..scales.paths import flatten, map_with_paths
from ..scales.table import Scales
from .chain_warning import ChainWarning
from .groups import averaged, decay_weights, gradients_of, refuse, updates_of
from .hyperparameters import checked
from .masks import Mask, decay_mask
from .segments import by_segment
from .transforms import normalize_gradients, resolve, scale_updates

Transform: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


class Rule(NamedTuple):
    """Multipliers of one parameter's hyperparameters under an optimizer.

    Attributes:
      family: that of the optimizer, for this parameter.
      learning_rate: of the learning rate.
      eps: of eps; 1 for optimizers without one.
      weight_decay: of the weight decay. All three are floats, or arrays, as those of
        `Multipliers`.
    """

    family: Family
    learning_rate: Any
    eps: Any = 1.0
    weight_decay: Any = 1.0


def optimizer_rule(
    name: str, scale: ParamScale, point: Parametrization, **options: Any
) -> Rule:
    """The rule of one parameter under an optimizer or a family.

    Args:
      name: of the optimizer or family.
      scale: the parameter's role and ratios.
      point: the parametrization.
      **options: consistent_rms and adaptive of `muon`.

    Raises:
      ValueError: the name is unknown.

    Examples:
      >>> from mupax import optim
      >>> mid = optim.param_scale("mid", (4, 4), (16, 16), (0,), (1,))
      >>> optimizer_rule("adamw", mid, optim.parametrization("mup"))[1:]
      (0.25, 0.25, 4.0)
    """
    if name in _OWN_RULES:
        return _OWN_RULES[name](scale, point, **options)
    rule = multipliers(scale, point, name)
    eps = rule.eps if name in _WITH_EPS else 1.0
    return Rule(family_of(name), rule.learning_rate, eps, rule.weight_decay)


_WITH_EPS = ("adam", "adamw", "nadam", "amsgrad", "rmsprop")


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
        one, "relative" if they are proportional to the weight. `optim.check_chain`
        measures whether it is right.
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
        decays = {p: _lamb_rule(s, point).weight_decay for p, s in scales.items()}
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


def _lamb_rule(scale: ParamScale, point: Parametrization) -> Rule:
    # The decay is added to Adam's update, before the trust ratio.
    rule, adam = (multipliers(scale, point, name) for name in ("lamb", "adam"))
    return Rule(Family.RELATIVE, rule.learning_rate, rule.eps, adam.weight_decay)


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


def _adafactor_rule(scale: ParamScale, point: Parametrization) -> Rule:
    # Its eps is added to the squared gradient; its decay has no learning rate.
    rule = multipliers(scale, point, "adafactor")
    return Rule(Family.RELATIVE, rule.learning_rate, rule.eps**2, rule.kappa)


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
) -> Optimizer:
    """`optax.contrib.muon`, scaled: Muon for hidden matrices, AdamW for the rest.

    The scales say which parameters are hidden matrices, and their axes, so there are
    no dimension numbers to pass. Embeddings and readouts are trained by AdamW. Stacked
    kernels (layers, d, d) are orthogonalized layer by layer, convolutions as
    (height·width·in, out), and fused kernels segment by segment. If base and target
    have the same widths, only matrices in residual branches count as hidden; pass
    `delta` to `infer_scales` to find the rest.

    Over batch size and training length, Muon's learning rate follows the square-root
    rule, and its beta and decay follow Adam's. This is our extension: measured optima
    agree with the square root (e.g. Sato et al. 2025, arXiv:2507.01598, on the critical
    batch size), but no SDE of Muon is published, and no rule for beta.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      weight_decay_mask: which hidden matrices decay, as in Optax; or "matrices" for
        all weights that sum over inputs, of Muon and of Adam.

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
    memory = scales.training.beta
    # Optax's own masks apply only to the matrices of Muon.
    others = weight_decay_mask if weight_decay_mask == "matrices" else None
    slow = learning_rate if adam_learning_rate is None else adam_learning_rate

    def build(scales: Scales) -> Transform:
        matrices = _hidden_matrices(scales)

        def numbers(path: str, _: jax.Array) -> contrib.MuonDimensionNumbers | None:
            axes = scales[path].in_axes, scales[path].out_axes
            return contrib.MuonDimensionNumbers(*axes) if path in matrices else None

        def label(path: str, _: jax.Array) -> str:
            return "muon" if path in matrices else "adam"

        updates = contrib.muon(
            -1.0,  # only updates: decay and learning rate come after the scaling
            ns_coeffs,
            ns_steps,
            memory(beta),
            eps,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            adam_b1=memory(adam_b1),
            adam_b2=memory(adam_b2),
            adam_eps_root=adam_eps_root,
            muon_weight_dimension_numbers=functools.partial(map_with_paths, numbers),
            consistent_rms=consistent_rms,
        )
        steps = {
            name: optax.chain(
                _decay(decay, mask, scales), optax.scale_by_learning_rate(rate)
            )
            for name, decay, mask, rate in (
                ("muon", weight_decay, weight_decay_mask, learning_rate),
                ("adam", adam_weight_decay, others, slow),
            )
        }
        rates = optax.partition(steps, functools.partial(map_with_paths, label))
        return _build(
            *("muon", scales, updates, rates),
            consistent_rms=consistent_rms,
            adaptive=adaptive,
            decays=True,
        )

    return by_segment(scales, build)


def _hidden_matrices(scales: Scales) -> set[str]:
    matrices = {path for path, scale in scales.items() if is_hidden_matrix(scale)}
    if not matrices:
        raise ValueError(
            "no parameter is a hidden matrix, which Muon needs; use "
            "optim.adamw, or make scales from a base that differs in width"
        )
    return matrices


def is_hidden_matrix(scale: ParamScale) -> bool:
    """Whether Muon trains this parameter: a matrix between hidden layers.

    If only depth grows, no parameter has the role "hidden"; then every matrix in a
    branch counts.
    """
    matrix = bool(scale.in_axes) and bool(scale.out_axes)
    return scale.role is Role.HIDDEN or (
        scale.role is Role.FIXED and matrix and scale.in_branch
    )


def _muon_rule(
    scale: ParamScale,
    point: Parametrization,
    *,
    consistent_rms: float | None = None,
    adaptive: bool = False,
) -> Rule:
    """The spectral rule for hidden matrices, AdamW's for all others.

    Optax multiplies updates by a shape factor. The rule already contains the powers of
    width, so the multiplier replaces the target's shape factor by the base's. With
    `adaptive` the update is multiplied by the gradient's dual norm, summed over copies,
    which for normalized gradients of rank one is (n_in n_out)^½ per copy.
    """
    if not is_hidden_matrix(scale):
        return optimizer_rule("adamw", scale, point)
    rule = multipliers(scale, point, "muon")
    rate = rule.learning_rate
    if point.scaled:
        consistent = consistent_rms is not None
        shapes = scale.base_shape, scale.shape
        small, large = (_shape_factor(scale, shape, consistent) for shape in shapes)
        if adaptive:
            copies = set(range(len(scale.shape))) - {*scale.in_axes, *scale.out_axes}
            rate /= (scale.width_in * scale.width_out) ** 0.5
            rate /= math.prod(scale.shape[a] / scale.base_shape[a] for a in copies)
        rate *= small / large
    return Rule(Family.SPECTRAL, rate, weight_decay=rule.kappa / rate)


def _shape_factor(
    scale: ParamScale, shape: tuple[int, ...], consistent_rms: bool
) -> float:
    """The shape factor of `optax.contrib.scale_by_shape`, without consistent_rms."""
    fan_in = math.prod(shape[a] for a in scale.in_axes)
    fan_out = math.prod(shape[a] for a in scale.out_axes)
    if consistent_rms:
        return math.sqrt(max(fan_in, fan_out))
    return math.sqrt(max(1.0, fan_out / fan_in))


# The optimizers whose rule is not that of their family alone.
_OWN_RULES: dict[str, Callable[..., Rule]] = {
    "adafactor": _adafactor_rule,
    "lamb": _lamb_rule,
    "muon": _muon_rule,
}


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
