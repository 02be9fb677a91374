"""Keys and values that several heads share, and experts: what one step changes.

Theory says how far gradients and activations may depend on the number of query heads
per head of keys (r), on experts and on chosen experts; docs/howto/architectures.md
states what is measured here. Gradients are those of a random teacher at the start.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import optim

HEADS, SIZE, WIDTH, SEEDS = 8, 8, 64, 8


def rms(x):
    return jnp.sqrt(jnp.mean(x**2))


def slopes(sizes, rows):
    """Exponents of the sizes, one for each measured number."""
    mean = {name: [np.mean(row[name]) for row in rows] for name in rows[0]}
    return {
        name: np.polyfit(np.log(sizes), np.log(values), 1)[0]
        for name, values in mean.items()
    }


def normal(key, shape, fan_in):
    return jax.random.normal(key, shape) * fan_in**-0.5


# ----- Grouped queries.


def attention(params, x):
    """Causal attention, whose heads of keys and values each serve r query heads."""
    q, k, v = (jnp.einsum("btn,nhd->bthd", x, params[name]) for name in "qkv")
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(y, repeats, axis=2) for y in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / SIZE
    past = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(past, logits, -1e9))
    return jnp.einsum("bhts,bshd,hdn->btn", weights, v, params["o"])


def drawn(key, shared):
    keys = jax.random.split(key, 4)
    kernel = (WIDTH, HEADS // shared, SIZE)
    return {
        "q": normal(keys[0], (WIDTH, HEADS, SIZE), WIDTH),
        "k": normal(keys[1], kernel, WIDTH),
        "v": normal(keys[2], kernel, WIDTH),
        "o": normal(keys[3], (HEADS, SIZE, WIDTH), HEADS * SIZE),
    }


@functools.cache
def multipliers_of(shared, name):
    """The multiplier of the learning rate of K and V, where the base has r = 1."""
    if shared == 1:
        return 1.0
    base, target = (
        jax.eval_shape(functools.partial(drawn, shared=r), jax.random.key(0))
        for r in (1, shared)
    )
    scales = optim.infer_scales(
        *(base, target),
        inputs=(jnp.zeros((1, 4, WIDTH)),),
        call=attention,
        fractional=True,
    )
    rows = optim.explain(scales, name).rows
    assert rows["k"].learning_rate == rows["v"].learning_rate
    assert rows["k"].init_std == rows["v"].init_std == 1
    return rows["k"].learning_rate


RAW = {"sgd": lambda g: g, "adam": jnp.sign}


@functools.partial(jax.jit, static_argnums=1)
def step_of_keys_and_values(key, shared):
    own, data, head = jax.random.split(key, 3)
    params = drawn(own, shared)
    x = jax.random.normal(data, (8, 16, WIDTH))
    readout = normal(head, (WIDTH, WIDTH), WIDTH)

    def loss(params):
        return ((attention(params, x) - x @ readout) ** 2).sum(-1).mean()

    grads = jax.grad(loss)(params)
    found = {f"gradient of {name}": rms(grads[name]) for name in "kv"}
    for name in "kv":
        for family, raw in RAW.items():
            size = 1e-4 * multipliers_of(shared, family)
            step = -size * raw(grads[name])
            moved = {**params, name: params[name] + step}
            change = jnp.einsum("btn,nhd->bthd", x, step)
            found[f"{family}: {name}"] = rms(change)
            out = attention(moved, x) - attention(params, x)
            found[f"{family}: output by {name}"] = rms(out)
    return found


def test_adams_rate_of_keys_and_values_does_not_depend_on_how_many_queries_share_them():
    """A step changes them alike; the output changes a little less.

    SGD's rule takes the gradients of the r heads to be aligned (r). They are between
    random (√r) and aligned, so SGD's steps shrink by up to √r.
    """
    shared = (1, 2, 4, 8)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    rows = [
        jax.vmap(lambda key, r=r: step_of_keys_and_values(key, r))(keys) for r in shared
    ]
    found = slopes(shared, rows)
    print(found)
    rates = {name: [multipliers_of(r, name) for r in shared] for name in RAW}
    assert rates == {"adam": [1, 1, 1, 1], "sgd": [1, 1 / 2, 1 / 4, 1 / 8]}
    for name in "kv":
        assert 0.45 < found[f"gradient of {name}"] < 0.9
        assert found[f"adam: {name}"] == pytest.approx(0, abs=0.05)
        assert -0.25 < found[f"adam: output by {name}"] < 0
        assert -0.55 < found[f"sgd: {name}"] < -0.1


# ----- Experts.


def experts(params, x, chosen):
    """The chosen experts' sum, with weights that sum to one."""
    logits = x @ params["router"]
    least = jax.lax.top_k(logits, chosen)[0][:, -1:]
    gates = jax.nn.softmax(jnp.where(logits >= least, logits, -1e9))
    hidden = jax.nn.silu(jnp.einsum("tn,enf->tef", x, params["up"]))
    return logits, jnp.einsum("te,tef,efn->tn", gates, hidden, params["down"])


@functools.partial(jax.jit, static_argnums=(1, 2))
def step_of_experts(key, count, chosen):
    keys = jax.random.split(key, 5)
    params = {
        "router": normal(keys[0], (WIDTH, count), WIDTH),
        "up": normal(keys[1], (count, WIDTH, WIDTH), WIDTH),
        "down": normal(keys[2], (count, WIDTH, WIDTH), WIDTH),
    }
    x = jax.random.normal(keys[3], (512, WIDTH))
    target = jnp.tanh(x @ normal(keys[4], (WIDTH, WIDTH), WIDTH))

    def loss(params):
        return ((experts(params, x, chosen)[1] - target) ** 2).sum(-1).mean()

    grads = jax.grad(loss)(params)
    logits, y = experts(params, x, chosen)
    found = {"output": rms(y)}
    for name, grad in grads.items():
        found[f"gradient of {name}"] = rms(grad)
        moved = {**params, name: params[name] - 1e-3 * jnp.sign(grad)}
        new_logits, new_y = experts(moved, x, chosen)
        change = new_logits - logits if name == "router" else new_y - y
        found[f"change by {name}"] = rms(change)
    return found


def exponents_of_experts(shapes, sizes):
    keys = jax.random.split(jax.random.key(0), 2)
    rows = [
        jax.vmap(lambda key, n=n, k=k: step_of_experts(key, n, k))(keys)
        for n, k in shapes
    ]
    return slopes(sizes, rows)


def test_adams_rate_of_experts_does_not_depend_on_their_number():
    found = exponents_of_experts([(4, 2), (16, 2)], [4, 16])
    print(found)
    assert found["output"] == pytest.approx(0, abs=0.1)
    assert found["change by router"] == pytest.approx(0, abs=0.05)
    for name in ("up", "down"):
        assert 0 <= found[f"change by {name}"] < 0.3
        # Each expert sees its share of the tokens: SGD's rate would need this factor.
        assert -1 < found[f"gradient of {name}"] < -0.5


def test_more_chosen_experts_average_each_other_away():
    found = exponents_of_experts([(16, 2), (16, 8)], [2, 8])
    print(found)
    assert -0.5 < found["output"] < -0.3
    for name in ("up", "down"):
        assert -0.5 < found[f"change by {name}"] < -0.1
    assert found["change by router"] == pytest.approx(0, abs=0.05)
