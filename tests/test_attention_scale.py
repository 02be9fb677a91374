"""Parts of a model that undo its parametrization: attention's 1/√d, normed readouts."""

import functools
import warnings
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import optim, zoo


def scaled_attention(query, key, value, **options):
    """The attention that the message recommends, for a base with heads of 8."""
    query = query * (8 / query.shape[-1]) ** 0.5
    return nnx.dot_product_attention(query, key, value, **options)


class Attends(nnx.Module):
    def __init__(self, n, heads=2, rngs=None, kind=nnx.MultiHeadAttention, **options):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Linear(8, n, rngs=rngs)
        self.attend = kind(heads, n, decode=False, rngs=rngs, **options)
        self.head = nnx.Linear(n, 3, rngs=rngs)

    def __call__(self, x):
        with jax.numpy_rank_promotion("allow"):  # Flax adds biases of one axis
            h = self.embed(x)
            return self.head((h + self.attend(h)).mean(1))


def rescaled(make, width, parametrization="mup", base=16):
    scales = optim.infer_scales(
        lambda: make(base), lambda: make(width), delta=lambda: make(2 * base)
    )
    model = make(width)
    params = nnx.state(model, nnx.Param)
    small = lambda: make(base)  # noqa: E731
    new = optim.rescale_init(params, scales, parametrization, base=small)
    nnx.update(model, new)
    return model, scales


def messages(make, width=64, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, scales = rescaled(make, width, **options)
    notes = optim.explain(scales, options.get("parametrization", "mup")).needs
    assert [str(w.message) for w in caught] == list(notes)
    assert all(w.category is optim.ChainWarning for w in caught)
    return notes


def test_a_growing_head_dimension_is_named_with_both_remedies():
    (note,) = messages(Attends)
    assert "'attend' grows from 8 to 32" in note
    assert "num_heads" in note
    assert "attention_fn=lambda" in note


def test_the_note_stands_below_the_table():
    scales = optim.infer_scales(lambda: Attends(16), lambda: Attends(64))
    explanation = optim.explain(scales, "mup")
    assert explanation.needs[0] in str(explanation)
    assert "√d" in explanation.rows["attend/query/kernel"].origin
    assert "√d" not in explanation.rows["attend/key/kernel"].origin


def test_blocks_of_a_list_share_one_note_and_stacked_ones_are_seen():
    class Blocks(nnx.Module):
        def __init__(self, n):
            self.blocks = nnx.List(Attends(n).attend for _ in range(3))
            self.head = nnx.Linear(n, 3, rngs=nnx.Rngs(0))

    class Stacked(Blocks):
        def __init__(self, n):
            super().__init__(n)

            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def build(rngs):
                return nnx.MultiHeadAttention(2, n, decode=False, rngs=rngs)

            self.blocks = build(nnx.Rngs(0))

    options = {"depth": (3, 3), "branch": "blocks"}
    for make, named in ((Blocks, r"'blocks/0' \(and 2 more\)"), (Stacked, "'blocks'")):
        scales = optim.infer_scales(
            lambda m=make: m(16), lambda m=make: m(64), **options
        )
        (note,) = optim.explain(scales, "completep").needs
        with pytest.warns(optim.ChainWarning, match=named + " grows from 8 to 32"):
            optim.rescale_init(nnx.state(make(64), nnx.Param), scales, "completep")
        assert "attention_fn" in note


class OwnCall(nnx.MultiHeadAttention):
    """A subclass that scales its inputs itself."""

    def __call__(self, x):
        return super().__call__(x / self.head_dim**0.25)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Attends(n, n // 8),
        lambda n: Attends(n, attention_fn=scaled_attention),
        lambda n: Attends(n, kind=OwnCall),
    ],
    ids=["heads grow", "own attention_fn", "own __call__"],
)
def test_an_attention_that_does_as_told_is_not_named(make):
    assert not messages(make)


def test_nothing_is_named_where_the_head_dimension_stays_or_no_rule_holds():
    assert not messages(Attends, width=16)
    assert not messages(Attends, parametrization="sp")
    assert not messages(Attends, parametrization="ntk")


def test_options_of_flaxs_attention_do_not_hide_it():
    attend = functools.partial(nnx.dot_product_attention, is_causal=True)
    assert messages(lambda n: Attends(n, attention_fn=attend))


@pytest.mark.parametrize(("name", "options"), [("vit", {}), ("gpt", {"tied": False})])
def test_the_zoos_attention_is_not_named(name, options):
    def build(width):
        sizes = {"width": width, "depth": 2, "heads": 2, "base_width": 32}
        return zoo.create(name, **sizes, **options, rngs=nnx.Rngs(0))

    scales = optim.infer_scales(lambda: build(32), lambda: build(64))
    assert not optim.explain(scales).needs


def logits_change(width, attention_fn, steps=6):
    """How much the logits of attention change in some steps of Adam."""

    def make(n):
        return Attends(n, rngs=nnx.Rngs(1), attention_fn=attention_fn)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optim.ChainWarning)
        model, scales = rescaled(make, width)
    x = jax.random.normal(jax.random.key(0), (16, 6, 8))
    tx = nnx.Optimizer(model, optim.adam(1e-2, scales, "mup"), wrt=nnx.Param)

    def loss(model):
        return ((model(x) - x[:, :, :3].sum(1)) ** 2).mean()

    def logits():
        with jax.numpy_rank_promotion("allow"):
            h = model.embed(x)
            q, k = model.attend.query(h), model.attend.key(h)
        size = q.shape[-1]
        divisor = size if attention_fn is scaled_attention else (8 * size) ** 0.5
        return jnp.einsum("bqhd,bkhd->bhqk", q, k) * 8**0.5 / divisor

    start = logits()
    step = nnx.jit(lambda model, tx: tx.update(model, nnx.grad(loss)(model)))
    for _ in range(steps):
        step(model, tx)
    return float((logits() - start).std())


def test_the_recommended_attention_keeps_the_change_of_the_logits():
    """2 heads, widths 64 and 1024: 1.32 and 4.36 by default, 0.64 and 0.64 then."""
    default = [logits_change(n, nnx.dot_product_attention) for n in (64, 1024)]
    remedied = [logits_change(n, scaled_attention) for n in (64, 1024)]
    assert default[1] > 2 * default[0]
    assert remedied[1] == pytest.approx(remedied[0], rel=0.2)


# --- normalized readouts ---


class Normed(nnx.Module):
    def __init__(self, n, wrap, hidden=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(8, n, rngs=rngs)
        self.hidden = nnx.Linear(n, n, rngs=rngs)
        self.head = nnx.Linear(n, 3, rngs=rngs)
        name = "hidden" if hidden else "head"
        setattr(self, name, wrap(getattr(self, name), rngs=rngs))


class Plain(nnx.Module):
    """A wrapper that has Flax's attribute and does not normalize."""

    def __init__(self, layer, rngs):
        self.layer_instance = layer


@pytest.mark.parametrize("form", ["functions", "states"])
@pytest.mark.parametrize("wrap", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_normalized_readout_is_refused(wrap, form):
    models = [lambda: Normed(16, wrap), lambda: Normed(64, wrap)]
    if form == "states":
        models = [nnx.state(build(), nnx.Param) for build in models]
    match = "'head/layer_instance/kernel' are normalized .* use the layer without"
    with pytest.raises(ValueError, match=match):
        optim.infer_scales(*models)
    with pytest.raises(ValueError, match=match):
        optim.infer_scales(*models, readout="^head/layer_instance/kernel$")


@pytest.mark.parametrize("wrap", [nnx.WeightNorm, nnx.SpectralNorm])
def test_hidden_layers_may_be_normalized(wrap):
    scales = optim.infer_scales(
        lambda: Normed(16, wrap, hidden=True), lambda: Normed(64, wrap, hidden=True)
    )
    assert scales["hidden/layer_instance/kernel"].role is optim.Role.HIDDEN


def test_a_wrapper_that_does_not_normalize_may_hold_the_readout():
    scales = optim.infer_scales(lambda: Normed(16, Plain), lambda: Normed(64, Plain))
    assert scales["head/layer_instance/kernel"].role is optim.Role.OUTPUT


class LinenNormed(nn.Module):
    n: int
    normed: str

    @nn.compact
    def __call__(self, x):
        layers = {
            "embed": nn.Dense(self.n, name="embed"),
            "hidden": nn.Dense(self.n, name="hidden"),
            "head": nn.Dense(3, name="head"),
        }
        for name, layer in layers.items():
            wrapped = nn.WeightNorm(layer) if name == self.normed else layer
            x = wrapped(x)
        return x


def linen_scales(normed):
    def build(n):
        with jax.numpy_rank_promotion("allow"):
            return LinenNormed(n, normed).init(jax.random.key(0), np.ones((2, 8)))

    return optim.infer_scales(lambda: build(16), lambda: build(64))


@pytest.mark.parametrize("wrap", ["WeightNorm", "SpectralNorm"])
def test_a_normalized_readout_of_equinox_is_refused(wrap):
    class Model(eqx.Module):
        embed: eqx.nn.Linear
        head: Any

        def __init__(self, n):
            key = jax.random.key(0)
            self.embed = eqx.nn.Linear(8, n, key=key)
            head = eqx.nn.Linear(n, 3, key=key)
            if wrap == "WeightNorm":
                self.head = eqx.nn.WeightNorm(head)
            else:
                self.head = eqx.nn.SpectralNorm(head, "weight", key=key)

    with pytest.raises(ValueError, match="'head/layer/weight' are normalized"):
        optim.infer_scales(lambda: Model(16), lambda: Model(64))


def test_a_normalized_readout_of_linen_is_refused():
    with pytest.raises(ValueError, match="'head/kernel' are normalized"):
        linen_scales("head")
    assert linen_scales("hidden")["head/kernel"].role is optim.Role.OUTPUT


def test_an_adapter_is_not_the_readout_of_a_model_with_an_embedding():
    class Tied(nnx.Module):
        def __init__(self, n):
            rngs = nnx.Rngs(0)
            self.tok = nnx.Embed(50, n, rngs=rngs)
            self.hidden = nnx.Linear(n, n, rngs=rngs)
            self.lora = nnx.LoRA(n, 4, n, rngs=rngs)

    def scales(**options):
        return optim.infer_scales(lambda: Tied(16), lambda: Tied(64), **options)

    with pytest.raises(ValueError, match=r"embedding 'tok/embedding' .* may be tied"):
        scales(readout="lora_a")
    assert scales(readout="lora_a", tied="tok")
    assert scales(readout="lora_a", tied=None)
