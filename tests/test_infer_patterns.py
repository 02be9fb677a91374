"""`readout`, `copies` and `layers_axis` of `infer_scales` apply to what they mean."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_infer_asks import HIDDEN, INPUT, OUTPUT, answers, infer, question, triple

from mupax import optim

FIXED = (1, 1, 1)
VECTOR = INPUT  # 1 under Adam, m under SGD, initial size 1


def zeros(*shape):
    return jnp.zeros(shape)


def kinds(scales):
    found = {FIXED: "fixed", INPUT: "input", HIDDEN: "hidden", OUTPUT: "output"}
    return {
        path: "vector" if not s.in_axes and triple(s) == VECTOR else found[triple(s)]
        for path, s in scales.items()
    }


# --- readout= matches a module ---


class LinenHead(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(self.n)(nn.LayerNorm()(x))))


class LinenHeads(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.n, name="embed")(x)
        return LinenHead(self.n, name="head")(x), nn.Dense(1, name="value_head")(x)


def linen_heads(n):
    with jax.numpy_rank_promotion("allow"):
        return LinenHeads(n).init(jax.random.key(0), zeros(2, 8))


def test_norms_and_biases_in_the_module_of_a_readout_keep_their_roles_in_linen():
    base, target = linen_heads(16), linen_heads(64)
    scales = optim.infer_scales(base, target, readout="head")
    assert kinds(scales) == {
        "embed/bias": "vector",
        "embed/kernel": "input",
        "head/Dense_0/bias": "fixed",
        "head/Dense_0/kernel": "output",
        "head/Dense_1/bias": "vector",
        "head/Dense_1/kernel": "hidden",
        "head/LayerNorm_0/bias": "vector",
        "head/LayerNorm_0/scale": "vector",
        "value_head/bias": "fixed",
        "value_head/kernel": "output",
    }
    new = optim.rescale_init(target, scales, "mup", base=base)
    scale = new["params"]["head"]["LayerNorm_0"]["scale"]
    np.testing.assert_array_equal(scale, jnp.ones(64))


def test_norms_and_biases_in_the_module_of_a_readout_keep_their_roles_in_haiku():
    def heads(n):
        def net(x):
            x = hk.Linear(n, name="embed")(x)
            with hk.experimental.name_scope("head"):
                h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
                h = hk.Linear(3, name="last")(hk.Linear(n, name="inner")(h))
            return h, hk.Linear(1, name="value_head")(x)

        with jax.numpy_rank_promotion("allow"):
            return hk.transform(net).init(jax.random.key(0), zeros(2, 8))

    scales = optim.infer_scales(heads(16), heads(64), readout="head")
    found = kinds(scales)
    assert found["head/layer_norm/scale"] == found["head/layer_norm/offset"] == "vector"
    assert found["head/inner/b"] == "vector"
    assert found["head/inner/w"] == "hidden"
    assert found["head/last/w"] == found["value_head/w"] == "output"


def heads(n, name):
    hidden, out = (n, n), (n, 3)
    return {
        "embed": (8, n),
        "head": {name: (n,), "hidden": hidden, "out": out},
        "value": (n, 1),
    }


@pytest.mark.parametrize("name", ["scale", "gain", "bias", "gamma", "ln_g", "norm1"])
def test_a_gain_by_name_is_no_readout(name):
    scales = infer(lambda n: heads(n, name), readout="head|value")
    assert kinds(scales)[f"head/{name}"] == "vector"


def test_raw_gains_of_nnx_are_no_readout():
    class Net(nnx.Module):
        def __init__(self, n):
            self.embed = nnx.Param(zeros(8, n))
            self.head = nnx.Dict(
                scale=nnx.Param(zeros(n)), b1=nnx.Param(zeros(n)), w=nnx.Param(zeros(n))
            )
            self.value_head = nnx.Param(zeros(n, 1))

    scales = optim.infer_scales(lambda: Net(64), lambda: Net(256), readout="head")
    found = kinds(scales)
    assert found["head/scale"] == found["head/b1"] == "vector"
    assert found["head/w"] == "output"


def test_the_gain_of_a_norm_in_torchs_names_is_no_readout():
    def make(n):
        layers = {"0.weight": (n,), "0.bias": (n,), "1.weight": (3, n)}
        head = {f"head.{name}": shape for name, shape in layers.items()}
        return {"embed.weight": (n, 8), "value.weight": (1, n), **head}

    scales = infer(make, readout=r"head|value", layout="out_in")
    assert kinds(scales)["head.0.weight"] == kinds(scales)["head.0.bias"] == "vector"
    assert kinds(scales)["head.1.weight"] == "output"


def test_a_vector_in_the_module_of_a_readout_is_asked_about():
    message = question(lambda n: heads(n, "g"), readout="head|value")
    assert "'head/g'" in message
    summed, gain = answers(message, "axes")
    for axes, kind in ((summed, "output"), (gain, "vector")):
        scales = infer(lambda n: heads(n, "g"), readout="head|value", axes=axes)
        assert kinds(scales)["head/g"] == kind


@pytest.mark.parametrize(
    "readout", ["^head/g$|head/out|value", "^(value|head/(g|out))"]
)
def test_a_vector_that_readout_names_itself_is_a_readout(readout):
    scales = infer(lambda n: heads(n, "g"), readout=readout)
    assert kinds(scales)["head/g"] == "output"


def test_a_readout_with_the_name_of_a_bias_is_asked_about():
    def make(n):
        return {"a": (8, n), "h": (n, n), "b": (n,)}

    message = question(make, readout="^b$")
    assert "the vector 'b'" in message
    scales = infer(make, readout="^b$", axes=answers(message, "axes")[0])
    assert kinds(scales)["b"] == "output"


def test_queries_in_the_module_of_a_readout_are_hidden():
    def make(n):
        names = ("query", "key", "value")
        heads = {name: {"kernel": (n, n // 8, 8)} for name in names}
        head = {**heads, "out": {"kernel": (n // 8, 8, n)}, "fc": {"kernel": (n, 3)}}
        return {"embed": (8, n), "head": head, "value_head": {"kernel": (n, 1)}}

    found = kinds(infer(make, readout="head"))
    assert {found[f"head/{name}/kernel"] for name in ("query", "key", "value")} == {
        "hidden"
    }
    assert found["head/fc/kernel"] == "output"


# --- the number of experts is no width ---

SIZES = ((64, 4), (256, 8))


def experts(size, vectors=()):
    n, e = size
    return {
        "embed": (1000, n),
        "experts": {"up": (e, n, 4 * n), "down": (e, 4 * n, n)},
        "router": {"kernel": (n, e), "bias": (e,)},
        "head": (n, 1000),
        **dict.fromkeys(vectors, (e,)),
    }


@pytest.mark.parametrize("readout", ["^head|router", "^head|router/kernel"])
def test_the_bias_of_a_router_is_fixed_where_experts_are_added(readout):
    scales = infer(experts, SIZES, copies="experts/", readout=readout)
    assert triple(scales["router/kernel"]) == OUTPUT
    assert triple(scales["experts/up"]) == triple(scales["experts/down"]) == HIDDEN
    assert triple(scales["router/bias"]) == FIXED
    params = jax.tree.map(
        lambda shape: zeros(*shape),
        experts((256, 8)),
        is_leaf=lambda x: type(x) is tuple,
    )
    decays = optim.optimizers.decay_mask("matrices", scales)(params)
    assert decays["router"] == {"kernel": True, "bias": False}


def test_the_bias_of_a_router_of_nnx_is_fixed_if_readout_names_its_kernel():
    def make(n, e):
        rngs = nnx.Rngs(0)
        up, down = nnx.Param(zeros(e, n, n)), nnx.Param(zeros(e, n, n))
        return nnx.Dict(
            embed=nnx.Linear(8, n, rngs=rngs),
            experts=nnx.Dict(up=up, down=down),
            router=nnx.Linear(n, e, rngs=rngs),
            head=nnx.Linear(n, 3, rngs=rngs),
        )

    scales = optim.infer_scales(
        lambda: make(64, 4),
        lambda: make(256, 8),
        copies="experts/",
        readout="^head|router/kernel",
    )
    assert kinds(scales)["router/bias"] == "fixed"


def test_a_free_bias_per_expert_is_fixed():
    def make(size):
        return experts(size, ["expert_bias"])

    scales = infer(make, SIZES, copies="experts/", readout="^head|router/kernel")
    assert triple(scales["expert_bias"]) == FIXED


def test_a_vector_that_may_count_experts_is_asked_about():
    def make(size):
        return experts(size, ["temperature"])

    options = {"copies": "experts/", "readout": "^head|router"}
    message = question(make, SIZES, **options)
    assert "'temperature'" in message
    counts, heads = answers(message, "axes")
    for axes, want in ((counts, FIXED), (heads, (1, 2, 1))):
        scales = infer(make, SIZES, axes=axes, **options)
        assert triple(scales["temperature"]) == want


def test_a_router_without_a_readout_pattern_is_asked_about_beside_a_free_bias():
    def make(size):
        return experts(size, ["expert_bias"])

    message = question(make, SIZES, copies="experts/", readout="^head")
    assert "readout=r'^router/kernel$'" in message


def test_as_many_experts_as_channels_leave_norms_vectors():
    def make(n):
        return experts((n, n)) | {"norm": {"scale": (n,)}}

    scales = infer(make, copies="experts/", readout="^head|router")
    assert triple(scales["norm/scale"]) == VECTOR
    assert triple(scales["router/bias"]) == FIXED
    assert triple(scales["router/kernel"]) == OUTPUT


def test_a_module_of_a_readout_with_hidden_kernels_as_wide_as_the_experts_is_asked():
    def make(n):
        head = {"fc1": {"kernel": (n, n)}, "fc2": {"kernel": (n, 10)}}
        return experts((n, n)) | {"head": head}

    options = {"copies": "experts/", "readout": "^head|router"}
    message = question(make, **options)
    assert "'head/fc1/kernel'" in message
    scales = infer(make, axes=answers(message, "axes")[1], **options)
    assert triple(scales["head/fc1/kernel"]) == HIDDEN


# --- copies= matches too much ---


class Mixture(nnx.Module):
    def __init__(self, n, e, rngs):
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.router = nnx.Linear(n, e, rngs=rngs)
        self.shared = nnx.Linear(n, n, rngs=rngs)
        self.up = nnx.Param(zeros(e, n, 4 * n))
        self.down = nnx.Param(zeros(e, 4 * n, n))
        self.batched = nnx.LinearGeneral(n, n, batch_axis={0: e}, rngs=rngs)


def nnx_mixture(n, e):
    rngs = nnx.Rngs(0)
    return nnx.Dict(
        embed=nnx.Linear(8, n, rngs=rngs),
        moe=Mixture(n, e, rngs),
        head=nnx.Linear(n, 3, rngs=rngs),
    )


@pytest.mark.parametrize("more", [4, 8])
def test_layers_of_nnx_have_no_more_axes_than_their_own(more):
    scales = optim.infer_scales(
        lambda: nnx_mixture(64, 4),
        lambda: nnx_mixture(256, more),
        copies="moe",
        readout="head|router",
    )
    found = kinds(scales)
    assert found["moe/router/kernel"] == "output"
    assert found["moe/router/bias"] == "fixed"
    assert found["moe/norm/scale"] == found["moe/norm/bias"] == "vector"
    stacked = ("moe/shared/kernel", "moe/up", "moe/down", "moe/batched/kernel")
    assert {found[path] for path in stacked} == {"hidden"}
    assert scales["moe/up"].fan_in == 256


def test_copies_of_layers_that_have_none_are_refused():
    with pytest.raises(ValueError, match=r"copies='router' .*'moe/router/bias'"):
        optim.infer_scales(
            lambda: nnx_mixture(64, 4),
            lambda: nnx_mixture(256, 4),
            copies="router",
            readout="head|router",
        )


def mixture(n, e=4, **more):
    return {
        "embed": {"kernel": (8, n)},
        "moe": {
            "norm": {"scale": (n,), "bias": (n,)},
            "router": {"kernel": (n, e), "bias": (e,)},
            "up": (e, n, 4 * n),
            "down": (e, 4 * n, n),
            **more,
        },
        "head": {"kernel": (n, 3)},
    }


def shared(n):
    return {"up": {"kernel": (n, 4 * n)}, "down": {"kernel": (4 * n, n)}}


@pytest.mark.parametrize("path", ["moe/router/kernel", "moe/shared/down/kernel"])
@pytest.mark.parametrize("more", [4, 8])
def test_copies_that_match_single_layers_are_refused(path, more):
    def make(size):
        n, e = size
        whole = mixture(n, e, shared=shared(n))
        if "shared" in path:
            del whole["moe"]["router"]
        return whole

    sizes, readout = ((64, 4), (256, more)), "head|router"
    message = question(make, sizes, copies="moe", readout=readout)
    assert repr(path) in message
    assert "copies should match only the stacked arrays" in message
    copies = answers(message, "copies")[0]
    found = kinds(infer(make, sizes, copies=copies, readout=readout))
    assert found["moe/norm/scale"] == "vector"
    assert found["moe/up"] == found["moe/shared/down/kernel"] == "hidden"
    assert found.get("moe/router/kernel", "output") == "output"
    assert found.get("moe/router/bias", "fixed") == "fixed"


def test_copies_that_match_shared_arrays_are_refused():
    def make(n):
        return mixture(n, shared_up=(n, 2 * n), shared_down=(2 * n, n))

    message = question(make, copies="down|moe/up", readout="head|router")
    assert "'moe/shared_down'" in message
    copies = answers(message, "copies")[0]
    found = kinds(infer(make, copies=copies, readout="head|router"))
    assert found["moe/shared_down"] == "hidden"


def test_copies_that_match_a_raw_router_only_are_refused():
    def make(n):
        return experts((n, 4)) | {"router": (n, 4)}

    for readout in ("^head", "^head|router"):
        message = question(make, copies="router", readout=readout)
        assert "'router'" in message
        assert "copies=None" in message


def test_copies_that_match_single_layers_in_stacked_blocks_are_refused():
    def make(size):
        n, depth, e = size
        moe = {"router": {"kernel": (depth, n, e)}, "up": (depth, e, n, n)}
        moe |= {"down": (depth, e, n, n), "balance": (depth, e)}
        layers = {"moe": moe, "norm": {"scale": (depth, n)}}
        return {"embed": (8, n), "layers": layers, "head": {"kernel": (n, 3)}}

    sizes = ((64, 2, 4), (256, 8, 8))
    options = {"depth": (2, 8), "branch": "layers", "readout": "head|router"}
    message = question(make, sizes, copies="moe", **options)
    assert "'layers/moe/router/kernel'" in message
    scales = infer(make, sizes, copies=answers(message, "copies")[0], **options)
    assert triple(scales["layers/moe/router/kernel"]) == OUTPUT
    assert triple(scales["layers/moe/balance"]) == FIXED
    assert triple(scales["layers/moe/up"]) == HIDDEN


# --- layers_axis= counts from the end ---


def stacked(size):
    n, depth = size
    return {
        "embed": {"kernel": (8, n), "bias": (n,)},
        "temperature": (),
        "blocks": {"kernel": (n, n, depth), "bias": (n, depth)},
        "head": {"kernel": (n, 3), "bias": (3,)},
    }


def test_blocks_may_be_stacked_along_the_last_axis():
    class Net(nnx.Module):
        def __init__(self, n, depth):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Linear(8, n, rngs=rngs)
            split = nnx.split_rngs(splits=depth)
            block = nnx.vmap(lambda rngs: nnx.Linear(n, n, rngs=rngs), out_axes=-1)
            self.blocks = split(block)(rngs)
            self.head = nnx.Linear(n, 3, rngs=rngs)

    options = {"branch": "blocks", "layers_axis": -1, "depth": (2, 16)}
    for models in (
        (lambda: Net(16, 2), lambda: Net(64, 16)),
        tuple(
            jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
                stacked(size),
                is_leaf=lambda x: type(x) is tuple,
            )
            for size in ((16, 2), (64, 16))
        ),
    ):
        scales = optim.infer_scales(*models, **options)
        kernel, bias = scales["blocks/kernel"], scales["blocks/bias"]
        assert (kernel.in_axes, kernel.out_axes, kernel.depth) == ((0,), (1,), 8)
        assert (bias.in_axes, bias.out_axes) == ((), (0,))
        assert kernel.in_branch
        assert bias.in_branch
        row = optim.explain(scales, "depth_mup", "adam").rows["blocks/kernel"]
        assert row.learning_rate == pytest.approx(0.25 * 8**-0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": (2, 8)},
        {"depth": (16, 64)},
        {"depth": (2, 8), "layers_axis": -2},
        {"depth": (2, 8), "layers_axis": -4},
    ],
)
def test_a_wrong_axis_of_layers_is_refused_with_the_right_one(options):
    sizes = (16, 2), (64, 8)
    message = question(stacked, sizes, branch="blocks", **options)
    assert "'blocks/bias'" in message
    assert "layers_axis=-1" in message
    assert "depth=(16, 64) if" not in message
    scales = infer(stacked, sizes, branch="blocks", depth=(2, 8), layers_axis=-1)
    assert scales["blocks/kernel"].in_axes == (0,)


def test_width_and_depth_that_grow_alike_are_told_apart_by_the_axis():
    sizes, options = ((4, 4), (16, 16)), {"branch": "blocks", "depth": (4, 16)}
    scales = infer(stacked, sizes, layers_axis=-1, **options)
    assert scales["blocks/kernel"].in_axes == (0,)
    assert "layers_axis=(0, 0)" in question(
        stacked, sizes, layers_axis=(0, 0), **options
    )
