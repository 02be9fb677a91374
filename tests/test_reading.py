"""Roles, branches and depth are read from the program, not from names and shapes."""

import ast
import dataclasses
import functools
import pathlib
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core
from programs import (  # noqa: F401
    composed,
    convolutional,
    current,
    forms,
    generative,
    growth,
    harder,
    idioms,
    interactions,
    kernels,
    kit,
    layered,
    libraries,
    modules,
    plain,
    public,
    recent,
    sciences,
    sequences,
    spellings,
    streams,
    structured,
    transformers,
)

from mupax import optim, zoo
from mupax.optim.reading import models
from mupax.zoo import registry


@pytest.mark.filterwarnings("ignore:the forward pass does not call the layers")
@pytest.mark.parametrize("row", kit.ALL, ids=lambda row: row.name)
def test_a_program_says_what_its_parameters_do(row):
    base, target, inputs, call = row.models()
    with jax.numpy_rank_promotion("allow"):  # as users write
        if row.asks:
            with pytest.raises(ValueError, match=row.asks):
                optim.infer_scales(base, target, inputs=inputs, call=call)
            base, target, inputs, call = row.models(remedy=True)
        scales = optim.infer_scales(base, target, inputs=inputs, call=call)
    wrong = {}
    for path, scale in scales.items():
        letter = row.letter(path)
        roles = [kit.ROLES[x] for x in letter.rstrip("besam").split("|")]
        carries = {round(part.carried, 6) for part in scale.parts}
        factor = scale.carried if len(carries) > 1 else carries.pop()
        found = (scale.in_branch, scale.ends_branch, factor)
        end, carried = "e" in letter, round(row.carried(path), 6)
        place = (end or "b" in letter or "s" in letter, end, carried)
        ends = {segment.ends_branch for segment in scale.segments}
        assert (ends == {True, False}) == ("s" in letter), path
        more = {(part.on_stream, part.shared) for part in scale.parts}
        assert any(x for x, _ in more) == ("m" in letter), path
        assert (max(x for _, x in more) > 1) == ("a" in letter), path
        same = found == place if row.deep else found[2] == place[2]
        same = same and {part.role.value for part in scale.parts} <= {*roles}
        # Widths grow by 4 and depth by 3.
        ratios = {x for part in scale.parts for x in (part.width_in, part.width_out)}
        if scale.role not in roles or not same or ratios - {1, 4, 16, 64}:
            wrong[path] = (scale.role.value, *found, scale.origin)
    assert not wrong
    assert scales.depth == (3.0 if row.deep else 1.0)
    assert scales.parametrization.name.startswith(row.point)


@pytest.mark.parametrize("name", forms.ALL)
def test_layers_in_a_list_a_stack_and_a_loop_are_read_alike(name):
    found, inputs = {}, (kit.floats(2, 6, 5),)
    for form in forms.FORMS:
        base, target = (forms.ALL[name](form, *size) for size in ((8, 2), (32, 6)))
        try:
            with jax.numpy_rank_promotion("allow"):
                scales = optim.infer_scales(base, target, inputs=inputs)
        except ValueError as error:
            found[form] = str(error).split(" like ")[0]
            continue
        rows = ((re.sub(r"/\d+/", "/", path), x) for path, x in scales.items())
        found[form] = {(path, fact) for path, x in rows for fact in _facts(x)}
    assert all(each == found["list"] for each in found.values())


def swapped(run, params, state, inputs):
    """A model's program in which all sums and products have their operands swapped."""

    def of(value):
        if isinstance(value, core.ClosedJaxpr):
            return core.ClosedJaxpr(of(value.jaxpr), value.consts)
        if isinstance(value, core.Jaxpr):
            return value.replace(eqns=[equation(x) for x in value.eqns])
        return tuple(map(of, value)) if type(value) is tuple else value

    def equation(x):
        swaps = x.primitive.name in ("add", "max", "min", "mul")
        inner = {k: of(v) for k, v in x.params.items()}
        return x.replace(invars=x.invars[::-1] if swaps else x.invars, params=inner)

    arguments = list(params), list(state), *inputs
    traced, results = jax.make_jaxpr(run, return_shape=True)(*arguments)

    def call(*arguments):
        found = core.jaxpr_as_fun(of(traced))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return call


def batched(run, params, state, inputs):
    """A model's program for a batch of batches of inputs."""
    return lambda params, state, *inputs: jax.vmap(
        functools.partial(run, params, state)
    )(*(jnp.stack([x, x]) for x in inputs))


# A new program does not change which of the others are chosen.
OTHER_WORDS = [
    (other, row)
    for row in kit.ALL
    for i, other in enumerate((swapped, batched))
    if zlib.crc32(row.name.encode()) % 8 == i
    if not row.name.startswith("composed")
    if row.name != "more_experts_with_rows_by_expert"  # JAX has no `vmap` of ragged_dot
]


@pytest.mark.filterwarnings("ignore:the forward pass does not call the layers")
@pytest.mark.parametrize(
    ("other", "row"),
    OTHER_WORDS,
    ids=lambda x: getattr(x, "name", None) or x.__name__,
)
def test_the_same_program_in_other_words_has_the_same_scales(monkeypatch, other, row):
    base, target, inputs, call = row.models(remedy=True) if row.asks else row.models()
    found, made = [], models.Program
    for words in (lambda run, *_: run, other):
        monkeypatch.setattr(
            models, "Program", lambda run, *rest, to=words: made(to(run, *rest), *rest)
        )
        with jax.numpy_rank_promotion("allow"):
            scales = optim.infer_scales(base, target, inputs=inputs, call=call)
        found.append({path: _facts(scale) for path, scale in scales.items()})
    assert found[0] == found[1]


def halved(run, params, axis):
    """The same model, with each matrix stored in two halves along an axis."""

    def split(value):
        apart = value.ndim > 1 and value.shape[axis] % 2 == 0
        return tuple(jnp.split(value, 2, axis)) if apart else value

    def join(value):
        return jnp.concatenate(value, axis) if isinstance(value, tuple) else value

    def call(params, *inputs):
        is_tuple = {"is_leaf": lambda x: isinstance(x, tuple)}
        return run(jax.tree.map(join, params, **is_tuple), *inputs)

    return call, jax.tree.map(split, params)


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize(
    "name",
    """
    one_expert_of_each_token bayesian_layer_with_sampled_weights fft_of_units
    hyper_connections_of_two_streams softmax_gates_over_heads_whose_number_grows
    branches_that_end_in_a_kernel_of_softmax_values readout_with_weight_norm
    kernels_mixed_by_routers
    diffusion_transformer_with_attention bias_added_to_the_stream_after_the_branch
    gain_on_a_kernel_added_diagonal
    """.split(),  # noqa: SIM905
)
def test_kernels_stored_in_halves_are_read_as_whole_ones(name, axis):
    row = next(row for row in kit.ALL if row.name == name)
    base, target, inputs, call = row.models(remedy=True) if row.asks else row.models()
    models = (base, target), [halved(*model, axis) for model in (base, target)]
    with jax.numpy_rank_promotion("allow"):
        whole, halves = (
            optim.infer_scales(*each, inputs=inputs, call=call) for each in models
        )
    for path, scale in halves.items():
        known = whole[path if path in whole else path.rpartition("/")[0]]
        assert _facts(scale) <= _facts(known), path
    assert halves.depth == whole.depth


@pytest.mark.parametrize(
    "name",
    """
    experts_of_one_neuron_in_tables vectors_of_attention_from_differences_of_points
    norms_of_a_stream_that_starts_at_joined_kernels gated_mlp_with_spatial_units
    """.split(),  # noqa: SIM905
)
def test_a_base_of_one_block_says_the_same_as_one_of_two(name):
    row = next(row for row in kit.ALL if row.name == name)
    sizes = ((8, 1), (32, 3)), ((8, 2), (32, 6))
    pairs = [[row.make(*size) for size in pair] for pair in sizes]
    with jax.numpy_rank_promotion("allow"):
        one, two = (
            optim.infer_scales((small[2], small[0]), (run, p), inputs=inputs)
            for small, (p, inputs, run) in pairs
        )
    for path, scale in one.items():
        assert _facts(scale) == _facts(two[path]), path


def _facts(scale):
    names = "role width_in width_out depth in_branch on_stream shared ends_branch"
    return {
        (round(part.carried, 6), *(getattr(part, name) for name in names.split()))
        for part in scale.parts
    }


def test_a_division_by_the_width_is_no_multiplier_of_an_equal_depth():
    make = growth.linear_attention_that_is_divided_before_a_biased_kernel
    (base, _, small), (target, inputs, large) = make(8, 2), make(32, 8)
    with jax.numpy_rank_promotion("allow"):
        scales = optim.infer_scales((small, base), (large, target), inputs=inputs)
    assert {s.carried for s in scales.values()} == {1.0}
    ends = {path for path, scale in scales.items() if scale.ends_branch}
    assert ends == {f"b/{i}/{name}" for i in range(8) for name in ("o", "d", "bias")}


def test_what_reads_a_branch_beside_its_stream_undoes_the_multiplier():
    make = sciences.mesh_graph_network_with_residual_edges
    (base, _, small), (target, inputs, large) = make(8, 2), make(32, 6)
    with jax.numpy_rank_promotion("allow"):
        scales = optim.infer_scales((small, base), (large, target), inputs=inputs)
    of_nodes, of_edges = (part.carried for part in scales["b/0/n1"].parts)
    assert of_nodes == 1
    assert of_edges == pytest.approx(3)


def network(width, depth, *, attention=None, mlp=None, end=lambda y: y, at=None):
    """A transformer without norms; its branches have these constants."""
    block = {name: jnp.zeros((width, width)) for name in ("q", "k", "v", "o", "u", "d")}
    params = {
        "in": jnp.zeros((5, width)),
        "blocks": [block] * depth,
        "out": jnp.zeros((width, 3)),
    }

    def run(params, x):
        x = x @ params["in"]
        for i, w in enumerate(params["blocks"]):
            scores = (x @ w["q"]) @ (x @ w["k"]).swapaxes(-1, -2) / width
            y = jax.nn.softmax(scores) @ (x @ w["v"]) @ w["o"]
            x = x + (y if attention is None else y * attention)  # attention is added
            y = end(jax.nn.relu(x @ w["u"]) @ w["d"])
            x = x + (y if mlp is None or i == at else y * mlp)  # the mlp is added
        return x @ params["out"]

    return run, params


def line(comment):
    """Where this file has a comment, as messages name it."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if text.endswith(comment))
    return f"test_reading.py:{number}"


X = (kit.floats(2, 4, 5),)


def read(target, base=None, **options):
    base = network(8, 2) if base is None else base
    return optim.infer_scales(base, target, inputs=X, **options)


def _layered(depth, *, shared):
    """x + f(x) with a norm after each addition; all layers may share parameters."""
    keys = iter(jax.random.split(jax.random.key(0), 150))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    many = 1 if shared else depth
    blocks = [{"w": draw(32, 32), "v": draw(32, 32)} for _ in range(many)]
    blocks = [w | {"g": jnp.ones((1, 32)), "b": jnp.zeros((1, 32))} for w in blocks]
    params = {"in": draw(5, 32), "blocks": blocks, "out": draw(32, 3)}

    def run(params, x):
        x = x @ params["in"]
        for i in range(depth):
            w = params["blocks"][0 if shared else i]
            x = x + jnp.tanh(x @ w["w"]) @ w["v"] / depth
            mean, size = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
            x = (x - mean) / size * w["g"] + w["b"]
        return x @ params["out"]

    return run, params


def _step(model, names, rates):
    """How much a step of some parameters changes the results."""
    (run, params), (family, rate) = model, rates
    x = jax.random.normal(jax.random.key(1), (64, 5))
    grads = jax.grad(lambda p: (run(p, x) * jnp.sin(9 * x[:, :3])).mean())(params)

    def moved(path, value, grad):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = rate(name) if name[-1] in names else 0.0
        return value - 1e-3 * size * (jnp.sign(grad) if family == "adam" else grad)

    after = jax.tree_util.tree_map_with_path(moved, params, grads)
    return float(jnp.abs(run(after, x) - run(params, x)).mean())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", ["sgd", "adam"])
@pytest.mark.parametrize("names", ["wv", "gb"])
def test_layers_that_are_shared_or_on_the_stream_move_it_alike_at_each_depth(
    family, shared, names
):
    base, target = (_layered(depth, shared=shared) for depth in (8, 64))
    scales = optim.infer_scales(
        base, target, inputs=(kit.floats(64, 5),), parametrization="completep"
    )
    rows = optim.explain(scales, optimizer=family).rows
    change = _step(target, names, (family, lambda path: rows[path].learning_rate))
    assert change == pytest.approx(
        _step(base, names, (family, lambda path: 1.0)), rel=0.25
    )


@pytest.mark.parametrize(
    ("constants", "wrong"),
    [
        ({"attention": 4**-0.5}, "# attention is added"),
        ({"mlp": 0.25}, "# attention is added"),
        ({"attention": 0.25, "mlp": 0.5}, "is added"),
        ({"attention": 0.3, "mlp": 0.3}, "# attention is added"),
        ({"attention": 0.25, "mlp": 0.25, "at": 5}, "# the mlp is added"),
    ],
)
def test_a_wrong_constant_on_one_branch_is_an_error_with_its_line(constants, wrong):
    with pytest.raises(ValueError, match="residual branch") as error:
        read(network(32, 8, **constants))
    if wrong.startswith("#"):
        assert line(wrong) in str(error.value)


def test_branches_that_are_multiplied_carry_nothing_and_name_their_rule():
    for constant, name in ((0.5, "depth_mup"), (0.25, "completep")):
        scales = read(network(32, 8, attention=constant, mlp=constant))
        assert scales.parametrization.name.startswith(name)
        assert not any(s.ends_branch for s in scales.values())
    carried = {p for p, s in read(network(32, 8)).items() if s.ends_branch}
    assert carried == {f"blocks/{i}/{w}" for i in range(8) for w in "od"}


def test_a_branch_that_ends_in_a_nonlinearity_says_what_to_multiply():
    with pytest.raises(ValueError, match=r"multiply this branch by .*\(here 0.25\)"):
        read(network(32, 8, end=jnp.tanh))


def two_streams(width, encoder, decoder, power=0, shared=False):
    """A decoder that reads an encoder in each block; the base has 3 and 2 blocks."""
    p = {name: jnp.zeros((5, width)) for name in ("source", "text")}
    square = (width, width)
    p["e"] = [kit.zeros(u=square) for _ in range(1 if shared else encoder)]
    ends = {} if shared else {"o": square}
    p["d"] = [kit.zeros(k=square, **ends) for _ in range(decoder)]
    p["out"] = jnp.zeros((width, 3))
    shares = (encoder / 2) ** power, (decoder / 3) ** power

    def run(p, x):
        memory, x = x @ p["source"], x @ p["text"]
        for i in range(encoder):
            kernel = p["e"][0 if shared else i]["u"]
            memory = memory + jax.nn.relu(memory) @ kernel * shares[0]
        for w in p["d"]:
            scores = x @ (memory @ w["k"]).swapaxes(-1, -2) / width
            read = jax.nn.softmax(scores) @ memory
            kernel = w.get("o", p["e"][0]["u"])
            x = x + jax.nn.relu(read) @ kernel * shares[1]
        return x @ p["out"]

    return run, p


def test_boxes_that_start_from_an_encoder_have_a_depth_of_their_own():
    def boxes(width, encoder, decoder):
        p = kit.zeros(source=(5, width), start=(width, 4))
        p["e"] = kit.layers(encoder, u=(width, width))
        p["d"] = kit.layers(decoder, h=(4, width), box=(width, 4))

        def run(p, x):
            x = x @ p["source"]
            for w in p["e"]:
                x = x + jax.nn.relu(x) @ w["u"]
            box = x @ p["start"]
            for w in p["d"]:
                box = box + jax.nn.relu(x + box @ w["h"]) @ w["box"]
            return box

        return run, p

    scales = read(boxes(32, 4, 12), boxes(8, 2, 3), parametrization="completep")
    depth = {p: s.depth for p, s in scales.items() if s.in_branch}
    assert depth == {p: 2 if p.startswith("e/") else 4 for p in depth}
    assert len(depth) == 4 + 2 * 12


def test_each_stream_has_a_depth_of_its_own():
    base = two_streams(8, 2, 3)
    scales = read(two_streams(32, 4, 12), base, parametrization="depth_mup")
    depth = {p: s.depth for p, s in scales.items() if s.in_branch}
    assert depth == {p: 2 if p.startswith("e/") else 4 for p in depth}
    assert {p for p, s in scales.items() if s.ends_branch} == {
        p for p in depth if p.endswith(("u", "o"))
    }
    assert scales.depth == 4
    note = "deeper by different factors M: 2 (e/#/u); 4 (d/#/k, d/#/o)"
    assert note in str(optim.explain(scales))
    scales = read(two_streams(32, 4, 12, power=-0.5), base)
    assert scales.parametrization.name == "depth_mup"
    assert not any(s.ends_branch for s in scales.values())
    with pytest.raises(ValueError, match=r"needs 0.7071, i.e. \(depth"):
        read(two_streams(32, 4, 12, power=-1), base, parametrization="depth_mup")


def test_a_kernel_in_streams_that_get_deeper_by_different_factors_is_an_error():
    sizes = (32, 4, 12), (8, 2, 3)
    with pytest.raises(ValueError, match=r"'e/0/u' is in the .* 2 times as deep, and"):
        read(*(two_streams(*each, shared=True) for each in sizes))


@pytest.mark.parametrize(("power", "root"), [(0.5, 1), (1, 1), (0.5, 2)])
def test_an_average_of_stream_and_branch_must_not_forget_its_first_layers(power, root):
    def run(depth):
        params = network(8, depth)[1]
        share = depth**-power

        def averaged(params, x):
            x = x @ params["in"]
            for w in params["blocks"]:
                y = jax.nn.relu(x @ w["u"]) @ w["d"] + jax.nn.tanh(x @ w["q"]) @ w["o"]
                x = (1 - share**root) ** (1 / root) * x + share * y
            return x @ params["out"]

        params["blocks"] = [{k: w[k] for k in "qoud"} for w in params["blocks"]]
        return averaged, params

    if (power, root) == (0.5, 1):
        with pytest.raises(ValueError, match="let c be proportional to 1 / depth"):
            read(run(8), run(2))
    else:
        assert not any(s.ends_branch for s in read(run(8), run(2)).values())


def test_a_readout_that_the_call_leaves_out_is_a_warning_whose_remedy_works():
    class Net(nnx.Module):
        def __init__(self, width):
            self.width = width
            self.embed = nnx.Linear(5, width, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(width, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.relu(self.embed(x))

    base, target = (functools.partial(Net, width) for width in (8, 32))
    with pytest.warns(UserWarning, match=r"'head/kernel'\..* pass call=lambda"):
        assert read(target, base)["head/kernel"].carried == 1
    scales = read(target, base, call=lambda m, x: m.head(m(x)) / m.width)
    assert scales["head/kernel"].carried == 4


def test_an_nnx_module_that_is_no_pytree_says_what_to_pass():
    class Model(nnx.Module, pytree=False):
        def __init__(self, width, depth):
            layers = (nnx.Linear(5, 5, rngs=nnx.Rngs(0)) for _ in range(depth))
            self.layers = [*layers, nnx.Linear(5, width, rngs=nnx.Rngs(0))]

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = x + layer(x)
            return self.layers[-1](x)

    pairs, inputs, names = [], (kit.floats(2, 5),), {"nnx": nnx}
    for model in (Model(8, 2), Model(32, 3)):
        with pytest.raises(ValueError, match="pytree=False pass") as error:
            optim.infer_scales(model, model, inputs=inputs)
        pair, split = re.search(r"pass (\(.*\)), after (.*)", str(error.value)).groups()
        names["model"] = model  # pasted twice, one after the other
        exec(f"{split}; pair = {pair}", names)
        pairs.append(names["pair"])
    assert optim.infer_scales(*pairs, inputs=inputs)["layers/3/kernel"].role == "input"


def test_a_stack_of_convolutions_that_the_call_leaves_out_is_a_question():
    """Its kernel of four axes is none of a convolution over two."""

    class Net(nnx.Module):
        def __init__(self, n):
            def layer(rngs):
                return nnx.Conv(n, n, (3,), use_bias=False, rngs=rngs)

            self.layers = nnx.vmap(layer)(nnx.Rngs(0).split(2))
            self.unused = nnx.Conv(n, n, (3, 3), rngs=nnx.Rngs(0))
            self.readout = nnx.Linear(5, n, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.readout(x)

    with pytest.raises(ValueError, match="does not use 'layers/kernel'; pass"):
        optim.infer_scales(lambda: Net(8), lambda: Net(32), inputs=(kit.floats(2, 5),))


def skips(width, depth):
    """A residual network that reads the sum of all layers' skips."""
    block = {name: jnp.zeros((width, width)) for name in ("w", "skip")}
    params = {"in": jnp.zeros((5, width)), "blocks": [block] * depth}

    def run(params, x):
        x, found = x @ params["in"], []
        for w in params["blocks"]:
            found.append(jnp.tanh(x) @ w["skip"])
            x = x + jnp.tanh(x) @ w["w"]
        return sum(found[1:], found[0])  # skips are added

    return run, params


def test_a_base_with_one_layer_has_no_sum_over_layers():
    with pytest.raises(ValueError, match="at least two of these layers") as error:
        read(skips(32, 8), skips(8, 1))
    assert line("# skips are added") in str(error.value)
    carried = {p for p, s in read(skips(32, 8), skips(8, 2)).items() if s.ends_branch}
    assert carried == {f"blocks/{i}/{w}" for i in range(8) for w in ("w", "skip")}
    assert not any(s.depth != 1 for s in read(skips(32, 2), skips(8, 2)).values())


def normalizer_free(width, depth):
    """Layers that divide by the size that the stream has there, as in NFNets."""
    block = {name: jnp.zeros((width, width)) for name in ("u", "d")}
    params = {"in": jnp.zeros((5, width)), "blocks": [block] * depth}

    def run(params, x):
        x = x @ params["in"]
        for i, w in enumerate(params["blocks"]):
            y = jax.nn.relu(x) * (1 + 0.04 * i) ** -0.5  # of this layer
            x = x + 0.2 * (jax.nn.relu(y @ w["u"]) @ w["d"])
        return x

    return run, params


def test_constants_of_layers_are_no_question_if_only_depth_grows():
    scales = read(normalizer_free(8, 4), normalizer_free(8, 1))
    ends = {p for p, s in scales.items() if s.ends_branch}
    assert ends == {f"blocks/{i}/d" for i in range(4)}
    with pytest.raises(ValueError, match="at least two of these layers") as error:
        read(normalizer_free(32, 4), normalizer_free(8, 1))
    assert line("# of this layer") in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "attention_divided_by_the_number_of_the_layer",
        "norms_divided_by_the_root_of_the_number_of_the_layer",
        "differential_attention_with_a_constant_of_each_layer",
    ],
)
def test_a_base_with_one_layer_does_not_show_constants_of_layer_numbers(name):
    [row] = [row for row in kit.ALL if row.name == name]
    target = row.models()[1]
    params, inputs, call = row.make(8, 1)
    said = pytest.raises(ValueError, match=r"recent.py:\d+ differ between the layers")
    with jax.numpy_rank_promotion("allow"), said:  # as users write
        optim.infer_scales((call, params), target, inputs=inputs)


@pytest.mark.parametrize(
    "name",
    [
        "reversible_network_of_two_streams",
        "encoder_of_fixed_depth_that_each_layer_adds",
        "latents_that_read_a_context_in_each_block",
    ],
)
def test_a_base_of_one_block_lacks_additions_that_others_show(name):
    [row] = [row for row in kit.ALL if row.name == name]
    (small, inputs, call), (large, _, forward) = row.make(8, 1), row.make(32, 4)
    said = pytest.raises(ValueError, match="a base with at least two blocks of each")
    with jax.numpy_rank_promotion("allow"), said:  # as users write
        optim.infer_scales((call, small), (forward, large), inputs=inputs)


def test_constants_of_layers_with_another_mean_at_each_depth_are_an_error():
    [row] = [x for x in kit.ALL if x.name == "constants_of_each_layer_in_a_scan"]
    small, inputs, call = row.make(8, 3)  # by turns 0.9 / 3 and 1.1 / 3
    large, _, forward = row.make(32, 5)
    with pytest.raises(ValueError, match=r"constants at harder.py:\d+, on the resid"):
        optim.infer_scales((call, small), (forward, large), inputs=inputs)


def test_a_constant_that_changes_while_depth_stays_is_an_error():
    with pytest.raises(ValueError, match="same depth; use the same constant"):
        read(network(32, 2, attention=0.7, mlp=0.7))


def test_base_and_target_the_other_way_around_are_an_error():
    with pytest.raises(ValueError, match="the base comes first: swap the two"):
        read(network(8, 2), network(32, 2))


def test_depth_without_residual_branches_is_refused_or_named():
    def stack(width, depth):
        params = {"in": jnp.zeros((5, width)), "out": jnp.zeros((width, 3))}
        params["hidden"] = [jnp.zeros((width, width)) for _ in range(depth)]

        def run(params, x):
            x = x @ params["in"]
            for w in params["hidden"]:
                x = jax.nn.relu(x) @ w
            return x @ params["out"]

        return run, params

    def scanned(width, depth):
        shape = (depth, width, width)
        params = {"in": jnp.zeros((5, width)), "hidden": jnp.zeros(shape)}

        def run(params, x):
            layer = lambda x, w: (jax.nn.relu(x @ w), None)  # noqa: E731
            return jax.lax.scan(layer, x @ params["in"], params["hidden"])[0]

        return run, params

    for build in (stack, scanned):
        with pytest.raises(ValueError, match="parametrization='mup'"):
            read(build(8, 6), build(8, 2))
    scales = read(stack(8, 6), stack(8, 2), parametrization="relu_mlp")
    assert scales.depth == 3


def test_queries_carry_the_logits_of_an_unscaled_attention():
    class Model(nnx.Module):
        def __init__(self, width):
            self.into = nnx.Linear(8, width, rngs=nnx.Rngs(0))
            self.attention = nnx.MultiHeadAttention(
                2, width, decode=False, rngs=nnx.Rngs(0)
            )

        def __call__(self, x):
            return self.attention(self.into(x))

    scales = optim.infer_scales(
        lambda: Model(8), lambda: Model(32), inputs=(kit.floats(1, 4, 8),)
    )
    carried = {p: s.carried for p, s in scales.items() if s.carried != 1}
    assert carried == {f"attention/query/{w}": 0.5 for w in ("kernel", "bias")}


def test_a_large_model_is_read_without_memory():
    def decoder(width, depth):
        block = {
            name: jax.ShapeDtypeStruct((depth, *shape), jnp.bfloat16)
            for name, shape in {
                "q": (width, width), "k": (width, 1024), "v": (width, 1024),
                "o": (width, width), "up": (width, 14336), "gate": (width, 14336),
                "down": (14336, width),
            }.items()
        }  # fmt: skip
        into = jax.ShapeDtypeStruct((128256, width), jnp.bfloat16)
        out = jax.ShapeDtypeStruct((width, 128256), jnp.bfloat16)
        return {"in": into, "blocks": block, "out": out}

    def forward(params, tokens):
        def block(x, w):
            b, t, n = x.shape
            q = (x @ w["q"]).reshape(b, t, -1, 128)
            k, v = ((x @ w[name]).reshape(b, t, 8, 128) for name in "kv")
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(b, t, n) @ w["o"]
            return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

        x, _ = jax.lax.scan(block, params["in"][tokens], params["blocks"])
        return x @ params["out"]

    scales = optim.infer_scales(
        decoder(1024, 8), decoder(4096, 32), inputs=(kit.tokens(1, 64),), call=forward
    )
    assert scales["blocks/up"].role == "output"  # 14,336 outputs in both
    assert scales["blocks/q"].role == "hidden"
    assert scales.depth == 4


# Options of the zoo that are sizes: the program is the same.
SIZES = (
    *("width", "depth", "heads", "input_shape", "out_features", "context", "rows"),
    *("vocab_size", "rope_theta", "norm_eps", "blocks", "rows_width", "head"),
    *("mlp_ratio", "patch_size", "queries_per_key", "attention_ratio", "head_dim"),
    "groups",
)
CONVOLUTIONAL = ("ResNet", "ConvNeXt", "EfficientNet")


def kinds_of_models():
    """One model for each set of options of the zoo, besides sizes."""
    kinds = {}
    for name in zoo.list_models():
        family, options = registry.options_of(name)
        rest = sorted((k, repr(v)) for k, v in options.items() if k not in SIZES)
        kinds.setdefault((family, *rest), name)
    return list(kinds.values())


def two_sizes(name):
    """Options of a small base and a target, and the input."""
    family, options = registry.options_of(name)
    kind, width = family.__name__, options.get("width", 32)
    depths, more, x = (2, 6), {}, kit.floats(2, 64)
    if kind == "MLP":
        depths = 4, 4
    if kind == "CNN":
        depths, x = (4, 12), kit.floats(2, 32, 32, 3)
    if kind in CONVOLUTIONAL:
        # A row of one block has no stack of further blocks at depth 1.
        depths = (2, 4) if kind == "EfficientNet" else (1, 2)
        x = kit.floats(2, 64, 64, 3)
        if "blocks" in options:
            more["blocks"] = (2,) * len(options["blocks"])
    if kind in ("ViT", "GPT", "Llama"):
        width, more = 64, {"head_dim": 16}
        more |= {"mlp_ratio": 2.0} if "mlp_ratio" in options else {}
        if kind == "ViT":
            side = 4 * options.get("patch_size", 4)
            more["input_shape"], x = (side, side, 3), kit.floats(2, side, side, 3)
        else:
            more["context"], x = 16, kit.tokens(2, 16)
    more |= {"base_width": width, "base_depth": depths[0]}
    pairs = zip((1, 2), depths, strict=True)
    return *({"width": k * width, "depth": d, **more} for k, d in pairs), x


@pytest.mark.parametrize("name", kinds_of_models())
def test_the_program_of_a_zoo_model_says_what_its_axis_names_say(name):
    small, large, x = two_sizes(name)
    build = lambda options: zoo.create(name, rngs=nnx.Rngs(0), **options)  # noqa: E731
    named = []
    jax.eval_shape(lambda: named.append(zoo.scales(build(large))))
    read = optim.infer_scales(lambda: build(small), lambda: build(large), inputs=(x,))
    for path, scale in named[0].items():
        same = dataclasses.replace(read[path], origin=scale.origin)
        assert same == scale


def two_layers(call, **shapes):
    """A pair of (forward pass, parameters), as a function of the width."""
    return lambda n: (
        lambda p, *inputs: call(p, n, *inputs),
        {
            k: jnp.zeros([n if s == "n" else s for s in shape])
            for k, shape in shapes.items()
        },
    )


def carried(make, inputs):
    scales = optim.infer_scales(make(8), make(32), inputs=inputs)
    return {path: s.carried for path, s in scales.items() if s.carried != 1}


MLP = {"i": (5, "n"), "h": ("n", "n"), "o": ("n", 3)}
TIED = {"e": (7, "n"), "g": ("n",)}


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def rms(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def mlp(hidden=1.0, weight=1.0, out=1.0):
    def call(p, n, x):
        h = jnp.tanh(x @ p["i"]) @ (p["h"] * n**-weight) / n**hidden
        return (jnp.tanh(h) @ p["o"]) / n**out

    return two_layers(call, **MLP)


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (mlp(0.5, 0, 0), {"h": 2}),
        (mlp(0, 0.5, 0), {"h": 2}),
        (mlp(0, 0, 1), {"o": 4}),
        (mlp(0.5, 0, 0.5), {"h": 2, "o": 2}),
        (
            two_layers(
                lambda p, n, x: (
                    (jnp.tanh(x @ p["i"]) @ p["o"] + p["b"][None]) * (8 / n)
                ),
                i=(5, "n"),
                o=("n", 3),
                b=(3,),
            ),
            {"o": 4, "b": 4},
        ),
    ],
)
def test_constants_beside_a_layer_are_forward_multipliers(make, right):
    assert carried(make, (kit.floats(2, 5),)) == right


def tied(lookup=0.0, readout=0.0):
    def call(p, n, x):
        h = rms(p["e"][x] * n**lookup) * p["g"][None, None]
        return h @ (p["e"].T / n**readout)

    return two_layers(call, **TIED)


def test_the_last_gain_carries_what_a_tied_readout_lacks():
    x = (kit.tokens(2, 4),)
    assert carried(tied(), x) == {"g": 0.25}
    assert carried(tied(readout=1), x) == {}
    assert carried(tied(lookup=0.5), x) == {"e": 0.5, "g": 0.5}
    autoencoder = two_layers(
        lambda p, n, x: jnp.tanh(x @ p["w"]) @ p["w"].T, w=(5, "n")
    )
    with pytest.raises(ValueError, match=r"multiply them by 0\.25"):
        carried(autoencoder, (kit.floats(2, 5),))


def attention(function, power, *, fused=False):
    def call(p, n, x):
        h = x @ p["i"]
        q, k, v = jnp.split(h @ p["w"], 3, -1) if fused else (h @ p[x] for x in "qkv")
        scores = function(q) @ function(k).swapaxes(-1, -2) / n**power
        return jax.nn.softmax(scores) @ v @ p["o"]

    shapes = {"i": (5, "n"), "o": ("n", 3), **dict.fromkeys("qkv", ("n", "n"))}
    if fused:
        shapes = {"i": (5, "n"), "o": ("n", 3)}
        return lambda n: (
            two_layers(call, **shapes)(n)[0],
            two_layers(call, **shapes)(n)[1] | {"w": jnp.zeros((n, 3 * n))},
        )
    return two_layers(call, **shapes)


def test_logits_that_nothing_can_carry_are_an_error():
    same = lambda x: x  # noqa: E731
    assert carried(attention(same, 0.5), X) == {"q": 0.5}
    assert carried(attention(same, 0), X) == {"q": 0.25}
    fused = attention(same, 0.5, fused=True)
    scales = optim.infer_scales(fused(8), fused(32), inputs=X)
    assert [s.carried for s in scales["w"].segments] == [0.5, 1, 1]
    assert carried(attention(unit, 0), X) == {}  # cosines do not grow
    assert carried(attention(jax.nn.relu, 1), X) == {}
    assert carried(attention(jax.nn.relu, 0), X) == {"q": 0.25}
    for wrong in (
        attention(jnp.tanh, 0),
        attention(rms, 0),
        attention(rms, 0.5),
    ):
        with pytest.raises(ValueError, match=r"'exp' at test_reading.*by 0\.(25|5) "):
            carried(wrong, X)


def test_logits_of_a_layer_that_the_base_has_none_like_are_an_error():
    """Its heads are cut elsewhere, so that their size in the base is not known."""

    def model(n, depth):
        p = {"i": jnp.zeros((5, n)), "o": jnp.zeros((n, 3))}
        p["b"] = kit.layers(depth, **dict.fromkeys("qkvw", (n, n)))

        def run(p, x):
            x = x @ p["i"]
            for i, w in enumerate(p["b"]):
                q, k, v = (jnp.tanh(x) @ w[c] for c in "qkv")
                if i < 2:
                    q, k, v = (a.reshape(2, 4, 2, -1) for a in (q, k, v))
                else:
                    q, k, v = (a.reshape(2, 4, 2, -1) for a in (q, k, v))  # others
                scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
                y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
                x = x + y.reshape(x.shape) @ w["w"]
            return x @ p["o"]

        return run, p

    assert optim.infer_scales(model(8, 2), model(32, 2), inputs=X).depth == 1
    with pytest.raises(ValueError, match="a base with layers of each kind"):
        optim.infer_scales(model(8, 2), model(32, 4), inputs=X)


def test_one_factor_carries_for_all_sums_that_it_enters():
    def shared(one, other, far=False):
        def call(p, n, x):
            h = x @ p["i"]
            q, k, v = (h @ p[x] for x in "qkv")
            near = q @ k.swapaxes(-1, -2) / n**one
            wide = q @ (h if far else k).swapaxes(-1, -2) / n**other
            return (jax.nn.softmax(near) + jax.nn.softmax(wide)) @ v @ p["o"]

        shapes = {"i": (5, "n"), "o": ("n", 3), **dict.fromkeys("qkv", ("n", "n"))}
        return two_layers(call, **shapes)

    assert carried(shared(0.5, 0.5), X) == {"q": 0.5}
    assert carried(shared(0.5, 1, far=True), X) == {"k": 0.5}
    for other in (0, 1):
        with pytest.raises(ValueError, match=r"'exp' at test_reading.*by (0\.5|2) "):
            carried(shared(0.5, other), X)


def test_a_wrong_array_of_constants_on_a_branch_is_an_error():
    def model(depth, factor):
        block = {"u": jnp.zeros((8, 8)), "d": jnp.zeros((8, 8))}
        params = {"i": jnp.zeros((5, 8)), "b": [block] * depth}

        def run(params, x):
            x = x @ params["i"]
            for w in params["b"]:
                each = factor * jnp.where(jnp.arange(8) % 2, 0.5, 1.5)
                x = x + each[None] * (jnp.tanh(x @ w["u"]) @ w["d"])  # each channel
            return x

        return run, params

    x = (kit.floats(2, 5),)
    scales = optim.infer_scales(model(2, 1.0), model(8, 0.25), inputs=x)
    assert not any(s.ends_branch for s in scales.values())
    with pytest.raises(ValueError, match=r"0\.3 times that of the base") as error:
        optim.infer_scales(model(2, 1.0), model(8, 0.3), inputs=x)
    assert line("# each channel") in str(error.value)


def test_a_multiplier_is_known_however_it_is_written():
    class Model(nnx.Module):
        def __init__(self, width, depth):
            rngs = nnx.Rngs(0)
            self.a = nnx.Variable(jnp.asarray(depth**-0.5))
            self.i = nnx.Linear(5, width, rngs=rngs)
            self.b = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(depth))

        def __call__(self, x):
            x = self.i(x)
            for block in self.b:
                x = x + self.a[...] * block(nnx.relu(x))
            return x

    x = (kit.floats(2, 5),)
    scales = optim.infer_scales(Model(8, 2), Model(8, 8), inputs=x)
    assert not any(s.ends_branch for s in scales.values())
    with pytest.raises(ValueError, match="value is not known"):
        optim.infer_scales(lambda: Model(8, 2), lambda: Model(8, 8), inputs=x)

    def scanned(depth, write):
        params = {"i": jnp.zeros((5, 8)), "u": jnp.zeros((depth, 8, 8))}

        def run(params, x):
            each = write(depth, depth**-0.5)
            block = lambda x, w: (x + w[1] * (jnp.tanh(x) @ w[0]), None)  # noqa: E731
            return jax.lax.scan(block, x @ params["i"], (params["u"], each))[0]

        return run, params

    for write in (jnp.full, lambda *a: np.full(*a).astype(np.float32)):
        scales = optim.infer_scales(scanned(2, write), scanned(8, write), inputs=x)
        assert not any(s.ends_branch for s in scales.values())


def test_a_shallower_target_is_an_error():
    with pytest.raises(ValueError, match="the base comes first"):
        read(network(8, 2), network(8, 6))


def test_a_stack_of_more_layers_than_jnp_joins_in_one_step_is_one_sum():
    base, target = (streams.stream_as_the_sum_of_a_stack(*x) for x in ((8, 2), (8, 36)))
    models = [(call, params) for params, _, call in (base, target)]
    scales = optim.infer_scales(*models, inputs=base[1])
    assert scales.depth == 18
    assert scales["b/35/d"].ends_branch


def test_a_value_on_many_paths_is_followed_once():
    """Without a memory, 2^40 paths lead through these norms and sums."""

    def run(params, x):
        x = x @ params["i"]
        y = jnp.tanh(x) @ params["w"]
        for _ in range(40):
            y = y + 0.5 * y
        x = x + y
        for _ in range(40):
            x = jnp.tanh(x - x.mean(-1, keepdims=True))
            x = x - x.mean(-1, keepdims=True)
        for _ in range(40):
            x = x - x.mean(-1, keepdims=True)
        return jax.nn.softmax(x @ x.swapaxes(-1, -2) / x.shape[-1]) @ x

    small, large = (kit.zeros(i=(5, n), w=(n, n)) for n in (8, 32))
    optim.infer_scales(small, large, inputs=X, call=run)


def test_a_loop_over_an_operation_that_vmap_does_not_know_is_read():
    double = core.Primitive("double")
    double.def_abstract_eval(lambda x: x)

    def call(p, x):
        h = jnp.tanh(x @ p["in"])
        return jax.lax.map(lambda w: double.bind(h @ w), p["w"]).sum(0) @ p["out"]

    base, target = (
        kit.zeros(**{"in": (5, n), "out": (n, 3)}, w=(4, n, n)) for n in (8, 32)
    )
    scales = optim.infer_scales(
        (call, base), (call, target), inputs=(kit.floats(2, 5),)
    )
    assert scales["w"].role == "hidden"


def test_parameters_in_a_tuple_are_all_read():
    def net(n):
        return (lambda p, x: jnp.tanh(x @ p[0]) @ p[1]), (
            kit.floats(5, n),
            kit.floats(n, 3),
        )

    scales = optim.infer_scales(net(8), net(32), inputs=X)
    assert {path: s.role.value for path, s in scales.items()} == {
        "0": "input",
        "1": "output",
    }


def test_a_number_that_grows_before_a_nonlinearity_is_an_error_with_remedies():
    """Nothing else reads what stands between two nonlinearities."""
    small, large = (kit.zeros(i=(5, n), o=(n, 3)) for n in (8, 32))
    read = functools.partial(optim.infer_scales, small, large, inputs=X)

    def run(params, x, power=1):
        h = jnp.tanh(x @ params["i"]) * (len(params["o"]) / 8)
        return jnp.sin(h * (len(params["o"]) / 8) ** -power) @ params["o"]

    with pytest.raises(ValueError, match=r"'sin' at test_reading.*by 0\.25") as error:
        read(call=functools.partial(run, power=0))
    axes = re.search(r"axes=(\{.*?\})", str(error.value))
    assert read(call=run) == read(
        call=functools.partial(run, power=0), axes=ast.literal_eval(axes[1])
    )


def circulant(p, x):
    n = len(p["w"])
    places = (jnp.arange(n)[:, None] - jnp.arange(n)[None]) % n
    return jnp.tanh(x @ p["i"]) @ p["w"][places] @ p["o"]


def tensor_train(p, x):
    w = jnp.einsum("iar,rjc->ijac", p["w"], p["u"]).reshape(len(p["u"]), -1)
    return jnp.tanh(jnp.tanh(x @ p["i"]) @ w) @ p["o"]


@pytest.mark.parametrize(
    ("call", "shapes", "role"),
    [
        (circulant, lambda n: {"w": (n,)}, "vector"),
        (tensor_train, lambda n: {"w": (2, 2, n), "u": (n, n // 2, n // 2)}, "input"),
    ],
)
def test_a_kernel_whose_axes_are_asked_about_has_a_remedy_that_works(
    call, shapes, role
):
    small, large = (kit.zeros(i=(5, n), o=(n, 3), **shapes(n)) for n in (8, 32))
    read = functools.partial(
        optim.infer_scales, small, large, inputs=(kit.floats(2, 5),), call=call
    )
    axes: dict[str, str] = {}
    for _ in shapes(8):
        with pytest.raises(ValueError, match=r"test_reading\.py:\d+") as error:
            read(axes=axes)
        remedy = re.search(r"axes=(\{.*?\})", str(error.value))
        axes |= ast.literal_eval(remedy[1])
    assert read(axes=axes)["w"].role == role


def test_a_sum_is_the_same_after_python_has_specialized_its_code():
    """After some calls, Python 3.11 runs another instruction for the same `sum`."""

    def members(number):
        return {"w": [jnp.zeros((5, 3)) for _ in range(number)]}

    def call(params, x):
        return sum(jax.nn.relu(x) @ w for w in params["w"])

    every = [read(members(6), members(2), call=call) for _ in range(12)]
    assert {scale.width_in for scales in every for scale in scales.values()} == {3.0}


def mean_square(results):
    return sum(jnp.square(x - 1.0).mean() for x in jax.tree.leaves(results))


def with_gradients(run):
    return lambda p, *x: jax.value_and_grad(lambda p: mean_square(run(p, *x)))(p)


def with_a_step(run):
    def step(params, *x):
        value, grads = with_gradients(run)(params, *x)
        updates, state = ADAM.update(grads, ADAM.init(params), params)
        return optax.apply_updates(params, updates), state, value

    return step


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def on_two_batches(run):
    return lambda p, *x: (
        mean_square(run(p, *x)) + mean_square(run(p, *(jnp.flip(y, 0) for y in x)))
    )


def on_transposed_kernels(run):
    return lambda p, *x: run(jax.tree.map(jnp.transpose, p), *x)


def on_many_batches(run):
    return lambda p, *x: jax.vmap(run, (None, *[0] * len(x)))(p, *x)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (with_gradients, "fused_qkv_scanned"),
        (with_gradients, "nfnet_with_scaled_weight_standardization"),
        (with_gradients, "wavenet_in_a_scan"),
        (with_gradients, "mixture_of_depths"),
        (with_gradients, "stylegan_with_modulated_convolutions"),
        (with_a_step, "gpt_oss_with_sinks_and_interleaved_gates"),
        (with_a_step, "tied_embedding_times_the_root_of_the_width"),
        (on_two_batches, "recurrent_depth_with_an_adapter"),
        (on_two_batches, "conditioned_unet_of_residual_blocks"),
        (on_two_batches, "bert_with_post_norm_and_tied_decoder"),
        (on_two_batches, "attention_divided_by_the_number_of_the_layer"),
        (on_two_batches, "differential_attention_with_a_constant_of_each_layer"),
        (on_many_batches, "bayesian_layer_with_sampled_weights"),
        (on_many_batches, "inner_steps_on_the_kernels_of_a_small_network"),
        (on_many_batches, "latents_that_read_a_context_in_each_block"),
        (on_transposed_kernels, "forces_of_a_residual_energy"),
    ],
)
def test_how_a_loss_calls_the_model_changes_nothing(wrap, name):
    row = next(row for row in kit.ALL if row.name == name)
    base, target, inputs, _ = row.models()
    more = inputs
    stored = jnp.transpose if wrap is on_transposed_kernels else lambda x: x
    if wrap is on_many_batches:
        more = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in inputs]
    with jax.numpy_rank_promotion("allow"):
        plain = optim.infer_scales(base, target, inputs=inputs)
        models = [(wrap(run), jax.tree.map(stored, p)) for run, p in (base, target)]
        scales = optim.infer_scales(*models, inputs=tuple(more))
    one, other = (
        {
            k: (v.role, v.depth, v.carried, v.in_branch, v.ends_branch, v.shared)
            for k, v in s.items()
        }
        for s in (plain, scales)
    )
    assert one == other


def test_operations_of_a_line_are_told_apart_where_python_keeps_no_columns():
    command = [sys.executable, "-X", "no_debug_ranges", "-c", _TWO_BRANCHES]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["3.0", "True"], ended.stderr


_TWO_BRANCHES = """
import jax, jax.numpy as jnp
from mupax import optim

def call(p, x):
    x = x @ p["in"]
    for w in p["b"]:
        x = x + jnp.tanh(x @ w["u"]) @ w["d"] + w["c"] + jnp.tanh(x @ w["e"]) @ w["f"]
    return x @ p["out"]

def make(n, depth):
    block = {k: jnp.zeros((n, n)) for k in "udef"} | {"c": jnp.zeros(n)}
    return {"in": jnp.zeros((5, n)), "b": [block] * depth, "out": jnp.zeros((n, 3))}

x = jax.ShapeDtypeStruct((2, 5), jnp.float32)
scales = optim.infer_scales(make(8, 2), make(32, 6), call=call, inputs=(x,))
print(scales.depth, scales["b/0/c"].ends_branch)
"""
