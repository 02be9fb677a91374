"""The golden files: small networks of other libraries, which tests/golden writes."""

import json
import pathlib

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from mupax.zoo.registry import record_of
from mupax.zoo.weights import foreign, saving

GOLDEN = pathlib.Path(__file__).parent / "golden"


VIT = {
    **{"width": 24, "depth": 2, "heads": 3, "patch_size": 8, "out_features": 5},
    "input_shape": (32, 32, 3),
}
GPT = {
    **{"width": 24, "depth": 2, "heads": 3, "vocab_size": 50, "context": 16},
    **{"nonlinearity": "gelu_tanh", "norm_eps": 1e-5},
}
RESNET = {"width": 4, "blocks": (2, 1, 1, 2), "out_features": 7}


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights under the library's names, inputs and what it computes of them).

    Args:
      name: of the file, without its suffix.
    """
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    if "timm/eval" in arrays:  # a file of torch, which halves its weights
        before = {k[7:]: v for k, v in arrays.items() if k.startswith("before/")}
        return {k: v.astype(np.float32) for k, v in before.items()}, {
            "images": arrays["x"].astype(np.float32).transpose(0, 2, 3, 1),
            "logits": arrays["timm/eval"],
        }
    data = {k: arrays.pop(k) for k in list(arrays) if k.startswith("golden/")}
    return arrays, {k.removeprefix("golden/"): v for k, v in data.items()}


def write(path: pathlib.Path, weights: dict[str, np.ndarray]) -> pathlib.Path:
    """A file of weights as its library writes it."""
    if path.suffix == ".npz":
        np.savez(path, **weights)
    else:
        whole = {k: np.ascontiguousarray(v) for k, v in weights.items()}
        safetensors.numpy.save_file(whole, path)
    return path


def repository(folder: pathlib.Path, name: str, **changes: object) -> pathlib.Path:
    """The files that transformers' save_pretrained writes, with another config."""
    weights, data = golden(name)
    write(folder / "model.safetensors", weights)
    config = json.loads(str(data["config"])) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_gradients(
    gradients: nnx.State,
    model: nnx.Module,
    name: str,
    tolerance: float,
    *,
    least: float = 0.0,
    still: str = "/$",
) -> None:
    """Compare gradients with those of the library.

    Args:
      gradients: of the parameters of the model, which `name` filled.
      name: of the golden file.
      tolerance: relative to the largest gradient of a variable in all layers.
      least: what a gradient is compared with at least, relative to the largest of all.
      still: ending of paths whose gradient is zero but for rounding: compared with the
        largest of all.
    """
    weights, data = golden(name)
    theirs = {k[9:]: v for k, v in data.items() if k.startswith("gradient/")}
    most = max(np.abs(v).max() for v in theirs.values())
    found = nnx.to_flat_state(gradients)
    ours = {"/".join(map(str, k)): np.asarray(v[...]) for k, v in found}
    table = foreign.match(model, weights).table
    for (path, layer), source in table.items():
        if path not in ours:  # statistics
            continue
        expected = theirs.pop(source.key) if source.part is None else theirs[source.key]
        part = ours[path] if layer is None else ours[path][layer]
        size = max(np.abs(ours[path]).max(), least * most)
        size = most if path.endswith(still) else size
        off = np.abs(part - source.read(expected)).max()
        assert off < tolerance * size, (path, layer)
    fused = {source.key for source in table.values() if source.part}
    assert not any(theirs[key].any() for key in theirs.keys() - fused)


def drawn(model: nnx.Module) -> nnx.Module:
    """An abstract model with random values, biases included."""
    random = np.random.default_rng(0)
    values = {
        path: 0.3 * random.normal(size=array.shape).astype(np.float32)
        for path, array in saving.arrays_of(model).items()
    }
    exact = {k: np.exp(v) if k.endswith("/var") else v for k, v in values.items()}
    saving.fill(model, exact)
    return model


# What is run once compiles longer than it runs.
QUICK = {"xla_backend_optimization_level": 0}


@jax.jit(static_argnums=0, compiler_options=QUICK)
def _run(graph: nnx.GraphDef, state: nnx.State, x: jax.Array) -> jax.Array:
    return nnx.merge(graph, state)(x)


def run(model: nnx.Module, x: np.ndarray) -> np.ndarray:
    """A model's output; traced once for each graph, whatever the weights."""
    graph, state = nnx.split(model)
    return np.asarray(_run(graph, state, jax.numpy.asarray(x)))


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, relative to the largest entry of theirs."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def check_export(model: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    """A model exports the weights that it was filled with, but for unused ones."""
    layout = foreign.names_of(model, weights).layout
    written = foreign.export(model, layout)
    for key, array in written.items():
        np.testing.assert_array_equal(array, weights[key], err_msg=key)
    unused = record_of(model).unused(model, layout)
    assert all(unused.search(key) for key in weights.keys() - written.keys())
