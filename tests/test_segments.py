"""Segments of fused parameters have their own growth, use and multipliers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import segments

from mupax import optim

# (initial size, learning rate of Adam, of SGD) where all widths grow by four.
RULES = {
    "I": (1, 1, 4),
    "H": (1 / 2, 1 / 4, 1),
    "O": (1 / 4, 1 / 4, 1 / 4),
    "V": (1, 1, 4),
    "F": (1, 1, 1),
}


def right(letter):
    init, adam, sgd = RULES[letter[0]]
    carried = float(letter[1:] or 1)
    return init * carried, adam * carried, sgd * carried**2


def found(scale):
    point = optim.parametrization("mup")
    adam, sgd = (optim.multipliers(scale, point, family) for family in ("adam", "sgd"))
    return adam.init_std, adam.learning_rate, sgd.learning_rate


@pytest.mark.parametrize("row", segments.ALL, ids=lambda row: row.name)
def test_every_entry_has_the_multipliers_of_its_segment(row):
    base, target, inputs, call = row.models()
    with jax.numpy_rank_promotion("allow"):  # as users write
        scales = optim.infer_scales(base, target, inputs=inputs, call=call)
    by_path = {path.replace("~/", ""): scale for path, scale in scales.items()}
    assert by_path.keys() == row.right.keys()
    for path, scale in by_path.items():
        letters = row.right[path]
        places = [(..., letters)] if isinstance(letters, str) else letters
        for i, values in enumerate(found(scale)):
            expected = np.full(scale.shape, np.nan)
            for place, letter in places:
                expected[place] = right(letter)[i]
            np.testing.assert_allclose(
                np.broadcast_to(values, scale.shape), expected, err_msg=path
            )


ROWS = {row.name: row for row in segments.ALL}


def scales_of(name):
    base, target, inputs, call = ROWS[name].models()
    with jax.numpy_rank_promotion("allow"):
        return optim.infer_scales(base, target, inputs=inputs, call=call)


def drawn(n, key=0):
    """Parameters of `lstm_of_one_kernel`, as a framework draws them."""
    params, _, _ = ROWS["lstm_of_one_kernel"].make(n)
    keys = iter(jax.random.split(jax.random.key(key), 3))
    kernel = jax.nn.initializers.lecun_normal()
    return {
        name: kernel(next(keys), x.shape) if x.ndim > 1 else x
        for name, x in params.items()
    }


def test_each_segment_starts_at_its_own_size():
    """The framework's size depends on the fan-in of the whole: 5 + n."""
    scales, params = scales_of("lstm_of_one_kernel"), drawn(32)
    base = drawn(8, key=1)
    new = optim.rescale_init(params, scales, base=base)
    ratio = new["w"] / params["w"]
    of_whole = ((5 + 32) / (5 + 8)) ** -0.5
    np.testing.assert_allclose(ratio[:5], 1 / of_whole, rtol=1e-5)
    np.testing.assert_allclose(ratio[5:], 0.5 / of_whole, rtol=1e-5)
    traced = jax.jit(lambda p: optim.rescale_init(p, scales, base=drawn(8, key=1)))
    np.testing.assert_allclose(traced(params)["w"], new["w"], rtol=1e-5)
    again = optim.rescale_init(new, scales, base=base)
    np.testing.assert_array_equal(again["w"], new["w"])


def test_a_part_with_another_initializer_is_measured():
    scales, small, large = scales_of("fused_qkv_larger_heads"), {}, {}
    for n, params in ((8, small), (32, large)):
        made, _, _ = ROWS["fused_qkv_larger_heads"].make(n)
        for i, (name, x) in enumerate(made.items()):
            params[name] = jax.random.normal(jax.random.key(i), x.shape)
        # Only the keys start smaller in wider models, by their initializer.
        params["qkv"] = params["qkv"].at[:, n : 2 * n].multiply(n**-0.5)
    new = optim.rescale_init(large, scales, base=small)
    ratio = new["qkv"] / large["qkv"]
    for at, right in ((0, 0.25), (1, 1.0), (2, 0.5)):
        part = ratio[:, 32 * at : 32 * (at + 1)]
        np.testing.assert_allclose(part, right, rtol=0.15)
        assert jnp.ptp(part) < 1e-5


def test_explain_has_a_row_for_each_segment_that_differs():
    rows = optim.explain(scales_of("fused_qkv_larger_heads"), optimizer="adamw").rows
    assert rows["qkv[:, 0:32]"].learning_rate == 0.125
    assert rows["qkv[:, 32:64]"].learning_rate == 0.25
    assert "up" in optim.explain(scales_of("fused_gate_and_up")).rows


def test_a_fused_kernel_that_does_not_grow_has_the_role_of_its_segments():
    base, wide, inputs, _ = ROWS["fused_gate_and_up"].models()
    scales = optim.infer_scales(base, base, inputs=inputs, delta=wide)
    assert scales["up"].role == scales["down"].role == "hidden"


def test_an_array_of_multipliers_is_no_state_and_keeps_dtypes():
    scales = scales_of("fused_qkv_larger_heads")
    params = {p: jnp.ones(s.shape, jnp.bfloat16) for p, s in scales.items()}
    tx = optim.scale_by_parametrization(scales, family="adam")
    assert not jax.tree.leaves(tx.init(params))
    updates, _ = jax.jit(tx.update)(params, tx.init(params))
    assert updates["qkv"].dtype == jnp.bfloat16
    assert updates["qkv"][0, 0] == 0.125
    assert updates["qkv"][0, 40] == 0.25
    longer = scales.for_training(batch=(8, 32))
    assert [s.training.batch for s in longer["qkv"].segments] == [4, 4, 4]


def test_forward_multipliers_act_on_their_segment():
    scales = scales_of("early_logits_and_features_in_one_kernel")
    table8 = optim.parametrization("mup", gauge="table8")
    params = {path: jnp.ones(s.shape) for path, s in scales.items()}
    h = optim.apply_multipliers(params, scales.for_parametrization(table8))["h"]
    assert (h[:, :3] == 0.25).all()  # logits
    assert (h[:, 3:] == 1).all()  # features


def queries_keys_values(layout):
    """Attention with one kernel, and its parameters as (fan-in, which, fan-out)."""
    shape = {"flat": lambda n: (n, 3 * n), "middle": lambda n: (n, 3, n)}
    shape["stack"] = lambda n: (3, n, n)
    back = {
        "flat": lambda w: w.reshape(w.shape[0], 3, -1),
        "middle": lambda w: w,
        "stack": lambda w: w.swapaxes(0, 1),
    }

    def call(p, x):
        h = jnp.tanh(x @ p["i"])
        y = jnp.einsum("btn,ncd->btcd", h, back[layout](p["w"]))
        if layout == "flat":
            q, k, v = jnp.split(h @ p["w"], 3, -1)
        elif layout == "middle":
            q, k, v = (y[:, :, i] for i in range(3))
        else:
            q, k, v = (h @ w for w in p["w"])
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / h.shape[-1]) @ v
        return a @ p["o"]

    def make(n):
        return {"i": (5, n), "w": shape[layout](n), "o": (n, 3)}

    return call, make, back[layout]


@pytest.mark.parametrize("layout", ["flat", "middle", "stack"])
@pytest.mark.parametrize("nested", [False, True])
def test_muon_orthogonalizes_each_segment(layout, nested):
    call, make, back = queries_keys_values(layout)
    small, large = (
        {k: jnp.ones(shape) for k, shape in make(n).items()} for n in (16, 32)
    )
    scales = optim.infer_scales(small, large, inputs=(jnp.ones((1, 4, 5)),), call=call)
    parts = jax.random.normal(jax.random.key(0), (32, 3, 32))
    parts = parts * jnp.array([1.0, 1.0, 10.0])[None, :, None]
    grads = jax.tree.map(jnp.zeros_like, large)
    grads["w"] = parts.reshape(32, 96) if layout == "flat" else parts
    grads["w"] = parts.swapaxes(0, 1) if layout == "stack" else grads["w"]
    if nested:  # a mask of the user is a tree like the parameters
        mask = jax.tree.map(lambda x: x.ndim > 1, large)
        tx = optim.muon(0.1, scales, weight_decay=0.1, weight_decay_mask=mask)
    else:
        tx = optim.muon(0.1, scales)
    zeros = jax.tree.map(jnp.zeros_like, large)
    updates, _ = jax.jit(tx.update)(grads, tx.init(zeros), zeros)
    each = [optax.contrib.scale_by_muon() for _ in range(3)]
    for i, one in enumerate(each):
        grad = parts[:, i]
        right, _ = one.update(grad, one.init(grad))
        # Both shapes are square: no factor of shape, and hidden weights keep the rate.
        np.testing.assert_allclose(
            back(updates["w"])[:, i], -0.1 * right, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "muon", "adafactor"])
def test_a_chain_is_checked_on_the_segment_that_grows_most(optimizer):
    scales = scales_of("early_logits_and_features_in_one_kernel")
    tx = getattr(optim, optimizer)(0.1, scales)
    factor = optim.check_chain(tx, scales).factors["h"]
    assert [part.role for part in scales["h"].parts] == ["output", "hidden"]
    assert factor == pytest.approx(
        optim.multipliers(scales["h"].parts[1], scales.parametrization).learning_rate,
        rel=0.05,
    )


def test_a_chain_for_another_family_is_an_error_with_fused_parameters_too():
    scales = scales_of("fused_qkv_larger_heads")
    tx = optax.chain(
        optax.scale_by_adam(),
        optim.scale_by_parametrization(scales, family="sgd"),
        optax.scale_by_learning_rate(0.1),
    )
    with pytest.raises(ValueError, match=r"the update of 'b'.*family='adam'"):
        optim.check_chain(tx, scales)


@pytest.mark.parametrize(
    "wrt", [nnx.Param, nnx.All(nnx.Param, nnx.PathContains("qkv"))]
)
def test_an_nnx_optimizer_holds_states_of_segments(wrt):
    base, target, inputs, call = ROWS["nnx_fused_qkv"].models()
    scales = optim.infer_scales(base, target, inputs=inputs, call=call)
    model = target()
    params = optim.rescale_init(nnx.state(model, nnx.Param), scales, base=base)
    nnx.update(model, params)
    optimizer = nnx.Optimizer(model, optim.muon(0.1, scales), wrt=wrt)
    before = jax.tree.map(jnp.copy, nnx.state(model, wrt))

    @nnx.jit
    def step(model, optimizer):
        x = jnp.ones(inputs[0].shape)
        loss = nnx.grad(lambda m: jnp.sum(m(x) ** 2), argnums=nnx.DiffState(0, wrt))
        optimizer.update(model, loss(model))

    step(model, optimizer)
    step(model, optimizer)
    moved = jax.tree.map(lambda a, b: jnp.any(a != b), before, nnx.state(model, wrt))
    assert all(jax.tree.leaves(moved))
