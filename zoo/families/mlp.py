"""`MLP`: a plain MLP without residual branches, or a deep linear network."""

import dataclasses
import math

from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Counts, Family, Options, Positive
from ..layers.basic import (
    ACTIVATIONS,
    Dense,
    Nonlinearity,
    flattened,
    scan,
    stack,
)
from ..plan import Plan
from ..registry import Record, register

# Gains that keep the mean square of activations at one: E φ(gain·z)² = 1 for a normal
# z. No gain does that for a bounded φ; theirs is 1/φ'(0), at which signals neither
# vanish nor saturate exponentially.
GAINS = {
    "relu": 2**0.5,
    "relu6": 1.4142434,
    "abs": 1.0,
    "identity": 1.0,
    "gelu": 1.4680113,
    "gelu_tanh": 1.4679608,
    "quick_gelu": 1.4745961,
    "silu": 1.5587599,
    "hard_swish": 1.5671838,
    "tanh": 1.0,
    "erf": math.pi**0.5 / 2,
}


class Layer(nnx.Module):
    """z ← W φ(z) (+ b)."""

    def __init__(
        self, plan: Plan, *, nonlinearity: str, gain: float, bias: bool, rngs: nnx.Rngs
    ):
        self.nonlinearity = nonlinearity
        self.linear = Dense(plan, ("embed", "mlp"), bias=bias, gain=gain, rngs=rngs)

    def __call__(self, z: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        return self.linear(ACTIVATIONS[self.nonlinearity](z))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPOptions(Options):
    """Options of `MLP`; see there."""

    input_shape: Counts = (8, 8, 1)
    out_features: Count = 10
    nonlinearity: Nonlinearity = "relu"
    gain: Positive | None = None
    bias: bool = False

    @property
    def default_parametrization(self) -> str:
        """The rule for networks without residual branches."""
        return "mup"


class MLP(Family, options=MLPOptions):
    """f(x) = V φ(z^L), z^{l+1} = W^{l+1} φ(z^l), z^1 = W^1 x.

    There are L hidden layers and L + 1 weight matrices, as in Jelassi et al.; W^2 to
    W^L are square, stacked and scanned. No weight is in a residual branch: the default,
    `mup`, leaves depth unscaled, and optimizers raise for rules of residual branches
    such as `depth_mup` if depth differs from the base. `relu_mlp` multiplies learning
    rates by M^-3/2, which keeps the change of z^L in the first step under ReLU and in
    deep linear networks. Under tanh its square grows as L^0.6 instead of L^3. After
    hundreds of steps `relu_mlp` lowers the learning rate too much: at 4x the depth it
    costs 3.4 % of the loss with Adam and 1.7 % with SGD (papers/figures.md, `mlp-adam`
    and `mlp-sgd`). Tune either at the target's depth.

    Hidden weights have standard deviation gain/√fan_in. The readout's is 1/√fan_in at
    the base, times 1/m: the mean-field initialization of eq. 1.2.

    Args:
      depth: L, the number of hidden layers.
      input_shape: shape of one input, which is flattened.
      out_features: number of classes.
      nonlinearity: "relu", "abs", "gelu", "gelu_tanh", "tanh", "erf", or "identity" for
        a deep linear network.
      gain: of W^1 to W^L. None: √2 under ReLU (He et al. 2015) and 1 under abs and
        identity, so that activations keep their size at any depth. `mlp.GAINS` has the
        other defaults.
      bias: add biases, which start at zero.

    Raises:
      ValueError: a size is not a positive whole number, the gain is not positive, or a
        name is unknown.

    Source: Jelassi et al. 2023 (arXiv:2305.07810), eqs. 1.1 and 1.2.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("mlp", width=32, depth=4, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((5, 8, 8, 1))).shape, model.layers.linear.kernel.shape
      ((5, 10), (3, 32, 32))
    """

    def build(self, options: MLPOptions, rngs: nnx.Rngs) -> None:
        gain = options.gain
        gain = GAINS[options.nonlinearity] if gain is None else gain
        self.plan = options.plan(
            growing={"mlp": 1.0},
            fixed={
                "inputs": math.prod(options.input_shape),
                "classes": options.out_features,
            },
        )
        self.nonlinearity = options.nonlinearity
        self.remat = options.remat
        self.input_shape = tuple(options.input_shape)
        bias = options.bias
        self.readin = Dense(
            self.plan, ("inputs", "embed"), bias=bias, gain=gain, rngs=rngs
        )
        self.layers = (
            stack(
                lambda rngs: Layer(
                    self.plan,
                    nonlinearity=options.nonlinearity,
                    gain=gain,
                    bias=bias,
                    rngs=rngs,
                ),
                options.depth - 1,
                rngs,
                # W^1 is a layer too, but not part of the stack.
                base_depth=options.tuned_depth - 1,
            )
            if options.depth > 1
            else None
        )
        self.readout = Dense(self.plan, ("embed", "classes"), bias=bias, rngs=rngs)

    def features(self, x: Float[Array, "batch *features"]) -> Float[Array, "batch n"]:
        """What the readout sees: the output of the last layer, (batch, width)."""
        z = self.readin(flattened(x, self.input_shape))
        if self.layers is not None:
            z = scan(self.layers, z, remat=self.remat)
        return ACTIVATIONS[self.nonlinearity](z)


register(Record(model=MLP, sizes={"mlp": {}}))
