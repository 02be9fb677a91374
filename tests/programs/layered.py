"""Programs whose layers share one kernel, weigh each other, or are in two streams."""

import jax
import jax.numpy as jnp
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import T, X, attention
from .recent import BLOCK, ENDS, mlp, model, norm
from .transformers import flat, heads

CONDITION = (floats(2, 6, 5), floats(2, 3))


def attend(w, y):
    return flat(attention(*(heads(y @ w[c], 4) for c in "qkv"), 0.5)) @ w["o"]


def experts(w, x):
    y = jax.nn.relu(jnp.einsum("btd,edf->btef", x, w["up"]))
    return jnp.einsum("btef,efd,bte->btd", y, w["down"], jax.nn.softmax(x @ w["r"]))


def modulated(n, L, parts, mods):
    """Blocks that are shifted, scaled and gated by what one kernel makes for all."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, cond=(3, n), mods=mods)
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, c):
        x, each = x @ p["in"], parts(jax.nn.silu(c @ p["cond"]), p["mods"])
        for w, part in zip(p["b"], each, strict=True):
            shift, scale, gate = (z[:, None] for z in part)
            x = x + gate * mlp(w, norm(x) * (1 + scale) + shift)
        return norm(x) @ p["out"]

    return p, CONDITION, call


MODULATED = {**ENDS, "cond": "I", r"b/\d/(u|d)": "Hb", "mods": "Hs"}


@program(MODULATED, deep=True)
def modulations_of_all_layers_by_one_kernel(n, L):
    def parts(c, w):
        m = (c @ w).reshape(2, L, 3, n)
        return [[m[:, i, j] for j in range(3)] for i in range(L)]

    return modulated(n, L, parts, (n, L * 3 * n))


@program(MODULATED, deep=True)
def modulations_that_are_split_twice(n, L):
    def parts(c, w):
        return [jnp.split(m, 3, -1) for m in jnp.split(c @ w, L, -1)]

    return modulated(n, L, parts, (n, L * 3 * n))


@program(MODULATED, deep=True)
def modulations_of_all_layers_kind_by_kind(n, L):
    def parts(c, w):
        m = (c @ w).reshape(2, 3, L, n)
        return [[m[:, j, i] for j in range(3)] for i in range(L)]

    return modulated(n, L, parts, (n, 3 * L * n))


@program(MODULATED, deep=True)
def modulations_with_an_axis_of_layers(n, L):
    def parts(c, w):
        return jnp.einsum("bn,nlkm->lkbm", c, w)

    return modulated(n, L, parts, (n, L, 3, n))


@program(MODULATED, deep=True, asks="an axis of its own for the layers")
def modulations_of_each_unit_side_by_side(n, L, remedy=False):
    def parts(c, w):
        m = jnp.einsum("...n,nlm->...lm", c, w) if remedy else c @ w
        m = m.reshape(2, L, 3, n) if remedy else m.reshape(2, L, n, 3)
        m = m if remedy else m.swapaxes(2, 3)
        return [[m[:, i, j] for j in range(3)] for i in range(L)]

    return modulated(n, L, parts, (n, L, 3 * n) if remedy else (n, L * n * 3))


for taken in "from_one_kernel", "by_number_from_one_kernel":

    def make(n, L, remedy=False, taken=taken):
        p = zeros(**{"in": (5, n), "out": (n, 3)}, cond=(3, n))
        p |= zeros(b=dict(u=(L, n, n), d=(L, n, n)))
        p |= zeros(mods=(n, L, 3 * n) if remedy else (n, L * 3 * n))

        def call(p, x, c):
            c, w = jax.nn.silu(c @ p["cond"]), p["mods"]
            m = jnp.einsum("...n,nlm->...lm", c, w) if remedy else c @ w
            m = jnp.moveaxis(m.reshape(2, L, 3, n), 1, 0)

            def layer(x, each):
                w, m = each
                shift, scale, gate = (m[:, None, j] for j in range(3))
                return x + gate * mlp(w, norm(x) * (1 + scale) + shift), None

            def numbered(i, x):
                return layer(x, jax.tree.map(lambda a: a[i], (p["b"], m)))[0]

            x = x @ p["in"]
            if taken == "from_one_kernel":
                x, _ = lax.scan(layer, x, (p["b"], m))
            else:
                x = lax.fori_loop(0, L, numbered, x)
            return norm(x) @ p["out"]

        return p, CONDITION, call

    make.__name__ = f"modulations_that_a_loop_takes_{taken}"
    program(
        {**ENDS, "cond": "I", "b/u": "Hb", "b/d": "He", "mods": "Hb"},
        deep=True,
        asks="an axis of its own for the layers",
    )(make)


@program({**ENDS, "rows": "Vb", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def gains_of_all_layers_on_one_axis(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, rows=(L * n,))

    def call(p, x):
        x, rows = x @ p["in"], p["rows"].reshape(L, n)
        for i, w in enumerate(p["b"]):
            x = x + mlp(w, norm(x, rows[i]))
        return norm(x) @ p["out"]

    return p | {"b": layers(L, u=(n, n), d=(n, n))}, (floats(2, 6, 5),), call


def denseformer(n, L, weights, mean):
    p = zeros(**{"in": (7, n), "out": (n, 7)}) | {"a": weights}

    def call(p, x):
        every = [p["in"][x]]
        x = every[0]
        for i, w in enumerate(p["b"]):
            every.append(x + mlp(w, norm(x)))
            x = mean(p["a"][i], every)
        return norm(x) @ p["out"]

    return p | {"b": layers(L, u=(n, n), d=(n, n))}, T, call


DENSE = {**ENDS, r"a(/\d)?": "Fm", r"b/\d/u": "Hb", r"b/\d/d": "He"}


@program(DENSE, deep=True)
def denseformer_with_a_list_of_weights(n, L):
    weights = [jnp.zeros(i + 2) for i in range(L)]
    return denseformer(
        n, L, weights, lambda a, every: sum(a[i] * x for i, x in enumerate(every))
    )


@program(DENSE, deep=True)
def denseformer_with_a_matrix_of_weights(n, L):
    weights = jnp.zeros((L, L + 1))
    return denseformer(
        n, L, weights, lambda a, every: sum(a[i] * x for i, x in enumerate(every))
    )


@program(DENSE, deep=True)
def denseformer_that_stacks_its_layers(n, L):
    weights = [jnp.zeros(i + 2) for i in range(L)]
    return denseformer(
        n, L, weights, lambda a, every: jnp.einsum("l,lbtn->btn", a, jnp.stack(every))
    )


# Titans: a memory of two layers, with momentum and forgetting, learns at test time.
@program({"in": "I", "out": "O", "q|k|v|m/(0|1)": "H", "rate|keep|forget": "O"})
def inner_optimizer_with_momentum(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, **dict.fromkeys("qkv", (n, n)))
    p |= zeros(rate=(n, 1), keep=(n, 1), forget=(n, 1)) | {"m": [jnp.zeros((n, n))] * 2}

    def read(m, k):
        return jax.nn.silu(k @ m[0]) @ m[1]

    def step(state, now):
        (memory, momentum), (q, k, v, rate, keep, forget) = state, now
        loss = jax.grad(lambda m: jnp.mean((read(m, k) - v) ** 2))(memory)
        momentum = jax.tree.map(lambda s, g: keep * s - rate * g, momentum, loss)
        memory = jax.tree.map(lambda m, s: (1 - forget) * m + s, memory, momentum)
        return (memory, momentum), read(memory, q)

    def one(p, x):
        x = p["in"][x]
        q, k, v = (norm(x @ p[c]) for c in "qkv")
        gates = (jax.nn.sigmoid(x @ p[c]) for c in ("rate", "keep", "forget"))
        start = p["m"], jax.tree.map(jnp.zeros_like, p["m"])
        return lax.scan(step, start, (q, k, v, *gates))[1] @ p["out"]

    return p, T, lambda p, x: jax.vmap(lambda x: one(p, x))(x)


@program({"in": "I", "out": "O", "q|k|v|o|w": "H"})
def one_step_of_an_inner_optimizer(n):
    d = n // 4
    p = zeros(**{"in": (7, n), "out": (n, 7)}, w=(4, d, d))
    p |= zeros(**dict.fromkeys("qkvo", (n, n)))

    def call(p, x):
        x = p["in"][x]
        q, k, v = (heads(x @ p[c], d) for c in "qkv")

        def one(w, q, k, v):
            step = jax.grad(lambda w: jnp.sum((norm(k @ w) - v) ** 2) / d)(w)
            return norm(q @ (w - 0.1 * step))

        y = jax.vmap(jax.vmap(one), in_axes=(None, 0, 0, 0))(p["w"], q, k, v)
        return norm(x + flat(y) @ p["o"]) @ p["out"]

    return p, T, call


@program({"in": "I", "h": "H", "out": "O"})
def score_as_the_gradient_of_an_energy(n):
    p = zeros(**{"in": (5, n)}, h=(n, n), out=(n,))

    def energy(x, p):
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["h"]) @ p["out"]

    return p, X, lambda p, x: -jax.vmap(jax.grad(energy), (0, None))(x, p)


PHI = {".*/in": "I", ".*/(bias|shift)": "V", ".*/out": "H"}


def squares(p, x):
    return jnp.sum((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] + p["shift"]) ** 2)


@program(PHI, carries={".*/(out|shift)": 0.5})
def field_of_a_hamiltonian_that_sums_squares(n):
    p = {"h": zeros(**{"in": (4, n)}, bias=(n,), out=(n, n), shift=(n,))}

    def call(p, x):
        q, r = jnp.split(jax.vmap(jax.grad(lambda x: squares(p["h"], x)))(x), 2, -1)
        return jnp.concatenate([r, -q], -1)

    return p, (floats(5, 4),), call


@program(PHI, carries={".*/(out|shift)": 0.5})
def leapfrog_by_gradients_of_sums_of_squares(n):
    of = zeros(**{"in": (3, n)}, bias=(n,), out=(n, n), shift=(n,))

    def call(p, x, v):
        def step(state, _):
            x, v = state
            v = v - 0.1 * jax.grad(squares, 1)(p["potential"], x)
            x = x + 0.1 * jax.grad(squares, 1)(p["kinetic"], v)
            return (x, v), x

        return lax.scan(step, (x, v), None, length=5)[1]

    return {"potential": of, "kinetic": of}, (floats(3), floats(3)), call


@program(BLOCK, deep=True)
def forces_of_a_residual_energy(n, L):
    def energy(x, p):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + attend(w, norm(x))
            x = x + mlp(w, norm(x))
        return (norm(x) @ p["out"]).sum()

    p = model(n, L)
    return p, (floats(2, 6, 7),), lambda p, x: -jax.grad(energy)(x, p)


@program(
    {**BLOCK, r"b/\d/router": "Ob", r"b/\d/predict": "Fe", r"b/\d/correct": "Fb"},
    deep=True,
)
def altup_that_corrects_by_what_layers_added(n, L):
    p = model(n, L, router=(n, 2), predict=(2, 4), correct=(2, 2))

    def call(p, x):
        x = jnp.stack([p["in"][x]] * 2)
        for i, w in enumerate(p["b"]):
            route = jnp.tanh(norm(x[i % 2]) @ w["router"])
            mix = (route @ w["predict"]).reshape(2, 6, 2, 2)
            x = x + jnp.einsum("kbtn,btkj->jbtn", x, mix)
            y = x[i % 2]
            h = y + attend(w, norm(y))
            h = h + mlp(w, norm(h))
            gate = jnp.tanh(norm(h) @ w["router"]) @ w["correct"] + 1
            x = x + jnp.einsum("btn,btj->jbtn", h - y, gate)
        return norm(x.mean(0)) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True, asks="multiply the stream itself")  # fmt: skip
def layers_that_divide_the_stream_and_what_they_add(n, L, remedy=False):
    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + mlp(w, norm(x))
            x = x if remedy else x / 2**0.5
        return norm(x) @ p["out"]

    p = zeros(**{"in": (5, n), "out": (n, 3)})
    return p | {"b": layers(L, u=(n, n), d=(n, n))}, (floats(2, 6, 5),), call


def deepnorm(n, L, alpha):
    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = norm(alpha * x + mlp(w, x))
        return x @ p["out"]

    p = zeros(**{"in": (5, n), "out": (n, 3)})
    return p | {"b": layers(L, u=(n, n), d=(n, n))}, (floats(2, 6, 5),), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True, asks="beside that of its stream, 0.7598")  # fmt: skip
def deepnorm_of_the_paper(n, L, remedy=False):
    return deepnorm(n, L, 1.0 if remedy else (2 * L) ** 0.25)


@program({**ENDS, r"b/\d/[ud]": "Hb"}, deep=True)
def deepnorm_with_the_depth(n, L):
    return deepnorm(n, L, L)


@program({**ENDS, r"b/\d/[ud]": "Hb"}, deep=True)
def residuals_with_unit_scaling(n, L):
    """x0 + sum of all branches / sqrt(L), in layers that keep the size of the stream."""

    def call(p, x):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            x = ((L + i) ** 0.5 * x + mlp(w, norm(x))) / (L + i + 1) ** 0.5
        return x @ p["out"]

    p = zeros(**{"in": (5, n), "out": (n, 3)})
    return p | {"b": layers(L, u=(n, n), d=(n, n))}, (floats(2, 6, 5),), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/rate": "Vb"}, deep=True)
def streams_that_move_toward_what_layers_made_of_them(n, L):
    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            h = x + mlp(w, norm(x))
            x = x + w["rate"] * (h - x)
        return norm(x) @ p["out"]

    p = zeros(**{"in": (5, n), "out": (n, 3)})
    return p | {"b": layers(L, u=(n, n), d=(n, n), rate=(n,))}, (floats(2, 6, 5),), call


@program({**BLOCK, r"b/\d/a": "Ob", r"b/\d/c": "Ib", r"b/\d/g": "Ve"}, deep=True)
def laurel_around_a_norm_without_a_gain(n, L):
    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            low = y + norm(y @ w["a"] @ w["c"], w["g"])
            x = (x + attend(w, y) + low) * 2**-0.5
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return model(n, L, a=(n, 3), c=(3, n), g=(n,)), T, call


@program({**BLOCK, "grams": "F", r"b/\d/key": "Ib", r"b/\d/value": "Ie"}, deep=True)
def memory_of_ngrams_whose_gate_alone_reads_the_stream(n, L):
    p = zeros(grams=(11, 4)) | model(n, L, key=(4, n), value=(4, n))

    def call(p, x):
        found = p["grams"][(x * 31 + jnp.roll(x, 1, 1) * 17) % 11]
        x = p["in"][x]
        for w in p["b"]:
            score = (norm(x) * norm(found @ w["key"])).mean(-1, keepdims=True)
            x = x + jax.nn.sigmoid(score) * (found @ w["value"])
            x = x + attend(w, norm(x))
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return p, T, call


def unet(n, L, weights):
    def call(p, x):
        x, kept = norm(p["in"][x]), []
        for i, w in enumerate(p["b"]):
            if i < L // 2:
                kept.append(x)
            else:
                x = x + p["weights"][i - L // 2] * kept.pop()
            x = x + attend(w, norm(x))
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return model(n, L) | zeros(weights=weights), T, call


# Each way up reads a skip beside what a kernel made; all blocks are alike.
@program(
    {
        **{"in": "I", "out": "O", "(less|more)": "H", r"[cd]/\d/p": "Hm"},
        r"[abmcd]/\d/u": "Hb",
        r"[abmcd]/\d/d": "He",
    },
    deep=True,
)
def unet_whose_blocks_project_joined_skips(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, less=(n, n), more=(n, n))
    p |= {k: layers(L, u=(n, n), d=(n, n)) for k in "abm"}
    p |= {k: layers(L, u=(2 * n, n), d=(n, n), p=(2 * n, n)) for k in "cd"}

    def block(w, x):
        return jax.nn.relu(norm(x) @ w["u"]) @ w["d"] + (x @ w["p"] if "p" in w else x)

    def call(p, x):
        x, skips = x @ p["in"], []
        for k in "abmcd":
            x = x @ p["less"] if k == "b" else x @ p["more"] if k == "d" else x
            for w in p[k]:
                x = jnp.concatenate([x, skips.pop()], -1) if k in "cd" else x
                x = block(w, x)
                skips += [x] if k in "ab" else []
        return norm(x) @ p["out"]

    return p, X, call


@program({**BLOCK, "weights": "Fm"}, deep=True)
def skips_of_a_unet_with_learned_weights(n, L):
    return unet(n, L, (L // 2,))


@program({**BLOCK, "weights": "Vm"}, deep=True)
def skips_of_a_unet_with_learned_gains(n, L):
    return unet(n, L, (L // 2, n))


@program({**BLOCK, r"b/\d/(read|write)": "Ob", r"b/\d/mix": "Om"}, deep=True)
def streams_that_matrices_of_each_token_mix(n, L):
    p = model(n, L, read=(4 * n, 4), write=(4 * n, 4), mix=(4 * n, 16))

    def call(p, x):
        x = jnp.repeat(p["in"][x][:, :, None], 4, 2)
        for w in p["b"]:
            every = norm(x.reshape(2, 6, 4 * n))
            read, write = (jax.nn.sigmoid(every @ w[c]) for c in ("read", "write"))
            mix = jnp.exp((every @ w["mix"]).reshape(2, 6, 4, 4))
            for axis in (-1, -2, -1, -2):  # Sinkhorn's steps
                mix = mix / mix.sum(axis, keepdims=True)
            y = attend(w, norm(jnp.einsum("bts,btsn->btn", read, x)))
            x = jnp.einsum("btsr,btrn->btsn", mix, x) + write[..., None] * y[:, :, None]
            x = x + mlp(w, norm(x.mean(2)))[:, :, None]
        return norm(x.sum(2)) @ p["out"]

    return p, T, call


@program(
    {**BLOCK, r"b/\d/g": "Vm", r"b/\d/mix": "Om", r"b/\d/by": "Ob", r"b/\d/s": "Fm"},
    deep=True,
)
def streams_of_which_one_matrix_makes_the_input_of_a_layer_and_the_rest(n, L):
    p = model(n, L, g=(n,), mix=(n, 5), s=(4, 5), by=(n, 1))

    def call(p, x):
        x = jnp.repeat(p["in"][x][:, :, None], 4, 2)
        for w in p["b"]:
            y = norm(x, w["g"])
            mix = w["s"] + jnp.tanh(y @ w["mix"])
            y = jax.nn.sigmoid(y @ w["by"])
            mixed = jnp.einsum("btsr,btsn->btrn", mix, x)
            new = attend(w, norm(mixed[:, :, 0]))
            x = mixed[:, :, 1:] + y * new[:, :, None]
            x = x + mlp(w, norm(x.mean(2)))[:, :, None]
        return norm(x.sum(2)) @ p["out"]

    return p, T, call


@program({**ENDS, "b/(mix|s)": "O|Fm", "b/by": "Fe", "b/(u|d)": "Hb"}, deep=True)
def streams_that_one_matrix_mixes_in_a_scan(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    shapes = {"mix": (n, 3), "s": (2, 3), "by": (2, 1), "u": (n, n), "d": (n, n)}
    p["b"] = {name: jnp.zeros((L, *shape)) for name, shape in shapes.items()}

    def layer(x, w):
        mix = w["s"] + jnp.tanh(norm(x) @ w["mix"])
        mixed = mix.swapaxes(-1, -2) @ x
        y = mlp(w, norm(mixed[..., 0, :]))
        return y[..., None, :] * w["by"] + mixed[..., 1:, :], None

    def call(p, x):
        x = jnp.repeat(p["in"][x][:, :, None], 2, 2)
        return norm(lax.scan(layer, x, p["b"])[0].sum(2)) @ p["out"]

    return p, T, call


@program({"in": "I", "out": "O", r"q|k|v|o|w/\d": "H"})
def two_inner_steps_with_momentum(n):
    d = n // 4
    p = zeros(**{"in": (7, n), "out": (n, 7)}, **dict.fromkeys("qkvo", (n, n)))
    p |= {"w": [jnp.zeros((4, d, d))] * 2}

    def call(p, x):
        x = p["in"][x]
        q, k, v = (heads(x @ p[c], d) for c in "qkv")

        def run(w, z):
            return norm(jax.nn.gelu(z @ w[0]) @ w[1])

        def one(w, q, k, v):
            momentum = jax.tree.map(jnp.zeros_like, w)
            for _ in range(2):
                step = jax.grad(lambda w: jnp.mean((run(w, k) - v) ** 2))(w)
                momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, step)
                w = jax.tree.map(lambda w, m: w - 0.1 * m, w, momentum)
            return run(w, q)

        y = jax.vmap(jax.vmap(one), in_axes=(None, 0, 0, 0))(p["w"], q, k, v)
        return norm(x + flat(y) @ p["o"]) @ p["out"]

    return p, T, call


@program({**ENDS, "film": "Ib", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def rows_of_a_table_for_all_layers(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, film=(4, L * 2 * n))
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, task):
        x, film = x @ p["in"], p["film"][task].reshape(2, L, 2, n)
        for i, w in enumerate(p["b"]):
            x = x + mlp(w, norm(x) * film[:, i, 0][:, None] + film[:, i, 1][:, None])
        return norm(x) @ p["out"]

    return p, (floats(2, 6, 5), tokens(2)), call


@program({**ENDS, r"b/\d/(a1|b1)": "Hb", r"b/\d/(a2|b2|ab|ba)": "He"}, deep=True)
def two_streams_with_branches_that_exchange(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys(("a1", "a2", "b1", "b2", "ab", "ba"), (n, n)))}

    def pooled(x):
        return x.reshape(2, 3, 2, n).mean(2)

    def call(p, x):
        a = x @ p["in"]
        b = pooled(a)
        for w in p["b"]:
            a = a + jax.nn.relu(norm(a) @ w["a1"]) @ w["a2"]
            b = b + jax.nn.relu(norm(b) @ w["b1"]) @ w["b2"]
            more, less = jnp.repeat(norm(b) @ w["ba"], 2, 1), pooled(norm(a)) @ w["ab"]
            a, b = a + more, b + less
        return norm(a) @ p["out"], norm(b) @ p["out"]

    return p, (floats(2, 6, 5),), call


# A gate acts on a stream, which is zero at first, and on what is added to it.
@program({**ENDS, r"b/\d/(u|w)": "Hb", r"b/\d/[dov]": "He", r"b/\d/a": "Fm"}, deep=True)
def ladder_with_gates_whose_sum_is_one(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("udvwo", (n, n)), a=())}

    def call(p, x):
        x = x @ p["in"]
        y = jnp.zeros_like(x)
        for w in p["b"]:
            x, a = x + mlp(w, norm(x)), jax.nn.sigmoid(w["a"])
            y = a * y + (1 - a) * (x @ w["v"])
            y = y + jax.nn.gelu(norm(y) @ w["w"]) @ w["o"]
        return norm(y) @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/g": "Vb"}, deep=True)
def layers_of_which_the_first_does_not_use_its_gain(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), g=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            x = x + mlp(w, norm(x) * w["g"] if i else x)
        return norm(x) @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({"a": "I", "b|c": "H"})
def correlations_on_a_diagonal_as_in_barlow_twins(n):
    p = zeros(a=(5, n), b=(n, n), c=(n, 4 * n))

    def call(p, *views):
        one, two = (
            jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"] for x in views
        )
        one, two = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (one, two))
        return jnp.mean((jnp.diag(one.T @ two / 4) - 1) ** 2)

    return p, (floats(4, 5), floats(4, 5)), call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def kernels_of_all_layers_stacked_by_rows(n, L):
    def call(p, x):
        x = p["in"][x]
        for i in range(L):
            u, d = (p[name][i * n : (i + 1) * n] for name in "ud")
            x = x + jax.nn.relu(norm(x) @ u) @ d
        return norm(x) @ p["out"]

    return zeros(**{"in": (7, n), "out": (n, 7)}, u=(L * n, n), d=(L * n, n)), T, call


@program(
    {**BLOCK, "hint": "I", r"c/\d/(q|k|v|u)": "Hb", r"c/\d/(o|d|z)": "He"}, deep=True
)
def control_tower_that_adds_to_each_layer(n, L):
    square = dict.fromkeys("qkvoud", (n, n))
    p = model(n, L) | {"in": jnp.zeros((5, n)), "hint": jnp.zeros((4, n))}

    def call(p, x, hint):
        x = x @ p["in"]
        c, more = x + hint @ p["hint"], []
        for w in p["c"]:
            c = c + attend(w, norm(c))
            c = c + mlp(w, norm(c))
            more.append(c @ w["z"])
        for w, z in zip(p["b"], more, strict=True):
            x = x + attend(w, norm(x))
            x = x + mlp(w, norm(x))
            x = x + z
        return norm(x) @ p["out"]

    p |= {"c": layers(L, **square, z=(n, n))}
    return p, (floats(2, 6, 5), floats(2, 6, 4)), call


@program({**ENDS, "w": "He"}, deep=True, asks=r"\(layers, n, m\) in place of")
def kernels_of_all_layers_on_one_axis_in_a_loop(n, L, remedy=False):
    def call(p, x):
        w = p["w"].reshape(L, n, n)
        x, _ = lax.scan(lambda x, w: (x + norm(x) @ w, None), x @ p["in"], w)
        return norm(x) @ p["out"]

    shape = (L, n, n) if remedy else (L * n, n)
    return zeros(**{"in": (5, n), "out": (n, 3)}, w=shape), (floats(2, 6, 5),), call


# The norms after the additions do not begin new streams.
@program(
    {**ENDS, r"b/\d/[qkvu]": "Hb", r"b/\d/[od]": "He", r"b/\d/e": "Ve", r"b/\d/g.": "Vm"},
    deep=True,
    carries={r"b/\d/q": 0.333333},
)  # fmt: skip
def logits_handed_on_between_blocks_with_norms_after_them(n, L):
    shapes = {**dict.fromkeys("qkvoud", (n, n)), **dict.fromkeys(["e", "g1", "g2"], (n,))}  # fmt: skip
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, **shapes)}

    def call(p, x):
        x, logits = x @ p["in"], 0.0
        for w in p["b"]:
            logits = (x @ w["q"]) @ (x @ w["k"]).mT / n + logits
            x = norm(x + jax.nn.softmax(logits) @ (x @ w["v"]) @ w["o"], w["g1"])
            x = norm(x + jax.nn.gelu(x @ w["u"]) @ w["d"] + w["e"], w["g2"])
        return x @ p["out"]

    return p, (floats(2, 6, 5),), call


# Two streams read each other. The decoder also reads the encoder's nodes where a mask
# says so, which is no residual addition. The last edges are read by branches alone.
@program(
    {
        **{"in": "I", "edges": "I", "out": "O", "s": "I"},
        r"(e|d)/\d/(w|u)": "Hb",
        r"(e|d)/\d/(v|d)": "He",
        r"e/\d/a": "Hb",
        r"e/\d/z": "He",
        r"(e|d)/\d/g.|e/[0-4]/h": "Vm",
        "e/5/h": "Vb",
    },
    deep=True,
)
def protein_designer_of_nodes_and_edges_with_norms_after(n, L):
    p = zeros(edges=(6, n), s=(7, n), out=(n, 7)) | {"in": jnp.zeros((5, n))}
    each = dict(v=(n, n), u=(n, 2 * n), d=(2 * n, n), g1=(n,), g2=(n,))
    p["e"] = layers(L, w=(2 * n, n), a=(2 * n, n), z=(n, n), h=(n,), **each)
    p["d"] = layers(L, w=(3 * n, n), **each)

    def call(p, x, e, near, s, mask):
        x, e = x @ p["in"], e @ p["edges"]

        def update(w, x, read):
            message = jax.nn.gelu(read @ w["w"]) @ w["v"]
            x = norm(x + message.sum(1) / 30, w["g1"])
            return norm(x + jax.nn.gelu(x @ w["u"]) @ w["d"], w["g2"])

        def read(x, *others):
            return jnp.concatenate([*others, x[near]], -1)

        for w in p["e"]:
            x = update(w, x, read(x, e))
            e = norm(e + jax.nn.gelu(read(x, e) @ w["a"]) @ w["z"], w["h"])
        seen, known = p["s"][s][near], read(x, e, jnp.zeros_like(e))
        for w in p["d"]:
            both = mask * read(x, e, seen) + (1 - mask) * known
            x = update(w, x, both)
        return x @ p["out"]

    inputs = floats(6, 5), floats(6, 3, 6), tokens(6, 3), tokens(6), floats(6, 3, 1)
    return p, inputs, call


def reads(w, y, z):
    """Attention of one value to another."""
    scores = (y @ w["q"]) @ (z @ w["k"]).mT / len(w["k"])
    return jax.nn.softmax(scores) @ (z @ w["v"]) @ w["o"]


# All branches are added up beside a stream with norms after its additions.
@program({**BLOCK, "g": "V", r"b/\d/g.": "Vm"}, deep=True)
def post_norm_stream_beside_the_sum_of_all_branches(n, L):
    p = model(n, L, g1=(n,), g2=(n,)) | {"g": jnp.zeros(n)}

    def call(p, x):
        x = y = p["in"][x]
        for w in p["b"]:
            for branch, g in ((attend, "g1"), (mlp, "g2")):
                z = branch(w, x)
                x, y = norm(x + z, w[g]), y + z
        return (x + norm(y, p["g"])) @ p["out"]

    return p, T, call


# Queries and keys are the tokens and their first values, which is no addition to the
# stream. The last layer reads both streams once.
@program(
    {
        **{"in|img": "I", "out": "O", "mask": "O", "g": "V", "last/.": "H"},
        r"b/\d/(self|to|of)/[qkv]|b/\d/u": "Hb",
        r"b/\d/(self|to|of)/o|b/\d/d": "He",
        r"b/\d/g.": "Vm",
    },
    deep=True,
)
def two_way_decoder_of_tokens_and_an_image(n, L):
    square = dict.fromkeys("qkvo", (n, n))
    gains = {f"g{i}": (n,) for i in range(4)}
    p = zeros(**{"in": (3, n), "out": (n, 3)}, img=(5, n), mask=(n, 3), g=(n,), last=square)  # fmt: skip
    p |= {
        "b": layers(L, self=square, to=square, of=square, u=(n, n), d=(n, n), **gains)
    }

    def call(p, x, t):
        t = first = t @ p["in"]
        x, place = x @ p["img"], jnp.sin(jnp.arange(5.0))[:, None]
        for w in p["b"]:
            t = norm(t + reads(w["self"], t + first, t + first), w["g0"])
            t = norm(t + reads(w["to"], t + first, x + place), w["g1"])
            t = norm(t + mlp(w, t), w["g2"])
            x = norm(x + reads(w["of"], x + place, t + first), w["g3"])
        t = norm(t + reads(p["last"], t + first, x + place), p["g"])
        return t @ p["out"], x @ p["mask"]

    return p, (floats(2, 5, 5), floats(2, 4, 3)), call


# Branches beside each other are one in depth, in whatever order they are added.
for name, add in {
    "one_by_one": lambda x, y, z: x + y + z,
    "together": lambda x, y, z: x + (y + z),
}.items():

    def make(n, L, add=add):
        def call(p, x):
            x = p["in"][x]
            for i, w in enumerate(p["b"]):
                if i % 2:
                    x = add(x, attend(w, norm(x)), mlp(w, norm(x)))
                else:
                    x = x + attend(w, norm(x))
                    x = x + mlp(w, norm(x))
            return norm(x) @ p["out"]

        return model(n, L), T, call

    make.__name__ = f"some_layers_whose_two_branches_are_added_{name}"
    program(BLOCK, deep=True)(make)


@program(
    {
        **BLOCK,
        r"b/0/first|b/\d/up": "Hb",
        r"b/0/second|b/\d/down": "He",
        r"b/\d/r": "Ob",
    },
    deep=True,
)
def one_dense_layer_before_those_of_experts_and_a_shared_one(n, L):
    p, kernels = model(n, L), dict(up=(4, n, n), down=(4, n, n))
    for i, w in enumerate(p["b"]):
        w |= zeros(r=(n, 4), **kernels) if i else zeros(first=(n, n), second=(n, n))

    def call(p, x):
        x = p["in"][x]
        for i, w in enumerate(p["b"]):
            x = x + attend(w, norm(x))
            y = norm(x)
            if i:
                x = x + (mlp(w, y) + experts(w, y))
            else:
                x = x + jax.nn.relu(y @ w["first"]) @ w["second"]
        return norm(x) @ p["out"]

    del p["b"][0]["u"], p["b"][0]["d"]
    return p, T, call


@program(
    {
        "in": "I",
        "out": "O",
        "(one|b)/(q|k|v|up|u)": "Hb",
        "(one|b)/(o|d|down)": "He",
        "b/r": "Ob",
    },
    deep=True,
)
def one_dense_layer_before_a_scan_of_experts(n, L):
    kernels = dict.fromkeys("qkvo", (n, n))
    p = zeros(**{"in": (5, n), "out": (n, 5)}, one=dict(u=(n, n), d=(n, n), **kernels))
    w = layers(L - 1, r=(n, 4), up=(4, n, n), down=(4, n, n), **kernels)
    p["b"] = jax.tree.map(lambda *x: jnp.stack(x), *w)

    def block(x, w):
        x = x + attend(w, norm(x))
        return x + (experts if "r" in w else mlp)(w, norm(x)), None

    def call(p, x):
        x, _ = lax.scan(block, block(p["in"][x], p["one"])[0], p["b"])
        return norm(x) @ p["out"]

    return p, T, call


# As in data2vec: what a norm makes of a branch does not change with its multiplier.
@program(
    {"[st]/in": "I", r"[st]/b/\d/u": "Hb", r"[st]/b/\d/d": "He", "out": "H"}, deep=True
)
def targets_of_the_last_branches_of_a_teacher(n, L):
    p = {k: zeros(**{"in": (5, n)}) | {"b": layers(L, u=(n, n), d=(n, n))} for k in "st"}  # fmt: skip

    def run(p, x):
        x, every = x @ p["in"], []
        for w in p["b"]:
            every.append(mlp(w, norm(x)))
            x = x + every[-1]
        return x, every

    def call(p, x):
        last = run(p["t"], x)[1][-2:]
        goal = jax.lax.stop_gradient(sum(map(norm, last)) / 2)
        return ((run(p["s"], x)[0] @ p["out"] - goal) ** 2).mean()

    return p | zeros(out=(n, n)), (floats(2, 6, 5),), call
