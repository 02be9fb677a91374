"""Which learning rates do weights need that act in every layer, over depth?

    python -m benchmarks.every_layer train    # appends what the table lacks
    python -m benchmarks.every_layer          # writes the page

Two residual networks, width 64, on scikit-learn's digits: one whose layers share their
weights, and one with a norm after each addition. SGD's gradient of shared weights is a
sum over layers, and gains after additions act one after the other without a branch
multiplier; docs/rules.md has a rule for both, which no paper has. It is compared with
the rule of branches alone, at depths 4 to 64 under completep. 150 steps of batch size
64 with cosine decay, SGD with momentum 0.9, four seeds, fixed before the first run of
this code, after a pilot with other code.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from mupax import optim
from mupax.experiments.sweep.verdict import Transfer, transfer
from papers import pages

from . import losses

FOLDER = pathlib.Path(__file__).parent
PAGE, COMMAND = FOLDER / "results.md", "python -m benchmarks.every_layer"
TABLE = losses.Table(
    FOLDER / "every_layer.csv", ("model", "optimizer", "rule", "depth"), "log2_lr"
)
MODELS = ("shared", "sgd"), ("post-norm", "sgd"), ("post-norm", "adam")
RULES, DEPTHS, SEEDS, STEPS = ("branches alone", "every layer"), (4, 16, 64), 4, 150
RATES = {"sgd": range(-8, 1), "adam": range(-11, -3)}


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _forward(params: dict[str, Any], x: jax.Array, model: str, depth: int) -> jax.Array:
    x = x @ params["in"]
    layers = {name: params[name] for name in ("w", "g", "b")}
    if model == "shared":

        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = jax.nn.relu(_norm(x) * layers["g"] + layers["b"]) @ layers["w"]
            return x + y * 4 / depth, None

        return _norm(jax.lax.scan(layer, x, length=depth)[0]) @ params["out"]

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + jax.nn.relu(x) @ w["w"] * 4 / depth
        return _norm(x) * w["g"] + w["b"], None

    return _norm(jax.lax.scan(block, x, layers)[0]) @ params["out"]


def _params(key: jax.Array, model: str, depth: int, n: int = 64) -> dict[str, Any]:
    keys, copies = jax.random.split(key), () if model == "shared" else (depth,)
    return {
        "in": jax.random.normal(keys[0], (64, n)) / 8,
        "w": jax.random.normal(keys[1], (*copies, n, n)) * n**-0.5,
        "g": jnp.ones((*copies, n)),
        "b": jnp.zeros((*copies, n)),
        "out": jnp.zeros((n, 10)),
    }


def _scales(model: str, depth: int, rule: str) -> optim.Scales:
    def built(depth: int, n: int = 64) -> tuple[Any, Any]:
        params = functools.partial(_params, model=model, depth=depth, n=n)
        return (
            lambda params, x: _forward(params, x, model, depth),
            jax.eval_shape(params, jax.random.key(0)),
        )

    x = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    scales = optim.infer_scales(
        *(built(DEPTHS[0]), built(depth)),
        delta=built(DEPTHS[0], 128),  # the base is a target, too
        inputs=(x,),
        parametrization="completep",
    )
    if rule == "every layer":
        return scales
    plain = {"on_stream": False, "shared": 1.0}
    found = {k: dataclasses.replace(v, **plain) for k, v in scales.items()}
    return optim.Scales(found, scales.parametrization, multiplied=True)


def _losses(model: str, optimizer: str, rule: str, depth: int) -> dict[float, Any]:
    """{log2 of the rate: the losses of all seeds, over all digits at the end}."""
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray((images - images.mean()) / images.std(), jnp.float32)
    labels = jnp.asarray(labels)
    scales = _scales(model, depth, rule)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        logits = _forward(params, images[rows], model, depth)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows])
        return each.mean()

    def run(rate: jax.Array, key: jax.Array) -> jax.Array:
        schedule = optax.cosine_decay_schedule(1.0, STEPS)
        options = {"momentum": 0.9} if optimizer == "sgd" else {}
        tx = optax.chain(
            getattr(optim, optimizer)(schedule, scales, **options), optax.scale(rate)
        )
        params = _params(key, model, depth)

        def step(state: Any, key: jax.Array) -> tuple[Any, None]:
            rows = jax.random.choice(key, len(images), (64,))
            grads = jax.grad(loss)(state[0], rows)
            updates, moments = tx.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), moments), None

        steps = jax.random.split(jax.random.fold_in(key, 1), STEPS)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), steps)
        return loss(params, jnp.arange(len(images)))

    keys = jax.random.split(jax.random.key(0), SEEDS)
    train = jax.jit(jax.vmap(run, (None, 0)))
    return {rate: np.asarray(train(2.0**rate, keys)) for rate in RATES[optimizer]}


def judged(model: str, optimizer: str, rule: str) -> Transfer:
    """The verdict on the learning rate over depth."""
    place = model, optimizer, rule
    cells = [TABLE.cell(*place, depth, width=64, depth=depth) for depth in DEPTHS]
    return transfer([cell for cell in cells if cell is not None], "depth", DEPTHS[0])


def page() -> str:
    """A line for each model, optimizer and rule."""
    text = [
        f"| model, optimizer | rule | {' | '.join(f'best at {x}' for x in DEPTHS)} "
        f"| loss at {DEPTHS[-1]}, base's best rate |",
        "|---" * (len(DEPTHS) + 3) + "|",
    ]
    for (model, optimizer), rule in itertools.product(MODELS, RULES):
        one = judged(model, optimizer, rule)
        last = losses.mean(one.cells[-1], losses.best(one.cells[0]))
        cells = [f"{model}, {optimizer}", rule, *losses.optima(one), last]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Train what the table lacks, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["train"])
    if parser.parse_args().what:
        for (*of, rule), depth in itertools.product(
            ((*m, r) for m, r in itertools.product(MODELS, RULES)), DEPTHS
        ):
            if not TABLE.at(*of, rule, depth):
                TABLE.add(*of, rule, depth, losses=_losses(*of, rule, depth))
    PAGE.write_text(pages.replaced(PAGE, {"": page()}, COMMAND))


if __name__ == "__main__":
    main()
