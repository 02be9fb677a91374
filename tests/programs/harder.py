"""Programs whose roles names and shapes do not tell."""

import jax
import jax.numpy as jnp

from .kit import floats, program, tokens, zeros
from .plain import S, T, X, attention, norm


@program(
    {
        "in": "I",
        "time": "I",
        "out": "O",
        "final": "H",
        r"b/\d+/mod": "Hs",
        r"b/\d+/(up|down)": "Hb",
    },
    deep=True,
)
def diffusion_transformer_with_adaln(n, L):
    p = {
        "in": jnp.zeros((5, n)),
        "time": jnp.zeros((4, n)),
        "out": jnp.zeros((n, 5)),
        "final": jnp.zeros((n, 2 * n)),
    }
    p |= {
        "b": [zeros(mod=(n, 3 * n), up=(n, 4 * n), down=(4 * n, n)) for _ in range(L)]
    }

    def call(p, x, t):
        x = x @ p["in"]
        c = jax.nn.silu(jnp.sin(t[:, None] * jnp.arange(4.0)) @ p["time"])[:, None]
        for w in p["b"]:
            shift, scale, gate = jnp.split(c @ w["mod"], 3, -1)
            h = norm(x) * (1 + scale) + shift
            x = x + gate * (jax.nn.gelu(h @ w["up"]) @ w["down"])
        shift, scale = jnp.split(c @ p["final"], 2, -1)
        return (norm(x) * (1 + scale) + shift) @ p["out"]

    return p, (floats(2, 6, 5), floats(2)), call


@program({"in": "I", "out": "O", r"(down|up)/\d+": "H", r"mid/\d+": "He"}, deep=True)
def unet_with_added_skips(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 5))}
    p |= {k: [jnp.zeros((n, n)) for _ in range(2)] for k in ("down", "up")}
    p |= {"mid": [jnp.zeros((n, n)) for _ in range(L)]}

    def call(p, x):
        x, skips = x @ p["in"], []
        for w in p["down"]:
            x = jax.nn.relu(x @ w)
            skips.append(x)
        for w in p["mid"]:
            x = x + jax.nn.relu(x) @ w
        for w in p["up"]:
            x = jax.nn.relu((x + skips.pop()) @ w)
        return x @ p["out"]

    return p, X, call


@program(
    {
        "in": "I",
        "out": "O",
        r"b/\d+/(r|k|v)": "Hb",
        r"b/\d+/o": "He",
        r"b/\d+/(mix|decay)": "Vb",
    },
    deep=True,
)
def rwkv_like_token_shift(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {
        "b": [
            zeros(r=(n, n), k=(n, n), v=(n, n), o=(n, n), mix=(n,), decay=(n,))
            for _ in range(L)
        ]
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            h = norm(x)
            before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            mixed = h + (before - h) * w["mix"]
            r, k, v = mixed @ w["r"], jnp.exp(mixed @ w["k"]), mixed @ w["v"]

            def step(state, kv, decay=w["decay"]):
                num, den = state
                k, v = kv
                d = jnp.exp(-jnp.exp(decay))
                num, den = d * num + k * v, d * den + k
                return (num, den), num / den

            start = (jnp.zeros((x.shape[0], n)),) * 2
            _, y = jax.lax.scan(step, start, (k.swapaxes(0, 1), v.swapaxes(0, 1)))
            x = x + (jax.nn.sigmoid(r) * y.swapaxes(0, 1)) @ w["o"]
        return x @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "router": "O", r"experts/\d/(up|down)": "H"})
def experts_in_a_list(n):
    p = {"in": jnp.zeros((5, n)), "router": jnp.zeros((n, 4)), "out": jnp.zeros((n, 3))}
    p |= {"experts": [zeros(up=(n, n), down=(n, n)) for _ in range(4)]}

    def call(p, x):
        x = x @ p["in"]
        gates = jax.nn.softmax(x @ p["router"])
        ys = [jax.nn.relu(x @ w["up"]) @ w["down"] for w in p["experts"]]
        return sum(gates[:, i : i + 1] * y for i, y in enumerate(ys)) @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "w/0": "Hba", "w/1": "Hea"}, deep=True)
def one_block_shared_by_all_layers(n, L):
    p = {
        "in": jnp.zeros((5, n)),
        "out": jnp.zeros((n, 3)),
        "w": [jnp.zeros((n, n)), jnp.zeros((n, n))],
    }

    def call(p, x):
        x = x @ p["in"]
        for _ in range(L):
            x = x + jax.nn.relu(norm(x) @ p["w"][0]) @ p["w"][1]
        return x @ p["out"]

    return p, X, call


@program({"image": "I", "text": "I", "(image|text)_out": "O", "t": "F"})
def two_towers_with_a_learned_temperature(n):
    p = zeros(image=(5, n), text=(7, n), image_out=(n, 16), text_out=(n, 16), t=())

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def call(p, x, y):
        a = unit(jax.nn.relu(x @ p["image"]) @ p["image_out"])
        b = unit(jax.nn.relu(p["text"][y].mean(1)) @ p["text_out"])
        return jnp.exp(p["t"]) * (a @ b.T)

    return p, (floats(4, 5), tokens(4, 6)), call


@program({"in": "I", "codes": "F", "out": "I", "h": "H", "dec": "O"})
def vector_quantization(n):
    p = {
        "in": jnp.zeros((5, n)),
        **zeros(codes=(9, 4), h=(n, n), out=(4, n), dec=(n, 5)),
    }

    def call(p, x):
        z = (jnp.tanh(x @ p["in"]) @ p["h"])[:, :4]
        distance = jnp.sum(p["codes"] ** 2, 1) - 2 * z @ p["codes"].T
        code = p["codes"][jnp.argmin(distance, -1)]
        z = z + jax.lax.stop_gradient(code - z)
        return jnp.tanh(z @ p["out"]) @ p["dec"]

    p["codes"] = jnp.zeros((9, 4))
    return p, X, call


@program({"in": "I", "a": "O|V|H", "w": "H", "out": "O"})
def graph_attention(n):
    p = {"in": jnp.zeros((5, n)), **zeros(w=(n, n), a=(n,), out=(n, 3))}

    def call(p, x):
        h = x @ p["in"] @ p["w"]
        scores = jnp.sum(jax.nn.leaky_relu(h[:, None] + h[None]) * p["a"], -1)
        return jax.nn.softmax(scores) @ h @ p["out"]

    return p, X, call


@program({"in": "I", "rel": "F", "q|k|v": "H", "out": "O"})
def relative_position_bias(n):
    p = {
        "in": jnp.zeros((7, n)),
        **zeros(rel=(11,), q=(n, n), k=(n, n), v=(n, n), out=(n, 7)),
    }

    def call(p, x):
        x = p["in"][x]
        t = jnp.arange(6)
        bias = p["rel"][t[:, None] - t[None] + 5]
        scores = (x @ p["q"]) @ (x @ p["k"]).swapaxes(-1, -2) / n + bias
        return jax.nn.softmax(scores) @ (x @ p["v"]) @ p["out"]

    return p, T, call


@program({"in": "I", "first/w": "He", "rest/w": "He", "out": "O"}, deep=True)
def two_stacks_of_layers(n, L):
    first, rest = L // 2, L - L // 2
    p = {
        "in": jnp.zeros((5, n)),
        "first": zeros(w=(first, n, n)),
        "rest": zeros(w=(rest, n, n)),
        "out": jnp.zeros((n, 3)),
    }

    def call(p, x):
        step = lambda x, w: (x + jax.nn.relu(x) @ w, None)
        x, _ = jax.lax.scan(step, x @ p["in"], p["first"]["w"])
        x, _ = jax.lax.scan(step, x, p["rest"]["w"])
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "w": "H", "v": "H"})
def a_vmapped_model_under_cond_and_while(n):
    p = {"in": jnp.zeros((5, n)), **zeros(w=(n, n), v=(n, n), out=(n, 3))}

    def one(p, x):
        x = x @ p["in"]
        x = jax.lax.cond(x[0] > 0, lambda x: jnp.tanh(x @ p["w"]), jnp.tanh, x)
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["v"]), x)
        return x @ p["out"]

    return p, X, lambda p, x: jax.vmap(one, (None, 0))(p, x)


@program({"in|turn": "I", "out": "O", "wq|wk|wv|wo": "H"})
def linear_attention_with_rotations_among_the_parameters(n):
    p = {
        "in": jnp.zeros((5, n)),
        **zeros(wq=(n, n), wk=(n, n), wv=(n, n), wo=(n, n), out=(n, 3), turn=(6, n)),
    }

    def call(p, x):
        x = x @ p["in"]
        q, k = (jax.nn.elu(x @ p[w]) + 1 for w in ("wq", "wk"))
        turn = jax.lax.stop_gradient(p["turn"])
        kv = jnp.einsum("btd,bte->bde", k * turn, x @ p["wv"])
        y = jnp.einsum("btd,bde->bte", q * turn, kv) / (q @ k.sum(1)[..., None])
        return y @ p["wo"] @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "down": "O", "(k|v)_up": "I", "q": "H", "o": "H"})
def latent_attention(n):
    p = {
        "in": jnp.zeros((5, n)),
        **zeros(down=(n, 4), k_up=(4, n), v_up=(4, n), q=(n, n), o=(n, n), out=(n, 3)),
    }

    def call(p, x):
        x = x @ p["in"]
        c = norm(x @ p["down"])
        y = attention(x @ p["q"], c @ p["k_up"], c @ p["v_up"], 1 / n)
        return y @ p["o"] @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", r"b/\d+/u": "Hb", r"b/\d+/d": "He"}, deep=True)
def first_branch_reads_the_embedding(n, L):
    p = {"in": jnp.zeros((7, n)), "out": jnp.zeros((n, 7))}
    p |= {"b": [zeros(u=(n, n), d=(n, n)) for _ in range(L)]}

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            x = x + jnp.tanh(x @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, T, call


@program(
    {"in": "I", "out": "O", r"b/\d+/(u|d)": "Hb", r"b/\d+/a": "Fb", "lam": "Fe"},
    deep=True,
)
def numbers_on_branches(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3)), "lam": jnp.zeros((L,))}
    p |= {"b": [zeros(u=(n, n), d=(n, n), a=()) for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            x = x + p["lam"][i] * (w["a"] * (jax.nn.relu(x @ w["u"]) @ w["d"]))
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", r"b/\d/router": "Ob", r"b/\d/e/\d": "Hb"})
def six_experts_added_one_by_one(n):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [{"router": jnp.zeros((n, 6)), "e": [jnp.zeros((n, n))] * 6}] * 2}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = jnp.tanh(x)
            gates = jax.nn.softmax(y @ w["router"])
            for j, e in enumerate(w["e"]):
                x = x + gates[:, j : j + 1] * (y @ e)
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "mu|lv": "H"})
def variational_latent(n):
    p = {"in": jnp.zeros((5, n)), **zeros(mu=(n, n), lv=(n, n), out=(n, 3))}

    def call(p, x, noise):
        h = jnp.tanh(x @ p["in"])
        z = h @ p["mu"] + jnp.exp(h @ p["lv"] / 2) * noise
        return z @ p["out"]

    return p, (floats(4, 5), floats(4, 1)), call


@program({"in": "I", "out": "O", "w": "H", "a": "O", "b": "I"})
def low_rank_added_to_a_kernel(n):
    p = {"in": jnp.zeros((5, n)), **zeros(w=(n, n), a=(n, 2), b=(2, n), out=(n, 3))}
    return p, X, lambda p, x: x @ p["in"] @ (p["w"] + p["a"] @ p["b"] * 0.5) @ p["out"]


@program({"in": "I", "out": "O", "a|s|b": "H"})
def kernel_as_a_product_of_three(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, a=(n, n), s=(n, n // 2), b=(n // 2, n))
    return (
        p,
        X,
        lambda p, x: jnp.tanh(x @ p["in"]) @ (p["a"] @ p["s"] @ p["b"]) @ p["out"],
    )


@program({"in": "I", "out": "O", "c|v|o": "H"})
def product_of_values_and_outputs_within_heads(n):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3)), "c": jnp.zeros((n, n // 2))}
    p |= zeros(v=(n // 2, 2, n // 2), o=(2, n // 2, n))

    def call(p, x):
        c = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["c"])
        kernel = jnp.einsum("chd,hdn->chn", p["v"], p["o"])
        return jnp.einsum("bhc,chn->bn", jnp.stack([c, c[::-1]], 1), kernel) @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "pos": "V", "w": "H"})
def projected_positions(n):
    p = {"in": jnp.zeros((5, n)), **zeros(pos=(6, n), w=(n, n), out=(n, 3))}
    return (
        p,
        S,
        lambda p, x: jnp.tanh(x @ p["in"] + (p["pos"] @ p["w"])[None]) @ p["out"],
    )


@program({"in": "I", "out": "O", "b/u": "Hb", "b/d": "Hb"}, deep=True)
def constants_of_each_layer_in_a_scan(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": zeros(u=(L, n, n), d=(L, n, n))}
    each = (0.9 + 0.2 * (jnp.arange(L) % 2)) / L

    def call(p, x):
        def block(x, w):
            return x + w[1] * (jnp.tanh(x @ w[0]["u"]) @ w[0]["d"]), None

        x, _ = jax.lax.scan(block, x @ p["in"], (p["b"], each))
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def the_same_constants_of_each_channel(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [zeros(u=(n, n), d=(n, n)) for _ in range(L)]}
    each = jnp.where(jnp.arange(n) % 2, 0.5, 1.5)

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + each[None] * (jnp.tanh(x @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", r"b/\d+/up": "Hb", r"b/\d+/down": "He", r"b/\d+/router": "Ob"}, deep=True)  # fmt: skip
def auxiliary_losses_of_all_layers(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [zeros(up=(n, 4 * n), down=(4 * n, n), router=(n, 4)) for _ in range(L)]}

    def call(p, x):
        x, loss, each = x @ p["in"], 0.0, 0.0
        for w in p["b"]:
            gates = jax.nn.softmax(x @ w["router"])
            chosen = jax.nn.one_hot(gates.argmax(-1), 4)
            loss = loss + (gates.mean(0) ** 2).sum()
            loss = loss + (gates.mean(0) * chosen.mean(0)).sum()
            each = each + jax.nn.logsumexp(x @ w["router"], -1) ** 2
            x = x + gates.max(-1, keepdims=True) * (
                jax.nn.relu(x @ w["up"]) @ w["down"]
            )
        return x @ p["out"], loss, each

    return p, X, call


@program({"in": "I", "out": "O", r"b/\d+/a": "Hb", r"b/\d+/(b|c)": "He"}, deep=True)
def sums_of_a_fixed_number_of_terms_in_each_block(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [zeros(a=(n, n), b=(n, n), c=(n, n)) for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            f = lambda x, w=w: jnp.tanh(x @ w["a"]) @ w["b"]
            k1 = f(x)
            x = x + (k1 + f(norm(x)) + jnp.tanh(x) @ w["c"]) / 3
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "pos": "V", "out": "O", "u": "H", r"b/\d+": "He"}, deep=True)
def sum_over_time_in_a_scan(n, L):
    p = {"in": jnp.zeros((5, n)), "pos": jnp.zeros((6, n)), "out": jnp.zeros((n, 3))}
    p |= {"u": jnp.zeros((n, n)), "b": [jnp.zeros((n, n)) for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"] + p["pos"]
        for w in p["b"]:
            x = x + jnp.tanh(x) @ w
        add = lambda total, x: (total + jnp.tanh(x @ p["u"]), None)
        total, _ = jax.lax.scan(add, jnp.zeros((2, n)), x.swapaxes(0, 1))
        return total @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({"in": "I", "out": "O", r"b/\d+/(up|down)": "H"})
def many_layers_side_by_side(n):
    """They are one, whose width grows with their number, too."""
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [zeros(up=(n, n), down=(n, n)) for _ in range(n // 2)]}

    def call(p, x):
        x = x @ p["in"]
        return sum(jax.nn.relu(x @ w["up"]) @ w["down"] for w in p["b"]) @ p["out"]

    return p, X, call


MEMBERS = {"in": "I", r"m/\d+/up": "H", r"m/\d+/out": "O"}


# All units of the members are a layer. A mean divides each readout by their number.
@program(MEMBERS, carries={r"m/\d+/out": 4.0})
def mean_over_members_whose_number_grows(n):
    p = {"in": jnp.zeros((5, n))}
    p |= {"m": [zeros(up=(n, 8), out=(8, 3)) for _ in range(n // 4)]}

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        return jnp.stack([jnp.tanh(x @ w["up"]) @ w["out"] for w in p["m"]]).mean(0)

    return p, X, call


# The probabilities of all members are a layer, over which a mean sums.
@program({r"m/(\d+/)?(up|out)": "I"})
def mean_of_the_probabilities_of_members(n):
    def call(p, x):
        each = [jnp.tanh(x @ w["up"]) @ w["out"] for w in p["m"]]
        return jnp.log(jnp.stack([jax.nn.softmax(y) for y in each]).mean(0))

    return {"m": [zeros(up=(5, 8), out=(8, 3)) for _ in range(n // 4)]}, X, call


@program({"m/(up|out)": "I", "last": "I", "out": "O"})
def layer_after_the_mean_of_stacked_members(n):
    p = zeros(m=dict(up=(n // 4, 5, 8), out=(n // 4, 8, 3)), last=(3, n), out=(n, 3))

    def call(p, x):
        member = lambda w: jax.nn.softmax(jnp.tanh(x @ w["up"]) @ w["out"])
        y = jax.vmap(member)(p["m"]).mean(0)
        return jnp.tanh(y @ p["last"]) @ p["out"]

    return p, X, call


@program({r"m/\d+/(up|out)": "F", "gate": "I", "last": "I", "out": "O"})
def more_experts_in_a_list_whose_results_are_stacked(n):
    p = zeros(gate=(5, n // 4), last=(8, n), out=(n, 3))
    p |= {"m": [zeros(up=(5, 8), out=(8, 8)) for _ in range(n // 4)]}

    def call(p, x):
        y = jnp.stack([jnp.tanh(jnp.tanh(x @ w["up"]) @ w["out"]) for w in p["m"]])
        y = jnp.einsum("be,ebd->bd", jax.nn.softmax(x @ p["gate"]), y)
        return jnp.tanh(y @ p["last"]) @ p["out"]

    return p, X, call


def added(n, share):
    members = [zeros(up=(n, 8), out=(8, 3), b=(3,)) for _ in range(n // 4)]

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        each = (jnp.tanh(x @ w["up"]) @ w["out"] + w["b"] for w in p["m"])
        return sum(each) / share

    return {"in": jnp.zeros((5, n)), "m": members}, X, call


@program({**MEMBERS, r"m/\d+/b": "V"}, carries={r"m/\d+/out": 4.0})
def members_whose_results_are_added_and_divided_by_their_number(n):
    return added(n, n // 4)


@program({**MEMBERS, r"m/\d+/b": "V"}, carries={r"m/\d+/b": 0.25})
def members_with_biases_whose_results_are_added(n):
    return added(n, 1)


# The same of members in a stack: joined, taken one by one, or both.
def each(p):
    return [jax.tree.map(lambda w, i=i: w[i], p) for i in range(len(p["up"]))]


STACKED = {
    "sum": lambda f, p: jax.vmap(f)(p).sum(0),
    "sum_of_rows": lambda f, p: (y := jax.vmap(f)(p))[0] + sum(y[1:]),
    "sum_one_by_one": lambda f, p: sum(map(f, each(p))),
    "mean_of_rows": lambda f, p: sum(y := jax.vmap(f)(p)) / len(y),
    "mean_one_by_one": lambda f, p: sum(map(f, each(p))) / len(p["up"]),
}
for name, reduced in STACKED.items():
    is_mean, is_one = "mean" in name, "one" in name

    def make(n, reduced=reduced):
        p = {"in": jnp.zeros((5, n))}
        p |= {"m": zeros(up=(n // 4, n, 8), out=(n // 4, 8, 3), b=(n // 4, 3))}

        def call(p, x):
            x = jnp.tanh(x @ p["in"])
            return reduced(lambda w: jnp.tanh(x @ w["up"]) @ w["out"] + w["b"], p["m"])

        return p, X, call

    make.__name__ = f"stacked_members_{name}"
    right = {"in": "I", "m/up": "H", "m/out": "O"}
    right |= {"m/b": "V" if is_mean or is_one else "O"}
    carries = {"m/out": 4.0} if is_mean else {"m/b": 0.25} if is_one else {}
    program(right, carries=carries)(make)

    def make(n, reduced=reduced):
        p = zeros(**{"in": (5, n), "out": (n, 3)}, m=dict(up=(n // 4, n, 8), d=(n // 4, 8, n)))  # fmt: skip

        def call(p, x):
            x = x @ p["in"]
            y = reduced(lambda w: jnp.tanh(x @ w["up"]) @ w["d"], p["m"])
            return (x + y) @ p["out"]

        return p, X, call

    make.__name__ = f"branch_of_stacked_members_{name}"
    carries = {"m/d": 4.0} if is_mean else {}
    program({"in": "I", "m/(up|d)": "H", "out": "O"}, carries=carries)(make)


for spelling in "that_a_loop_adds_up", "taken_by_number_that_a_loop_adds_up":

    def make(n, spelling=spelling):
        p = zeros(
            **{"in": (5, n), "out": (n, 3)}, m=dict(up=(n // 4, n, 8), d=(n // 4, 8, n))
        )

        def call(p, x):
            x = x @ p["in"]
            f = lambda w: jnp.tanh(x @ w["up"]) @ w["d"]
            if spelling == "that_a_loop_adds_up":
                y, _ = jax.lax.scan(lambda y, w: (y + f(w), None), 0 * x, p["m"])
                return (x + y) @ p["out"]
            add = lambda i, y: y + f({k: w[i] for k, w in p["m"].items()})
            return (x + jax.lax.fori_loop(0, n // 4, add, 0 * x)) @ p["out"]

        return p, X, call

    make.__name__ = f"branch_of_members_{spelling}"
    program({"in": "I", "m/(up|d)": "H", "out": "O"})(make)


# A logarithm makes the number of members an addend, which has no gradient.
@program({"m/in": "I", "m/u": "H", "m/out": "O"})
def log_of_a_sum_of_the_likelihoods_of_members(n):
    k = n // 4
    p = zeros(m={"in": (k, 5, n), "u": (k, n, n), "out": (k, n, 3)})

    def call(p, x):
        member = lambda w: jax.nn.relu(jnp.tanh(x @ w["in"]) @ w["u"]) @ w["out"]
        logits = jax.vmap(member)(p["m"])
        return jax.nn.logsumexp(jax.nn.log_softmax(logits), 0) - jnp.log(k)

    return p, X, call


@program({"a|b": "I", "w": "I", "out": "O"}, asks="become 4 times as large")
def log_of_a_sum_that_a_kernel_reads(n, remedy=False):
    p = zeros(a=(5, n), b=(5, n), w=(1, n), out=(n, 3))

    def call(p, x):
        y = (jnp.exp(x @ p["a"]) * jnp.exp(x @ p["b"])).sum(-1, keepdims=True)
        y = y * 8 / n if remedy else y
        return jnp.tanh(jnp.log(y) @ p["w"]) @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", r"b/\d+": "He"}, deep=True, asks=r"results up .* no residual branch")  # fmt: skip
def sum_of_the_layers_of_a_plain_network(n, L, remedy=False):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [jnp.zeros((n, n)) for _ in range(L)]}

    def call(p, x):
        x, total = x @ p["in"], 0.0
        for w in p["b"]:
            y = jax.nn.relu(x) @ w
            x = x + y if remedy else y
            total = total + y
        return (x if remedy else total) @ p["out"]

    return p, X, call
