"""`zoo.create`: one program draws a model's variables, and draws the same ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import zoo
from mupax.experiments.run.config import parse
from mupax.zoo import registry
from mupax.zoo.layers.basic import scan

SIZES = {"width": 8, "depth": 2}
MODELS = {
    "resmlp": (
        zoo.ResMLP,
        {**SIZES, "zero_init": True, "activation_first": True, "train_ends": False},
    ),
    "vit": (
        zoo.ViT,
        {
            **SIZES,
            "heads": 2,
            "input_shape": (8, 8, 3),
            "patch_size": 4,
            "dropout": 0.1,
            "drop_path": 0.1,
        },
    ),
    "resnet18": (
        zoo.ResNet,
        {"width": 4, "depth": 1, "blocks": (1, 2), "stem": "cifar"},
    ),
}

pytestmark = pytest.mark.usefixtures("optimized")


def arrays(model):
    variables = nnx.to_flat_state(nnx.state(model))
    values = {"/".join(map(str, path)): v[...] for path, v in variables}
    keys = jax.dtypes.prng_key
    return {
        path: jax.random.key_data(v) if jnp.issubdtype(v.dtype, keys) else v
        for path, v in values.items()
    }


def assert_same(model, other):
    assert nnx.graphdef(model) == nnx.graphdef(other)
    ours, theirs = arrays(model), arrays(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
        assert (value.dtype, value.weak_type) == (
            theirs[path].dtype,
            theirs[path].weak_type,
        ), path


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "resmlp" else pytest.mark.long) for n in MODELS],
)
def test_it_is_the_model_drawn_piece_by_piece_bit_for_bit(name):
    model, options = MODELS[name]
    streams = [nnx.Rngs(3, dropout=4) for _ in range(2)]
    # Twice: the second draw goes on where the first one left the streams.
    for _ in range(2):
        assert_same(
            zoo.create(name, **options, rngs=streams[0]),
            model(**options, rngs=streams[1]),
        )
    assert_same(*streams)


def test_traced_it_draws_the_same_weights():
    def draw(key):
        return nnx.state(zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(params=key)))

    key = jax.random.key(0)
    plain = draw(key)
    for traced in (jax.jit(draw)(key), jax.vmap(draw)(key[None])):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b.reshape(a.shape)),
            plain,
            traced,
        )
    abstract = nnx.eval_shape(lambda: zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0)))
    assert jax.tree.map(jnp.shape, nnx.state(abstract)) == jax.tree.map(
        jnp.shape, plain
    )


def test_streams_from_outside_of_a_trace_can_be_used_inside():
    rngs = nnx.Rngs(0)
    expected = arrays(zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0)))

    @nnx.jit
    def draw(rngs):
        return nnx.state(zoo.create("resmlp", **SIZES, rngs=rngs))

    drawn = arrays(draw(rngs))
    for path, value in expected.items():
        np.testing.assert_array_equal(drawn[path], value)


def test_under_a_mesh_it_draws_the_same_weights():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
    plain = zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        assert_same(zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0)), plain)


def test_another_seed_compiles_nothing_new():
    zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0))
    before = registry._program.cache_info()
    zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(1))
    after = registry._program.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_models_share_no_variable():
    one, other = (zoo.create("resmlp", **SIZES, rngs=nnx.Rngs(0)) for _ in range(2))
    one.readin.kernel[...] = jnp.zeros_like(one.readin.kernel[...])
    assert other.readin.kernel[...].any()


def test_what_is_equal_to_a_good_option_is_refused_all_the_same():
    zoo.create("resmlp", width=1, depth=2, rngs=nnx.Rngs(0))
    for width in (1.0, True):
        with pytest.raises(ValueError, match=f"width={width}"):
            zoo.create("resmlp", width=width, depth=2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rngs", [0, None])
def test_a_seed_in_place_of_rngs_is_refused(rngs):
    with pytest.raises(ValueError, match=r"rngs is a \w+; pass rngs=nnx.Rngs\(0\)"):
        zoo.create("resmlp", **SIZES, rngs=rngs)


def test_options_that_cannot_be_hashed_are_taken():
    rngs = nnx.Rngs(0)
    model = zoo.create("resmlp", **SIZES, input_shape=[4, 4, 1], rngs=rngs)
    assert model(jnp.ones((1, 4, 4, 1))).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mlp", {}, "mup"),
        ("resmlp", {}, "depth_mup"),
        ("resmlp", {"block_depth": 2}, "completep(alpha=1)"),
        ("cnn", {"width": 8}, "depth_mup"),
        ("resnet18", {"width": 4}, "completep(alpha=1)"),
        ("resnet50", {"width": 4}, "completep(alpha=1)"),
        ("vit", {"heads": 2}, "completep(alpha=1)"),
        ("gpt", {"heads": 2}, "completep(alpha=1)"),
    ],
)
def test_the_default_parametrization_follows_the_layers_of_a_branch(
    name, options, expected
):
    options = {"width": 16, "depth": 4, "base_depth": 2} | options
    model = nnx.eval_shape(lambda: zoo.create(name, **options, rngs=nnx.Rngs(0)))
    assert model.plan.parametrization.name == expected
    assert zoo.scales(model).parametrization.name == expected
    del options["base_depth"]  # in a config, a key of its own
    run = parse(
        {"dataset": "digits", "learning_rate": 0.1, "model": {"name": name, **options}}
    )
    assert run.rules.name == expected


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("resmlp", {"subtract_mean": False}, "subtract_mean=True"),
        ("resmlp", {"subtract_mean": False, "nonlinearity": "gelu"}, "of 'gelu' to"),
        ("cnn", {"activation_first": False}, "activation_first=True"),
    ],
)
def test_branches_that_add_a_mean_are_warned_of(name, options, remedy):
    def make(**more):
        model = {**SIZES, "width": 16, **options, **more}
        return nnx.eval_shape(lambda: zoo.create(name, **model, rngs=nnx.Rngs(0)))

    with pytest.warns(zoo.ModelWarning, match=remedy):
        make()
    # The sum of the means is bounded, and an odd nonlinearity has none.
    make(parametrization="completep")
    make(nonlinearity="identity")


def test_the_mean_of_a_relu_grows_with_depth():
    """What the warning says: at 1/√L the stream grows, and stays if it is centred."""

    def rms(depth, **options):
        sizes = {"width": 64, "depth": depth, "base_depth": 4}
        model = zoo.ResMLP(**sizes, **options, rngs=nnx.Rngs(0))
        x = model.readin(jax.random.normal(jax.random.key(1), (32, 64)))
        out = scan(model.blocks, x)
        return float(jnp.sqrt((out**2).mean() / (x**2).mean()))

    with pytest.warns(zoo.ModelWarning):
        drifting = [rms(depth, subtract_mean=False) for depth in (4, 64)]
    centred = [rms(depth) for depth in (4, 64)]
    assert drifting[1] > 5 * drifting[0]
    assert centred[1] < 2 * centred[0]
