"""Traits of models in public repositories, in programs of our own."""

import jax
import jax.numpy as jnp

from .kit import floats, layers, program, zeros
from .plain import T, norm

ENDS = {"in": "I", "out": "O"}
X = (floats(2, 6, 7),)


def block(w, x):
    """The two branches of a block, and what they add."""
    y = jax.nn.relu(norm(x) @ w["a"]) @ w["b"]
    z = jax.nn.relu(norm(x + y) @ w["up"]) @ w["down"] + w["bias"]
    return x + y + z, {"y": y, "z": z, "sum": x + y + z}


BLOCK = {"a": "Hb", "b": "He", "up": "Hb", "down": "He", "bias": "Ve"}


@program({**ENDS, **{rf"b/\d/{k}": v for k, v in BLOCK.items()}}, deep=True)
def what_each_branch_adds_is_returned_beside_the_logits(n, L):
    square = dict.fromkeys(("a", "b", "up", "down"), (n, n))
    p = zeros(**{"in": (7, n), "out": (n, 3)}) | {"b": layers(L, bias=(n,), **square)}

    def call(p, x):
        x, found = x @ p["in"], []
        for w in p["b"]:
            x, out = block(w, x)
            found.append(out)
        return norm(x) @ p["out"], {"layers": found, "y": jnp.stack([f["y"] for f in found])}  # fmt: skip

    return p, X, call


@program({**ENDS, **{f"b/{k}": v for k, v in BLOCK.items()}}, deep=True)
def what_each_branch_adds_in_a_scan_is_returned_by_layers(n, L):
    square = dict.fromkeys(("a", "b", "up", "down"), (L, n, n))
    p = zeros(**{"in": (7, n), "out": (n, 3), "b": dict(bias=(L, n), **square)})

    def call(p, x):
        x, out = jax.lax.scan(lambda x, w: block(w, x), x @ p["in"], p["b"])
        found = [jax.tree.map(lambda y, i=i: y[i], out) for i in range(L)]
        return norm(x) @ p["out"], found

    return p, X, call


# A width of zero, e.g. of an MLP beside the state space of Mamba-2.
@program({**ENDS, "u": "H", "c": "V", "d": "H"})
def a_split_with_empty_parts(n):
    p = zeros(**{"in": (7, n), "u": (n, 2 * n), "c": (2 * n,), "d": (n, n), "out": (n, 3)})  # fmt: skip

    def call(p, x):
        none, gate, rest, up = jnp.split((x @ p["in"]) @ p["u"] + p["c"], [0, n, n], -1)
        y = jnp.concatenate([none, jax.nn.silu(gate) * up, rest], -1)
        return jax.nn.relu(y @ p["d"]) @ p["out"]

    return p, X, call


@program(
    {"e": "I", r"b/\d/w": "H"},
    carries={"e": 0.25, r"b/\d/w": 0.5},
)
def tied_table_times_the_root_of_the_width(n):
    p = zeros(e=(7, n)) | {"b": layers(2, w=(n, n))}

    def call(p, x):
        x = p["e"][x] * n**0.5
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["w"])
        return norm(x) @ p["e"].T

    return p, T, call


def tower(n, L, **more):
    square = dict.fromkeys(("u", "d", "c"), (n, n))
    return zeros(e=(7, n), **more) | {"b": layers(L, **square)}


def climb(p, x, read):
    x = p["e"][x]
    for w in p["b"]:
        x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        x = x + read(norm(x)) @ w["c"]
    return norm(x)


DEEP = {r"\w/b/\d/u": "Hb", r"\w/b/\d/[dc]": "He"}
FIXED = {"f/e": "I", r"f/b/\d/[udc]": "H"}  # two layers at every depth


@program({"a/e": "I", "[af]/o": "O", **FIXED, **{f"(?!f){k}": v for k, v in DEEP.items()}}, deep=True)  # fmt: skip
def a_tower_of_growing_depth_beside_one_of_two_layers(n, L):
    p = {"a": tower(n, L, o=(n, 4)), "f": tower(n, 2, o=(n, 4))}

    def call(p, x, y):
        one, other = (climb(p[k], z, lambda h: h) for k, z in (("a", x), ("f", y)))
        return (one @ p["a"]["o"]).mean(1) @ (other @ p["f"]["o"]).mean(1).T

    return p, (*T, *T), call


@program({"a/e": "I", "o": "O", **FIXED, **{f"(?!f){k}": v for k, v in DEEP.items()}}, deep=True)  # fmt: skip
def a_decoder_of_growing_depth_that_reads_an_encoder_of_two_layers(n, L):
    p = {"a": tower(n, L), "f": tower(n, 2), "o": jnp.zeros((n, 4))}

    def call(p, x, y):
        memory = climb(p["f"], x, lambda h: h)

        def read(h):
            return jax.nn.softmax(h @ memory.swapaxes(1, 2) / n) @ memory

        return climb(p["a"], y, read) @ p["o"]

    return p, (*T, *T), call


@program({r"\w/e": "I", r"\w/o": "O", **DEEP}, deep=True)
def towers_whose_depths_grow_by_different_factors(n, L):
    p = {k: tower(n, m, o=(n, 4)) for k, m in (("a", L), ("f", L // 2 + 1))}

    def call(p, x, y):
        one, other = (climb(p[k], z, lambda h: h) for k, z in (("a", x), ("f", y)))
        return (one @ p["a"]["o"]).mean(1) @ (other @ p["f"]["o"]).mean(1).T

    return p, (*T, *T), call


# Numbers within a block are no lists: of two kernels only `dense_1` is split.
@program(
    {
        **ENDS,
        r"blocks_\d+/att/dense_[01]/w": "Hb",
        r"blocks_\d+/att/dense_[01]/b": "Vb",
        r"blocks_\d+/att/dense_2/w": "He",
        r"blocks_\d+/att/dense_2/b": "Ve",
        "down": "H",
    },
    deep=True,
)
def stages_of_numbered_layers_in_one_list(n, L):
    def dense(*shape):
        return {"w": jnp.zeros(shape), "b": jnp.zeros(shape[-1])}

    p = zeros(**{"in": (7, n), "down": (n, 2 * n), "out": (2 * n, 3)})
    for i, m in enumerate([n] * L + [2 * n] * L):
        kernels = dense(m, m), dense(m, 2 * m), dense(m, m)
        p[f"blocks_{i}"] = {"att": {f"dense_{k}": x for k, x in enumerate(kernels)}}

    def apply(w, x):
        return x @ w["w"] + w["b"]

    def call(p, x):
        x = x @ p["in"]
        for i in range(2 * L):
            x = x @ p["down"] if i == L else x
            w, y = p[f"blocks_{i}"]["att"], norm(x)
            k, v = jnp.split(apply(w["dense_1"], y), 2, -1)
            s = apply(w["dense_0"], y) @ k.swapaxes(1, 2) / x.shape[-1]
            x = x + apply(w["dense_2"], jax.nn.softmax(s) @ v)
        return norm(x) @ p["out"]

    return p, X, call


@program(
    {
        **ENDS,
        r"b/\d/(g|s|one)": "Vb",
        r"b/\d/(q|p|u|d)": "Hb",
        r"b/\d/(two|three)": "Ve",
    },
    deep=True,
)
def gains_after_a_residual_module_within_each_branch(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 3)})
    square = dict.fromkeys(("p", "q", "u", "d"), (n, n))
    gains = dict.fromkeys(("g", "s", "one", "two", "three"), (n,))
    p["b"] = layers(L, **square, **gains)

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x) * w["g"] + w["s"]
            y = y + w["one"] * (jax.nn.gelu(y @ w["p"]) @ w["q"])
            x = x + w["two"] * y
            x = x + w["three"] * (jax.nn.relu(norm(x) @ w["u"]) @ w["d"])
        return norm(x) @ p["out"]

    return p, X, call


# `jnp.einsum` gives the keys to `dot_general` first.
@program({**ENDS, "q|k|v|o": "H"}, carries={"q": 0.5})
def queries_by_an_einsum_that_takes_the_keys_first(n):
    square = dict.fromkeys(("q", "k", "v", "o"), (n, n))
    p = zeros(**{"in": (7, n), "out": (n, 3), **square})
    p |= {"k": jnp.zeros((n, n // 2)), "v": jnp.zeros((n, n // 2))}

    def call(p, x):
        x = x @ p["in"]
        q = (x @ p["q"]).reshape(2, 6, 2, 2, n // 4)
        k, v = ((x @ p[c]).reshape(2, 6, 2, n // 4) for c in "kv")
        s = jnp.einsum("btkgd,bskd->bkgts", q, k) * (n // 4) ** -0.5
        s = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), s, -1e9)
        y = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s), v)
        return jax.nn.relu(y.reshape(x.shape) @ p["o"]) @ p["out"]

    return p, X, call
