"""Time `optim.infer_scales(..., inputs=...)`: ViT-B/16 and a decoder of 8B parameters.

    python -m benchmarks.reading

Both are traced only. Each row is the processor time of the first call, and the median
of five later ones.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax import optim


class Block(nnx.Module):
    """A block of a ViT, written with the layers of Flax NNX."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            width // 64, width, decode=False, rngs=rngs
        )
        self.second = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class ViT(nnx.Module):
    """A ViT with a list of blocks."""

    def __init__(self, width: int, depth: int):
        rngs = nnx.Rngs(0)
        self.patch = nnx.Conv(3, width, (16, 16), strides=16, rngs=rngs)
        self.blocks = nnx.List(Block(width, rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patch(x).reshape(x.shape[0], 196, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def decoder(width: int, depth: int) -> dict[str, Any]:
    """Shapes of a Llama-like decoder of stacked blocks; (4096, 32) is that of 8B."""
    hidden = width * 7 // 2
    shapes = {
        "q": (width, width),
        "k": (width, 1024),
        "v": (width, 1024),
        "o": (width, width),
        "up": (width, hidden),
        "gate": (width, hidden),
        "down": (hidden, width),
    }

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    return {
        "embed": shape(128256, width),
        "blocks": {name: shape(depth, *sizes) for name, sizes in shapes.items()},
        "out": shape(width, 128256),
    }


def decode(params: Any, tokens: jax.Array) -> jax.Array:
    """Its forward pass."""

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        b, t, n = x.shape
        q = (x @ w["q"]).reshape(b, t, -1, 128)
        k, v = ((x @ w[name]).reshape(b, t, 8, 128) for name in "kv")
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(b, t, n) @ w["o"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    return (
        jax.lax.scan(block, params["embed"][tokens], params["blocks"])[0]
        @ params["out"]
    )


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Processor time of the first call, and the median of five later ones."""
    times = []
    for _ in range(6):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return times[0], statistics.median(times[1:])


def main() -> None:
    """Print the table."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    vit = seconds(
        lambda: optim.infer_scales(
            lambda: ViT(192, 4), lambda: ViT(768, 12), inputs=(image,)
        )
    )
    llama = seconds(
        lambda: optim.infer_scales(
            decoder(1024, 8),
            decoder(4096, 32),
            inputs=(tokens,),
            call=lambda params, x: decode(params, x),  # JAX keeps no trace of it
        )
    )
    print("ViT-B/16, list of 12 blocks   {:.2f} s, then {:.2f} s".format(*vit))
    print("decoder of 8B, scanned        {:.2f} s, then {:.2f} s".format(*llama))


if __name__ == "__main__":
    main()
