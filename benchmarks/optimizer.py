"""Compare the cost of an optimizer with Optax's, on the parameters of ViT-B/16.

    python -m benchmarks.optimizer [--optimizer adamw] [--pairs 100] [--depth 12]

Prints the time of a jitted update of both (86.6 million parameters, parameters and
state donated), in pairs of alternating order, and the median of the paired ratios, by
the clock and of processor time; the memory traffic of the compiled updates; the bytes
of both states; and the time of `infer_scales`. Aims: a ratio of at most 1.02, equal
bytes, and less than a second for the scales.

Results for AdamW on two shared CPU cores: ratio 0.997, 0.997 and 1.001 in three runs.
Both updates move 3.463e9 bytes (the factors fuse into Adam's own loop) and have a state
of 692,541,252 bytes; the scales take 0.008 s.

An update of Muon takes 1.5e12 operations. Blocks are alike, so a depth of 2 is enough
for its ratio, which takes minutes: --optimizer muon --depth 2 --pairs 12.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax import optim

WIDTH, DEPTH = 768, 12
# Arguments of both, where the defaults would do less; Muon takes the same matrices.
OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "adam": {},
    "adamw": {"weight_decay": 0.05},
    "lion": {"weight_decay": 0.05},
    "lamb": {"weight_decay": 0.05},
    "adafactor": {},
    "muon": {"weight_decay": 0.05},
    "schedule_free": {"weight_decay": 0.05},
}
AXES = optim.declare(
    {
        "patch_embed/kernel": "height width channels -> d",
        "cls_token|pos_embed": "batch tokens d",
        "kernel": "in -> out",
        ".": "d",
    },
    branches="blocks",
)


def vit(width: int, depth: int) -> dict:
    """Abstract parameters of a ViT with patches of 16 and 1000 classes."""

    def norm() -> dict:
        return {"scale": (width,), "bias": (width,)}

    def dense(*shape: int) -> dict:
        return {"kernel": shape, "bias": shape[-1:]}

    block = {
        "norm1": norm(),
        "qkv": dense(width, 3 * width),
        "proj": dense(width, width),
        "norm2": norm(),
        "fc1": dense(width, 4 * width),
        "fc2": dense(4 * width, width),
    }
    tree = {
        "patch_embed": dense(16, 16, 3, width),
        "cls_token": (1, 1, width),
        "pos_embed": (1, 197, width),
        "blocks": [block] * depth,
        "norm": norm(),
        "head": dense(width, 1000),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def make_scales(width: int = WIDTH, depth: int = DEPTH) -> optim.Scales:
    """Scales of a ViT, by default ViT-B, from a base of a quarter of both sizes."""
    return optim.infer_scales(
        vit(width // 4, max(depth // 4, 1)),
        vit(width, depth),
        axes=AXES,
        parametrization="depth_mup",
    )


def optax_muon(scales: optim.Scales) -> Callable[..., optax.GradientTransformation]:
    """Optax's Muon of the matrices that mupax's takes."""
    rows = optim.explain(scales, "muon").rows

    def numbers(path: Any, _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if rows[name].family != "spectral":
            return None
        return optax.contrib.MuonDimensionNumbers(
            scales[name].in_axes, scales[name].out_axes
        )

    return functools.partial(
        optax.contrib.muon,
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
            numbers, params
        ),
    )


def optimizers(
    name: str, scales: optim.Scales
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """An optimizer of mupax and Optax's."""
    rate, options = 1e-3, OPTIMIZERS[name]
    if name == "schedule_free":
        ours = optim.adamw(rate, scales, b1=0.0, **options)
        theirs = optax.adamw(rate, b1=0.0, **options)
        return (
            optax.contrib.schedule_free(ours, rate),
            optax.contrib.schedule_free(theirs, rate),
        )
    namesake = optax_muon(scales) if name == "muon" else getattr(optax, name)
    return getattr(optim, name)(rate, scales, **options), namesake(rate, **options)


class Step:
    """One optimizer's jitted step, on the leaves of its state by shape."""

    def __init__(self, tx: optax.GradientTransformation, params: dict):
        leaves, tree = jax.tree.flatten(tx.init(params))
        # Both optimizers have the same leaves, and Muon's in another order.
        kind = [(x.shape, str(x.dtype)) for x in leaves]
        order = sorted(range(len(leaves)), key=kind.__getitem__)
        place = sorted(range(len(leaves)), key=order.__getitem__)
        self.state = [leaves[i] for i in order]
        self.bytes = sum(x.nbytes for x in leaves)

        def step(params, leaves, grads):
            state = jax.tree.unflatten(tree, [leaves[i] for i in place])
            updates, state = tx.update(grads, state, params)
            leaves = jax.tree.leaves(state)
            return optax.apply_updates(params, updates), [leaves[i] for i in order]

        shapes = (params, self.state, params)
        self._step = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
        cost = self._step.cost_analysis()
        self.moved, self.flops = cost["bytes accessed"], cost["flops"]

    def __call__(self, params, state, grads):
        """Seconds of one step, by the clock and of the processor, and its results."""
        start = np.array([time.perf_counter(), time.process_time()])
        params, state = jax.block_until_ready(self._step(params, state, grads))
        end = np.array([time.perf_counter(), time.process_time()])
        return end - start, params, state


def times(ours: Step, theirs: Step, params: dict, pairs: int) -> list[np.ndarray]:
    """Seconds of the updates of each, (pairs, 2), in pairs of alternating order."""
    grads = jax.tree.map(lambda p: p / 2, params)
    # Both use the same buffers, because their location changes times by a few percent.
    state, ours.state, theirs.state = ours.state, [], []
    columns: dict[Step, list[np.ndarray]] = {ours: [], theirs: []}
    for pair in range(pairs + 1):
        for step in (ours, theirs) if pair % 2 else (theirs, ours):
            seconds, params, state = step(params, state, grads)
            columns[step].append(seconds)
    return [np.stack(column[1:]) for column in columns.values()]


def filled(shapes: dict) -> dict:
    """Parameters of these shapes."""
    return jax.tree.map(lambda s: jnp.full(s.shape, 0.02), shapes)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--depth", type=int, default=DEPTH, help="of the ViT")
    options = parser.parse_args()
    name, pairs, depth = options.optimizer, options.pairs, options.depth

    make_scales(depth=depth)
    start = time.perf_counter()
    scales = make_scales(depth=depth)
    building = time.perf_counter() - start
    params = filled(vit(WIDTH, depth))
    ours, theirs = (Step(tx, params) for tx in optimizers(name, scales))
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"{jax.devices()[0].device_kind}: {count / 1e6:.1f} million parameters")
    print(f"infer_scales: {building:.3f} s")
    print(f"state: {ours.bytes} bytes, Optax's {theirs.bytes}")
    print(f"memory moved: {ours.moved:.4g} bytes, Optax's {theirs.moved:.4g}")
    print(f"operations: {ours.flops:.4g}, Optax's {theirs.flops:.4g}")

    columns = times(ours, theirs, params, pairs)
    ms = [1e3 * np.median(column[:, 0]) for column in columns]
    print(f"update: {ms[0]:.2f} ms, Optax's {ms[1]:.2f} ms (medians)")
    both = columns[0] / columns[1]
    for kind, ratios in {"clock": both[:, 0], "processor": both[:, 1]}.items():
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(
            f"ratio by the {kind}: {middle:.3f} "
            f"(median of {pairs} pairs; quartiles {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
