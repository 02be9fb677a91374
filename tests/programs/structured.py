"""Graphs, recommenders, reinforcement learning and contrastive models."""

import jax
import jax.numpy as jnp

from .kit import floats, layers, program, tokens, zeros
from .plain import S, X, attention, norm

ENDS = {"in": "I", "out": "O"}
EDGES = (floats(6, 5), tokens(9), tokens(9))


@program(
    {**ENDS, r"l/\d/w": "H", r"l/\d/self": "H", r"l/\d/eps": "F", r"l/\d/(up)": "H"}
)
def graph_convolutions_and_isomorphism(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"l": layers(2, w=(n, n), self=(n, n), eps=(), up=(n, n))}

    def call(p, x, i, j):
        x = x @ p["in"]
        degree = jax.ops.segment_sum(jnp.ones(9), j, 6) + 1
        for w in p["l"]:
            m = (x @ w["w"])[i] / jnp.sqrt(degree[i] * degree[j])[:, None]
            x = jax.nn.relu(jax.ops.segment_sum(m, j, 6) + x @ w["self"])
            m = jax.ops.segment_sum(x[i], j, 6)
            x = jax.nn.relu((m + (1 + w["eps"]) * x) @ w["up"])
        return jax.ops.segment_sum(x, jnp.zeros(6, int), 1) @ p["out"]

    return p, EDGES, call


@program({"node": "I", "edge": "I", "m0": "H", "m1": "H", "u0": "H", "u1": "H", "out": "O", "(m|u)b": "V"})  # fmt: skip
def interaction_network_with_concatenations(n):
    p = zeros(node=(5, n), edge=(2, n), m0=(3 * n, n), mb=(n,), m1=(n, n), u0=(2 * n, n), ub=(n,), u1=(n, n), out=(n, 3))  # fmt: skip

    def call(p, x, e, i, j):
        x, e = x @ p["node"], e @ p["edge"]
        for _ in range(2):
            m = jnp.concatenate([x[i], x[j], e], -1)
            e = jax.nn.relu(m @ p["m0"] + p["mb"]) @ p["m1"]
            total = jax.ops.segment_sum(e, j, 6)
            x = (
                jax.nn.relu(jnp.concatenate([x, total], -1) @ p["u0"] + p["ub"])
                @ p["u1"]
            )
        return x.mean(0) @ p["out"]

    return p, (floats(6, 5), floats(9, 2), tokens(9), tokens(9)), call


@program({**ENDS, "w": "H", "src|dst": "V|I", "edge": "I"})
def graph_attention_with_heads(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)},
        w=(n, n // 4, 4),
        src=(n // 4, 4),
        dst=(n // 4, 4),
    )

    def call(p, x, i, j):
        h = jnp.einsum("vd,dhk->vhk", x @ p["in"], p["w"])
        s = (h * p["src"]).sum(-1)[i] + (h * p["dst"]).sum(-1)[j]
        s = jnp.exp(jax.nn.leaky_relu(s))
        a = s / jax.ops.segment_sum(s, j, 6)[j]
        y = jax.ops.segment_sum(a[..., None] * h[i], j, 6).reshape(6, n)
        return jax.nn.elu(y) @ p["out"]

    return p, EDGES, call


@program({"atom": "I", r"b/\d/(in|out|o)": "Hb", r"b/\d/f0": "Ib", r"b/\d/f1": "Hb", "r0": "H", "r1": "O"})  # fmt: skip
def continuous_filter_convolutions(n):
    p = zeros(atom=(9, n), r0=(n, n), r1=(n, 1))
    p |= {"b": layers(2, **{"in": (n, n), "f0": (10, n), "f1": (n, n), "out": (n, n), "o": (n, n)})}  # fmt: skip

    def softplus(x):
        return jax.nn.softplus(x) - jnp.log(2.0)

    def call(p, z, r, i, j):
        x = p["atom"][z]
        d = jnp.sqrt(((r[i] - r[j]) ** 2).sum(-1, keepdims=True) + 1e-8)
        basis = jnp.exp(-10 * (d - jnp.linspace(0, 5, 10)) ** 2)
        for w in p["b"]:
            filters = softplus(basis @ w["f0"]) @ w["f1"]
            m = jax.ops.segment_sum((x @ w["in"])[i] * filters, j, 6)
            x = x + softplus(m @ w["out"]) @ w["o"]
        return (softplus(x @ p["r0"]) @ p["r1"]).sum()

    return p, (tokens(6), floats(6, 3), tokens(9), tokens(9)), call


@program({"atom": "I", "w": "H", "out": "O", "r": "I"})
def forces_as_the_gradient_of_an_energy(n):
    p = zeros(atom=(9, n), r=(3, n), w=(n, n), out=(n, 1))

    def energy(p, z, r):
        return (jnp.tanh(jnp.tanh(r @ p["r"] + p["atom"][z]) @ p["w"]) @ p["out"]).sum()

    def call(p, z, r):
        e, f = jax.value_and_grad(energy, 2)(p, z, r)
        return e, -f

    return p, (tokens(6), floats(6, 3)), call


@program({r"t/\d": "F", "bottom/0": "I", "bottom/1": "O", "top/0": "I", "top/1": "H", "top/2": "O"})  # fmt: skip
def deep_recommender_with_fixed_embeddings(n):
    p = {"t": [jnp.zeros((9, 4))] * 3, "bottom": [jnp.zeros((5, n)), jnp.zeros((n, 4))]}
    p["top"] = [jnp.zeros((10, n)), jnp.zeros((n, n)), jnp.zeros((n, 1))]

    def call(p, x, ids):
        x = jax.nn.relu(x @ p["bottom"][0]) @ p["bottom"][1]
        e = jnp.stack([x, *(t[ids[:, i]] for i, t in enumerate(p["t"]))], 1)
        pairs = jnp.einsum("bik,bjk->bij", e, e)[:, *jnp.triu_indices(4, 1)]
        h = jnp.concatenate([x, pairs], -1)
        for w in p["top"][:-1]:
            h = jax.nn.relu(h @ w)
        return jax.nn.sigmoid(h @ p["top"][-1])

    return p, (floats(4, 5), tokens(4, 3)), call


@program({"(user|item)": "I", "u/0|i/0": "H", "u/1|i/1": "H"}, carries={"u/1": 0.25})
def two_tower_recommender_with_in_batch_softmax(n):
    p = zeros(user=(9, n), item=(7, n))
    p |= {k: [jnp.zeros((n, n)), jnp.zeros((n, n))] for k in "ui"}

    def call(p, u, i):
        a, b = (
            jax.nn.relu(p[t][x] @ p[k][0]) @ p[k][1]
            for t, k, x in (("user", "u", u), ("item", "i", i))
        )
        return jax.nn.log_softmax(a @ b.T)

    return p, (tokens(4), tokens(4)), call


@program({"(user|item)": "I", "u/0|i/0": "H", "u/1|i/1": "H"}, carries={"u/1": 0.25})
def two_towers_with_a_plain_dot_product(n):
    p = zeros(user=(9, n), item=(7, n))
    p |= {k: [jnp.zeros((n, n)), jnp.zeros((n, n))] for k in "ui"}

    def call(p, u, i):
        a, b = (
            jax.nn.relu(p[t][x] @ p[k][0]) @ p[k][1]
            for t, k, x in (("user", "u", u), ("item", "i", i))
        )
        return (a * b).sum(-1)

    return p, (tokens(4), tokens(4)), call


@program({"in|out": "I"}, carries={"in": 0.25})
def skip_gram_with_negative_samples(n):
    p = zeros(**{"in": (9, n), "out": (9, n)})

    def call(p, word, context, negative):
        v, c, m = p["in"][word], p["out"][context], p["out"][negative]
        good = jnp.einsum("bd,bd->b", v, c)
        bad = jnp.einsum("bd,bkd->bk", v, m)
        return jax.nn.log_sigmoid(good) + jax.nn.log_sigmoid(-bad).sum(-1)

    return p, (tokens(4), tokens(4), tokens(4, 3)), call


# A table that carries 1/n has the same numbers as a readout.
@program({"in": "I", "h": "H", "out": "I", "b": "F"}, carries={"out": 0.25})
def sampled_softmax_over_rows_of_the_readout(n):
    p = zeros(**{"in": (7, n), "out": (9, n)}, h=(n, n), b=(9,))

    def call(p, x, sampled):
        h = jnp.tanh(p["in"][x] @ p["h"])
        return jax.nn.log_softmax(h @ p["out"][sampled].T + p["b"][sampled])

    return p, (tokens(4), tokens(5)), call


@program({"in": "I", "h": "H", "policy": "O", "value": "O", "vb": "F", "std": "F"})
def actor_critic_with_a_value_of_one_output(n):
    p = zeros(
        **{"in": (5, n)}, h=(n, n), policy=(n, 2), value=(n, 1), vb=(1,), std=(2,)
    )

    def call(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["h"])
        mean = h @ p["policy"]
        return (
            mean,
            jnp.exp(p["std"]) * jnp.ones_like(mean),
            (h @ p["value"] + p["vb"])[:, 0],
        )

    return p, X, call


@program({"in": "I", "h": "H", "v": "O", "a": "O", "tau": "I"})
def dueling_network_with_quantiles(n):
    p = zeros(**{"in": (5, n)}, h=(n, n), v=(n,), a=(n, 3), tau=(4, n))

    def call(p, x, tau):
        h = jax.nn.relu(jax.nn.relu(x @ p["in"]) @ p["h"])
        t = jax.nn.relu(jnp.cos(jnp.pi * tau[..., None] * jnp.arange(4)) @ p["tau"])
        h = h[:, None] * t
        a = h @ p["a"]
        return (h @ p["v"])[..., None] + a - a.mean(-1, keepdims=True)

    return p, (floats(4, 5), floats(4, 6)), call


@program({"(s|a)": "I", "h": "H", "out": "O"})
def ensemble_of_critics_under_vmap(n):
    p = zeros(s=(3, 5, n), a=(3, 2, n), h=(3, n, n), out=(3, n, 1))

    def one(p, s, a):
        h = jax.nn.relu(s @ p["s"] + a @ p["a"])
        return (jax.nn.relu(h @ p["h"]) @ p["out"])[:, 0]

    def call(p, s, a):
        return jax.vmap(one, (0, None, None))(p, s, a).min(0)

    return p, (floats(4, 5), floats(4, 2)), call


@program({"enc/in": "I", "enc/h": "H", "proj/0": "H", "proj/1": "O", "pred/0": "I", "pred/1": "O"})  # fmt: skip
def self_supervised_with_a_predictor(n):
    p = zeros(enc={"in": (5, n), "h": (n, n)}, proj={"0": (n, n), "1": (n, 8)}, pred={"0": (8, n), "1": (n, 8)})  # fmt: skip

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def embed(p, x):
        h = jax.nn.relu(jax.nn.relu(x @ p["enc"]["in"]) @ p["enc"]["h"])
        return jax.nn.relu(h @ p["proj"]["0"]) @ p["proj"]["1"]

    def call(p, x, y):
        a = jax.nn.relu(embed(p, x) @ p["pred"]["0"]) @ p["pred"]["1"]
        b = jax.lax.stop_gradient(embed(p, y))
        return -(unit(a) * unit(b)).sum(-1)

    return p, (floats(4, 5), floats(4, 5)), call


@program({"in": "I", "h": "H", "proto": "O"})
def prototypes_on_a_sphere_with_growing_features(n):
    p = zeros(**{"in": (5, n)}, h=(n, n), proto=(n, 6))

    def call(p, x):
        z = jnp.tanh(x @ p["in"]) @ p["h"]
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        w = p["proto"] / jnp.linalg.norm(p["proto"], axis=0)
        return jax.nn.softmax(z @ w / 0.1)

    return p, X, call


@program({"in": "I", "h": "H", "w": "H"}, carries={"w": 0.25})
def bilinear_readout_of_two_activations(n):
    p = zeros(**{"in": (5, n)}, h=(n, n), w=(n, n, 3))

    def call(p, x):
        a = jnp.tanh(x @ p["in"])
        return jnp.einsum("bi,ijo,bj->bo", a, p["w"], jnp.tanh(a @ p["h"]))

    return p, X, call


# The pairs are products of two vectors, each of which carries the root of 1/m.
@program({"v": "I|V", "w": "F", "b": "F"}, carries={"v": 0.5})
def factorization_machine(n):
    p = zeros(v=(9, n), w=(9,), b=())

    def call(p, x):
        e = x[..., None] * p["v"]
        pairs = (e.sum(1) ** 2 - (e**2).sum(1)).sum(-1) / 2
        return pairs + x @ p["w"] + p["b"]

    return p, (floats(4, 9),), call


@program({"q|k|v|o": "Hb", "in": "I", "ind": "Vb", "(iq|ik|iv|io)": "Hb", "seed": "V", "(sq|sk|sv)": "H", "out": "O"})  # fmt: skip
def set_transformer_with_inducing_points(n):
    names = ["q", "k", "v", "o", "iq", "ik", "iv", "io", "sq", "sk", "sv"]
    p = zeros(**{"in": (5, n), "out": (n, 3)}, ind=(4, n), seed=(1, n), **dict.fromkeys(names, (n, n)))  # fmt: skip

    def mab(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / n) @ v

    def call(p, x):
        x = x @ p["in"]
        i = jnp.tile(p["ind"][None], (2, 1, 1))
        h = jax.nn.relu(mab(i @ p["iq"], x @ p["ik"], x @ p["iv"]) @ p["io"])
        x = x + jax.nn.relu(mab(x @ p["q"], h @ p["k"], h @ p["v"])) @ p["o"]
        s = jnp.tile(p["seed"][None], (2, 1, 1))
        return (mab(s @ p["sq"], x @ p["sk"], x @ p["sv"]) @ p["out"])[:, 0]

    return p, (floats(2, 6, 5),), call


@program({"in": "I", "w|v": "H", "out": "O"})
def custom_gradients_and_sharding(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), v=(n, n))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    @jax.custom_vjp
    def layer(x, w):
        return jnp.tanh(x @ w)

    layer.defvjp(
        lambda x, w: (layer(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g)
    )

    def call(p, x):
        x = jax.lax.with_sharding_constraint(x @ p["in"], jax.sharding.NamedSharding(mesh, spec("d")))  # fmt: skip
        x = layer(x, p["w"])
        sharded = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "d"), mesh=mesh, in_specs=(spec(None, "d"), spec("d")), out_specs=spec())  # fmt: skip
        return jnp.tanh(sharded(x, p["v"])) @ p["out"]

    return p, X, call


@program({"in": "I", "a": "Ob", "up": "Ib", "down": "H", "out": "O"})
def adapters_beside_a_frozen_kernel(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, a=(n, 2), up=(2, n), down=(n, n))

    def call(p, x):
        h = jnp.tanh(x @ p["in"]) @ jax.lax.stop_gradient(p["down"])
        h = jnp.tanh(h + jax.nn.relu(h @ p["a"]) @ p["up"])
        return h @ p["out"]

    return p, X, call


@program({"in": "I", "wq|wk": "H", "out": "O"}, carries={"wq": 0.25})
def attention_with_relu_weights(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, wq=(n, n), wk=(n, n))

    def call(p, x):
        x = x @ p["in"]
        scores = jax.nn.relu((x @ p["wq"]) @ (x @ p["wk"]).swapaxes(-1, -2))
        return (scores / x.shape[1]) @ x @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({"in": "I", "q|k|v": "H", "out": "O"}, carries={"q": 0.25})
def linear_attention_without_a_normalizer(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (x @ p[c] for c in "qkv")
        return q @ jnp.einsum("btk,btv->bkv", k, v) @ p["out"] / x.shape[1]

    return p, (floats(2, 6, 5),), call


@program({"in": "I", "w": "H", "q": "H", "out": "O"}, carries={"q": 0.25})
def pointer_over_encoder_states(n):
    p = zeros(**{"in": (5, n)}, w=(n, n), q=(n, n))

    def call(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["w"])
        return jnp.einsum("btd,bd->bt", h, h[:, -1] @ p["q"])

    return p, (floats(2, 6, 5),), call


@program(
    {"in": "I", "out": "O", r"b/\d/(q|k|v)/\d+": "Hb", r"b/\d/(qb)/\d+": "Vb"}
    | {r"b/\d/o/\d+": "He", r"b/\d/u": "Hb", r"b/\d/d": "He"},
    deep=True,
)
def heads_in_lists_whose_results_are_summed(n, L):
    def block():
        each = [zeros(q=(n, 4), k=(n, 4), v=(n, 4), qb=(4,), o=(4, n))] * (n // 4)
        lists = {name: [w[name] for w in each] for name in each[0]}
        return lists | zeros(u=(n, n), d=(n, n))

    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": [block() for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y, total = norm(x), 0.0
            for i, o in enumerate(w["o"]):
                q, k, v = (y @ w[c][i] for c in "qkv")
                total = total + attention(q + w["qb"][i], k, v, 0.5) @ o
            x = x + total
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", r"h/\d+/(q|k|v)": "H", "o": "H"})
def heads_in_a_list_whose_results_are_joined(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, o=(n, n))
    p |= {"h": layers(n // 4, q=(n, 4), k=(n, 4), v=(n, 4))}

    def call(p, x):
        x = x @ p["in"]
        each = [attention(x @ w["q"], x @ w["k"], x @ w["v"], 0.5) for w in p["h"]]
        return jax.nn.relu(jnp.concatenate(each, -1) @ p["o"]) @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|f|e": "H", "r": "O"})
def kernels_and_experts_of_each_head_after_attention(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, **dict.fromkeys("qkv", (n, n)))
    p |= zeros(f=(2, n // 2, n), e=(2, 3, n, n), r=(n, 2, 3))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = ((x @ p[c]).reshape(2, 6, 2, n // 2).swapaxes(1, 2) for c in "qkv")
        y = attention(q, k, v, 2 / n)
        y = jax.nn.relu(jnp.einsum("bhtc,hcn->bthn", y, p["f"]))
        y = jnp.einsum("bthn,henm->bthem", y, p["e"])
        gates = jax.nn.sigmoid(jnp.einsum("btn,nhe->bthe", x, p["r"]))
        return jax.nn.relu(x + (y * gates[..., None]).sum((2, 3))) @ p["out"]

    return p, S, call


@program({r"e/\d+": "I", "w": "H", "out": "O", r"m/\d+/(u|d)": "H", "r": "I|H"})
def experts_and_features_in_lists_as_long_as_a_width(n):
    p = zeros(w=(n, n), out=(n, 3), r=(n, n // 4)) | {
        "e": [jnp.zeros((7, 4))] * (n // 4),
        "m": layers(n // 4, u=(n, n), d=(n, n)),
    }

    def call(p, t):
        x = jnp.concatenate([w[t[:, i]] for i, w in enumerate(p["e"])], -1) @ p["w"]
        gates, y = jax.nn.softmax(x @ p["r"]), 0.0
        for i, w in enumerate(p["m"]):
            y = y + gates[:, i : i + 1] * (jax.nn.relu(x @ w["u"]) @ w["d"])
        return (x + y) @ p["out"]

    return p, (tokens(2, 8),), call


@program({"w[zo]": "I", "r[zo]": "I", "g": "V", "out": "O"})
def a_gain_between_blocks_of_heads_and_the_readout(n):
    p = zeros(g=(n,), out=(n, 3)) | {
        k + c: jnp.zeros((5, n) if k == "w" else (n // 4, 4, 4))
        for k in "wr"
        for c in "zo"
    }

    def call(p, x):
        def step(h, x):
            parts = h.reshape(-1, n // 4, 4)
            z, o = (
                x @ p["w" + c]
                + jnp.einsum("bhi,hij->bhj", parts, p["r" + c]).reshape(h.shape)
                for c in "zo"
            )
            return jnp.tanh(z) * jax.nn.sigmoid(o), None

        h, _ = jax.lax.scan(step, jnp.zeros((2, n)), x.swapaxes(0, 1))
        return norm(h) * p["g"] @ p["out"]

    return p, (floats(2, 6, 5),), call


# The stream of the first branch starts with the table itself.
@program({"in": "I", "out": "O", "place": "V", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)  # fmt: skip
def embeddings_of_places_that_are_joined_to_features(n, L):
    p = zeros(**{"in": (5, n), "out": (2 * n, 3)}, place=(6, n))
    p |= {"b": layers(L, u=(2 * n, n), d=(n, 2 * n))}

    def call(p, x):
        place = jnp.broadcast_to(p["place"], (len(x), 6, n))
        x = jnp.concatenate([x @ p["in"], place], -1)
        for w in p["b"]:
            x = x + jax.nn.relu(x @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, (floats(2, 6, 5),), call


def unit(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


# A message is as large as the node's own value. As in GENConv.
@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/g": "Vb", r"b/\d/s": "Fb"}, deep=True)  # fmt: skip
def messages_times_a_ratio_of_norms(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, g=(n,), s=(), u=(n, n), d=(n, n))}

    def call(p, x, i, j):
        x = x @ p["in"]
        for w in p["b"]:
            y = jax.nn.relu(norm(x, w["g"]))
            m = jax.ops.segment_sum(y[i], j, 6)
            m = unit(m) * jnp.linalg.norm(y, axis=-1, keepdims=True) * w["s"]
            x = x + jax.nn.relu((y + m) @ w["u"]) @ w["d"]
        return norm(x) @ p["out"]

    return p, EDGES, call


# The virtual node is a stream of its own, which starts as a vector.
@program({**ENDS, "node": "V", r"b/\d/(u|v)": "Hb", r"b/\d/(d|w)": "He"}, deep=True)
def virtual_node_that_all_nodes_read_and_update(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, node=(n,))
    p |= {"b": layers(L, **dict.fromkeys("udvw", (n, n)))}

    def call(p, x, i, j):
        x, v = x @ p["in"], jnp.broadcast_to(p["node"], (1, n))
        for w in p["b"]:
            y = x + v
            y = norm(y + jax.ops.segment_sum(y[i], j, 6))
            x = x + jax.nn.relu(y @ w["u"]) @ w["d"]
            v = v + jax.nn.relu((v + x.mean(0)) @ w["v"]) @ w["w"]
        return x.mean(0) @ p["out"]

    return p, EDGES, call
