"""Write the tables of docs/zoo.md: sizes, parameters, FLOPs and options of all models.

    python -m benchmarks.zoo_table            # prints it
    python -m benchmarks.zoo_table --write    # puts it into docs/zoo.md, and the sizes
                                              # into zoo/model_sizes.json

Shapes only: nothing is allocated, whatever a model's size.
"""

import argparse
import functools
import inspect
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import zoo
from mupax.experiments.estimate.flops import count_flops
from mupax.zoo import registry

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "zoo.md"
# What `mupax models` prints: counting takes too long for a list.
SIZES_FILE = PAGE.parents[1] / "zoo" / "model_sizes.json"
BEGIN, END = "<!-- begin: python -m benchmarks.zoo_table -->", "<!-- end -->"

# Models without sizes of their own, and the sizes that the table shows them at.
SIZES = {
    "cnn": {"width": 256, "depth": 8},
    "gpt": {"width": 256, "depth": 4},
    "llama": {"width": 256, "depth": 4},
    "mlp": {"width": 256, "depth": 4},
    "resmlp": {"width": 256, "depth": 8},
    "vit": {"width": 192, "depth": 12},
}
# What every model takes, described once.
SHARED = (
    "width",
    "depth",
    "base_width",
    "base_depth",
    "parametrization",
    "branch_multiplier",
    "remat",
    "dtype",
    "param_dtype",
    "rngs",
)


def build(name: str, **options: Any) -> nnx.Module:
    """The abstract twin of a model, to run as in evaluation."""
    options = {**SIZES.get(name, {}), **options}
    model = nnx.eval_shape(lambda: zoo.create(name, **options, rngs=nnx.Rngs(0)))
    model.eval()
    return model


def defaults(name: str) -> dict[str, Any]:
    """The options of a registered model, with the values it has if none is given."""
    return {**registry.default_options(name), **SIZES.get(name, {})}


def input_of(name: str, **options: Any) -> jax.ShapeDtypeStruct:
    """One example of what a model takes."""
    options = {**defaults(name), **options}
    if "context" in options:
        return jax.ShapeDtypeStruct((1, options["context"]), jnp.int32)
    return jax.ShapeDtypeStruct((1, *options["input_shape"]), jnp.float32)


def parameters(model: nnx.Module) -> int:
    """The number of trained parameters."""
    state = nnx.state(model, nnx.Param)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state))


def flops(model: nnx.Module, x: jax.ShapeDtypeStruct) -> int:
    """Multiplications and additions in the matrix products and convolutions.

    All of a causal attention's logits count, as they are computed.
    """
    graph, state = nnx.split(model)
    return int(count_flops(lambda s, x: nnx.merge(graph, s)(x), state, x))


@functools.cache
def sizes() -> dict[str, dict[str, Any]]:
    """Every registered model: its sizes, parameters, and work for one example."""
    counted = {}
    for name in zoo.list_models():
        options, model, x = defaults(name), build(name), input_of(name)
        given = SIZES.get(name, {})
        width, depth = (
            f"{options[key]}{'*' if key in given else ''}" for key in ("width", "depth")
        )
        if "blocks" in options:
            depth += f" × {options['blocks']}"
        shape = "×".join(map(str, x.shape[1:]))
        counted[name] = {
            "width": width,
            "depth": depth,
            "input": f"{shape} tokens" if x.dtype == jnp.int32 else shape,
            "parameters": parameters(model),
            "flops": flops(model, x),
        }
    return counted


def sizes_json() -> str:
    """The content of `SIZES_FILE`, a line per model."""
    rows = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sizes().items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def table() -> str:
    """The rows of `sizes` as a table."""
    rows = [
        "| model | width | depth | input | parameters | FLOPs |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sizes().items():
        rows.append(
            f"| `{name}` | {row['width']} | {row['depth']} | {row['input']} | "
            f"{_short(row['parameters'])} | {_short(row['flops'])} |"
        )
    return "\n".join(rows)


def _short(n: int) -> str:
    """Three digits and a letter: k, M, G, T."""
    power = min(max(int(math.log10(n)) // 3, 0), 4)
    digits = np.format_float_positional(
        n / 1000**power, precision=3, fractional=False, trim="-"
    )
    return f"{digits} {['', 'k', 'M', 'G', 'T'][power]}".strip()


def options() -> str:
    """The options of each kind of model, from its docstring and signature."""
    kinds: dict[type, list[str]] = {}
    for name in zoo.list_models():
        kinds.setdefault(registry.options_of(name)[0], []).append(name)
    parts = []
    for kind, names in kinds.items():
        first = min(names, key=len)
        values = defaults(first)
        rows = [f"### Options of {kind.__name__}", "", "| option | default | |"]
        rows += ["|---|---|---|"]
        for key, text in _described(kind).items():
            if key not in SHARED:
                rows.append(f"| `{key}` | {_shown(values[key])} | {text} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    return f"`{value!r}`".replace("'", '"')


def _described(kind: type) -> dict[str, str]:
    """What a class's docstring says of each argument."""
    text = inspect.cleandoc(kind.__doc__ or "")
    args = text.split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", args, re.M)
    return {name: " ".join(said.split()) for name, said in entries}


def page() -> str:
    """All of what the page holds of this."""
    return f"{table()}\n\n{options()}\n"


def main() -> None:
    """Print it, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(page())
        return
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    SIZES_FILE.write_text(sizes_json())
    PAGE.write_text(f"{head}{BEGIN}\n\n{page()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
