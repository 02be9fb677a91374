"""The transforms work wherever Optax's own do, and add nothing."""

import functools
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax import optim


def tree(n, depth=2, dtype=jnp.float32):
    """Parameters of a small residual network, blocks stacked."""
    shapes = {
        "embed": (5, n),
        "blocks": {"kernel": (depth, n, n), "bias": (depth, n)},
        "head": {"kernel": (n, 3), "bias": (3,)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(k, s, dtype) for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


AXES = optim.declare(
    {
        "embed": "vocab: d",
        "blocks/kernel": "layers: d -> e",
        "blocks/bias": "layers: -> d",
        "head/kernel": "d -> classes",
        "head/bias": "classes",
    },
    branches="blocks",
)
SCALES = optim.infer_scales(
    tree(4), tree(16, 8), axes=AXES, parametrization="depth_mup"
)
PARAMS, GRADS = tree(16, 8), jax.tree.map(jnp.cos, tree(16, 8))

ALIASES = {
    "sgd": lambda rate, *a: optim.sgd(rate, *a, momentum=0.9),
    "adam": optim.adam,
    "adamw": optim.adamw,
    "lion": optim.lion,
    "muon": optim.muon,
    "adafactor": optim.adafactor,
    "lamb": optim.lamb,
    # The gradients of these tests stay, and are diagonal in the basis of SOAP. Its eps
    # is above the rounding of the other entries.
    "soap": optim.soap,
    "shampoo": optim.shampoo,
    "scion": optim.scion,
    "adam_h": optim.adam_h,
    "muon_h": optim.muon_h,
}


def scale(family="adam", name="depth_mup"):
    return optim.scale_by_parametrization(scales_for(name), family=family)


def scales_for(name):
    return SCALES.for_parametrization(name)


# Most of the time of these tests is spent in the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def program(tx):
    """A compiled function of parameters, state, gradients and the number of steps."""

    def step(_, carry):
        params, state, grads = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    @jit
    def train(params, state, grads, steps):
        carry = params, state, grads
        return jax.lax.fori_loop(0, steps, step, carry)[:2]

    return train


def run(tx, steps=3):
    """Parameters after some compiled steps, and the state."""
    return program(tx)(PARAMS, tx.init(PARAMS), GRADS, steps)


@functools.cache
def program_of(alias):
    return program(ALIASES[alias](0.01, SCALES))


@functools.cache
def run_alias(alias, steps=3):
    state = ALIASES[alias](0.01, SCALES).init(PARAMS)
    return program_of(alias)(PARAMS, state, GRADS, steps)[0]


def same(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 1e-6, "atol": 1e-7, **tolerance})


# --- what they compute ---


@pytest.mark.parametrize("family", ["sgd", "adam", "spectral", "lamb"])
@pytest.mark.parametrize("name", ["sp", "ntk", "mup", "depth_mup", "ode", "completep"])
def test_each_update_is_multiplied_by_its_own_factor(name, family):
    tx = scale(family, name)
    updates, _ = tx.update(GRADS, tx.init(PARAMS))
    point = optim.parametrization(name)
    for path, rule in SCALES.items():
        factor = optim.multipliers(rule, point, family).learning_rate
        got, given_ = updates, GRADS
        for key in path.split("/"):
            got, given_ = got[key], given_[key]
        np.testing.assert_allclose(got, given_ * factor, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["sgd", "adam", "muon"]))
def test_scaling_to_a_target_composes(first, second, family):
    """Base to middle to target is base to target: ratios multiply."""

    def mlp(n):
        return jax.eval_shape(lambda: tree(n))

    def rates(base, target):
        delta = mlp(7 * base)
        scales = optim.infer_scales(mlp(base), mlp(target), axes=AXES, delta=delta)
        rows = optim.explain(scales, family).rows
        # Optax's shape factor of Muon depends on shapes, not on their ratio.
        return {p: r.learning_rate for p, r in rows.items() if family != "muon"}

    one, two = rates(2, 2 * first), rates(2 * first, 2 * first * second)
    for path, both in rates(2, 2 * first * second).items():
        assert math.isclose(one[path] * two[path], both)


# --- what they add ---


@pytest.mark.parametrize("alias", ALIASES)
def test_a_second_call_neither_compiles_again_nor_needs_more_memory(alias):
    tx = ALIASES[alias](0.01, SCALES)
    traces = []

    @functools.partial(jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = jit(tx.init)(params)
    for _ in range(3):
        params, state = step(params, state, GRADS)
    assert len(traces) == 1
    assert step._cache_size() == 1
    same(params, run_alias(alias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alias", ALIASES)
def test_bfloat16_stays_bfloat16(alias):
    params = jax.eval_shape(lambda: tree(16, 8, jnp.bfloat16))
    tx = ALIASES[alias](0.01, SCALES)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == before


# --- where they work ---


def by_hand(rate=0.01):
    return optax.chain(
        optim.normalize_gradients(SCALES),
        optax.scale_by_adam(),
        scale(),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(rate),
    )


def test_a_chain_by_hand_is_the_alias():
    same(run(by_hand())[0], run_alias("adamw"))


@pytest.mark.parametrize("alias", ALIASES)
def test_multi_steps_accumulate(alias):
    tx = optax.MultiSteps(ALIASES[alias](0.01, SCALES), 2)
    params, state = run(tx, steps=3)
    assert (int(state.gradient_step), int(state.mini_step)) == (1, 1)
    same(params, run_alias(alias, steps=1), rtol=1e-5, atol=1e-6)


# Arguments that decide the program.
STATIC = {
    "adafactor": ("min_dim_size_to_factor", "decay_offset"),
    **dict.fromkeys(("muon", "scion", "muon_h"), ("ns_steps",)),
    **dict.fromkeys(("soap", "shampoo"), ("precondition_frequency", "block_size")),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_injected_hyperparameters_can_be_changed(alias):
    make = optax.inject_hyperparams(getattr(optim, alias), STATIC.get(alias, ()))
    options = {"momentum": 0.9} if alias == "sgd" else {}
    # The scales pass as they are: neither a number nor a schedule.
    tx = make(learning_rate=0.01, scales=SCALES, **options)
    params, state = run(tx)
    same(params, run_alias(alias), rtol=1e-4, atol=1e-5)
    assert "scales" not in state.hyperparams
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    for name in ("weight_decay", "adam_weight_decay"):
        if name in state.hyperparams:
            state.hyperparams[name] = jnp.float32(0.0)
    updates, _ = jit(tx.update)(GRADS, state, PARAMS)
    assert not any(jnp.any(x) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("alias", ALIASES)
def test_a_schedule_is_the_rate_of_each_step(alias):
    tx = ALIASES[alias](lambda step: jnp.where(step < 2, 0.01, 0.0), SCALES)
    same(run(tx, steps=4)[0], run_alias(alias, steps=2), rtol=1e-5, atol=1e-6)


def test_injected_schedules():
    tx = optax.inject_hyperparams(optim.adamw)(
        lambda step: 0.01 * (step + 1), scales=SCALES
    )
    _, state = run(tx, steps=3)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.03)


LABELS = {"embed": "rest", "blocks": "blocks", "head": "rest"}


@pytest.mark.parametrize("alias", ALIASES)
def test_partitions_scale_each_part(alias):
    make = ALIASES[alias]
    tx = optax.partition(
        {"blocks": make(0.01, SCALES), "rest": make(0.01, SCALES)}, LABELS
    )
    same(run(tx)[0], run_alias(alias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alias", ALIASES)
def test_masked_parameters_are_left_alone(alias):
    make = ALIASES[alias]
    tx = optax.masked(
        make(0.01, SCALES), jax.tree.map(lambda label: label == "rest", LABELS)
    )
    updates, _ = jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    same(updates["blocks"], GRADS["blocks"])
    frozen = optax.partition(
        {"rest": make(0.01, SCALES), "blocks": optax.set_to_zero()}, LABELS
    )
    params, _ = run(frozen)
    same(params["blocks"], PARAMS["blocks"])


@pytest.mark.parametrize("alias", ALIASES)
def test_apply_if_finite_skips_bad_gradients(alias):
    tx = optax.apply_if_finite(ALIASES[alias](0.01, SCALES), 3)
    train = program(tx)
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADS)
    params, state = train(PARAMS, tx.init(PARAMS), bad, 1)
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    assert int(state.total_notfinite) == 1
    params, _ = train(PARAMS, state, GRADS, 3)
    same(params, run_alias(alias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alias", ALIASES)
def test_states_can_be_mapped_as_parameters(alias):
    # How sharding is laid over an optimizer's state.
    tx = ALIASES[alias](0.01, SCALES)
    state = jax.eval_shape(tx.init, PARAMS)
    mapped = optax.tree.map_params(
        tx, lambda x: "param", state, transform_non_params=lambda x: "other"
    )
    kinds = jax.tree.leaves(mapped)
    assert len(kinds) == len(jax.tree.leaves(state))


@pytest.mark.parametrize("alias", ["sgd", "adamw", "muon", "soap", "muon_h"])
def test_nnx_optimizers_train(alias):
    class Model(nnx.Module):
        def __init__(self, width, rngs):
            self.first = nnx.Linear(5, width, rngs=rngs)
            self.hidden = nnx.Linear(width, width, rngs=rngs)
            self.head = nnx.Linear(width, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.hidden(nnx.relu(self.first(x)))))

    model = Model(16, nnx.Rngs(0))
    base, x = (lambda: Model(4, nnx.Rngs(0))), jnp.ones((1, 5))
    scales = optim.infer_scales(base, model, inputs=(x,))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, optim.rescale_init(params, scales))
    optimizer = nnx.Optimizer(model, ALIASES[alias](0.02, scales), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (8, 5))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]


SHARDED = """
import jax, jax.numpy as jnp, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mupax import optim

assert jax.device_count() == 8
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

def tree(n):
    return {"embed": jnp.ones((8, n)), "mid": jnp.ones((4, n, n)),
            "bias": jnp.ones((n,)), "head": jnp.ones((n, 4))}

spec = {"embed": P(None, "model"), "mid": P(None, "data", "model"), "bias": P("model"),
        "head": P("model", None)}
place = jax.tree.map(lambda s: NamedSharding(mesh, s), spec,
                     is_leaf=lambda s: isinstance(s, P))
params = jax.device_put(tree(64), place)
axes = {"embed|head": "i -> o", "mid": "layers: i -> o", "bias": "d"}
scales = optim.infer_scales(tree(16), params, axes=axes)
pairs = {
    "sgd": (lambda r, *a: optim.sgd(r, *a, momentum=0.9), lambda r: optax.sgd(r, 0.9)),
    "adam": (optim.adam, optax.adam), "adamw": (optim.adamw, optax.adamw),
    "lion": (optim.lion, optax.lion), "lamb": (optim.lamb, optax.lamb),
    "adafactor": (optim.adafactor, optax.adafactor),
    "muon": (optim.muon, optax.contrib.muon),
    **{name: (getattr(optim, name), None)
       for name in ("soap", "shampoo", "scion", "adam_h", "muon_h")},
}
def train(tx):
    state = tx.init(params)  # not jitted: it takes over the sharding of params
    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state
    new, after = step(params, state)
    leaves = [jax.tree.leaves(x) for x in (params, new, state, after)]
    for before, now in (leaves[:2], leaves[2:]):
        for a, b in zip(before, now, strict=True):
            # Counts and coefficients lie on one device at first, in Optax as here.
            alike = a.shape in [p.shape for p in jax.tree.leaves(params)]
            assert not alike or b.sharding.is_equivalent_to(a.sharding, a.ndim)
    return [x.sharding for x in leaves[2]], [x.sharding for x in leaves[3]]

for name, (maker, namesake) in pairs.items():
    ours = train(maker(0.01, scales))
    if namesake and name != "muon":  # its own takes other matrices
        assert ours == train(namesake(0.01)), name
    print(name)
"""


def test_sharding_of_states_is_unchanged_on_eight_devices():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # Devices that start collectives in different orders wait for each other
        # forever, if there are fewer threads than collectives (SOAP on two cores).
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + " --xla_cpu_enable_concurrency_optimized_scheduler=false",
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == set(ALIASES)
