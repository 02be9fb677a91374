"""The README's Python runs as it stands, and its model is a right one."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def run(name, code, session):
    exec(compile(code, f"README {name}", "exec"), session)
    return session


def my_model():
    """The README's model."""
    return run("model", BLOCKS[1], {"nnx": nnx})["MyModel"]


def test_the_examples_of_the_readme_run_in_one_session(capsys):
    use, model, chain, _ = BLOCKS
    session: dict = {}
    # The model is shown after its use; a reader has one already.
    session["nnx"] = nnx
    for name, code in (("model", model), ("use", use), ("chain", chain)):
        run(name, code.replace("1024, 32", "256, 8"), session)
    printed = capsys.readouterr().out
    assert "head/kernel" in printed
    assert "blocks/#/kernel *" in printed
    assert "depth_mup, adamw" in printed
    params = session["params"]
    session["tx"].init(params)


def check(rate=1e-3, **sizes):
    """The coordinate check of the README's model, as its first snippet sets it up."""
    make, base = my_model(), (32, 4)
    X = jax.random.normal(jax.random.key(0), (32, 64))

    def scales(width, depth):
        return optim.infer_scales(
            lambda: make(*base, nnx.Rngs(0)),
            lambda: make(width, depth, nnx.Rngs(0)),
            inputs=(X,),
            parametrization="depth_mup",
            delta=lambda: make(2 * base[0], base[1], nnx.Rngs(0)),
        )

    def build(key, width=64, depth=4):
        model = make(width, depth, nnx.Rngs(key))
        params = nnx.state(model, nnx.Param)
        small = make(*base, nnx.Rngs(0))
        rescaled = optim.rescale_init(params, scales(width, depth), base=small)
        nnx.update(model, rescaled)
        return model

    def optimizer(model, width=64, depth=4):
        return optim.adam(rate, scales(width, depth))

    return optim.coord_check(build, optimizer, batch=X, steps=2, **sizes)


@pytest.mark.long
@pytest.mark.ci
def test_the_model_of_the_readme_passes_the_coordinate_check_in_width():
    checked = check(widths=(128, 512), seeds=8)
    assert checked.verdict == "ok", str(checked)


@pytest.mark.long
def test_the_model_of_the_readme_is_not_wrong_in_depth():
    # Not ok: the limit in depth is reached slowly, as (1 + c/L)^L.
    checked = check(depths=(8, 16, 32), seeds=8, rate=1e-4)
    assert not checked.failed, str(checked)


def test_the_model_of_the_readme_does_not_grow_with_depth():
    x, make = jax.random.normal(jax.random.key(0), (16, 64)), my_model()

    def size(depth):
        base, model = (make(32, d, nnx.Rngs(0)) for d in (4, depth))
        if depth != 4:
            scales = optim.infer_scales(base, model, inputs=(x,))
            params = nnx.state(model, nnx.Param)
            nnx.update(model, optim.rescale_init(params, scales, base=base))
        return float(jnp.sqrt(jnp.mean(jax.jit(lambda m, x: m(x))(model, x) ** 2)))

    assert size(64) / size(4) < 2


@pytest.mark.long
def test_the_model_of_the_readme_keeps_its_learning_rate_from_depth_4_to_32():
    small, large = best_log2_rates(4), best_log2_rates(32)
    shift = (large - small).mean()
    error = ((small.var(ddof=1) + large.var(ddof=1)) / len(small)) ** 0.5
    assert error < 0.2, error  # a shift of 0.75 would be seen
    assert abs(shift) < 0.75, (shift, error)


def best_log2_rates(depth, width=64, seeds=16, steps=150):
    """Of Adam on scikit-learn's digits, by seed: the minimum of a parabola.

    The rate falls to zero, so that the last losses are not the noise of a large rate.
    """
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images, labels = jnp.asarray(digits.data / 16, jnp.float32), digits.target
    labels, model = jnp.asarray(labels), my_model()

    def base(width=width):
        return model(width, 4, nnx.Rngs(0))

    scales = optim.infer_scales(
        base,
        lambda: model(width, depth, nnx.Rngs(0)),
        inputs=(images[:1],),
        parametrization="depth_mup",
        delta=lambda: base(2 * width),
    )

    def final_loss(rate, key):
        graph, params, rest = nnx.split(
            model(width, depth, nnx.Rngs(key)), nnx.Param, ...
        )
        params = optim.rescale_init(params, scales, base=base)
        tx = optim.adam(lambda step: rate * (1 - step / steps), scales)

        def loss(params, rows):
            logits = nnx.merge(graph, params, rest, copy=True)(images[rows])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, labels[rows]
            )
            return losses.mean()

        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, len(labels))
            value, grads = jax.value_and_grad(loss)(params, rows)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        order = jax.random.split(jax.random.fold_in(key, 1), steps)
        return jax.lax.scan(step, (params, tx.init(params)), order)[1][-30:].mean()

    exponents = jnp.arange(-9.0, -4.0)
    train = jax.vmap(jax.vmap(final_loss, (0, None)), (None, 0))
    keys = jax.random.split(jax.random.key(2), seeds)
    losses = np.asarray(jnp.log(jax.jit(train)(2.0**exponents, keys)))
    found = []
    for row in losses:
        middle = int(row[1:-1].argmin()) + 1
        near = slice(middle - 1, middle + 2)
        a, b, _ = np.polyfit(exponents[near], row[near], 2)
        found.append(-b / (2 * a))
    return np.array(found)


def test_the_commands_of_the_readme_are_those_of_the_makefile():
    targets = re.findall(
        r"^(\w[\w-]*):", (README.parent / "Makefile").read_text(), re.M
    )
    commands = re.findall(r"^make ([\w-]+)", README.read_text(), re.M)
    assert {"demo", "test"} <= set(commands) <= set(targets)
