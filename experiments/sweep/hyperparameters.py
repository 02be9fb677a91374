"""What can be swept, and where each hyperparameter enters a training.

A number that enters only arithmetic is an axis of lanes: all its values are one
program. What decides the program itself, as a schedule's name, is a choice: each has
a program of its own.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mupax import optim

from ..errors import UserError

# Of the training itself, not of one optimizer.
COMMON = (
    "learning_rate",
    "branch_multiplier",
    "richness",
    "init_scale",
    "warmup",
    "label_smoothing",
)
# Of some optimizers.
_FLOATS = (
    "momentum",
    "b1",
    "b2",
    "beta",
    "eps",
    "weight_decay",
    "adam_b1",
    "adam_b2",
    "adam_weight_decay",
)

NUMBERS = COMMON + _FLOATS


def continuous(optimizer: str) -> tuple[str, ...]:
    """The hyperparameters that are axes of one program, with this optimizer.

    Examples:
      >>> continuous("sgd")[-2:]
      ('label_smoothing', 'momentum')
    """
    accepted = inspect.signature(getattr(optim, optimizer)).parameters
    return COMMON + tuple(name for name in _FLOATS if name in accepted)


def of_optimizer(optimizer: str) -> tuple[str, ...]:
    """Those of them that are arguments of the optimizer."""
    return continuous(optimizer)[len(COMMON) :]


def schedule(
    name: str,
    peak: jax.Array,
    steps: int,
    warmup: jax.Array | float = 0.0,
    decay: int = 0,
    final: float = 0.0,
) -> Any:
    """`training.schedule`, with a warm-up that may be traced.

    Args:
      name: as there.
      peak: the learning rate after warm-up.
      steps: of the run.
      warmup: in steps, whole or not.
      decay: steps at the end of "wsd".
      final: where the decay ends, as a share of the peak.

    Returns:
      The learning rate itself where it is constant, else a function of the step.
    """
    if name == "constant" and isinstance(warmup, int | float) and not warmup:
        return peak

    def rate(step: jax.Array) -> jax.Array:
        t = step - warmup
        share = jnp.clip(t / jnp.maximum(steps - warmup, 1.0), 0.0, 1.0)
        match name:
            case "constant":
                after = jnp.ones_like(share)
            case "cosine":
                after = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * share))
            case "linear":
                after = 1 + (final - 1) * share
            case "rsqrt":
                start = jnp.maximum(warmup, 1.0)
                after = jnp.sqrt(start / (start + jnp.maximum(t, 0.0)))
            case "wsd":
                late = jnp.clip((step - (steps - decay)) / max(decay, 1), 0.0, 1.0)
                after = 1 + (final - 1) * late
            case _:
                raise UserError(f"there is no schedule {name!r}")
        rise = step / jnp.maximum(warmup, 1e-6)
        return peak * jnp.where(step < warmup, rise, after)

    return rate


def losses(
    logits: jax.Array, labels: jax.Array, smoothing: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy, nats, with a share of each label spread, and without."""
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    if isinstance(smoothing, int | float) and not smoothing:
        return plain, plain
    soft = jax.nn.one_hot(labels, logits.shape[-1])
    soft = (1 - smoothing) * soft + smoothing / logits.shape[-1]
    return optax.softmax_cross_entropy(logits, soft).mean(), plain
