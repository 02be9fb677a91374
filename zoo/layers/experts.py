"""Mixture of experts: a router, and gated MLPs stacked along an axis of experts."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ..plan import Plan
from ..sharding import weight
from .basic import ACTIVATIONS, Dense, single, times
from .bilinear import formed

Dispatch = Literal["dense", "sorted"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens choose among the experts of a block.

    Attributes:
      experts: number of experts.
      chosen: number of experts per token.
      normalize: whether the weights of the chosen experts sum to one.
      balance: factor of the load-balancing loss of one block; 0 for none.
      dispatch: "dense" computes every expert for every token and masks; "sorted"
        sorts the tokens by expert and computes only the chosen experts.

    Raises:
      ValueError: more experts are chosen than there are.
    """

    experts: int
    chosen: int = 2
    normalize: bool = True
    balance: float = 0.0
    dispatch: Dispatch = "dense"

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ValueError(
                f"experts_per_token={self.chosen} must be at most "
                f"experts={self.experts}"
            )


class ExpertDense(nnx.Module):
    """One linear map per expert: a kernel with a leading axis "experts".

    Args:
      plan: the model's plan, with the axis "experts".
      names: (fan-in, fan-out).
      init: see `Plan.param`.
    """

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, str],
        *,
        init: str = "fan_in",
        rngs: nnx.Rngs,
    ):
        self.dtype = plan.dtype
        self.kernel, self.multiplier = plan.param(
            rngs.params,
            ("experts", *names),
            inputs=1,
            stacked=1,
            in_branch=True,
            init=init,
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch experts m"]:
        """The output of every expert for every row."""
        kernel = weight(self.kernel, self.dtype)
        y = jnp.einsum("...n,enm->...em", x.astype(self.dtype), kernel)
        return times(y, self.multiplier)

    def summed(self, x: Float[Array, "*batch experts n"]) -> Float[Array, "*batch m"]:
        """Apply each expert to its own rows, and sum over experts."""
        kernel = weight(self.kernel, self.dtype)
        y = jnp.einsum("...en,enm->...m", x.astype(self.dtype), kernel)
        return times(y, self.multiplier)

    def grouped(
        self, x: Float[Array, "rows n"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows m"]:
        """Apply expert 0 to the first sizes[0] rows, expert 1 to the next, ..."""
        kernel = weight(self.kernel, self.dtype)
        y = formed(Grouped(), x.astype(self.dtype), kernel, sizes)
        return times(y, self.multiplier)


# Of the gradient of a kernel: products over the rows of each expert.
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """<y, x W>, where the first sizes[0] rows of x take W[0], the next W[1], ...

    JAX's operation has no `jax.vmap` over some of its arguments only, so it `loops`.
    """

    loops: ClassVar[bool] = True

    def x(self, kernel: Array, y: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot(y, kernel.swapaxes(1, 2), sizes)

    def kernel(self, x: Array, y: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot_general(x, y, sizes, _OVER_ROWS)

    def y(self, x: Array, kernel: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot(x, kernel, sizes)


class Experts(nnx.Module):
    """Σ_e g_e(x) · W2_e (φ(W_gate,e x) · W1_e x) over the experts that x chooses.

    The router is a linear map from the residual stream to a fixed number of experts, so
    its role is that of a readout. g_e is the softmax of its logits at the chosen
    experts, and zero at others. In training, the gradient of `balance` times the
    load-balancing loss is added to the router's gradient.

    Args:
      plan: the model's plan, with the axes "experts" and "mlp".
      routing: how tokens choose.
      nonlinearity: of the gates.
      zero_init: whether the last kernel starts at zero.

    Source: Fedus et al. 2022 (arXiv:2101.03961), eq. 4 to 6; Jiang et al. 2024
    (arXiv:2401.04088), section 2.1.
    """

    def __init__(
        self,
        plan: Plan,
        routing: Routing,
        *,
        nonlinearity: str,
        zero_init: bool = False,
        rngs: nnx.Rngs,
    ):
        self.routing = routing
        self.nonlinearity = nonlinearity
        self.deterministic = False
        self.router = Dense(plan, ("embed", "experts"), in_branch=True, rngs=rngs)
        self.gate = ExpertDense(plan, ("embed", "mlp"), rngs=rngs)
        self.up = ExpertDense(plan, ("embed", "mlp"), rngs=rngs)
        self.down = ExpertDense(
            plan,
            ("mlp", "embed"),
            init="zeros" if zero_init else "fan_in",
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "batch time n"], key: Any = None
    ) -> Float[Array, "batch time n"]:
        del key  # only a plain MLP has dropout
        probabilities = self.probabilities(x)
        if self.routing.balance and not self.deterministic:
            loss = self.routing.balance * balance_loss(probabilities, self.routing)
            probabilities = _with_gradient_of(probabilities, loss)
        values, chosen = jax.lax.top_k(probabilities, self.routing.chosen)
        if self.routing.normalize:
            values = values / values.sum(axis=-1, keepdims=True)
        values = values.astype(x.dtype)
        if self.routing.dispatch == "sorted":
            return self._sorted(x, values, chosen)
        φ = ACTIVATIONS[self.nonlinearity]
        hidden = φ(self.gate(x)) * self.up(x)
        weights = _spread(values, chosen, self.routing)
        return self.down.summed(hidden * weights[..., None])

    def probabilities(
        self, x: Float[Array, "batch time n"]
    ) -> Float[Array, "batch time experts"]:
        """The softmax of the router's logits, float32 at least."""
        logits = self.router(x)
        return jax.nn.softmax(logits.astype(single(logits.dtype)), axis=-1)

    def _sorted(
        self,
        x: Float[Array, "batch time n"],
        values: Float[Array, "batch time chosen"],
        chosen: Int[Array, "batch time chosen"],
    ) -> Float[Array, "batch time n"]:
        n, k = x.shape[-1], self.routing.chosen
        rows, experts = x.reshape(-1, n), chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        token = order // k
        sizes = jnp.bincount(experts, length=self.routing.experts)
        h = rows[token]
        φ = ACTIVATIONS[self.nonlinearity]
        hidden = φ(self.gate.grouped(h, sizes)) * self.up.grouped(h, sizes)
        hidden = hidden * values.reshape(-1)[order][:, None]
        out = self.down.grouped(hidden, sizes)
        return jnp.zeros_like(out, shape=rows.shape).at[token].add(out).reshape(x.shape)


def _spread(
    values: Float[Array, "*batch chosen"],
    chosen: Int[Array, "*batch chosen"],
    routing: Routing,
) -> Float[Array, "*batch experts"]:
    """Weights of all experts, zero for those that are not chosen."""
    hot = jax.nn.one_hot(chosen, routing.experts, dtype=values.dtype)
    return jnp.einsum("...k,...ke->...e", values, hot)


def shares(
    probabilities: Float[Array, "*batch experts"], routing: Routing
) -> Float[Array, " experts"]:
    """The fraction of all choices that falls on each expert; sums to one."""
    _, chosen = jax.lax.top_k(probabilities, routing.chosen)
    counts = jax.nn.one_hot(chosen, routing.experts, dtype=probabilities.dtype)
    return counts.reshape(-1, routing.experts).mean(axis=0)


def balance_loss(
    probabilities: Float[Array, "*batch experts"], routing: Routing
) -> Float[Array, ""]:
    """The load-balancing loss of one block, E · Σ_e f_e P_e; 1 if balanced.

    f_e is the fraction of choices that falls on expert e, P_e the mean probability of
    e. Only P_e has a gradient.

    Source: Fedus et al. 2022 (arXiv:2101.03961), eq. 4 to 6. Mixtral's code counts f_e
    per token, which gives `experts_per_token` times this loss.
    """
    share = jax.lax.stop_gradient(shares(probabilities, routing))
    mean = probabilities.reshape(-1, routing.experts).mean(axis=0)
    return routing.experts * jnp.sum(share * mean)


@jax.custom_jvp
def _with_gradient_of(x: Array, loss: Float[Array, ""]) -> Array:
    """Return x, and in reverse mode add the gradient of `loss` to that of the model's.

    In forward mode x has its own tangent: the loss adds nothing to the outputs.
    """
    del loss
    return x


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _with_gradient_of(*primals), _added_p.bind(*tangents)


# The tangent of x, whose transpose also gives the tangent of the loss a one. A
# primitive, because that is no transpose of a linear function.
_added_p = Primitive("with_gradient_of")


def _added_transpose(cotangent: Array, x: Any, loss: Any) -> list[Array | None]:
    ones = jnp.ones(loss.aval.shape, loss.aval.dtype) if _is_asked(loss) else None
    return [cotangent if _is_asked(x) else None, ones]


def _is_asked(x: Any) -> bool:
    return isinstance(x, ad.UndefinedPrimal)


_added_p.def_impl(lambda x, loss: x)
_added_p.def_abstract_eval(lambda x, loss: x)
ad.deflinear2(_added_p, _added_transpose)
batching.primitive_batchers[_added_p] = lambda arguments, dims: (
    _added_p.bind(*arguments),
    dims[0],
)
mlir.register_lowering(
    _added_p, mlir.lower_fun(lambda x, loss: x, multiple_results=False)
)
