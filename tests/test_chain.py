"""Chains that would train, only worse, are refused; all others are not."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from optax import contrib

from mupax import optim


def mlp(n):
    shapes = {"embed": (5, n), "hidden": (n, n), "head": (n, 3)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


def scales_for(base, name="mup"):
    axes = {".": "in -> out"}
    return optim.infer_scales(mlp(base), PARAMS, axes=axes, parametrization=name)


PARAMS = mlp(32)
SCALES = scales_for(8)
GROUPS = optim.for_modules(SCALES, {"embed": {"learning_rate": 4.0}})
LABELS = {"embed": "a", "hidden": "b", "head": "b"}
RATE = optax.scale_by_learning_rate(0.1)
DECAY = optax.add_decayed_weights(0.1)
ADAM, LION, TRUST = (
    optax.scale_by_adam(),
    optax.scale_by_lion(),
    optax.scale_by_trust_ratio(),
)
RISING = optax.scale_by_learning_rate(optax.linear_schedule(0.0, 0.1, 10))


def scale(family="adam"):
    return optim.scale_by_parametrization(SCALES, family=family)


def normalize(scales=SCALES):
    return optim.normalize_gradients(scales)


def frozen():
    return masked(optax.set_to_zero(), "embed")


def adam(**options):
    return optim.adam(0.1, SCALES, **options)


def adamw(**options):
    return optim.adamw(0.1, SCALES, **options)


def sgd():
    return optim.sgd(0.1, SCALES)


def inject(make, *args):
    return optax.inject_hyperparams(make)(*args)


def masked(tx, *names):
    return optax.masked(tx, {name: name in names for name in PARAMS})


def accumulate(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


def muon():
    both = {name: contrib.MuonDimensionNumbers() for name in PARAMS}
    return contrib.scale_by_muon(weight_dimension_numbers=both)


def refuses(*parts):
    """Expects a ValueError whose message holds each of these parts."""
    pattern = "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(ValueError, match=f"(?s){pattern}")


TWICE = ("are scaled twice", "drop scale_by_parametrization")
UNDONE = (
    "has no effect on its update, or only part of it",
    "put clipping first, then the transform that makes the update, then scale_by",
)
DECAYS = ("the weight decay of 'embed' is scaled", "put add_decayed_weights after")
GROWS = ("makes the weights grow", "before the learning rate")
CLIMBS = ("points along its gradient", "the learning rate needs one minus")
NORMALIZES = ("e.g. a normalize_gradients that stands after", "used with SGD")
ALONE = ("is its whole update", "freeze parameters, use optax.partition")
FROZEN = (*CLIMBS, "optax.masked passes", "optax.set_to_zero()")
ONE_NORMAL = ("before eps is added", "use one normalize_gradients", "has its own")
UNSCALED = ("no transform of optim.chain scales", "put optim.scale_by_parametrization")

# The links of a chain, and what is said of them.
WRONG = {
    # Scaled twice, or not at all.
    "an alias and a scaling": ((adam(), scale()), TWICE),
    "a scaling and an alias": ((normalize(), ADAM, scale(), sgd()), TWICE),
    "two aliases": ((sgd(), sgd()), TWICE),
    "in a partition": (
        (optax.partition({"all": adam()}, dict.fromkeys(PARAMS, "all")), scale()),
        TWICE,
    ),
    "on masks that meet": (
        (masked(sgd(), "embed", "hidden"), masked(sgd(), "hidden", "head")),
        ("'hidden'", *TWICE),
    ),
    "in MultiSteps": ((accumulate(adam()), scale()), TWICE),
    "no scaling": ((optax.clip_by_global_norm(1.0), ADAM, RATE), UNSCALED),
    # Before the transform that undoes it.
    "before adam": ((scale(), ADAM, RATE), UNDONE),
    "an alias before adam": ((sgd(), ADAM), UNDONE),
    "before a trust ratio": ((normalize(), ADAM, scale(), TRUST, RATE), UNDONE),
    # For another family.
    "adam as sgd, injected": (
        (inject(optax.scale_by_adam, 0.9), scale("sgd"), RATE),
        ("'embed'", "4 times the base's", "should be 1", "pass family='adam'"),
    ),
    "lion as muon": ((LION, scale("muon"), RATE), ("pass family='adam'",)),
    "muon as adam": ((muon(), scale(), RATE), ("pass family='spectral'",)),
    "lamb as adam": (
        (normalize(), ADAM, TRUST, scale(), RATE),
        ("pass family='relative'",),
    ),
    "momentum as adam": ((optax.trace(0.9), scale(), RATE), ("pass family='sgd'",)),
    "NovoGrad as adam": (
        (optax.scale_by_novograd(), scale(), RATE),
        ("'embed'", "should be 1 times", "pass family='spectral'"),
    ),
    "norms for sizes": (
        (normalize(), ADAM, optax.scale_by_param_block_norm(), scale("lamb"), RATE),
        ("'embed'", "should be 1 times", "in none of the families"),
    ),
    "one scaling for two families": (
        (
            optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, LABELS),
            scale(),
        ),
        ("'hidden'", "should be 0.25", "put a scaling into each branch"),
    ),
    # Gradients that are normalized wrongly.
    "normalizing before an alias": ((normalize(), adam()), ONE_NORMAL),
    "normalizing twice": (
        (normalize(), normalize(), ADAM, scale(), RATE),
        ONE_NORMAL,
    ),
    "normalizing for sgd": ((normalize(), scale("sgd"), RATE), NORMALIZES),
    "normalizing updates": ((ADAM, normalize(), scale(), RATE), NORMALIZES),
    "normalizing by other rules": (
        (normalize(scales_for(8, "ntk")), ADAM, scale(), RATE),
        ("before eps is added", "with the scales of the scaling"),
    ),
    # Clipping in the wrong place.
    "clipping after the scaling": (
        (normalize(), ADAM, scale(), optax.adaptive_grad_clip(0.01), RATE),
        UNDONE,
    ),
    "clipping after an alias": ((adam(), optax.clip_by_global_norm(1.0)), UNDONE),
    "clipping of a user's own": (
        (scale("sgd"), optax.stateless(lambda u, _: jax.tree.map(jnp.tanh, u)), RATE),
        UNDONE,
    ),
    # Weight decay in the wrong place.
    "an alias after decay": ((DECAY, sgd()), (*DECAYS, "optim.build_optimizer")),
    "after adamw": ((optax.adamw(0.1), scale()), DECAYS),
    "after a masked adamw in MultiSteps": (
        (accumulate(optax.adamw(0.1, mask=dict.fromkeys(PARAMS, True))), scale()),
        DECAYS,
    ),
    "decay through adam": (
        (DECAY, normalize(), ADAM, scale(), RATE),
        ("passes through the optimizer (L2)", "use optim.adamw"),
    ),
    "decay after an alias": ((adam(), DECAY), (*GROWS, "optim.adamw")),
    "decay after sgd": ((sgd(), DECAY), (*GROWS, "optim.build_optimizer")),
    "decay after a schedule that starts at zero": (
        (scale("sgd"), RISING, DECAY),
        GROWS,
    ),
    "a negative decay": (
        (scale("sgd"), optax.add_decayed_weights(-0.1), RATE),
        ("makes the weights grow", "make it positive"),
    ),
    "freezing before a decay": (
        (normalize(), ADAM, scale(), frozen(), DECAY, RATE),
        ALONE,
    ),
    "freezing by Optax before a decay": (
        (masked(optax.set_to_zero(), "embed"), adamw(weight_decay=0.1)),
        ("'embed'", *ALONE),
    ),
    # The sign, and learning rates that cancel it.
    "a rate after an alias": ((adam(), RATE), CLIMBS),
    "no rate": ((normalize(), ADAM, scale()), CLIMBS),
    "a hidden rate": ((normalize(), optax.adam(1e-2), scale(), RATE), CLIMBS),
    # Masks.
    "frozen by a mask": (
        (masked(adam(), "embed", "head"),),
        ("'hidden'", *FROZEN),
    ),
    "frozen by a mask, clipped": (
        (optax.clip_by_global_norm(1.0), masked(sgd(), "embed")),
        ("'head'", "for 1 more", *FROZEN),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_chain_is_refused_at_init(case):
    links, message = WRONG[case]
    with refuses(*message):
        optim.chain(*links).init(PARAMS)


@pytest.mark.parametrize(
    "case", ["before adam", "after adamw", "a rate after an alias"]
)
def test_a_plain_chain_is_seen_through(case):
    links, message = WRONG[case]
    with refuses(*message):
        optim.check_chain(optax.chain(optax.chain(*links[:1]), *links[1:]), SCALES)


def test_it_is_refused_under_jit_and_eval_shape_too():
    for start in (jax.jit, lambda init: lambda p: jax.eval_shape(init, p)):
        with refuses("the weight decay of 'embed' is scaled"):
            start(optim.chain(optax.adamw(0.1), scale()).init)(PARAMS)


def test_labels_made_from_an_nnx_state_say_what_to_use():
    params = nnx.State({name: nnx.Param(x) for name, x in PARAMS.items()})
    labels = jax.tree.map(lambda x: "all", params)
    tx = optim.chain(optax.partition({"all": adam()}, labels))
    state = tx.init(params)
    gradients = nnx.State(PARAMS)
    with refuses("a tree of masks or labels", "pass a function in its place"):
        tx.update(gradients, state, gradients)


def test_something_else_than_a_transform_is_refused():
    with refuses("is not an optax.GradientTransformation", "one by one"):
        optim.chain([ADAM, scale()])
    with refuses("at least one"):
        optim.chain()


UNSURE = {
    "an accumulator larger than gradients": (
        (optax.scale_by_rss(), scale(), RATE),
        "put normalize_",
    ),
    "an eps without normalized gradients": ((ADAM, scale(), RATE), "put normalize_"),
    "clipped entries of sgd": ((optax.clip(1.0), sgd()), "tune the threshold again"),
    "clipped sgd": ((optax.clip_by_global_norm(1.0), sgd()), "tune the threshold"),
    "clipping before normalizing": (
        (optax.clip(1.0), normalize(), ADAM, scale(), RATE),
        "is clipped by a fixed number .* or optax.clip between optim.normalize",
    ),
    "clipping normalized gradients by their norm": (
        (normalize(), optax.clip_by_global_norm(1.0), ADAM, scale(), RATE),
        "by the global norm after it was normalized: put optax.clip_by_global_norm",
    ),
    "clipping before an alias": ((optax.clip(1.0), adamw()), "is clipped by a fixed"),
    "clipping by the weight": (
        (optax.adaptive_grad_clip(0.01), adamw()),
        "or by its weight, or by the global norm",
    ),
    "noise": (
        (optax.add_noise(1e-6, 0.0, 0), sgd()),
        "does not follow its gradient alone: it is noise",
    ),
    "a step size of its own": (
        (contrib.dog(), scale("sgd")),
        "a step size found from other parameters' gradients",
    ),
    "a user's shapes": (
        (sgd(), optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, u, PARAMS))),
        "could not check this chain",
    ),
}


@pytest.mark.parametrize("case", UNSURE)
def test_what_may_be_wrong_is_a_warning_at_the_users_line(case):
    links, said = UNSURE[case]
    tx = optim.chain(*links)
    with pytest.warns(optim.ChainWarning, match=said) as told:
        tx.init(PARAMS)
    assert told[0].filename == __file__


def user_adamw(chain):
    clip = optax.clip_by_global_norm(1.0)
    negative = optax.scale_by_schedule(lambda step: -0.1)
    return chain(clip, normalize(), ADAM, scale(), DECAY, negative)


def unclipped(chain):
    return chain(normalize(), ADAM, scale(), DECAY, RATE)


def user_sgd(chain):
    return chain(optax.trace(0.9), scale("sgd"), DECAY, RATE)


RIGHT = {
    "adamw, by hand": user_adamw,
    "sgd, by hand": user_sgd,
    "after optax.sgd": lambda chain: chain(optax.sgd(0.1, 0.9), scale("sgd")),
    "after signs": lambda chain: chain(optax.scale_by_sign(), scale(), RATE),
    "lamb, by hand": lambda chain: chain(normalize(), ADAM, TRUST, scale("lamb"), RATE),
    "muon, by hand": lambda chain: chain(muon(), scale("spectral"), RATE),
    "in pieces": lambda chain: chain(chain(normalize(), ADAM, scale()), chain(RATE)),
    "clipped": lambda chain: chain(optax.clip_by_global_norm(1.0), adamw()),
    "entries clipped after normalizing": lambda chain: chain(
        normalize(), optax.clip(1.0), ADAM, scale(), RATE
    ),
    "slowed": lambda chain: chain(adamw(), optax.scale(0.5)),
    "scheduled": lambda chain: chain(
        adam(), optax.scale_by_schedule(optax.linear_schedule(0, 1, 10))
    ),
    "averaged": lambda chain: chain(adamw(), optax.ema(0.9)),
    "injected": lambda chain: chain(
        normalize(), inject(optax.scale_by_adam, 0.9), scale(), RATE
    ),
    "partitioned, one in each branch": lambda chain: optax.partition(
        {"a": unclipped(chain), "b": user_sgd(chain)}, LABELS
    ),
    "partitioned in a chain": lambda chain: chain(
        optax.centralize(), optax.partition({"a": adamw(), "b": sgd()}, LABELS)
    ),
    "masks that do not meet": lambda chain: chain(
        masked(unclipped(chain), "embed"), masked(user_sgd(chain), "hidden", "head")
    ),
    "accumulated": lambda chain: chain(accumulate(user_adamw(chain))),
    "guarded": lambda chain: optax.apply_if_finite(user_adamw(chain), 2),
    "a decay that does not follow the rate": lambda chain: chain(
        adam(), optax.add_decayed_weights(-1e-4)
    ),
    "ascent on a scaled loss": lambda chain: optax.chain(
        optax.scale(-1.0), chain(optax.scale(1 / 1024), adam())
    ),
    "a schedule before momentum": lambda chain: chain(
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)), *user_links()
    ),
    "a part frozen": lambda chain: chain(
        optax.partition({"a": adam(), "b": optax.set_to_zero()}, LABELS)
    ),
    "groups": lambda chain: chain(
        normalize(GROUPS), ADAM, optim.scale_by_parametrization(GROUPS), DECAY, RATE
    ),
}


COMBINED = (
    *("injected", "partitioned, one in each branch", "partitioned in a chain"),
    *("masks that do not meet", "accumulated", "guarded"),
)


def user_links():
    return optax.trace(0.9), scale("sgd"), RATE


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.filterwarnings("error")
def test_right_chains_are_not_refused_and_are_optaxs(case):
    ours, theirs = RIGHT[case](optim.chain), RIGHT[case](optax.chain)

    def train(tx):
        def run(params):
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(params, state, params)
            return updates, state

        return run

    ours.init(PARAMS)
    texts = [str(jax.make_jaxpr(train(tx))(PARAMS)) for tx in (ours, theirs)]
    assert texts[0] == texts[1]
    if case in COMBINED:  # the others are checked alike by `init`
        assert optim.check_chain(theirs, SCALES).hints == ()


def test_masks_by_names_choose_the_same_parameters_without_params():
    def layers(n):
        return {k: {"kernel": v, "bias": v[0]} for k, v in mlp(n).items()}

    axes = {"kernel": "i -> o", "head/bias": "o", "(embed|hidden)/bias": "-> o"}
    scales = optim.infer_scales(layers(8), layers(32), axes=axes)
    decay = optax.add_decayed_weights(
        0.1, lambda tree: {k: {"kernel": True, "bias": False} for k in tree}
    )
    parts = ADAM, decay, optim.scale_by_parametrization(scales), RATE
    with refuses("the weight decay of 'embed/kernel' is scaled", "for 2 more"):
        optim.check_chain(optax.chain(*parts), scales)


def test_a_chain_adds_no_state_and_compiles_once():
    links = optax.centralize(), optax.masked(sgd(), True), optax.scale(0.5)
    tx, plain = optim.chain(*links), optax.chain(*links)
    state = tx.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(plain.init(PARAMS))
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(None)
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = PARAMS
    for _ in range(3):
        params, state = step(params, state)
    assert len(traces) == 1


def test_traced_hyperparameters_are_not_run():
    def start(rate):
        tx = optim.chain(optim.adam(rate, SCALES), optax.scale(0.5))
        return tx.init(PARAMS)

    jax.vmap(start)(jnp.ones(2))


# --- check_chain: any optimizer, from outside ---


def test_a_missing_scaling_names_path_and_factor():
    with refuses("'head'", "1 times the base's", "should be 0.25"):
        optim.check_chain(optax.adam(0.1), SCALES)
    with refuses("'embed'", "0.25 times the base's", "should be 1 times"):
        optim.check_chain(optax.sgd(0.1), SCALES)


def test_multipliers_written_by_hand_are_taken_for_rates_by_layer():
    rates = {"embed": 1.0, "hidden": 0.25, "head": 0.25}
    by_hand = optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, u, rates))
    with refuses("'head'", "no scaling acts on it", "add scale_by_parametrization"):
        optim.check_chain(optax.chain(LION, by_hand, RATE), SCALES)


def test_layerwise_learning_rates_are_a_users_own_choice():
    rates = {"a": optim.adam(0.1, SCALES), "b": optim.adam(0.02, SCALES)}
    optim.check_chain(optax.partition(rates, LABELS), SCALES)


def test_another_parametrization_than_the_optimizers_is_named():
    with refuses("other scales (mup) than those of this check (ntk)", "give both"):
        optim.check_chain(adam(), scales_for(8, "ntk"))


def test_sweeps_that_trace_hyperparameters_are_told():
    def check(rate):
        optim.check_chain(optim.adam(rate, SCALES), SCALES)
        return rate

    with refuses("traced", "outside of jit and vmap"):
        jax.jit(check)(0.1)


def test_something_that_cannot_run_says_why():
    with refuses("cannot be run", "obj_fn"):
        optim.check_chain(contrib.sophia(0.1), SCALES)
    with refuses("tx is a float"):
        optim.check_chain(0.1, SCALES)


def test_a_check_leaves_nothing_in_a_users_cache():
    inner = optim.sgd(1.0, SCALES)
    tx = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    optim.check_chain(tx, SCALES)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(updates["embed"][0, 0]) == -4.0


# --- properties ---

GROWTHS = st.sampled_from([1, 2, 3, 8])
AXES = optim.declare(
    {
        "^embed$": "in -> d",
        "^block": "layers: d -> e",
        "^norm": "layers: -> d",
        "^head$": "d -> out",
        "^head_bias": "out",
    },
    branches="block|norm",
)


@st.composite
def models(draw):
    """Scales of a random residual network, whose layers grow by their own ratios."""
    width, depth = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 2))
    wider, deeper = draw(GROWTHS), draw(GROWTHS)
    count = draw(st.integers(1, 2))

    def build(n, blocks):
        shapes = {"embed": (3, n), "head": (n, 2), "head_bias": (2,)}
        for i in range(count):
            shapes |= {f"norm{i}": (blocks, n), f"block{i}": (blocks, n, n)}
        return {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in shapes.items()}

    if wider == 1 and deeper == 1:
        wider = 2
    point = draw(
        st.sampled_from(["mup", "depth_mup", "completep", "ntk", "mean_field", "ode"])
    )
    richness = draw(st.sampled_from([1.0, 0.25]))
    return optim.infer_scales(
        build(width, depth),
        build(width * wider, depth * deeper),
        delta=build(width * 5, depth),
        axes=AXES,
        parametrization=optim.parametrization(point, richness=richness),
    )


FAMILIES = {
    "sgd": (lambda s: (optax.trace(0.9),), "sgd"),
    "adam": (lambda s: (normalize(s), ADAM), "adam"),
    "lion": (lambda s: (LION,), "lion"),
    "lamb": (lambda s: (normalize(s), ADAM, TRUST), "lamb"),
}


def by_hand(name):
    make, family = FAMILIES[name]
    return lambda s: optax.chain(
        *make(s), optim.scale_by_parametrization(s, family=family), DECAY, RATE
    )


def built(tx, family):
    return lambda s: optim.build_optimizer(0.1, s, tx, family, weight_decay=0.1)


def named(name, **options):
    return lambda s: getattr(optim, name)(0.1, s, **options)


EVERY = {
    **{f"{name}, by hand": by_hand(name) for name in FAMILIES},
    **{name: named(name) for name in ("sgd", "adam", "adafactor")},
    **{name: named(name, weight_decay=0.1) for name in ("adamw", "lion", "lamb")},
    **{
        f"built, {f}": built(t, f)
        for t, f in ((optax.trace(0.9), "sgd"), (ADAM, "adam"))
    },
}


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=2)
@given(scales=models())
def test_every_right_optimizer_passes(scales, name):
    check = optim.check_chain(EVERY[name](scales), scales)
    assert check.hints == ()
    assert all(check.factors[path] is not None for path in scales)


MISTAKES = ("missing", "twice", "before", "decay", "family", "one leaf")


@pytest.mark.parametrize("mistake", MISTAKES)
@settings(max_examples=3)
@given(scales=models(), name=st.sampled_from(["sgd", "adam", "lion"]))
def test_every_injected_mistake_is_found_or_changes_nothing(scales, name, mistake):
    make, family = FAMILIES[name]
    scaling = optim.scale_by_parametrization(scales, family=family)
    other = optim.scale_by_parametrization(scales, family="lamb")
    victim = next(iter(scales))
    double = optax.stateless(lambda u, _: {**u, victim: u[victim] * 2})
    first = make(scales)
    point = scales.parametrization
    rules = {p: optim.multipliers(s, point, family) for p, s in scales.items()}
    wrong = {p: optim.multipliers(s, point, "lamb") for p, s in scales.items()}
    scaled = any(not near(r.learning_rate, 1) for r in rules.values())
    chains = {
        "missing": (*first, DECAY, RATE),
        "twice": (*first, scaling, scaling, DECAY, RATE),
        "before": (scaling, *first, DECAY, RATE),
        "decay": (*first, DECAY, scaling, RATE),
        "family": (*first, other, DECAY, RATE),
        "one leaf": (*first, scaling, double, DECAY, RATE),
    }
    # The order and the number of scalings are seen even if all multipliers are one.
    found = {
        "missing": scaled,
        "twice": True,
        "before": name != "sgd",
        "decay": True,
        "family": any(
            not near(r.learning_rate, wrong[p].learning_rate) for p, r in rules.items()
        ),
        "one leaf": False,  # the same factor at base and target is a choice
    }[mistake]
    tx = optax.chain(*chains[mistake])
    if found:
        with refuses("'"):
            optim.check_chain(tx, scales)
    else:
        optim.check_chain(tx, scales)


def near(one, other):
    return abs(one - other) < 1e-6 * other
