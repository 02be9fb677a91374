"""Random networks, and a user who answers only what the messages ask.

Each network is a few pieces whose leaves are known; no option says anything. The user
names, truthfully, the paths that a message lists, and tries again. What comes out in
the end has to be right, and there has to be an end.
"""

import dataclasses
import math
import random
import re

import pytest
from setups.kit import F, H, I, Leaf, O, V, got, nest

from mupax import optim

KERNELS = ("kernel", "w", "weight")
NEUTRAL = ("a", "c", "p", "q", "r", "t", "x", "y", "z")
UNIQUE = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # of axes that no other leaf shares


@dataclasses.dataclass(frozen=True)
class Known:
    """A leaf, and what a user who knows the model writes into `axes`."""

    leaf: Leaf
    axes: tuple[tuple[int, ...], tuple[int, ...]]


def piece(kind: str, name: str, n: int, m: int, target: bool, rng: random.Random):
    """Leaves of one piece at width n; `m` is the ratio of the widths."""
    k, f = rng.choice(UNIQUE), rng.choice((1, 2, 4))
    grown, biased = rng.choice((2, 3, m)), rng.random() < 0.5
    more = k * (grown if target else 1)
    kernel = f"{name}/{rng.choice(KERNELS)}"
    ratio = more / k
    pieces = {
        "dense": {kernel: (H(n, n), (0,), (1,))},
        "ffn": {
            f"{name}/up/kernel": (H(n, f * n), (0,), (1,)),
            f"{name}/down/kernel": (H(f * n, n), (0,), (1,)),
        },
        "conv": {kernel: (H(3, 3, n, n), (0, 1, 2), (3,))},
        "depthwise": {kernel: (I(3, 3, 1, n), (0, 1), (3,))},
        "norm": {f"{name}/scale": (V(n), (), (0,)), f"{name}/bias": (V(n), (), (0,))},
        "channel": {f"{name}/decay": (V(n, k), (), (0, 1))},
        "neutral channel": {name: (V(n, k), (), (0, 1))},
        "gain": {f"{name}/gain": (V(n, 1, 1), (), (0,))},
        "table": {f"{name}/embedding": (I(k, n), (), (1,))},
        "grown table": {f"{name}/embedding": (I(more, n, copies=ratio), (), (1,))},
        "neutral grown table": {name: (I(more, n, copies=ratio), (), (1,))},
        "router": {kernel: (O(n, k), (0,), ())},
        "bottleneck": {
            f"{name}/down": (O(n, k), (0,), ()),
            f"{name}/up": (I(k, n), (0,), (1,)),
        },
        "heads": {
            f"{name}/query/kernel": (H(n, n // 8, 8), (0,), (1, 2)),
            f"{name}/query/bias": (V(n // 8, 8), (), (0, 1)),
            f"{name}/out/kernel": (H(n // 8, 8, n), (0, 1), (2,)),
            f"{name}/out/bias": (V(n), (), (0,)),
        },
        "heads first": {name: (H(n // 8, n, 8), (1,), (0, 2))},
        "experts": {
            f"{name}/wi": (H(k, n, f * n), (1,), (2,)),
            f"{name}/wo": (H(k, f * n, n), (1,), (2,)),
        },
        "grown experts": {
            f"{name}/wi": (H(more, n, f * n, copies=ratio), (1,), (2,)),
            f"{name}/wo": (H(more, f * n, n, copies=ratio), (1,), (2,)),
            f"{name}/bi": (V(more, f * n, copies=ratio), (), (1,)),
        },
        "grown stack": {f"{name}/w": (H(more, n, n, copies=ratio), (1,), (2,))},
        "tensor": {name: (H(n, n, n, into=m * m), (0, 1), (2,))},
        "fixed": {f"{name}/kernel": (F(k, k), (), ())},
    }
    leaves = pieces[kind]
    if biased and kind in ("dense", "conv"):
        leaves[f"{name}/bias"] = (V(n), (), (0,))
    return {
        path: Known(leaf, (into, out)) for path, (leaf, into, out) in leaves.items()
    }


KINDS = (
    *("dense", "dense", "ffn", "conv", "depthwise", "norm", "channel", "gain"),
    *("table", "router", "bottleneck", "heads", "experts", "tensor", "fixed"),
    *("neutral channel", "grown table", "neutral grown table", "heads first"),
    *("grown experts", "grown stack"),
)


def network(seed: int, target: bool) -> tuple[dict[str, Known], int]:
    """A first layer, up to four pieces and perhaps a head, and the widths' ratio."""
    rng = random.Random(seed)
    base, m = rng.choice((16, 32, 48, 64)), rng.choice((2, 3, 4, 8))
    n = base * m if target else base
    known = {"first/kernel": Known(I(37, n), ((0,), (1,)))}
    names = rng.sample(NEUTRAL, 4)
    for name in names[: rng.randint(1, 4)]:
        kind = rng.choice(KINDS)
        known |= piece(kind, name, n, m, target, random.Random(f"{seed}{name}"))
    head = rng.choice(("one", "one", "two", "biased", "none"))
    if head != "none":
        known["head/kernel"] = Known(O(n, 10), ((0,), ()))
    if head == "biased":
        known["head/bias"] = Known(F(10), ((), ()))
    if head == "two":
        known["value/kernel"] = Known(O(n, 1), ((0,), ()))
    return known, m


def answer(message: str, known: dict[str, Known], options: dict) -> dict:
    """Options with what the message asks for; the same ones if it asks nothing new."""
    text = message.replace("\\", "")
    axes, out = dict(options.get("axes", {})), dict(options)
    for path in known:
        if re.search(rf"(?<![\w/]){re.escape(path)}(?![\w/])", text):
            axes[f"^{path}$"] = known[path].axes
    readouts = [p for p in known if f"^{p}$" in axes and known[p].leaf.kind == "O"]
    if axes:
        out["axes"] = axes
    if readouts:
        out["readout"] = f"^({'|'.join(readouts)})$"
    elif not any(k.leaf.kind == "O" for k in known.values()) and "readout" in text:
        out["readout"] = None
    if "tied" in text:
        out["tied"] = None
    return out


def mistakes(scales, known: dict[str, Known], m: int) -> list[str]:
    right = {path: k.leaf.triple(m) for path, k in known.items()}
    return [
        f"{path}: got {got(scales[path])}, right is {want}"
        for path, want in right.items()
        if not all(map(math.isclose, got(scales[path]), want))
    ]


def ask_until_done(trees, known: dict[str, Known]):
    """The scales, or None where a message asks for nothing that is not yet said."""
    options: dict = {}
    while True:
        try:
            return optim.infer_scales(*trees, **options), options, ""
        except ValueError as error:
            message = str(error)
        answered = answer(message, known, options)
        if answered == options:
            return None, options, message
        options = answered


@pytest.mark.parametrize("block", range(4))
def test_answering_what_is_asked_ends_in_right_scales(block):
    for seed in range(100 * block, 100 * block + 100):
        base, _ = network(seed, target=False)
        known, m = network(seed, target=True)
        trees = [nest({p: k.leaf for p, k in x.items()}) for x in (base, known)]
        scales, options, message = ask_until_done(trees, known)
        assert scales is not None, (seed, options, message)
        assert not mistakes(scales, known, m), (seed, options)
