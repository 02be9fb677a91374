"""Measure how far the best learning rate of each optimizer moves with width and depth.

    python -m benchmarks.optimizers_transfer resmlp [--optimizers muon,adamw]
    python -m benchmarks.optimizers_transfer gpt --text FILE
    python -m benchmarks.optimizers_transfer --table

Models of the zoo under their default parametrizations: a residual MLP with branches of
one layer (Depth-μP) or two (CompleteP), which learns a fixed random teacher of 4 inputs
(`resmlp16`: 16) from fresh batches of 64, and a GPT (CompleteP), which learns the bytes
of a text from batches of 8 windows of 64. They train for 150 steps; the GPT's rate
warms up over 15 of them and then falls to zero as a cosine. Sizes go to 8 times the
base's width and 16 times its depth. Four seeds each draw the initial weights and the
batches. At the base, the learning rates are powers of two; at every size, 9 half
octaves around the base's best. Runs are appended to
`benchmarks/optimizers_transfer.csv`, and those that are there are not repeated.
`--table` prints the table of `docs/howto/parametrization.md`: for each model, optimizer
and dimension, by how many octaves the optimum moves a doubling, and what the base's
learning rate costs at the largest size, as in `mupax sweep`, with 90 % intervals.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo
from mupax.experiments.sweep.verdict import transfer

from . import losses

TABLE = losses.Table(
    pathlib.Path(__file__).with_suffix(".csv"),
    ("model", "optimizer", "width", "depth"),
    "log2_rate",
)
AXES = ("width", "depth")
SEEDS, STEPS, WARMUP, OUTPUTS = 4, 150, 15, 4
AVERAGED = 30  # the loss is that of the last steps


def teacher(x: jax.Array) -> jax.Array:
    """The function to learn, of variance one."""
    keys = jax.random.split(jax.random.key(99))
    inputs = x.shape[-1]
    hidden = jax.random.normal(keys[0], (inputs, 32)) * 2 / inputs**0.5
    out = jax.random.normal(keys[1], (32, OUTPUTS)) * (2 / 32) ** 0.5
    return jnp.tanh(x @ hidden) @ out


def regression(
    model: nnx.Module, key: jax.Array, text: jax.Array, inputs: int = 4
) -> jax.Array:
    """Mean squared error on a fresh batch."""
    x = jax.random.normal(key, (64, inputs))
    return jnp.mean((model(x[:, :, None, None]) - teacher(x)) ** 2)


def next_byte(model: nnx.Module, key: jax.Array, text: jax.Array) -> jax.Array:
    """Cross-entropy on windows of the text."""
    starts = jax.random.randint(key, (8,), 0, len(text) - 65)
    tokens = text[starts[:, None] + jnp.arange(65)].astype(int)
    each = optax.softmax_cross_entropy_with_integer_labels
    return each(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@dataclasses.dataclass(frozen=True)
class Model:
    """What trains, and the rates of each optimizer at its base."""

    name: str
    options: Mapping[str, Any]
    base: tuple[int, int]  # width, depth
    loss: Callable[..., jax.Array]
    decays: bool

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The base, wider ones, deeper ones."""
        width, depth = self.base
        wider = [(width * 2**i, depth) for i in (1, 2, 3)]
        return [self.base, *wider, *((width, depth * 2**i) for i in (1, 2, 3, 4))]

    def create(self, width: int, depth: int, key: jax.Array) -> nnx.Module:
        """A model of this size."""
        at_base = {"base_width": self.base[0], "base_depth": self.base[1]}
        sizes = {"width": width, "depth": depth, **at_base}
        return zoo.create(self.name, **sizes, **self.options, rngs=nnx.Rngs(key))


_RESIDUAL = {
    "input_shape": (4, 1, 1),
    "out_features": OUTPUTS,
    "branch_multiplier": 0.5,
    "activation_first": True,
    "subtract_mean": False,
}
_GPT = {"head_dim": 16, "context": 64, "branch_multiplier": 1.0}
MODELS = {
    "resmlp": Model("resmlp", _RESIDUAL, (32, 4), regression, False),
    "resmlp2": Model(
        "resmlp", {**_RESIDUAL, "block_depth": 2}, (32, 4), regression, False
    ),
    "gpt": Model("gpt", _GPT, (32, 2), next_byte, True),
    "resmlp16": Model(
        "resmlp",
        {**_RESIDUAL, "input_shape": (16, 1, 1)},
        (32, 4),
        functools.partial(regression, inputs=16),
        False,
    ),
}

# Each with the octaves of its rates at the base.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], range]] = {
    "adamw": (functools.partial(optim.adamw, weight_decay=0.0), range(-11, -1)),
    "lion": (functools.partial(optim.lion, weight_decay=0.0), range(-12, -2)),
    "sgd": (functools.partial(optim.sgd, momentum=0.9), range(-9, 1)),
    "muon": (optim.muon, range(-9, 1)),
    "muon_h": (optim.muon_h, range(-9, 1)),
    "scion": (optim.scion, range(-11, -1)),
    "shampoo": (optim.shampoo, range(-9, 1)),
    "soap": (optim.soap, range(-9, 1)),
    "adam_h": (optim.adam_h, range(-9, 1)),
    "schedule_free": (
        lambda rate, scales: optax.contrib.schedule_free(
            optim.adamw(rate, scales, b1=0.0, weight_decay=0.0), rate
        ),
        range(-10, 0),
    ),
}


@functools.cache
def trainer(model: str, name: str, width: int, depth: int) -> Callable[..., Any]:
    """A function from seeds and rates, both (runs,), and a text to losses."""
    trained = MODELS[model]
    scales = zoo.scales(nnx.eval_shape(lambda: trained.create(width, depth, _key(0))))

    def run(seed: jax.Array, rate: jax.Array, text: jax.Array) -> jax.Array:
        net = trained.create(width, depth, _key(seed))
        graph, params, rest = nnx.split(net, nnx.Param, ...)
        batches = jax.random.fold_in(jax.random.key(7), seed)
        if trained.decays and name != "schedule_free":
            shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, WARMUP, STEPS)
            tx = OPTIMIZERS[name][0](lambda count: rate * shape(count), scales)
        else:
            tx = OPTIMIZERS[name][0](rate, scales)

        def step(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            key = jax.random.fold_in(batches, number)
            loss, grads = jax.value_and_grad(
                lambda p: trained.loss(nnx.merge(graph, p, rest), key, text)
            )(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        carry = params, tx.init(params)
        found = jax.lax.scan(step, carry, jnp.arange(STEPS))[1]
        return found[-AVERAGED:].mean()

    def runs(seeds: jax.Array, rates: jax.Array, text: jax.Array) -> jax.Array:
        # One after another: on a CPU as fast as lanes, in the memory of one run.
        return jax.lax.map(lambda pair: run(*pair, text), (seeds, rates))

    return jax.jit(runs)


def _key(seed: Any) -> jax.Array:
    return jax.random.key(seed)


def measure(
    model: str, name: str, size: tuple[int, int], rates: list[float], text: jax.Array
) -> None:
    """Run what is missing of these rates, and append it to the table."""
    known = TABLE.at(model, name, *size)
    missing = [rate for rate in rates if rate not in known]
    if not missing:
        return
    exponents, seeds = jnp.meshgrid(jnp.array(missing), jnp.arange(SEEDS))
    found = trainer(model, name, *size)(seeds.ravel(), 2.0 ** exponents.ravel(), text)
    found = np.asarray(found).reshape(SEEDS, len(missing))
    TABLE.add(model, name, *size, losses=dict(zip(missing, found.T, strict=True)))


def octaves(name: str) -> list[float]:
    """The rates of an optimizer at the base, as powers of two."""
    return [float(rate) for rate in OPTIMIZERS[name][1]]


def grid(model: str, name: str) -> list[float]:
    """Nine half octaves around the base's best rate."""
    wide = TABLE.at(model, name, *MODELS[model].base)
    best = min(
        octaves(name),
        key=lambda rate: np.nan_to_num(wide[rate].mean(), nan=np.inf),
    )
    return [best + i / 2 for i in range(-4, 5)]


def summary(model: str, name: str, axis: str) -> str:
    """The shift a doubling along an axis, and the cost; "" where runs are missing."""
    width, depth = MODELS[model].base
    kept = [
        size
        for size in MODELS[model].sizes
        if (size[1] == depth if axis == "width" else size[0] == width)
    ]
    if not TABLE.at(model, name, width, depth):
        return ""
    rates = grid(model, name)
    cells = [
        TABLE.cell(model, name, n, m, width=n, depth=m, values=rates) for n, m in kept
    ]
    known = [cell for cell in cells if cell is not None]
    if len(known) < len(cells):
        return ""
    judged = transfer(known, axis, width if axis == "width" else depth)
    return f"{losses.shift(judged)}, {losses.cost(judged)}"


def table(axis: str) -> str:
    """A row for each optimizer; a cell is empty where it was not measured."""
    lines = [f"| over {axis} | {' | '.join(MODELS)} |"]
    lines.append("|---" * (1 + len(MODELS)) + "|")
    for name in OPTIMIZERS:
        cells = [summary(model, name, axis) for model in MODELS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train one model, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--text", help="the file that the GPT reads")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(*map(table, AXES), sep="\n\n")
        return
    if given.model is None or (given.model == "gpt" and given.text is None):
        parser.error("name a model; the GPT also needs --text FILE")
    text = pathlib.Path(given.text).read_bytes() if given.text else b"-"
    data = jnp.frombuffer(text, jnp.uint8)
    for name in given.optimizers.split(","):
        model, base = given.model, MODELS[given.model].base
        measure(model, name, base, octaves(name), data)
        for size in MODELS[model].sizes:
            measure(model, name, size, grid(model, name), data)


if __name__ == "__main__":
    main()
