"""`infer_scales` reads roles and ratios off any JAX model."""

import dataclasses
import re
import time

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax import optim

KEY = jax.random.key(0)


def shapes(tree):
    """A tree of shapes as a tree of abstract arrays."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def one(base, target, path="w", **options):
    """The scale of one parameter, in a model that has each of its sizes elsewhere."""
    torch = options.get("layout") == "out_in"

    def tree(shape, width):
        norms = {f"norm_{i}": {"scale": (n,)} for i, n in enumerate(shape)}
        head = (3, width) if torch else (width, 3)
        norms["norm"] = {"scale": (width,)}
        return shapes({path: shape, **norms, "head": head})

    return optim.infer_scales(tree(base, 8), tree(target, 16), **options)[path]


def summary(scale):
    return scale.role.value, scale.width_in, scale.width_out


def mlp(width, blocks=None):
    hidden = (width, width) if blocks is None else (blocks, width, width)
    return shapes({"embed": (5, width), "blocks": hidden, "head": (width, 3)})


# --- every container ---


class Nnx(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(5, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs)


class Linen(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        x = nn.Dense(self.width, kernel_init=init, name="first")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        return nn.Dense(3, kernel_init=init, name="head")(x)

    @classmethod
    def make(cls, width):
        return cls(width).init(KEY, jnp.zeros((2, 5)))


EXPECTED = {
    "first/bias": "vector",
    "first/kernel": "input",
    "head/bias": "fixed",
    "head/kernel": "output",
    "norm/bias": "vector",
    "norm/scale": "vector",
}


def roles(scales):
    return {path: scale.role.value for path, scale in scales.items()}


NNX_FORMS = {
    "modules": lambda n: Nnx(n, nnx.Rngs(0)),
    "states": lambda n: nnx.state(Nnx(n, nnx.Rngs(0))),
    "states of parameters": lambda n: nnx.state(Nnx(n, nnx.Rngs(0)), nnx.Param),
    "plain dictionaries": lambda n: nnx.to_pure_dict(
        nnx.state(Nnx(n, nnx.Rngs(0)), nnx.Param)
    ),
    "functions": lambda n: lambda: Nnx(n, nnx.Rngs(0)),
    "abstract modules": lambda n: nnx.eval_shape(lambda: Nnx(n, nnx.Rngs(0))),
}
LINEN_FORMS = {
    "variables": Linen.make,
    "frozen variables": lambda n: freeze(Linen.make(n)),
    "unboxed variables": lambda n: nn.unbox(Linen.make(n)),
    "params": lambda n: Linen.make(n)["params"],
    "functions": lambda n: lambda: Linen.make(n),
    "abstract variables": lambda n: jax.eval_shape(lambda: Linen.make(n)),
}


@pytest.mark.parametrize("form", NNX_FORMS)
def test_nnx_models_are_read_in_every_form(form):
    make = NNX_FORMS[form]
    assert roles(optim.infer_scales(make(8), make(32))) == EXPECTED


@pytest.mark.parametrize("form", LINEN_FORMS)
def test_linen_variables_are_read_in_every_form(form):
    make = LINEN_FORMS[form]
    assert roles(optim.infer_scales(make(8), make(32))) == EXPECTED


def test_equinox_models_are_read_whole_or_filtered():
    def make(n):
        return eqx.nn.MLP(5, 3, n, 2, key=KEY)

    whole = optim.infer_scales(make(8), make(32))
    filtered = optim.infer_scales(
        *(eqx.filter(make(n), eqx.is_inexact_array) for n in (8, 32))
    )
    built = optim.infer_scales(lambda: make(8), lambda: make(32))
    assert whole == filtered == built
    assert roles(whole)["layers/0/weight"] == "input"
    assert roles(whole)["layers/1/weight"] == "hidden"
    assert roles(whole)["layers/2/weight"] == "output"


def test_haiku_parameters_are_read():
    def make(n):
        def forward(x):
            return hk.Linear(3, name="head")(hk.Linear(n, name="first")(x))

        return hk.transform(forward).init(KEY, jnp.zeros((2, 5)))

    role_of = roles(optim.infer_scales(make(8), make(32)))
    assert role_of == {
        "first/b": "vector",
        "first/w": "input",
        "head/b": "fixed",
        "head/w": "output",
    }


def test_numpy_arrays_integers_and_none_may_stand_in_the_tree():
    def make(n):
        return [np.zeros((5, n)), {"w": np.zeros((n, 3))}, None, np.arange(3), "name"]

    assert roles(optim.infer_scales(make(8), make(16))) == {
        "0": "input",
        "1/w": "output",
    }


def test_a_target_of_100_billion_parameters_costs_no_memory():
    # Three kernels of 40 GB each would not fit beside anything on a small machine.
    def make(width, depth):
        layer = {"up": (depth, width, 4 * width), "down": (depth, 4 * width, width)}
        sizes = {"embed": (50_000, width), "blocks": layer, "head": (width, 50_000)}
        return lambda: jax.tree.map(
            jnp.zeros, sizes, is_leaf=lambda x: isinstance(x, tuple)
        )

    start = time.perf_counter()
    scales = optim.infer_scales(
        make(256, 4), make(12_288, 80), depth=(4, 80), branch="blocks"
    )
    assert time.perf_counter() - start < 2
    total = sum(int(np.prod(s.shape, dtype=object)) for s in scales.values())
    assert total > 90e9
    assert summary(scales["blocks/up"]) == ("hidden", 48, 48)
    assert scales.depth == 20


def test_a_big_nnx_model_is_traced_and_not_built():
    class Big(nnx.Module):
        def __init__(self, width, rngs):
            self.first = nnx.Linear(1000, width, rngs=rngs)
            self.hidden = nnx.Linear(width, width, rngs=rngs)
            self.head = nnx.Linear(width, 1000, rngs=rngs)

    scales = optim.infer_scales(
        lambda: Big(100, nnx.Rngs(0)), lambda: Big(300_000, nnx.Rngs(0))
    )
    assert summary(scales["hidden/kernel"]) == ("hidden", 3000, 3000)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    query: jax.Array
    key: jax.Array
    value: jax.Array


def test_a_parameter_called_value_keeps_its_name():
    def build(n):
        attention = Attention(*(jnp.ones((n, n)) for _ in range(3)))
        return {"in": jnp.ones((5, n)), "a": attention, "out": jnp.ones((n, 3))}

    scales = optim.infer_scales(build(8), build(32))
    assert [p for p in scales if p[0] == "a"] == ["a/query", "a/key", "a/value"]
    tx = optim.adam(0.1, scales, "mup")
    assert len(optim.check_chain(tx, scales, "mup").rows) == 5
    updates = tx.update(build(32), tx.init(build(32)), build(32))[0]
    assert jnp.allclose(updates["a"].value, -0.025)


def test_two_parameters_of_one_path_are_refused():
    def build(n):
        return {"a": {"b": jnp.ones((5, n))}, "a/b": jnp.ones((n, n))}

    with pytest.raises(ValueError, match=r"path 'a/b'; rename one"):
        optim.infer_scales(build(8), build(32))


def test_a_path_may_lead_on_from_another():
    def build(n):
        return {"a": jnp.ones((5, n)), "a/b": jnp.ones((n, n)), "out": jnp.ones((n, 3))}

    scales = optim.infer_scales(build(8), build(32))
    assert optim.check_chain(optim.adam(0.1, scales), scales).passed


class Own(nnx.Variable):
    pass


class WithOwn(nnx.Module):
    def __init__(self, n):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, n, rngs=rngs)
        self.norm = nnx.BatchNorm(n, rngs=rngs)
        self.mid = Own(jnp.ones((n, n)))
        self.head = nnx.Linear(n, 3, rngs=rngs)


def test_variables_of_a_users_kind_are_read_from_states_only():
    wrt = nnx.Any(nnx.Param, Own)
    both = [nnx.state(WithOwn(n), wrt) for n in (8, 32)]
    scales = optim.infer_scales(*both)
    assert roles(scales)["mid"] == "hidden"
    nnx.Optimizer(WithOwn(32), optim.adam(0.1, scales), wrt=wrt)
    every = optim.infer_scales(nnx.state(WithOwn(8)), nnx.state(WithOwn(32)))
    assert set(every) == set(scales)  # without statistics of batches
    params = optim.infer_scales(lambda: WithOwn(8), lambda: WithOwn(32))
    assert set(params) == set(scales) - {"mid"}
    with pytest.raises(ValueError, match=r"'mid' has no scale.*nnx.state\(base, wrt"):
        nnx.Optimizer(WithOwn(32), optim.adam(0.1, params), wrt=wrt)


def test_a_shared_variable_is_one_parameter():
    class Tied(nnx.Module):
        def __init__(self, width, rngs):
            self.embed = nnx.Embed(7, width, rngs=rngs)
            self.hidden = nnx.Linear(width, width, rngs=rngs)
            self.readout = self.embed

    def make(n):
        return Tied(n, nnx.Rngs(0))

    scales = optim.infer_scales(make(4), make(8), tied="embed")
    built = optim.infer_scales(lambda: make(4), lambda: make(8), tied="embed")
    params = nnx.state(make(8), nnx.Param)
    assert scales == built
    assert len(scales) == len(jax.tree.leaves(params))
    optim.adam(1e-3, scales).init(params)


# --- kernels ---


@pytest.mark.parametrize(
    ("base", "target", "expected"),
    [
        # dense
        ((8, 8), (32, 32), ("hidden", 4, 4)),
        ((5, 8), (5, 32), ("input", 1, 4)),
        ((8, 5), (32, 5), ("output", 4, 1)),
        ((8, 16), (16, 64), ("hidden", 2, 4)),
        ((8,), (32,), ("vector", 1, 4)),
        ((5,), (5,), ("fixed", 1, 1)),
        ((), (), ("fixed", 1, 1)),
        ((1, 1, 8), (1, 1, 32), ("vector", 1, 4)),
        # convolutions of one, two and three dimensions
        ((3, 8, 8), (3, 32, 32), ("hidden", 4, 4)),
        ((3, 8, 16), (3, 16, 64), ("hidden", 2, 4)),
        ((3, 3, 8, 8), (3, 3, 32, 32), ("hidden", 4, 4)),
        ((3, 3, 3, 8, 8), (3, 3, 3, 32, 32), ("hidden", 4, 4)),
        ((16, 16, 3, 8), (16, 16, 3, 32), ("input", 1, 4)),
        # depthwise; grouped, by more groups or by wider ones
        ((3, 3, 1, 8), (3, 3, 1, 32), ("input", 1, 4)),
        ((3, 3, 4, 8), (3, 3, 4, 32), ("input", 1, 4)),
        ((3, 3, 2, 8), (3, 3, 8, 32), ("hidden", 4, 4)),
    ],
)
def test_kernels_with_inputs_first(base, target, expected):
    named = {"readout": "^(head|w)$"} if expected[0] == "output" else {}
    assert summary(one(base, target, **named)) == expected


@pytest.mark.parametrize(
    ("base", "target", "expected"),
    [
        ((8, 8), (32, 32), ("hidden", 4, 4)),
        ((8, 5), (32, 5), ("input", 1, 4)),
        ((5, 8), (5, 32), ("output", 4, 1)),
        ((8, 8, 3), (32, 32, 3), ("hidden", 4, 4)),
        ((16, 8, 3, 3), (64, 16, 3, 3), ("hidden", 2, 4)),
        ((8, 1, 3, 3), (32, 1, 3, 3), ("input", 1, 4)),
        ((8, 3, 3, 3, 3), (32, 3, 3, 3, 3), ("input", 1, 4)),
        ((8, 1, 1), (32, 1, 1), ("vector", 1, 4)),
        ((8,), (32,), ("vector", 1, 4)),
    ],
)
def test_kernels_with_outputs_first(base, target, expected):
    named = {"readout": "^(head|w)$"} if expected[0] == "output" else {}
    assert summary(one(base, target, layout="out_in", **named)) == expected


def test_torch_like_tables_are_embeddings_by_name_or_by_option():
    def make(n):
        return shapes({"wte": (50, n), "tokens": (50, n), "unembed": (50, n)})

    scales = optim.infer_scales(
        make(8),
        make(32),
        layout="out_in",
        embeddings="^tokens$",
        readout="^unembed$",
    )
    assert summary(scales["wte"]) == summary(scales["tokens"]) == ("input", 1, 4)
    assert summary(scales["unembed"]) == ("output", 4, 1)


# (d, heads, head_dim) and (heads, head_dim, d): which of the three may grow.
ATTENTION = {
    "heads grow": ((16, 2, 8), (64, 8, 8)),
    "head_dim grows": ((16, 2, 8), (64, 2, 32)),
    "both grow": ((16, 2, 8), (64, 4, 16)),
    "both grow unevenly": ((16, 2, 8), (128, 4, 32)),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_kernels_are_cut_between_the_stream_and_the_heads(case):
    (d, *heads), (wide, *more) = ATTENTION[case]
    ratio = wide / d

    def make(stream, heads):
        return shapes(
            {
                "query": {"kernel": (stream, *heads), "bias": heads},
                "qkv": {"kernel": (stream, 3, *heads), "bias": (3, *heads)},
                "out": {"kernel": (*heads, stream), "bias": (stream,)},
                "head": {"kernel": (stream, 5), "bias": (5,)},
            }
        )

    scales = optim.infer_scales(make(d, tuple(heads)), make(wide, tuple(more)))
    assert summary(scales["query/kernel"]) == ("hidden", ratio, ratio)
    assert scales["query/kernel"].in_axes == (0,)
    assert summary(scales["qkv/kernel"]) == ("hidden", ratio, ratio)
    assert scales["qkv/kernel"].in_axes == (0,)
    assert summary(scales["out/kernel"]) == ("hidden", ratio, ratio)
    assert scales["out/kernel"].in_axes == (0, 1)
    for bias in ("query/bias", "qkv/bias"):
        assert summary(scales[bias]) == ("vector", 1, ratio)


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_kernels_without_biases_are_cut_by_shape_and_name(case):
    (d, *heads), (wide, *more) = ATTENTION[case]
    for name in ("query", "key", "value", "q_proj", "wq"):
        scale = one((d, *heads), (wide, *more), f"attention/{name}/kernel")
        assert (scale.role, scale.in_axes) == ("hidden", (0,))
        assert scale.width_in == wide / d
    for name in ("out", "o_proj", "wo"):
        scale = one((*heads, d), (*more, wide), f"attention/{name}/kernel")
        assert (scale.role, scale.in_axes) == ("hidden", (0, 1))
        assert scale.width_in == wide / d


def test_fused_qkv_kernels_are_hidden_wherever_the_three_stands():
    assert summary(one((8, 24), (32, 96), "qkv")) == ("hidden", 4, 4)
    assert summary(one((8, 3, 8), (32, 3, 32), "qkv")) == ("hidden", 4, 4)
    scale = one((3, 8, 8), (3, 32, 32), "fused_qkv")
    assert summary(scale) == ("hidden", 4, 4)
    assert scale.in_axes == (1,)


def test_cross_attention_to_a_fixed_context_reads_with_input_weights():
    reads = {"axes": {r"^key/kernel$": ((0,), (1, 2))}}
    for target in ((768, 8, 8), (768, 2, 32), (768, 4, 16)):
        scale = one((768, 2, 8), target, "key/kernel", **reads)
        assert summary(scale) == ("input", 1, 4)


def test_a_general_dense_layer_is_cut_where_its_bias_says():
    class General(nnx.Module):
        def __init__(self, n, rngs):
            self.mix = nnx.LinearGeneral((2, n), (4, n), axis=(-2, -1), rngs=rngs)
            self.head = nnx.Linear(n, 3, rngs=rngs)

    scales = optim.infer_scales(
        lambda: General(8, nnx.Rngs(0)), lambda: General(32, nnx.Rngs(0))
    )
    assert scales["mix/kernel"].in_axes == (0, 1)
    assert summary(scales["mix/kernel"]) == ("hidden", 4, 4)


def test_einsum_kernels_of_experts_are_copies_of_a_matrix():
    def make(n, experts):
        return shapes(
            {
                "experts": {"w": (experts, n, 4 * n), "b": (experts, 4 * n)},
                "head": (n, 3),
            }
        )

    scale = optim.infer_scales(make(8, 4), make(32, 4))["experts/w"]
    assert (scale.in_axes, scale.out_axes) == ((1,), (2,))
    assert summary(scale) == ("hidden", 4, 4)


def test_axes_can_be_given():
    # Gemma's einsum kernels: heads, then features of the stream, then head_dim.
    scale = one((2, 16, 8), (8, 128, 16), "q_einsum", axes={"q_einsum": ((1,), (0, 2))})
    assert summary(scale) == ("hidden", 8, 8)
    assert scale.origin == "axes given"


def test_transposed_convolutions_of_haiku_are_told_by_their_bias():
    def make(n):
        def forward(x):
            x = hk.Conv2DTranspose(2 * n, 2, name="up")(hk.Conv2D(n, 3, name="stem")(x))
            return hk.Conv2DTranspose(3, 2, name="head")(x)

        return hk.transform(forward).init(KEY, jnp.zeros((1, 4, 4, 3)))

    scales = optim.infer_scales(lambda: make(8), lambda: make(32), readout="head/w")
    assert summary(scales["up/w"]) == ("hidden", 4, 4)
    assert scales["up/w"].out_axes == (2,)
    assert summary(scales["head/w"]) == ("output", 4, 1)


def test_stacked_equinox_layers_keep_their_layout():
    class Model(eqx.Module):
        blocks: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, n):
            make = eqx.filter_vmap(lambda key: eqx.nn.Linear(n, 2 * n, key=key))
            self.blocks = make(jax.random.split(KEY, 6))
            self.head = eqx.nn.Linear(2 * n, 3, key=KEY)

    scale = optim.infer_scales(Model(4), Model(16))["blocks/weight"]
    assert summary(scale) == ("hidden", 4, 4)
    assert (scale.in_axes, scale.out_axes) == ((2,), (1,))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 5),
    st.integers(2, 5),
    st.lists(st.integers(1, 5), max_size=3),
)
def test_fan_in_counts_windows_and_inputs(inputs, outputs, m_in, m_out, window):
    base = (*window, 2 * inputs, 2 * outputs)
    target = (*window, 2 * inputs * m_in, 2 * outputs * m_out)
    scale = one(base, target, "conv/kernel")
    assert summary(scale) == ("hidden", m_in, m_out)
    assert scale.fan_in == int(np.prod(target[:-1]))
    assert scale.fan_out == target[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))
def test_ratios_do_not_depend_on_the_layout(inputs, outputs, m_in, m_out):
    base, target = (2 * inputs, 2 * outputs), (2 * inputs * m_in, 2 * outputs * m_out)
    named = {"readout": "^(head|w)$"} if m_in > 1 == m_out else {}
    ours = one(base, target, **named)
    theirs = one(base[::-1], target[::-1], layout="out_in", **named)
    assert summary(ours) == summary(theirs)


# --- depth ---


def test_stacked_blocks_of_another_depth():
    scales = optim.infer_scales(mlp(8, 2), mlp(32, 6), depth=(2, 6), branch=r"^blocks")
    assert summary(scales["blocks"]) == ("hidden", 4, 4)
    assert scales["blocks"].in_axes == (1,)
    assert scales["blocks"].in_branch
    assert not scales["head"].in_branch
    assert scales.depth == 3


def test_stacked_blocks_of_the_same_depth():
    scales = optim.infer_scales(mlp(8, 6), mlp(32, 6), depth=(6, 6), branch="blocks")
    assert scales["blocks"].in_axes == (1,)
    assert scales.depth == 1


@pytest.mark.parametrize(
    "name", ["blocks/{}/w", "Block_{}/w", "block_{}/w", "layers/{}/mlp/0/w"]
)
def test_listed_blocks_of_another_depth(name):
    def make(n, depth):
        blocks = {name.format(i): (n, n) for i in range(depth)}
        return shapes({"embed": (5, n), **blocks, "head": (n, 3)})

    scales = optim.infer_scales(
        make(8, 2), make(32, 6), depth=(2, 6), branch="(?i)block|layers"
    )
    for i in range(6):
        assert summary(scales[name.format(i)]) == ("hidden", 4, 4)
        assert scales[name.format(i)].in_branch


def in_one_list(n, depth):
    """First layer, blocks and readout with one name, as in a compact Linen model."""
    kernels = [(5, n), *[(n, n)] * depth, (n, 3)]
    return shapes({f"Dense_{i}/kernel": kernel for i, kernel in enumerate(kernels)})


def test_a_number_may_be_a_block_of_the_target_and_the_readout_of_the_base():
    def infer(depth):
        return optim.infer_scales(
            in_one_list(8, 2),
            in_one_list(32, 4),
            depth=depth,
            branch=r"Dense_[1-4]/",
            stream=r"Dense_(0|5)/",
            readout=r"^Dense_5/kernel$",
        )

    with pytest.raises(ValueError, match=r"2 blocks in .* pass depth=\(2, 4\)"):
        infer((3, 4))
    scales = infer((2, 4))
    for i, role in enumerate(["input", *["hidden"] * 4, "output"]):
        assert scales[f"Dense_{i}/kernel"].role == role
        assert scales[f"Dense_{i}/kernel"].in_branch == (role == "hidden")
    assert scales.depth == 2


def test_a_branch_is_not_the_whole_model():
    with pytest.raises(ValueError, match=r"'Dense' matches every parameter"):
        optim.infer_scales(
            in_one_list(8, 2),
            in_one_list(32, 4),
            depth=(4, 6),
            branch="Dense",
            readout=r"^Dense_5/kernel$",
        )


@pytest.mark.parametrize("listed", [True, False])
def test_a_model_may_consist_of_blocks_only(listed):
    def make(n, depth):
        if not listed:
            return shapes({"blocks/kernel": (depth, n, n)})
        return shapes({f"blocks/{i}/kernel": (n, n) for i in range(depth)})

    options = {"depth": (2, 4), "branch": "blocks", "readout": None}
    scales = optim.infer_scales(make(8, 2), make(32, 4), **options)
    assert {s.role for s in scales.values()} == {"hidden"}


def test_haikus_first_block_has_no_number():
    def make(n, depth):
        names = ["block", *(f"block_{i}" for i in range(1, depth))]
        return shapes({**{f"{b}/w": (n, n) for b in names}, "head": (n, 3)})

    scales = optim.infer_scales(make(8, 1), make(32, 4), depth=(1, 4), branch="block")
    assert summary(scales["block_3/w"]) == ("hidden", 4, 4)


def test_a_list_is_no_stack_where_width_grows_as_depth_does():
    def make(n):
        blocks = [{"kernel": (n, n), "bias": (n,)} for _ in range(n)]
        return shapes({"embed": (5, n), "blocks": blocks, "head": (n, 3)})

    scales = optim.infer_scales(make(4), make(16), depth=(4, 16), branch="blocks")
    assert summary(scales["blocks/9/kernel"]) == ("hidden", 4, 4)
    assert summary(scales["blocks/9/bias"]) == ("vector", 1, 4)


def test_blocks_are_compared_within_their_stage():
    def make(n, first, second):
        stages = [(n, first), (2 * n, second)]
        return shapes(
            {
                **{
                    f"stage_{s}/block_{b}/w": (width, width)
                    for s, (width, count) in enumerate(stages)
                    for b in range(count)
                },
                "head": (2 * n, 3),
            }
        )

    scales = optim.infer_scales(
        make(8, 6, 2), make(16, 6, 6), depth=(8, 12), branch="block"
    )
    assert summary(scales["stage_1/block_5/w"]) == ("hidden", 2, 2)


@pytest.mark.parametrize("listed", [True, False])
def test_a_network_without_branches_has_depth_too(listed):
    def make(n, depth):
        hidden = [(n, n)] * depth if listed else (depth, n, n)
        return shapes({"first": (5, n), "hidden": hidden, "head": (n, 3)})

    scales = optim.infer_scales(make(8, 2), make(32, 6), depth=(2, 6), branch=None)
    for path, scale in scales.items():
        if path.startswith("hidden"):
            assert summary(scale) == ("hidden", 4, 4)
    assert scales.depth == 3
    assert optim.explain(scales, "relu_mlp").rows["head"].learning_rate == (
        pytest.approx(3**-1.5 / 4)
    )


def test_depth_alone_may_grow():
    scales = optim.infer_scales(mlp(8, 2), mlp(8, 6), depth=(2, 6), branch="blocks")
    assert set(roles(scales).values()) == {"fixed"}
    assert scales.depth == 3


def test_numbered_stacks_of_linens_scan_are_stacks():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(x.shape[-1])(x), None

    class Model(nn.Module):
        width: int
        depth: int

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(self.width, name="first")(x)
            scan = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = scan()(x, None)
            return nn.Dense(3, name="head")(x)

    def make(n, depth):
        return lambda: Model(n, depth).init(KEY, jnp.zeros((2, 5)))

    scales = optim.infer_scales(
        make(8, 2), make(32, 6), depth=(2, 6), branch="ScanBlock"
    )
    kernel = scales["ScanBlock_0/Dense_0/kernel"]
    assert summary(kernel) == ("hidden", 4, 4)
    assert kernel.in_axes == (1,)
    assert summary(scales["ScanBlock_0/Dense_0/bias"]) == ("vector", 1, 4)


# --- a model that is its own base ---


def test_a_model_can_be_its_own_base():
    scales = optim.infer_scales(mlp(8), mlp(8), delta=mlp(16))
    assert roles(scales) == {"blocks": "hidden", "embed": "input", "head": "output"}
    assert {s.width_in for s in scales.values()} == {1.0}
    for name in ("sgd", "adam", "muon", "lamb"):
        for row in optim.explain(scales, "depth_mup", name).rows.values():
            assert (row.init_std, row.learning_rate, row.eps) == (1, 1, 1)


def test_delta_tells_roles_that_the_target_cannot():
    # Only the hidden layer is wider: without delta, the head would be "fixed".
    base = shapes({"in": (5, 8), "mid": (8, 8), "out": (8, 3)})
    wide = shapes({"in": (5, 16), "mid": (16, 16), "out": (16, 3)})
    assert roles(optim.infer_scales(base, base, delta=wide)) == {
        "in": "input",
        "mid": "hidden",
        "out": "output",
    }


def test_delta_may_have_another_depth():
    def make(n, depth):
        return shapes({"blocks": [(n, n)] * depth, "head": (n, 3)})

    scales = optim.infer_scales(
        make(8, 2), make(8, 6), delta=make(16, 1), depth=(2, 6), branch="blocks"
    )
    assert scales["blocks/5"].role == "hidden"
    assert scales["blocks/5"].width_in == 1


# --- other options ---


def test_ratios_need_not_be_whole_if_asked():
    scales = optim.infer_scales(mlp(8), mlp(12), fractional=True)
    assert scales["blocks"].width_in == 1.5
    shrunk = optim.infer_scales(mlp(8), mlp(4), fractional=True)
    assert shrunk["blocks"].width_in == 0.5


def test_a_declared_convolution_may_be_the_readout():
    scales = optim.infer_scales(
        shapes({"stem": (3, 3, 3, 8), "head/conv": (1, 1, 8, 4)}),
        shapes({"stem": (3, 3, 3, 32), "head/conv": (1, 1, 32, 4)}),
        readout=re.escape("head/conv"),
    )
    assert summary(scales["head/conv"]) == ("output", 4, 1)


def test_a_model_without_readout_is_accepted_if_said():
    scales = optim.infer_scales(
        shapes({"w": (5, 8)}), shapes({"w": (5, 32)}), readout=None
    )
    assert roles(scales) == {"w": "input"}
    assert scales["w"].width_last == 4


def test_scales_of_the_tied_embedding_are_an_embeddings():
    def make(n):
        return shapes({"embed": (50, n), "hidden": (n, n)})

    scales = optim.infer_scales(make(8), make(32), tied="embed")
    assert summary(scales["embed"]) == ("input", 1, 4)
    assert scales["hidden"].width_last == 4
