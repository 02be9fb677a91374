"""What grows, how layers are stacked, and what reads the last of them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, X, attention, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def ends(n):
    return {"in": (5, n), "out": (n, 3)}


@program(
    {"in|out": "F", r"b/\d/u": "I", r"b/\d/d": "O", r"b/\d/ub": "V", r"b/\d/n": "F"}
)
def only_the_feed_forward_width_grows(n):
    p = zeros(**{"in": (5, 6), "out": (6, 3)}) | {
        "b": layers(2, u=(6, n), ub=(n,), d=(n, 6), n=(6,))
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x, w["n"]) @ w["u"] + w["ub"]) @ w["d"]
        return x @ p["out"]

    return p, X, call


@program({"in|out": "F", r"q|k|v": "I", "o": "O"}, carries={"q": 0.5})
def only_the_head_size_grows(n):
    p = zeros(
        **{"in": (5, 6), "out": (6, 3)},
        q=(6, 2, n),
        k=(6, 2, n),
        v=(6, 2, n),
        o=(2, n, 6),
    )

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[c]) for c in "qkv")
        y = jax.nn.dot_product_attention(q, k, v)
        return jnp.einsum("bthk,hkd->btd", y, p["o"]) @ p["out"]

    return p, S, call


@program({"in": "I", "next": "H", "out": "O", r"s/\d/\d/[qkv]": "Hb", r"s/\d/\d/o": "He"}, carries={r"s/\d/\d/q": 0.5}, deep=True)  # fmt: skip
def stages_of_attention_of_which_the_first_gets_as_wide_as_the_second_was(n, L):
    p = zeros(**{"in": (5, n), "next": (n, 4 * n), "out": (4 * n, 3)})
    p["s"] = [layers(L, q=(d, d), k=(d, d), v=(d, d), o=(d, d)) for d in (n, 4 * n)]

    def call(p, x):
        x = x @ p["in"]
        for i, stage in enumerate(p["s"]):
            x = x @ p["next"] if i else x
            for w in stage:
                q, k, v = (norm(x) @ w[c] for c in "qkv")
                logits = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
                x = x + jax.nn.softmax(logits) @ v @ w["o"]
        return norm(x) @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "b.": "V"}, carries={"q|bq": 2**-0.5})
def more_and_larger_heads_with_biases(n):
    h = round((n / 2) ** 0.5)
    p = zeros(**{"in": (5, n), "out": (n, 3)}, o=(h, n // h, n))
    p |= {c: jnp.zeros((n, h, n // h)) for c in "qkv"}
    p |= {f"b{c}": jnp.zeros((h, n // h)) for c in "qkv"}

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (jnp.tensordot(x, p[c], 1) + p[f"b{c}"] for c in "qkv")
        y = jax.nn.dot_product_attention(q, k, v)
        return jnp.tensordot(y, p["o"], 2) @ p["out"]

    return p, S, call


@program({**ENDS, r"q|k|v": "H", "o": "H"}, carries={"q": 2**-0.5})
def heads_grow_by_number_and_by_size(n):
    H = 2 if n == 8 else 4
    p = zeros(**ends(n), q=(n, n), k=(n, n), v=(n, n), o=(n, n))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], n // H) for c in "qkv")
        return flat(attention(q, k, v, (n // H) ** -0.5)) @ p["o"] @ p["out"]

    return p, S, call


@program({"e": "I", "pos": "V", "w": "H", "out": "O", "mix": "F"})
def sequence_equal_to_the_width_of_the_target(n):
    p = zeros(e=(32, n), pos=(32, n), w=(n, n), mix=(32, 32), out=(n, 32))

    def call(p, x):
        x = p["e"][x] + p["pos"]
        x = x + jnp.einsum("ts,bsd->btd", p["mix"], jnp.tanh(x @ p["w"]))
        return x @ p["out"]

    return p, (tokens(2, 32),), call


@program({**ENDS, r"(s|r/\d)/u": "Hb", r"(s|r/\d)/d": "He"}, deep=True)
def scanned_layers_and_a_remainder(n, L):
    p = {
        **zeros(**ends(n)),
        "s": zeros(u=(L // 2, n, n), d=(L // 2, n, n)),
        "r": layers(L - L // 2, u=(n, n), d=(n, n)),
    }

    def call(p, x):
        def layer(x, w):
            return x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"], None

        x, _ = lax.scan(layer, x @ p["in"], p["s"])
        for w in p["r"]:
            x, _ = layer(x, w)
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def scan_of_a_stack_but_for_its_first_and_last_layer(n, L):
    p = zeros(**ends(n), u=(L, n, n), d=(L, n, n))

    def call(p, x):
        x = x @ p["in"]
        x = x + jax.nn.relu(x @ p["u"][0]) @ p["d"][0]  # without a norm

        def layer(x, w):
            u, d = w
            return x + jax.nn.relu(norm(x) @ u) @ d, None

        x, _ = lax.scan(layer, x, (p["u"][1:-1], p["d"][1:-1]))
        x, _ = layer(x, (p["u"][-1], p["d"][-1]))
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def pipeline_of_two_stages_by_vmap_and_rolls(n, L):
    """Stages side by side: each step runs all stages on different microbatches."""
    p = zeros(**ends(n), u=(2, L // 2, n, n), d=(2, L // 2, n, n))

    def call(p, x):
        x = x @ p["in"]

        def layer(x, w):
            return x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"], None

        stage = lambda w, x: lax.scan(layer, x, w)[0]
        mb = x.reshape(2, 2, n)
        state = jnp.zeros((2, 2, n))
        outs = []
        for t in range(3):
            inp = mb[t] if t < 2 else jnp.zeros((2, n))
            state = jnp.stack([inp, state[0]])
            state = jax.vmap(stage)({"u": p["u"], "d": p["d"]}, state)
            outs.append(state[1])
        return jnp.stack(outs[1:]).reshape(4, n) @ p["out"]

    return p, X, call


@program({**ENDS, "q|k|v": "Hb", "o": "He"}, deep=True)
def scan_of_layers_with_kv_cache_as_carry_and_outputs(n, L):
    p = zeros(**ends(n), q=(L, n, n), k=(L, n, n), v=(L, n, n), o=(L, n, n))

    def call(p, x, i):
        x = x @ p["in"]
        cache = jnp.zeros((L, 2, n // 4, 6, 4))

        def layer(x, w):
            w, ck, cv = w
            y = norm(x)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            ck = lax.dynamic_update_slice(ck, k, (0, 0, i, 0))
            cv = lax.dynamic_update_slice(cv, v, (0, 0, i, 0))
            s = jnp.where(jnp.arange(6) <= i, q @ ck.mT * 0.5, -1e9)
            return x + flat(jax.nn.softmax(s) @ cv) @ w["o"], (ck, cv)

        x, cache = lax.scan(layer, x, ({k: p[k] for k in "qkvo"}, cache, cache))
        return x @ p["out"], cache

    return p, (floats(2, 1, 5), tokens()), call


@program({**ENDS, r"b/\d/s": "Vb", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def stream_in_channels_first_layout(n, L):
    p = {
        "in": jnp.zeros((n, 3, 1, 1)),
        "out": jnp.zeros((3, n)),
        "b": layers(L, u=(n, n, 3, 3), d=(n, n, 1, 1), s=(n,)),
    }

    def call(p, x):
        cv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME")
        x = cv(x, p["in"])
        for w in p["b"]:
            m = x.mean((2, 3), keepdims=True)
            v = x.var((2, 3), keepdims=True)
            y = (x - m) / jnp.sqrt(v + 1e-5) * w["s"][None, :, None, None]
            x = x + cv(jax.nn.relu(cv(y, w["u"])), w["d"])
        return x.mean((2, 3)) @ p["out"].T

    return p, (floats(2, 3, 8, 8),), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def only_masked_tokens_are_updated(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, m):
        x = x @ p["in"]
        for w in p["b"]:
            y = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            x = jnp.where(m[..., None], y, x)
        return x @ p["out"]

    return p, (*S, jax.ShapeDtypeStruct((2, 6), bool)), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def early_exit_by_cond_on_the_layer_number(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, depth):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            x = lax.cond(
                i < depth,
                lambda x, w=w: x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"],
                lambda x: x,
                x,
            )
        return x @ p["out"]

    return p, (*S, tokens()), call


@program({**ENDS, "b/u": "Hb", "b/d": "He", "b/bias": "Ve"}, deep=True)
def layers_with_biases_that_cond_leaves_out_of_a_scan(n, L):
    p = zeros(**ends(n), b=dict(u=(L, n, n), d=(L, n, n), bias=(L, n)))

    def call(p, x, seed):
        def layer(w, x):
            return x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"] + w["bias"]

        def step(x, each):
            w, key = each
            keep = jax.random.bernoulli(key, 0.9)
            return lax.cond(keep, lambda: layer(w, x), lambda: x), None

        keys = jax.random.split(jax.random.key(seed), L)
        return lax.scan(step, x @ p["in"], (p["b"], keys))[0] @ p["out"]

    return p, (*S, tokens()), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/h": "O"}, deep=True)
def deep_supervision_with_a_head_after_each_layer(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, n), d=(n, n), h=(n, 3))}

    def call(p, x):
        x, ys = x @ p["in"], []
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            ys.append(norm(x) @ w["h"])
        return ys, x @ p["out"]

    return p, X, call


@program({**ENDS, r"layer_\d/(u|q|k|v)": "Hb", r"layer_\d/(d|o)": "He"}, deep=True)
def two_kinds_of_layers_alternating_in_a_dictionary(n, L):
    p = zeros(**ends(n)) | {
        f"layer_{i}": (
            zeros(u=(n, n), d=(n, n))
            if i % 2
            else zeros(q=(n, n), k=(n, n), v=(n, n), o=(n, n))
        )
        for i in range(L)
    }

    def call(p, x):
        x = x @ p["in"]
        for i in range(L):
            w = p[f"layer_{i}"]
            y = norm(x)
            x = x + (
                jax.nn.relu(y @ w["u"]) @ w["d"]
                if i % 2
                else flat(attention(*(heads(y @ w[c], 4) for c in "qkv"), 0.5)) @ w["o"]
            )
        return x @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "u": "Hb", "d": "He"}, deep=True)
def scan_over_the_numbers_of_layers(n, L):
    p = zeros(**ends(n), u=(L, n, n), d=(L, n, n))

    def call(p, x):
        def f(x, i):
            return x + jax.nn.relu(norm(x) @ p["u"][i]) @ p["d"][i], None

        return lax.scan(f, x @ p["in"], jnp.arange(L))[0] @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def tokens_updated_by_at_add(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, i):
        x = x @ p["in"]
        for w in p["b"]:
            x = x.at[:, i].add(jax.nn.relu(x[:, i] @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, (*S, tokens(3)), call


@program({**ENDS, r"b/\d/p": "Ve", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def prompts_added_to_the_first_tokens_in_each_layer(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, p=(2, n), u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x.at[:, :2].add(w["p"])
            x = x + jax.nn.relu(x @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, S, call


# VPT-deep: a layer's prompts act through its branches alone.
@program({**ENDS, "b/p": "Vb", "b/[qkvu]": "Hb", "b/(o|d)": "He"}, deep=True)
def prompts_set_anew_in_each_layer(n, L):
    p = zeros(**ends(n), b=dict.fromkeys("qkvoud", (L, n, n)) | {"p": (L, 2, n)})

    def layer(x, w):
        prompts = jnp.broadcast_to(w["p"], (len(x), 2, n))
        x = jnp.concatenate([prompts, x], 1)
        q, k, v = (norm(x) @ w[c] for c in "qkv")
        x = x + jax.nn.softmax(q @ k.mT / n) @ v @ w["o"]
        return (x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"])[:, 2:], None

    def call(p, x):
        x, _ = lax.scan(layer, x @ p["in"], p["b"])
        return norm(x).mean(1) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/[qkvu]": "Hb", r"b/\d/(o|d)": "He", r"b/\d/bias": "Ve"}, deep=True)  # fmt: skip
def linear_attention_that_is_divided_before_a_biased_kernel(n, L):
    p = zeros(**ends(n))
    p |= {"b": layers(L, **dict.fromkeys("qkvoud", (n, n)), bias=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            q, k, v = (norm(x) @ w[c] for c in "qkv")
            x = x + (q @ k.swapaxes(-1, -2) @ v / n) @ w["o"] + w["bias"]
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        return norm(x) @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "inv": "V"})
def nystrom_and_landmark_attention(n):
    p = zeros(**ends(n), q=(n, n), k=(n, n), v=(n, n), o=(n, n))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], 4) for c in "qkv")
        q, k = q * 4**-0.25, k * 4**-0.25
        ql, kl = (a.reshape(*a.shape[:2], 3, 2, 4).mean(3) for a in (q, k))
        sm = functools.partial(jax.nn.softmax, axis=-1)
        a, b, c = sm(q @ kl.mT), sm(ql @ kl.mT), sm(ql @ k.mT)
        y = a @ jnp.linalg.pinv(b) @ (c @ v)
        return flat(y) @ p["o"] @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "t": "V"})
def attention_over_channels(n):
    """XCiT: the attention matrix is of channels; its logits sum over tokens."""
    p = zeros(**ends(n), q=(n, n), k=(n, n), v=(n, n), o=(n, n), t=(n // 4, 1, 1))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], 4).mT for c in "qkv")
        l2 = lambda a: a / jnp.maximum(jnp.linalg.norm(a, axis=-1, keepdims=True), 1e-6)
        a = jax.nn.softmax(l2(q) @ l2(k).mT * p["t"])
        return flat((a @ v).mT) @ p["o"] @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "pl|pw": "H"})
def talking_heads_whose_number_grows(n):
    H = n // 4
    p = zeros(**ends(n), q=(n, n), k=(n, n), v=(n, n), o=(n, n), pl=(H, H), pw=(H, H))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], 4) for c in "qkv")
        s = jnp.einsum("hi,bhqk->biqk", p["pl"], q @ k.mT / 2)
        a = jnp.einsum("hi,bhqk->biqk", p["pw"], jax.nn.softmax(s))
        return flat(a @ v) @ p["o"] @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "t1": "I", "t2": "O", "c.": "H"})
def slot_mixer_with_token_mixing_of_a_fixed_length(n):
    p = {**zeros(**ends(n), t1=(6, n), t2=(n, 6), c1=(n, 4 * n), c2=(4 * n, n))}

    def call(p, x):
        x = x @ p["in"]
        y = jax.nn.gelu(norm(x).mT @ p["t1"]) @ p["t2"]
        x = x + y.mT
        x = x + jax.nn.gelu(norm(x) @ p["c1"]) @ p["c2"]
        return norm(x).mean(1) @ p["out"]

    return p, S, call


@program({"e": "I", "w": "H", "out": "O", "y": "I"}, carries={"y": 0.25})
def projection_discriminator(n):
    p = zeros(e=(5, n), w=(n, n), out=(n, 1), y=(7, n))

    def call(p, x, y):
        h = jax.nn.relu(jax.nn.relu(x @ p["e"]) @ p["w"])
        return h @ p["out"] + (h * p["y"][y]).sum(-1, keepdims=True)

    return p, (*X, tokens(4)), call


@program({"e": "I", "w": "H", "c": "V"})
def distances_to_learned_prototypes(n):
    p = zeros(e=(5, n), w=(n, n), c=(7, n))

    def call(p, x):
        h = jax.nn.relu(x @ p["e"]) @ p["w"]
        return -((h[:, None] - p["c"]) ** 2).mean(-1)

    return p, X, call


@program({"s|r": "I"})
def knowledge_graph_embeddings_distmult_and_transe(n):
    p = zeros(s=(9, n), r=(4, n))

    def call(p, a, r, b):
        s, t, o = p["s"][a], p["r"][r], p["s"][b]
        return (s * t * o).mean(-1), -jnp.abs(s + t - o).mean(-1)

    return p, (tokens(4), tokens(4), tokens(4)), call


@program({**ENDS, "q": "O", "k1|k2": "F", "val": "I"})
def memory_layer_with_product_keys(n):
    p = zeros(**ends(n), q=(n, 8), k1=(6, 4), k2=(6, 4), val=(36, n))

    def call(p, x):
        x = x @ p["in"]
        q = x @ p["q"]
        s1, s2 = q[:, :4] @ p["k1"].T, q[:, 4:] @ p["k2"].T
        a1, i1 = lax.top_k(s1, 2)
        a2, i2 = lax.top_k(s2, 2)
        s = (a1[:, :, None] + a2[:, None]).reshape(-1, 4)
        i = (i1[:, :, None] * 6 + i2[:, None]).reshape(-1, 4)
        y = jnp.einsum("bk,bkd->bd", jax.nn.softmax(s), p["val"][i])
        return (x + y) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/q": "Ob", r"b/\d/k": "Fb", r"b/\d/u": "Ib", r"b/\d/d": "Ie"}, deep=True, carries={r"b/\d/u": 0.25})  # fmt: skip
def experts_of_one_neuron_in_tables(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, q=(n, 4), k=(9, 4), u=(9, n), d=(9, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            _, i = lax.top_k(y @ w["q"] @ w["k"].T, 3)
            h = jax.nn.gelu(jnp.einsum("bn,bkn->bk", y, w["u"][i]))
            x = x + jnp.einsum("bk,bkn->bn", h, w["d"][i])
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(q|k|v|e2|g)": "Hb", r"b/\d/e1": "Ib", r"b/\d/o": "He"}, deep=True)  # fmt: skip
def vectors_of_attention_from_differences_of_points(n, L):
    square = dict.fromkeys(("q", "k", "v", "e2", "g", "o"), (n, n))
    p = zeros(**ends(n)) | {"b": layers(L, e1=(5, n), **square)}

    def call(p, points):
        far = points[:, :, None] - points[:, None]
        x = points @ p["in"]
        for w in p["b"]:
            place = jax.nn.relu(far @ w["e1"]) @ w["e2"]
            pairs = (x @ w["q"])[:, :, None] - (x @ w["k"])[:, None] + place
            gates = jax.nn.softmax(jax.nn.relu(pairs) @ w["g"], 2)
            x = x + (gates * ((x @ w["v"])[:, None] + place)).sum(2) @ w["o"]
        return x @ p["out"]

    return p, S, call


@program(
    {
        "in": "I",
        "lat": "V",
        "out": "O",
        r"b/\d/(cq|ck|cv|q|k|v|u)": "Hb",
        r"b/\d/(co|o|d)": "He",
        r"b/\d/(g|gc)": "Vb",
    },
    deep=True,
)
def latents_that_read_a_context_in_each_block(n, L):
    p = {
        **zeros(**ends(n), lat=(3, n)),
        "b": layers(
            L,
            cq=(n, n),
            ck=(n, n),
            cv=(n, n),
            co=(n, n),
            u=(n, n),
            d=(n, n),
            g=(n,),
            gc=(n,),
        ),
    }

    def call(p, x):
        x = x @ p["in"]
        z = jnp.broadcast_to(p["lat"], (2, 3, n))
        for w in p["b"]:
            y, c = norm(z) * w["g"], norm(x) * w["gc"]
            z = (
                z
                + flat(
                    attention(
                        heads(y @ w["cq"], 4),
                        heads(c @ w["ck"], 4),
                        heads(c @ w["cv"], 4),
                        0.5,
                    )
                )
                @ w["co"]
            )
            z = z + jax.nn.relu(norm(z) @ w["u"]) @ w["d"]
        return norm(z).mean(1) @ p["out"]

    return p, S, call


@program(
    {"in": "I", "lat": "V", "out": "O", r"b/\d/c?[qkv]": "Hb", r"b/\d/c?o": "He"},
    deep=True,
)
def learned_queries_alone_before_their_first_branch(n, L):
    """DETR-like: self-attention of learned queries first: the first branch reads parameters only."""
    p = {
        **zeros(**ends(n), lat=(3, n)),
        "b": layers(
            L,
            q=(n, n),
            k=(n, n),
            v=(n, n),
            o=(n, n),
            cq=(n, n),
            ck=(n, n),
            cv=(n, n),
            co=(n, n),
        ),
    }

    def call(p, x):
        x = x @ p["in"]
        z = jnp.broadcast_to(p["lat"], (2, 3, n))
        for w in p["b"]:
            y = norm(z)
            z = (
                z
                + flat(
                    attention(
                        heads(y @ w["q"], 4),
                        heads(y @ w["k"], 4),
                        heads(y @ w["v"], 4),
                        0.5,
                    )
                )
                @ w["o"]
            )
            y = norm(z)
            z = (
                z
                + flat(
                    attention(
                        heads(y @ w["cq"], 4),
                        heads(x @ w["ck"], 4),
                        heads(x @ w["cv"], 4),
                        0.5,
                    )
                )
                @ w["co"]
            )
        return norm(z).mean(1) @ p["out"]

    return p, S, call


@program(
    {
        **ENDS,
        "place": "V",
        "query": "Vba",
        r"[eb]/\d/(c?[qkv]|u)": "Hb",
        r"[eb]/\d/(c?o|d)": "He",
        r"[eb]/\d/g": "Vm",
    },
    deep=True,
)
def detr_with_norms_after_its_branches_for_single_examples(n, L):
    """Queries start at zero. What is added to the image is the same in all layers."""
    own = ("q", "k", "v", "o", "u", "d")
    cross = ("cq", "ck", "cv", "co")
    p = zeros(**ends(n), place=(4, n), query=(3, n))
    p |= {"e": layers(L, g=(2, n), **dict.fromkeys(own, (n, n)))}
    p |= {"b": layers(L, g=(3, n), **dict.fromkeys(own + cross, (n, n)))}

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T / n) @ v

    def one(p, x):
        x, z = x @ p["in"], jnp.zeros_like(p["query"])
        for w in p["e"]:
            x = attend(x @ w["q"], x @ w["k"], x @ w["v"]) @ w["o"] + x
            x = norm(x) * w["g"][0]
            x = norm(x + jax.nn.relu(x @ w["u"]) @ w["d"]) * w["g"][1]
        for w in p["b"]:
            y = z + p["query"]
            z = attend(y @ w["q"], y @ w["k"], z @ w["v"]) @ w["o"] + z
            z = norm(z) * w["g"][0]
            q, k = (z + p["query"]) @ w["cq"], (x + p["place"]) @ w["ck"]
            z = norm(attend(q, k, x @ w["cv"]) @ w["co"] + z) * w["g"][1]
            z = norm(z + jax.nn.relu(z @ w["u"]) @ w["d"]) * w["g"][2]
        return z @ p["out"]

    return p, (floats(2, 4, 5),), lambda p, x: jax.vmap(one, (None, 0))(p, x)


@program(
    {"lat": "V", "z": "I", "out": "O", r"b/\d/[su]": "Hb", r"b/\d/d": "He"}, deep=True
)
def generator_from_a_learned_constant(n, L):
    """StyleGAN: the stream starts as a learned constant; the input modulates the branches."""
    p = {
        **zeros(lat=(3, n), z=(5, n), out=(n, 3)),
        "b": layers(L, s=(n, n), u=(n, n), d=(n, n)),
    }

    def call(p, z):
        c = jnp.tanh(z @ p["z"])
        x = jnp.broadcast_to(p["lat"], (4, 3, n))
        for w in p["b"]:
            x = x + jax.nn.relu((norm(x) * (1 + c @ w["s"])[:, None]) @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, X, call


# Experts are no width, however they are chosen.
def gates_of_all(p, x, logits):
    return of_all(p, x, jax.nn.softmax(logits))


def gates_by_one_hot(p, x, logits):
    top, chosen = lax.top_k(logits, 2)
    hot = jax.nn.one_hot(chosen, logits.shape[-1])
    return of_all(p, x, (hot * jax.nn.softmax(top)[..., None]).sum(-2))


def gates_by_scatter(p, x, logits):
    top, chosen = lax.top_k(logits, 2)
    put = jax.vmap(jax.vmap(lambda gates, i, top: gates.at[i].set(top)))
    return of_all(p, x, put(jnp.zeros_like(logits), chosen, top / top.sum()))


def of_all(p, x, gates):
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["u"]) + p["ub"])
    y = jnp.einsum("btef,efd->bted", h, p["d"]) + p["db"]
    return jnp.einsum("bted,bte->btd", y, gates)


def kernels_by_gather(p, x, logits):
    top, i = lax.top_k(logits, 2)
    h = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, p["u"][i]) + p["ub"][i])
    y = jnp.einsum("btkf,btkfd->btkd", h, p["d"][i]) + p["db"][i]
    return (y * jax.nn.softmax(top)[..., None]).sum(-2)


def one_by_one_by_where(p, x, logits):
    total = 0.0
    for e in range(logits.shape[-1]):
        h = jax.nn.silu(x @ p["u"][e] + p["ub"][e])
        chosen = (jnp.argmax(logits, -1) == e)[..., None]
        total += jnp.where(chosen, h @ p["d"][e] + p["db"][e], 0.0)
    return total


for choose in (gates_of_all, gates_by_one_hot, gates_by_scatter, kernels_by_gather, one_by_one_by_where):  # fmt: skip

    def make(n, choose=choose):
        p = zeros(**ends(n), r=(n, n // 2), rb=(n // 2,), u=(n // 2, n, n), ub=(n // 2, n), d=(n // 2, n, n), db=(n // 2, n))  # fmt: skip

        def call(p, x):
            x = x @ p["in"]
            return (x + choose(p, x, x @ p["r"] + p["rb"])) @ p["out"]

        return p, S, call

    make.__name__ = f"more_experts_with_{choose.__name__}"
    program({**ENDS, "r": "O", "rb": "F", "u|d": "H", "ub|db": "I|V"})(make)


@program({"in": "I", "out": "O", "r": "O", "rb": "F", "u|d": "H"})
def more_experts_with_rows_by_expert(n):
    p = zeros(**ends(n), r=(n, n // 2), rb=(n // 2,), u=(n // 2, n, n), d=(n // 2, n, n))  # fmt: skip

    def call(p, x):
        x = (x @ p["in"]).reshape(-1, n)
        top, chosen = lax.top_k(x @ p["r"] + p["rb"], 1)
        order = jnp.argsort(chosen[:, 0])
        sizes = jnp.bincount(chosen[:, 0], length=n // 2)
        h = jax.nn.silu(lax.ragged_dot(x[order], p["u"], sizes))
        y = lax.ragged_dot(h, p["d"], sizes)[jnp.argsort(order)]
        return (x + y * jax.nn.sigmoid(top)) @ p["out"]

    return p, S, call


# A fixed number of latents is active: they are rows that are looked up.
def latents_by_threshold(h, top, i, p):
    return jnp.where(h >= top[..., -1:], h, 0.0) @ p["d"]


def latents_by_scatter(h, top, i, p):
    put = jax.vmap(jax.vmap(lambda z, i, top: z.at[i].set(top)))
    return put(jnp.zeros_like(h), i, top) @ p["d"]


def latents_by_one_hot(h, top, i, p):
    return (jax.nn.one_hot(i, h.shape[-1]) * top[..., None]).sum(-2) @ p["d"]


def latents_by_gather(h, top, i, p):
    return (p["d"][i] * top[..., None]).sum(-2)


def latents_by_argmax(h, _top, _i, p):
    return (jax.nn.one_hot(h.argmax(-1), h.shape[-1]) * h) @ p["d"]


SPARSE = (
    latents_by_threshold,
    latents_by_scatter,
    latents_by_one_hot,
    latents_by_gather,
    latents_by_argmax,
)
for choose in SPARSE:

    def make(n, choose=choose):
        p = zeros(**{"in": (5, 6), "out": (6, 3)}, u=(6, n), ub=(n,), d=(n, 6))

        def call(p, x):
            x = x @ p["in"]
            h = jax.nn.relu(x @ p["u"] + p["ub"])
            return (x + choose(h, *lax.top_k(h, 3), p)) @ p["out"]

        return p, S, call

    make.__name__ = f"sparse_autoencoder_with_more_{choose.__name__}"
    program({"in|out|u|ub|d": "F"})(make)


@program({**ENDS, "u": "H"})
def a_quarter_of_all_units_wins(n):
    p = zeros(**ends(n), u=(n, n))

    def winners(x):
        least = lax.top_k(x, n // 4)[0].min(-1, keepdims=True)
        return x * (x >= least)

    return p, X, lambda p, x: winners(winners(x @ p["in"]) @ p["u"]) @ p["out"]


# The loop starts at the stream, and reads nothing of what it made before.
for loop in "scan", "fori_loop":

    def make(n, L, loop=loop):
        p = zeros(**ends(n))
        p |= {"b": layers(L, r=(n, n // 4), u=(n // 4, n, n), d=(n // 4, n, n))}

        def call(p, x):
            x = x @ p["in"]
            for w in p["b"]:
                y = norm(x)
                gates = jax.nn.softmax(y @ w["r"]).T[:, :, None]
                experts = gates, w["u"], w["d"]

                def add(total, expert, y=y):
                    gate, u, d = expert
                    return total + gate * (jax.nn.relu(y @ u) @ d), None

                def numbered(i, total, add=add, experts=experts):
                    return add(total, jax.tree.map(lambda a: a[i], experts))[0]

                if loop == "scan":
                    x, _ = lax.scan(add, x, experts)
                else:
                    x = lax.fori_loop(0, n // 4, numbered, x)
            return norm(x) @ p["out"]

        return p, X, call

    make.__name__ = f"gated_experts_that_a_{loop}_adds_up"
    program({**ENDS, r"b/\d/r": "Ob", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)(
        make
    )


@program(
    {**ENDS, r"b/\d/r": "Hb", r"b/\d/e/\d/u": "Hb", r"b/\d/e/\d/d": "He"},
    deep=True,
    asks=r"8 branches like .* and 2 in the base.*x = x \+ sum\(branches\)",
)
def more_experts_that_are_added_to_the_stream_one_by_one(n, L, remedy=False):
    p = zeros(**ends(n)) | {"b": layers(L, r=(n, n // 4))}
    for w in p["b"]:
        w["e"] = layers(n // 4, u=(n, n), d=(n, n))

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            gates = jnp.split(jax.nn.softmax(y @ w["r"]), n // 4, -1)
            pairs = zip(gates, w["e"], strict=True)
            branches = [g * (jax.nn.relu(y @ e["u"]) @ e["d"]) for g, e in pairs]
            for branch in [sum(branches)] if remedy else branches:
                x = x + branch
        return norm(x) @ p["out"]

    return p, X, call


# The loop begins at zero within each branch.
@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def running_mean_of_experts(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, u=(4, n, n), d=(4, n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)

            def mean(state, expert, y=y):
                (mean, number), (u, d) = state, expert
                mean = mean + (jax.nn.relu(y @ u) @ d - mean) / number
                return (mean, number + 1), None

            start = jnp.zeros_like(x), 1.0
            x = x + lax.scan(mean, start, (w["u"], w["d"]))[0][0]
        return norm(x) @ p["out"]

    return p, X, call


for by in "by_checkpoint", "one_by_one":

    def make(n, L, by=by):
        p = zeros(**ends(n), u=(L, n // 4, n, 4), d=(L, n // 4, 4, n))

        def call(p, x):
            def layer(x, w):
                y = norm(x)

                def add(total, part):
                    return total + jax.nn.relu(y @ part[0]) @ part[1], None

                if by == "by_checkpoint":
                    total, _ = lax.scan(jax.checkpoint(add), jnp.zeros_like(x), w)
                    return x + total, None
                pairs = zip(*w, strict=True)  # a row for each part
                return x + sum(jax.nn.relu(y @ u) @ d for u, d in pairs), None

            x, _ = jax.lax.scan(layer, x @ p["in"], (p["u"], p["d"]))
            return norm(x) @ p["out"]

        return p, X, call

    make.__name__ = f"units_in_parts_that_are_added_up_{by}"
    program({**ENDS, "u": "Hb", "d": "He"}, deep=True)(make)


@program({**ENDS, "q|k|v": "H", "r|s": "O"}, carries={"q": 0.433013, "r": 1.732051})
def positions_of_fixed_size_beside_a_head_that_grows(n):
    """Logits of n / 2 units and of 2 others, over the root of their number."""
    p = zeros(**ends(n), v=(n, n), **dict.fromkeys("qk", (n, n // 2)))
    p |= zeros(r=(n, 2), s=(n, 2))

    def call(p, x):
        x = x @ p["in"]
        q, k = (jnp.concatenate([x @ p[a], x @ p[b]], -1) for a, b in ("qr", "ks"))
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (n // 2 + 2) ** 0.5)
        return a @ (x @ p["v"]) @ p["out"]

    return p, S, call
