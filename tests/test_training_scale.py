"""Batch size and training length: the rules, the optimizers, and what they preserve."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from mupax import optim, zoo

KAPPA = 4.0


def one_weight(**training):
    """The scales of a model that does not grow, of a single matrix."""
    params = {"w": jnp.zeros((3, 3))}
    return optim.infer_scales(params, params, axes={"w": "i -> o"}, **training)


# ----- Exact means and covariances on a linear-Gaussian problem.

HESSIAN = np.array([[1.0, 0.3], [0.3, 0.5]])
NOISE = np.array([[1.0, 0.2], [0.2, 0.8]])  # covariance of one example's gradient
START = np.array([1.0, -2.0])


def moments(transition, gain, noise, steps):
    """Mean and covariance of x' = transition x + gain (noise), from x = (START, 0)."""
    mean = np.zeros(len(transition))
    mean[: len(START)] = START
    cov = np.zeros_like(transition)
    for _ in range(steps):
        mean = transition @ mean
        cov = transition @ cov @ transition.T + gain @ noise @ gain.T
    n = len(START)
    return np.concatenate([mean[:n], cov[:n, :n].ravel()])


def linear_step(tx, memory, at):
    """The optimizer's own step as matrices: weights and memory, and the gradient.

    Args:
      tx: the optimizer.
      memory: (state, vector) -> state with its first moment replaced.
      at: gradients at which the step is linearized; the Jacobians are averaged.
    """
    n = len(START)
    state = tx.init({"w": jnp.zeros(n)})
    ravel = memory(state)

    def step(x, gradient):
        w, state = {"w": x[:n]}, ravel(x[n:])
        updates, new = tx.update({"w": gradient}, state, w)
        return jnp.concatenate(
            [optax.apply_updates(w, updates)["w"], ravel.read(new)[: len(x) - n]]
        )

    zero = jnp.zeros(n + ravel.size)
    jacobians = [jax.jacobian(step, (0, 1))(zero, jnp.asarray(g)) for g in at]
    a, b = (np.mean([np.asarray(j[i]) for j in jacobians], axis=0) for i in (0, 1))
    a = a.copy()
    a[:, :n] += b @ HESSIAN
    return a, b


class Trace:
    """The momentum of SGD, as a vector."""

    def __init__(self, state):
        self.state = state
        flat, self.back = ravel_pytree(state)
        self.size = flat.size

    def __call__(self, vector):
        return self.back(vector)

    def read(self, state):
        return ravel_pytree(state)[0]


class Adam:
    """The first moment of Adam; its second moment is held at its stationary value."""

    size = 2

    def __init__(self, state, second):
        self.state, self.second = state, second

    def __call__(self, vector):
        def replaced(part):
            if not isinstance(part, optax.ScaleByAdamState):
                return part
            # Long after the start: no bias correction.
            return part._replace(
                count=jnp.int32(2**30),
                mu={"w": vector},
                nu={"w": jnp.asarray(self.second)},
            )

        is_adam = lambda part: isinstance(part, optax.ScaleByAdamState)  # noqa: E731
        return jax.tree.map(replaced, self.state, is_leaf=is_adam)

    def read(self, state):
        return optax.tree.get(state, "mu")["w"]


def scaled(kappa):
    params = {"w": jnp.zeros(2)}
    return optim.infer_scales(params, params, axes={"w": "d"}, batch=(1, kappa))


def sgd_moments(rate, kappa, momentum, batch_rule=True):
    scales = scaled(kappa if batch_rule else 1.0)
    tx = optim.sgd(rate, scales, momentum=momentum)
    step = linear_step(tx, Trace, [np.zeros(2)])
    return moments(*step, NOISE / kappa, round(2.0 / rate / kappa))


def order(distance, small, large):
    """The power of the step size with which a distance vanishes."""
    return np.log2(distance(large) / distance(small)) / np.log2(large / small)


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_sgd_keeps_mean_and_covariance_to_first_order_in_the_learning_rate(momentum):
    with jax.enable_x64(True):

        def distance(rate):
            one, four = (sgd_moments(rate, k, momentum) for k in (1.0, KAPPA))
            return np.linalg.norm(four - one) / np.linalg.norm(one)

        assert distance(2.0**-9) < 0.02
        assert order(distance, 2.0**-9, 2.0**-7) == pytest.approx(1.0, abs=0.1)
        unscaled = sgd_moments(2.0**-9, KAPPA, momentum, batch_rule=False)
        one = sgd_moments(2.0**-9, 1.0, momentum)
        assert np.linalg.norm(unscaled - one) > 0.1 * np.linalg.norm(one)


def adam_moments(time, kappa, told=None):
    """AdamW where noise dominates: 1-β ~ η², noise ~ 1/η, decay ~ η (Malladi)."""
    rate = time**0.5
    sigma = np.array([1.0, 0.7]) / rate
    settings = {
        "b1": 1 - 8 * time,
        "b2": 1 - 2 * time,
        "eps": 0.5 / rate,
        "weight_decay": 0.3 * rate,
    }
    tx = optim.adamw(rate, scaled(told or kappa), **settings)
    # The second moment of a noisy gradient, as normalized before Adam.
    seen = sigma**2 / kappa * (told or kappa)
    at = [sign * sigma / kappa**0.5 for sign in (1, -1)]
    step = linear_step(tx, lambda state: Adam(state, seen), at)
    return moments(*step, np.diag(sigma**2) / kappa, round(2.0 / time / kappa))


def test_adamw_keeps_mean_and_covariance_to_first_order_in_the_squared_rate():
    with jax.enable_x64(True):

        def distance(time):
            one, four = (adam_moments(time, k) for k in (1.0, KAPPA))
            return np.linalg.norm(four - one) / np.linalg.norm(one)

        assert distance(2.0**-12) < 5e-4
        assert order(distance, 2.0**-13, 2.0**-11) == pytest.approx(1.0, abs=0.1)
        one = adam_moments(2.0**-12, 1.0)
        unscaled = adam_moments(2.0**-12, KAPPA, told=1.0)
        assert np.linalg.norm(unscaled - one) > 0.1 * np.linalg.norm(one)


# ----- The optimizers against their Optax namesakes.

ROOT = KAPPA**0.5
BETAS = {"b1": 0.9**KAPPA, "b2": 0.99**KAPPA}
GIVEN = {"b1": 0.9, "b2": 0.99}
PAIRS = {
    "sgd": (
        lambda s: optim.sgd(0.1, s, momentum=0.9),
        optax.sgd(0.1 * KAPPA, momentum=0.9),
    ),
    "adam": (
        lambda s: optim.adam(0.1, s, eps=0.3, **GIVEN),
        optax.adam(0.1 * ROOT, eps=0.3 / ROOT, **BETAS),
    ),
    "adamw": (
        lambda s: optim.adamw(0.1, s, eps=0.3, weight_decay=0.2, **GIVEN),
        optax.adamw(0.1 * ROOT, eps=0.3 / ROOT, weight_decay=0.2 * ROOT, **BETAS),
    ),
    "lion": (
        lambda s: optim.lion(0.1, s, weight_decay=0.2, **GIVEN),
        optax.lion(0.1 * ROOT, weight_decay=0.2 * ROOT, **BETAS),
    ),
    "lamb": (
        lambda s: optim.lamb(0.1, s, eps=0.3, weight_decay=0.2, **GIVEN),
        optax.lamb(0.1 * ROOT, eps=0.3 / ROOT, weight_decay=0.2 * ROOT, **BETAS),
    ),
    "adafactor": (
        lambda s: optim.adafactor(0.1, s, momentum=0.9, weight_decay_rate=0.01),
        optax.adafactor(
            0.1 * ROOT, momentum=0.9**KAPPA, weight_decay_rate=0.01 * KAPPA
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("length", [False, True], ids=["batch", "length"])
def test_an_optimizer_is_optaxs_with_the_scaled_hyperparameters(name, length):
    # Training for a quarter of the examples is as many steps as a batch of four times.
    training = {"examples": (KAPPA, 1)} if length else {"batch": (8, 8 * KAPPA)}
    ours, plain = PAIRS[name][0](one_weight(**training)), PAIRS[name][1]
    start = {"w": jax.random.normal(jax.random.key(0), (3, 3))}

    def trained(tx):
        params, state = start, tx.init(start)
        for i in range(4):
            grads = {"w": jax.random.normal(jax.random.key(i + 1), (3, 3))}
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params["w"]

    np.testing.assert_allclose(trained(ours), trained(plain), rtol=2e-5, atol=1e-6)


def test_muon_follows_the_square_root():
    def model(n):
        return {"in": jnp.ones((8, n)), "mid": jnp.eye(n), "out": jnp.ones((n, 2))}

    def moved(**training):
        axes = {".": "i -> o"}
        scales = optim.infer_scales(model(4), model(8), axes=axes, **training)
        tx = optim.muon(0.1, scales, weight_decay=0.0, nesterov=False)
        params = model(8)
        updates, _ = tx.update(params, tx.init(params), params)
        return updates["mid"]

    ratio = moved(batch=(1, KAPPA))[0, 0] / moved()[0, 0]
    assert float(ratio) == pytest.approx(ROOT, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("adamw", "depth_mup"),
        *(
            pytest.param(name, point, marks=pytest.mark.long)
            for name in ("sgd", "adamw", "lion", "lamb", "muon", "adafactor")
            for point in ("depth_mup", "sp")
        ),
    ],
)
def test_check_chain_agrees(name, point):
    scales = model_scales(2, 2, 4, 0.5).for_parametrization(point)
    tx = getattr(optim, name)(0.1, scales)
    optim.check_chain(tx, scales)


# ----- Width, depth, batch size and length.

AXES = optim.declare(
    {
        "embed": "vocab: d",
        "blocks/w": "layers: d -> e",
        "blocks/b": "layers: -> d",
        "head/w": "d -> classes",
        "head/b": "classes",
    },
    branches="blocks",
)


def model_scales(width, depth, batch, examples):
    def model(n, blocks):
        return {
            "embed": jnp.zeros((8, n)),
            "blocks": {"w": jnp.zeros((blocks, n, n)), "b": jnp.zeros((blocks, n))},
            "head": {"w": jnp.zeros((n, 4)), "b": jnp.zeros(4)},
        }

    return optim.infer_scales(
        lambda: model(8, 2),
        lambda: model(8 * width, 2 * depth),
        delta=lambda: model(32, 2),
        axes=AXES,
        parametrization="mup",
        batch=(16, 16 * batch),
        examples=(1000, 1000 * examples),
    )


FACTORS = ("learning_rate", "gradient", "weight_decay", "init_std", "forward")


@pytest.mark.parametrize("point", ["mup", "depth_mup", "completep", "ntk"])
@pytest.mark.parametrize("family", ["sgd", "adam", "spectral", "relative"])
def test_multipliers_of_width_depth_batch_and_length_commute(family, point):
    rules = optim.parametrization(point, gauge="table8")

    def factors(*sizes):
        scales = model_scales(*sizes)
        rows = {p: optim.multipliers(s, rules, family) for p, s in scales.items()}
        return {(p, f): getattr(row, f) for p, row in rows.items() for f in FACTORS}

    ratios = (4, 16, 8, 0.5)
    alone = [
        factors(*(r if i == j else 1 for j, r in enumerate(ratios))) for i in range(4)
    ]
    for chosen in itertools.product([False, True], repeat=4):
        both = factors(*(r if c else 1 for r, c in zip(ratios, chosen, strict=True)))
        for at, value in both.items():
            parts = [one[at] for one, c in zip(alone, chosen, strict=True) if c]
            assert value == pytest.approx(np.prod(parts)), (at, chosen)


def test_more_examples_undo_a_larger_batch():
    scales = model_scales(1, 1, 4, 4)
    assert scales.training.kappa == 1
    rows = optim.explain(scales, "adamw").rows
    assert {row.learning_rate for row in rows.values()} == {1.0}


def test_an_exponent_of_length_beyond_one_is_an_error():
    for wrong in (32, None):
        with pytest.raises(ValueError, match=f"length_exponent={wrong} must be from 0"):
            optim.TrainingScale(examples=4.0, length_exponent=wrong)


@pytest.mark.parametrize(
    ("optimizer", "power"),
    [("adamw", 0.32), ("muon_h", 0.32), ("lion", 0.32), ("sgd", 0.82)],
)
def test_the_exponent_of_length_is_that_of_learning_rates_and_not_of_decay(
    optimizer, power
):
    """arXiv:2603.28743 measures 0.32; SGD's gradients shrink by another ½."""
    plain = model_scales(1, 1, 1, 1)
    given = {"batch": (64, 256), "examples": (1e6, 16e6)}
    scales = plain.for_training(**given, length_exponent=0.32)
    half = plain.for_training(**given)
    table = optim.explain(scales, optimizer)
    batch = 4.0 if optimizer == "sgd" else 2.0
    for path, row in table.rows.items():
        assert row.learning_rate == pytest.approx(batch * 16.0**-power)
        assert row.eps == pytest.approx(optim.explain(half, optimizer).rows[path].eps)
        assert row.learning_rate * row.weight_decay == pytest.approx(4 / 16)
    standard = optim.explain(scales.for_parametrization("sp"), optimizer)
    for row in standard.rows.values():
        assert row.learning_rate == pytest.approx(batch * 16.0**-power)


# ----- Zoo, explain, and mistakes.


def test_a_zoo_model_and_explain():
    make = lambda: zoo.create(  # noqa: E731
        "resmlp", width=16, depth=2, base_width=8, base_depth=2, rngs=zoo_rngs()
    )
    scales = zoo.scales(make(), batch=(64, 1024), examples=(1e6, 4e6))
    assert scales.training == optim.TrainingScale(16.0, 4.0)
    table = optim.explain(scales, optimizer="adamw")
    plain = optim.explain(zoo.scales(make()), optimizer="adamw")
    for path, row in table.rows.items():
        assert row.learning_rate == pytest.approx(2 * plain.rows[path].learning_rate)
        assert row.weight_decay == pytest.approx(2 * plain.rows[path].weight_decay)
        assert row.eps == pytest.approx(plain.rows[path].eps / 2)
    assert "Malladi et al. 2022" in str(table)
    assert "κ = 4" in str(table)
    assert "Malladi" not in str(plain)


def zoo_rngs():
    from flax import nnx

    return nnx.Rngs(0)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"batch": (64, 0)}, "the ratio batch=0.0 must be positive"),
        ({"examples": (1, float("nan"))}, "the ratio examples=nan must be positive"),
    ],
)
def test_a_mistake_is_one_sentence(training, words):
    with pytest.raises(ValueError, match=words):
        one_weight(**training)
