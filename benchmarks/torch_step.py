"""Training steps of the speed benchmarks in torch, for a Python with torch.

Arguments: --steps, --compile, and cases as JSON, e.g.

    [{"kind": "vit", "sizes": {...}, "batch": 8, "dtype": "bfloat16"}]

with the kinds and sizes of benchmarks/plain.py; "resnet" is torchvision's. Prints a
line of JSON for each case: milliseconds by the clock and of all cores together, and
gigabytes.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Pre-LN attention and MLP, of ViT and GPT-2."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.nonlinearity = nn.GELU("tanh" if causal else "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next residual stream."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        qkv = qkv.permute(2, 0, 3, 1, 4).unbind()
        h = functional.scaled_dot_product_attention(*qkv, is_causal=self.causal)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(self.nonlinearity(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention and a gated MLP."""

    def __init__(self, width: int, heads: int, kv: int, hidden: int):
        super().__init__()
        self.dim = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.query, self.out = linear(width, width), linear(width, width)
        self.key, self.value = (linear(width, kv * self.dim) for _ in range(2))
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)

    def _heads(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        x = x.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        if not turned:
            return x
        half = self.dim // 2
        steps = torch.arange(half, device=x.device) / half
        places = torch.arange(x.shape[2], device=x.device)
        angles = places[:, None] * 500000.0**-steps
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next residual stream."""
        h = self.norm1(x)
        query, key = self._heads(self.query(h), True), self._heads(self.key(h), True)
        h = functional.scaled_dot_product_attention(
            query,
            key,
            self._heads(self.value(h), False),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class ViT(nn.Module):
    """A vision transformer with a class token."""

    def __init__(
        self,
        pixels: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(
            0.02 * torch.randn((pixels // patch) ** 2 + 1, width)
        )
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(depth)))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.readout(self.norm(self.blocks(x)[:, 0]))


class Decoder(nn.Module):
    """GPT-2, or Llama if `hidden` is given; the readout is the embedding."""

    def __init__(
        self,
        vocab: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        kv: int = 0,
        hidden: int = 0,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = None if hidden else nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(
                LlamaBlock(width, heads, kv, hidden)
                if hidden
                else Block(width, heads, True)
                for _ in range(depth)
            )
        )
        self.norm = nn.RMSNorm(width) if hidden else nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.embedding.weight.T


def resnet(depth: int, classes: int, pixels: int) -> nn.Module:
    """torchvision's network; with a small stem for images of 32 pixels."""
    import torchvision

    net = getattr(torchvision.models, f"resnet{depth}")(num_classes=classes)
    if pixels == 32 and depth == 18:
        net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    return net


def measured(case: dict[str, Any], steps: int, compiles: bool) -> dict[str, float]:
    """Median times of a step."""
    sizes, batch = case["sizes"], case["batch"]
    torch.set_float32_matmul_precision("high")  # as JAX does by default
    if case["kind"] == "decoder":
        net: nn.Module = Decoder(**sizes)
        tokens = torch.randint(sizes["vocab"], (batch, sizes["context"] + 1))
        x, labels = tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)
    else:
        pixels = case["pixels"]
        net = ViT(**sizes) if case["kind"] == "vit" else resnet(**sizes, pixels=pixels)
        x = torch.randn(batch, 3, pixels, pixels, device=DEVICE)
        labels = torch.randint(sizes["classes"], (batch,), device=DEVICE)
    net = net.to(DEVICE)
    if case["kind"] == "resnet" and DEVICE == "cuda":
        net, x = (y.to(memory_format=torch.channels_last) for y in (net, x))
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=1e-4, weight_decay=0.1, fused=True
    )
    half = case.get("dtype") == "bfloat16"

    def loss() -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = net(x).flatten(0, -2)
            return functional.cross_entropy(logits.float(), labels.flatten())

    if compiles:
        loss = torch.compile(loss)
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    clock, processor = (
        1e3 * statistics.median(t) for t in zip(*times[3:], strict=True)
    )
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"ms": clock, "processor_ms": processor, "gb": peak / 1e9}


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    for case in given.cases:
        try:
            took = measured(case, given.steps, given.compile)
        except (ImportError, RuntimeError) as error:
            took = {"error": str(error).splitlines()[0][:200]}
        print(json.dumps({"torch": torch.__version__, **took}), flush=True)


if __name__ == "__main__":
    main()
