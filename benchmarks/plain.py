"""The networks of the speed benchmark in plain Flax NNX, without mupax."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int, rngs: nnx.Rngs):
        def conv(m: int, n: int, size: int, stride: int) -> nnx.Conv:
            return nnx.Conv(
                m,
                n,
                (size, size),
                strides=stride,
                padding=(size - 1) // 2,
                use_bias=False,
                rngs=rngs,
            )

        def norm() -> nnx.BatchNorm:
            return nnx.BatchNorm(after, momentum=0.9, epsilon=1e-5, rngs=rngs)

        self.conv1, self.norm1 = conv(before, after, 3, stride), norm()
        self.conv2, self.norm2 = conv(after, after, 3, 1), norm()
        projects = stride != 1 or before != after
        self.shortcut = (
            nnx.Sequential(conv(before, after, 1, stride), norm()) if projects else None
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        h = jax.nn.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return jax.nn.relu(h + (x if self.shortcut is None else self.shortcut(x)))


class ResNet18(nnx.Module):
    """ResNet-18 with the stem for images of 32 pixels."""

    def __init__(self, classes: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 64, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, epsilon=1e-5, rngs=rngs)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = []
        for before, after, stride in sizes:
            blocks += [
                BasicBlock(before, after, stride, rngs),
                BasicBlock(after, after, 1, rngs),
            ]
        self.blocks = nnx.List(blocks)
        self.readout = nnx.Linear(512, classes, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = jax.nn.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.readout(x.mean(axis=(1, 2)))


class EncoderBlock(nnx.Module):
    """Pre-LN attention and MLP."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        split = (heads, width // heads)
        self.query = nnx.LinearGeneral(width, split, rngs=rngs)
        self.key = nnx.LinearGeneral(width, split, rngs=rngs)
        self.value = nnx.LinearGeneral(width, split, rngs=rngs)
        self.out = nnx.LinearGeneral(split, width, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Float[Array, "b t n"]) -> Float[Array, "b t n"]:
        h = self.norm1(x)
        h = jax.nn.dot_product_attention(self.query(h), self.key(h), self.value(h))
        x = x + self.out(h)
        h = jax.nn.gelu(self.up(self.norm2(x)), approximate=False)
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
    ):
        side = (patch, patch)
        self.patches = nnx.Conv(3, width, side, strides=side, rngs=rngs)
        count = (pixels // patch) ** 2 + 1
        normal = jax.random.normal(rngs.params(), (count, width))
        self.position = nnx.Param(0.02 * normal)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.blocks = nnx.List(EncoderBlock(width, heads, rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.readout = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x[:, 0]))
