"""Optax's optimizers with learning rates, eps and weight decay scaled by size.

Each takes `scales` and `parametrization` after the learning rate, then the arguments of
the Optax optimizer of the same name, which it equals bit for bit at base size. All
hyperparameters are those of the base model. If the scales carry another batch size or
training length (`Scales.for_training`), learning rates, betas, eps and weight decay
follow the rules of `TrainingScale`. The momentum of SGD is never changed (the linear
rule).
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from ..rules.multipliers import family_of, multipliers
from ..rules.parametrizations import Parametrization
from ..rules.roles import ParamScale, Role
from ..scales.paths import flatten, map_with_paths
from ..scales.table import Scales, stacked_vectors
from .groups import (
    averaged,
    decayed,
    gradients_of,
    refuse_decays,
    refuse_memories,
    updates_of,
)
from .links import ChainWarning, Kind, Link, describe, mark, rules_of
from .transforms import (
    ParametrizationLike,
    multiply_leaves,
    normalize_gradients,
    resolve,
    scale_leaves,
)

# A mask as in Optax, or "matrices" for the weights with a fan-in; see `decay_mask`.
Mask = Any | Callable[[optax.Params], Any] | None


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.sgd` with scaled learning rates.

    Under Depth-μP they do not change with depth.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      momentum, nesterov, accumulator_dtype: as in `optax.sgd`.

    Raises:
      ValueError: the learning rate or momentum is not finite or out of range; a group
        has a factor of weight decay; see `scale_by_parametrization` for the rest.

    Source: Tensor Programs V, Table 3; Tensor Programs VI, Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.sgd(0.1, scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)))
      >>> round(float(updates["in"][0, 0]), 4), round(float(updates["out"][0, 0]), 4)
      (-0.4, -0.025)
    """
    _check(learning_rate=learning_rate, momentum=momentum)
    point = resolve(scales, parametrization)
    refuse_memories(scales, "sgd")
    refuse_decays(scales, "sgd")
    trace = (
        optax.identity()
        if momentum is None
        else optax.trace(momentum, nesterov, accumulator_dtype)
    )
    return _ours(
        "sgd",
        trace,
        _scale(scales, point, "sgd"),
        *updates_of(scales, "sgd"),
        optax.scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adam` with scaled learning rates, and gradients normalized against eps.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      b1, b2, eps, eps_root, mu_dtype, nesterov: as in `optax.adam`; eps and eps_root
        are those of the base model.

    Raises:
      ValueError: a hyperparameter that is not finite or out of range; a group has a
        factor of weight decay; see `scale_by_parametrization` for the rest.

    Source: Tensor Programs VI, Definition 6.1 and Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adam(0.1, scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)))
      >>> round(float(updates["in"][0, 0]), 4), round(float(updates["out"][0, 0]), 4)
      (-0.1, -0.025)
    """
    _check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    point = resolve(scales, parametrization)
    refuse_decays(scales, "adam")
    beta = scales.training.beta
    return _ours(
        "adam",
        normalize_gradients(scales, point),
        *gradients_of(scales),
        averaged(
            functools.partial(
                optax.scale_by_adam,
                eps=eps,
                eps_root=eps_root,
                mu_dtype=mu_dtype,
                nesterov=nesterov,
            ),
            scales,
            beta(b1),
            beta(b2),
        ),
        _scale(scales, point, "adam"),
        *updates_of(scales, "adam"),
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw`, scaled; learning rate times weight decay is the same at any size.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      b1, b2, eps, eps_root, mu_dtype, weight_decay, nesterov: as in
        `optax.adamw`, those of the base model. The decay is added after the scaling,
        so it is not scaled.
      mask: what decays, as in Optax; or "matrices" for the weights that sum over
        inputs, without biases, norm scales and tokens.

    Raises:
      ValueError: a hyperparameter that is not finite or out of range; see
        `scale_by_parametrization` for the rest.

    Source: Tensor Programs VI, Definition 6.1 and Table 1. Weight decay: Wang &
    Aitchison 2024 (arXiv:2405.13698); for α = 1 also Dey et al. 2025, Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adamw(0.1, scales, "mup", weight_decay=1.0)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["out"][0, 0]), 4)  # -0.1 (1/4 + 1)
      -0.125
    """
    _check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    _check(weight_decay=weight_decay)
    point = resolve(scales, parametrization)
    beta, decay = scales.training.beta, scales.training.weight_decay(weight_decay)
    return _ours(
        "adamw",
        normalize_gradients(scales, point),
        *gradients_of(scales),
        averaged(
            functools.partial(
                optax.scale_by_adam,
                eps=eps,
                eps_root=eps_root,
                mu_dtype=mu_dtype,
                nesterov=nesterov,
            ),
            scales,
            beta(b1),
            beta(b2),
        ),
        _scale(scales, point, "adam"),
        *updates_of(scales, "adam"),
        decayed(optax.add_decayed_weights(decay, decay_mask(mask, scales)), scales),
        optax.scale_by_learning_rate(learning_rate),
        decay=weight_decay,
    )


def lion(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.lion` with learning rates scaled as Adam's: its updates have size one.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      b1, b2, mu_dtype, weight_decay: as in `optax.lion`.
      mask: what decays, as in Optax; or "matrices" for the weights that sum over
        inputs, without biases, norm scales and tokens.

    Raises:
      ValueError: a hyperparameter that is not finite or out of range; see
        `scale_by_parametrization` for the rest.

    Source: Tensor Programs VI, section 6.1 (entrywise optimizers).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.lion(0.1, scales, "mup", weight_decay=0.0)
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["in"][0, 0]), 4), round(float(updates["out"][0, 0]), 4)
      (-0.1, -0.025)
    """
    _check(learning_rate=learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)
    point = resolve(scales, parametrization)
    beta, decay = scales.training.beta, scales.training.weight_decay(weight_decay)
    return _ours(
        "lion",
        averaged(
            functools.partial(optax.scale_by_lion, mu_dtype=mu_dtype),
            scales,
            beta(b1),
            beta(b2),
        ),
        _scale(scales, point, "lion"),
        *updates_of(scales, "adam"),
        decayed(optax.add_decayed_weights(decay, decay_mask(mask, scales)), scales),
        optax.scale_by_learning_rate(learning_rate),
        decay=weight_decay,
    )


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.lamb` with learning rates scaled for updates relative to the weight.

    The trust ratio normalizes update and decay together. Each parameter's decay is
    multiplied so that the weight decays by the same factor per step at every size.
    LAMB gives a weight that starts at zero a trust ratio of one; the scaling rule does
    not cover that case, and `init` warns of it.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      b1, b2, eps, eps_root, weight_decay: as in `optax.lamb`.
      mask: what decays, as in Optax; or "matrices" for the weights that sum over
        inputs, without biases, norm scales and tokens.

    Raises:
      ValueError: a hyperparameter that is not finite or out of range; see
        `scale_by_parametrization` for the rest.

    Warns:
      ChainWarning: from `init`, a hidden weight or readout that starts at zero.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.ones((n, n)),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.lamb(0.1, scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["mid"][0, 0]), 4)
      -0.05
    """
    _check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    _check(weight_decay=weight_decay)
    point = resolve(scales, parametrization)
    beta = scales.training.beta
    return _ours(
        "lamb",
        normalize_gradients(scales, point),
        *gradients_of(scales),
        averaged(
            functools.partial(optax.scale_by_adam, eps=eps, eps_root=eps_root),
            scales,
            beta(b1),
            beta(b2),
        ),
        _decay(
            decayed(
                optax.add_decayed_weights(weight_decay, decay_mask(mask, scales)),
                scales,
                relative=True,
            ),
            scales,
            lambda s: multipliers(s, point, "adam").weight_decay,
        ),
        optax.scale_by_trust_ratio(),
        _scale_relative(scales, point, "lamb"),
        *updates_of(scales, "relative"),
        optax.scale_by_learning_rate(learning_rate),
    )


def adafactor(
    learning_rate: optax.ScalarOrSchedule | None,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
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
) -> optax.GradientTransformationExtraArgs:
    """`optax.adafactor` with scaled learning rates.

    They follow the rule for updates relative to the weight, or Adam's with
    `multiply_by_parameter_scale=False`. Optax takes the size of a weight to be at least
    1e-3; the scaling rule does not cover smaller weights, and `init` warns of them. As
    in Optax, the weight decay is a rate per step, not multiplied by the learning rate.

    Arguments that are not listed are as in `optax.adafactor`.

    Args:
      learning_rate: that of the base model, or None as in Optax.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      weight_decay_mask: what decays, as in Optax; or "matrices" for the weights that
        sum over inputs, without biases, norm scales and tokens.

    Raises:
      ValueError: a hyperparameter that is not finite or out of range; see
        `scale_by_parametrization` for the rest.

    Warns:
      ChainWarning: from `init`, a hidden weight or readout that starts below 1e-3.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.ones((n, n)),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.adafactor(0.1, scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["mid"][0, 0]), 4)
      -0.05
    """
    if learning_rate is not None:  # Adafactor has a rate of its own
        _check(learning_rate=learning_rate)
    _check(decay_rate=decay_rate, eps=eps)
    _check(clipping_threshold=clipping_threshold, momentum=momentum)
    _check(weight_decay_rate=weight_decay_rate)
    family = "adafactor" if multiply_by_parameter_scale else "adam"
    point = resolve(scales, parametrization)
    refuse_memories(scales, "adafactor")
    links = [
        normalize_gradients(scales, point),
        *gradients_of(scales),
        optax.scale_by_factored_rms(
            factored, decay_rate, decay_offset, min_dim_size_to_factor, eps
        ),
    ]
    if clipping_threshold is not None:
        links.append(optax.clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        links.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        links.append(optax.scale_by_param_block_rms())
        links.append(_scale_relative(scales, point, family, least=1e-3))
    else:
        links.append(_scale(scales, point, family))
    links += updates_of(scales, family_of(family))
    if momentum is not None:
        links.append(
            optax.ema(
                scales.training.beta(momentum),
                debias=False,
                accumulator_dtype=dtype_momentum,
            )
        )
    if weight_decay_rate is None:
        refuse_decays(scales, "adafactor without weight_decay_rate")
    else:
        decaying = decay_mask(weight_decay_mask, scales)
        decay = scales.training.weight_decay(weight_decay_rate)
        links.append(decayed(optax.add_decayed_weights(decay, decaying), scales))
    return _ours("adafactor", *links, optax.scale(-1), decay=weight_decay_rate)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
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
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon`, scaled: Muon for hidden matrices, AdamW for the rest.

    The scales determine which parameters are hidden matrices, and their axes.
    Embeddings and readouts are trained by AdamW. Stacked kernels (layers, d, d) are
    orthogonalized layer by layer, convolutions as (height·width·in, out).

    Over batch size and training length, Muon's learning rate follows the square-root
    rule, and its beta and decay follow Adam's. This is our extension: measured optima
    agree with the square root (e.g. Sato et al. 2025, arXiv:2507.01598, on the critical
    batch size), but no SDE of Muon is published, and no rule for beta.

    Arguments that are not listed are as in `optax.contrib.muon`, except its dimension
    numbers, which come from the scales.

    Args:
      learning_rate: that of the base model.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      weight_decay_mask: which hidden matrices decay, as in Optax; or "matrices" for
        all weights that sum over inputs, of Muon and of Adam, without biases, norm
        scales and tokens.

    Raises:
      ValueError: a hyperparameter that is not finite, or scales without a hidden
        matrix; see `scale_by_parametrization` for the rest.

    Warns:
      ChainWarning: whether a matrix is hidden, or which of its axes count copies, was
        guessed. The message says which argument of `infer_scales` decides.

    Source: the desired update of Tensor Programs V, Table 3, as a spectral norm,
    Δ (m_in m_out)^½, divided by the shape factor that Optax applies.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.eye(n),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.muon(0.1, scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)), mlp(16))
      >>> round(float(updates["out"][0, 0]), 4)  # Nesterov Adam's, times 1/4
      -0.0368
    """
    _check(learning_rate=learning_rate, beta=beta, eps=eps, weight_decay=weight_decay)
    _check(adam_b1=adam_b1, adam_b2=adam_b2, adam_eps_root=adam_eps_root)
    _check(adam_weight_decay=adam_weight_decay, adam_learning_rate=adam_learning_rate)
    _check(consistent_rms=consistent_rms)
    point = resolve(scales, parametrization)
    refuse_memories(scales, "muon")
    memory, decay = scales.training.beta, scales.training.weight_decay(weight_decay)
    adam_decay = scales.training.weight_decay(adam_weight_decay)
    matrices = {path for path, s in scales.items() if is_hidden_matrix(s)}
    if not matrices:
        raise ValueError(
            "no parameter is a hidden matrix, which Muon needs; use "
            "optim.adamw, or make scales from a base that differs in width"
        )

    def dimension_numbers(params: optax.Params) -> Any:
        def numbers(path: str, _: jax.Array) -> contrib.MuonDimensionNumbers | None:
            if path not in matrices:
                return None
            return contrib.MuonDimensionNumbers(
                scales[path].in_axes, scales[path].out_axes
            )

        return map_with_paths(numbers, params)

    def labels(params: optax.Params) -> Any:
        return map_with_paths(
            lambda path, _: "muon" if path in matrices else "adam", params
        )

    def factor(scale: ParamScale) -> float:
        return muon_learning_rate(
            scale, point, consistent_rms=consistent_rms, adaptive=adaptive
        )

    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    decaying = decay_mask(weight_decay_mask, scales)
    # Optax's own masks apply only to the matrices of Muon.
    others = decaying if weight_decay_mask == "matrices" else None
    return _ours(
        "muon",
        normalize_gradients(scales, point),
        *gradients_of(scales),
        # Only updates: decay and learning rate come after the scaling.
        contrib.muon(
            -1.0,
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
            muon_weight_dimension_numbers=dimension_numbers,
            consistent_rms=consistent_rms,
        ),
        scale_leaves(scales, point, factor, "scaling"),
        *updates_of(scales, "adam"),
        optax.partition(
            {
                "muon": optax.chain(
                    decayed(optax.add_decayed_weights(decay, decaying), scales),
                    optax.scale_by_learning_rate(learning_rate),
                ),
                "adam": optax.chain(
                    decayed(optax.add_decayed_weights(adam_decay, others), scales),
                    optax.scale_by_learning_rate(adam_learning_rate),
                ),
            },
            labels,
        ),
        decay=adam_weight_decay if _is_none(weight_decay) else weight_decay,
    )


def is_hidden_matrix(scale: ParamScale) -> bool:
    """Whether Muon trains this parameter: a matrix between hidden layers.

    If only depth grows, no parameter has the role "hidden"; then every matrix in a
    branch counts.
    """
    matrix = bool(scale.in_axes) and bool(scale.out_axes)
    return scale.role is Role.HIDDEN or (
        scale.role is Role.FIXED and matrix and scale.in_branch
    )


def muon_learning_rate(
    scale: ParamScale,
    point: Parametrization,
    *,
    consistent_rms: float | None = None,
    adaptive: bool = False,
) -> float:
    """The multiplier of one parameter's learning rate under `muon`.

    Args:
      scale: its role and ratios.
      point: the parametrization.
      consistent_rms: as in `optax.contrib.muon`; None for its other shape factor.
      adaptive: as in `optax.contrib.muon`: the update is multiplied by the gradient's
        dual norm, summed over copies. For normalized gradients of rank one it is
        (n_in n_out)^½ per copy.

    Returns:
      The spectral multiplier for hidden matrices, AdamW's for all others. Optax
      multiplies updates by a shape factor. The rule already contains the powers of
      width, so the multiplier replaces the target's shape factor by the base's.
    """
    if not is_hidden_matrix(scale):
        return multipliers(scale, point, "adamw").learning_rate
    rule = multipliers(scale, point, "muon").learning_rate
    if not point.scaled:
        return rule
    small, large = (
        _shape_factor(scale, shape, consistent_rms is not None)
        for shape in (scale.base_shape, scale.shape)
    )
    if adaptive:
        copies = set(range(len(scale.shape))) - {*scale.in_axes, *scale.out_axes}
        rule /= (scale.width_in * scale.width_out) ** 0.5
        rule /= math.prod(scale.shape[a] / scale.base_shape[a] for a in copies)
    return rule * small / large


def _shape_factor(
    scale: ParamScale, shape: tuple[int, ...], consistent_rms: bool
) -> float:
    """The shape factor of `optax.contrib.scale_by_shape`, without consistent_rms."""
    fan_in = math.prod(shape[a] for a in scale.in_axes)
    fan_out = math.prod(shape[a] for a in scale.out_axes)
    if consistent_rms:
        return math.sqrt(max(fan_in, fan_out))
    return math.sqrt(max(1.0, fan_out / fan_in))


def _scale(
    scales: Scales, parametrization: ParametrizationLike | None, optimizer: str
) -> optax.GradientTransformation:
    """`scale_by_parametrization` without its mark, for our own chains."""
    point = resolve(scales, parametrization)
    return scale_leaves(
        scales,
        point,
        lambda s: multipliers(s, point, optimizer).learning_rate,
        "scaling",
    )


def _scale_relative(
    scales: Scales, point: Parametrization, optimizer: str, least: float = 0.0
) -> optax.GradientTransformation:
    """`_scale` for updates relative to the weight, with a warning of small weights.

    Updates of weights below `least`, or of zeros, have a fixed size.
    """
    tx = _scale(scales, point, optimizer)
    differs = {
        path
        for path, s in scales.items()
        if multipliers(s, point, optimizer).learning_rate
        != multipliers(s, point, "adam").learning_rate
    }

    def init(params: optax.Params) -> optax.OptState:
        small = [p for p, x in flatten(params) if p in differs and _below(x, least)]
        if small:
            size = f"smaller than {least:g}" if least else "at zero"
            more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
            warnings.warn(
                f"{small[0]!r}{more} starts {size}, where the updates of {optimizer} "
                "do not follow the size of the weight, so its learning rate does not "
                "transfer over width; start it larger, or train it by optim.adamw",
                ChainWarning,
                stacklevel=4,
            )
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


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


def _is_none(decay: Any) -> bool:
    """Whether this is no weight decay; a schedule or a traced value is one."""
    return decay is None or (isinstance(decay, int | float) and decay == 0)


def _ours(
    name: str, *links: optax.GradientTransformation, decay: Any = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Chain the links of one of our optimizers, and mark it for `optim.chain`."""
    normalizes = any(describe(tx).kind is Kind.NORMALIZING for tx in links)
    decays = not _is_none(decay)
    family = family_of(name)
    rules = next(filter(None, map(rules_of, links)), None)
    link = Link(
        f"optim.{name}", Kind.SCALING, family, normalizes, decays=decays, rules=rules
    )
    return mark(optax.chain(*links), link)


def _decay(
    decay: optax.GradientTransformation,
    scales: Scales,
    factor: Callable[[ParamScale], float],
) -> optax.GradientTransformation:
    """Multiply the parameters that a weight decay sees by factors of their scales."""
    factors = {path: factor(scale) for path, scale in scales.items()}

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                "weight decay needs params: tx.update(grads, state, params)"
            )
        return decay.update(updates, state, multiply_leaves(params, factors, scales))

    return optax.GradientTransformation(decay.init, update)


def decay_mask(mask: Mask, scales: Scales) -> Mask:
    """Convert the mask of a weight decay to one that Optax accepts.

    Args:
      mask: as in Optax; or "matrices" for the parameters that have a fan-in: kernels,
        convolutions and embeddings. Then biases and norm scales do not decay, as in the
        reference code of CompleteP and in nanoGPT, and neither do the positions and
        class tokens of the zoo. A table of positions with the role "input" does.
      scales: of the model.

    Raises:
      ValueError: `mask` is another string.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def layer(n):
      ...     return {"w": jnp.ones((8, n)), "b": jnp.ones(n), "out": jnp.ones((n, 2))}
      >>> axes = {"b": "d", ".": "i -> o"}
      >>> scales = optim.infer_scales(layer(4), layer(16), axes=axes)
      >>> decay_mask("matrices", scales)(layer(16))
      {'b': False, 'out': True, 'w': True}
    """
    if mask == "matrices":
        return lambda params: map_with_paths(
            lambda path, _: bool(scales[path].in_axes), params
        )
    if isinstance(mask, str):
        raise ValueError(
            f"mask={mask!r} must be 'matrices', a tree of booleans, or a function that "
            "returns one for the parameters"
        )
    if mask is None:
        return None
    function = mask if callable(mask) else _by_path(mask, scales)
    warned = False

    def checked(params: optax.Params) -> Any:
        nonlocal warned
        tree = function(params)
        chosen = {path for path, decays in flatten(tree) if decays is True}
        layered = sorted(chosen & stacked_vectors(scales))
        if layered and not warned and len(chosen) < len(flatten(params)):
            warned = True
            warnings.warn(
                f"the mask of the weight decay is True for {layered[0]!r}, of shape "
                f"{scales[layered[0]].shape}: a bias or norm scale in each layer of a "
                "stack; to decay only kernels, pass mask='matrices' "
                "(weight_decay_mask= of muon and adafactor)",
                ChainWarning,
                stacklevel=2,
            )
        return tree

    return checked


def _by_path(mask: Any, scales: Scales) -> Callable[[Any], Any]:
    """A mask as a function of the parameters, from a tree, or the first levels of one.

    An NNX optimizer passes parameters in boxes to `init`, and without to `update`, so
    that a tree has the structure of one of them only.
    """
    flags = dict(flatten(mask))
    inside = {start for path in scales for start in _starts(path)}
    for path, flag in flags.items():
        if path not in inside:
            raise ValueError(
                f"the mask has an entry {path!r}, which is no parameter; make the mask "
                "from the parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
            )
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(
                f"the mask is {flag!r} at {path!r}; its leaves must be True or False"
            )

    def find(path: str, _: Any) -> bool:
        for start in _starts(path):
            if start in flags:
                return bool(flags[start])
        raise ValueError(
            f"the mask has no entry for parameter {path!r}; make it from the "
            "parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
        )

    return lambda params: map_with_paths(find, params)


def _starts(path: str) -> list[str]:
    """A path and the paths of the folders that it is in.

    Examples:
      >>> _starts("a/b")
      ['a/b', 'a', '']
    """
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(len(names), -1, -1)]


def _check(**hyperparameters: Any) -> None:
    for name, value in hyperparameters.items():
        if isinstance(value, Scales):
            raise ValueError(
                f"{name} is a Scales, so the arguments are swapped; pass the learning "
                "rate first, e.g. optim.adamw(1e-3, scales)"
            )
        if value is None and name == "learning_rate":
            raise ValueError(
                "learning_rate=None; pass the base's learning rate, a number or a "
                "schedule"
            )
        if value is None and name not in _OPTIONAL:
            raise ValueError(
                f"{name}=None; pass a number, or leave it out for the default"
            )
        if callable(value) and not name.endswith(_SCHEDULED):
            raise ValueError(
                f"{name}={value!r} must be a number; schedule it by "
                f"optax.inject_hyperparams(optim.adam)(..., {name}=schedule), with "
                "your optimizer in place of optim.adam"
            )
        # The values of traced hyperparameters and schedules are not known here.
        if value is None or callable(value) or isinstance(value, jax.core.Tracer):
            continue
        try:
            finite = math.isfinite(value)
        except TypeError:
            raise ValueError(
                f"{name}={value!r} must be a number"
                + (" or a schedule" * (name == "learning_rate"))
            ) from None
        if not finite:
            raise ValueError(f"{name}={value} must be finite")
        if name.endswith(_AVERAGES) and not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
        if name.endswith(_POSITIVE) and value < 0:
            raise ValueError(
                f"{name}={value} must not be negative"
                + _MINUS * name.endswith("learning_rate")
            )


# Those that may be None.
_OPTIONAL = (
    "adam_learning_rate",
    "clipping_threshold",
    "consistent_rms",
    "momentum",
    "weight_decay_rate",
)
# Ends of the names of hyperparameters that may be schedules, or that have a range.
_SCHEDULED = ("learning_rate", "weight_decay", "weight_decay_rate")
_AVERAGES = ("b1", "b2", "beta", "momentum")
_POSITIVE = ("learning_rate", "weight_decay", "weight_decay_rate", "eps", "eps_root")
_MINUS = (
    ": the optimizer adds the minus; to maximize, put optax.scale(-1.0) before it in "
    "optim.chain"
)
