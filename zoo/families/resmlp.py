"""`ResMLP`: the residual MLP of Tensor Programs VI, sections 6 to 10."""

import dataclasses
import math
from typing import Annotated

from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Counts, Family, Range, ResidualOptions
from ..layers.basic import (
    ACTIVATIONS,
    Dense,
    LayerNorm,
    Nonlinearity,
    check_activation,
    flattened,
    mean_subtraction,
    scan,
    stack,
    warn_of_drift,
)
from ..plan import Plan
from ..registry import Record, register


class Block(nnx.Module):
    """x + a M^-α · branch(x), where the branch has `block_depth` layers.

    A layer is MS(φ(W x)), or MS(W φ(x)) with `activation_first`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        block_depth: int,
        nonlinearity: str,
        activation_first: bool,
        subtract_mean: bool,
        subtract_inner_mean: bool,
        layer_norm: bool,
        zero_init: bool,
        rngs: nnx.Rngs,
    ):
        self.branch = plan.branch
        self.nonlinearity = nonlinearity
        self.activation_first = activation_first
        inner = subtract_mean and subtract_inner_mean
        self.subtract_mean = (inner,) * (block_depth - 1) + (subtract_mean,)
        self.norm = LayerNorm(plan, "embed", in_branch=True) if layer_norm else None
        names = ["embed"] + ["mlp"] * block_depth
        last = block_depth - 1
        self.layers = nnx.List(
            Dense(
                plan,
                (names[i], names[i + 1]) if i == 0 else ("mlp", "embed"),
                in_branch=True,
                init="zeros" if zero_init and i == last else "fan_in",
                rngs=rngs,
            )
            for i in range(block_depth)
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        phi = ACTIVATIONS[self.nonlinearity]
        h = x if self.norm is None else self.norm(x)
        for layer, subtract_mean in zip(self.layers, self.subtract_mean, strict=True):
            h = layer(phi(h)) if self.activation_first else phi(layer(h))
            if subtract_mean:
                h = mean_subtraction(h)
        return x + self.branch * h


# The layers of a block are traced one by one.
_BlockDepth = Annotated[
    int, Range("a whole number, 1 to 1000", lambda n: 1 <= n <= 1000)
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMLPOptions(ResidualOptions):
    """Options of `ResMLP`; see there."""

    input_shape: Counts = (8, 8, 1)
    out_features: Count = 10
    block_depth: _BlockDepth = 1
    nonlinearity: Nonlinearity = "relu"
    activation_first: bool = False
    subtract_mean: bool = True
    subtract_inner_mean: bool = True
    layer_norm: bool = False
    zero_init: bool = False
    train_ends: bool = True

    @property
    def branch_layers(self) -> int:
        """`block_depth`."""
        return self.block_depth


class ResMLP(Family, options=ResMLPOptions):
    """f(ξ) = V x^L, x^l = x^{l-1} + a M^-α · MS(φ(W^l x^{l-1})), x^0 = U ξ.

    Args:
      input_shape: shape of one input, which is flattened.
      out_features: number of classes.
      block_depth: number of layers in a branch. Depth-μP is optimal for one layer
        (section 9).
      nonlinearity: "relu", "abs", "gelu" or "identity".
      activation_first: apply the nonlinearity before the weights (section 8).
      subtract_mean: subtract the mean after each layer (MS, section 6.3). Without it,
        the mean of a ReLU adds up over blocks, and a `ModelWarning` says so if α < 1.
      subtract_inner_mean: with block_depth > 1, subtract the mean between the layers of
        a branch, too. False: only at its end (our reading of section 9).
      layer_norm: apply LayerNorm before the weights (section 10.2).
      zero_init: initialize the last layer of each branch with zeros.
      train_ends: train the first layer U and the readout V; False: freeze them (Figure
        10).

    Raises:
      ValueError: a size is not a positive whole number, a name is unknown, or zero_init
        is combined with a final nonlinearity that is flat at zero.

    Source: Tensor Programs VI, section 6.3 and eq. 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=32, depth=4, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((5, 8, 8, 1))).shape
      (5, 10)
    """

    def build(self, options: ResMLPOptions, rngs: nnx.Rngs) -> None:
        check_activation(
            options.nonlinearity,
            first=options.activation_first,
            zero_init=options.zero_init,
        )
        self.plan = options.plan(
            growing={"mlp": 1.0},
            fixed={
                "inputs": math.prod(options.input_shape),
                "classes": options.out_features,
            },
        )
        warn_of_drift(
            "resmlp",
            "subtract_mean=True",
            nonlinearity=options.nonlinearity,
            alpha=self.plan.parametrization.alpha,
            last=not (options.activation_first or options.subtract_mean),
        )
        self.remat = options.remat
        self.input_shape = tuple(options.input_shape)
        ends = options.train_ends
        self.readin = Dense(self.plan, ("inputs", "embed"), trained=ends, rngs=rngs)
        self.blocks = stack(
            lambda rngs: Block(
                self.plan,
                block_depth=options.block_depth,
                nonlinearity=options.nonlinearity,
                activation_first=options.activation_first,
                subtract_mean=options.subtract_mean,
                subtract_inner_mean=options.subtract_inner_mean,
                layer_norm=options.layer_norm,
                zero_init=options.zero_init,
                rngs=rngs,
            ),
            options.depth,
            rngs,
        )
        self.readout = Dense(self.plan, ("embed", "classes"), trained=ends, rngs=rngs)

    def features(self, x: Float[Array, "batch *features"]) -> Float[Array, "batch n"]:
        """What the readout sees: the output of the last block, (batch, width)."""
        x = self.readin(flattened(x, self.input_shape))
        return scan(self.blocks, x, remat=self.remat)


register(Record(model=ResMLP, sizes={"resmlp": {}}))
