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
    carries={"e": 0.5},
    asks=r"by 0\.5, i\.e\. by \(base width / width\)\*\*0\.5",
)
def tied_table_times_the_root_of_the_width(n, remedy=False):
    p = zeros(e=(7, n)) | {"b": layers(2, w=(n, n))}

    def call(p, x):
        x = p["e"][x] * n**0.5
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["w"])
        return norm(x) @ p["e"].T * ((8 / n) ** 0.5 if remedy else 1.0)

    return p, T, call
