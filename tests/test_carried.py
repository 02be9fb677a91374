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

BASE = (3, 1)  # width, depth
RATE = {
    "sgd": lambda s: optim.sgd(0.1, s),
    "nesterov": lambda s: optim.sgd(0.05, s, momentum=0.9, nesterov=True),
    "adam": lambda s: optim.adam(1e-2, s, eps=1e-3),
    "adamw": lambda s: optim.adamw(1e-2, s, eps=1e-3, weight_decay=0.1),
    "lion": lambda s: optim.lion(1e-3, s, weight_decay=0.1),
    "muon": lambda s: optim.muon(1e-2, s, weight_decay=0.1, per_head=has_heads(s)),
    # Null spaces of gradients are rounding, which only an eps keeps small.
    "soap": lambda s: optim.soap(1e-2, s, weight_decay=0.1),
    "shampoo": lambda s: optim.shampoo(1e-2, s, weight_decay=0.1),
    "scion": lambda s: optim.scion(1e-2, s, weight_decay=0.1, per_head=has_heads(s)),
    "adam_h": lambda s: optim.adam_h(1e-2, s, eps=1e-3),
    "muon_h": lambda s: optim.muon_h(1e-2, s, per_head=has_heads(s)),
    "schedule-free adamw": lambda s: optax.contrib.schedule_free(
        optim.adamw(1e-2, s, b1=0.0, eps=1e-3, weight_decay=0.1), 1e-2
    ),
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


def has_heads(scales):
    return any(part.head_shape for s in scales.values() for part in s.parts)


def parameters(width, depth, attends, gain, key):
    keys = iter(jax.random.split(key, 8 * depth + 2))

    def kernel(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    blocks = []
    for _ in range(depth):
        block = {}
        if attends:
            names = "qkvo" if attends in ("apart", "heads") else "o"
            block = {name: kernel(width, width) for name in names}
        if attends == "fused":
            block |= {"qkv": kernel(width, 3 * width), "c": kernel(3 * width)}
        if attends == "an axis":
            block |= {"qkv": kernel(width, 3, width), "c": kernel(3, width)}
        block |= {"up": kernel(width, width), "down": kernel(width, width)}
        block["bias"] = 0.1 * kernel(1, width)[0]
        blocks.append(block | ({"gain": 1 + 0.1 * kernel(1, width)[0]} if gain else {}))
    return {"in": kernel(5, width), "blocks": blocks, "out": kernel(width, 3)}


def queries_keys_and_values(w, h):
    if "q" in w:
        biases = [w[f"c{name}"][None, None] if "cq" in w else 0 for name in "qkv"]
        return [h @ w[name] + b for name, b in zip("qkv", biases, strict=True)]
    y = jnp.tensordot(h, w["qkv"], 1) + w["c"][None, None]
    return jnp.split(y, 3, -1) if y.ndim == 3 else jnp.unstack(y, axis=2)


def attention(q, k, v, logit, head):
    """Of one head that grows, or of heads of a size."""
    b, t, n = q.shape
    q, k, v = (x.reshape(b, t, -1, head or n) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * logit)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, n)


def forward(branch, logit, head=None, around=0.0):
    def run(params, x):
        x = x @ params["in"]
        for w in params["blocks"]:
            if "o" in w:
                q, k, v = queries_keys_and_values(w, jnp.tanh(x))
                x = x + branch * (attention(q, k, v, logit, head) @ w["o"])
            if "up" not in w:
                continue
            y = jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"][None, None]
            if "gain" in w:
                y = y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-2)
                gain = w["gain"][None, None]
                y = y * (around + 0.5 * gain if around else gain)
            x = x + branch * y
        return jnp.tanh(x) @ params["out"]

    return run


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("optimizer", RATE)
@settings(max_examples=1, deadline=None)
@given(
    st.sampled_from(["depth_mup", "completep"]),
    st.integers(2, 5),
    st.integers(2, 4),
    st.sampled_from(["", "apart", "heads", "fused", "an axis"]),
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
        head = BASE[0] if attends == "heads" else None
        run = forward(branch, 1 / head if head else logit, head)
        scales = optim.infer_scales(
            (forward(1.0, 1 / BASE[0], head), small),
            (run, large),
            inputs=(x,),
            parametrization=name,
        )
        assert any(s.ends_branch for s in scales.values()) != multiplies
        params = optim.rescale_init(large, scales)
        results.append(train(run, params, RATE[optimizer](scales), x))
    assert jnp.isfinite(results[0]).all()
    assert jnp.abs(results[0] - results[1]).max() < 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "lamb", "adafactor"])
def test_gains_around_one_carry_too(optimizer):
    def gains(params):
        blocks = [w | {"gain": 2 * (w["gain"] - 1)} for w in params["blocks"]]
        return params | {"blocks": blocks}

    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (4, 3, 5))
    small = gains(parameters(*BASE, "", True, key))
    large = gains(parameters(9, 3, "", True, key))
    results = []
    for branch in (1 / 3, 1.0):
        base, run = (forward(b, 1.0, around=1.0) for b in (1.0, branch))
        scales = optim.infer_scales(
            (base, small), (run, large), inputs=(x,), parametrization="completep"
        )
        assert scales["blocks/0/gain"].offset == 2 * (branch == 1)
        params = optim.rescale_init(large, scales)
        results.append(train(run, params, RATE[optimizer](scales), x))
    assert jnp.abs(results[0] - results[1]).max() < 1e-10


def stack_of_gains_around_one(depth, dtype):
    return {"gain": jnp.zeros((depth, 4), dtype), "w": jnp.ones((depth, 4, 4))}


def run_gains_around_one(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["w"]) * (1 + w["gain"])[None], None

    return jax.lax.scan(layer, x, params)[0]


def test_gains_around_one_are_rescaled_once():
    run = run_gains_around_one
    small, large = (stack_of_gains_around_one(d, float) for d in (1, 4))
    scales = optim.infer_scales((run, small), (run, large), inputs=(jnp.ones((2, 4)),))
    params = optim.rescale_init(large, scales)
    assert (1 + params["gain"] == 0.5).all()
    copy = jax.tree.map(jnp.copy, params)
    assert jnp.array_equal(optim.rescale_init(copy, scales)["gain"], params["gain"])
    shapes = jax.eval_shape(lambda: params)
    state, other = (optim.adamw(0.1, scales).init(x) for x in (params, shapes))
    assert jax.tree.structure(state) == jax.tree.structure(other)


def test_bfloat16_is_too_coarse_for_a_gain_around_one_that_gets_small():
    run, inputs = run_gains_around_one, (jnp.ones((2, 4)),)
    small, large = (stack_of_gains_around_one(d, jnp.bfloat16) for d in (1, 64))
    scales = optim.infer_scales((run, small), (run, large), inputs=inputs)
    with pytest.raises(ValueError, match=r"'gain' as 1 \+ w.* steps of 0.0078; keep"):
        optim.rescale_init(large, scales)
    small, large = (stack_of_gains_around_one(d, jnp.float32) for d in (1, 64))
    gain = optim.rescale_init(large, scales, base=small)["gain"]
    assert jnp.allclose(1 + gain, 0.125)


def with_layout(params, layout):
    """The same numbers as one kernel, as one with an axis of three, or as three.

    Of attention alone: other kernels would only take time to compile.
    """

    def change(block):
        kernel, bias, rest = block["qkv"], block["c"], {"o": block["o"]}
        if layout == "fused":
            return rest | {"qkv": kernel, "c": bias}
        n = kernel.shape[0]
        if layout == "an axis":
            return rest | {"qkv": kernel.reshape(n, 3, n), "c": bias.reshape(3, n)}
        each = zip("qkv", jnp.split(kernel, 3, -1), jnp.split(bias, 3), strict=True)
        for name, w, b in each:
            rest |= {name: w, f"c{name}": b}
        return rest

    return params | {"blocks": [change(block) for block in params["blocks"]]}


# A whole fused kernel is another matrix than its three parts.
APART = [
    # Their roots and bases compile slowly.
    pytest.param(o, marks=pytest.mark.long) if o in ("shampoo", "soap") else o
    for o in RATE
    if o != "muon of whole kernels"
]


@pytest.mark.parametrize("optimizer", APART)
def test_fused_queries_keys_and_values_train_as_separate_ones(optimizer):
    wider, deeper = 3, 2
    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (4, 3, 5))
    pair = (
        parameters(BASE[0], 1, "fused", False, key),
        parameters(wider * BASE[0], deeper, "fused", False, key),
    )
    unscaled = forward(1.0, 1 / BASE[0])
    carries = forward(1.0, wider**-0.5 / BASE[0])
    multiplies = forward(1 / deeper, 1 / wider / BASE[0])

    def trained(run, layout):
        small, large = (with_layout(params, layout) for params in pair)
        scales = optim.infer_scales(
            (unscaled, small), (run, large), inputs=(x,), parametrization="completep"
        )
        params = optim.rescale_init(large, scales)
        return train(run, params, RATE[optimizer](scales), x)

    right = trained(multiplies, "fused")
    assert jnp.isfinite(right).all()
    for layout in ("fused", "an axis", "apart"):
        assert jnp.abs(trained(carries, layout) - right).max() < 1e-10, layout


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
