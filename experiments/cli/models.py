"""The table of `mupax models`."""

import functools
import importlib.resources
import json
import math
from typing import Any

from ..errors import UserError, nearest

# Repositories of transformers whose config.json is exactly the model of that name.
HUB = {
    "gpt2": ("openai-community/gpt2",),
    "gpt2_medium": ("openai-community/gpt2-medium",),
    "gpt2_large": ("openai-community/gpt2-large",),
    "gpt2_xl": ("openai-community/gpt2-xl",),
    "smollm2_135m": ("HuggingFaceTB/SmolLM2-135M",),
    "smollm2_360m": ("HuggingFaceTB/SmolLM2-360M",),
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B",),
    "llama3_2_1b": ("meta-llama/Llama-3.2-1B",),
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B",),
}


def listing(patterns: list[str], *, names_only: bool) -> str:
    """The models that match patterns, as text: names, a table, or one in detail.

    Raises:
      UserError: none matches.
    """
    from mupax import zoo

    names = zoo.list_models(*patterns)
    if not names:
        every = zoo.list_models()
        hint = nearest(patterns[0].strip("*"), every) or ";"
        raise UserError(
            f"no model is named {patterns[0]!r}{hint} `mupax models` lists all "
            f"{len(every)}"
        )
    if names_only:
        return "\n".join(names)
    return _details(names[0]) if patterns == names else _table(names)


def model_sizes() -> dict[str, dict[str, Any]]:
    """By model: width, depth, input, parameters and FLOPs.

    Read from a file that `python -m benchmarks.zoo_table --write` counts.
    """
    file = importlib.resources.files("mupax.zoo") / "model_sizes.json"
    return json.loads(file.read_text())


def sources_of(name: str) -> tuple[str, ...]:
    """The sources of a model's weights, as arguments of `zoo.load_pretrained`.

    The ".*" at the end of timm's names stands for any of its tags.
    """
    timm = sorted(_timm().get(name, ()), key=lambda x: (x != name, x))
    return (
        *_shipped().get(name, ()),
        *(f"timm/{architecture}.*" for architecture in timm),
        *HUB.get(name, ()),
    )


@functools.cache
def _timm() -> dict[str, list[str]]:
    """By model, timm's names of the same architecture."""
    from mupax.zoo.weights.architectures import timm_names

    return timm_names()


@functools.cache
def _shipped() -> dict[str, list[str]]:
    """By model, names of trained models that come with the package."""
    from mupax import zoo

    by_model: dict[str, list[str]] = {}
    for name in zoo.list_pretrained():
        folder = importlib.resources.files("mupax.zoo") / "checkpoints" / name
        model = json.loads((folder / "config.json").read_text())["model"]
        by_model.setdefault(model, []).append(name)
    return by_model


_HEAD = ("model", "width", "depth", "input", "parameters", "FLOPs", "weights")


def _table(names: list[str]) -> str:
    sizes_of = model_sizes()
    rows = [_HEAD]
    for name in names:
        row, sources = sizes_of[name], sources_of(name)
        more = f", {len(sources) - 1} more" if len(sources) > 1 else ""
        source = f"{sources[0]}{more}" if sources else ""
        numbers = _short(row["parameters"]), _short(row["flops"])
        rows.append((name, row["width"], row["depth"], row["input"], *numbers, source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    note = (
        "*: an example size, because the model has no default size. FLOPs: for one "
        "input; a multiplication and an addition count as two."
    )
    return "\n".join([*lines, note])


def _details(name: str) -> str:
    row = model_sizes()[name]
    sources = sources_of(name) or ("none are known",)
    return "\n".join(
        [
            name,
            f"  width {row['width']}, depth {row['depth']}, input {row['input']}",
            f"  {row['parameters']:,} parameters, {_short(row['flops'])} FLOPs for one "
            "input",
            *(f"  weights: {source}" for source in sources),
        ]
    )


def _short(n: int) -> str:
    """Three digits and a letter: k, M, G, T."""
    power = min(max(int(math.log10(n)) // 3, 0), 4)
    digits = f"{n / 1000**power:.3g}"
    if "e" in digits:
        digits = f"{n / 1000**power:.0f}"
    return f"{digits} {['', 'k', 'M', 'G', 'T'][power]}".strip()
