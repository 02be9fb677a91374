"""More programs of Flax NNX, Linen, Equinox and Haiku, as their users write them."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from .kit import floats, program, tokens

S = (floats(2, 6, 5),)
T = (tokens(2, 6),)
X = (floats(4, 5),)
IMAGE = (floats(2, 8, 8, 3),)
KEY = jax.random.key(0)


def dense(path, kernel, bias, end=""):
    """The letters of a layer with a bias."""
    return {f"{path}/kernel": kernel + end, f"{path}/bias": bias + end}


@program({**dense("inp", "I", "V"), **dense("cell/dense_i", "H", "V"), "cell/dense_h/kernel": "H", **dense("out", "O", "F")})  # fmt: skip
def nnx_gru_with_a_bidirectional_read(n):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inp = nnx.Linear(5, n, rngs=rngs)
            self.cell = nnx.GRUCell(n, n, rngs=rngs)
            self.out = nnx.Linear(2 * n, 3, rngs=rngs)

        def __call__(self, x):
            x = self.inp(x)
            there = nnx.RNN(self.cell)(x)
            back = nnx.RNN(self.cell, reverse=True, keep_order=True)(x)
            return self.out(jnp.concatenate([there, back], -1))

    return (lambda: Model(nnx.Rngs(0))), S


@program({"embed/embedding": "I", r"blocks/norm/scale": "Vb", "blocks/(q|k|v)/kernel": "Hb", "blocks/(up|gate)/kernel": "Hb", "blocks/(o|down)/kernel": "He", "norm/scale": "V", "head/kernel": "O"}, deep=True)  # fmt: skip
def nnx_scanned_decoder_with_remat(n, L):
    class Block(nnx.Module):
        def __init__(self, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
            self.q, self.k, self.v, self.o = (linear(n, n) for _ in range(4))
            self.up, self.gate, self.down = (
                linear(n, 2 * n),
                linear(n, 2 * n),
                linear(2 * n, n),
            )
            self.norm = nnx.RMSNorm(n, rngs=rngs)

        def __call__(self, x):
            y = self.norm(x)
            q, k, v = (m(y).reshape(2, 6, -1, 4) for m in (self.q, self.k, self.v))
            x = x + self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 6, n))  # fmt: skip
            y = self.norm(x)
            return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, n, rngs=rngs)
            make = nnx.vmap(lambda r: Block(r), in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(L))
            self.norm = nnx.RMSNorm(n, rngs=rngs)
            self.head = nnx.Linear(n, 7, use_bias=False, rngs=rngs)

        def __call__(self, x):
            step = nnx.remat(lambda x, block: block(x))
            scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(self.norm(scan(self.embed(x), self.blocks)))

    return (lambda: Model(nnx.Rngs(0))), T


@program({**dense("inp", "I", "V"), "lora/lora/lora_a": "O", "lora/lora/lora_b": "I", "lora/kernel": "H", "ein/kernel": "H", "ein/bias": "V", "gn/(scale|bias)": "V", **dense("out", "O", "F")})  # fmt: skip
def nnx_lora_einsum_and_group_norm(n):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inp = nnx.Linear(5, n, rngs=rngs)
            self.lora = nnx.LoRALinear(n, n, lora_rank=2, use_bias=False, rngs=rngs)
            self.ein = nnx.Einsum("btd,df->btf", (n, n), (n,), rngs=rngs)
            self.gn = nnx.GroupNorm(n, num_groups=2, rngs=rngs)
            self.out = nnx.Linear(n, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.lora(self.inp(x)))
            return self.out(self.gn(nnx.relu(self.ein(x))))

    return (lambda: Model(nnx.Rngs(0))), S


@program({**dense("conv", "I", "V"), **dense("down", "H", "V"), **dense("up", "H", "V"), "bn/(scale|bias)": "V", **dense("out", "O", "F")})  # fmt: skip
def nnx_convolutional_autoencoder(n):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, n, (3, 3), rngs=rngs)
            self.down = nnx.Conv(n, 2 * n, (3, 3), strides=2, rngs=rngs)
            self.bn = nnx.BatchNorm(2 * n, rngs=rngs)
            self.up = nnx.ConvTranspose(2 * n, n, (2, 2), strides=2, rngs=rngs)
            self.out = nnx.Conv(n, 3, (3, 3), rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.bn(self.down(nnx.relu(self.conv(x)))))
            return self.out(nnx.relu(self.up(x)))

    return (lambda: Model(nnx.Rngs(0))), IMAGE


# Flax stores the gain of WeightNorm as a plain array, which no optimizer trains, so the
# layer before carries the multiplier. Heads that this call leaves out are known layers.
@program(
    {
        **dense("patch", "I", "V"),
        r"blocks/\d/norm/(scale|bias)": "Vb",
        **dense(r"blocks/\d/up", "H", "V", "e"),
        r"blocks/\d/down/kernel": "Hb",
        r"blocks/\d/down/bias": "Ve",
        **dense("head", "O", "F"),
        **dense("lm_head", "O", "F"),
        "embed/embedding": "I",
    },
    deep=True,
)
def nnx_weight_norm_at_the_end_of_a_branch(n, L):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(n, rngs=rngs)
            self.up = nnx.Linear(n, 2 * n, rngs=rngs)
            self.down = nnx.Linear(2 * n, n, rngs=rngs)
            self.wn = nnx.WeightNorm(self.down, rngs=rngs)

        def __call__(self, x):
            return x + self.wn(nnx.relu(self.up(self.norm(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.patch = nnx.Linear(5, n, rngs=rngs)
            self.blocks = nnx.List(Block(rngs) for _ in range(L))
            self.head = nnx.Linear(n, 3, rngs=rngs)
            self.embed = nnx.Embed(9, n, rngs=rngs)
            self.lm_head = nnx.Linear(n, 9, rngs=rngs)

        def __call__(self, x):
            x = self.patch(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return (lambda: Model(nnx.Rngs(0))), S


def spectral(path, letter, bias):
    return dense(f"{path}/layer_instance", letter, bias)


# The stored vector of the power iteration is no activation. A unit largest singular
# value makes the entries of kernels shrink that have more outputs than inputs.
@program(
    {
        **spectral("inp", "I", "V"),
        **spectral("wide", "H", "V"),
        **spectral("out", "O", "F"),
    },
    # Between linear layers and ReLU only, values may shrink; so do biases.
    carries={"(inp|wide)/.*bias": 0.5},
)
def nnx_discriminator_with_spectral_norms(n):
    class Model(nnx.Module):
        def __init__(self, rngs):
            for name, sizes in {"inp": (5, n), "wide": (n, 2 * n), "out": (2 * n, 3)}.items():  # fmt: skip
                norm = nnx.SpectralNorm(nnx.Linear(*sizes, rngs=rngs), rngs=rngs)
                setattr(self, name, norm)

        def __call__(self, x):
            x = nnx.relu(self.inp(x, update_stats=True))
            x = nnx.relu(self.wide(x, update_stats=True))
            return self.out(x, update_stats=True)

    return (lambda: Model(nnx.Rngs(0))), X


class Normed(eqx.Module):
    inp: eqx.nn.Linear
    blocks: list[list[eqx.Module]]
    out: eqx.nn.Linear

    def __init__(self, n, L):
        linear = functools.partial(eqx.nn.Linear, key=KEY)
        down = functools.partial(eqx.nn.WeightNorm, weight_name="weight")
        self.inp, self.out = linear(5, n), linear(n, 3)
        self.blocks = [[linear(n, n), down(linear(n, n))] for _ in range(L)]

    def __call__(self, x):
        x = self.inp(x)
        for up, down in self.blocks:
            x = x + down(jax.nn.relu(up(x)))
        return self.out(x)


# Equinox multiplies by the gain before it divides by the norm.
@program(
    {
        "inp/weight": "I",
        "inp/bias": "V",
        r"blocks/\d/0/weight": "Hb",
        r"blocks/\d/0/bias": "Vb",
        r"blocks/\d/1/layer/weight": "Hb",
        r"blocks/\d/1/(g|layer/bias)": "Ve",
        "out/weight": "O",
        "out/bias": "F",
    },
    deep=True,
)
def equinox_weight_norm_at_the_end_of_a_branch(n, L):
    return Normed(n, L), (floats(5),)


class Masked(eqx.Module):
    embed: eqx.nn.Linear
    decode: eqx.nn.Linear
    mask: jax.Array

    def __init__(self, n):
        self.embed = eqx.nn.Linear(5, n, key=KEY)
        self.decode = eqx.nn.Linear(n, 5, key=KEY)
        self.mask = jnp.zeros((1, 1, n))

    def __call__(self, x, masks=None):
        x = jax.vmap(jax.vmap(self.embed))(x)
        return x if masks is None else jnp.where(masks[..., None], self.mask, x)


@program(
    {
        "embed/weight": "I",
        "embed/bias|mask": "V",
        "decode/weight": "O",
        "decode/bias": "F",
    },
    asks=r"does not use 'mask'; pass call=.*axes=\{r'\^mask\$': 'a b d'\}",
)
def equinox_with_a_token_that_is_used_with_masks(n, remedy=False):
    masks = jax.ShapeDtypeStruct((2, 6), bool)
    return (lambda: Masked(n)), (*S, masks) if remedy else S


@program({**dense("shared", "I", "V"), **dense("actor", "O", "F"), **dense("critic/0", "H", "V"), **dense("critic/1", "O", "F"), "log_std": "F"})  # fmt: skip
def nnx_actor_critic_by_call(n):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.shared = nnx.Linear(5, n, rngs=rngs)
            self.actor = nnx.Linear(n, 2, rngs=rngs)
            self.critic = nnx.List([nnx.Linear(n, n, rngs=rngs), nnx.Linear(n, 1, rngs=rngs)])  # fmt: skip
            self.log_std = nnx.Param(jnp.zeros(2))

    def call(model, x, action):
        h = nnx.tanh(model.shared(x))
        mean, std = model.actor(h), jnp.exp(model.log_std[...])
        value = model.critic[1](nnx.tanh(model.critic[0](h)))[:, 0]
        logp = -0.5 * (((action - mean) / std) ** 2).sum(-1) - jnp.log(std).sum()
        return (-logp + value**2).mean()

    return (lambda: Model(nnx.Rngs(0))), (*X, floats(4, 2)), call


@program({"Embed_0/embedding": "I", "pos": "V", r"Layer_\d/LayerNorm_\d/(scale|bias)": "Vb", r"Layer_\d/\w+Attention_0/(query|key|value)/kernel": "Hb", r"Layer_\d/\w+Attention_0/(query|key|value)/bias": "Vb", r"Layer_\d/\w+Attention_0/out/kernel": "He", r"Layer_\d/\w+Attention_0/out/bias": "Ve", **dense(r"Layer_\d/Mlp_0/Dense_1", "H", "V", "b"), **dense(r"Layer_\d/Mlp_0/Dense_0", "H", "V", "e"), "LayerNorm_0/(scale|bias)": "V", **dense("Dense_0", "O", "F")}, deep=True)  # fmt: skip
def linen_compact_transformer(n, L):
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(n)(nn.gelu(nn.Dense(4 * n)(x)))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(n // 4)(y, y, mask=mask)
            return x + Mlp()(nn.LayerNorm()(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(x)
            pos = self.param("pos", nn.initializers.zeros, (1, 6, n))
            x = nn.Embed(7, n)(x) + pos
            for _ in range(L):
                x = Layer()(x, mask)
            return nn.Dense(7)(nn.LayerNorm()(x))

    return Model(), T


@program({**dense("Dense_0", "I", "V"), **dense("Dense_(2|4|6|8|10|12)", "H", "V", "b"), **dense("Dense_(1|3|5|7|9|11)", "H", "V", "e"), **dense("Readout_0", "O", "F")}, deep=True)  # fmt: skip
def linen_residual_mlp_of_numbered_layers(n, L):
    class Readout(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (n, 3))
            return x @ kernel + self.param("bias", nn.initializers.zeros, (3,))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(n)(x)
            for _ in range(L):
                x = x + nn.Dense(n)(nn.relu(nn.Dense(n)(x)))
            return Readout()(x)

    return Model(), X


# A wrapped layer is named in its wrapper, by a number of its own.
@program({"inp/kernel": "I", r"LayerNorm_\d+/(scale|bias)": "Vb", r"Dense_\d+/kernel": "Hb", r"Dense_\d*[13579]/bias": "Ve", r"Dense_\d*[02468]/bias": "Vb", r"WeightNorm_\d*[13579]/.*/kernel/scale": "Ve", r"WeightNorm_\d*[02468]/.*/kernel/scale": "Vb", "out/kernel": "O"}, deep=True)  # fmt: skip
def linen_weight_norms_in_one_module(n, L):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(n, use_bias=False, name="inp")(x)
            for _ in range(L):
                inner, outer = nn.Dense(2 * n), nn.Dense(n)
                y = nn.relu(nn.WeightNorm(inner)(nn.LayerNorm()(x)))
                x = x + nn.WeightNorm(outer)(y)
            return nn.Dense(3, use_bias=False, name="out")(x)

    return Model(), S


@program({**dense("Dense_0", "I", "V"), **dense("Dense_(1|3|5|7|9|11)", "H", "V", "b"), **dense("Dense_(2|4|6|8|10|12)", "H", "V", "e"), **dense("Dense_13", "O", "F")}, deep=True)  # fmt: skip
def linen_compact_list_of_one_class_with_several_kinds(n, L):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(n)(x)
            for _ in range(L):
                y = nn.relu(nn.Dense(4 * n)(x))
                x = x + nn.Dense(n)(y)
            return nn.Dense(3)(x)

    return Model(), X


@program({"Conv_0/kernel": "I", r"Block_\d/Conv_0/kernel": "Hb", r"Block_\d/Conv_1/kernel": "Hb", r"Block_\d/BatchNorm_0/.*": "Vb", r"Block_\d/BatchNorm_1/.*": "Ve", "BatchNorm_0/.*": "V", **dense("Dense_0", "O", "F")}, deep=True)  # fmt: skip
def linen_resnet_with_batch_statistics(n, L):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = functools.partial(nn.BatchNorm, use_running_average=False)
            y = nn.relu(norm()(nn.Conv(n, (3, 3), use_bias=False)(x)))
            y = norm(scale_init=nn.initializers.zeros)(
                nn.Conv(n, (3, 3), use_bias=False)(y)
            )
            return nn.relu(x + y)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(n, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            for _ in range(L):
                x = Block()(x)
            return nn.Dense(3)(x.mean((1, 2)))

    return Model(), IMAGE


@program({"Conv_0/kernel": "I", r"[ab]\d/Conv_[01]/kernel": "Hb", r"[ab]\d/BatchNorm_0/.*": "Vb", r"[ab]\d/BatchNorm_1/.*": "Ve", "b0/Conv_2/kernel": "H", "b0/BatchNorm_2/.*": "V", **dense("Dense_0", "O", "F")}, deep=True)  # fmt: skip
def linen_resnet_whose_shortcuts_have_batch_statistics(n, L):
    class Block(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            def conv(x, *size):
                x = nn.Conv(self.width, size, use_bias=False)(x)
                return nn.BatchNorm(use_running_average=False)(x)

            y = conv(nn.relu(conv(x, 3, 3)), 3, 3)
            return nn.relu(y + (x if x.shape == y.shape else conv(x, 1, 1)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(n, (3, 3), use_bias=False)(x))
            for stage, width in (("a", n), ("b", 2 * n)):
                for i in range(L):
                    x = Block(width, name=f"{stage}{i}")(x)
            return nn.Dense(3)(x.mean((1, 2)))

    return Model(), IMAGE


def _numbers(k, strided=False):
    """Of the k-th layers of blocks: six, one with a stride, and six more."""
    return "|".join(str(1 + 3 * i + k) for i in range(13) if (i == 6) == strided)


@program(
    {
        "Conv_0/kernel": "I",
        rf"Conv_({_numbers(0)}|{_numbers(2)})/kernel": "Hb",
        rf"Conv_({_numbers(0, True)}|{_numbers(2, True)})/kernel": "H",
        rf"Conv_({_numbers(1)})/kernel": "I|Vb",
        rf"Conv_({_numbers(1, True)})/kernel": "I|V",
        r"[ab]\d+/.*": "Vb",
        r"c\d+/.*": "Ve",
        r"(stem|strided.)/.*": "V",
        **dense("Dense_0", "O", "F"),
    },
    deep=True,
)
def linen_inverted_bottlenecks_in_one_module(n, L):
    """Layers with kernels of one shape average over different numbers of places."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            def conv(x, name, width, size=1, **options):
                x = nn.Conv(width, (size, size), use_bias=False, **options)(x)
                return nn.BatchNorm(use_running_average=False, name=name)(x)

            x = nn.relu(conv(x, "stem", n, 3))
            for i in range(2 * L + 1):
                names = [f"strided{k}" if i == L else f"{k}{i}" for k in "abc"]
                wide, width = 4 * x.shape[-1], n if i < L else 2 * n
                y = nn.relu(conv(x, names[0], wide))
                options = dict(feature_group_count=wide, strides=1 + (i == L))
                y = nn.relu(conv(y, names[1], wide, 3, **options))
                y = conv(y, names[2], width)
                x = x + y if x.shape == y.shape else y
            return nn.Dense(3)(x.mean((1, 2)))

    return Model(), IMAGE


@program({**dense("VmapMlp_0/Dense_0", "I", "V"), **dense("VmapMlp_0/Dense_2", "H", "V"), **dense("VmapMlp_0/Dense_1", "O", "F")})  # fmt: skip
def linen_ensemble_under_vmap(n):
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(n)(x))
            return nn.Dense(1)(nn.relu(nn.Dense(n)(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            many = nn.vmap(Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4)  # fmt: skip
            return many(name="VmapMlp_0")(x).mean(0)

    return Model(), X


@program({"embed/embedding": "I", r"layer_\d/(query|key|value)/kernel": "Hb", r"layer_\d/attn_out/kernel": "He", r"layer_\d/(wi_0|wi_1)/kernel": "Hb", r"layer_\d/wo/kernel": "He", r"layer_\d/pre\d/scale": "Vb", "norm/scale": "V"}, deep=True, carries={"norm/scale": 0.25})  # fmt: skip
def linen_setup_decoder_with_tied_embedding(n, L):
    class Layer(nn.Module):
        def setup(self):
            general = functools.partial(nn.DenseGeneral, use_bias=False)
            self.query, self.key, self.value = (general((n // 4, 4)) for _ in range(3))
            self.attn_out = general(n, axis=(-2, -1))
            self.wi_0, self.wi_1, self.wo = general(2 * n), general(2 * n), general(n)
            self.pre0, self.pre1 = nn.RMSNorm(), nn.RMSNorm()

        def __call__(self, x):
            y = self.pre0(x)
            y = nn.dot_product_attention(self.query(y), self.key(y), self.value(y))
            x = x + self.attn_out(y)
            y = self.pre1(x)
            return x + self.wo(nn.silu(self.wi_0(y)) * self.wi_1(y))

    class Model(nn.Module):
        def setup(self):
            self.embed, self.norm = nn.Embed(7, n), nn.RMSNorm()
            self.layer = [Layer() for _ in range(L)]

        def __call__(self, x):
            x = self.embed(x)
            for layer in self.layer:
                x = layer(x)
            return self.embed.attend(self.norm(x))

    return Model(), T


@program({"Embed_0/embedding": "I", r".*GRUCell_0/i./kernel": "H", r".*GRUCell_0/h./kernel": "H", ".*GRUCell_0/.*/bias": "V", **dense("Dense_0", "O", "F"), "SpectralNorm_0/.*": "F"})  # fmt: skip
def linen_gru_language_model(n):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(7)(nn.RNN(nn.GRUCell(n))(nn.Embed(7, n)(x)))

    return Model(), T


@program({"conv1/weight": "I", "conv2/weight": "H", "conv1/bias|conv2/bias": "V", "fc/weight": "O", "fc/bias": "F", "prelu/.*": "F", "gn/.*": "V"})  # fmt: skip
def equinox_convolutional_network(n):
    class Model(eqx.Module):
        conv1: eqx.nn.Conv2d
        conv2: eqx.nn.Conv2d
        gn: eqx.nn.GroupNorm
        prelu: eqx.nn.PReLU
        pool: eqx.nn.MaxPool2d
        fc: eqx.nn.Linear

        def __init__(self):
            self.conv1 = eqx.nn.Conv2d(3, n, 3, padding=1, key=KEY)
            self.conv2 = eqx.nn.Conv2d(n, 2 * n, 3, padding=1, key=KEY)
            self.gn, self.prelu = eqx.nn.GroupNorm(2, n), eqx.nn.PReLU()
            self.pool, self.fc = (
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Linear(2 * n, 3, key=KEY),
            )

        def __call__(self, x):
            x = self.pool(self.prelu(self.gn(self.conv1(x))))
            return self.fc(jax.nn.relu(self.conv2(x)).mean((1, 2)))

    return Model, (floats(3, 8, 8),)


@program({"cell/weight_ih": "I", "cell/weight_hh": "H", "cell/bias|cell/bias_n": "V", "out/weight": "O", "out/bias": "F"})  # fmt: skip
def equinox_gru_in_a_scan(n):
    class Model(eqx.Module):
        cell: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __call__(self, x):
            step = lambda h, x: (self.cell(x, h), None)
            return self.out(jax.lax.scan(step, jnp.zeros(n), x)[0])

    make = lambda: Model(eqx.nn.GRUCell(5, n, key=KEY), eqx.nn.Linear(n, 3, key=KEY))
    return make, (floats(6, 5),)


@program({"embed/weight": "I", "position": "V", "blocks/.*norm./weight": "Vb", "blocks/attention/(query|key|value)_proj/weight": "Hb", "blocks/attention/output_proj/weight": "He", "blocks/up/weight": "Hb", "blocks/up/bias": "Vb", "blocks/down/weight": "He", "blocks/down/bias": "Ve", "norm/weight": "V", "head/weight": "O"}, deep=True)  # fmt: skip
def equinox_blocks_stacked_by_filter_vmap(n, L):
    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norm1: eqx.nn.RMSNorm
        norm2: eqx.nn.RMSNorm

        def __init__(self, key):
            self.attention = eqx.nn.MultiheadAttention(n // 4, n, key=key)
            self.up, self.down = eqx.nn.Linear(n, 4 * n, key=key), eqx.nn.Linear(4 * n, n, key=key)  # fmt: skip
            self.norm1, self.norm2 = (
                eqx.nn.RMSNorm(n, use_bias=False) for _ in range(2)
            )

        def __call__(self, x):
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((6, 6), bool)))
            y = jax.vmap(self.norm2)(x)
            return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(y))))(y)

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        position: jax.Array
        blocks: Block
        norm: eqx.nn.RMSNorm
        head: eqx.nn.Linear

        def __init__(self):
            self.embed = eqx.nn.Embedding(7, n, key=KEY)
            self.position = jnp.zeros((6, n))
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(KEY, L))
            self.norm = eqx.nn.RMSNorm(n, use_bias=False)
            self.head = eqx.nn.Linear(n, 7, use_bias=False, key=KEY)

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens) + self.position
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            step = lambda x, b: (eqx.combine(b, static)(x), None)
            x, _ = jax.lax.scan(step, x, arrays)
            return jax.vmap(lambda x: self.head(self.norm(x)))(x)

    return Model, T, lambda model, x: jax.vmap(model)(x)


@program({"embed/weight": "I", "h/weight": "H", "h/bias": "V"}, carries={"h/.*": 0.25})  # fmt: skip
def equinox_shared_embedding_and_readout(n):
    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        h: eqx.nn.Linear

        def __call__(self, x):
            return self.embed.weight @ self.h(jnp.tanh(self.embed(x)))

    make = lambda: Model(eqx.nn.Embedding(7, n, key=KEY), eqx.nn.Linear(n, n, key=KEY))
    return make, (tokens(),)


@program({r"patch/weight": "I", r"patch/bias": "V", r"blocks/\d/patch_mixer/layers/\d/weight": "Fb", r"blocks/\d/patch_mixer/layers/0/bias": "Fb", r"blocks/\d/patch_mixer/layers/1/(bias)": "Fb", r"blocks/\d/hidden_mixer/layers/0/weight": "Hb", r"blocks/\d/hidden_mixer/layers/0/bias": "Vb", r"blocks/\d/hidden_mixer/layers/1/weight": "Hb", r"blocks/\d/hidden_mixer/layers/1/bias": "Vb", r"(blocks/\d/)?norm\d?/(weight|bias)": "V", "head/.*": "O|F"})  # fmt: skip
def equinox_mixer_with_affine_norms(n):
    class Block(eqx.Module):
        patch_mixer: eqx.nn.MLP
        hidden_mixer: eqx.nn.MLP
        norm1: eqx.nn.LayerNorm

        def __init__(self, key):
            self.patch_mixer = eqx.nn.MLP(16, 16, 8, depth=1, key=key)
            self.hidden_mixer = eqx.nn.MLP(n, n, 2 * n, depth=1, key=key)
            self.norm1 = eqx.nn.LayerNorm((n, 16))

        def __call__(self, y):
            y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
            y = y.T
            return (y + jax.vmap(self.hidden_mixer)(y)).T

    class Model(eqx.Module):
        patch: eqx.nn.Conv2d
        blocks: list
        head: eqx.nn.Linear

        def __init__(self):
            self.patch = eqx.nn.Conv2d(3, n, 2, stride=2, key=KEY)
            self.blocks = [Block(KEY) for _ in range(2)]
            self.head = eqx.nn.Linear(n, 3, key=KEY)

        def __call__(self, x):
            x = self.patch(x).reshape(n, 16)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    return Model, (floats(3, 8, 8),)


@program({"embed/embeddings": "I", r"layer.*/(query|key|value)/w": "Hb", r"layer.*attention/linear/w": "He", r"layer.*/mlp/~/linear_0/w": "Hb", r"layer.*/mlp/~/linear_0/b": "Vb", r"layer.*/mlp/~/linear_1/w": "He", r"layer.*/mlp/~/linear_1/b": "Ve", r"layer.*/(layer|rms)_norm/(scale|offset)": "Vb", "positions": "V", "~/positions": "V", "logits/w": "O", "logits/b": "F"}, deep=True, carries={"layer.*/query/w": 0.5})  # fmt: skip
def haiku_transformer_of_modules(n, L):
    init = hk.initializers.Constant(0)

    class Layer(hk.Module):
        def __call__(self, x):
            y = hk.RMSNorm(-1)(x)
            x = x + hk.MultiHeadAttention(2, n // 2, w_init=init, model_size=n, with_bias=False, name="attention")(y, y, y)  # fmt: skip
            y = hk.LayerNorm(-1, True, True)(x)
            return x + hk.nets.MLP([4 * n, n], activation=jax.nn.gelu)(y)

    def forward(x):
        x = hk.Embed(7, n, name="embed")(x)
        x = x + hk.get_parameter("positions", (6, n), init=jnp.zeros)
        for _ in range(L):
            x = Layer()(x)
        return hk.Linear(7, name="logits")(x)

    return hk.without_apply_rng(hk.transform(forward)), T


@program({"linear/w": "O", "linear/b": "F", r"__layer_stack_no_per_layer/.*linear/w": "He", r"__layer_stack_no_per_layer/.*linear/b": "Ve", r"__layer_stack_no_per_layer/.*linear_1/w": "Hb", r"__layer_stack_no_per_layer/.*linear_1/b": "Vb", "linear_1/w": "I", "linear_1/b": "V"}, deep=True)  # fmt: skip
def haiku_layer_stack(n, L):
    def forward(x):
        @hk.experimental.layer_stack(L)
        def block(x):
            return x + hk.Linear(n)(jax.nn.relu(hk.Linear(2 * n)(x)))

        return hk.Linear(3)(block(hk.Linear(n)(x)))

    return hk.without_apply_rng(hk.transform(forward)), X


@program({"first/w": "I", r"block(_\d+)?/conv_[ab]/w": "Hb", r"block(_\d+)?/norm_a/.*": "Vb", r"block(_\d+)?/norm_b/.*": "Ve", "linear/w": "O", "linear/b": "F"}, deep=True)  # fmt: skip
def haiku_residual_convolutions_with_batch_norms_in_training(n, L):
    class Block(hk.Module):
        def __call__(self, x):
            y = x
            for name in "ab":
                y = hk.Conv2D(n, 3, with_bias=False, name=f"conv_{name}")(y)
                y = hk.BatchNorm(True, True, 0.9, name=f"norm_{name}")(y, True)
                y = jax.nn.relu(y) if name == "a" else y
            return x + y

    def forward(x):
        x = hk.Conv2D(n, 3, with_bias=False, name="first")(x)
        for _ in range(3 * L):
            x = jax.nn.relu(Block(name="block")(x))
        return hk.Linear(3)(x.mean((1, 2)))

    return hk.without_apply_rng(hk.transform_with_state(forward)), IMAGE


@program({"conv2_d/w": "I", "conv2_d/b": "V", "conv2_d_1/w": "H", "conv2_d_1/b": "V", "batch_norm/.*": "V", "linear/w": "O", "linear/b": "F"})  # fmt: skip
def haiku_convolutions_with_state(n):
    def forward(x):
        x = jax.nn.relu(hk.Conv2D(n, 3)(x))
        x = hk.BatchNorm(True, True, 0.9)(
            hk.Conv2D(2 * n, 3, stride=2)(x), is_training=True
        )
        return hk.Linear(3)(jax.nn.relu(x).mean((1, 2)))

    return hk.transform_with_state(forward), IMAGE


@program({"first/w": "I", "first/b": "V", r"b\d/(query|key|value)/w": "Hb", r"b\d/(query|key|value)/b": "Vb", r"b\d/linear/w": "He", r"b\d/linear/b": "Ve", "last/w": "O", "last/b": "F"}, deep=True)  # fmt: skip
def haiku_attention_that_where_leaves_out(n, L):
    def forward(x):
        x = hk.Linear(n, name="first")(x)
        for i in range(L):
            init = hk.initializers.VarianceScaling()
            block = hk.MultiHeadAttention(n // 4, 4, w_init=init, name=f"b{i}")
            keep = jax.random.bernoulli(hk.next_rng_key(), 0.9)
            x = jnp.where(keep, x + block(x, x, x), x)
        return hk.Linear(3, name="last")(x)

    return hk.transform(forward), S


@program(
    {"gru/w_i": "I", "gru/w_h": "H", "gru/b": "V", "linear/w": "O", "linear/b": "F"}
)
def haiku_gru_with_unroll(n):
    def forward(x):
        core = hk.GRU(n)
        ys, _ = hk.dynamic_unroll(core, x, core.initial_state(2), time_major=False)
        return hk.Linear(3)(ys)

    return hk.transform(forward), S


@program({"enc/w": "I", "enc/b": "V", "vq/embeddings": "F", "to/w": "O", "to/b": "F", "dec/w": "I", "dec/b": "V", "out/w": "O", "out/b": "F"})  # fmt: skip
def haiku_vector_quantizer(n):
    def forward(x):
        h = jax.nn.relu(hk.Linear(n, name="enc")(x))
        z = hk.Linear(4, name="to")(h)
        z = hk.nets.VectorQuantizer(4, 9, 0.25, name="vq")(z, is_training=True)[
            "quantize"
        ]
        return hk.Linear(3, name="out")(jax.nn.relu(hk.Linear(n, name="dec")(z)))

    return hk.transform(forward), X


@program(
    {
        r"blocks/(up|gate)/kernel": "Hb",
        r"blocks/down/kernel": "He",
        r"blocks/norm/scale": "Vb",
        r"blocks/att/(query|key|value)/kernel": "Hb",
        r"blocks/att/(query|key|value)/bias": "Vb",
        "blocks/att/out/kernel": "He",
        "blocks/att/out/bias": "Ve",
        "embed/embedding": "I",
        "head/kernel": "O",
        "head/bias": "F",
        "norm/scale": "V",
    },
    deep=True,
)
def nnx_vmapped_blocks_and_nnx_scan(n, L):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(n, rngs=rngs)
            self.att = nnx.MultiHeadAttention(n // 4, n, decode=False, rngs=rngs)
            self.gate = nnx.Linear(n, 2 * n, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(n, 2 * n, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(2 * n, n, use_bias=False, rngs=rngs)

        def __call__(self, x):
            x = x + self.att(self.norm(x))
            return x + self.down(nnx.silu(self.gate(x)) * self.up(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, n, rngs=rngs)

            @nnx.split_rngs(splits=L)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return Block(rngs)

            self.blocks = make(rngs)
            self.norm = nnx.RMSNorm(n, rngs=rngs)
            self.head = nnx.Linear(n, 7, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, block):
                return block(x)

            return self.head(self.norm(forward(self.embed(x), self.blocks)))

    return (lambda: Model(nnx.Rngs(0))), T


@program(
    {
        r"CheckpointBlock_\d/MultiHead\w+/(query|key|value)/kernel": "Hb",
        r"CheckpointBlock_\d/MultiHead\w+/(query|key|value)/bias": "Vb",
        r"CheckpointBlock_\d/MultiHead\w+/out/kernel": "He",
        r"CheckpointBlock_\d/MultiHead\w+/out/bias": "Ve",
        r"CheckpointBlock_\d/LayerNorm_\d/(scale|bias)": "Vb",
        r"CheckpointBlock_\d/Dense_0/kernel": "Hb",
        r"CheckpointBlock_\d/Dense_0/bias": "Vb",
        r"CheckpointBlock_\d/Dense_1/kernel": "He",
        r"CheckpointBlock_\d/Dense_1/bias": "Ve",
        "Dense_0/kernel": "I",
        "Dense_0/bias": "V",
        "Dense_1/kernel": "O",
        "Dense_1/bias": "F",
        "pos|LayerNorm_0/.*": "V",
    },
    deep=True,
)
def linen_encoder_with_numbered_blocks_and_dropout(n, L):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(n // 4, dropout_rate=0.1)(
                y, y, deterministic=not train
            )
            x = x + nn.Dropout(0.1)(y, deterministic=not train)
            y = nn.Dense(4 * n)(nn.LayerNorm()(x))
            y = nn.Dense(n)(nn.Dropout(0.1)(nn.gelu(y), deterministic=not train))
            return x + y

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.Dense(n)(x)
            x = x + self.param("pos", nn.initializers.normal(0.02), (1, 6, n))
            for _ in range(L):
                x = nn.remat(Block, static_argnums=(2,))()(x, train)
            return nn.Dense(3)(nn.LayerNorm()(x).mean(1))

    return Model(), S, lambda model, x: model(x, train=True)


@program(
    {
        "Embed_0/embedding": "I",
        "layers/(q|k|v|wi0|wi1)/kernel": "Hb",
        "layers/(o|wo)/kernel": "He",
        r"layers/RMSNorm_\d/scale": "Vb",
        "final/scale": "V",
    },
    deep=True,
    carries={"final/scale": 0.25},
)
def linen_scan_with_remat_and_partitioned_params(n, L):
    init = lambda *names: nn.with_logical_partitioning(
        nn.initializers.lecun_normal(), names
    )

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.RMSNorm()(x)
            q, k, v = (
                nn.DenseGeneral(
                    (n // 4, 4),
                    use_bias=False,
                    kernel_init=init("embed", "heads", "kv"),
                    name=c,
                )(y)
                for c in "qkv"
            )
            y = nn.dot_product_attention(
                q, k, v, mask=nn.make_causal_mask(jnp.ones(x.shape[:2]))
            )
            y = nn.DenseGeneral(
                n,
                axis=(-2, -1),
                use_bias=False,
                kernel_init=init("heads", "kv", "embed"),
                name="o",
            )(y)
            x = nn.with_logical_constraint(x + y, ("batch", "time", "embed"))
            y = nn.RMSNorm()(x)
            h = nn.silu(nn.Dense(2 * n, use_bias=False, name="wi0")(y)) * nn.Dense(
                2 * n, use_bias=False, name="wi1"
            )(y)
            return x + nn.Dense(n, use_bias=False, name="wo")(h), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            emb = nn.Embed(7, n, embedding_init=init("vocab", "embed"))
            x = emb(ids)
            B = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=L,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = B(name="layers")(x, None)
            x = nn.RMSNorm(name="final")(x)
            return emb.attend(x) / 4**0.5

    return Model(), T


@program(
    {
        r"layers/0/weight": "I",
        r"layers/1/weight": "H",
        r"layers/2/weight": "O",
        r"layers/[01]/bias": "V",
        r"layers/2/bias": "F",
    }
)
def equinox_ensemble_by_filter_vmap(n):
    m = eqx.filter_vmap(lambda k: eqx.nn.MLP(5, 3, n, 2, key=k))(
        jax.random.split(KEY, 4)
    )

    def call(m, x):
        f = eqx.filter_vmap(
            lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None)
        )
        return f(m, x).mean(0)

    return m, X, call


@program(
    {
        "linear/w": "I",
        "linear/b": "V",
        r"lstm(_1)?/linear/w": "H",
        r"lstm(_1)?/linear/b": "V",
        "linear_1/w": "O",
        "linear_1/b": "F",
    }
)
def haiku_deep_rnn_with_lstm_and_skips(n):
    def forward(x):
        core = hk.DeepRNN([hk.Linear(n), hk.LSTM(n), hk.LSTM(n), hk.Linear(3)])
        y, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(2))
        return y

    return hk.without_apply_rng(hk.transform(forward)), S


@program(
    {"embed/embedding": "I", "norm/(scale|bias)": "V", "mix/kernel": "H"},
    carries={"embed/embedding": 0.25},  # before a norm, so that the input stays
)
def linen_that_returns_what_its_tied_logits_are_made_of(n):
    class Model(nn.Module):
        def setup(self):
            self.embed = nn.Embed(9, n)
            self.mix = nn.Dense(n, use_bias=False)
            self.norm = nn.LayerNorm()

        def __call__(self, tokens):
            x = self.norm(nn.relu(self.mix(self.embed(tokens))))
            return self.embed.attend(x), {"pre_logits": x}

    return Model(), T


@program({**dense("Dense_0", "I", "V"), "GRU/.*kernel": "H", "GRU/.*bias": "V", **dense("Dense_1", "O", "F")})  # fmt: skip
def linen_cell_whose_first_state_is_made_by_call(n):
    class Actor(nn.Module):
        width: int

        @nn.compact
        def __call__(self, state, x):
            x = nn.relu(nn.Dense(self.width)(x))
            state, x = nn.GRUCell(self.width, name="GRU")(state, x)
            return state, nn.Dense(3)(x)

    def call(model, x):
        return model(jnp.zeros((2, model.width)), x)

    return Actor(n), (floats(2, 5),), call
