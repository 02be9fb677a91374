"""The optimizers are Optax's at the base, and differ from it by the rules alone."""

import dataclasses
import functools
import inspect
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from mupax import optim, zoo
from mupax.optim.scales.paths import flatten, map_with_paths

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def shapes(n, depth=2):
    return {
        "embed": (5, n),
        "blocks": {"kernel": (depth, n, n), "bias": (depth, n)},
        "conv": (3, n, 2 * n),
        "head": {"kernel": (2 * n, 3), "bias": (3,)},
    }


def tree(n, depth=2, seed=0):
    leaves, treedef = jax.tree.flatten(
        shapes(n, depth), is_leaf=lambda x: isinstance(x, tuple)
    )
    rng = np.random.default_rng(seed)
    drawn = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in leaves]
    return jax.tree.unflatten(treedef, drawn)


DECLARED = {
    "embed": "vocab: d",
    "blocks/kernel": "layers: d -> e",
    "blocks/bias": "layers: -> d",
    "conv": "window d -> e",
    "mid": "d -> e",
    "head/kernel": "d -> classes",
    "head/bias": "classes",
}


def declared(base, target, name="depth_mup", **options):
    """Scales of a tree like the above."""
    given = {path: a for path, a in DECLARED.items() if path.split("/")[0] in target}
    axes = optim.declare(given, branches="blocks")
    return optim.infer_scales(base, target, axes=axes, parametrization=name, **options)


BASE = declared(tree(8), tree(8), "mup", delta=tree(16))
SCALES = declared(tree(8), tree(32, 8))


def scales_for(name):
    return SCALES.for_parametrization(name)


# The kernels that Muon is to take, by (fan-in, fan-out) axes.
NUMBERS = {
    "embed": None,
    "blocks": {"kernel": contrib.MuonDimensionNumbers((1,), (2,)), "bias": None},
    "conv": contrib.MuonDimensionNumbers((0, 1), (2,)),
    "head": {"kernel": None, "bias": None},
}


def optax_muon(learning_rate, **options):
    return contrib.muon(
        learning_rate, muon_weight_dimension_numbers=lambda _: NUMBERS, **options
    )


def schedule(step):
    return 0.1 / (1 + step)


def decayed(tree):
    return jax.tree.map(
        lambda x: x.ndim != 1 and x.shape != tree["blocks"]["bias"].shape, tree
    )


NAMESAKES = {
    "sgd": (optim.sgd, optax.sgd),
    "adam": (optim.adam, optax.adam),
    "adamw": (optim.adamw, optax.adamw),
    "lion": (optim.lion, optax.lion),
    "muon": (optim.muon, optax_muon),
    "adafactor": (optim.adafactor, optax.adafactor),
    "lamb": (optim.lamb, optax.lamb),
}
OPTIONS = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "adam": [{}, {"b1": 0.8, "eps": 1e-3, "eps_root": 1e-4}, {"nesterov": True}],
    "adamw": [{}, {"weight_decay": 0.1, "mask": decayed, "mu_dtype": jnp.bfloat16}],
    "lion": [{}, {"b1": 0.8, "weight_decay": 0.1, "mask": decayed}],
    "muon": [
        {},
        {"weight_decay": 0.1, "adam_weight_decay": 0.2, "adam_learning_rate": 0.3},
        {"nesterov": False, "consistent_rms": 0.2, "adam_b1": 0.8, "ns_steps": 3},
    ],
    "adafactor": [
        {},
        {"momentum": 0.9, "weight_decay_rate": 1e-3, "min_dim_size_to_factor": 4},
        {"multiply_by_parameter_scale": False, "clipping_threshold": None},
    ],
    "lamb": [{}, {"weight_decay": 0.1, "mask": decayed, "eps": 1e-3}],
}
CASES = [
    pytest.param(name, rate, options, id=f"{name}-{kind}-{i}")
    for name in NAMESAKES
    for i, options in enumerate(OPTIONS[name])
    # Each with a rate or a schedule; the last with both.
    for kind, rate in (("rate", 0.1), ("schedule", schedule))
    if (kind == "schedule") == (i % 2 == 1) or i == 0
]


def train(tx, params, steps=4):
    """Parameters and state after some steps of differing gradients."""

    def step(count, carry):
        params, state = carry
        grads = jax.tree.map(lambda p: jnp.sin(p + count), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jit
    def run(params):
        return jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))

    return run(params)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "rate", "options"), CASES)
def test_at_base_size_each_is_its_namesake_bit_for_bit(name, rate, options):
    maker, namesake = NAMESAKES[name]
    ours = train(maker(rate, BASE, **options), tree(8))
    theirs = train(namesake(rate, **options), tree(8))
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])


@pytest.mark.parametrize("name", NAMESAKES)
def test_standard_parametrization_is_optax_at_any_size(name):
    maker, namesake = NAMESAKES[name]
    ours = train(maker(0.1, scales_for("sp")), tree(32, 8), steps=2)[0]
    theirs = train(namesake(0.1), tree(32, 8), steps=2)[0]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", NAMESAKES)
@pytest.mark.parametrize("rate", [0.1, schedule], ids=["rate", "schedule"])
def test_no_state_beyond_the_namesakes(name, rate):
    maker, namesake = NAMESAKES[name]
    params = jax.eval_shape(lambda: tree(32, 8))
    tx = maker(rate, scales_for("depth_mup"))
    ours = jax.tree.leaves(jax.eval_shape(tx.init, params))
    theirs = jax.tree.leaves(jax.eval_shape(namesake(rate).init, params))

    def size(leaves):
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    assert (len(ours), size(ours)) == (len(theirs), size(theirs))


@pytest.mark.parametrize("name", NAMESAKES)
def test_arguments_are_those_of_the_namesake(name):
    maker = getattr(optim, name)
    namesake = contrib.muon if name == "muon" else getattr(optax, name)
    ours = dict(inspect.signature(maker).parameters)
    assert list(ours)[:2] == ["learning_rate", "scales"]
    theirs = dict(inspect.signature(namesake).parameters)
    # Muon's dimension numbers come from the scales; `adaptive` is left out.
    for left_out in ("muon_weight_dimension_numbers", "adaptive"):
        theirs.pop(left_out, None)
    rest = [p for p in ours if p != "scales"]
    own = ["partner", "per_head"] if name == "muon" else []
    assert rest == [*theirs, *own]
    for key in list(theirs)[1:]:
        assert ours[key].default == theirs[key].default, key
        assert ours[key].kind == theirs[key].kind, key


DECAYING = {
    "adamw": (optim.adamw, "weight_decay"),
    "lion": (optim.lion, "weight_decay"),
    "muon": (optim.muon, "weight_decay"),
    "muon's adam": (optim.muon, "adam_weight_decay"),
    "adafactor": (optim.adafactor, "weight_decay_rate"),
}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("parametrization", ["mup", "depth_mup", "ode", "ntk"])
def test_decay_takes_the_same_part_at_every_size(name, parametrization):
    maker, option = DECAYING[name]
    params = tree(32, 8)

    def updates(**options):
        tx = maker(0.1, scales_for(parametrization), **options)
        return jit(lambda p: tx.update(p, tx.init(p), p)[0])(params)

    plain, decayed_ = updates(**{option: 0.0}), updates(**{option: 0.5})
    difference = jax.tree.map(lambda a, b: a - b, decayed_, plain)
    rate = 1.0 if option == "weight_decay_rate" else 0.1
    taken = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (d, p)
        for (path, d), p in zip(
            jax.tree_util.tree_leaves_with_path(difference),
            jax.tree.leaves(params),
            strict=True,
        )
    }
    matrices = {"blocks/kernel", "conv"}
    for path, (part, weight) in taken.items():
        if name == "muon" and path not in matrices:
            continue
        if name == "muon's adam" and path in matrices:
            continue
        np.testing.assert_allclose(part, -rate * 0.5 * weight, rtol=1e-4, atol=1e-5)


def test_decay_of_lamb_is_the_same_against_the_update():
    # The trust ratio sees Adam's update, of size one, and the decay: relative to one
    # another they are what lr·wd the same for every size makes them.
    params = tree(32, 8)
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = optim.lamb(0.1, scales_for("mup"), weight_decay=0.5)
    updates, _ = jit(lambda g, p: tx.update(g, tx.init(p), p))(zeros, params)
    # Without gradients the decay is all: the ratio brings it to the weight's norm.
    relative = updates["blocks"]["kernel"] / params["blocks"]["kernel"]
    np.testing.assert_allclose(relative, -0.1 * 4**-0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_eps_follows_the_gradient(name):
    # Where eps rules, the update is g/eps: it must be the base's for a gradient that
    # is smaller by its own law, m^-1 M^-1/2 (TP-VI Definition 6.1).
    maker, _ = NAMESAKES[name]
    rows = optim.explain(scales_for("depth_mup"), optimizer=name).rows
    row = rows["blocks/kernel"]
    assert row.eps == pytest.approx(4**-1 * 4**-0.5)
    if name == "lamb":
        return
    params = tree(32, 8)
    small = jax.tree.map(lambda p: jnp.full_like(p, 1e-6), params)
    small["blocks"]["kernel"] *= row.eps
    tx = maker(1.0, scales_for("depth_mup"), eps=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jit(lambda g, p: tx.update(g, tx.init(p), p))(small, zeros)
    np.testing.assert_allclose(
        updates["blocks"]["kernel"], -1e-6 * row.learning_rate, rtol=1e-4
    )


# --- Muon ---


def muon_updates(scales, params, **options):
    scales = scales.for_parametrization("mup")
    tx = optim.muon(1.0, scales, **options)
    return jit(lambda p: tx.update(p, tx.init(p), p)[0])(params)


def test_embeddings_and_readouts_are_not_orthogonalized():
    params = tree(32, 8)
    rows = optim.explain(scales_for("mup"), "muon").rows
    assert {p: r.family for p, r in rows.items()} == {
        "embed": "adam",
        "blocks/bias": "adam",
        "blocks/kernel": "spectral",
        "conv": "spectral",
        "head/kernel": "adam",
        "head/bias": "adam",
    }
    updates = muon_updates(SCALES, params)
    theirs = optax.nadamw(1.0, weight_decay=0.0)
    adam, _ = jit(lambda p: theirs.update(p, theirs.init(p), p))(params)
    np.testing.assert_allclose(updates["embed"], adam["embed"], rtol=1e-4)
    np.testing.assert_allclose(
        updates["head"]["kernel"], adam["head"]["kernel"] / 4, rtol=1e-4
    )


def test_a_matrix_in_a_branch_is_hidden_where_only_depth_grows():
    rows = optim.explain(declared(tree(8), tree(8, 8)), "muon").rows
    assert rows["blocks/kernel"].family == "spectral"
    assert rows["blocks/kernel"].learning_rate == pytest.approx(4**-0.5)
    assert rows["head/kernel"].family == "adam"


def test_a_model_of_another_width_tells_which_matrices_are_hidden():
    small, large, other = tree(8), tree(8, 8), tree(16, 8)
    small["mid"] = large["mid"] = jnp.ones((8, 8))
    other["mid"] = jnp.ones((16, 16))
    for delta, family in ((None, "adam"), (other, "spectral")):
        scales = declared(small, large, delta=delta)
        assert optim.explain(scales, "muon").rows["mid"].family == family


# --- what explain says is what happens ---


def test_explain_prints_every_parameter_and_its_source():
    text = str(optim.explain(scales_for("depth_mup"), optimizer="adamw"))
    for path in SCALES:
        assert path in text
    for word in ("role", "init", "lr", "eps", "wd", "found", "8x32x32", "2310.02244"):
        assert word in text


def test_explain_joins_numbered_layers_of_every_library():
    def model(n):
        names = ("Dense_1", "Dense_2", "Dense_3")
        listed = {f"blocks/{i}/kernel": (n, n) for i in range(2)}
        return {f"{name}/kernel": (n, n) for name in names} | listed | {"in": (8, n)}

    base, target = (
        {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in model(n).items()}
        for n in (8, 16)
    )
    text = str(optim.explain(optim.infer_scales(base, target, axes={".": "i -> o"})))
    assert "\nDense_#/kernel " in text
    assert "\nblocks/#/kernel " in text


def test_explain_says_how_each_optimizer_decays():
    def row(name):
        return optim.explain(scales_for("mup"), optimizer=name).rows["blocks/kernel"]

    assert row("adamw").weight_decay == pytest.approx(4)
    # LAMB's joins Adam's update before the trust ratio; Adafactor's is a rate a step.
    assert row("lamb").learning_rate == pytest.approx(4**-0.5)
    assert row("lamb").weight_decay == pytest.approx(4)
    assert row("adafactor").weight_decay == 1
    assert row("adafactor").eps == pytest.approx(4**-2)


MUON_OPTIONS = [{}, {"consistent_rms": 0.2}]


@pytest.mark.parametrize("options", MUON_OPTIONS, ids=str)
def test_explain_knows_muons_options(options):
    """The ratio to Optax's own update, by the same options, is what explain prints."""
    params = tree(32, 8)
    ours = optim.muon(1.0, scales_for("mup"), **options)
    theirs = optax_muon(1.0, **options)
    grads = optim.normalize_gradients(scales_for("mup")).update(params, ())[0]
    got = jit(lambda p: ours.update(p, ours.init(p), p)[0])(params)
    plain = jit(lambda p: theirs.update(grads, theirs.init(p), p)[0])(params)
    rows = optim.explain(scales_for("mup"), "muon", **options).rows
    rate = rows["conv"].learning_rate
    size = float(jnp.abs(got["conv"]).max())
    np.testing.assert_allclose(
        got["conv"] / size, plain["conv"] * rate / size, rtol=1e-4, atol=1e-5
    )
    optim.check_chain(ours, scales_for("mup"))


COPIES = {
    "experts": ((4, 8, 16), (4, 32, 64)),
    "qkv": ((3, 8, 8), (3, 32, 32)),
    "head": ((16, 3), (64, 3)),
}
COPIED = optim.infer_scales(
    {k: jax.ShapeDtypeStruct(b, jnp.float32) for k, (b, _) in COPIES.items()},
    {k: jax.ShapeDtypeStruct(t, jnp.float32) for k, (_, t) in COPIES.items()},
    axes={"experts|qkv": "copies: in -> out", "head": "in -> out"},
)


@pytest.mark.parametrize("path", ["blocks/kernel", "conv", "experts", "qkv"])
def test_matrices_are_orthogonalized_one_by_one(path):
    """Layers, experts and projections each; a convolution as (window x inputs, out)."""
    scales = COPIED if path in COPIES else SCALES
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(rng.normal(size=t), jnp.float32) for k, (_, t) in COPIES.items()
    }
    params = params if path in COPIES else tree(32, 8)
    scale, row = (
        scales[path],
        optim.explain(scales.for_parametrization("mup"), "muon").rows[path],
    )
    copies = [
        a for a in range(len(scale.shape)) if a not in (*scale.in_axes, *scale.out_axes)
    ]

    def matrices(params):
        update = dict(flatten(muon_updates(scales, params)))[path]
        moved = update.transpose(*copies, *scale.in_axes, *scale.out_axes)
        return moved.reshape(-1, scale.fan_in, scale.fan_out)

    together = matrices(params)
    shape = math.sqrt(max(1, scale.fan_out / scale.fan_in))
    for matrix in together:
        singular = jnp.linalg.svd(matrix, compute_uv=False) / row.learning_rate / shape
        # Newton-Schulz brings singular values near one.
        assert 0.4 < float(singular.min()) < float(singular.max()) < 1.4
    # The gradients of the other copies do not matter.
    change = lambda p, x: x.at[1:].multiply(-3.0) if p == path and copies else x  # noqa: E731
    alone = matrices(map_with_paths(change, params))
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-5, atol=1e-6)


# --- scales know their parametrization ---


def test_a_parametrization_is_named_where_depth_changes():
    nameless = optim.Scales(dict(SCALES))
    told = r"depth grows by 4, .*for_parametrization.*'depth_mup' .* one layer"
    uses = (optim.explain, functools.partial(optim.rescale_init, tree(32, 8)))
    makers = [functools.partial(maker, 0.1) for maker, _ in NAMESAKES.values()]
    for use in (*uses, *makers, optim.scale_by_parametrization):
        with pytest.raises(ValueError, match=told):
            use(nameless)
    plain = {p: dataclasses.replace(s, in_branch=False) for p, s in SCALES.items()}
    with pytest.raises(ValueError, match=r"'mup' for a network without"):
        optim.adam(0.1, optim.Scales(plain))
    wider = optim.Scales(dict(declared(tree(8), tree(32))))
    assert repr(optim.explain(wider)).startswith("<Explanation: mup,")


def test_a_swept_richness_may_replace_the_models():
    model = SCALES.for_parametrization("depth_mup")

    def start(richness):
        point = optim.parametrization("depth_mup", richness=optim.Traced(richness))
        tx = optim.sgd(0.1, model.for_parametrization(point))
        return step(tx, tree(32, 8))["head"]["bias"]

    assert jax.vmap(start)(jnp.array([1.0, 2.0])).shape == (2, 3)


def step(tx, params):
    return tx.update(params, tx.init(params), params)[0]


def test_zoo_models_know_their_parametrization():
    options = {"width": 16, "depth": 4, "base_width": 8, "base_depth": 2}
    model = nnx.eval_shape(
        lambda: zoo.create(
            "resmlp", **options, parametrization="completep", rngs=nnx.Rngs(0)
        )
    )
    scales = zoo.scales(model)
    assert scales.parametrization.name == "completep(alpha=1)"
    assert scales.for_parametrization("ode").multiplied  # the same rules
    with pytest.raises(ValueError, match=r"built with completep.*depth_mup"):
        scales.for_parametrization("depth_mup")


# --- schedules with a swept learning rate ---


def test_a_warm_up_and_cosine_with_a_swept_peak():
    unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10, 0.1)
    params = tree(32, 8)

    def rate(peak):
        rates = lambda step: peak * unit(step)  # noqa: E731
        tx = optim.sgd(rates, scales_for("depth_mup"))
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
        return tx.update(params, state, params)[0]["head"]["bias"]

    updates = jax.vmap(rate)(jnp.array([0.5, 2.0]))
    np.testing.assert_allclose(updates[1], -2.0 * params["head"]["bias"], rtol=1e-6)


# --- what decays ---

MASKS = {
    "adamw": ("weight_decay", "mask"),
    "lion": ("weight_decay", "mask"),
    "lamb": ("weight_decay", "mask"),
    "muon": ("adam_weight_decay", "weight_decay_mask"),
    "adafactor": ("weight_decay_rate", "weight_decay_mask"),
}


@pytest.mark.parametrize("name", MASKS)
def test_of_matrices_alone_biases_do_not_decay(name):
    decay, mask = MASKS[name]
    params, zeros = tree(32, 8), jax.tree.map(jnp.zeros_like, tree(32, 8))
    options = {decay: 0.5} | ({"weight_decay": 0.5} if name == "muon" else {})

    def moved(**more):
        maker = getattr(optim, name)
        tx = maker(0.1, scales_for("depth_mup"), **options, **more)
        updates = jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(zeros, params)
        return {path: bool(jnp.any(x != 0)) for path, x in flatten(updates)}

    assert all(moved().values())
    matrices = {path: bool(SCALES[path].in_axes) for path in SCALES}
    assert moved(**{mask: "matrices"}) == matrices
    assert {path for path, is_one in matrices.items() if not is_one} >= {"blocks/bias"}


def test_an_unknown_mask_is_refused():
    with pytest.raises(ValueError, match="mask='kernels' must be 'matrices', a tree"):
        optim.adamw(0.1, scales_for("mup"), mask="kernels")


@pytest.mark.parametrize("name", ["b1", "eps"])
def test_a_schedule_that_is_not_of_a_rate_is_refused(name):
    match = f"{name}=.* must be a number, .*; schedule it by optax.inject_hyperparams"
    with pytest.raises(ValueError, match=match):
        optim.adam(0.1, scales_for("mup"), **{name: optax.constant_schedule(0.9)})


def small_head(n, size):
    shapes = {"embed": (8, n), "hidden": (n, n), "head": (n, 4)}
    sizes = {"embed": 1.0, "hidden": n**-0.5, "head": size}
    return {name: jnp.full(shape, sizes[name]) for name, shape in shapes.items()}


def head_scales(base, target):
    return optim.infer_scales(base, target, axes={".": "in -> out"})


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("lamb", 0.0, "at zero"), ("adafactor", 1e-4, "smaller than 0.001")],
)
def test_weights_too_small_for_relative_updates_are_a_warning(name, size, said):
    params = small_head(64, size)
    tx = getattr(optim, name)(0.1, head_scales(small_head(16, size), params))
    with pytest.warns(optim.ChainWarning, match=f"'head' starts {said}") as warned:
        tx.init(params)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.init(small_head(64, 0.1))
        jax.eval_shape(tx.init, params)


def test_updates_of_a_zero_weight_do_not_scale_under_lamb():
    """What the warning says: the step of the readout is as large at any width."""
    steps = []
    for width in (16, 128):
        params = small_head(width, 0.0)
        tx = optim.lamb(0.1, head_scales(small_head(8, 0.0), params))
        with pytest.warns(optim.ChainWarning):
            state = tx.init(params)
        ones = jax.tree.map(jnp.ones_like, params)
        updates, _ = jit(tx.update)(ones, state, params)
        steps.append(float(updates["head"][0, 0]))
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


@pytest.mark.parametrize("source", ["state", "model"])
def test_a_mask_from_an_nnx_state_or_model_works_as_a_function_does(source):
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    base = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    scales = optim.infer_scales(base, model, axes={"kernel": "i -> o", "bias": "d"})
    # A model is a tree that can be called.
    tree = params if source == "state" else model
    mask = jax.tree.map(lambda x: x.ndim >= 2, tree)
    tx = optim.adamw(0.1, scales, weight_decay=1.0, mask=mask)
    before = model.kernel[...]
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(model.kernel[...], 0.9 * before, rtol=1e-6)
    with pytest.raises(ValueError, match="no entry for parameter 'kernel'"):
        optim.adamw(0.1, scales, mask={"bias": True}).init(params)
    with pytest.raises(ValueError, match="an entry 'bais', which is no parameter"):
        optim.adamw(0.1, scales, mask={"bais": True, "kernel": True})
