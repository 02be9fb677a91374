"""Programs of Flax NNX, Linen, Equinox and Haiku, with their own layers."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from .kit import floats, program, tokens

S = (floats(2, 6, 5),)
IMAGE = (floats(2, 8, 8, 3),)


class Block(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, n, rngs):
        self.norms = nnx.List(nnx.LayerNorm(n, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(n // 4, n, decode=False, rngs=rngs)
        self.up = nnx.Linear(n, 4 * n, rngs=rngs)
        self.down = nnx.Linear(4 * n, n, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


INSIDE = {
    r"blocks/\d+/norms/\d/(scale|bias)": "Vb",
    r"blocks/\d+/attention/(query|key|value)/kernel": "Hb",
    r"blocks/\d+/attention/(query|key|value)/bias": "Vb",
    r"blocks/\d+/up/kernel": "Hb",
    r"blocks/\d+/up/bias": "Vb",
    r"blocks/\d+/(attention/out|down)/kernel": "He",
    r"blocks/\d+/(attention/out|down)/bias": "Ve",
}


@program({**INSIDE, "embed/embedding": "I", r"norm/(scale|bias)": "V", "position": "V"}, deep=True, carries={"norm/.*": 0.25})  # fmt: skip
def nnx_gpt_with_tied_readout(n, L):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, n, rngs=rngs)
            self.position = nnx.Param(jnp.zeros((6, n)))
            self.blocks = nnx.List(Block(n, rngs) for _ in range(L))
            self.norm = nnx.LayerNorm(n, rngs=rngs)

        def __call__(self, x):
            x = self.embed(x) + self.position[...][None]
            for block in self.blocks:
                x = block(x, nn.make_causal_mask(jnp.ones(x.shape[:2])))
            return self.embed.attend(self.norm(x))

    return (lambda: Model(nnx.Rngs(0))), (tokens(2, 6),)


@program({**INSIDE, "patch/kernel": "I", "patch/bias": "V", "head/kernel": "O", "head/bias": "F", "cls": "V", "scale": "F"}, deep=True)  # fmt: skip
def nnx_vit(n, L):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.patch = nnx.Conv(3, n, (4, 4), strides=4, rngs=rngs)
            self.cls = nnx.Param(jnp.zeros((1, 1, n)))
            self.blocks = nnx.List(Block(n, rngs) for _ in range(L))
            self.head = nnx.Linear(n, 7, rngs=rngs)
            self.scale = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            x = self.patch(x).reshape(x.shape[0], -1, n)
            x = jnp.concatenate([jnp.tile(self.cls[...], (x.shape[0], 1, 1)), x], 1)
            for block in self.blocks:
                x = block(x)
            return self.head(x[:, 0]) * jnp.exp(self.scale[...])

    return (lambda: Model(nnx.Rngs(0))), IMAGE


@program({"stem/kernel": "I", r"blocks/\d+/conv\d/kernel": "Hb", r"(blocks/\d+/)norm1/(scale|bias)": "Vb", r"(blocks/\d+/)norm2/(scale|bias)": "Ve", "head/kernel": "O", "head/bias": "F"}, deep=True)  # fmt: skip
def nnx_resnet_of_one_stage(n, L):
    class Residual(nnx.Module):
        def __init__(self, rngs):
            conv = lambda: nnx.Conv(n, n, (3, 3), use_bias=False, rngs=rngs)
            self.conv1, self.conv2 = conv(), conv()
            self.norm1, self.norm2 = (nnx.BatchNorm(n, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            y = nnx.relu(self.norm1(self.conv1(x)))
            return nnx.relu(x + self.norm2(self.conv2(y)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, n, (3, 3), use_bias=False, rngs=rngs)
            self.blocks = nnx.List(Residual(rngs) for _ in range(L))
            self.head = nnx.Linear(n, 7, rngs=rngs)

        def __call__(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    return (lambda: Model(nnx.Rngs(0))), IMAGE


@program({"Dense_0/kernel": "I", "Dense_0/bias": "V", "Dense_1/kernel": "H", "Dense_1/bias": "V", "Dense_2/kernel": "O", "Dense_2/bias": "F"})  # fmt: skip
def linen_mlp(n):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(n)(x))
            x = nn.relu(nn.Dense(n)(x))
            return nn.Dense(3)(x)

    return Model(), (floats(4, 5),)


@program({"Dense_0/kernel": "I", "Dense_0/bias": "V", "Dense_1/kernel": "O", "Dense_1/bias": "F", "ScanBlock_0/LayerNorm_0/(scale|bias)": "Vb", "ScanBlock_0/up/kernel": "Hb", "ScanBlock_0/up/bias": "Vb", "ScanBlock_0/down/kernel": "He", "ScanBlock_0/down/bias": "Ve"}, deep=True)  # fmt: skip
def linen_scanned_blocks(n, L):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.gelu(nn.Dense(2 * n, name="up")(nn.LayerNorm()(x)))
            return x + nn.Dense(n, name="down")(y), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(n)(x)
            blocks = nn.scan(Inner, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)  # fmt: skip
            x, _ = blocks(name="ScanBlock_0")(x, None)
            return nn.Dense(3)(x)

    return Model(), (floats(4, 5),)


@program({r"OptimizedLSTMCell_0/i./kernel": "I", r"OptimizedLSTMCell_0/h./kernel": "H", r"OptimizedLSTMCell_0/h./bias": "V", "Dense_0/kernel": "O", "Dense_0/bias": "F"})  # fmt: skip
def linen_lstm(n):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(n))(x)[:, -1])

    return Model(), S


@program({r"layers/0/weight": "I", r"layers/1/weight": "H", r"layers/2/weight": "O", r"layers/[01]/bias": "V", r"layers/2/bias": "F"})  # fmt: skip
def equinox_mlp(n):
    return eqx.nn.MLP(5, 3, n, 2, key=jax.random.key(0)), (floats(5),)


@program({"into/weight": "I", "into/bias": "V", "out/weight": "O", "out/bias": "F", r"blocks/\d+/norm/(weight|bias)": "Vb", r"blocks/\d+/attention/(query|key|value)_proj/weight": "Hb", r"blocks/\d+/attention/output_proj/weight": "He"}, deep=True, carries={r".*query_proj/.*": 0.5})  # fmt: skip
def equinox_attention(n, L):
    class Layer(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention

        def __call__(self, x):
            y = jax.vmap(self.norm)(x)
            return x + self.attention(y, y, y)

    class Model(eqx.Module):
        into: eqx.nn.Linear
        blocks: list
        out: eqx.nn.Linear

        def __init__(self):
            key = jax.random.key(0)
            self.into = eqx.nn.Linear(5, n, key=key)
            self.blocks = [
                Layer(eqx.nn.LayerNorm(n), eqx.nn.MultiheadAttention(2, n, key=key))
                for _ in range(L)
            ]
            self.out = eqx.nn.Linear(n, 3, key=key)

        def __call__(self, x):
            x = jax.vmap(self.into)(x)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.out)(x)

    call = lambda model, x: jax.vmap(model)(x)
    return Model(), S, call


@program({"mlp/~/linear_0/w": "I", "mlp/~/linear_1/w": "H", "mlp/~/linear_2/w": "O", "mlp/~/linear_[01]/b": "V", "mlp/~/linear_2/b": "F"})  # fmt: skip
def haiku_mlp(n):
    return hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([n, n, 3])(x))), (
        floats(4, 5),
    )


@program({"multi_head_attention/(query|key|value)/w": "H", "multi_head_attention/linear/w": "H", "multi_head_attention/.*/b": "V", "linear/w": "I", "linear/b": "V", "linear_1/w": "O", "linear_1/b": "F"}, carries={r".*/query/.": 0.5})  # fmt: skip
def haiku_attention(n):
    def forward(x):
        x = hk.Linear(n)(x)
        attention = hk.MultiHeadAttention(2, n // 2, w_init=hk.initializers.Constant(0))
        return hk.Linear(3)(attention(x, x, x))

    return hk.transform(forward), S


@program(
    {
        "a/weight": "I",
        r"norm/(weight|bias)": "V",
        "b/layer/weight": "H",
        "c/weight": "O",
        r"(a|b/layer)/bias": "V",
        "c/bias": "F",
    }
)
def equinox_module_with_its_state(n):
    class Net(eqx.Module):
        a: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        b: eqx.nn.SpectralNorm
        c: eqx.nn.Linear

        def __init__(self, keys):
            self.a = eqx.nn.Linear(5, n, key=keys[0])
            self.norm = eqx.nn.BatchNorm(n, axis_name="batch", mode="batch")
            layer = eqx.nn.Linear(n, n, key=keys[1])
            self.b = eqx.nn.SpectralNorm(layer, "weight", key=keys[2])
            self.c = eqx.nn.Linear(n, 3, key=keys[3])

        def __call__(self, x, state):
            x, state = self.norm(self.a(x), state)
            x, state = self.b(jax.nn.relu(x), state)
            return self.c(jax.nn.relu(x)), state

    def call(pair, x):
        model, state = pair
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return run(x, state)[0]

    made = eqx.nn.make_with_state(Net)(jax.random.split(jax.random.key(0), 4))
    return made, (floats(4, 5),), call
