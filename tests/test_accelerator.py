"""What accelerators are given: chunks of logits, flash attention, lanes, bfloat16.

`python -m benchmarks.accelerator` runs these tests on its device.
"""

import collections
import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sweep_toys
from flax import nnx
from goldens import QUICK
from jax.extend import core

from mupax import zoo
from mupax.experiments.run import loss as losses
from mupax.experiments.run.loss import NextToken
from mupax.experiments.sweep import api, engine, lanes


def gpt(**options):
    given = {"width": 16, "depth": 2, "heads": 2, "vocab_size": 96, "context": 24}
    return zoo.create("gpt", **(given | options), rngs=nnx.Rngs(0))


def text(model, batch=4):
    tokens = jax.random.randint(jax.random.key(1), (batch, 25), 0, 96)
    return {"tokens": tokens, "counts": jnp.arange(batch) % 2.0}


def graded(model, smoothing):
    """Losses, gradients and scores of a batch, and the arrays of the program."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    batch = text(model)

    def loss(params):
        model = nnx.merge(graph, params, rest, copy=True)
        return NextToken(smoothing).loss(model, batch, jax.random.key(0))

    graded = jax.value_and_grad(loss, has_aux=True)
    program = equations(jax.make_jaxpr(graded)(params))
    logits = [
        v.aval.size for e in program for v in e.outvars if v.aval.shape[-1:] == (96,)
    ]

    def both(params):
        model = nnx.merge(graph, params, rest, copy=True)
        return graded(params), NextToken().score(model, batch)

    return *jax.jit(both, compiler_options=QUICK)(params), max(logits)


def equations(jaxpr):
    yield from jaxpr.eqns
    for inner in core.subjaxprs(jaxpr):
        yield from equations(inner)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_in_chunks_give_the_same_gradients(monkeypatch, tied, smoothing):
    with jax.enable_x64():
        model = gpt(tied=tied, dtype=jnp.float64, param_dtype=jnp.float64)
        whole = graded(model, smoothing)
        monkeypatch.setattr(losses, "_AT_ONCE", 4 * 8 * 96)
        parts = graded(model, smoothing)
    assert (whole[2], parts[2]) == (4 * 24 * 96, 4 * 8 * 96)
    for a, b in zip(*(jax.tree.leaves(x[:2]) for x in (whole, parts)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


# --- Lanes ---


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((2, 8, 9, 3), (3, 3, 3, 5), (1, 1), "SAME"),
        ((2, 8, 9, 3), (3, 3, 3, 5), (2, 2), ((1, 1), (1, 1))),
        ((2, 9, 7, 3), (7, 7, 3, 4), (2, 1), ((3, 3), (2, 4))),
        ((3, 8, 8, 2), (4, 4, 2, 6), (4, 4), "VALID"),
        ((3, 5, 4, 2), (1, 1, 2, 3), (2, 2), "VALID"),
        ((3, 12, 2), (5, 2, 3), (2,), "SAME"),
    ],
)
def test_convolutions_of_lanes_are_products_with_the_same_gradients(
    shape, kernel, stride, padding
):
    letters = "HW"[: len(stride)]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, stride, padding, dimension_numbers=numbers
        )
        return (jnp.sin(y) * jnp.arange(y.size).reshape(y.shape)).sum()

    with jax.enable_x64():
        x, w = (
            jax.random.normal(key, size)
            for key, size in zip(
                jax.random.split(jax.random.key(0)), (shape, kernel), strict=True
            )
        )
        step = jax.value_and_grad(loss, (0, 1))
        products = lanes.rewritten(step, lanes._MANY, x, w)
        # Nothing of few runs changes.
        few = jax.make_jaxpr(lanes.rewritten(step, lanes._MANY - 1, x, w))(x, w)
        ours, theirs = jax.jit(products)(x, w), jax.jit(step)(x, w)
        names = {e.primitive.name for e in equations(jax.make_jaxpr(products)(x, w))}
        assert str(few) == str(jax.make_jaxpr(step)(x, w))
        on_cpu = lanes.rewritten(step, 0, x, w)
        last = jax.jit(on_cpu)(x, w)
        program = equations(jax.make_jaxpr(on_cpu)(x, w))
    assert "conv_general_dilated" not in names
    for one in (ours, last):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    # XLA on CPUs is fast at channels last, inside of loops too.
    form = jax.lax.conv_dimension_numbers(shape, kernel, numbers)
    forms = [e.params.get("dimension_numbers") for e in program]
    assert [x for x in forms if isinstance(x, type(form))] == [form] * 3


def test_grouped_and_wide_convolutions_of_lanes_stay():
    def names(channels, groups):
        def step(x, w):
            return jax.lax.conv_general_dilated(
                x,
                w,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        x = jax.ShapeDtypeStruct((2, 4, 4, channels), jnp.float32)
        w = jax.ShapeDtypeStruct((3, 3, channels // groups, channels), jnp.float32)
        jaxpr = jax.make_jaxpr(lanes.rewritten(step, 64, x, w))(x, w)
        return {e.primitive.name for e in equations(jaxpr)}

    assert "conv_general_dilated" in names(8, 8)
    assert "conv_general_dilated" in names(2 * lanes._FEW, 1)
    assert "conv_general_dilated" not in names(8, 1)


def test_short_loops_of_lanes_are_unrolled_and_long_ones_are_not():
    def step(weights, x):
        @jax.checkpoint
        def block(x, w):
            return jnp.tanh(x @ w), None

        return jax.grad(lambda w: jax.lax.scan(block, x, w)[0].sum())(weights)

    for depth, unroll in ((lanes._UNROLLED, True), (lanes._UNROLLED + 1, False)):
        weights, x = jax.random.normal(jax.random.key(0), (depth, 4, 4)), jnp.ones(4)
        ours = lanes.rewritten(step, 2, weights, x)
        scans = [
            e.params["unroll"] > 1
            for e in equations(jax.make_jaxpr(ours)(weights, x))
            if e.primitive.name == "scan"
        ]
        assert scans == [unroll] * 2
        np.testing.assert_allclose(
            ours(weights, x), step(weights, x), rtol=1e-5, atol=1e-6
        )


class ConvNet(nnx.Module):
    """A user's own model."""

    def __init__(self, rngs):
        self.first = nnx.Conv(1, 4, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(4, 4, (3, 3), padding="CIRCULAR", rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))).mean((1, 2)))


def test_users_convolutions_are_products_where_runs_train_at_once(monkeypatch):
    data = sweep_toys.stripes()
    arrays = data.training_arrays()
    images = {"x": arrays["image"] / np.float32(255), "y": arrays["label"]}
    products, product = [], lanes.as_product
    monkeypatch.setattr(
        lanes, "as_product", lambda *a, **k: products.append(1) or product(*a, **k)
    )

    def mean(model, batch):
        return losses._mean_losses(model(batch["x"]), batch["y"], 0.0)[0]

    def swept(at_once):
        monkeypatch.setattr(engine, "at_once", lambda: at_once)
        found = api.sweep(
            lambda key, width, depth: ConvNet(nnx.Rngs(key)),
            lambda model, learning_rate, **sizes: optax.adam(learning_rate),
            mean,
            images,
            grid={"learning_rate": tuple(2.0 ** np.arange(-8, -4))},
            sizes=[(4, 2)],
            seeds=2,
            steps=5,
            batch_size=8,
            progress=False,
        )
        return found.populations[0].curves

    one_by_one = swept(False)
    assert not products
    np.testing.assert_allclose(swept(True), one_by_one, rtol=1e-4)
    assert len(products) >= 5  # forward, and gradients but that of the images


def test_runs_in_bfloat16_have_float32_masters_and_are_those_of_single_runs(
    monkeypatch,
):
    task = sweep_toys.task(
        model={"name": "resmlp", "dtype": "bfloat16"},
        log2_lr=tuple(map(float, range(-9, -5))),
        steps=6,
    )
    data = sweep_toys.stripes()
    training = task.training(data)
    hyper = {name: jnp.float32(1) for name in task.grid}
    state, _ = jax.eval_shape(training.init, jax.random.key(0), hyper)
    floats = {x.dtype for x in jax.tree.leaves(state) if x.dtype != jnp.int32}
    assert floats == {jnp.dtype("float32")}
    curves = []
    for at_once in (True, False):
        monkeypatch.setattr(engine, "at_once", lambda at_once=at_once: at_once)
        curves.append(engine.run(task, data).cell().curves)
    np.testing.assert_allclose(*curves, rtol=0.02)
    single = dataclasses.replace(
        task,
        config=dataclasses.replace(
            task.config, model=task.config.model.with_options(dtype="float32")
        ),
    )
    assert not np.allclose(engine.run(single, data).cell().curves, curves[1], rtol=1e-5)


# --- Attention and rematerialization ---


@pytest.fixture
def with_cudnn(monkeypatch):
    """Programs for GPUs may be traced and lowered here, as if cuDNN were installed."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: False)


def abstract(name, **options):
    return nnx.eval_shape(lambda: zoo.create(name, **options, rngs=nnx.Rngs(0)))


def llama(**options):
    """A head is twice as large as the base's, so its scale is not d^-1/2."""
    given = {"width": 32, "base_width": 16, "depth": 2, "heads": 4, "context": 16}
    given |= {"queries_per_key": 2, "vocab_size": 32, "parametrization": "mup"}
    return abstract("llama", **(given | {"dtype": jnp.bfloat16} | options))


def gradient_of(model, batch=2):
    """The gradient of a model's logits, and its arguments."""
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    if hasattr(model, "context"):
        x = jax.ShapeDtypeStruct((batch, 16), jnp.int32)
    else:
        x = jax.ShapeDtypeStruct((batch, 8, 8, 3), jnp.float32)

    def loss(params, rest, x):
        logits = nnx.merge(graph, params, rest, copy=True)(x)
        labels = jnp.zeros(logits.shape[:-1], jnp.int32)
        return losses._mean_losses(logits, labels, 0.0)[0]

    return loss, jax.grad(loss), (params, rest, x)


def test_cudnn_gets_causal_grouped_attention_with_the_scale_of_mup(with_cudnn):
    model = llama(attention="cudnn")
    _, gradient, arguments = gradient_of(model)
    traced = jax.jit(gradient).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
    names = [line.split("@__cudnn$")[1].split("(")[0] for line in calls]
    assert names == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert model.blocks.attention.scale == 0.25 != 8**-0.5
    for line in calls:
        assert "fmha_scale\\22: 0.25" in line
        assert "mask_type\\22: \\22CAUSAL" in line


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_gives_the_numbers_of_plain_attention(causal):
    if jax.default_backend() != "gpu":
        pytest.skip("cuDNN's attention needs an NVIDIA GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32)
    inputs = [
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    ]

    def of(how):
        def loss(*inputs):
            out = jax.nn.dot_product_attention(
                *inputs, scale=0.2, is_causal=causal, implementation=how
            )
            return (out.astype(jnp.float32) ** 2).mean(), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*inputs)

    for a, b in zip(
        *(jax.tree.leaves(of(how)) for how in ("cudnn", "xla")), strict=True
    ):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def counted(model):
    """How often each primitive stands in the program of a gradient."""
    _, gradient, arguments = gradient_of(model)
    return collections.Counter(
        e.primitive.name for e in equations(jax.make_jaxpr(gradient)(*arguments))
    )


def test_remat_recomputes_what_its_name_says(with_cudnn, monkeypatch):
    # CPUs have convolutions of their own.
    monkeypatch.setattr("mupax.zoo.layers.convolve.platform", lambda: "tpu")
    options = {"width": 8, "depth": 3, "out_features": 10, "input_shape": (8, 8, 3)}
    for name, more in (("resmlp", {}), ("resnet18", {"stem": "cifar"})):
        none, full, products = (
            counted(abstract(name, **options, **more, remat=remat))
            for remat in ("none", "full", "products")
        )
        costly = "dot_general", "conv_general_dilated"
        kept, again, some = (sum(c[k] for k in costly) for c in (none, full, products))
        assert kept == some < again, name
        assert (none["checkpoint"], products["checkpoint"]) == (0, full["checkpoint"])
    # Flash attention is a product too.
    attention = [
        counted(llama(attention="cudnn", remat=remat))[
            "dot_product_attention_fwd_wrapper"
        ]
        for remat in ("products", "full")
    ]
    assert attention == [1, 2]


def test_an_unknown_remat_names_those_that_there_are():
    with pytest.raises(
        ValueError, match="remat='dots' must be True or False or one of 'none'"
    ):
        gpt(remat="dots")


# --- bfloat16 ---


@pytest.mark.parametrize("name", ["llama", "gpt", "vit", "resnet18", "resmlp"])
def test_sums_and_exponentials_are_single_precision_in_bfloat16(name):
    images = {"input_shape": (8, 8, 3), "out_features": 10}
    options = {
        "llama": {},
        "gpt": {"width": 16, "depth": 2, "heads": 2, "context": 16},
        "vit": {"width": 16, "depth": 2, "heads": 2, "patch_size": 4, **images},
        "resnet18": {"width": 8, "stem": "cifar", **images},
        "resmlp": {"width": 16, "depth": 2, "layer_norm": True, **images},
    }[name]
    options |= {"dtype": jnp.bfloat16}
    model = llama() if name == "llama" else abstract(name, **options)
    loss, _, arguments = gradient_of(model)
    program = list(equations(jax.make_jaxpr(loss)(*arguments)))
    half = {
        e.primitive.name for e in program if e.outvars[0].aval.dtype == jnp.bfloat16
    }
    assert "dot_general" in half or "conv_general_dilated" in half
    assert not half & {"reduce_sum", "exp", "log", "rsqrt", "reduce_max", "square"}


@pytest.mark.long
def test_the_script_that_measures_accelerators_runs_on_a_cpu():
    command = [sys.executable, "-m", "benchmarks.accelerator", "--smoke"]
    command += ["--only", "roof", "steps", "sweeps", "optimizers"]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("product of 512", "llama3_2_1b", "resnet18", "lion"):
        assert part in done.stdout
