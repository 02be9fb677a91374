"""A model that multiplies its branches and logits, and one whose parameters carry it.

Both train the same function: Yaida eq. 2.8, for every family of optimizers.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax import optim

BASE = (3, 2)  # width, depth
RATE = {
    "sgd": lambda s: optim.sgd(0.1, s),
    "nesterov": lambda s: optim.sgd(0.05, s, momentum=0.9, nesterov=True),
    "adam": lambda s: optim.adam(1e-2, s, eps=1e-3),
    "adamw": lambda s: optim.adamw(1e-2, s, eps=1e-3, weight_decay=0.1),
    "lion": lambda s: optim.lion(1e-3, s, weight_decay=0.1),
    "muon": lambda s: optim.muon(1e-2, s, weight_decay=0.1),
    "lamb": lambda s: optim.lamb(1e-2, s, weight_decay=0.1),
    "adafactor": lambda s: optim.adafactor(1e-2, s),
    # Clipping compares sizes, so it comes after the normalization.
    "clipped adam": lambda s: optax.chain(
        optim.normalize_gradients(s),
        optax.clip_by_global_norm(0.1),
        optax.scale_by_adam(),
        optim.scale_by_parametrization(s, family="adam"),
        optax.scale_by_learning_rate(1e-2),
    ),
}


def parameters(width, depth, attends, gain, key):
    keys = iter(jax.random.split(key, 8 * depth + 2))

    def kernel(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    blocks = []
    for _ in range(depth):
        block = {name: kernel(width, width) for name in "qkvo" if attends}
        block |= {"up": kernel(width, width), "down": kernel(width, width)}
        block["bias"] = 0.1 * kernel(1, width)[0]
        blocks.append(block | ({"gain": 1 + 0.1 * kernel(1, width)[0]} if gain else {}))
    return {"in": kernel(5, width), "blocks": blocks, "out": kernel(width, 3)}


def forward(branch, logit):
    def run(params, x):
        x = x @ params["in"]
        for w in params["blocks"]:
            if "q" in w:
                h = jnp.tanh(x)
                scores = (h @ w["q"]) @ (h @ w["k"]).swapaxes(-1, -2)
                a = jax.nn.softmax(scores * logit) @ (h @ w["v"])
                x = x + branch * (a @ w["o"])
            y = jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"][None, None]
            if "gain" in w:
                y = y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-2)
                y = y * w["gain"][None, None]
            x = x + branch * y
        return jnp.tanh(x) @ params["out"]

    return run


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(sorted(RATE)),
    st.sampled_from(["depth_mup", "completep"]),
    st.integers(2, 5),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
)
def test_carried_equals_multiplied(optimizer, name, wider, deeper, attends, gain):
    width, depth = wider * BASE[0], deeper * BASE[1]
    alpha = optim.parametrization(name).alpha
    key = jax.random.key(0)
    small = parameters(*BASE, attends, gain, key)
    large = parameters(width, depth, attends, gain, key)
    x = jax.random.normal(jax.random.key(1), (4, 3, 5))
    results = []
    for multiplies in (True, False):
        # One model divides its logits by the width, the other by the root of it.
        branch = deeper**-alpha if multiplies else 1.0
        logit = (1 / wider if multiplies else wider**-0.5) / BASE[0]
        run = forward(branch, logit)
        scales = optim.infer_scales(
            (forward(1.0, 1 / BASE[0]), small),
            (run, large),
            inputs=(x,),
            parametrization=name,
        )
        assert any(s.ends_branch for s in scales.values()) != multiplies
        params = optim.rescale_init(large, scales)
        results.append(train(run, params, RATE[optimizer](scales), x))
    assert jnp.abs(results[0] - results[1]).max() < 1e-10


def train(run, params, tx, x):
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.mean((run(p, x) - 1.0) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        params, state = step(params, state)
    return run(params, x)
