"""`infer_scales` asks where shapes admit two readings, and its answers work."""

import ast
import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax import optim

MUP = optim.parametrization("mup")


def shapes(tree):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def infer(make, sizes=(64, 256), **options):
    return optim.infer_scales(*(shapes(make(n)) for n in sizes), **options)


def triple(scale):
    """Adam's rate, SGD's rate and initial size, relative to the base."""
    adam, sgd = (optim.multipliers(scale, MUP, name) for name in ("adam", "sgd"))
    return adam.learning_rate, sgd.learning_rate, adam.init_std


INPUT, HIDDEN, OUTPUT = (1, 4, 1), (0.25, 1, 0.5), (0.25, 0.25, 0.25)


def question(make, sizes=(64, 256), **options):
    """The message of the error."""
    with pytest.raises(ValueError, match=r"(?s).") as caught:
        infer(make, sizes, **options)
    return str(caught.value)


def answers(message, option):
    """What a message says to write for an option, evaluated."""
    quoted = rf"{option}=(\{{r'[^']*': \([^}}]*\)\}}|r'[^']*'|\(\d[\d, ]*\)|\d+)"
    return [ast.literal_eval(answer) for answer in re.findall(quoted, message)]


def network(n, **more):
    return {
        "first": {"kernel": (8, n), "bias": (n,)},
        "mid": {"kernel": (n, n), "bias": (n,)},
        **more,
        "head": {"kernel": (n, 10), "bias": (10,)},
    }


# --- several parameters look like a readout ---


def mamba(n):
    return network(n, A_log=(2 * n, 16), router={"kernel": (n, 4)})


def test_every_candidate_is_listed_with_shapes_and_what_to_write():
    message = question(mamba)
    for path in ("A_log", "head/kernel", "router/kernel"):
        assert f"readout=r'^{path}$'" in message
        assert f"axes={{r'^{path}$': ((), (0, 1))}}" in message
    assert "(128, 16) -> (512, 16)" in message


def test_pasted_answers_are_right_and_shown_in_explain():
    message = question(mamba)
    axes = next(a for a in answers(message, "axes") if "^A_log$" in a)
    message = question(mamba, axes=axes)
    scales = infer(mamba, axes=axes, readout=answers(message, "readout")[-1])
    assert triple(scales["A_log"]) == INPUT
    assert triple(scales["router/kernel"]) == OUTPUT
    assert triple(scales["head/kernel"]) == OUTPUT
    rows = optim.explain(scales, "mup").rows
    assert {p for p, row in rows.items() if row.origin == "readout, named"} == {
        "head/kernel",
        "router/kernel",
    }


def test_a_readout_that_leaves_one_out_is_asked_about_it_alone():
    message = question(mamba, readout="^head/kernel$")
    assert "leaves out" in message
    assert "'A_log'" in message
    assert "\n  'head/kernel'" not in message


def test_candidates_in_blocks_are_named_by_one_pattern():
    def make(n):
        blocks = [{"router": {"kernel": (n, 4)}} for _ in range(3)]
        return network(n, blocks=blocks)

    message = question(make)
    assert r"^blocks/\d+/router/kernel$" in message
    scales = infer(make, readout=answers(message, "readout")[-1])
    assert triple(scales["blocks/2/router/kernel"]) == OUTPUT


def test_patterns_are_anchored_and_escaped():
    def make(n):
        return {"a.b/w": (n, 3), "xa.b/w": (n, 3), "c": (5, n)}

    message = question(make)
    assert r"^a\.b/w$" in message
    assert answers(message, "readout")[-1] == r"^(a\.b/w|xa\.b/w)$"


def test_a_readout_that_matches_everything_is_refused():
    assert "matches every parameter" in question(mamba, readout=".*")


def test_a_vector_that_reads_out_can_be_named():
    def make(n):
        return {"first": {"kernel": (8, n), "bias": (n,)}, "head": (n,)}

    message = question(make)
    assert "'head'" in message
    assert triple(infer(make, readout=answers(message, "readout")[0])["head"]) == OUTPUT


@pytest.mark.parametrize(
    ("name", "bias"),
    [("w", None), ("weights", None), ("weight", ()), ("weight", (1,))],
)
def test_a_vector_of_weights_is_asked_about(name, bias):
    def make(n):
        value = {name: (n,)} | ({} if bias is None else {"bias": bias})
        return network(n, value=value)

    message = question(make)
    assert f"the vector 'value/{name}' grows" in message
    assert answers(message, "readout") == [f"^value/{name}$"]
    found = infer(make, readout=rf"^(head/kernel|value/{name})$")
    assert triple(found[f"value/{name}"]) == OUTPUT


@pytest.mark.parametrize("path", ["bn1/w", "final_ln/w"])
def test_a_gain_with_a_bias_of_its_own_shape_is_not_asked_about(path):
    def make(n):
        return network(n, **{path: (n,), f"{path.rpartition('/')[0]}/bias": (n,)})

    assert triple(infer(make)[path]) == INPUT


# --- tied embeddings ---


def language_model(n, **more):
    return {
        "wte": {"embedding": (50, n)},
        "mlp": {"kernel": (n, n), "bias": (n,)},
        **more,
    }


@pytest.mark.parametrize("name", ["router", "value_head", "score", "Dense_3"])
def test_another_output_does_not_silence_the_question_of_tied_embeddings(name):
    def make(n):
        return language_model(n, **{name: {"kernel": (n, 1), "bias": (1,)}})

    message = question(make)
    assert "wte/embedding" in message
    tied, readout = (answers(message, o)[0] for o in ("tied", "readout"))
    scales = infer(make, tied=tied, readout=readout)
    assert triple(scales["wte/embedding"]) == INPUT
    assert triple(scales[f"{name}/kernel"]) == OUTPUT
    infer(make, tied=None, readout=readout)


def test_a_readout_of_as_many_outputs_as_entries_needs_no_question():
    scales = infer(lambda n: language_model(n, decode={"kernel": (n, 50)}))
    assert triple(scales["decode/kernel"]) == OUTPUT


# --- axes of entries and copies ---


@pytest.mark.parametrize("shape", [(32, 64), (1, 32, 64), (64, 64), (1, 64, 64)])
def test_a_table_of_positions_that_grows_is_asked_about(shape):
    def make(n):
        grown = tuple(s if s == 1 else s * n // 64 for s in shape)
        return network(n, pos_embedding=grown)

    message = question(make)
    assert "'pos_embedding'" in message
    scales = infer(make, embeddings=answers(message, "embeddings")[0])
    assert triple(scales["pos_embedding"]) == INPUT


def test_entries_of_an_embedding_layer_are_no_width():
    scales = optim.infer_scales(
        lambda: nnx.List([nnx.Embed(100, 8, rngs=nnx.Rngs(0))]),
        lambda: nnx.List([nnx.Embed(230, 32, rngs=nnx.Rngs(0))]),
        readout=None,
    )
    assert triple(scales["0/embedding"]) == INPUT


def test_experts_grow_if_all_of_them_are_named():
    def make(n):
        e = n // 8
        return network(
            n,
            up={"wi": (e, n, 2 * n)},
            down={"wo": (e, 2 * n, n)},
            router={"kernel": (n, e)},
        )

    assert "'down/wo'" in question(make, copies="up/wi")
    message = question(make, copies="w[io]$")
    assert "'router/kernel'" in message
    readout = "^(head|router)/kernel$"
    scales = infer(make, copies="w[io]$", readout=readout)
    assert triple(scales["up/wi"]) == triple(scales["down/wo"]) == HIDDEN
    assert scales["up/wi"].in_axes == (1,)
    assert triple(scales["router/kernel"]) == OUTPUT


def test_a_stack_that_grows_is_never_balanced_against_width():
    def make(n):
        return network(n, layers={"w": (n // 16, n, n)})

    message = question(make, (64, 128))
    assert "'layers/w'" in message
    assert "depth=" in message
    scales = infer(make, (64, 128), depth=(4, 8), branch="layers")
    assert triple(scales["layers/w"]) == (0.5, 1, 0.5**0.5)


# --- blocks ---


def deep(n, depth, stacked):
    if stacked:
        block = {"norm": (depth, n), "w": {"kernel": (depth, n, n)}}
        return network(n, blocks=block, final_norm={"scale": (n,)})
    block = {"norm": {"scale": (n,)}, "w": {"kernel": (n, n)}}
    return network(n, blocks=[block] * depth, final_norm={"scale": (n,)})


DEEP = {"depth": (2, 6)}


def infer_deep(stacked, **options):
    base, target = (shapes(deep(*size, stacked)) for size in ((8, 2), (32, 6)))
    return optim.infer_scales(base, target, **DEEP, **options)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_branch_that_forgets_the_norms_is_refused(stacked):
    with pytest.raises(ValueError, match=r"leaves out 'blocks/.*norm") as caught:
        infer_deep(stacked, branch=r"blocks/.*kernel")
    stream = answers(str(caught.value), "stream")[0]
    outside = infer_deep(stacked, branch=r"blocks/.*kernel", stream=stream)
    inside = infer_deep(stacked, branch="blocks/")
    for scales, expected in ((outside, False), (inside, True)):
        norms = [s for p, s in scales.items() if "blocks" in p and "norm" in p]
        assert {s.in_branch for s in norms} == {expected}
        assert {triple(s) for s in norms} == {INPUT}


@pytest.mark.parametrize("branch", [".*", "norm|blocks", "head|blocks", "first|blocks"])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_branch_that_matches_more_than_blocks_is_refused(branch, stacked):
    with pytest.raises(ValueError, match=r"final_norm|head|first"):
        infer_deep(stacked, branch=branch)


def test_the_pattern_that_a_message_suggests_works():
    with pytest.raises(ValueError, match=r"final_norm|first|head") as caught:
        infer_deep(False, branch=".*")
    branch = answers(str(caught.value), "branch")[-1]
    assert infer_deep(False, branch=branch) == infer_deep(False, branch="^blocks")


def test_a_shared_block_is_no_stack():
    def make(n):
        return network(n, block={"kernel": (n, n)})

    message = question(make, depth=(4, 16), branch="block")
    assert "'block/kernel'" in message
    assert "same weights" in message


def test_a_list_that_is_left_out_is_named():
    def make(depth):
        lists = {f"{side}": [(8, 8)] * depth for side in ("encoder", "decoder")}
        return shapes(network(8, **lists))

    with pytest.raises(ValueError, match="'decoder/#'"):
        optim.infer_scales(make(2), make(6), **DEEP, branch="^encoder")
    scales = optim.infer_scales(make(2), make(6), **DEEP, branch="coder")
    assert scales["decoder/5"].in_branch


def test_members_of_a_list_are_compared_with_members_of_their_kind():
    # A pyramid in one list, and two kinds of blocks in turns.
    def make(n, counts):
        widths = [n] * counts[0] + [2 * n] * counts[1]
        blocks = [{"kernel": (w, w), "bias": (w,)} for w in widths]
        return shapes(network(n, blocks=blocks))

    scales = optim.infer_scales(
        make(8, (1, 2)), make(32, (3, 6)), depth=(3, 9), branch="^blocks"
    )
    assert {
        triple(s) for p, s in scales.items() if "blocks" in p and "kernel" in p
    } == {HIDDEN}
    assert scales["blocks/8/kernel"].base_shape == (16, 16)
    with pytest.raises(ValueError, match=r"of several kinds.*'?ABB"):
        optim.infer_scales(
            make(8, (1, 2)), make(32, (6, 0)), depth=(3, 6), branch="^blocks"
        )


@pytest.mark.parametrize(("axis", "lead"), [(1, ()), ((0, 1), (2,))])
def test_layers_may_be_stacked_along_another_axis(axis, lead):
    # MaxText: (n, layers, f); its pipelines: (stages, layers, n, f).
    def make(n, depth):
        kernel = (n, depth, 4 * n) if axis == 1 else (*lead, depth, n, 4 * n)
        down = (4 * n, depth, n) if axis == 1 else (*lead, depth, 4 * n, n)
        scale = (n, depth) if axis == 1 else (*lead, depth, n)
        layers = {"up": {"kernel": kernel}, "down": {"kernel": down}}
        return shapes(network(n, layers={**layers, "norm": {"scale": scale}}))

    small, large = (2, 6) if axis == 1 else (1, 3)
    options = {"depth": (2, 6), "branch": "^layers"}
    models = make(8, small), make(32, large)
    with pytest.raises(ValueError, match="layers_axis=") as caught:
        optim.infer_scales(*models, **options)
    answer = answers(str(caught.value), "layers_axis")[0]
    assert answer == axis
    scales = optim.infer_scales(*models, **options, layers_axis=answer)
    assert triple(scales["layers/up/kernel"]) == HIDDEN
    assert triple(scales["layers/norm/scale"]) == INPUT
    assert scales["layers/up/kernel"].fan_in == 32


# --- messages ---


def test_a_changed_number_of_classes_names_the_readout():
    def make(n):
        return network(n) | {"head": {"kernel": (n, n // 8), "bias": (n // 8,)}}

    message = question(make)
    assert "'head/kernel'" in message
    assert "as many as the target" in message
    leave_out = {"axes": {"^head/kernel$": ((0,), ()), "^head/bias$": ((), ())}}
    assert triple(infer(make, **leave_out)["head/kernel"]) == OUTPUT


def test_torch_like_kernels_without_biases_point_at_the_layout():
    def make(n):
        return {"fc1.weight": (n, 8), "fc2.weight": (n, n), "head.weight": (10, n)}

    assert "layout='out_in'" in question(make)
    assert triple(infer(make, layout="out_in")["head.weight"]) == OUTPUT


def test_rngs_from_outside_are_to_be_made_inside():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="create Rngs inside the function"):
        optim.infer_scales(
            lambda: nnx.Linear(8, 16, rngs=rngs), lambda: nnx.Linear(8, 64, rngs=rngs)
        )


def test_sizes_in_place_of_models():
    with pytest.raises(ValueError, match=r"base is 128.*lambda: MyModel"):
        optim.infer_scales(128, 1024)


def test_a_depth_that_is_one_number():
    with pytest.raises(ValueError, match=r"depth=\(8, 8\)"):
        infer(network, depth=8, branch="mid")


def test_a_list_of_patterns():
    with pytest.raises(ValueError, match=r"branch=r'blocks\|mid'"):
        infer(network, depth=(8, 8), branch=["mid", "blocks"])


def test_a_param_that_holds_a_tree():
    class Model(nnx.Module):
        def __init__(self, n, whole):
            arrays = {"w": jnp.zeros((8, n)), "head": jnp.zeros((n, 3))}
            if whole:
                self.p = nnx.Param(arrays)
            else:
                self.p = nnx.data({k: nnx.Param(v) for k, v in arrays.items()})

    with pytest.raises(ValueError, match=r"nnx.Param 'p' holds a tree.*nnx.data"):
        optim.infer_scales(lambda: Model(8, True), lambda: Model(32, True))
    scales = optim.infer_scales(lambda: Model(8, False), lambda: Model(32, False))
    optim.adam(1e-3, scales).init(nnx.state(Model(32, False), nnx.Param))


def test_integers_and_keys_among_the_parameters():
    def make(n):
        return {
            "w": jnp.zeros((8, n)),
            "head": jnp.zeros((n, 3)),
            "step": jnp.zeros((), jnp.int32),
            "key": jax.random.key(0),
        }

    scales = optim.infer_scales(make(8), make(32))
    assert set(scales) == {"w", "head"}
    tx = optim.adam(1e-3, scales)
    for name in ("step", "key"):
        with pytest.raises(ValueError, match=f"'{name}'.*not trained.*optax.masked"):
            tx.init({k: make(32)[k] for k in ("w", "head", name)})
    mask = {"w": True, "head": True, "step": False, "key": False}
    optax.masked(tx, mask).init(make(32))


# --- never silently wrong ---

NAMES = ("fc", "dense", "mix", "up", "gate", "query", "value", "conv", "a", "mlp")
ODD = ("pos_table", "A_log", "decay", "codebook", "tok_emb", "time_mix", "log_step")


def chain(draw):
    """A random network with parameters of known roles, as path: (base, target, m)."""
    n, m = draw.choice([8, 12, 16]), draw.choice([2, 3, 4])
    torch = draw.random() < 0.3
    widths = [(k * n, k * n * m) for k in (1, 2, 4)]
    middle = [draw.choice(widths) for _ in range(draw.randint(1, 4))]
    sizes = [(7, 7), *middle, (5, 5)]
    by_path = {}
    for i, (into, out) in enumerate(itertools.pairwise(sizes)):
        last = i == len(sizes) - 2
        name = "head" if last else f"{draw.choice(NAMES)}_{i}"
        pairs = [into, out][:: -1 if torch else 1]
        window = draw.choice([(), (), (3,), (3, 3)])
        shape = [(*window, *end) for end in zip(*pairs, strict=True)]
        if torch:
            shape = [(*end, *window) for end in zip(*pairs, strict=True)]
        array = draw.choice(["weight"] if torch else ["kernel", "w"])
        by_path[f"{name}/{array}"] = *shape, into[1] / into[0], out[1] / out[0]
        if draw.random() < 0.5:
            bias = {"kernel": "bias", "weight": "bias", "w": "b"}[array]
            by_path[f"{name}/{bias}"] = *zip(out), None, out[1] / out[0]
    for name in draw.sample(ODD, draw.randint(0, 2)):
        width = draw.choice(widths)
        entries = draw.choice([9, (4, 4 * m), (9, 18)])
        rows = (entries, entries) if isinstance(entries, int) else entries
        per_channel = draw.random() < 0.5 and isinstance(entries, int)
        pairs = [width, rows] if per_channel else [rows, width]
        by_path[name] = *zip(*pairs, strict=True), None, m
    return by_path, torch


def right(into, out):
    if into is None or into == 1:
        return 1, out, 1
    return 1 / into, out / into, 1 / into if out == 1 else into**-0.5


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["auto", "in_out", "out_in"]))
def test_random_networks_are_right_or_asked_about(seed, layout):
    draw = random.Random(seed)
    known, torch = chain(draw)
    if layout != "auto":
        layout = "out_in" if torch else "in_out"
    readout = {"readout": r"^head/(kernel|w|weight)$"} if draw.random() < 0.5 else {}

    def tree(end):
        nodes = {}
        for path, leaf in known.items():
            *holder, name = path.split("/")
            node = nodes.setdefault(holder[0], {}) if holder else nodes
            node[name] = leaf[end]
        return shapes(nodes)

    try:
        scales = optim.infer_scales(tree(0), tree(1), layout=layout, **readout)
    except ValueError as error:
        text = str(error).replace("\\", "")
        assert any(path in text for path in known), text
        return
    for path, (_, _, into, out) in known.items():
        got, expected = triple(scales[path]), right(into, out)
        close = map(math.isclose, got, expected)
        assert all(close), f"{path}: {got}, right is {expected}"


def test_a_missing_readout_is_not_looked_for_in_blocks():
    def tied(n, depth):
        block = {"up": {"kernel": (n, 4 * n)}, "out": {"kernel": (4 * n, n)}}
        return {"wte": {"embedding": (50, n)}, "blocks": [block] * depth}

    with pytest.raises(ValueError, match=r"tied=r.\^wte/embedding") as caught:
        optim.infer_scales(
            *(shapes(tied(n, n // 4)) for n in (8, 16)), depth=(2, 4), branch="blocks"
        )
    assert "blocks" not in str(caught.value)


def test_a_branch_matches_every_layer_of_its_blocks():
    """`fc1` and `fc2` differ in a number, as the blocks do, and in shape."""

    def model(n, blocks):
        block = {
            "fc1": {"kernel": jnp.ones((n, 4 * n))},
            "fc2": {"kernel": jnp.ones((4 * n, n))},
        }
        return {
            "embed": {"kernel": jnp.ones((5, n))},
            **{f"block_{i}": block for i in range(blocks)},
            "head": {"kernel": jnp.ones((n, 3))},
        }

    with pytest.raises(ValueError, match="leaves out 'block_0/fc2/kernel'"):
        optim.infer_scales(model(8, 2), model(32, 4), depth=(2, 4), branch="fc1")
    scales = optim.infer_scales(model(8, 2), model(32, 4), depth=(2, 4), branch="fc")
    assert sum(scale.in_branch for scale in scales.values()) == 8


def heads(n):
    shapes = {
        "embed/embedding": (50, n),
        "q/kernel": (n, n // 4, 4),
        "out/kernel": (n // 4, 4, n),
        "head/kernel": (n, 9),
    }
    return {path: jnp.ones(shape) for path, shape in shapes.items()}


def test_heads_that_a_kernel_sums_over_are_not_left_out():
    axes = {"^q/": ((0,), (1, 2)), "^out/": ((1,), (2,))}
    with pytest.raises(ValueError, match=r"leaves out axis 0 of 'out/kernel'.* inputs"):
        optim.infer_scales(heads(8), heads(32), axes=axes)
    axes["^out/"] = ((0, 1), (2,))
    scales = optim.infer_scales(heads(8), heads(32), axes=axes)
    assert scales["out/kernel"].width_in == 4


def test_axes_that_count_copies_may_be_left_out():
    axes = {"^q/": ((0,), (1, 2)), "^out/": ((1,), (2,))}
    scales = optim.infer_scales(heads(8), heads(32), axes=axes, copies="^out/")
    assert scales["out/kernel"].in_axes == (1,)
    del axes["^q/"]
    with pytest.raises(ValueError, match=r"is a width, .*\(\(0,\), \(1, 2\)\)"):
        optim.infer_scales(heads(8), heads(32), axes=axes, copies="^out/")
