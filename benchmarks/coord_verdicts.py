"""Count how often the verdicts of the coordinate check are right.

    python -m benchmarks.coord_verdicts [--seeds 4] [--checks 4] [--only GLOB]

Runs `optim.coord_check` with its default tolerance, steps and layers, on zoo models at
1x, 2x and 4x a small base. The verdict on correct set-ups should not be wrong, and that
on set-ups with a known mistake should not be ok. Each set-up is trained from
seeds x checks initializations, and every group of `seeds` is one check. Results:
`benchmarks/coord_check.md`.
"""

import argparse
import collections
import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo

CLASSES = 8
RATES = {"sgd": 0.02, "adam": 0.002}
WIDTHS, DEPTHS = (32, 64, 128), (4, 8, 16)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"input_shape": (4, 4, 1), "out_features": CLASSES},
    "resmlp": {"input_shape": (4, 4, 1), "out_features": CLASSES},
    "vit": {
        "input_shape": (8, 8, 3),
        "out_features": CLASSES,
        "heads": 2,
        "patch_size": 4,
    },
    "gpt": {"heads": 2, "vocab_size": CLASSES, "context": 6},
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, its parametrization, and possibly a mistake.

    Attributes:
      name: as printed.
      model: of `MODELS`.
      axis: "width" or "depth".
      right: whether the set-up is correct.
      parametrization: of the model.
      optimizer: of `RATES`.
      mistake: a change of the model or its optimizer; "" for none.
    """

    name: str
    model: str
    axis: str
    right: bool
    parametrization: str
    optimizer: str = "adam"
    mistake: str = ""

    def build(self, key: jax.Array, **size: int) -> nnx.Module:
        name = "sp" if self.mistake == "sp initialization" else self.parametrization
        sizes = {"width": WIDTHS[0], "depth": DEPTHS[0], **size}
        options = {
            **MODELS[self.model],
            "base_width": WIDTHS[0],
            "base_depth": DEPTHS[0],
            "parametrization": name,
            **sizes,
        }
        if self.mistake == "no branch multiplier":
            options["branch_multiplier"] = (sizes["depth"] / DEPTHS[0]) ** 0.5
        model = zoo.create(self.model, **options, rngs=nnx.Rngs(key))
        if self.mistake == "embedding at width^-1/2":
            for path, variable in nnx.iter_graph(model):
                if isinstance(variable, nnx.Param) and "embed" in map(str, path):
                    ratio = sizes["width"] / WIDTHS[0]
                    variable.set_value(variable[...] * ratio**-0.5)
        return model

    def transformation(self, model: nnx.Module, **_: int) -> Any:
        rate = RATES[self.optimizer]
        if self.mistake == "unscaled optimizer":
            return getattr(optax, self.optimizer)(rate)
        point = optim.parametrization(self.parametrization)
        scales = optim.Scales(zoo.scales(model), point)
        tx = getattr(optim, self.optimizer)(rate, scales)
        if self.mistake == "scaled twice":
            twice = optim.multipliers
            factors = {
                p: twice(s, point, self.optimizer).learning_rate
                for p, s in scales.items()
            }
            return optax.chain(tx, _multiply(factors))
        return tx

    def batch(self) -> jax.Array:
        key = jax.random.key(1)
        if self.model == "gpt":
            return jax.random.randint(key, (16, 6), 0, CLASSES)
        return jax.random.normal(key, (16, *MODELS[self.model]["input_shape"]))


def _multiply(factors: dict[str, float]) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scale(path: Any, leaf: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return leaf * factors[name.removesuffix("/value")]

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def outputs(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """The model's outputs. A copy of the model may update its batch statistics."""
    return nnx.clone(model)(batch)


def cross_entropy(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """A scalar loss, as a user may pass it."""
    logits = outputs(model, batch)
    labels = jnp.arange(logits[..., 0].size).reshape(logits.shape[:-1]) % CLASSES
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def setups() -> list[Setup]:
    """All set-ups, the correct ones first."""
    depthwise = {"resmlp": "depth_mup", "vit": "completep", "gpt": "completep"}
    listed = [
        Setup(f"{model} {optimizer}", model, "width", True, "mup", optimizer)
        for model in MODELS
        for optimizer in ("adam", "sgd")
    ]
    listed += [
        Setup(f"{model} {optimizer} {name}", model, "depth", True, name, optimizer)
        for model, name in depthwise.items()
        for optimizer in ("adam", "sgd")
    ]
    for model in ("mlp", "resmlp", "gpt"):
        for mistake in ("sp initialization", "unscaled optimizer", "scaled twice"):
            name = f"{model} adam, {mistake}"
            listed.append(Setup(name, model, "width", False, "mup", "adam", mistake))
        listed.append(Setup(f"{model} adam, sp", model, "width", False, "sp"))
        listed.append(Setup(f"{model} sgd, sp", model, "width", False, "sp", "sgd"))
        listed.append(Setup(f"{model} adam, ntk", model, "width", False, "ntk"))
    for model in ("resmlp", "gpt"):
        name = f"{model} adam, mup in depth"
        listed.append(Setup(name, model, "depth", False, "mup"))
    for mistake in ("no branch multiplier", "unscaled optimizer"):
        name = f"resmlp adam, {mistake}"
        listed.append(
            Setup(name, "resmlp", "depth", False, "depth_mup", "adam", mistake)
        )
    mistake = "embedding at width^-1/2"
    name = f"gpt adam, {mistake}"
    return [*listed, Setup(name, "gpt", "width", False, "mup", "adam", mistake)]


def groups(check: optim.CoordCheck, seeds: int) -> list[optim.CoordCheck]:
    """Split a check of many initializations into checks of `seeds` each."""
    total = next(iter(next(iter(check.changes.values())).values())).shape[-1]
    parts = []
    for start in range(0, total, seeds):
        changes = {
            axis: {
                layer: change[..., start : start + seeds]
                for layer, change in layers.items()
            }
            for axis, layers in check.changes.items()
        }
        parts.append(dataclasses.replace(check, changes=changes))
    return parts


def run(
    setup: Setup, seeds: int, checks: int, loss: Callable[..., Any] = outputs
) -> list[optim.CoordCheck]:
    """Run several checks of one set-up."""
    sizes = {"width": WIDTHS, "depth": DEPTHS}[setup.axis]
    check = optim.coord_check(
        setup.build,
        setup.transformation,
        loss,
        setup.batch(),
        seeds=seeds * checks,
        **{f"{setup.axis}s": sizes},
    )
    return groups(check, seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--checks", type=int, default=4)
    parser.add_argument("--only", default="*", help="set-ups whose name matches")
    parser.add_argument("--print", action="store_true", help="print the first check")
    parser.add_argument("--cross-entropy", action="store_true")
    arguments = parser.parse_args()
    print("| set-up | axis | ok | unclear | wrong | largest slope | hint |")
    print("|---|---|---|---|---|---|---|")
    for setup in setups():
        if not fnmatch.fnmatch(setup.name, arguments.only):
            continue
        loss = cross_entropy if arguments.cross_entropy else outputs
        checks = run(setup, arguments.seeds, arguments.checks, loss)
        count = collections.Counter(check.verdict.value for check in checks)
        slopes = {
            layer: np.mean([c.slopes[setup.axis][layer] for c in checks])
            for layer in checks[0].slopes[setup.axis]
        }
        worst = max(slopes, key=lambda layer: abs(slopes[layer]))
        hint = next(iter(checks[0].hints), "")[:60]
        numbers = " | ".join(str(count[v]) for v in ("ok", "unclear", "wrong"))
        kind = "right" if setup.right else "WRONG"
        print(
            f"| {kind}: {setup.name} | {setup.axis} | {numbers} | "
            f"{slopes[worst]:+.2f} `{worst}` | {hint} |",
            flush=True,
        )
        if arguments.print:
            print(checks[0], flush=True)


if __name__ == "__main__":
    main()
