"""The networks of the speed benchmarks in plain Flax NNX, without mupax.

Parameters are float32; `dtype` is that of the computation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def attend(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t k d"],
    value: Float[Array, "b t k d"],
    *,
    causal: bool = False,
) -> Float[Array, "b t h d"]:
    """Softmax attention; flash attention for bfloat16 on GPUs."""
    flash = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    how = "cudnn" if flash else "xla"
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation=how
    )


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch normalization."""

    def __init__(
        self, before: int, after: int, size: int, stride: int, dtype: Any, rngs: Any
    ):
        self.conv = nnx.Conv(
            before,
            after,
            (size, size),
            strides=stride,
            padding=(size - 1) // 2,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            after, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    """Convolutions with a shortcut: two of 3x3, or a bottleneck of ResNet-50."""

    def __init__(
        self,
        before: int,
        width: int,
        stride: int,
        bottleneck: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        after = 4 * width if bottleneck else width
        sizes = [(before, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            sizes = [
                (before, width, 1, 1),
                (width, width, 3, stride),
                (width, after, 1, 1),
            ]
        self.layers = nnx.List(ConvNorm(*size, dtype, rngs) for size in sizes)
        projects = stride != 1 or before != after
        self.shortcut = (
            ConvNorm(before, after, 1, stride, dtype, rngs) if projects else None
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        h = x
        for layer in self.layers[:-1]:
            h = jax.nn.relu(layer(h))
        h = self.layers[-1](h)
        return jax.nn.relu(h + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """ResNet-18 with the stem for images of 32 pixels, or ResNet-50."""

    def __init__(
        self, *, depth: int, classes: int, rngs: nnx.Rngs, dtype: Any = jnp.float32
    ):
        self.large = depth == 50
        counts = (3, 4, 6, 3) if self.large else (2, 2, 2, 2)
        size, stride = (7, 2) if self.large else (3, 1)
        self.stem = ConvNorm(3, 64, size, stride, dtype, rngs)
        blocks, before = [], 64
        for stage, count in enumerate(counts):
            width = 64 * 2**stage
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(
                    ResidualBlock(before, width, stride, self.large, dtype, rngs)
                )
                before = 4 * width if self.large else width
        self.blocks = nnx.List(blocks)
        self.readout = nnx.Linear(before, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = jax.nn.relu(self.stem(x))
        if self.large:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.readout(x.mean(axis=(1, 2)))


class EncoderBlock(nnx.Module):
    """Pre-LN attention and MLP, of ViT and GPT-2."""

    def __init__(
        self,
        width: int,
        heads: int,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        *,
        causal: bool = False,
    ):
        self.causal = causal
        kinds: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-6, **kinds)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-6, **kinds)
        split = (heads, width // heads)
        self.query = nnx.LinearGeneral(width, split, **kinds)
        self.key = nnx.LinearGeneral(width, split, **kinds)
        self.value = nnx.LinearGeneral(width, split, **kinds)
        self.out = nnx.LinearGeneral(split, width, axis=(-2, -1), **kinds)
        self.up = nnx.Linear(width, 4 * width, **kinds)
        self.down = nnx.Linear(4 * width, width, **kinds)

    def __call__(self, x: Float[Array, "b t n"]) -> Float[Array, "b t n"]:
        h = self.norm1(x)
        h = attend(self.query(h), self.key(h), self.value(h), causal=self.causal)
        x = x + self.out(h)
        h = jax.nn.gelu(self.up(self.norm2(x)), approximate=self.causal)
        return x + self.down(h)


class ViT(nnx.Module):
    """A vision transformer with a class token."""

    def __init__(
        self,
        *,
        pixels: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
    ):
        side = (patch, patch)
        self.patches = nnx.Conv(3, width, side, strides=side, dtype=dtype, rngs=rngs)
        count = (pixels // patch) ** 2 + 1
        normal = jax.random.normal(rngs.params(), (count, width))
        self.position = nnx.Param(0.02 * normal)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.blocks = nnx.List(
            EncoderBlock(width, heads, rngs, dtype) for _ in range(depth)
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.readout = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        x = x + self.position[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x[:, 0]))


class LlamaBlock(nnx.Module):
    """RMSNorm, rotary grouped-query attention and a gated MLP."""

    def __init__(
        self, width: int, heads: int, kv: int, hidden: int, rngs: nnx.Rngs, dtype: Any
    ):
        kinds: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        plain = {"use_bias": False, **kinds}
        self.norm1 = nnx.RMSNorm(width, epsilon=1e-5, **kinds)
        self.norm2 = nnx.RMSNorm(width, epsilon=1e-5, **kinds)
        dim = width // heads
        self.query = nnx.LinearGeneral(width, (heads, dim), **plain)
        self.key = nnx.LinearGeneral(width, (kv, dim), **plain)
        self.value = nnx.LinearGeneral(width, (kv, dim), **plain)
        self.out = nnx.LinearGeneral((heads, dim), width, axis=(-2, -1), **plain)
        self.gate = nnx.Linear(width, hidden, **plain)
        self.up = nnx.Linear(width, hidden, **plain)
        self.down = nnx.Linear(hidden, width, **plain)

    def __call__(self, x: Float[Array, "b t n"]) -> Float[Array, "b t n"]:
        h = self.norm1(x)
        h = attend(
            rotated(self.query(h)), rotated(self.key(h)), self.value(h), causal=True
        )
        x = x + self.out(h)
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


def rotated(x: Float[Array, "b t h d"]) -> Float[Array, "b t h d"]:
    """Queries or keys, turned by their positions."""
    half = x.shape[-1] // 2
    frequencies = 500000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


class Decoder(nnx.Module):
    """GPT-2, or Llama if `hidden` is given; the readout is the embedding."""

    def __init__(
        self,
        *,
        vocab: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        kv: int = 0,
        hidden: int = 0,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
    ):
        self.embedding = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        self.position = (
            None if hidden else nnx.Embed(context, width, dtype=dtype, rngs=rngs)
        )
        self.blocks = nnx.List(
            LlamaBlock(width, heads, kv, hidden, rngs, dtype)
            if hidden
            else EncoderBlock(width, heads, rngs, dtype, causal=True)
            for _ in range(depth)
        )
        norm = nnx.RMSNorm if hidden else nnx.LayerNorm
        self.norm = norm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocab"]:
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))
