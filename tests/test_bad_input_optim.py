"""Every wrong setup that would train anyway is refused, with a remedy."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from mupax import optim


def shapes(tree):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def mlp(n):
    return shapes({"embed": (5, n), "hidden": (n, n), "head": (n, 3)})


def deep(n, depth):
    return shapes({"embed": (5, n), "blocks": (depth, n, n), "head": (n, 3)})


def listed(n, depth):
    return shapes({"embed": (5, n), "blocks": [(n, n)] * depth, "head": (n, 3)})


def params(n=32):
    return jax.tree.map(lambda s: np.ones(s.shape, s.dtype), mlp(n))


MATRICES = {".": "i -> o"}
LAYERS = {"kernel": "i -> o", "bias": "d"}
BLOCKS = optim.declare({"blocks": "layers: i -> o", ".": "i -> o"}, branches="blocks")
SCALES = optim.infer_scales(mlp(8), mlp(32), axes=MATRICES)
DEEP = optim.infer_scales(deep(8, 2), deep(32, 6), axes=BLOCKS)


def refuses(*parts):
    """Expects a ValueError whose message holds each of these parts."""
    pattern = "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(ValueError, match=f"(?s){pattern}")


# --- base and target ---


def infer(base, target, **options):
    return optim.infer_scales(base, target, **{"axes": MATRICES, **options})


def test_base_equal_to_target():
    with refuses("have the same widths", "smaller width", "delta="):
        infer(mlp(8), mlp(8))
    with refuses("have the same widths"):
        infer(mlp(8), mlp(8), delta=mlp(8))
    more = {"embed": jnp.zeros((20, 8))}  # a larger vocabulary alone
    assert set(optim.explain(infer(mlp(8), mlp(8) | more)).rows) == set(mlp(8))


def test_a_dimension_shrinks():
    with refuses("'embed'", "shrinks from 32", "to 8", "swap", "fractional=True"):
        infer(mlp(32), mlp(8))
    assert infer(mlp(32), mlp(8), fractional=True)["hidden"].width_in == 1 / 4


def test_a_dimension_does_not_divide():
    with refuses("'embed'", "8 does not divide 12", "fractional=True"):
        infer(mlp(8), mlp(12))


def test_a_dimension_grows_that_delta_keeps():
    delta = shapes({"embed": (5, 8), "hidden": (8, 8), "head": (8, 6)})
    with refuses("'embed'", "not in delta", "every width"):
        infer(mlp(8), mlp(16), delta=delta)


def test_a_parameter_that_the_base_lacks():
    more = {**mlp(32), "extra": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
    with refuses("base has no parameter", "'extra'", "same code"):
        infer(mlp(8), more)


def test_a_parameter_of_another_rank():
    other = {**mlp(32), "hidden": jax.ShapeDtypeStruct((2, 32, 32), jnp.float32)}
    with refuses("'hidden'", "(2, 32, 32)", "2 axes", "its 3 axes"):
        infer(mlp(8), other)


def test_a_linen_module_is_not_its_variables():
    with refuses("the base is a Linen module", "lambda: model.init(key, x)"):
        infer(linen.Dense(4), linen.Dense(8))


def test_a_model_without_parameters():
    with refuses("the base has no floating-point parameters", "a function"):
        infer({"n": 3}, mlp(8))


def test_a_class_in_place_of_a_function_that_builds_a_model():
    with refuses("the base", "needs arguments (in_features, out_features, rngs)"):
        infer(nnx.Linear, nnx.Linear)


def test_the_state_of_an_optimizer_beside_the_parameters():
    def state(n):
        return TrainState.create(
            apply_fn=None, params={"w": jnp.zeros((3, n))}, tx=optax.adam(0.1)
        )

    with refuses("the base is a TrainState", "pass its parameters, state.params"):
        infer(jax.eval_shape(lambda: state(4)), state(8))


# --- declarations ---


def test_nothing_that_tells_the_axes():
    with refuses("'embed'", "inputs=(x,)", "jax.ShapeDtypeStruct"):
        optim.infer_scales(mlp(8), mlp(32))
    with refuses("'head'", "inputs=(x,)", "or declare them in axes"):
        infer(mlp(8), mlp(32), axes={"embed|hidden": "i -> o"})
    with refuses("call=", "inputs=(x,)"):
        infer(mlp(8), mlp(32), call=lambda p, x: x)


def test_a_pattern_that_decides_for_no_parameter():
    with refuses("axes='nothing'", "matches no parameter", "'embed'"):
        infer(mlp(8), mlp(32), axes={"nothing": "d", **MATRICES})
    with refuses("axes='head'", "decides for no parameter"):
        infer(mlp(8), mlp(32), axes={**MATRICES, "head": "i -> o"})
    with refuses("branches='block_'", "matches no parameter"):
        axes = optim.declare(MATRICES, branches="block_")
        infer(mlp(8), mlp(32), axes=axes)


@pytest.mark.parametrize(
    "text", ["i -> o -> p", "i => o", "a: b: c: d", ": d", 3, ((0,), (1,))]
)
def test_a_declaration_that_cannot_be_read(text):
    with refuses("axes={'.'", "cannot be read", "'in -> out'", "'vocab: d'"):
        infer(mlp(8), mlp(32), axes={".": text})


def test_a_pattern_that_is_no_regular_expression():
    with refuses("axes='('", "is not a regular expression"):
        infer(mlp(8), mlp(32), axes={"(": "d"})


def test_layers_that_grow_by_two_ratios():
    base = shapes({"blocks": [(8, 8)] * 2, "more": [(8, 8)] * 2})
    target = shapes({"blocks": [(8, 8)] * 4, "more": [(8, 8)] * 6})
    with refuses("'blocks/#'", "2x", "'more/#'", "3x", "inputs=(x,)"):
        infer(base, target)


def test_a_declaration_against_the_program():
    def call(params, x):
        return x @ params["embed"] @ params["hidden"] @ params["head"]

    given = {"inputs": (jnp.ones((1, 5)),), "call": call}
    wrong = {"hidden": "o <- i"}
    with refuses("'hidden'", "sum over axes (1,)", "test_bad_input_optim.py", "(0,)"):
        infer(mlp(8), mlp(32), axes=wrong, **given)
    sure = infer(mlp(8), mlp(32), axes={"hidden": "o <- i!"}, **given)
    assert sure["hidden"].in_axes == (1,)
    assert infer(mlp(8), mlp(32), axes=None, **given)["hidden"].in_axes == (0,)


def test_parameters_that_the_forward_pass_does_not_use_are_named_together():
    def model(n):
        return mlp(n) | shapes({f"unused{i}": (n, n) for i in range(5)})

    def call(params, x):
        return x @ params["embed"] @ params["hidden"] @ params["head"]

    given = {"inputs": (jnp.ones((1, 5)),), "call": call}
    told = {r"^unused\d+$": "in -> out"}
    wanted = "does not use 'unused0', 'unused1', 'unused2', 'unused3' and 1 more", "{"
    with refuses(*wanted, *(f"r'{k}': '{v}'" for k, v in told.items()), "}"):
        infer(model(8), model(32), axes=None, **given)
    scales = infer(model(8), model(32), axes=told, **given)
    assert scales["unused4"].role.value == "hidden"


def test_a_rule_for_branches_on_a_model_without():
    axes = {"blocks": "layers: i -> o", ".": "i -> o"}
    scales = infer(deep(8, 2), deep(32, 6), axes=axes)
    with refuses("'depth_mup'", "residual branches", "inputs=(x,)", "'mup'"):
        optim.adam(1e-3, scales.for_parametrization("depth_mup"))


def test_a_rule_for_no_branches_on_a_model_with():
    with refuses("'relu_mlp'", "'blocks'", "depth_mup"):
        optim.adam(1e-3, DEEP.for_parametrization("relu_mlp"))


# --- the optimizer's parameters ---

MAKERS = {
    "scale": lambda: optim.scale_by_parametrization(SCALES),
    "normalize": lambda: optim.normalize_gradients(SCALES),
    "sgd": lambda: optim.sgd(0.1, SCALES),
    "adam": lambda: optim.adam(0.1, SCALES),
    "adamw": lambda: optim.adamw(0.1, SCALES),
    "lion": lambda: optim.lion(0.1, SCALES),
    "muon": lambda: optim.muon(0.1, SCALES),
    "adafactor": lambda: optim.adafactor(0.1, SCALES),
    "lamb": lambda: optim.lamb(0.1, SCALES),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_parameters_that_are_not_those_of_the_scales(maker):
    tx = MAKERS[maker]()
    with refuses("'extra'", "has no scale", "same parameters"):
        tx.init({**params(), "extra": jnp.ones(3)})
    with refuses("'hidden'", "which the parameters lack"):
        tx.init({k: v for k, v in params().items() if k != "hidden"})
    # Muon sees hidden matrices first.
    path, here, there = ("embed", "(5, 64)", "(5, 32)")
    if maker == "muon":
        path, here, there = ("hidden", "(64, 64)", "(32, 32)")
    with refuses(f"'{path}'", f"shape {here}", there, "make new scales"):
        tx.init(params(64))


def test_an_update_of_other_parameters():
    tx = optim.scale_by_parametrization(SCALES)
    state = tx.init(params())
    with refuses("'extra'", "has no scale"):
        tx.update({**params(), "extra": jnp.ones(3)}, state)


class Net(nnx.Module):
    def __init__(self, width):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(5, width, rngs=rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs)


def test_parameters_frozen_by_a_filter_of_nnx_are_left_out():
    model = Net(16)
    scales = optim.infer_scales(lambda: Net(4), model, axes=LAYERS)
    head = nnx.All(nnx.Param, nnx.PathContains("head"))
    for tx in (optim.adamw(0.1, scales), optim.sgd(0.1, scales)):
        optimizer = nnx.Optimizer(model, tx, wrt=head)
        optimizer.update(model, nnx.state(model, head))
    with refuses("'head/kernel'", "shape (32, 3)", "(16, 3)"):
        nnx.Optimizer(Net(32), tx, wrt=head)
    with refuses("'other/bias'", "has no scale"):
        tx.init(nnx.State({"other": {"bias": jnp.ones(3)}}))


class Blocks(nnx.Module):
    def __init__(self, width, depth):
        rngs = nnx.Rngs(0)
        layers = (nnx.Linear(width, width, rngs=rngs) for _ in range(depth))
        self.blocks, self.net = nnx.List(layers), Net(width)


def test_scales_of_a_deeper_model_are_a_warning():
    made = (lambda: Blocks(4, 2)), (lambda: Blocks(16, 4))
    scales = optim.infer_scales(*made, axes=optim.declare(LAYERS, branches="blocks"))
    tx = optim.sgd(0.1, scales.for_parametrization("depth_mup"))

    def state(model, *filters):
        return jax.tree.map(jnp.ones_like, nnx.state(model, *filters))

    shallower = state(Blocks(16, 3), nnx.Param)
    with pytest.warns(
        UserWarning, match=r"'blocks/3/bias', a later block .* make the sca"
    ):
        tx.init(shallower)
    for part in ("net", "blocks", "bias"):  # frozen by a filter: no warning
        tx.init(state(made[1](), nnx.All(nnx.Param, nnx.PathContains(part))))


def test_a_function_that_branches_on_the_values_of_its_arrays_is_computed():
    def build(width):
        rates = jnp.linspace(0, 0.5, 2)  # of dropping a path, in many vision models
        return [jnp.zeros((3, width)) for rate in rates if rate > 0]

    models = (lambda: build(4)), (lambda: build(8))
    for given in ({"axes": {"0": "i -> o"}}, {"inputs": (jnp.ones(3),)}):
        call = (lambda p, x: x @ p[0]) if "inputs" in given else None
        scales = optim.infer_scales(*models, **given, call=call)
        assert scales["0"].width_out == 2


def test_a_kernel_that_only_the_target_has_and_splits_is_named():
    def build(width, *names):
        return {name: jnp.zeros((len(name), width, 5)) for name in names}

    def call(p, x):
        return [y * len(w) for w in p.values() for y in jnp.einsum("d,sdh->sh", x, w)]

    small, large = build(5, "q", "kv"), build(5, "qkv")
    with refuses("no parameter like the target's 'qkv'", "by the same code"):
        optim.infer_scales(small, large, inputs=(jnp.ones(5),), call=call)


def test_parameters_left_out_by_none_are_left_out():
    tx = optim.adam(0.1, SCALES)
    frozen = {**params(), "hidden": None}
    updates, _ = tx.update(frozen, tx.init(frozen), frozen)
    assert updates["hidden"] is None


def test_a_missing_parameter_says_how_to_freeze():
    with refuses("'hidden'", "which the parameters lack", "optax.partition", "None"):
        optim.adam(0.1, SCALES).init(
            {"embed": 0 * params()["embed"]} | {"head": params()["head"]}
        )


def test_whole_equinox_modules_are_to_be_filtered():
    def make(n):
        return eqx.nn.MLP(5, 3, n, 1, key=jax.random.key(0))

    axes = {"weight": "o <- i", "bias": "d"}
    scales = optim.infer_scales(make(8), make(16), axes=axes)
    tx = optim.scale_by_parametrization(scales)
    with refuses("not an array", "eqx.filter"):
        tx.init(make(16))


def test_batch_statistics_in_the_optimizer():
    tx = optim.scale_by_parametrization(SCALES)
    with refuses("'batch_stats/mean'", "'params' collection"):
        tx.init({"params": params(), "batch_stats": {"mean": jnp.ones(3)}})


def test_scales_that_are_none():
    with refuses("scales is a dict", "infer_scales(base, target, inputs=(x,))"):
        optim.adam(0.1, {"embed": 1.0})


# --- names and numbers ---


@pytest.mark.parametrize(
    "use",
    [
        lambda name: optim.parametrization(name),
        lambda name: SCALES.for_parametrization(name),
    ],
)
def test_an_unknown_parametrization(use):
    with refuses("'depthmup'", "nearest is 'depth_mup'", "completep", "mean_field"):
        use("depthmup")


def test_an_unknown_family():
    with refuses("'adamm'", "nearest is 'adam'", "sgd", "muon", "lamb"):
        optim.scale_by_parametrization(SCALES, family="adamm")
    with refuses("optimizer family 'kfac'", "known are", "adafactor"):
        optim.explain(SCALES, optimizer="kfac")
    with refuses("is a GradientTransformationExtraArgs", "pass a name", "check_chain"):
        optim.explain(SCALES, optim.adam(0.1, SCALES))


ALIASES = {
    optim.sgd: ["learning_rate", "momentum"],
    optim.adam: ["learning_rate", "b1", "b2", "eps", "eps_root"],
    optim.adamw: ["learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"],
    optim.lion: ["learning_rate", "b1", "b2", "weight_decay"],
    optim.lamb: ["learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"],
    optim.adafactor: [
        "learning_rate",
        "decay_rate",
        "clipping_threshold",
        "momentum",
        "weight_decay_rate",
        "eps",
    ],
    optim.muon: [
        "learning_rate",
        "beta",
        "eps",
        "weight_decay",
        "adam_b1",
        "adam_b2",
        "adam_eps_root",
        "adam_weight_decay",
        "adam_learning_rate",
        "consistent_rms",
    ],
}


@pytest.mark.parametrize(
    ("alias", "name"),
    [(alias, name) for alias, names in ALIASES.items() for name in names],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_hyperparameters_that_are_not_finite(alias, name):
    for value in (float("nan"), float("inf"), jnp.float32("nan")):
        with refuses(f"{name}=", "must be a number"):
            alias(**{"learning_rate": 0.1, "scales": SCALES, name: value})


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        (optim.sgd, "learning_rate", -0.1),
        (optim.sgd, "momentum", 1.0),
        (optim.adamw, "b1", 1),
        (optim.adamw, "b2", -0.1),
        (optim.adamw, "eps", -1e-8),
        (optim.adamw, "weight_decay", jnp.float32(-0.1)),
        (optim.adafactor, "weight_decay_rate", -0.1),
        (optim.muon, "beta", 1.5),
        (optim.muon, "adam_learning_rate", -0.1),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_hyperparameters_out_of_range(alias, name, value):
    with refuses(f"{name}={value} must"):
        alias(**{"learning_rate": 0.1, "scales": SCALES, name: value})
    alias(**{"learning_rate": 0.1, "scales": SCALES, name: 0.0})


def test_arrays_of_the_bases_shape():
    small = params(8)
    said = refuses("'embed' has shape (5, 8)", "made for shape (5, 32)", "new scales")
    with said:
        optim.apply_multipliers(small, SCALES)
    tx = optim.sgd(0.1, SCALES)
    with said:
        tx.update(small, tx.init(params()))


def test_flattened_parameters():
    with refuses("has no scale", "without optax.flatten"):
        optax.flatten(optim.adam(0.1, SCALES)).init(params())


def test_shards_inside_of_shard_map():
    mesh = jax.make_mesh((1,), ("d",))
    whole = jax.sharding.PartitionSpec()
    tx = optim.sgd(0.1, SCALES)
    state = tx.init(params())

    def inside(function):
        run = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole)
        # A shard has another shape than its parameter.
        return jax.jit(run)(params(8))

    updates = inside(lambda p: tx.update(p, state, p)[0])
    assert jnp.allclose(updates["head"], -0.025)
    updates = inside(lambda p: tx.update(p, tx.init(p), p)[0])
    assert jnp.allclose(updates["head"], -0.025)


@pytest.mark.parametrize("alias", ALIASES)
def test_hyperparameters_that_may_not_be_none(alias):
    may = {
        "momentum",
        "clipping_threshold",
        "weight_decay_rate",
        "adam_learning_rate",
        "consistent_rms",
    }
    for name in {*ALIASES[alias], "learning_rate"} - may:
        if alias is optim.adafactor and name == "learning_rate":
            continue
        with refuses(f"{name}=None"):
            alias(**{"learning_rate": 0.1, "scales": SCALES, name: None})
    for name in may & set(ALIASES[alias]):
        alias(**{"learning_rate": 0.1, "scales": SCALES, name: None})


# --- arguments of another type ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axes": "head"}, ("axes='head'", "{regular expression:")),
        ({"axes": [("head", "i -> o")]}, ("axes=[", "must be {")),
        ({"fractional": "no"}, ("fractional='no'", "True or False")),
    ],
    ids=str,
)
def test_options_of_infer_scales_of_another_type(options, said):
    with refuses(*said):
        infer(mlp(8), mlp(32), **options)


def test_an_axis_that_is_empty_in_the_base():
    with refuses("axis 1 of 'embed'", "grows from 0", "choose widths"):
        infer(mlp(0), mlp(16))


def test_a_path_that_the_scales_lack():
    with pytest.raises(KeyError, match="no parameter 'zzz'; the scales hold 'embed'"):
        SCALES["zzz"]
    assert "zzz" not in SCALES
    assert SCALES.get("zzz") is None


def test_muon_without_hidden_matrices():
    base, target = shapes({"w": (8, 3)}), shapes({"w": (16, 3)})
    with refuses("no parameter is a hidden matrix", "optim.adamw"):
        optim.muon(0.1, infer(base, target))


def test_an_update_with_decay_and_without_parameters():
    tx = optim.lamb(0.1, SCALES, weight_decay=0.1)
    with refuses("weight decay needs params"):
        jax.eval_shape(lambda p: tx.update(p, tx.init(p)), params())


@pytest.mark.parametrize("maker", ALIASES)
def test_swapped_arguments(maker):
    with refuses(
        "swapped", "pass the learning rate first", "optim.adamw(1e-3, scales)"
    ):
        maker(SCALES, 1e-3)
    with refuses("learning_rate='fast'", "must be a number", "a schedule is a"):
        maker("fast", SCALES)
    with refuses("scales is a str", "pass it as scales"):
        maker(1e-3, "mup")


def test_scales_and_parameters_in_the_wrong_order():
    with refuses("scales is a dict", "infer_scales"):
        optim.rescale_init(SCALES, params())
