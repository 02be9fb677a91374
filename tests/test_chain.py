"""Chains that would train, only worse, are refused; all others are not."""

import doctest
import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from optax import contrib

from mupax import optim, zoo
from mupax.optim.apply.links import LINKS, STATES, Kind, describe


def mlp(n):
    shapes = {"embed": (5, n), "hidden": (n, n), "head": (n, 3)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


PARAMS = mlp(32)
SCALES = optim.infer_scales(mlp(8), PARAMS).for_parametrization("mup")
LABELS = {"embed": "a", "hidden": "b", "head": "b"}
RATE = optax.scale_by_learning_rate(0.1)

EPS = pytest.mark.filterwarnings("ignore:.*eps.*:mupax.optim.ChainWarning")


def scale(family="adam"):
    return optim.scale_by_parametrization(SCALES, family=family)


def normalize():
    return optim.normalize_gradients(SCALES)


def groups():
    return optim.scale_by_path({"embed": 4.0}, SCALES)


def frozen():
    return optim.scale_by_path({"embed": 0.0}, SCALES)


def adam(**options):
    return optim.adam(0.1, SCALES, **options)


def sgd():
    return optim.sgd(0.1, SCALES)


def masked(tx, *names):
    return optax.masked(tx, {name: name in names for name in PARAMS})


def muon():
    numbers = {"embed": None, "hidden": contrib.MuonDimensionNumbers(), "head": None}
    both = {name: contrib.MuonDimensionNumbers() for name in numbers}
    return contrib.scale_by_muon(weight_dimension_numbers=both)


def refuses(*parts):
    """Expects a ValueError whose message holds each of these parts."""
    pattern = "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(ValueError, match=f"(?s){pattern}")


# --- optim.chain, by what its links are ---

# Each takes `optim.chain`, and is refused before anything runs.
SEEN = {
    "an alias and a scaling": (
        lambda chain: chain(adam(), scale()),
        ("optim.adam (link 0)", "scale_by_parametrization (link 1)", "scaled twice"),
    ),
    "a scaling and an alias": (
        lambda chain: chain(normalize(), optax.scale_by_adam(), scale(), sgd()),
        ("(link 2)", "optim.sgd (link 3)", "scaled twice", "drop"),
    ),
    "nested": (
        lambda chain: chain(
            chain(optax.scale_by_sign(), scale()), chain(scale(), RATE)
        ),
        ("scaled twice", "drop scale_by_parametrization"),
    ),
    "the same one": (
        lambda chain: (lambda one: chain(optax.scale_by_sign(), one, one))(scale()),
        ("scaled twice",),
    ),
    "two aliases": (lambda chain: chain(sgd(), sgd()), ("scaled twice",)),
    "before adam": (
        lambda chain: chain(scale(), optax.scale_by_adam(), RATE),
        ("is before scale_by_adam (link 1)", "put it after scale_by_adam"),
    ),
    "before adam, nested": (
        lambda chain: chain(
            chain(optax.scale_by_sign(), scale()), optax.scale_by_adam()
        ),
        ("is before scale_by_adam", "put it after"),
    ),
    "an alias before adam": (
        lambda chain: chain(sgd(), optax.scale_by_adam()),
        ("optim.sgd (link 0) is before scale_by_adam", "put it after"),
    ),
    "before muon": (
        lambda chain: chain(scale("muon"), muon()),
        ("before scale_by_muon", "put it after"),
    ),
    "before a trust ratio": (
        lambda chain: chain(
            normalize(), optax.scale_by_adam(), scale(), optax.scale_by_trust_ratio()
        ),
        ("before scale_by_trust_ratio", "put it after"),
    ),
    "after decay": (
        lambda chain: chain(
            optax.scale_by_sign(), optax.add_decayed_weights(0.1), scale(), RATE
        ),
        ("after add_decayed_weights (link 1)", "scale the weight decay", "after it"),
    ),
    "an alias after decay": (
        lambda chain: chain(optax.add_decayed_weights(0.1), sgd()),
        ("optim.sgd (link 1) is after add_decayed_weights", "chain optax.trace"),
    ),
    "adam as sgd": (
        lambda chain: chain(optax.scale_by_adam(), scale("sgd"), RATE),
        ("scale_by_adam", "family is 'adam'", "pass family='adam'"),
    ),
    "the alias sgd after adam": (
        lambda chain: chain(optax.scale_by_adam(), sgd()),
        ("scale_by_adam", "pass family='adam'"),
    ),
    "lion as muon": (
        lambda chain: chain(optax.scale_by_lion(), scale("muon")),
        ("scale_by_lion", "pass family='adam'"),
    ),
    "muon as adam": (
        lambda chain: chain(muon(), scale("adam")),
        ("scale_by_muon", "pass family='spectral'"),
    ),
    "lamb as adam": (
        lambda chain: chain(
            normalize(), optax.scale_by_adam(), optax.scale_by_trust_ratio(), scale()
        ),
        ("scale_by_trust_ratio", "pass family='relative'"),
    ),
    "signs as sgd": (
        lambda chain: chain(optax.scale_by_sign(), scale("sgd")),
        ("scale_by_sign", "pass family='adam'"),
    ),
    "momentum as adam": (
        lambda chain: chain(optax.trace(0.9), scale(), RATE),
        ("proportional to the gradient", "family='sgd'"),
    ),
    "clipped sgd as adam": (
        lambda chain: chain(optax.clip(1.0), optax.identity(), scale(), RATE),
        ("proportional to the gradient", "family='sgd'"),
    ),
    "normalizing before an alias": (
        lambda chain: chain(normalize(), adam()),
        ("normalize_gradients (link 0)", "optim.adam (link 1)", "normalized twice"),
    ),
    "normalizing twice": (
        lambda chain: chain(normalize(), normalize(), optax.scale_by_adam(), scale()),
        ("normalized twice", "use one normalize_gradients"),
    ),
    "normalizing for sgd": (
        lambda chain: chain(normalize(), scale("sgd")),
        ("normalize_gradients (link 0)", "SGD", "drop it"),
    ),
    "normalizing updates": (
        lambda chain: chain(optax.scale_by_adam(), normalize(), scale()),
        ("after scale_by_adam", "put it before scale_by_adam"),
    ),
    "clipping after normalizing": (
        lambda chain: chain(
            normalize(), optax.clip_by_global_norm(1.0), optax.scale_by_adam(), scale()
        ),
        ("clip_by_global_norm (link 1)", "put clip_by_global_norm before"),
    ),
    "clipping each parameter before normalizing": (
        lambda chain: chain(
            optax.clip(1.0), normalize(), optax.scale_by_adam(), scale(), RATE
        ),
        ("clip (link 0) is before", "put clip after normalize_gradients"),
    ),
    "clipping each parameter after the scaling": (
        lambda chain: chain(
            normalize(), optax.scale_by_adam(), scale(), optax.clip(1.0), RATE
        ),
        ("clip (link 3) is after", "put it right after normalize_gradients"),
    ),
    "freezing before a decay": (
        lambda chain: chain(
            *(normalize(), optax.scale_by_adam(), scale(), frozen()),
            *(optax.add_decayed_weights(0.1), RATE),
        ),
        ("scale_by_path (link 3) freezes", "still decays", "put it last"),
    ),
    "freezing before an alias with decay": (
        lambda chain: chain(frozen(), optim.lion(0.1, SCALES)),
        ("scale_by_path (link 0) freezes", "optim.lion (link 1)", "put it last"),
    ),
    "clipping after the scaling": (
        lambda chain: chain(
            normalize(), optax.scale_by_adam(), scale(), optax.adaptive_grad_clip(0.01)
        ),
        ("adaptive_grad_clip (link 3) is after", "put it first"),
    ),
    "clipping after an alias": (
        lambda chain: chain(adam(), optax.clip_by_global_norm(1.0)),
        ("clip_by_global_norm (link 1) is after optim.adam", "put it first"),
    ),
    "decay after an alias": (
        lambda chain: chain(adam(), optax.add_decayed_weights(1e-4)),
        ("(link 1) is after optim.adam (link 0)", "grow", "optim.adamw"),
    ),
    "decay after sgd": (
        lambda chain: chain(sgd(), optax.add_decayed_weights(1e-4)),
        ("(link 1) is after optim.sgd (link 0)", "grow", "chain optax.trace"),
    ),
    "decay after the rate": (
        lambda chain: chain(
            optax.trace(0.9), scale("sgd"), RATE, optax.add_decayed_weights(0.1)
        ),
        ("(link 3) is after scale (link 2)", "grow", "before the learning rate"),
    ),
    "decay after a schedule that starts at zero": (
        lambda chain: chain(
            scale("sgd"),
            optax.scale_by_learning_rate(optax.linear_schedule(0.0, 0.1, 10)),
            optax.add_decayed_weights(0.1),
        ),
        ("after scale_by_schedule", "grow", "before the learning rate"),
    ),
    "a rate after an alias": (
        lambda chain: chain(adam(), RATE),
        ("scale (link 1) is after optim.adam (link 0)", "raise the loss", "drop it"),
    ),
    "a schedule after an alias": (
        lambda chain: chain(
            sgd(), optax.scale_by_learning_rate(optax.linear_schedule(0.0, 0.1, 10))
        ),
        ("scale_by_schedule (link 1) is after optim.sgd", "To maximize, put"),
    ),
    "a negative decay": (
        lambda chain: chain(scale("sgd"), optax.add_decayed_weights(-0.1), RATE),
        ("add_decayed_weights (link 1)", "negative decay", "make it positive"),
    ),
    "a schedule before adam": (
        lambda chain: chain(
            optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
            normalize(),
            optax.scale_by_adam(),
            scale(),
            RATE,
        ),
        ("scale_by_schedule (link 0) is before scale_by_adam", "no effect", "last"),
    ),
    "a rate before an alias": (
        lambda chain: chain(RATE, adam()),
        ("scale (link 0) is before optim.adam (link 1)", "no effect"),
    ),
    "normalizing by other rules": (
        lambda chain: chain(
            optim.normalize_gradients(optim.infer_scales(mlp(8), PARAMS), "ntk"),
            optax.scale_by_adam(),
            scale(),
        ),
        ("normalize_gradients (link 0)", "ntk", "mup", "give both the same"),
    ),
    "normalizing by other scales": (
        lambda chain: chain(
            optim.normalize_gradients(optim.infer_scales(mlp(4), PARAMS), "mup"),
            optax.scale_by_adam(),
            scale(),
        ),
        ("different scales of 'embed'", "make the scales once"),
    ),
    "a line search": (
        lambda chain: chain(optax.scale_by_lbfgs(), scale("sgd")),
        ("scale_by_lbfgs", "no rule", "use an optimizer of mupax.optim"),
    ),
    "groups before adam": (
        lambda chain: chain(groups(), normalize(), optax.scale_by_adam(), scale()),
        ("scale_by_path (link 0) is before scale_by_adam", "no effect", "put it after"),
    ),
    "groups after decay": (
        lambda chain: chain(
            optax.scale_by_sign(), scale(), optax.add_decayed_weights(0.1), groups()
        ),
        ("scale_by_path (link 3) is after add_decayed_weights", "before the decay"),
    ),
    "groups before an alias": (
        lambda chain: chain(groups(), adam()),
        ("scale_by_path (link 0) is before optim.adam", "optim.for_modules"),
    ),
    "groups after an alias with decay": (
        lambda chain: chain(optim.adamw(0.1, SCALES), groups()),
        ("scale_by_path (link 1) is after optim.adamw", "its weight decay"),
    ),
    "groups before adam, without a scaling": (
        lambda chain: chain(groups(), optax.scale_by_adam(), RATE),
        ("scale_by_path (link 0) is before scale_by_adam", "no effect"),
    ),
}


def test_groups_beside_an_optimizer_without_decay_are_accepted():
    optim.chain(sgd(), groups())
    optim.chain(groups(), sgd())
    optim.chain(adam(), groups())
    optim.chain(optim.adamw(0.1, SCALES, weight_decay=0.0), groups())
    optim.chain(optim.adamw(0.1, SCALES), frozen())
    optim.chain(frozen(), adam())


def test_groups_are_scaled_between_the_scaling_and_the_decay():
    tx = optim.chain(
        *(normalize(), optax.scale_by_adam(), scale(), groups()),
        *(optax.add_decayed_weights(0.1), RATE),
    )
    plain = optim.chain(normalize(), optax.scale_by_adam(), scale(), RATE)
    one, other = (t.update(PARAMS, t.init(PARAMS), PARAMS)[0] for t in (tx, plain))
    decay = -0.1 * 0.1
    for name, factor in (("embed", 4.0), ("hidden", 1.0)):
        wanted = factor * other[name] + decay * PARAMS[name]
        assert jnp.allclose(one[name], wanted, rtol=1e-5)


@pytest.mark.parametrize("case", SEEN)
@EPS
def test_a_wrong_link_is_refused_when_the_chain_is_made(case):
    make, message = SEEN[case]
    with refuses(*message):
        make(optim.chain)


def test_something_else_than_a_transform_is_refused():
    with refuses("is not an optax.GradientTransformation", "one by one"):
        optim.chain([optax.scale_by_adam(), scale()])
    with refuses("at least one"):
        optim.chain()


def test_an_eps_without_normalized_gradients_is_a_warning():
    with pytest.warns(optim.ChainWarning, match="put optim.normalize_gradients"):
        optim.chain(optax.scale_by_adam(), scale(), RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.chain(normalize(), optax.scale_by_adam(), scale(), RATE)
        optim.chain(optax.scale_by_lion(), scale(), RATE)


def test_optimizers_that_find_their_own_step_size_are_a_warning():
    for tx in (contrib.prodigy(), contrib.dadapt_adamw(), contrib.momo()):
        with pytest.warns(optim.ChainWarning, match="finds its own step size"):
            optim.chain(tx, scale())


@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)])
def test_clipped_gradients_of_sgd_are_a_warning_at_the_users_line(clip):
    with pytest.warns(optim.ChainWarning, match="tune its threshold") as said:
        optim.chain(clip, sgd())
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.chain(optax.clip_by_global_norm(1.0), adam())


def test_clipping_each_parameter_before_an_alias_is_a_warning():
    with pytest.warns(optim.ChainWarning, match="in place of optim.adamw") as said:
        optim.chain(optax.clip(1.0), optim.adamw(0.1, SCALES))
    assert said[0].filename == __file__


def test_clipping_by_the_ratio_of_gradient_and_weight_is_a_warning():
    clip = optax.adaptive_grad_clip(0.01)
    with pytest.warns(optim.ChainWarning, match="clip_by_global_norm") as said:
        optim.chain(clip, optim.adamw(0.1, SCALES))
    assert said[0].filename == __file__
    with pytest.warns(optim.ChainWarning, match="their ratio changes"):
        optim.chain(clip, normalize(), optax.scale_by_adam(), scale(), RATE)


def test_clipping_after_normalizing_acts_alike_at_every_width():
    """A gradient with one spike, of the sizes that the rules give."""

    def update(width):
        params, mup = mlp(width), optim.parametrization("mup")
        scales = optim.infer_scales(mlp(8), params)
        tx = optim.chain(
            optim.normalize_gradients(scales, "mup"),
            optax.clip(1.0),
            optax.scale_by_adam(),
            optim.scale_by_parametrization(scales, "mup"),
        )
        state = tx.init(params)
        for size in (0.5, 0.5, 8.0, 0.5):
            grads = {
                path: jnp.full_like(
                    params[path], size * optim.multipliers(scale, mup).gradient
                )
                for path, scale in scales.items()
            }
            updates, state = tx.update(grads, state, params)
        return {
            path: float(updates[path][0, 0])
            / optim.multipliers(scale, mup).learning_rate
            for path, scale in scales.items()
        }

    assert update(16) == pytest.approx(update(128), rel=1e-5)


def test_two_weight_decays_are_a_warning_at_the_users_line():
    decay = optax.add_decayed_weights(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.chain(optax.scale_by_lion(), scale(), decay, RATE)
    for links in (
        (optax.scale_by_lion(), scale(), decay, decay, RATE),
        (optim.adamw(1e-3, SCALES), optax.add_decayed_weights(-1e-4)),
    ):
        with pytest.warns(optim.ChainWarning, match="they decay twice") as said:
            optim.chain(*links)
        assert said[0].filename == __file__


@pytest.mark.parametrize(
    "links",
    [
        (optax.inject_hyperparams(optim.adam)(1e-2, scales=SCALES), RATE),
        (adam(), optax.inject_hyperparams(optax.scale_by_learning_rate)(1e-2)),
        (normalize(), optax.adam(1e-2), scale(), RATE),
    ],
)
def test_hidden_links_that_cancel_the_minus_are_a_warning(links):
    tx = optim.chain(*links)
    with pytest.warns(optim.ChainWarning, match="points along its gradient"):
        tx.init(PARAMS)


def test_a_plateau_before_adam_has_no_effect():
    plateau = contrib.reduce_on_plateau(factor=0.1, patience=1)
    for links in ((optax.scale_by_lion(), scale()), (optim.lion(1e-2, SCALES),)):
        with refuses("reduce_on_plateau", "last in the chain"):
            optim.chain(plateau, *links)


def test_curvature_is_named_before_the_family():
    with refuses("scale_by_lbfgs", "no rule is known"):
        optim.chain(optax.scale_by_lbfgs(), scale())


def test_the_norm_of_gradients_changes_with_width():
    """Which is why a threshold does not transfer."""

    def norm(width):
        model = zoo.create(
            "mlp", width=width, base_width=256, depth=3, rngs=nnx.Rngs(0)
        )
        x = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
        return optax.tree.norm(nnx.grad(lambda m: model_loss(m(x)))(model))

    def model_loss(logits):
        labels = jnp.arange(64) % 10
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    assert norm(1024) / norm(256) > 1.3


def test_noise_is_a_warning_and_no_decay():
    noise = optax.add_noise(1e-6, 0.0, 0)
    with pytest.warns(optim.ChainWarning, match="add_noise adds noise whose size"):
        tx = optim.chain(noise, scale("sgd"), RATE)
    assert optim.check_chain(tx, SCALES).passed
    decay = optax.add_decayed_weights(0.1)
    with refuses("the weight decay of 'embed'", "grow"):
        optim.check_chain(optax.chain(noise, sgd(), decay), SCALES)


def test_factors_after_an_alias_are_right_without_a_minus():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.chain(adam(), optax.scale(0.5))
        optim.chain(adam(), optax.scale_by_schedule(optax.linear_schedule(0, 1, 10)))
        optim.chain(optax.scale(-1.0), adam())  # maximizes


def test_optimizers_inside_of_sam_are_not_called_unscaled():
    with pytest.warns(optim.ChainWarning, match="sam uses curvature.*no rule"):
        optim.chain(contrib.sam(sgd(), sgd())).init(PARAMS)


@pytest.mark.parametrize(
    "links",
    [
        (optax.clip_by_global_norm(1.0), optax.scale_by_adam(), RATE),
        (optax.trace(0.9), RATE),
        (optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    ],
)
def test_a_chain_without_a_scaling_is_a_warning(links):
    with pytest.warns(optim.ChainWarning, match="no link .* scales the updates"):
        optim.chain(*links).init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = optim.chain(normalize(), optax.scale_by_adam())
        optim.chain(first, scale(), RATE).init(PARAMS)


# --- optim.chain, by running ---

# Links that hide others: each is refused at init.
HIDDEN = {
    "injected": (
        lambda: optim.chain(optax.inject_hyperparams(optim.adam)(0.1, SCALES), scale()),
        ("scaled twice",),
    ),
    "both injected": (
        lambda: optim.chain(
            optax.inject_hyperparams(lambda rate: optim.sgd(rate, SCALES))(0.1), sgd()
        ),
        ("scaled twice",),
    ),
    "in a partition": (
        lambda: optim.chain(
            optax.partition({"all": adam()}, dict.fromkeys(PARAMS, "all")), scale()
        ),
        ("scaled twice",),
    ),
    "on masks that meet": (
        lambda: optim.chain(
            masked(sgd(), "embed", "hidden"), masked(sgd(), "hidden", "head")
        ),
        ("'hidden'", "scaled twice"),
    ),
    "around MultiSteps": (
        lambda: optim.chain(
            optax.MultiSteps(adam(), 2).gradient_transformation(), scale()
        ),
        ("scaled twice",),
    ),
    "before optax.adam": (
        lambda: optim.chain(scale(), optax.adam(0.1)),
        ("'head'", "1 times the base's", "should be 0.25", "no effect", "after"),
    ),
    "after adamw": (
        lambda: optim.chain(optax.adamw(0.1), scale()),
        ("the weight decay of 'head'", "by 0.25", "put add_decayed_weights after"),
    ),
    "after a masked adamw in MultiSteps": (
        lambda: optim.chain(
            optax.MultiSteps(
                optax.adamw(0.1, mask=dict.fromkeys(PARAMS, True)), 2
            ).gradient_transformation(),
            scale(),
        ),
        ("the weight decay of 'head'", "by 0.25"),
    ),
    "adam as sgd, injected": (
        lambda: optim.chain(
            optax.inject_hyperparams(optax.scale_by_adam)(0.9), scale("sgd")
        ),
        ("'embed'", "4 times the base's", "should be 1", "pass family='adam'"),
    ),
    "sgd as adam": (
        lambda: optim.chain(optax.clip(1.0), optax.sgd(0.1), scale()),
        ("'embed'", "0.25 times the base's", "family='sgd'"),
    ),
    "NovoGrad as adam": (
        lambda: optim.chain(optax.scale_by_novograd(), scale()),
        ("'embed'", "2 times too small", "pass family='spectral'"),
    ),
    "Polyak-SGD as adam": (
        lambda: optim.chain(optax.polyak_sgd(), scale()),
        ("'embed'", "4 times too small", "pass family='sgd'"),
    ),
    "one scaling for two families": (
        lambda: optim.chain(
            optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, LABELS),
            scale(),
        ),
        ("'hidden'", "4 times too small", "put a scaling into each branch"),
    ),
    "a line search": (
        lambda: optim.chain(optax.lbfgs(), scale("sgd")),
        ("ScaleByLBFGSState", "no rule"),
    ),
    "clipping of a user's own": (
        lambda: optim.chain(
            scale("sgd"), optax.stateless(lambda u, _: jax.tree.map(jnp.tanh, u))
        ),
        ("'embed'", "a transform after it clips or normalizes"),
    ),
}
HIDDEN["frozen by a mask"] = (
    lambda: optim.chain(masked(adam(), "embed", "head")),
    ("'hidden'", "is its gradient", "optax.masked", "optax.set_to_zero()"),
)
HIDDEN["frozen by a mask, clipped"] = (
    lambda: optim.chain(optax.clip_by_global_norm(1.0), masked(sgd(), "embed")),
    ("'head'", "'hidden'", "is its gradient", "optax.set_to_zero()"),
)
IGNORED = pytest.mark.filterwarnings("ignore::mupax.optim.ChainWarning")


@pytest.mark.parametrize("case", HIDDEN)
@IGNORED
def test_a_wrong_link_inside_of_others_is_refused_at_init(case):
    make, message = HIDDEN[case]
    with refuses(*message):
        make().init(PARAMS)


@IGNORED
def test_it_is_refused_under_jit_and_eval_shape_too():
    for start in (jax.jit, lambda init: lambda p: jax.eval_shape(init, p)):
        with refuses("the weight decay of 'head'"):
            start(optim.chain(optax.adamw(0.1), scale()).init)(PARAMS)


def test_hidden_optimizers_that_find_their_own_step_size_are_a_warning():
    with pytest.warns(optim.ChainWarning, match="finds its own step size"):
        optim.chain(contrib.dog(), scale("sgd")).init(PARAMS)


def user_adamw(chain):
    return chain(
        optax.clip_by_global_norm(1.0),
        normalize(),
        optax.scale_by_adam(),
        scale(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda step: -0.1),
    )


def user_sgd(chain):
    return chain(optax.trace(0.9), scale("sgd"), optax.add_decayed_weights(0.1), RATE)


RIGHT = {
    "adamw, by hand": user_adamw,
    "sgd, by hand": user_sgd,
    "after optax.sgd": lambda chain: chain(optax.sgd(0.1, 0.9), scale("sgd")),
    "after signs": lambda chain: chain(optax.scale_by_sign(), scale(), RATE),
    "lamb, by hand": lambda chain: chain(
        normalize(),
        optax.scale_by_adam(),
        optax.scale_by_trust_ratio(),
        scale("lamb"),
        RATE,
    ),
    "muon, by hand": lambda chain: chain(muon(), scale("muon"), RATE),
    "in pieces": lambda chain: chain(
        chain(normalize(), optax.scale_by_adam()), chain(scale(), RATE)
    ),
    "clipped": lambda chain: chain(
        optax.clip_by_global_norm(1.0), optim.adamw(0.1, SCALES)
    ),
    "entries clipped after normalizing": lambda chain: chain(
        normalize(), optax.clip(1.0), optax.scale_by_adam(), scale(), RATE
    ),
    "slowed": lambda chain: chain(optim.adamw(0.1, SCALES), optax.scale(0.5)),
    "averaged": lambda chain: chain(optim.adamw(0.1, SCALES), optax.ema(0.9)),
    "injected": lambda chain: chain(
        normalize(), optax.inject_hyperparams(optax.scale_by_adam)(0.9), scale(), RATE
    ),
    "partitioned, one in each branch": lambda chain: optax.partition(
        {"a": user_adamw(chain), "b": user_sgd(chain)}, LABELS
    ),
    "partitioned in a chain": lambda chain: chain(
        optax.clip(1.0),
        optax.partition({"a": optim.adamw(0.1, SCALES), "b": sgd()}, LABELS),
    ),
    "masks that do not meet": lambda chain: chain(
        masked(user_adamw(chain), "embed"), masked(user_sgd(chain), "hidden", "head")
    ),
    "accumulated in a chain": lambda chain: chain(
        optax.clip(1.0),
        optax.MultiSteps(user_adamw(chain), 2).gradient_transformation(),
    ),
    "guarded": lambda chain: optax.apply_if_finite(user_adamw(chain), 2),
    "centralized": lambda chain: chain(optax.centralize(), adam()),
    "a decay that does not follow the rate": lambda chain: chain(
        adam(), optax.add_decayed_weights(-1e-4)
    ),
    "updates that the user subtracts": lambda chain: chain(
        scale("sgd"), optax.scale(0.1), optax.add_decayed_weights(0.1)
    ),
    "ascent on a scaled loss": lambda chain: chain(
        optax.scale(-1.0), optax.scale(1 / 1024), adam()
    ),
    "a schedule before momentum": lambda chain: chain(
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
        optax.trace(0.9),
        scale("sgd"),
        RATE,
    ),
    "a part frozen": lambda chain: chain(
        optax.partition({"a": adam(), "b": optax.set_to_zero()}, LABELS)
    ),
}


@pytest.mark.parametrize("case", RIGHT)
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


def test_a_chain_adds_no_state_and_compiles_once():
    tx = optim.chain(optax.clip(1.0), optax.masked(sgd(), True), optax.scale(0.5))
    state = tx.init(PARAMS)
    plain = optax.chain(optax.clip(1.0), optax.masked(sgd(), True), optax.scale(0.5))
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
        tx = optim.chain(optax.masked(optim.adam(rate, SCALES), True), optax.scale(0.5))
        return tx.init(PARAMS)

    jax.vmap(start)(jnp.ones(2))


def test_every_transform_of_optax_is_decided_on():
    """Of each factory in optax and optax.contrib it is known what its updates are."""
    made = set()
    inner = optax.sgd(0.1)
    for module in (optax, contrib):
        for factory in vars(module).values():
            if not inspect.isfunction(factory):
                continue
            for arguments in ((), (0.1,), (inner,), (inner, 0.1), (inner, {"a": True})):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        tx = factory(*arguments)
                except Exception:  # other arguments
                    continue
                if isinstance(tx, optax.GradientTransformation):
                    made.add(describe(tx).name)
                    break
    assert "scale_by_adam" in made
    assert len(made) > 50
    assert made <= set(LINKS)


def test_states_that_are_looked_for_exist():
    modules = [optax, contrib, optax.transforms]
    names = {name for module in modules for name in vars(module)}
    import optax._src.linesearch as search
    import optax._src.transform as transform

    names |= set(vars(search)) | set(vars(transform))
    assert set(STATES) <= names
    assert {Kind.OWN_STEP, Kind.CURVATURE} == set(STATES.values())


# --- check_chain: any optimizer, from outside ---


@pytest.mark.parametrize(
    "case", ["before adam", "adam as sgd", "after decay", "normalizing twice"]
)
def test_a_plain_optax_chain_is_seen_through(case):
    make, _ = SEEN[case]
    path = "embed" if case in ("adam as sgd", "normalizing twice") else "head"
    with refuses(f"of {path!r}"):
        optim.check_chain(make(optax.chain), SCALES)


@pytest.mark.parametrize("case", ["adamw, by hand", "lamb, by hand", "clipped"])
def test_a_right_optax_chain_passes(case):
    check = optim.check_chain(RIGHT[case](optax.chain), SCALES)
    assert check.passed
    assert check.hints == ()
    assert {p: r.verdict for p, r in check.rows.items()} == dict.fromkeys(PARAMS, "ok")


def test_a_missing_scaling_names_path_and_factor():
    with refuses("'head'", "1 times the base's", "should be 0.25", "4 times too large"):
        optim.check_chain(optax.adam(0.1), SCALES)
    with refuses("'embed'", "0.25 times the base's", "4 times too small"):
        optim.check_chain(optax.sgd(0.1), SCALES)


def test_a_decay_that_makes_weights_grow_is_seen():
    with refuses("the weight decay of 'embed'", "grow", "optim.adamw"):
        optim.check_chain(optax.chain(sgd(), optax.add_decayed_weights(0.1)), SCALES)


def test_clipping_after_the_scaling_is_seen():
    clip = optax.adaptive_grad_clip(0.01)
    with refuses("'embed'", "by 1 and small ones by 4", "put clipping before"):
        optim.check_chain(optax.chain(scale("sgd"), clip, RATE), SCALES)


@pytest.mark.parametrize(
    "links", [(normalize(), optax.scale_by_adam(), scale()), (adam(), RATE)]
)
def test_updates_that_raise_the_loss_are_a_hint(links):
    hints = optim.check_chain(optax.chain(*links), SCALES).hints
    assert len(hints) == 3
    assert all("raises the loss" in h and "minus" in h for h in hints)


def test_a_frozen_parameter_that_decays_is_a_hint():
    mask = {"embed": True, "hidden": False, "head": False}
    freeze = optax.masked(optax.set_to_zero(), mask)
    links = freeze, optim.adamw(0.1, SCALES, weight_decay=0.1)
    (hint,) = optim.check_chain(optax.chain(*links), SCALES).hints
    assert "'embed' is its weight decay alone" in hint
    with pytest.warns(optim.ChainWarning, match="weight decay alone"):
        optim.chain(*links).init(PARAMS)
    assert optim.check_chain(optax.chain(*links[::-1]), SCALES).hints == ()


def test_lookahead_inside_of_a_chain_is_not_checked():
    params = optax.LookaheadParams.init_synced(PARAMS)
    tx = optim.chain(optax.lookahead(optim.adamw(0.1, SCALES), 5, 0.5))
    with pytest.warns(optim.ChainWarning, match="put optim.chain inside"):
        tx.init(params)


def test_multipliers_written_by_hand_are_taken_for_rates_by_layer():
    rates = {"embed": 1.0, "hidden": 0.25, "head": 0.25}
    by_hand = optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, u, rates))
    with refuses("'head'", "no scaling acts on it", "add scale_by_parametrization"):
        optim.check_chain(optax.chain(optax.scale_by_lion(), by_hand), SCALES)


def test_layerwise_learning_rates_are_a_users_own_choice():
    rates = {"a": optim.adam(0.1, SCALES), "b": optim.adam(0.02, SCALES)}
    assert optim.check_chain(optax.partition(rates, LABELS), SCALES).passed


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


def test_explain_shows_what_the_optimizer_does():
    good = optim.explain(SCALES, optimizer="adam", tx=adam())
    assert good.check.passed
    assert "tx" in str(good)
    bad = optim.explain(SCALES, optimizer="adam", tx=optax.adam(0.1))
    row = next(line for line in str(bad).split("\n") if line.startswith("head"))
    assert row.endswith("WRONG, 4x")
    assert "no scaling acts on it" in str(bad)


def test_the_page_about_chains_runs():
    page = pathlib.Path(__file__).parents[1] / "docs" / "chains.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, 6)


# --- properties ---

GROWTHS = st.sampled_from([1, 2, 3, 8])


@st.composite
def models(draw):
    """Scales of a random residual network, whose layers grow by their own ratios."""
    width = draw(st.sampled_from([2, 4, 6]))
    wider, deeper = draw(GROWTHS), draw(GROWTHS)
    shapes = {"embed": (3, 1), "head": (1, 2), "head_bias": (2,)}
    for i in range(draw(st.integers(1, 2))):
        shapes[f"norm{i}"] = (1,)
        shapes[f"block{i}"] = (1, 1)
    depth = draw(st.integers(1, 2))

    def build(n, blocks):
        def sized(name, shape):
            grown = {"embed": (3, n), "head": (n, 2), "head_bias": (2,)}
            if name in grown:
                return grown[name]
            return (blocks, *(n for _ in shape))

        return {
            name: jax.ShapeDtypeStruct(sized(name, shape), jnp.float32)
            for name, shape in shapes.items()
        }

    if wider == 1 and deeper == 1:
        wider = 2
    scales = optim.infer_scales(
        build(width, depth),
        build(width * wider, depth * deeper),
        delta=build(width * 5, depth),
        depth=(depth, depth * deeper),
        branch="block|norm",
        # Widths this small coincide with the sizes of other axes.
        axes={
            "^embed$": ((0,), (1,)),
            "^block": ((1,), (2,)),
            "^norm": ((), (1,)),
            "^head$": ((0,), (1,)),
        },
    )
    point = draw(
        st.sampled_from(["mup", "depth_mup", "completep", "ntk", "mean_field", "ode"])
    )
    return scales.for_parametrization(
        optim.parametrization(point, richness=draw(st.sampled_from([1.0, 0.25])))
    )


FAMILIES = {
    "sgd": (lambda s: (optax.trace(0.9),), "sgd"),
    "adam": (lambda s: (optim.normalize_gradients(s), optax.scale_by_adam()), "adam"),
    "lion": (lambda s: (optax.scale_by_lion(),), "lion"),
    "lamb": (
        lambda s: (
            optim.normalize_gradients(s),
            optax.scale_by_adam(),
            optax.scale_by_trust_ratio(),
        ),
        "lamb",
    ),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=3)
@given(scales=models())
def test_every_right_chain_passes(scales, name):
    make, family = FAMILIES[name]
    scaling = optim.scale_by_parametrization(scales, family=family)
    tx = optax.chain(*make(scales), scaling, optax.add_decayed_weights(0.1), RATE)
    check = optim.check_chain(tx, scales)
    assert check.hints == ()
    assert {path: row.verdict for path, row in check.rows.items()} == dict.fromkeys(
        scales, "ok"
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lamb", "adafactor"])
@settings(max_examples=3)
@given(scales=models())
def test_every_optimizer_passes(scales, name):
    options = {"weight_decay": 0.1} if name in ("adamw", "lion", "lamb") else {}
    tx = getattr(optim, name)(0.1, scales, **options)
    check = optim.check_chain(tx, scales)
    assert check.hints == ()
    assert {path: row.verdict for path, row in check.rows.items()} == dict.fromkeys(
        scales, "ok"
    )


MISTAKES = ("missing", "twice", "before", "decay", "family", "one leaf")


@pytest.mark.parametrize("mistake", MISTAKES)
@settings(max_examples=4)
@given(scales=models(), name=st.sampled_from(["sgd", "adam", "lion"]))
def test_every_injected_mistake_is_found_or_changes_nothing(scales, name, mistake):
    make, family = FAMILIES[name]
    scaling = optim.scale_by_parametrization(scales, family=family)
    other = optim.scale_by_parametrization(scales, family="lamb")
    victim = next(iter(scales))
    halve = optax.stateless(lambda u, _: {**u, victim: u[victim] * (scaled - 1)})
    first, decay = make(scales), optax.add_decayed_weights(0.1)
    point = scales.parametrization
    rules = {p: optim.multipliers(s, point, family) for p, s in scales.items()}
    wrong = {p: optim.multipliers(s, point, "lamb") for p, s in scales.items()}
    scaled = 3.0
    chains = {
        "missing": (*first, decay, RATE),
        "twice": (*first, scaling, scaling, decay, RATE),
        "before": (scaling, *first, decay, RATE),
        "decay": (*first, decay, scaling, RATE),
        "family": (*first, other, decay, RATE),
        "one leaf": (*first, scaling, halve, decay, RATE),
    }
    # By a table of one's own: which mistakes change the size of an update at all.
    changed = {
        "missing": any(not near(r.learning_rate, 1) for r in rules.values()),
        "twice": any(not near(r.learning_rate, 1) for r in rules.values()),
        "before": name != "sgd"
        and any(not near(r.learning_rate, 1) for r in rules.values()),
        "decay": any(not near(r.learning_rate, 1) for r in rules.values()),
        "family": any(
            not near(r.learning_rate, wrong[p].learning_rate) for p, r in rules.items()
        ),
        "one leaf": False,  # the same factor at base and target is a choice
    }[mistake]
    if changed:
        with refuses("'"):
            optim.check_chain(optax.chain(*chains[mistake]), scales)
    else:
        assert optim.check_chain(optax.chain(*chains[mistake]), scales).passed


def near(one, other):
    return abs(one - other) < 1e-6 * other


def test_a_chain_that_cannot_be_checked_is_a_warning():
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    kept = optax.stateless(lambda u, p: jax.tree.map(jnp.multiply, u, ones))
    tx = optim.chain(optim.sgd(0.1, SCALES), kept)
    with pytest.warns(optim.ChainWarning, match="could not check this chain"):
        tx.init(PARAMS)


def test_norms_of_parameters_are_not_taken_for_their_rms():
    norm = optax.scale_by_param_block_norm()
    tx = optim.chain(normalize(), optax.scale_by_adam(), norm, scale("relative"), RATE)
    with refuses("'embed'", "too large"):
        tx.init(PARAMS)


def test_a_scaling_for_adam_in_a_chain_without_adam_is_a_warning():
    params = {"in": jnp.ones((8, 16)), "out": jnp.ones((16, 2))}
    base = {"in": jnp.ones((8, 4)), "out": jnp.ones((4, 2))}
    scaling = optim.scale_by_parametrization(optim.infer_scales(base, params), "mup")
    tx = optim.chain(scaling, optax.scale_by_learning_rate(0.1))
    with pytest.warns(optim.ChainWarning, match="no optimizer is in this"):
        tx.init(params)
