"""Kernels, tables and constants in unusual places, from real code bases."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, X, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def ends(n, outputs=3):
    return {"in": (5, n), "out": (n, outputs)}


def unit(x):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))


@program({**ENDS, "u": "H", "s": "V"})
def unit_then_kernel_then_gain_then_root(n):
    p = zeros(**ends(n), u=(n, n), s=(n,))

    def call(p, x):
        h = unit(x @ p["in"]) @ p["u"] * p["s"] * n**0.5
        return jnp.tanh(h) @ p["out"]

    return p, X, call


@program({**ENDS, "s": "F"})
def unit_then_readout_then_gain_then_root(n):
    p = zeros(**ends(n), s=(3,))
    return p, X, lambda p, x: (unit(x @ p["in"]) @ p["out"]) * p["s"] * n**0.5


def relative_keys(n, shared):
    """Shaw's relative keys: a table of vectors that queries are multiplied with."""
    square = dict.fromkeys("qkvo", (n, n))
    p = zeros(**ends(n), **square, emb=(11, n // 2))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], n // 2) for c in "qkv")
        d = q.shape[-1]
        r = p["emb"][jnp.arange(6)[:, None] - jnp.arange(6)[None] + 5]
        a = jnp.einsum("bhid,bhjd->bhij", q, k)
        b = jnp.einsum("bhid,ijd->bhij", q, r)
        s = (a + b) * (2.0 / d) if shared else a * (2.0 / d) + b
        return flat(jax.nn.softmax(s) @ v) @ p["o"] @ p["out"]

    return p, S, call


@program({**ENDS, "(q|k|v|o)": "H", "emb": "O"}, carries={"emb": 4.0})
def relative_keys_within_the_scale(n):
    return relative_keys(n, True)


@program({**ENDS, "(q|k|v|o)": "H", "emb": "O"})
def relative_keys_outside_of_the_scale(n):
    return relative_keys(n, False)


def of_each_head(n):
    into = dict.fromkeys("qkv", (n // 4, n, 4))
    return zeros(**ends(n), **into, o=(n // 4, 4, n))


def head(x, q, k, v, o):
    return jax.nn.softmax((x @ q) @ (x @ k).mT / 2.0, -1) @ (x @ v) @ o


@program({**ENDS, "q|k|v|o": "H"})
def vmap_over_heads_whose_number_grows(n):
    def call(p, x):
        each = jax.vmap(head, in_axes=(None, 0, 0, 0, 0))
        y = jax.vmap(lambda x: each(x, *(p[c] for c in "qkvo")).sum(0))(x @ p["in"])
        return y @ p["out"]

    return of_each_head(n), S, call


@program({**ENDS, "q|k|v|o": "H"})
def heads_by_lax_map(n):
    def call(p, x):
        x = x @ p["in"]
        each = lax.map(lambda w: head(x, *w), tuple(p[c] for c in "qkvo"))
        return each.sum(0) @ p["out"]

    return of_each_head(n), S, call


@program({**ENDS, "q|k|v|o": "H"})
def heads_by_lax_map_on_each_device(n):
    mesh, spec = jax.make_mesh((1,), ("d",), (AxisType.Auto,)), PartitionSpec

    @jax.shard_map(mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
    def heads(x, w):
        return lax.psum(lax.map(lambda w: head(x, *w), w).sum(0), "d")

    def call(p, x):
        return heads(x @ p["in"], tuple(p[c] for c in "qkvo")) @ p["out"]

    return of_each_head(n), S, call


@program(
    {**ENDS, "w": "H|I|O|V", "[abc]": "H|I|O"}, asks="both the inputs and the outputs"
)
def flat_vector_of_parameters(n, remedy=False):
    tree = zeros(a=(5, n), b=(n, n), c=(n, 3))
    vector, unravel = ravel_pytree(tree)

    def call(p, x):
        w = p if remedy else unravel(p["w"])
        return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]

    return tree if remedy else {"w": vector}, X, call


@program({**ENDS, "w": "H"})
def symmetric_and_skew_kernels(n):
    def call(p, x):
        w = p["w"] - p["w"].T - 0.1 * jnp.eye(n)
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ w) @ p["out"]

    return zeros(**ends(n), w=(n, n)), X, call


@program({**ENDS, "w": "H"}, asks="cannot be read")
def orthogonal_kernel_by_cayley(n, remedy=False):
    def call(p, x):
        a = p["w"] - p["w"].T
        q = p["w"] if remedy else jnp.linalg.solve(jnp.eye(n) + a, jnp.eye(n) - a)
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ q) @ p["out"]

    return zeros(**ends(n), w=(n, n)), X, call


@program({**ENDS, "w": "H"})
def orthogonal_kernel_by_a_loop(n):
    def call(p, x):
        w = p["w"] / jnp.linalg.norm(p["w"])
        w = lax.fori_loop(0, 5, lambda _, w: 1.5 * w - 0.5 * w @ w.T @ w, w)
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ w) @ p["out"]

    return zeros(**ends(n), w=(n, n)), X, call


def fourier(n, back=lambda x: x, **options):
    def call(p, x):
        h = back(jnp.fft.fft(jnp.tanh(x @ p["in"]), **options).real)
        return jnp.tanh(h @ p["w"]) @ p["out"]

    return zeros(**ends(n), w=(n, n)), X, call


@program({**ENDS, "w": "H"}, carries={"w": 0.5})
def fft_of_units(n):
    return fourier(n)


@program({**ENDS, "w": "H"})
def fft_of_units_orthonormal(n):
    return fourier(n, norm="ortho")


@program({**ENDS, "w": "H"})
def fft_of_units_divided_by_the_root(n):
    return fourier(n, lambda x: x / n**0.5)


@program({**ENDS, "w": "V"})
def filter_of_the_fourier_transform_of_units(n):
    def call(p, x):
        h = jnp.fft.fft(jnp.tanh(x @ p["in"])) * p["w"]
        return jnp.tanh(jnp.fft.ifft(h).real) @ p["out"]

    return zeros(**ends(n), w=(n,)), X, call


@program({**ENDS, "u": "F", "b": "F"})
def split_of_constants(n):
    def call(p, x):
        a, b = jnp.split(jnp.arange(4.0), 2)
        return (jnp.tanh(x @ p["in"]) @ p["out"]) * a + b

    return zeros(**ends(n, 2), u=(4, 4), b=(4,)), X, call


# Its entries matter beside the epsilon of the norm that follows.
@program({"tok": "I", "w": "H", "g|c": "V"}, carries={"g|c": 0.25})
def tied_table_before_a_norm(n):
    p = zeros(tok=(9, n), w=(n, n), g=(n,), c=(n,))

    def call(p, x):
        x = norm(p["tok"][x])
        x = x + jnp.tanh(x @ p["w"])
        return (norm(x, p["g"]) + p["c"]) @ p["tok"].T

    return p, T, call


@program({"e": "I", "w": "H", "g": "V"}, carries={"e": 0.5, "g": 0.5})
def tied_embedding_times_the_root_of_the_width(n):
    def call(p, x):
        x = jnp.tanh(norm(p["e"][x] * n**0.5) @ p["w"])
        return norm(x, p["g"]) @ p["e"].T

    return zeros(e=(7, n), w=(n, n), g=(n,)), T, call


@program({"e": "I", "w": "H", "g": "V"}, carries={"g": 0.25})
def last_norm_computed_twice_as_in_gpt_neo(n):
    def call(p, x):
        x = jnp.tanh(p["e"][x] @ p["w"])
        norm(x, p["g"])
        return norm(x, p["g"]) @ p["e"].T

    return zeros(e=(7, n), w=(n, n), g=(n,)), T, call


@program(
    {
        r"s/\d/(l|u)": "F",
        r"s/\d/c1": "I",
        r"s/\d/c2": "H",
        r"s/\d/c3": "O",
        r"s/\d/(logs|b)": "F",
    }
)
def glow_steps_with_lu_convolutions(n):
    kernels = {"c1": (3, 3, 2, n), "c2": (1, 1, n, n), "c3": (3, 3, n, 4)}
    p = {"s": layers(3, l=(4, 4), u=(4, 4), logs=(4,), b=(4,), **kernels)}

    def conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )

    def call(p, x):
        total = 0.0
        for w in p["s"]:
            x = (x + w["b"]) * jnp.exp(w["logs"])
            kernel = (jnp.tril(w["l"], -1) + jnp.eye(4)) @ jnp.triu(w["u"])
            x = jnp.einsum("bhwc,dc->bhwd", x, kernel)
            total = total + jnp.log(jnp.abs(jnp.diag(w["u"]))).sum()
            a, b = jnp.split(x, 2, -1)
            h = jax.nn.relu(conv(jax.nn.relu(conv(a, w["c1"])), w["c2"]))
            h = conv(h, w["c3"])
            s = jax.nn.sigmoid(h[..., 1::2] + 2.0)
            total = total + jnp.log(s).sum((1, 2, 3))
            x = jnp.concatenate([a, (b + h[..., ::2]) * s], -1)
        return x, total + np.pi

    return p, (floats(2, 4, 4, 4),), call


@program({**ENDS, "q|k|v": "H"})
def layer_norm_without_gain_on_queries_and_keys(n):
    def call(p, x):
        x = x @ p["in"]
        q, k = norm(x @ p["q"]), norm(x @ p["k"])
        return jax.nn.softmax(q @ k.mT * (4 / n)) @ (x @ p["v"]) @ p["out"]

    return zeros(**ends(n), **dict.fromkeys("qkv", (n, n))), S, call


@program({**ENDS, "q|k|v|o": "H", "mix": "F"})
def logits_mixed_across_heads_before_their_constant(n):
    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], n // 2) for c in "qkv")
        s = jnp.einsum("bhqd,bhkd,hi->biqk", q, k, p["mix"]) * (4 / (n // 2)) / 2
        return flat(jax.nn.softmax(s) @ v) @ p["o"] @ p["out"]

    return zeros(**ends(n), **dict.fromkeys("qkvo", (n, n)), mix=(2, 2)), S, call


def units(n, normalized):
    def call(p, x):
        return normalized(jnp.tanh(x @ p["in"]) @ p["w"]) @ p["out"]

    return zeros(**ends(n), w=(n, n)), X, call


@program({**ENDS, "w": "H"}, carries={"out": 4.0})
def softmax_over_units_then_readout(n):
    return units(n, jax.nn.softmax)


@program({**ENDS, "w": "H", "s": "V"})
def softmax_of_parameters_as_weights_of_units(n):
    def call(p, x):
        h = jax.nn.relu(x @ p["in"] @ p["w"])
        return h @ p["out"] + (h * jax.nn.softmax(p["s"])).sum(-1)[:, None]

    return zeros(**ends(n), w=(n, n), s=(n,)), X, call


@program({**ENDS, "w": "H"})
def softmax_over_units_times_their_number(n):
    return units(n, lambda x: jax.nn.softmax(x) * n)


@program({**ENDS, "w": "H"}, carries={"out": 4.0})
def units_divided_by_their_sum(n):
    return units(n, lambda x: jax.nn.relu(x) / (jax.nn.relu(x).sum(-1)[:, None] + 1e-6))


@program(
    {
        "net/layers/0/weight": "I",
        "net/layers/1/weight": "H",
        "net/layers/2/weight": "O",
        r"net/layers/[01]/bias": "V",
        "net/layers/2/bias": "F",
        "loc": "F",
    }
)
def equinox_module_called_transformed(n):
    class Transformed(eqx.Module):
        net: eqx.nn.MLP
        loc: jax.Array

        def log_prob(self, x):
            return -jnp.square(self.net(x) - self.loc).sum()

    model = Transformed(eqx.nn.MLP(5, 3, n, 2, key=jax.random.key(0)), jnp.zeros(3))
    return model, (floats(4, 5),), lambda m, x: jax.vmap(m.log_prob)(x)


def add(name, right, call, s=None, **carries):
    """A program of two layers and `w`, with the letter of `w` or of a further `s`."""

    def make(n):
        more = {} if s is None else {"s": [n if a == "n" else a for a in s]}
        return zeros(**ends(n), w=(n, n), **more), X, functools.partial(call, n)

    make.__name__ = name
    program({**ENDS, "w": "H", "s": right}, carries=carries)(make)


def features(p, x):
    return jnp.tanh(x @ p["in"])


def rows(p, x):
    return jnp.tanh(features(p, x) @ p["w"])[:, :, None]


PRODUCTS = {
    "mean": lambda n, p, x: (rows(p, x) * p["out"]).mean(1),
    "sum_over_number": lambda n, p, x: (rows(p, x) * p["out"]).sum(1) / n,
    "average": lambda n, p, x: jnp.average(rows(p, x) * p["out"], 1),
    "constant_before": lambda n, p, x: (rows(p, x) / n * p["out"]).sum(1),
    "constant_between": lambda n, p, x: ((rows(p, x) * p["out"]) / n).sum(1),
    "constant_on_the_kernel": lambda n, p, x: (rows(p, x) * (p["out"] / n)).sum(1),
    "einsum": lambda n, p, x: jnp.einsum("bio,io->bo", rows(p, x), p["out"]) / n,
    "map": lambda n, p, x: jax.vmap(lambda v: (v * p["out"]).mean(0))(rows(p, x)),
}
for name, call in PRODUCTS.items():
    add(f"readout_by_a_product_and_{name}", "", call, out=4.0)
add("readout_by_a_product_and_sum", "", lambda n, p, x: (rows(p, x) * p["out"]).sum(1))
add(
    "hidden_layer_by_a_product_and_a_mean",
    "",
    lambda n, p, x: ((x @ p["in"])[:, :, None] * p["w"]).mean(1) @ p["out"],
    w=4.0,
)
add(
    "two_layers_by_products_and_means",
    "",
    lambda n, p, x: (
        ((x @ p["in"])[:, :, None] * p["w"]).mean(1)[:, :, None] * p["out"]
    ).mean(1),
    w=4.0,
    out=4.0,
)


def masked(p, x):
    return p["w"] * (x[0, 0] > 0) * p["s"][:, None]


GAINS = {
    "rows": lambda p: p["w"] * p["s"][:, None],
    "transposed": lambda p: (p["w"].T * p["s"]).T,
    "one_plus": lambda p: p["w"] * (1 + p["s"])[:, None],
    "softplus": lambda p: p["w"] * jax.nn.softplus(p["s"])[:, None],
    "divided": lambda p: p["w"] / jnp.exp(p["s"])[:, None],
    "einsum": lambda p: jnp.einsum("i,io->io", p["s"], p["w"]),
    "added_diagonal": lambda p: p["w"] + jnp.diag(p["s"]),
    "diagonal_after": lambda p: p["w"] @ jnp.diag(p["s"]),
    "diagonal_before": lambda p: jnp.diag(p["s"]) @ p["w"],
    "identity_times": lambda p: p["w"] + jnp.eye(len(p["s"])) * p["s"],
    "equal_places": lambda p: (
        p["w"]
        + (jnp.arange(len(p["s"]))[:, None] == jnp.arange(len(p["s"])))
        * p["s"][:, None]
    ),
    "normalized": lambda p: (
        p["w"] / jnp.linalg.norm(p["w"], axis=1, keepdims=True) * p["s"][:, None]
    ),
}
for name, kernel in GAINS.items():
    add(
        f"gain_on_a_kernel_{name}",
        "V",
        lambda n, p, x, kernel=kernel: features(p, x) @ kernel(p) @ p["out"],
        ("n",),
    )
USES = {
    "three_operands": lambda n, p, x: (
        jnp.einsum("bi,i,io->bo", features(p, x), p["s"], p["w"]) @ p["out"]
    ),
    "product_and_sum": lambda n, p, x: (
        (features(p, x)[:, :, None] * (p["w"] * p["s"][:, None])).sum(1) @ p["out"]
    ),
    "mask": lambda n, p, x: features(p, x) @ masked(p, x) @ p["out"],
    "readout": lambda n, p, x: features(p, x) @ p["w"] @ (p["out"] * p["s"][:, None]),
    "identity_beside": lambda n, p, x: (
        features(p, x) @ (p["w"] + jnp.eye(n)) @ (jnp.diag(p["s"]) @ p["out"])
    ),
}
for name, call in USES.items():
    add(f"gain_on_the_inputs_{name}", "V", call, ("n",))
for shape in ((1, "n"), ("n", 1)):
    add(
        f"gain_on_a_kernel_axis_{shape.index('n')}",
        "V",
        lambda n, p, x: features(p, x) @ (p["w"] * p["s"]) @ p["out"],
        shape,
    )
add(
    "vector_added_to_all_columns",  # of rank one: it reads out a sum
    "O",
    lambda n, p, x: features(p, x) @ (p["w"] + p["s"][:, None]) @ p["out"],
    ("n",),
)


@program({**ENDS, "v": "H", "s": "V"})
def gain_on_the_channels_of_a_convolution(n):
    def call(p, x):
        kernel, numbers = p["v"] * p["s"][:, None], ("NWC", "WIO", "NWC")
        x = lax.conv_general_dilated(
            x @ p["in"], kernel, (1,), "SAME", dimension_numbers=numbers
        )
        return jax.nn.gelu(x) @ p["out"]

    return zeros(**ends(n), v=(3, n, n), s=(n,)), S, call


@program({**ENDS, "b/w": "He", "b/s": "Vb"}, deep=True)
def gain_on_the_inputs_of_a_branch(n, L):
    def call(p, x):
        layer = lambda x, w: (x + jnp.tanh(x) @ (w["w"] * w["s"][:, None]), None)
        return lax.scan(layer, x @ p["in"], p["b"])[0] @ p["out"]

    return zeros(**ends(n), b=dict(w=(L, n, n), s=(L, n))), X, call


ORDERS = {
    "columns": lambda n, p, x: (
        features(p, x) @ p["w"][:, np.arange(n)[::-1]] @ p["out"]
    ),
    "rows": lambda n, p, x: features(p, x) @ p["w"][jnp.arange(n)[::-1]] @ p["out"],
    "entries": lambda n, p, x: (
        features(p, x) @ p["w"].reshape(-1)[jnp.arange(n * n).reshape(n, n)] @ p["out"]
    ),
}
for name, call in ORDERS.items():
    add(f"kernel_whose_{name}_stand_in_another_order", "", call)


def orthogonal(n):
    """A fixed matrix, e.g. of a cosine transform."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]


add(
    "kernel_after_a_fixed_matrix",
    "",
    lambda n, p, x: jnp.tanh(features(p, x) @ orthogonal(n) @ p["w"]) @ p["out"],
)


def divided_by_a_norm(name, call, **more):
    """A convolution `v`, with a gain for each place of its window."""

    def make(n):
        def run(p, x):
            def layer(axes):
                norm = jnp.sqrt((p["v"] ** 2).sum(axes, keepdims=True))
                numbers = ("NWC", "WIO", "NWC")
                return lax.conv_general_dilated(
                    x @ p["in"],
                    p["v"] / norm * p["g"],
                    (1,),
                    "SAME",
                    dimension_numbers=numbers,
                )

            return jnp.tanh(call(layer, n)) @ p["out"]

        return zeros(**ends(n), v=(3, n, n), g=(3, 1, 1)), S, run

    make.__name__ = name
    program({**ENDS, "v": "H", "g": "F"}, **more)(make)


# The entries are smaller by the root of the number of outputs.
divided_by_a_norm(
    "norm_over_inputs_and_outputs",
    lambda layer, n: layer((1, 2)),
    carries={"g": 2.0},
)
divided_by_a_norm(
    "norm_over_inputs_and_outputs_times_the_factor",
    lambda layer, n: layer((1, 2)) * (n / 8) ** 0.5,
)
divided_by_a_norm("norm_over_inputs", lambda layer, n: layer((0, 1)))
divided_by_a_norm(
    "norm_over_inputs_and_outputs_before_another_norm",
    lambda layer, n: norm(layer((1, 2))),
)


@program({"in": "I", "v": "O", "g": "F"}, carries={"g": 0.5})
def readout_with_weight_norm(n):
    p = zeros(**{"in": (5, n)}, v=(n, 3), g=(3,))
    return (
        p,
        X,
        lambda p, x: (
            features(p, x) @ (p["v"] * p["g"] / jnp.linalg.norm(p["v"], axis=0))
        ),
    )


# As in EDM2, whose gain starts at zero; the first kernel has a row for ones.
@program({"in": "I|V", "v": "O", "g": "F"}, carries={"g": 0.5})
def readout_of_unit_columns_before_a_learned_gain(n):
    def columns(w):
        return w / (jnp.linalg.norm(w, axis=0) + 1e-4)

    def call(p, x):
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        return norm(x @ columns(p["in"])) @ columns(p["v"]) * 2.0 * p["g"]

    return zeros(**{"in": (6, n)}, v=(n, 3), g=()), X, call


@program({"in": "I", "v": "O"}, asks=r"multiply them by 0\.5")
def readout_of_unit_columns(n, remedy=False):
    def call(p, x):
        y = features(p, x) @ (p["v"] / jnp.linalg.norm(p["v"], axis=0))
        return y * (n / 8) ** -0.5 if remedy else y

    return zeros(**{"in": (5, n)}, v=(n, 3)), X, call


# Their size is that of the ReLU layers before them.
@program({"in": "I", "w": "H", "s": "O", "out": "O"}, carries={"w": 0.5, "out": 2.0})
def scores_divided_by_the_norm_of_their_kernel(n):
    """As nodes of a graph are chosen for pooling."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), s=(n,))

    def call(p, x):
        x = jax.nn.relu(jax.nn.relu(x @ p["in"]) @ p["w"])
        score = (x * p["s"]).sum(-1, keepdims=True) / jnp.sqrt((p["s"] ** 2).sum())
        return (x * jnp.tanh(score)).mean(0) @ p["out"]

    return p, X, call


def ternary(w):
    """Rounded to -1, 0 or 1 times the mean size; gradients pass as if it were not."""
    size = jnp.clip(jnp.abs(w).mean(), 1e-5)
    return w + jax.lax.stop_gradient(jnp.clip(jnp.round(w / size), -1, 1) * size - w)


@program({"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", "out": "O"}, deep=True)
def ternary_kernels_as_in_bitnet(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ ternary(w["u"])) @ ternary(w["d"])
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "g": "O", "out": "O"})
def scores_of_rows_in_a_map_summed_outside(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, g=(n,))

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        scores = jax.lax.map(lambda row: row * p["g"], x).sum(-1, keepdims=True)
        return (x * scores) @ p["out"]

    return p, X, call


def unit_spectral_norm(w):
    """Divided by its largest singular value, by one step of power iteration."""
    u = jnp.ones(len(w)) / len(w) ** 0.5
    v = u @ w / jnp.linalg.norm(u @ w)
    u = w @ v / jnp.linalg.norm(w @ v)
    return w / (lax.stop_gradient(u) @ w @ lax.stop_gradient(v))


@program({"in": "I", r"b/\d/(u|d)": "Hb", "out": "O"}, deep=True)
def branches_of_unit_spectral_norm(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            u, d = unit_spectral_norm(w["u"]), unit_spectral_norm(w["d"])
            x = x + jax.nn.relu(x @ u) @ d / L
        return x @ p["out"]

    return p, X, call


@program({"in": "I", r"b/\d/(u|d)": "Hb", r"b/\d/s": "Fb", r"b/\d/t": "Fe", "out": "O"}, deep=True)  # fmt: skip
def gains_on_kernels_over_their_largest_singular_value(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), s=(), t=())}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            u = w["u"] * w["s"] / jnp.linalg.norm(w["u"], 2)
            d = w["d"] * w["t"] / jnp.linalg.norm(w["d"], 2)
            x = x + jax.nn.relu(x @ u) @ d
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "lower|upper": "H", "s": "V", "out": "O"})
def kernel_as_a_product_of_triangles(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, lower=(n, n), upper=(n, n), s=(n,))

    def call(p, x):
        lower = jnp.tril(p["lower"], -1) + jnp.eye(n)
        upper = jnp.triu(p["upper"], 1) + jnp.diag(jnp.exp(p["s"]))
        return jnp.tanh(x @ p["in"] @ (lower @ upper)) @ p["out"]

    return p, X, call


@program({"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/s": "Fe", "out": "O"}, deep=True)  # fmt: skip
def kernels_rounded_to_learned_steps(n, L):
    """The kernel and its step carry the branch together: twice both is twice as much."""
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), s=())}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            steps = w["d"] / w["s"]
            steps = steps + lax.stop_gradient(jnp.round(steps) - steps)
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ (jnp.clip(steps, -8, 7) * w["s"])
        return x @ p["out"]

    return p, X, call


def _divided(depth):
    def make(n, L):
        p = zeros(**{"in": (5, n)}, out=(n, 3))
        p["b"] = layers(L, u=(n, n), d=(n, n), c=(n,))

        def call(p, x):
            x = x @ p["in"] / 5**0.5
            for w in p["b"]:
                y = jax.nn.relu(x @ w["u"] / n**0.5) @ w["d"] / n**0.5 + w["c"]
                x = x + (y / L if depth else y)
            return x @ p["out"] / n**0.5

        return p, X, call

    return make


@program(
    {"in": "I", "out": "O", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/c": "Ve"},
    deep=True,
    carries={"out|.*[ud]": 2.0},
)
def kernels_divided_by_the_root_of_their_fan_in(n, L):
    return _divided(False)(n, L)


@program(
    {"in": "I", "out": "O", r"b/\d/u": "Hb", r"b/\d/d": "Hb", r"b/\d/c": "Vb"},
    deep=True,
    carries={"out|.*[ud]": 2.0},
)
def kernels_divided_by_the_root_of_their_fan_in_and_the_depth(n, L):
    return _divided(True)(n, L)


@program({**ENDS, "u|w": "H"})
def kernels_divided_by_their_norm_and_the_root_of_their_fan_in(n):
    def unit(w):
        return w * lax.rsqrt((w * w).mean(0, keepdims=True) + 1e-8) / n**0.5

    def call(p, x):
        x = jnp.tanh(jax.nn.silu(x @ p["in"]) @ unit(p["u"]))
        return jnp.tanh(x @ unit(p["w"])) @ p["out"]

    return zeros(**ends(n), u=(n, n), w=(n, n)), X, call


@program({**ENDS, "(q|k|v|o)": "H", "r": "I", "w": "I"})
def axes_that_hold_heads_and_the_inputs_of_each(n):
    """Relative positions from sinusoids, and a flat kernel of diagonal blocks."""
    square = dict.fromkeys("qkvo", (n, n))
    p = zeros(**ends(n), **square, r=(8, n), w=(n, 4))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], 4) for c in "qkv")
        places = jnp.sin(jnp.arange(11)[:, None] * jnp.exp(-jnp.arange(8.0)))
        r = (places @ p["r"]).reshape(11, n // 4, 4)
        far = jnp.einsum("bhtd,rhd->bhtr", q, r)
        i = jnp.arange(6)[None] - jnp.arange(6)[:, None] + 5
        far = jnp.take_along_axis(far, jnp.broadcast_to(i, (2, n // 4, 6, 6)), -1)
        y = flat(jax.nn.softmax((q @ k.mT + far) / 2) @ v) @ p["o"]
        blocks = p["w"].reshape(n // 4, 4, 4)
        y = jnp.einsum("bthi,hij->bthj", y.reshape(2, 6, n // 4, 4), blocks)
        return jax.nn.relu(y.reshape(2, 6, n)) @ p["out"]

    return p, S, call


@program({**ENDS, "w": "H", "b": "V"})
def sinusoids_of_the_width_through_a_layer(n):
    def call(p, x):
        places = jnp.arange(x.shape[1])[:, None]
        places = jnp.sin(places * jnp.exp(-jnp.arange(n) / n))
        return jax.nn.relu(x @ p["in"] + (places @ p["w"] + p["b"])) @ p["out"]

    return zeros(**ends(n), w=(n, n), b=(n,)), S, call


@program({**ENDS, "w": "H", "k": "H"})
def queries_made_of_an_array_of_constants(n):
    places = np.sin(np.arange(6)[:, None] * np.exp(-np.arange(n) / n))

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        shares = jax.nn.softmax((places @ p["w"]) @ (x @ p["k"]).mT / n)
        return (shares @ x) @ p["out"]

    return zeros(**ends(n), w=(n, n), k=(n, n)), S, call


@program({"e": "I", "w": "H", "out": "O"})
def several_vectors_of_each_token(n):
    p = zeros(e=(9, 3, n), w=(n, n), out=(n, 3))
    return p, T, lambda p, x: jnp.tanh(p["e"][x] @ p["w"]).sum(2) @ p["out"]


@program({**ENDS, "z": "F", "w": "I", "v": "H"})
def latents_that_a_kernel_makes_of_a_few_vectors(n):
    def call(p, x):
        z = jnp.tanh((p["z"] @ p["w"]).reshape(6, n))
        return jnp.tanh(x @ p["in"] + z @ p["v"]) @ p["out"]

    return zeros(**ends(n), z=(2, 4), w=(4, 3 * n), v=(n, n)), S, call


# CondConv: what the router makes of an example mixes kernels.
def conditioned(n, mix):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, r=(n, 3), w=(3, n, n))

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        kernel = mix(jax.nn.sigmoid(x @ p["r"]), p["w"])
        return jnp.tanh(jnp.einsum("bi,bio->bo", x, kernel)) @ p["out"]

    return p, X, call


CONDITIONED = {**ENDS, "r": "O", "w": "H"}


@program(CONDITIONED)
def kernels_mixed_by_routers(n):
    return conditioned(n, lambda r, w: jnp.einsum("bk,kio->bio", r, w))


@program(CONDITIONED)
def kernels_times_routers_and_summed(n):
    return conditioned(n, lambda r, w: (r[:, :, None, None] * w).sum(1))


@program(CONDITIONED)
def convolutions_mixed_by_routers(n):
    p = zeros(**{"in": (3, 3, 5, n), "out": (n, 3)}, r=(n, 3), w=(3, 3, 3, n, n))

    def convolve(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=names)[0]  # fmt: skip

    def one(p, x):
        x = jax.nn.relu(convolve(x, p["in"]))
        r = jax.nn.sigmoid(x.mean((0, 1)) @ p["r"])
        x = jax.nn.relu(convolve(x, jnp.tensordot(r, p["w"], 1)))
        return x.mean((0, 1)) @ p["out"]

    return p, (floats(2, 6, 6, 5),), lambda p, x: jax.vmap(lambda x: one(p, x))(x)


# The kernel of each example is normalized away, so that its size has no effect.
@program(CONDITIONED, asks=r"'w' makes a kernel .* one for the outputs of the kernel")
def kernels_mixed_from_rows_of_all_their_entries_before_a_norm(n, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, r=(n, 3))
    p["w"] = jnp.zeros((3, n, n) if remedy else (3, n * n))

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        kernel = jnp.tensordot(jax.nn.sigmoid(x @ p["r"]), p["w"], 1).reshape(-1, n, n)
        return jax.nn.relu(norm(jnp.einsum("bi,bio->bo", x, kernel))) @ p["out"]

    return p, X, call


# Kolmogorov-Arnold networks: the sum over inputs is of two kernels' results. A scale on
# each edge multiplies a kernel's entries, of n^-1/2, so its updates are of n^-1/2, too.
EDGES = {
    "": lambda x, z, w: (
        jax.nn.silu(x)[..., None] * w["b"] + jnp.einsum("big,iog->bio", z, w["c"])
    ).sum(1),
    "_with_scales": lambda x, z, w: (
        w["b"] * jax.nn.silu(x)[..., None]
        + w["s"] * jnp.einsum("big,iog->bio", z, w["c"])
    ).sum(-2),
    "_with_scales_of_both": lambda x, z, w: (
        w["s"] * (jax.nn.silu(x)[..., None] * w["b"])
        + w["s"] * (z[:, :, None] * w["c"]).sum(-1)
    ).sum(1),
    "_with_scaled_kernels": lambda x, z, w: (
        jax.nn.silu(x) @ w["b"]
        + jnp.einsum("big,iog->bo", z, w["c"] * w["s"][..., None])
    ),
}
for name, edges in EDGES.items():

    def make(n, edges=edges, scaled="scale" in name):
        sizes = itertools.pairwise([3, n, n, 2])
        more = [{"s": (a, b)} if scaled else {} for a, b in ((3, n), (n, n), (n, 2))]
        p = {
            str(i): zeros(c=(a, b, 6), b=(a, b), **more[i])
            for i, (a, b) in enumerate(sizes)
        }

        def call(p, x):
            for w in p.values():
                z = jnp.exp(-((x[..., None] - jnp.linspace(-2, 2, 6)) ** 2))
                x = edges(x, z, w)
            return x

        return p, (floats(4, 3),), call

    make.__name__ = f"sums_of_two_functions_on_each_edge{name}"
    roles = {"0/[cb]": "I", "1/[cbs]": "H", "2/[cb]": "O", "0/s": "I|V", "2/s": "O|V"}
    program(roles, carries={"1/s": 2.0})(make)

ENTRIES = {
    "hadamard": lambda p: p["s"] * p["w"],
    "sigmoid": lambda p: jnp.tanh(p["w"]) * jax.nn.sigmoid(p["s"]),
}
for name, kernel in ENTRIES.items():

    def make(n, kernel=kernel):
        p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), s=(n, n))
        return p, X, lambda p, x: features(p, x) @ kernel(p) @ p["out"]

    make.__name__ = f"product_of_the_entries_of_kernels_{name}"
    program({**ENDS, "w|s": "H"}, carries={"s": 2.0})(make)


@program({**ENDS, "w|a|b": "H"}, carries={"a": 4.0})
def low_rank_product_over_its_rank_added_to_a_kernel(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), a=(n, n // 2), b=(n // 2, n))

    def call(p, x):
        w = p["w"] + p["a"] @ p["b"] * (8 / (n // 2))
        return features(p, x) @ w @ p["out"]

    return p, X, call


@program({**ENDS, "w|each|b|made|by": "H", "s|t": "V"})
def kernels_that_tasks_change(n):
    """By gains, by kernels of their own, and by kernels made of an embedding."""
    kernel, many = (n, n), (2, n, n)
    p = zeros(
        w=kernel, s=(2, n), t=(2, n), each=many, b=kernel, made=(4, n, n), by=kernel
    )
    p |= zeros(**{"in": (5, n), "out": (n, 3)})

    def call(p, x, task, c):
        x = features(p, x)
        gains = jnp.einsum("hi,ho->hio", p["s"], p["t"]) * p["w"]
        x = jnp.tanh(jnp.einsum("bi,hio->hbo", x, gains)).mean(0)
        x = jnp.tanh(jnp.einsum("bi,bio->bo", x, p["each"][task] + p["b"]))
        made = jnp.einsum("bk,kio->bio", c, p["made"]) + p["by"]
        return jnp.tanh(jnp.einsum("bi,bio->bo", x, made)) @ p["out"]

    return p, (floats(4, 5), tokens(4), floats(4, 4)), call


@program({"in": "I", "w|v": "V", "out": "O"}, carries={"in": 0.25})
def positive_kernels_as_in_convex_networks(n):
    """Entries of order one at each width, whose sum is an average or grows."""

    def call(p, x):
        x = jax.nn.relu(jax.nn.relu(x @ p["in"]) @ jax.nn.softplus(p["w"]))
        return jax.nn.relu(x @ jnp.exp(p["v"]) / n) @ p["out"]

    return zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), v=(n, n)), X, call


@program({"in": "I", "w|v": "H", "out": "O"}, carries={"w": 4.0})
def results_that_are_divided_and_also_repeated(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), v=(n, n))

    def call(p, x):
        z = features(p, x) @ p["w"] / n
        bumps = jnp.exp(-((z[..., None] - jnp.linspace(-2, 2, 6)) ** 2))
        return jnp.tanh(jax.nn.silu(z) @ p["v"] + bumps.mean(-1)) @ p["out"]

    return p, X, call
