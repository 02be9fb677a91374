"""Programs composed at random, of components that bring their own right answers.

What is read wrongly is mostly an interaction of components. So each component says what
its parameters do: their letters (as in `kit`), those that it ends in, the number of its
kernels in a row, and what they carry. The answer for a program follows from these.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .kit import ALL, Program, floats, tokens, zeros
from .plain import norm
from .transformers import flat, heads, rope

NUMBER = 120  # of programs

# How a kernel is stored, and how it meets an activation.
SPELLINGS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain": (lambda i, o: (i, o), lambda x, w: x @ w),
    "transposed": (lambda i, o: (o, i), lambda x, w: x @ w.T),
    "einsum": (lambda i, o: (o, i), lambda x, w: jnp.einsum("oi,...i->...o", w, x)),
    "sum": (lambda i, o: (i, o), lambda x, w: (x[..., None] * w).sum(-2)),
    "vectorize": (
        lambda i, o: (o, i),
        lambda x, w: jnp.vectorize(jnp.matmul, signature="(o,i),(i)->(o)")(w, x),
    ),
    "half precision": (
        lambda i, o: (i, o),
        lambda x, w: (x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32"),
    ),
    "two axes in": (
        lambda i, o: (2, i // 2, o),
        lambda x, w: jnp.einsum("...ai,aio->...o", x.reshape(*x.shape[:-1], 2, -1), w),
    ),
    "two axes out": (
        lambda i, o: (i, 2, o // 2),
        lambda x, w: jnp.einsum("...i,iao->...ao", x, w).reshape(*x.shape[:-1], -1),
    ),
}


@dataclasses.dataclass
class Beside:
    """What branches read beside their stream."""

    memory: Any = None
    condition: Any = None


class Part:
    """A component: a function of its parameters, an activation and `Beside`.

    Attributes:
      shapes: of its parameters, as functions of the width d of its stream, or of the
        width n of the whole model.
      letters: what they do.
      ends: those that its result is linear in.
      layers: the number of kernels in a row.
      carries: factors that parameters carry where the width grows.
    """

    def __init__(self, choose, layers=0):
        self.choose, self.layers, self.ends = choose, layers, []
        self.shapes, self.letters, self.carries = {}, {}, {}

    def of(self, apply):
        self.apply = apply
        return self

    def one_of(self, *options):
        return self.choose.choice(options)

    def seldom(self, first, *others):
        """The first, or with a probability of 0.3 one of the others."""
        return self.one_of(*others) if self.choose.random() < 0.3 else first

    def add(self, name, letter, shape):
        self.letters[name], self.shapes[name] = letter, shape

    def kernel(self, name, into=1.0, out=1.0, letter="H", *, of=1, bias=None):
        """A kernel from `into` to `out` widths (of the model for `of` = 0), or units."""
        whole = letter in "IO"
        options = [s for s in SPELLINGS if not (whole and s.startswith("two"))]
        store, use = SPELLINGS[self.seldom(*options)]

        def size(share, width):
            return share if isinstance(share, int) else int(share * width)

        self.add(name, letter, lambda *nd: store(size(into, nd[of]), size(out, nd[1])))
        self.ends = [name]  # the last kernel
        if not (self.seldom(False, True) if bias is None else bias):
            return lambda w, x: use(x, w[name])
        self.ends += [b := name + "_b"]
        self.add(b, "F" if letter == "O" else "V", lambda n, d: (size(out, d),))
        return lambda w, x: use(x, w[name]) + w[b]

    def include(self, name, part):
        """The parameters of another component, under a name."""
        for key, letter in part.letters.items():
            self.add(f"{name}/{key}", letter, part.shapes[key])
        self.carries |= {f"{name}/{k}": v for k, v in part.carries.items()}
        self.ends = [f"{name}/{k}" for k in part.ends]
        self.layers = max(self.layers, part.layers)
        return lambda w, x, beside: part.apply(w.get(name, {}), x, beside)


def normed(choose, *kinds):
    p = Part(choose)
    kind = p.one_of(*(kinds or ("plain", "gain", "bias", "around one", "none")))
    names = {"gain": "g", "bias": "gb", "around one": "g"}.get(kind, "")
    for name in names:
        p.add(name, "V", lambda n, d: (d,))
    p.ends = list(names)

    def apply(w, x, beside):
        if kind == "none":
            return x
        x = norm(x) * (1 + w["g"] if kind == "around one" else w.get("g", 1.0))
        return x + w.get("b", 0.0)

    return p.of(apply)


def mlp(choose):
    kind = choose.choice(["one", "two", "gated", "fused", "lora", "narrow", "squeeze"])
    p = Part(choose, {"one": 1, "lora": 3}.get(kind, 2))
    act = p.one_of(jax.nn.relu, jax.nn.gelu, jnp.tanh)
    if kind == "one":
        k = p.kernel("k")
        return p.of(lambda w, x, _: k(w, act(x)))
    if kind == "narrow":  # of a fixed number of units
        u, v = p.kernel("u", 1.0, 4, "O"), p.kernel("v", 4, 1.0, "I")
        return p.of(lambda w, x, _: v(w, act(u(w, x))))
    u = p.kernel("u", 1.0, 4.0 if kind == "fused" else 2.0)
    if kind == "gated":
        g = p.kernel("g", 1.0, 2.0)
    elif kind in ("lora", "squeeze"):
        a = p.kernel("a", 2.0 if kind == "lora" else 1.0, 4, "O", bias=False)
        b = p.kernel("b", 4, 1.0, "I", bias=False)
    v = p.kernel("v", 2.0, 1.0)
    p.ends += ["b"] * (kind == "lora")

    def apply(w, x, _):
        h = u(w, x)
        if kind == "fused":
            h, gate = jnp.split(h, 2, -1)
            return v(w, h * act(gate))
        if kind == "gated":
            return v(w, h * jax.nn.silu(g(w, x)))
        y = v(w, act(h))
        if kind == "lora":
            return y + 2.0 * b(w, a(w, act(h)))
        if kind == "squeeze":
            gate = b(w, jax.nn.relu(a(w, x.mean(1, keepdims=True))))
            return y * jax.nn.sigmoid(gate)
        return y

    return p.of(apply)


def attend(choose, *, cross=False):
    p = Part(choose, 2)
    by_number = p.one_of(True, False)  # the number of heads grows, not their size
    kind = p.one_of("each", "grouped", "single", *["fused"] * (not cross))
    gains, turned, causal = (p.seldom(False, True) for _ in range(3))
    root = kind != "fused" and p.one_of(True, False)
    share = {"grouped": 0.5, "single": 4 if by_number else 0.5}.get(kind, 1.0)
    kv = "O" if kind == "single" and by_number else "H"

    def size(d):
        return 4 if by_number else d // 2

    if kind == "fused":
        qkv = p.kernel("qkv", 1.0, 3.0)
    else:
        q = p.kernel("q")
        carry = p.ends
        k, v = (p.kernel(c, 1.0, share, kv, of=1 - cross) for c in "kv")
    for c in ("qg", "kg") if gains else ():
        p.add(c, "F" if by_number else "V", lambda n, d: (size(d),))
    if root and not by_number:
        p.carries = dict.fromkeys(["qg"] if gains else carry, 0.5)
    o = p.kernel("o")

    def apply(w, x, beside):
        d, y = size(x.shape[-1]), beside.memory if cross else x
        if kind == "fused":
            each = jnp.split(qkv(w, x), 3, -1)
        else:
            each = q(w, x), k(w, y), v(w, y)
        q_, k_, v_ = (heads(z, d) for z in each)
        k_, v_ = (jnp.repeat(z, q_.shape[1] // z.shape[1], 1) for z in (k_, v_))
        q_, k_ = (norm(q_) * w["qg"], norm(k_) * w["kg"]) if gains else (q_, k_)
        q_, k_ = (rope(q_), rope(k_)) if turned else (q_, k_)
        s = q_ @ k_.swapaxes(-1, -2) * (d**-0.5 if root else 1 / d)
        if causal and not cross:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
        return o(w, flat(jax.nn.softmax(s) @ v_))

    return p.of(apply)


def experts(choose):
    p = Part(choose, 2)
    looked_up = p.one_of(True, False)
    p.add("r", "O", lambda n, d: (d, 3))
    p.add("u", "H", lambda n, d: (3, d, 2 * d))
    p.add("v", "H", lambda n, d: (3, 2 * d, d))
    p.ends = ["v"]

    def apply(w, x, _):
        gates = jax.nn.softmax(x @ w["r"])
        if looked_up:
            at = jnp.argmax(gates, -1)
            h = jax.nn.relu(jnp.einsum("btd,btdf->btf", x, w["u"][at]))
            y = jnp.einsum("btf,btfd->btd", h, w["v"][at])
            return y * gates.max(-1, keepdims=True)
        h = jax.nn.relu(jnp.einsum("btd,edf->btef", x, w["u"]))
        y = jnp.einsum("btef,efd->bted", h, w["v"])
        return jnp.einsum("bted,bte->btd", y, gates)

    return p.of(apply)


def mixer(choose):
    """Tokens are mixed by convolutions or states."""
    p = Part(choose, 2)
    kind = p.one_of("convolution", "parallel", "state")
    k = p.kernel("k")
    p.add("c", "V", lambda n, d: (3, d) if kind == "convolution" else (d,))
    gate = p.kernel("gate") if p.seldom(False, True) else None
    o = p.kernel("o")

    def mixed(c, h):
        if kind == "convolution":
            late = (jnp.pad(h, ((0, 0), (i, 0), (0, 0))) for i in range(3))
            return sum(y[:, : h.shape[1]] * c[i] for i, y in enumerate(late))
        if kind == "parallel":
            every = jnp.broadcast_to(jax.nn.sigmoid(c), h.shape), h
            return lax.associative_scan(join, every, axis=1)[1]
        h = h.swapaxes(0, 1)
        _, y = lax.scan(lambda s, u: (jnp.exp(c) * s + u,) * 2, jnp.zeros_like(h[0]), h)
        return y.swapaxes(0, 1)

    def join(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    def apply(w, x, _):
        y = jax.nn.silu(mixed(w["c"], k(w, x)))
        return o(w, y * jax.nn.silu(gate(w, x)) if gate else y)

    return p.of(apply)


def branch(choose, has):
    """A norm, what conditions it, a component, and what follows it."""
    p = Part(choose)
    cross = [lambda c: attend(c, cross=True)] * 2 if "memory" in has else []
    before = p.include("n", normed(choose))
    condition = p.one_of("none", "add", "modulate") if "condition" in has else "none"
    shift = p.kernel("shift", of=0) if condition != "none" else None
    scale = p.kernel("scale", of=0) if condition == "modulate" else None
    inner = p.include("m", p.one_of(mlp, attend, experts, mixer, *cross)(choose))
    after = p.seldom("none", "gain", "number", "norm", "gate")
    if after in ("gain", "number"):
        letter, rank = {"gain": ("V", 1), "number": ("F", 0)}[after]
        p.add("s", letter, lambda n, d: (d,) * rank)
        p.ends = ["s"]
    kinds = ("gain", "bias", "around one")
    last = p.include("l", normed(choose, *kinds)) if after == "norm" else None
    ends = p.ends
    gate = p.kernel("gate") if after == "gate" else None
    p.ends = ends

    def apply(w, x, beside):
        h = before(w, x, beside)
        h = h * (1 + scale(w, beside.condition)[:, None]) if scale else h
        h = h + shift(w, beside.condition)[:, None] if shift else h
        y = inner(w, h, beside)
        y = last(w, y, beside) if last else y * w.get("s", 1.0)
        return y * jax.nn.sigmoid(gate(w, h)) if gate else y

    return p.of(apply)


def block(choose, has, constant):
    """One or two branches, after each other or side by side."""
    p, ends = Part(choose), []
    each = []
    for c in p.one_of("x", "xy"):
        each.append(p.include(c, branch(choose, has)))
        ends += p.ends
    p.ends, side_by_side = ends, p.seldom(False, True)
    remat = p.seldom(False, True)

    def apply(w, x, beside, L):
        def run(w, x):
            start = x
            for f in each:
                y = f(w, start if side_by_side else x, beside)
                x = x + (y * L**-constant if constant else y)
            return x

        return jax.checkpoint(run)(w, x) if remat else run(w, x)

    return p.of(apply)


class Stack:
    """Blocks in a row, and how the program walks through them."""

    def __init__(self, choose, has, constant, wide=1):
        stacked = {"scan": (0,), "taken": (0,), "counted": (0,), "nested": (0, 2)}
        self.kind = choose.choice(["list", "alternate", *stacked])
        self.lead, self.wide = stacked.get(self.kind, ()), wide
        number = 2 if self.kind == "alternate" else 1
        self.blocks = [block(choose, has, constant) for _ in range(number)]
        self.layers = max(b.layers for b in self.blocks)

    def params(self, n, L):
        def shapes(b):
            lead = tuple(k or L for k in self.lead)
            return {k: (*lead, *f(n, self.wide * n)) for k, f in b.shapes.items()}

        each = [shapes(b) for b in self.blocks]
        return tree(each[0]) if self.lead else [tree(x) for _ in range(L) for x in each]

    def right(self, at, constant):
        """Letters by path, and what is carried."""
        letters, carries, ways = {}, {}, [r"\d*[02468]/", r"\d*[13579]/"]
        if len(self.blocks) == 1:
            ways = [r"\d+/" * (not self.lead)]
        for way, b in zip(ways, self.blocks, strict=True):
            for name, letter in b.letters.items():
                ends = name in b.ends and not constant
                letters[f"{at}/{way}{name}"] = letter + ("e" if ends else "b")
            carries |= {f"{at}/{way}{name}": v for name, v in b.carries.items()}
        return letters, carries

    def apply(self, w, x, beside, L):
        def run(x, w, i=0):
            return self.blocks[i].apply(w, x, beside, L), None

        def at(i):
            return jax.tree.map(lambda z: z[i], w)

        if self.kind == "scan":
            return lax.scan(run, x, w)[0]
        if self.kind == "nested":
            return lax.scan(lambda x, w: lax.scan(run, x, w), x, w)[0]
        if self.kind == "counted":
            return lax.fori_loop(0, L, lambda i, x: run(x, at(i))[0], x)
        for i, each in enumerate(map(at, range(L)) if self.lead else w):
            x, _ = run(x, each, i % len(self.blocks))
        return x


def tree(shapes):
    """Parameters in nested dictionaries, from paths."""
    nested = {}
    for path, shape in shapes.items():
        *parents, name = path.split("/")
        at = nested
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = shape
    return zeros(**nested)


def composed(seed: int) -> Program:
    """A program, and its right answers."""
    choose = random.Random(seed)
    first, head, deep = Part(choose), Part(choose), choose.random() < 0.7
    constant = first.seldom(0, 0.5, 1)  # of branches: depth to this negative power
    source = first.one_of("features", "table", "one-hot", "patches")
    position = first.seldom("none", "learned", "token")
    beside = {"memory": first.seldom("", "kernel", "encoder")}
    beside |= {"condition": first.seldom("", "table")}
    has = {name for name, kind in beside.items() if kind}
    shape = first.seldom("plain", "stages", "hourglass")
    ends = ["each", "mean", "hidden", "first", *["tied"] * (source == "table")]
    end, wide = choose.choice(ends), 2 if shape == "stages" else 1

    stacks = {"s": Stack(choose, has, constant)}
    if shape != "plain":
        stacks["t"] = Stack(choose, has, constant, 2)
        down = first.kernel("down", 1.0, 2.0)
        up = first.kernel("up", 2.0, 1.0) if shape == "hourglass" else None
    if beside["memory"] == "encoder":
        stacks["m"] = Stack(choose, set(), constant)
    kernels = {"features": (5, floats(2, 6, 5)), "one-hot": (7, tokens(2, 6))}
    lead, x = kernels.get(source, (0, tokens(2, 6)))
    enter = first.kernel("in", lead, 1.0, "I") if lead else None
    if source == "table":
        first.add("in", "I", lambda n, d: (7, n))
    elif source == "patches":
        x = floats(2, 4, 6, 3)
        first.add("in", "I", lambda n, d: (2, 2, 3, n))
    if position != "none":
        first.add("pos", "I|V", lambda n, d: (6 if position == "learned" else 1, n))
    memory = first.kernel("mem", 4, 1.0, "I") if "memory" in has else None
    if "condition" in has:
        first.add("cond", "I", lambda n, d: (9, n))
    tied, kinds = end == "tied", ("gain", "bias")
    last = head.include("f", normed(choose, *kinds) if tied else normed(choose))
    head.carries = dict.fromkeys(head.ends, 0.25) if tied else {}
    hidden = head.kernel("hidden") if end == "hidden" else None
    out = None if tied else head.kernel("out", 1.0, 3, "O")

    def make(n, L=2):
        shapes = {k: f(n, n) for k, f in first.shapes.items()}
        params = tree(shapes | {k: f(n, wide * n) for k, f in head.shapes.items()})
        params |= {name: each.params(n, L) for name, each in stacks.items()}
        more = [floats(2, 3, 4)] * ("memory" in has) + [tokens(2)] * (
            "condition" in has
        )

        def call(w, x, *more):
            beside = Beside()
            if memory:
                beside.memory = memory(w, more[0])
            if "m" in stacks:
                beside.memory = norm(
                    stacks["m"].apply(w["m"], beside.memory, beside, L)
                )
            if "condition" in has:
                beside.condition = jnp.tanh(w["cond"][more[-1]])
            if source == "patches":
                x = lax.conv_general_dilated(x, w["in"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
                x = x.reshape(2, 6, n)
            elif source == "table":
                x = w["in"][x]
            else:
                x = enter(w, jax.nn.one_hot(x, 7) if source == "one-hot" else x)
            if position == "learned":
                x = x + w["pos"]
            elif position == "token":
                token = jnp.broadcast_to(w["pos"], (2, 1, n))
                x = jnp.concatenate([token, x], 1)
            x = stacks["s"].apply(w["s"], x, beside, L)
            if shape != "plain":
                y = stacks["t"].apply(w["t"], down(w, x), beside, L)
                x = x + up(w, y) if up else y
            x = last(w, x, beside)
            x = jax.nn.relu(hidden(w, x)) if hidden else x
            x = {"mean": x.mean(1), "first": x[:, 0]}.get(end, x)
            return x @ w["in"].T if tied else out(w, x)

        return params, (x, *more), call

    right, carries = first.letters | head.letters, head.carries
    for name, each in stacks.items():
        letters, more = each.right(name, constant)
        right, carries = right | letters, carries | more
    layers = max(each.layers for each in stacks.values())
    point = {0.5: "depth_mup", 1: "completep"}.get(constant)
    point = point or ("depth_mup" if layers == 1 else "completep")
    return Program(f"composed_{seed}", make, right, deep, carries, "", point * deep)


ALL += map(composed, range(NUMBER))
