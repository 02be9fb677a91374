"""Optax's optimizers with learning rates, eps and weight decay scaled by size.

Every optimizer takes the learning rate and the scales, then the arguments of the Optax
optimizer of the same name, if there is one, which it equals bit for bit at base size.
All hyperparameters are those of the base model; a learning rate or weight decay may be
a schedule. With another batch size or training length (`Scales.for_training`), they
follow `TrainingScale`, but for SGD's momentum.
"""

from typing import Any

import jax.numpy as jnp
import optax

from ..rules.multipliers import multipliers
from ..scales.table import Scales
from .build import Mask, Optimizer, Transform, adam_moments, add_decay, build
from .hyperparameters import checked
from .segments import by_segment
from .transforms import resolve


@checked
def sgd(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> Optimizer:
    """`optax.sgd` with scaled learning rates, the same at any depth under Depth-μP.

    Arguments are those of `optax.sgd`, of the base model.

    Raises:
      ValueError: as `build_optimizer`.

    Source: Tensor Programs V, Table 3; Tensor Programs VI, Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.sgd(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.025, dtype=float32)
    """
    trace = optax.identity()
    if momentum is not None:
        trace = optax.trace(momentum, nesterov, accumulator_dtype)
    return build("sgd", scales, trace, learning_rate)


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

    Arguments are those of `optax.adam`, of the base model.

    Raises:
      ValueError: as `build_optimizer`.

    Source: Tensor Programs VI, Definition 6.1 and Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.adam(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.025, dtype=float32)
    """
    options = eps, eps_root, mu_dtype
    moments = adam_moments(scales, b1, b2, *options, nesterov=nesterov)
    return build("adam", scales, moments, learning_rate)


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
      mask: what decays, as in Optax; or "matrices" for the weights that sum over
        inputs, without biases, norm scales and tokens.

    Further arguments are those of `optax.adamw`, of the base model.

    Raises:
      ValueError: as `build_optimizer`.

    Source: Wang & Aitchison 2024 (arXiv:2405.13698); for α = 1 also Dey et al. 2025,
    Table 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.adamw(0.1, scales, weight_decay=1.0)  # -0.1 (1/4 + 1)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.125, dtype=float32)
    """
    return build(
        "adamw",
        scales,
        adam_moments(scales, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        learning_rate,
        decay=(weight_decay, mask),
    )


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

    Arguments are those of `optax.lion`, of the base model; `mask` as in `optim.adamw`.

    Raises:
      ValueError: as `build_optimizer`.

    Source: Tensor Programs VI, section 6.1 (entrywise optimizers).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.lion(0.1, scales, weight_decay=0.0)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.025, dtype=float32)
    """
    betas = map(scales.training.beta, (b1, b2))
    signs = optax.scale_by_lion(*betas, mu_dtype=mu_dtype)
    return build("lion", scales, signs, learning_rate, decay=(weight_decay, mask))


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

    Arguments are those of `optax.lamb`, of the base model; `mask` as in `optim.adamw`.

    Raises:
      ValueError: as `build_optimizer`.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.lamb(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.1, dtype=float32)
    """

    def of_segments(scales: Scales) -> Transform:
        point = resolve(scales)
        factors = {
            p: multipliers(s, point, "lamb").weight_decay for p, s in scales.items()
        }

        trusted = optax.chain(
            adam_moments(scales, b1, b2, eps, eps_root),
            add_decay((weight_decay, mask), scales, factors),
            optax.scale_by_trust_ratio(),
        )
        return build("lamb", scales, trusted, learning_rate)

    return by_segment(scales, of_segments)


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

    Arguments are those of `optax.adafactor`, of the base model; `weight_decay_mask` is
    as `mask` of `optim.adamw`.

    Raises:
      ValueError: as `build_optimizer`.

    Source: the desired update of Tensor Programs V, Table 3, over the initial size.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.adafactor(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.1, dtype=float32)
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

    decay = weight_decay_rate, weight_decay_mask

    def of_segments(scales: Scales) -> Transform:
        return build(
            "adafactor",
            scales,
            optax.chain(*parts),
            optax.scale(-1),
            average=average,
            decay=None if weight_decay_rate is None else decay,
            rule="adafactor" if multiply_by_parameter_scale else "adam",
        )

    return by_segment(scales, of_segments)
