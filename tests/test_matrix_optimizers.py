"""Muon, SOAP, Shampoo, Scion and the optimizers on a sphere, against their papers."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import optim

INPUTS, OUTPUTS, N = 5, 3, 8
EXACT = {"ns_coeffs": (15 / 8, -10 / 8, 3 / 8), "ns_steps": 25}  # U Vᵀ of the SVD
RATE = 0.03


def model(n):
    return {"in": (INPUTS, n), "mid": (n, 2 * n), "out": (2 * n, OUTPUTS)}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s) for k, s in model(N).items()}


def drawn_matrix(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scales_of():
    small, large = ({k: jnp.zeros(s) for k, s in model(n).items()} for n in (N // 2, N))
    return optim.infer_scales(small, large, axes={".": "i -> o"})


# The matrix grows by 4 in its fan-in and by 2 in its fan-out; M = 9 in a branch.
BY_HAND = {
    "sgd": 2 / 4 * 9 ** (0.5 - 0.5),
    "adam": 1 / 4 / 3,
    "spectral": (2 / 4) ** 0.5 / 3,
    "column": 4**-0.5 / 3,
    "row": 2**0.5 / 4 / 3,
    "relative": 4**-0.5 / 3,
    "sphere": 4**-0.5 / 3,
    # From 16 x 16 to 64 x 32: the factor (fan_out/fan_in)^½ of Muon is below one.
    "muon": (2 / 4) ** 0.5 / 3,
    "soap": (2 / 4) ** 0.5 / 3,
    "shampoo": (2 / 4) ** 0.5 / 3,
    # Scion's own norm has the shape in it.
    "scion": 1 / 3,
    "adam_h": 4**-0.5 / 3,
    "muon_h": 4**-0.5 * 2**0.5 / 3,
}


WITHOUT_EPS = ("sgd", "muon", "soap", "shampoo", "scion", "muon_h")


@pytest.mark.parametrize("name", BY_HAND)
def test_multipliers_are_those_of_a_derivation_by_hand(name):
    scale = optim.param_scale(
        "w", (16, 16), (64, 32), (0,), (1,), depth=9.0, in_branch=True
    )
    scales = optim.Scales({"w": scale}, optim.parametrization("depth_mup"))
    row = optim.explain(scales, name).rows["w"]
    assert row.learning_rate == pytest.approx(BY_HAND[name])
    # An eps, also that of a user's transform of a family, follows the gradient, 1/m_out
    # and M^-½.
    assert row.eps == pytest.approx(1 if name in WITHOUT_EPS else 1 / 2 / 3)


# --- twenty steps, computed apart ---


def orthogonal(x):
    u, _, v = np.linalg.svd(x, full_matrices=False)
    return u @ v


class Moments:
    """Adam's moments; Optax's AdamW of `muon` and the like has no Nesterov here."""

    def __init__(self, b1, b2, eps=1e-8):
        self.b1, self.b2, self.eps, self.t, self.m, self.v = b1, b2, eps, 0, 0, 0

    def step(self, g, square=None):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return m / (np.sqrt(v) + self.eps)


class Muon:
    options: typing.ClassVar = EXACT

    def __init__(self):
        self.m, self.t = 0, 0

    def step(self, w, g):
        self.t += 1
        self.m = 0.95 * self.m + 0.05 * g
        ahead = 0.95 * self.m / (1 - 0.95 ** (self.t + 1))
        ahead = ahead + 0.05 * g / (1 - 0.95**self.t)
        # Both sides grow alike, and fan_out/fan_in is 2 at the base too.
        return w - RATE * 2**0.5 * orthogonal(ahead)


class Scion:
    options: typing.ClassVar = EXACT

    def __init__(self):
        self.m = 0

    def step(self, w, g):
        self.m = 0.9 * self.m + 0.1 * g
        return w - RATE * (2**0.5 * orthogonal(self.m))  # fan_out/fan_in is 2


class AdamH:
    options: typing.ClassVar = {}

    def __init__(self):
        self.moments = Moments(0.9, 0.999)

    def step(self, w, g):
        # Twice the fan-in: Δ is a half, and the weight 2^-½.
        return on_sphere(w, self.moments.step(g), RATE * 2**-0.5)


class MuonH:
    options: typing.ClassVar = {**EXACT, "nesterov": False}

    def __init__(self):
        self.m = 0

    def step(self, w, g):
        self.m = 0.95 * self.m + 0.05 * g
        # As above, and the shorter side is twice as long.
        return on_sphere(w, orthogonal(self.m), RATE)


def on_sphere(w, update, angle):
    radius = np.linalg.norm(w)
    new = w - angle * radius * update / np.linalg.norm(update)
    return radius * new / np.linalg.norm(new)


def ridge(x):
    return x + 1e-6 * np.linalg.norm(x, 2) * np.eye(len(x))


class Shampoo:
    options: typing.ClassVar = {"precondition_frequency": 1}

    def __init__(self):
        self.m, self.left, self.right, self.t = 0, 0, 0, 0

    def root(self, x):
        values, vectors = np.linalg.eigh(ridge(x))
        return vectors * values**-0.25 @ vectors.T

    def step(self, w, g):
        self.m = 0.95 * self.m + 0.05 * g
        self.left = 0.95 * self.left + 0.05 * g @ g.T
        self.right = 0.95 * self.right + 0.05 * g.T @ g
        u = self.root(self.left) @ self.m @ self.root(self.right)
        # Fan-out over fan-in is 2 at base and target, so Muon's rate stays.
        return w - RATE * 2**0.5 * u / np.linalg.norm(u, 2)


class Soap:
    options: typing.ClassVar = {"precondition_frequency": 5}

    def __init__(self):
        self.m, self.v, self.left, self.right, self.t = 0, 0, 0, 0, 0

    def step(self, w, g):
        u = np.zeros_like(w)
        if self.t:  # the first gradient gives the basis alone
            left, right = self.bases
            self.m = 0.95 * self.m + 0.05 * g
            self.v = 0.95 * self.v + 0.05 * (left.T @ g @ right) ** 2
            m, v = (x / (1 - 0.95**self.t) for x in (self.m, self.v))
            size = np.sqrt(v) + 1e-3 * np.sqrt(v.max())
            u = left @ (left.T @ m @ right / size) @ right.T
            u /= np.linalg.norm(u, 2)
        self.left = 0.95 * self.left + 0.05 * g @ g.T
        self.right = 0.95 * self.right + 0.05 * g.T @ g
        if self.t == 0:
            self.bases = [np.eye(len(w)), np.eye(len(w.T))]
        if self.t % 5 == 0:
            for _ in range(8 if self.t == 0 else 1):
                pairs = zip((self.left, self.right), self.bases, strict=True)
                self.bases = [np.linalg.qr(ridge(x) @ q)[0] for x, q in pairs]
        self.t += 1
        return w - RATE * 2**0.5 * u  # as for Shampoo


APART = {
    "muon": Muon,
    "scion": Scion,
    "adam_h": AdamH,
    "muon_h": MuonH,
    "shampoo": Shampoo,
    "soap": Soap,
}


@pytest.mark.parametrize("name", APART)
def test_twenty_steps_are_those_of_the_paper(name):
    own = APART[name]()
    with jax.enable_x64(True):
        tx = getattr(optim, name)(RATE, scales_of(), **own.options)
        params = jax.tree.map(jnp.asarray, drawn(0))
        state, weight = tx.init(params), np.asarray(params["mid"])
        readout = Moments(0.9, 0.999)
        right = np.asarray(params["out"])
        step = jax.jit(tx.update)
        for number in range(20):
            grads = jax.tree.map(jnp.asarray, drawn(number + 1))
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
            weight = own.step(weight, np.asarray(grads["mid"]))
            right = right - RATE / 2 * readout.step(np.asarray(grads["out"]))
        params = jax.tree.map(np.asarray, params)
    # Shampoo's and SOAP's spectral norms are found by twelve power iterations.
    accuracy = 0.05 if name in ("shampoo", "soap") else 1e-6
    moved = np.abs(weight - drawn(0)["mid"]).max()
    assert np.abs(params["mid"] - weight).max() < accuracy * moved
    if name == "adam_h":
        np.testing.assert_allclose(params["out"], right, atol=1e-7)


def test_the_spectral_norm_is_one_before_the_shape_factor():
    tx = optim.soap(1.0, scales_of(), block_size=4)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn(0))
    step = jax.jit(tx.update)
    updates, state = step(params, tx.init(params), params)
    assert not updates["mid"].any()  # the first gradient gives the basis alone
    updates, state = step(jax.tree.map(jnp.sin, params), state, params)
    assert np.linalg.norm(updates["mid"], 2) == pytest.approx(2**0.5, rel=0.05)
    blocks = {x.shape for x in jax.tree.leaves(state) if x.ndim == 3}
    assert blocks == {(2 * 4, 4, 4)}


def test_coefficients_are_numbers():
    with pytest.raises(ValueError, match="ns_coeffs='dion' must be numbers"):
        optim.muon_h(0.1, scales_of(), ns_coeffs="dion")


# --- what cannot be right ---


@pytest.mark.parametrize("key", ["precondition_frequency", "block_size"])
@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_number_of_steps_or_a_size_below_one_is_an_error(name, key):
    with pytest.raises(ValueError, match=f"{key}=0 must be a number, at least 1"):
        getattr(optim, name)(0.1, scales_of(), **{key: 0})


@pytest.mark.parametrize("name", ["adam_h", "muon_h"])
def test_a_matrix_of_zeros_grows_to_its_sphere_and_stays(name):
    """Its radius is that of entries fan_in^-1/2, which is also the rule's ratio."""
    tx = getattr(optim, name)(0.1, scales_of(), **APART[name].options)
    params = jax.tree.map(jnp.zeros_like, drawn(0))
    state, norms = tx.init(params), []
    for _ in range(30):
        updates, state = jax.jit(tx.update)(drawn(1), state, params)
        params = optax.apply_updates(params, updates)
        norms.append(float(jnp.linalg.norm(params["mid"])))
    radius = (2 * N) ** 0.5
    angle = 0.1 * float(optim.explain(scales_of(), name).rows["mid"].learning_rate)
    assert norms[0] == pytest.approx(angle * radius, rel=0.02)
    assert min(np.diff(norms)) > -1e-5  # rounding
    assert norms[-1] == pytest.approx(radius)


# --- width and depth ---

BASE, DEEP = (64, 4), (64, 16)  # (width, blocks)
X, TOWARDS = (jnp.asarray(drawn_matrix(i, (32, n))) for i, n in enumerate((4, 4)))


def residual(size, layers):
    width, depth = size
    blocks = {f"w{i}": (depth, width, width) for i in range(layers)}
    return {"in": (4, width), **blocks, "out": (width, 4)}


def outputs(params, point):
    blocks = [x for name, x in params.items() if name[0] == "w"]
    # Branches are small at the base, so that its few blocks are near the limit already.
    multiplier = point.branch_multiplier(len(blocks[0]) / BASE[1], a=0.1)

    def block(x, weights):
        y = x
        for i, weight in enumerate(weights):
            y = (jnp.tanh(y) if i else y) @ weight
        return x + multiplier * y, None

    return jax.lax.scan(block, X @ params["in"], blocks)[0] @ params["out"]


def change(name, layers, size):
    """The mean log size of the outputs' change, of updates of branches alone."""
    seeds = 64 if name == "sgd" else 16  # its updates are as large as its gradients
    point = optim.parametrization("depth_mup" if layers == 1 else "completep")
    small, large, wide = (
        {
            k: jax.ShapeDtypeStruct(s, jnp.float32)
            for k, s in residual(n, layers).items()
        }
        for n in (BASE, size, (2 * BASE[0], BASE[1]))
    )
    axes = optim.declare({"w": "layers: i -> o", ".": "i -> o"}, branches="w")
    scales = optim.infer_scales(
        small, large, axes=axes, parametrization=point, delta=wide
    )
    tx = OPTIMIZERS[name](scales)

    def loss(params):
        return (outputs(params, point) * TOWARDS).mean()

    def train(params):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(loss)(params)
            grads = {k: g * (k[0] == "w") for k, g in grads.items()}
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (moved, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=3)
        return jnp.std(outputs(moved, point) - outputs(params, point), mean=0)

    params = {
        k: jnp.asarray(drawn_matrix(i, (seeds, *s.shape))) * s.shape[-2] ** -0.5
        for i, (k, s) in enumerate(large.items())
    }
    params["out"] *= (size[0] / BASE[0]) ** -0.5
    # Without optimization, products of the reflections in SOAP's basis are slow.
    quick = {} if name == "soap" else {"xla_backend_optimization_level": 0}
    return float(
        jnp.log(jax.jit(jax.vmap(train), compiler_options=quick)(params)).mean()
    )


OPTIMIZERS = {
    name: functools.partial(getattr(optim, name), 0.5 if name == "sgd" else 0.01)
    for name in ("muon", "scion", "adam_h", "muon_h", "shampoo", "lion", "sgd", "adam")
}
# Directions that gradients hardly have would grow to full steps: with eps=1e-3, the
# default, outputs change as width^-0.06 here, and with 1e-8 as width^-0.4 to -0.7.
OPTIMIZERS["soap"] = functools.partial(optim.soap, 0.01, eps=1e-2)
OPTIMIZERS["schedule_free"] = lambda scales: optax.contrib.schedule_free(
    optim.adam(0.01, scales, b1=0.0), 0.01
)
LONG = ("sgd", "adam", "schedule_free", "shampoo", "soap")


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "name",
    [pytest.param(o, marks=[pytest.mark.long] * (o in LONG)) for o in OPTIMIZERS],
)
def test_outputs_change_alike_at_every_width_and_depth(name, layers):
    """Depth-μP for branches of one layer, CompleteP for those of two.

    A batch of 32 examples: gradients of the wide model have a low rank.
    """
    base, deep = (change(name, layers, size) for size in (BASE, DEEP))
    # A change of branches of one layer is further from its limit.
    growth = 4 if layers == 1 or name in LONG else 2
    wide = change(name, layers, (growth * BASE[0], BASE[1]))
    slopes = {
        "width": (wide - base) / np.log(growth),
        "depth": (deep - base) / np.log(4),
    }
    assert max(map(abs, slopes.values())) < 0.05, slopes
