"""The Optax transforms: stateless, one Python float a leaf, nothing compiled twice."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from .chains import MARK, check_chain
from .parametrizations import Parametrization, parametrization
from .paths import flatten, map_with_paths
from .rules import Family, check_depth, family_of, multipliers
from .scales import ParamScale, Scales

ParametrizationLike = str | Parametrization


def scale_by_parametrization(
    scales: Scales,
    parametrization: ParametrizationLike = "depth_mup",
    family: str = "adam",
) -> optax.GradientTransformation:
    """Multiply each parameter's update by its learning-rate multiplier.

    Belongs after the transform that makes the update (`optax.scale_by_adam`) and
    before weight decay and learning rate, neither of which it may touch.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or what `optim.parametrization` returns.
      family: what sets the size of the incoming update: "sgd", "adam", "spectral" or
        "relative", or the name of an optimizer of that family, as "lion".

    Returns:
      A stateless `optax.GradientTransformation`. Its `init` checks that the
      parameters are those of `scales`, and the chain it stands in.

    Raises:
      ValueError: unknown parametrization or family, or depth that the
        parametrization cannot act on; from `init`, parameters without a scale, and
        chains that scale twice, in the wrong order or by the wrong family.

    Source: the learning-rate rows of Tensor Programs V, Table 3, and Tensor Programs
    VI, Table 1 and Definition 6.1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.ones((n, n)),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16))
      >>> tx = optax.chain(
      ...     optax.scale_by_adam(),
      ...     optim.scale_by_parametrization(scales, "mup", family="adam"),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = mlp(16)
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> {k: round(float(v[0, 0]), 4) for k, v in updates.items()}
      {'in': -0.1, 'mid': -0.025, 'out': -0.025}
    """
    point = resolve(scales, parametrization)
    return scale_leaves(
        scales,
        lambda s: multipliers(s, point, family).learning_rate,
        family_of(family),
        check_order=True,
    )


def normalize_gradients(
    scales: Scales, parametrization: ParametrizationLike = "depth_mup"
) -> optax.GradientTransformation:
    """Divide each gradient by its size relative to the base model's.

    Before an Adam-like transform it keeps the gradient's size against eps the same
    at every width and depth: the factor n^d L^δ before Q_t in Tensor Programs VI,
    Definition 6.1. Multiplying eps by the gradient's size says the same.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or what `optim.parametrization` returns.

    Returns:
      A stateless `optax.GradientTransformation`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16))
      >>> tx = optim.normalize_gradients(scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)))
      >>> float(updates["in"][0, 0]), float(updates["out"][0, 0])
      (4.0, 1.0)

    Source: Tensor Programs VI, Definition 6.1.
    """
    point = resolve(scales, parametrization)
    return scale_leaves(scales, lambda s: 1 / multipliers(s, point).gradient)


def scale_leaves(
    scales: Scales,
    factor: Callable[[ParamScale], float],
    family: Family | None = None,
    check_order: bool = False,
) -> optax.GradientTransformation:
    """Multiply each leaf by a factor of its scale, found once, here.

    With a `family` it counts as the scaling of its chain, of which there is one;
    `check_order` is for chains that are not of our making.
    """
    factors = {path: factor(scale) for path, scale in scales.items()}

    def init(params: optax.Params) -> optax.EmptyState:
        paths = scales.check_params(params)
        if family is not None:
            check_chain(paths, family, check_order)
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        if family is not None:
            check_chain((p for p, _ in flatten(updates)), family, check_order)
        return multiply_leaves(updates, factors, scales), state

    if family is not None:
        setattr(init, MARK, family)
        setattr(update, MARK, family)
    return optax.GradientTransformation(init, update)


def multiply_leaves(tree: Any, factors: Mapping[str, float], scales: Scales) -> Any:
    """Each leaf times the factor of its path; a leaf without one is an error."""

    def multiply(path: str, leaf: jax.Array) -> jax.Array:
        scales.check_path(path)
        # A Python float is weakly typed: bf16 stays bf16. By one it stays exact.
        return leaf if factors[path] == 1.0 else leaf * factors[path]

    return map_with_paths(multiply, tree)


def resolve(scales: Scales, name: ParametrizationLike) -> Parametrization:
    """The parametrization of this name, checked against what the scales hold."""
    if not isinstance(scales, Scales):
        raise ValueError(
            f"scales is a {type(scales).__name__}; make it with infer_scales(base, "
            "target) or zoo.scales(model)"
        )
    point = parametrization(name)
    check_depth(scales, point)
    return point
