"""Run coordinate checks of every family of the zoo, and print the table of the docs.

    python -m benchmarks.coord_check [--models mlp cnn ...] [--optimizers sgd adam lion]

Trains each model a few steps at several widths and depths. Prints for each
parametrization the slope of log |Δ activation| against log size that is farthest from
zero, and its layer. Results and expected slopes: `coord_check.md` beside it;
`tests/test_zoo_coord_long.py` asserts them.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax import optim, zoo

CLASSES = 4
# Of one step; what moves is small against what is there, as the laws assume.
RATES = {"sgd": 0.02, "momentum": 0.02, "adam": 0.002, "lion": 0.002, "muon": 0.005}
# Updates of SGD are as large as its gradients, and those differ between seeds.
SEEDS = {"sgd": 32, "momentum": 32}
# Batch statistics of four small images add to that.
MORE_SEEDS = {("efficientnet", "momentum", "depth"): 96}
# SGD with a momentum of 0.9. Its first step is that of SGD.
MOMENTUM = {"momentum": 0.9}


@dataclasses.dataclass(frozen=True)
class Case:
    """One family of models, and the sizes at which it is checked.

    Attributes:
      options: of the model; `width` and `depth` are fixed while the other is swept.
      shape: of one input; a sequence length for models that read tokens.
      widths: the swept widths.
      depths: the swept depths.
      streams: regular expression of the layers to compare over depth, by default the
        residual stream.
      layers: regular expression of the layers to compare over width.
      rate: factor of the optimizer's learning rate.
      model: its name in the zoo; None for the name of the case.
      seeds: minimal number of seeds, so that the errors of all slopes are well below
        the tolerance.
    """

    options: dict[str, Any]
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    streams: str = r"^(stream|output)"
    layers: str | None = None
    rate: float = 1.0
    seeds: int = 16
    model: str | None = None

    def batch(self) -> jax.Array:
        """A batch of random inputs."""
        key = jax.random.key(1)
        if self.shape[1:]:
            return jax.random.normal(key, (4, *self.shape))
        return jax.random.randint(key, (4, *self.shape), 0, CLASSES)


# A base with few units and one block makes branches weak, so that effects of small
# networks are below the tolerance.
HALF = {"base_depth": 1, "branch_multiplier": 0.5}
CASES = {
    "mlp": Case(
        {"width": 256, "depth": 3, "base_width": 16, "base_depth": 3},
        (4, 4, 1),
        (128, 512),
        (8, 32),
        streams=r"^layers",
        rate=0.1,
        seeds=64,
    ),
    "resmlp": Case(
        {"width": 64, "depth": 4, "base_width": 4, **HALF},
        (4, 4, 1),
        (128, 512),
        (16, 128),
    ),
    "cnn": Case(
        {"width": 128, "depth": 4, "base_width": 8, **HALF},
        (8, 8, 1),
        (256, 1024),
        (32, 128),
    ),
    "resnet18": Case(
        {
            "width": 16,
            "depth": 2,
            "base_width": 4,
            **HALF,
            "blocks": (1, 1),
            "stem": "cifar",
            "norm": "layer",
        },
        (4, 4, 2),
        (64, 256),
        (32, 128),
    ),
    "vit": Case(
        {
            "width": 32,
            "depth": 2,
            "base_width": 2,
            **HALF,
            "heads": 2,
            "patch_size": 4,
        },
        (8, 8, 3),
        (64, 256),
        (32, 128),
        layers=r"^(stream|blocks/(mlp|attention)/(query|key|value|up|down|out)|output)",
    ),
    "gpt": Case(
        {
            "width": 32,
            "depth": 2,
            "base_width": 2,
            **HALF,
            "heads": 2,
            "vocab_size": CLASSES,
            "context": 6,
        },
        (6,),
        (64, 256),
        (16, 64),
        layers=r"^(stream|blocks/(mlp|attention)/(query|key|value|up|down|out)|output)",
        seeds=96,
    ),
}

_GPT = CASES["gpt"]
CASES["llama"] = dataclasses.replace(
    _GPT, options={**_GPT.options, "queries_per_key": 2}
)


def _variant(of: str, **changes: Any) -> Case:
    """Copy a case with further options of the model, or other fields of `Case`."""
    fields = {f.name for f in dataclasses.fields(Case)}
    options = {k: v for k, v in changes.items() if k not in fields}
    changed = {k: v for k, v in changes.items() if k in fields}
    case = CASES[of]
    options = {**case.options, **options}
    changed = {"model": case.model or of, **changed, "options": options}
    return dataclasses.replace(case, **changed)


# Each case combines all options of a family that do not exclude each other.
_IMAGES = {"width": 16, "depth": 2, "base_width": 4, **HALF}
CASES["convnext"] = Case(
    {
        **_IMAGES,
        "blocks": (1, 1),
        "patch_size": 2,
        "layer_scale": 1.0,
        "grn": True,
    },
    (4, 4, 2),
    (128, 512),
    (32, 128),
    # Kernels start at 0.02, whatever their fan-in.
    rate=0.3,
    seeds=8,
    model="convnext_tiny",
)
CASES["efficientnet"] = Case(
    {
        **_IMAGES,
        "rows": (
            (0, "separable", 1, 3, 1, 1, 4, 1.0),
            (1, "inverted", 1, 5, 1, 2, 8, 0.5),
        ),
        "rows_width": 4,
        "head": 16,
    },
    (4, 4, 2),
    (64, 256),
    (32, 128),
    model="efficientnet_b0",
)
CASES["efficientnetv2"] = _variant("efficientnet", rows=((0, "fused", 1, 3, 1, 2, 8),))
CASES["mobilenetv3"] = _variant(
    "efficientnet",
    rows=((0, "inverted", 1, 5, 1, 2, 8, 1.0),),
    head_pooled=True,
    nonlinearity="hard_swish",
    gate="hard_sigmoid",
    squeeze_nonlinearity="relu",
    seeds=48,
)
# The stream of bottlenecks is four times as wide.
CASES["resnet_options"] = _variant(
    "resnet18",
    block="bottleneck",
    base_width=2,
    groups=4,
    width_per_group=32,
    squeeze=1 / 4,
    stem="deep",
    shortcut="average",
    shape=(8, 8, 2),
)
CASES["vit_rotary"] = _variant(
    "vit",
    base_width=8,
    rotary=True,
    position=False,
    registers=2,
    key_bias=False,
    gated=True,
    nonlinearity="silu",
    layer_scale=1.0,
    pool="norm_mean",
    class_token=True,
)
CASES["vit_clip"] = _variant(
    "vit", pre_norm=True, patch_bias=False, nonlinearity="quick_gelu", pool="mean"
)
# At the base depth, parametrizations that scale depth equal mup, so width skips them.
WIDTH = ("mup", "mean_field", "ntk", "sp")
DEPTH = ("depth_mup", "ode", "completep(alpha=0.75)", "mup")


def point(name: str) -> optim.Parametrization:
    """Look up a parametrization by the name in the table."""
    if name == "completep(alpha=0.75)":
        return optim.parametrization("completep", alpha=0.75)
    return optim.parametrization(name)


def check(
    model: str, name: str, optimizer: str, axis: str, **settings: Any
) -> optim.CoordCheck:
    """Run the coordinate check of one model over widths or depths.

    Args:
      model: one of `CASES`.
      name: of the parametrization.
      optimizer: one of `RATES`.
      axis: "width" or "depth".
      **settings: arguments of `coord_check` that replace those of the case.
    """
    case = CASES[model]
    options = {**case.options, "parametrization": point(name)}
    registered = case.model or model
    if not zoo.reads_tokens(registered):
        options |= {"input_shape": case.shape, "out_features": CLASSES}

    def create(key: jax.Array, **size: int) -> nnx.Module:
        return zoo.create(registered, **{**options, **size}, rngs=nnx.Rngs(key))

    def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
        # Linear in the logits, so that its gradient does not depend on their initial
        # size, m^-½ under μP. A copy of the model may update its batch statistics.
        logits = nnx.clone(model)(x)
        labels = jnp.arange(logits[..., 0].size).reshape(logits.shape[:-1]) % 2
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

    def make(model: nnx.Module, **size: int) -> Any:
        given = (case.rate * RATES[optimizer], zoo.scales(model))
        if optimizer in MOMENTUM:
            return optim.sgd(*given, MOMENTUM[optimizer])
        return getattr(optim, optimizer)(*given)

    layers = case.layers
    if layers is not None and optimizer in SEEDS:
        # Queries start at zero. Their first gradients are sums of terms of random sign,
        # which fall as m^-½ until training has aligned them.
        layers = layers.replace("query|", "")
    sweep = {"width": case.widths, "depth": case.depths}[axis]
    settings = {
        "steps": 2,
        "seeds": max(
            case.seeds,
            SEEDS.get(optimizer, 0),
            MORE_SEEDS.get((model, optimizer, axis), 0),
        ),
        "layers": {"width": layers, "depth": case.streams}[axis],
        f"{axis}s": sweep,
        **settings,
    }
    return optim.coord_check(create, make, loss, case.batch(), **settings)


def names(model: str, axis: str) -> tuple[str, ...]:
    """The parametrizations that are compared on this axis."""
    if axis == "width":
        return WIDTH
    return ("relu_mlp", "mup") if model == "mlp" else DEPTH


def cell(model: str, name: str, optimizer: str, axis: str) -> str:
    """Format the slope farthest from zero, its standard error, and its layer."""
    result = check(model, name, optimizer, axis)
    layer, slope = worst(result, axis)
    return f"{slope:+.2f} ± {result.errors[axis][layer]:.2f} `{layer}`"


def worst(result: optim.CoordCheck, axis: str) -> tuple[str, float]:
    """The layer whose slope is farthest from zero, and that slope."""
    slopes = result.slopes[axis]
    layer = max(slopes, key=lambda layer: abs(slopes[layer]))
    return layer, slopes[layer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--parametrizations", nargs="+", default=[])
    parser.add_argument("--axes", nargs="+", default=["width", "depth"])
    parser.add_argument(
        "--optimizers", nargs="+", default=["sgd", "adam", "lion"], choices=RATES
    )
    arguments = parser.parse_args()
    for model in arguments.models:
        for axis in arguments.axes:
            for name in names(model, axis):
                if name in (arguments.parametrizations or [name]):
                    cells = [cell(model, name, o, axis) for o in arguments.optimizers]
                    row = " | ".join([model, axis, name, *cells])
                    print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
