"""Initial sizes: what is not as the rules assume is found, or put right."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from mupax import optim, zoo
from mupax.optim.apply import initial_sizes

NARROW, WIDE = 32, 256  # m = 8
VOCABULARY = 100
INIT = nnx.initializers
ORDINARY = {
    "lecun": INIT.lecun_normal(),
    "lecun_uniform": INIT.lecun_uniform(),
    "he": INIT.he_normal(),
    "he_uniform": INIT.he_uniform(),
    "torch": INIT.variance_scaling(1 / 3, "fan_in", "uniform"),
    "tanh": INIT.variance_scaling(25 / 9, "fan_in", "truncated_normal"),
    "other_gain": INIT.variance_scaling(0.3, "fan_in", "normal"),
}


class Bigram(nnx.Module):
    """Token embedding, two hidden layers, readout."""

    def __init__(self, width, *, kernel=None, embed=None, head=None, seed=0):
        rngs = nnx.Rngs(seed)
        kernel = kernel or INIT.lecun_normal()
        options = {} if embed is None else {"embedding_init": embed}
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs, **options)
        self.up = nnx.Linear(width, 4 * width, kernel_init=kernel, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=kernel, rngs=rngs)
        self.head = nnx.Linear(width, 10, kernel_init=head or kernel, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.down(nnx.relu(self.up(self.embed(tokens)))))


TOKENS = (jax.ShapeDtypeStruct((1, 4), int),)


def pair(**options):
    """Base and target, the scales and the target's parameters."""
    base, target = Bigram(NARROW, **options), Bigram(WIDE, **options, seed=1)
    scales = optim.infer_scales(base, target, inputs=TOKENS)
    return base, scales, nnx.state(target, nnx.Param)


def sizes(params):
    """Root mean square by path."""
    flat = nnx.to_flat_state(params)
    return {
        "/".join(map(str, p)): float(jnp.sqrt((v[...] ** 2).mean())) for p, v in flat
    }


def ratios(params, base):
    """Of the sizes of kernels and embeddings, target to base."""
    small, large = sizes(nnx.state(base, nnx.Param)), sizes(params)
    return {path: large[path] / small[path] for path in small if small[path]}


RULE = {"embed/embedding": 1, "up/kernel": 8**-0.5, "down/kernel": 8**-0.5}
RULE["head/kernel"] = 1 / 8


def assert_rule(params, base):
    for path, ratio in ratios(params, base).items():
        assert ratio == pytest.approx(RULE[path], rel=0.15), path


NORMAL = INIT.normal(0.02)
FAN_OUT = INIT.variance_scaling(2, "fan_out", "normal")


@pytest.mark.parametrize(
    "options",
    [
        {},  # nnx.Embed starts at width^-1/2
        {"embed": NORMAL},
        {"embed": NORMAL, "kernel": NORMAL},  # GPT-2
        {"embed": INIT.orthogonal(), "kernel": INIT.orthogonal()},
        {"kernel": INIT.glorot_uniform()},
        {"kernel": FAN_OUT},
        {"kernel": INIT.variance_scaling(0.07, "fan_avg", "uniform")},
    ],
)
def test_with_a_base_any_initialization_becomes_the_parametrizations(options):
    base, scales, params = pair(**options)
    assert_rule(optim.rescale_init(params, scales, base=base), base)


def test_the_base_may_be_a_function_a_module_or_parameters():
    base, scales, params = pair()
    rescaled = [
        optim.rescale_init(params, scales, base=b)
        for b in (base, nnx.state(base, nnx.Param), lambda: Bigram(NARROW))
    ]
    for other in rescaled[1:]:
        jax.tree.map(np.testing.assert_array_equal, rescaled[0], other)


def test_with_a_base_under_vmap_too():
    base, scales, _ = pair()

    def build(key):
        params = nnx.state(Bigram(WIDE, seed=key), nnx.Param)
        return optim.rescale_init(params, scales, base=lambda: Bigram(NARROW))

    several = jax.jit(jax.vmap(build))(jax.random.split(jax.random.key(0), 2))
    for i in range(2):
        assert_rule(jax.tree.map(lambda x, i=i: x[i], several), base)


def test_the_base_is_the_one_that_the_scales_were_inferred_from():
    base, scales, params = pair()
    assert_rule(optim.rescale_init(params, scales), base)
    shapes = jax.eval_shape(lambda: nnx.state(base, nnx.Param))
    abstract = optim.infer_scales(
        shapes, params, axes={"embed": "v: d", "kernel": "i -> o", "bias": "o"}
    )
    with pytest.raises(ValueError, match=r"has no initial values .*pass base="):
        optim.rescale_init(params, abstract)
    assert_rule(optim.rescale_init(params, abstract, base=base), base)


@pytest.mark.parametrize("kernel", ORDINARY.values(), ids=ORDINARY)
@pytest.mark.parametrize("width", [48, 320])
def test_ordinary_initializers_keep_their_exact_sizes(kernel, width):
    model = Bigram(width, kernel=kernel, embed=INIT.normal(0.02), seed=1)
    base = Bigram(16, kernel=kernel, embed=INIT.normal(0.02))
    scales = optim.infer_scales(base, model, inputs=TOKENS)
    params = nnx.state(model, nnx.Param)
    expected = sizes(params)
    expected["head/kernel"] *= (width / 16) ** -0.5
    rescaled = optim.rescale_init(params, scales)
    assert sizes(rescaled) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("copied", [False, True])
def test_twice_is_once(copied):
    _, scales, params = pair(embed=NORMAL)
    once = optim.rescale_init(params, scales)
    if copied:  # as a checkpoint would
        once = jax.tree.map(lambda x: jnp.asarray(np.array(x)), once)
    twice = optim.rescale_init(once, scales)
    jax.tree.map(np.testing.assert_array_equal, twice, once)


@pytest.mark.parametrize(
    ("widths", "outputs", "tells"),
    [((32, 64), 1, False), ((64, 96), 10, True), ((512, 1024), 1, True)],
)
def test_readouts_of_few_outputs_are_rescaled_once(widths, outputs, tells):
    rng = np.random.default_rng(0)

    def model(width):
        head = rng.normal(size=(width, outputs)) / width**0.5
        return {"in": np.ones((8, width), np.float32), "out": head.astype(np.float32)}

    scales = optim.infer_scales(
        *map(model, widths), axes={".": "i -> o"}, fractional=True
    )
    for _ in range(200):
        base, target = map(model, widths)
        out = optim.rescale_init(target, scales, base=base)["out"]
        ratio = (widths[0] / widths[1]) ** 0.5
        np.testing.assert_allclose(out, target["out"] * ratio)
    if tells:  # fewer entries do not tell one size from the other
        again = {**target, "out": np.array(out)}
        twice = optim.rescale_init(again, scales, base=base)["out"]
        np.testing.assert_array_equal(twice, out)
    # But what this function returned is known.
    once = optim.rescale_init(jax.tree.map(jnp.asarray, target), scales, base=base)
    twice = optim.rescale_init(once, scales, base=base)
    assert twice["out"] is once["out"]


def test_the_size_of_a_few_entries_is_uncertain_even_if_they_are_alike():
    def model(width, size):
        head = np.resize([size, -size], (width, 1)).astype(np.float32)
        return {"in": np.ones((8, width), np.float32), "out": head}

    base, target = model(4, 1.0), model(16, 0.4)  # usual initializers: 0.5
    scales = optim.infer_scales(base, target, axes={".": "i -> o"})
    out = optim.rescale_init(target, scales, base=base)["out"]
    np.testing.assert_allclose(out, 0.5 * target["out"])


def test_models_of_the_zoo_are_initialized_already():
    def build(width, seed=0):
        options = {"depth": 2, "base_width": 16, "base_depth": 2}
        return zoo.create(
            "resmlp", width=width, parametrization="mup", rngs=nnx.Rngs(seed), **options
        )

    model = build(256)
    params = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"mupax.zoo.*leave rescale_init out"):
        optim.rescale_init(params, zoo.scales(model))
    scales = optim.infer_scales(build(16), model, inputs=(jnp.ones((1, 64)),))
    jax.tree.map(
        np.testing.assert_array_equal, optim.rescale_init(params, scales), params
    )


def test_zeros_stay_zeros():
    options = {"embed": NORMAL, "head": INIT.zeros}
    _, scales, params = pair(**options)
    assert sizes(optim.rescale_init(params, scales)) == sizes(params)
    other = Bigram(NARROW, embed=NORMAL)
    with pytest.raises(ValueError, match="'head/kernel' starts at zero in the target"):
        optim.rescale_init(params, scales, base=other)


def test_blocks_of_a_list_find_their_like_in_a_shallower_base():
    """GPT-2 divides what ends a branch by the root of the depth; branches do too."""

    def build(width, depth):
        rngs = nnx.Rngs(0)
        std = INIT.normal(0.02 / depth**0.5)
        model = nnx.Dict()
        model.blocks = nnx.List(
            nnx.Linear(width, width, kernel_init=std, rngs=rngs) for _ in range(depth)
        )
        model.head = nnx.Linear(width, 10, kernel_init=NORMAL, rngs=rngs)
        return model

    base, target = build(32, 2), build(128, 8)
    axes = {"kernel": "i -> o", "bias": "o"}
    scales = optim.infer_scales(
        base, target, axes=optim.declare(axes, branches="blocks")
    )
    params = nnx.state(target, nnx.Param)
    rescaled = optim.rescale_init(
        params, scales.for_parametrization("depth_mup"), base=base
    )
    small, large = sizes(nnx.state(base, nnx.Param)), sizes(rescaled)
    for block in range(8):
        ratio = large[f"blocks/{block}/kernel"] / small["blocks/0/kernel"]
        assert ratio == pytest.approx(0.5, rel=0.1)


def test_linen_embeddings_and_collections_that_are_not_trained():
    class Model(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            x = nn.Embed(VOCABULARY, self.width)(x)
            x = nn.BatchNorm(use_running_average=True)(nn.Dense(self.width)(x))
            return nn.Dense(10)(x)

    tokens = jnp.zeros((1, 4), jnp.int32)
    base, target = (Model(n).init(jax.random.key(n), tokens) for n in (32, 256))
    # A module is initialized where its sizes are measured.
    scales = optim.infer_scales(Model(32), Model(256), inputs=(tokens,))
    rescaled = optim.rescale_init(target, scales)
    assert jax.tree.structure(rescaled) == jax.tree.structure(target)
    stds = jax.tree.map(
        lambda b, t: t.std() / b.std(), base["params"], rescaled["params"]
    )
    assert stds["Embed_0"]["embedding"] == pytest.approx(1, rel=0.1)
    assert stds["Dense_1"]["kernel"] == pytest.approx(1 / 8, rel=0.2)


class Net(eqx.Module):
    layers: list
    activation: object
    name: str
    steps: jax.Array

    def __init__(self, width):
        a, b = jax.random.split(jax.random.key(width))
        self.layers = [eqx.nn.Linear(8, width, key=a), eqx.nn.Linear(width, 2, key=b)]
        self.activation, self.name, self.steps = jax.nn.relu, "net", jnp.zeros((), int)

    def __call__(self, x):
        return self.layers[1](self.activation(self.layers[0](x)))


def test_an_equinox_module_keeps_what_is_no_array():
    base, target = Net(16), Net(256)
    scales = optim.infer_scales(base, target, inputs=(jnp.ones(8),))
    model = optim.rescale_init(target, scales)
    assert (model.activation, model.name) == (jax.nn.relu, "net")
    ratio = model.layers[1].weight / target.layers[1].weight
    np.testing.assert_allclose(ratio, 0.25, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, s, b: (nnx.merge(*nnx.split(b)), s, {}), r"nnx\.state\(model"),
        (
            lambda p, s, b: (p, s, {"base": s}),
            "no initial values of 'down/bias'",
        ),
        (
            lambda p, s, b: (p, s, {"base": Bigram(64)}),
            "no initial values of 'down/bias'",
        ),
        (
            lambda p, s, b: (p, s, {"base": nnx.eval_shape(lambda: Bigram(NARROW))}),
            "has no initial values",
        ),
        (lambda p, s, b: ({"w": jnp.ones(3)}, s, {}), "'w' has no scale"),
        (
            lambda p, s, b: (p, s, {"base": lambda n: Bigram(n)}),
            r"the base is a function .* needs arguments \(n\)",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    base, scales, params = pair(embed=NORMAL)
    params, scales, options = change(params, scales, base)
    with pytest.raises(ValueError, match=message):
        optim.rescale_init(params, scales, **options)


class Pair(nnx.Module):
    """A block of two layers of one shape; the second one starts small."""

    def __init__(self, width, rngs):
        self.fc1 = nnx.Linear(width, width, rngs=rngs)
        small = INIT.variance_scaling(0.01, "fan_in", "normal")
        self.fc2 = nnx.Linear(width, width, kernel_init=small, rngs=rngs)


class Pairs(nnx.Module):
    def __init__(self, width, depth):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, width, rngs=rngs)
        self.blocks = nnx.List(Pair(width, rngs) for _ in range(depth))
        self.head = nnx.Linear(width, 3, rngs=rngs)


def test_blocks_that_the_base_lacks_are_compared_with_the_same_layer():
    """With `fc1`, which has the same shape, `fc2` would become ten times as large."""
    base, target = Pairs(NARROW, 2), Pairs(WIDE, 6)
    axes = optim.declare({"kernel": "i -> o", "bias": "o"}, branches="blocks")
    scales = optim.infer_scales(base, target, axes=axes)
    before = nnx.state(target, nnx.Param)
    after = optim.rescale_init(
        before, scales.for_parametrization("completep"), base=base
    )
    for i in range(6):
        for layer in ("fc1", "fc2"):
            was, now = (x.blocks[i][layer].kernel[...] for x in (before, after))
            np.testing.assert_allclose(now, was, rtol=1e-6)


class Biasless(nnx.Module):
    def __init__(self, width):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, width, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.embed(x)))


def test_a_trained_target_or_base_is_refused():
    base, target = (lambda: Biasless(NARROW)), Biasless(WIDE)
    scales = optim.infer_scales(base, target, inputs=(jnp.ones((1, 4)),))
    params = nnx.state(target, nnx.Param)
    trained = jax.tree.map(
        lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), params
    )
    optim.rescale_init(params, scales, base=base)
    said = "'norm/scale' .* not in the {}, as if that were trained"
    with pytest.raises(ValueError, match=said.format("target")):
        optim.rescale_init(trained, scales)
    small = jax.tree.map(lambda x: x + 0.02 * x**2, nnx.state(base(), nnx.Param))
    small["norm"]["scale"][...] += jnp.arange(NARROW) / NARROW
    with pytest.raises(ValueError, match=said.format("base")):
        optim.rescale_init(params, scales, base=small)


def test_an_optimizer_warns_of_a_readout_that_was_not_rescaled():
    base, scales, params = pair(embed=INIT.normal(1.0))
    said = "readout 'head/kernel' starts as large as in the standard .* 2.83 times"
    with pytest.warns(optim.ChainWarning, match=said):
        optim.adam(0.1, scales).init(params)
    rescaled = optim.rescale_init(params, scales, base=base)
    optim.adam(0.1, scales).init(rescaled)
    optim.adam(0.1, scales).init(jax.tree.map(lambda x: x + 0, rescaled))
    optim.adam(0.1, scales.for_parametrization("sp")).init(params)  # keeps the size
    jax.eval_shape(optim.adam(0.1, scales).init, params)  # values unknown
    *_, other = pair(embed=INIT.normal(1.0), head=INIT.normal(0.003))
    optim.adam(0.1, scales).init(other)  # a size of its own


def test_large_readouts_are_measured_on_their_device(monkeypatch):
    monkeypatch.setattr(initial_sizes, "_LARGE", 1)
    _, scales, params = pair(embed=INIT.normal(1.0))
    said = "readout 'head/kernel' starts as large"
    init = optim.adam(0.1, scales).init
    with pytest.warns(optim.ChainWarning, match=said):
        jax.eval_shape(lambda: init(params))
    mesh = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.sharding.NamedSharding(mesh, jax.P(None, "m"))
    params["head"]["kernel"] = jax.device_put(params["head"]["kernel"][...], spread)
    with jax.set_mesh(mesh), pytest.warns(optim.ChainWarning, match=said):
        init(params)


def test_bare_arrays_in_a_list_of_layers_are_rescaled():
    def build(width, depth, key):
        keys = jax.random.split(jax.random.key(key), depth + 2)

        def kernel(i, *shape):
            return jax.random.normal(keys[i], shape) / shape[0] ** 0.5

        blocks = [kernel(i, width, width) for i in range(depth)]
        # Each layer holds a number for every one before it.
        mixed = [jnp.linspace(0.0, 1.0, i + 2) for i in range(depth)]
        ends = {"in": kernel(-1, 5, width), "out": kernel(-2, width, 3)}
        return {**ends, "blocks": blocks, "mixed": mixed}

    def call(p, x):
        every = [x @ p["in"]]
        for kernel, mix in zip(p["blocks"], p["mixed"], strict=True):
            x = sum(a * y for a, y in zip(mix, every, strict=False))
            every.append(every[-1] + jnp.tanh(x) @ kernel)
        return every[-1] @ p["out"]

    base, target = build(16, 2, 0), build(16, 8, 1)
    scales = optim.infer_scales(base, target, inputs=(jnp.ones((1, 5)),), call=call)
    params = optim.rescale_init(target, scales)
    ratio = params["blocks"][7] / target["blocks"][7]
    np.testing.assert_allclose(ratio, 0.5, rtol=1e-6)  # 4**-1/2
    jax.tree.map(np.testing.assert_array_equal, params["mixed"], target["mixed"])
