"""Muon orthogonalizes what the program uses as a matrix: each head, if asked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim, zoo

HEAD = 8


def attention(layout):
    """A layer of attention whose kernels have one of several layouts."""

    def make(n):
        heads = n // HEAD
        shape = {"flat": (n, n), "heads": (n, heads, HEAD), "fused": (n, 3 * n)}[layout]
        names = ["qkv"] if layout == "fused" else ["q", "k", "v"]
        out = (n, n) if layout == "flat" else (heads, HEAD, n)
        shapes = {"i": (5, n), "o": out, "r": (n, 3), **dict.fromkeys(names, shape)}
        return {k: jnp.zeros(s) for k, s in shapes.items()}

    def call(p, x):
        h = x @ p["i"]
        b, t, n = h.shape
        if layout == "fused":
            q, k, v = jnp.split(h @ p["qkv"], 3, -1)
        else:
            q, k, v = (jnp.tensordot(h, p[a], 1) for a in "qkv")
        q, k, v = (a.reshape(b, t, n // HEAD, HEAD) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, scale=1 / HEAD)
        if layout == "flat":
            y = y.reshape(b, t, n)
        return (h + jnp.tensordot(y, p["o"], 1 if layout == "flat" else 2)) @ p["r"]

    return make, call


def read(layout, base=16, target=32):
    make, call = attention(layout)
    x = jnp.ones((2, 4, 5))
    return optim.infer_scales(
        make(base), make(target), inputs=(x,), call=call, parametrization="mup"
    )


def matrices(layout, path, x):
    """The heads of a kernel, cut out by hand."""
    n, heads = 32, 32 // HEAD
    if path == "o":
        return x.reshape(heads, HEAD, n)
    if layout == "fused":
        return x.reshape(n, 3 * heads, HEAD).transpose(1, 0, 2)
    return x.reshape(n, heads, HEAD).transpose(1, 0, 2)


def orthogonal(x):
    """U Vᵀ, by SVD."""
    u, _, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ v


# Newton-Schulz steps that converge: x(15 - 10x² + 3x⁴)/8.
EXACT = {"ns_coeffs": (15 / 8, -10 / 8, 3 / 8), "ns_steps": 25}


@pytest.mark.parametrize("layout", ["flat", "heads", "fused"])
def test_each_head_is_orthogonalized_as_by_hand(layout):
    with jax.enable_x64(True):
        scales = read(layout)
        params = jax.tree.map(lambda x: x.astype(float), attention(layout)[0](32))
        rng = np.random.default_rng(0)
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        tx = optim.muon(1.0, scales, per_head=True, **EXACT)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    kernels = ("qkv",) if layout == "fused" else ("q", "k", "v")
    for path in (*kernels, "o"):
        got = matrices(layout, path, updates[path])
        right = orthogonal(matrices(layout, path, grads[path]))
        # Twice the width, and heads of the same size: Δ (m_in m_out)^½ with m_out = 1
        # is 2^-½. Optax's shape factor, (fan_out/fan_in)^½ where above one, is 2 for
        # the kernel that reads heads, and 2^½ at the base.
        base_shape = 2**0.5 if path == "o" else 1
        np.testing.assert_allclose(got, -right * 2**-0.5 * base_shape, atol=1e-9)


def test_fused_kernels_are_split():
    scales = read("fused")
    rng = np.random.default_rng(0)
    grads = attention("fused")[0](32)
    grads["qkv"] = jnp.asarray(rng.normal(size=(32, 96)), jnp.float32)
    grads["qkv"] = grads["qkv"].at[:, 64:].multiply(10)
    tx = optim.muon(1.0, scales, **EXACT)
    params = attention("fused")[0](32)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    parts = np.split(np.asarray(grads["qkv"]), 3, 1)
    right = np.concatenate([orthogonal(part) for part in parts], 1)
    np.testing.assert_allclose(updates["qkv"], -right, atol=1e-4)


@pytest.mark.parametrize("layout", ["flat", "heads", "fused"])
@pytest.mark.parametrize("base", [16, 32])
def test_the_check_of_a_chain_knows_heads(layout, base):
    scales = read(layout, base, 64)
    optim.check_chain(optim.muon(0.1, scales, per_head=True), scales)
    row = optim.explain(scales, "muon", per_head=True).rows["o"]
    whole = optim.explain(scales, "muon").rows["o"]
    m = 64 / base
    assert row.learning_rate == pytest.approx(m**-0.5 * m**-0.5)
    assert whole.learning_rate == pytest.approx(1)


def test_heads_are_read_from_layers_of_flax_and_of_the_zoo():
    class Layer(nnx.Module):
        def __init__(self, width):
            keys = nnx.Rngs(0)
            self.embed = nnx.Embed(11, width, rngs=keys)
            self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=keys)
            self.head = nnx.Linear(width, 3, rngs=keys)

        def __call__(self, x):
            x = self.embed(x)
            return self.head(x + self.attention(x))

    tokens = jnp.zeros((2, 7), int)
    scales = optim.infer_scales(lambda: Layer(16), lambda: Layer(64), inputs=(tokens,))
    found = {p: s.head_shape for p, s in scales.items() if s.head_shape}
    assert found == {
        **{f"attention/{k}/kernel": (64, 1, 16) for k in ("query", "key", "value")},
        "attention/out/kernel": (1, 16, 64),
    }

    def gpt(width, base):
        return zoo.create(
            "gpt", width=width, base_width=base, depth=1, rngs=nnx.Rngs(0), context=16
        )

    named = zoo.scales(gpt(128, 64))
    program = optim.infer_scales(
        lambda: gpt(64, 64), lambda: gpt(128, 64), inputs=(tokens,)
    )
    for path, scale in named.items():
        both = scale.head_shape, scale.base_head_shape
        assert both == (program[path].head_shape, program[path].base_head_shape), path
    assert sum(bool(s.head_shape) for s in named.values()) == 4


def test_heads_can_be_declared():
    axes = {"q": "d -> heads size", "o": "heads size -> d"}
    shapes = [{"q": (n, n // 8, 8), "o": (n // 8, 8, n)} for n in (16, 64)]
    small, large = ({k: jnp.ones(s) for k, s in each.items()} for each in shapes)
    scales = optim.infer_scales(small, large, axes=axes)
    assert scales["q"].head_shape == (64, 1, 8)
    assert scales["o"].base_head_shape == (1, 8, 16)
    assert scales["q"].role == "hidden"
    with pytest.raises(ValueError, match="heads are outputs or inputs of a kernel"):
        optim.infer_scales(small, large, axes={**axes, "o": "heads: size -> d"})


def test_per_head_without_heads_is_an_error():
    shapes = {"a": (4, 8), "b": (8, 8)}, {"a": (4, 16), "b": (16, 16)}
    small, large = ({k: jnp.ones(s) for k, s in each.items()} for each in shapes)
    scales = optim.infer_scales(small, large, axes={".": "i -> o"})
    with pytest.raises(ValueError, match=r"no parameter has heads: pass inputs"):
        optim.muon(0.1, scales, per_head=True)


PARTNERS = {
    "adamw": (None, optax.adamw(0.5, nesterov=True, weight_decay=0.0)),
    "a function": (optim.adam, optax.adam(0.5)),
    "a scheduled one": (
        lambda _, s: optim.adam(optax.linear_schedule(0.0, 0.5, 1), s),
        optax.adam(optax.linear_schedule(0.0, 0.5, 1)),
    ),
    "a transform": (
        functools.partial(
            optim.build_optimizer, precondition=optax.scale_by_rms(), family="adam"
        ),
        optax.rmsprop(0.5),
    ),
}


@pytest.mark.parametrize("name", PARTNERS)
def test_the_partner_trains_what_is_no_hidden_matrix(name):
    partner, alone = PARTNERS[name]
    scales = read("fused")
    tx = optim.muon(1.0, scales, partner=partner, adam_learning_rate=0.5)
    rng = np.random.default_rng(0)
    params = attention("fused")[0](32)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    plain = optim.muon(1.0, scales)
    own, matrices_alone, others = (jax.jit(t.update) for t in (tx, plain, alone))
    both, single = (t.init(params) for t in (tx, plain))
    theirs = alone.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        updates, both = own(grads, both, params)
        matrix, single = matrices_alone(grads, single, params)
        right, theirs = others(grads, theirs, params)
    np.testing.assert_allclose(updates["i"], right["i"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(updates["r"], right["r"] / 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(updates["qkv"], matrix["qkv"], rtol=1e-5)


def glu(inputs, half):
    return {"i": (5, inputs), "glu": (inputs, 2 * half), "r": (half, 3)}


def test_segments_have_a_rate_and_a_shape_factor_of_their_own():
    def call(p, x):
        gate, up = jnp.split(jnp.tanh(x @ p["i"]) @ p["glu"], 2, -1)
        return (jnp.tanh(gate) * up) @ p["r"]

    small, large = (
        {k: jnp.zeros(s) for k, s in glu(*n).items()} for n in ((16, 16), (64, 32))
    )
    x = jnp.ones((1, 5))
    scales = optim.infer_scales(small, large, inputs=(x,), call=call)
    tx = optim.muon(1.0, scales, **EXACT)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), large)
    rng = np.random.default_rng(0)
    grads["glu"] = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    updates, _ = tx.update(grads, tx.init(large), large)
    rate = 8**0.5 / 4  # Δ (m_in m_out)^½; the factor of 16 x 16 and of 64 x 32 is 1
    norm = np.linalg.norm(updates["glu"][:, :32], 2)
    assert norm == pytest.approx(rate, rel=1e-4)
    row = optim.explain(scales, "muon").rows["glu"]
    assert row.learning_rate == pytest.approx(rate)


def test_an_unknown_partner_is_an_error():
    scales, whole = read("flat"), optim.adam(0.1, read("flat"))
    for partner in ("adm", whole):
        with pytest.raises(ValueError, match="must be a function of a learning rate"):
            optim.muon(0.1, scales, partner=partner)
    with pytest.raises(ValueError, match="give the partner one of its own"):
        optim.muon(0.1, scales, partner=optim.lion, adam_weight_decay=0.1)


def test_a_partner_trains_its_segment_of_a_kernel_that_also_holds_a_matrix():
    def make(n):
        shapes = {"i": (5, n), "w": (n, n + 3), "r": (n, 3)}
        return {k: jnp.ones(s) for k, s in shapes.items()}

    def call(p, x):
        y = jnp.tanh(x @ p["i"]) @ p["w"]
        return y[:, :3] + jnp.tanh(y[:, 3:]) @ p["r"]

    scales = optim.infer_scales(
        make(16), make(64), inputs=(jnp.ones((1, 5)),), call=call
    )
    assert [s.role for s in scales["w"].parts] == ["output", "hidden"]
    tx = optim.muon(0.1, scales, nesterov=False, partner=optim.adam)
    updates, _ = tx.update(make(64), tx.init(make(64)), make(64))
    np.testing.assert_allclose(updates["w"][:, :3], -0.1 / 4, rtol=1e-3)
    assert (updates["w"][:, 3:] != 0).all()


def test_a_foreign_muon_has_the_spectral_family():
    scales = read("heads")
    hidden = [p for p, s in scales.items() if s.role == "hidden"]
    dims = {
        p: optax.contrib.MuonDimensionNumbers(scales[p].in_axes, scales[p].out_axes)
        for p in hidden
    }
    kind = lambda tree: {p: "muon" if p in hidden else "adam" for p in tree}  # noqa: E731
    foreign = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda tree: {
            p: dims[p] if p in hidden and hasattr(x, "shape") else x
            for p, x in tree.items()
        }
    )
    chains = {
        "muon": optax.chain(
            foreign, optim.scale_by_parametrization(scales, "spectral")
        ),
        "adam": optax.chain(
            optim.normalize_gradients(scales),
            optax.scale_by_adam(),
            optim.scale_by_parametrization(scales, "adam"),
        ),
    }
    tx = optim.chain(optax.partition(chains, kind), optax.scale_by_learning_rate(0.1))
    params = attention("heads")[0](32)
    tx.init(params)  # checks the chain
    # Optax's whole optimizer multiplies updates by its shape factor.
    whole = optax.contrib.muon(
        1.0, muon_weight_dimension_numbers=lambda tree: {p: dims.get(p) for p in tree}
    )
    normal = optim.normalize_gradients(scales)
    tx = optim.chain(normal, whole, optim.scale_by_parametrization(scales, "muon"))
    tx.init(params)


def test_keys_and_values_of_a_state_have_the_same_heads():
    def make(n):
        return {"i": jnp.zeros((5, n)), "r": jnp.zeros((n, 3))} | {
            name: jnp.zeros((n, n)) for name in "qkvo"
        }

    def call(p, x):
        h = x @ p["i"]
        q, k, v = ((h @ p[a]).reshape(2, -1, HEAD) for a in "qkv")
        state = k[..., None] * v[..., None, :]
        y = jnp.einsum("bhk,bhkv->bhv", q, state) / HEAD
        return (h + y.reshape(h.shape) @ p["o"]) @ p["r"]

    scales = optim.infer_scales(
        make(16), make(32), inputs=(jnp.ones((2, 5)),), call=call
    )
    shapes = {name: scales[name].head_shape for name in "qkvo"}
    assert shapes == {**dict.fromkeys("qkv", (32, HEAD)), "o": (HEAD, 32)}
