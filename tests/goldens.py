"""The golden files: small networks of other libraries, which tests/golden writes."""

import functools
import json
import pathlib

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from mupax.zoo import registry
from mupax.zoo.weights import foreign, saving
from mupax.zoo.weights.architectures import identify

GOLDEN = pathlib.Path(__file__).parent / "golden"
# Relative to the largest entry; what float32 leaves is ten times less.
TOLERANCE = 1e-5

VIT = {
    **{"width": 24, "depth": 2, "heads": 3, "patch_size": 8, "out_features": 5},
    "input_shape": (32, 32, 3),
}
GPT = {
    **{"width": 24, "depth": 2, "heads": 3, "vocab_size": 50, "context": 16},
    **{"nonlinearity": "gelu_tanh", "norm_eps": 1e-5},
}
RESNET = {"width": 4, "blocks": (2, 1, 1, 2), "out_features": 5}
_VIT = {
    **{"width": 16, "depth": 2, "heads": 2, "mlp_ratio": 2, "patch_size": 4},
    "input_shape": (12, 12, 3),
}
_BODY = {**_VIT, "layer_scale": 1e-5, "out_features": 0}
_DINOV3 = {
    **{**_BODY, "registers": 2, "rotary": True, "position": False, "qkv_bias": False},
    **{"norm_eps": 1e-5, "pool": "norm_mean", "class_token": True},
}
_CONV = {"out_features": 5, "width": 4}
_BOTTLENECK = {**_CONV, "block": "bottleneck", "depth": 1, "blocks": (1, 2)}
_CONVNEXT = {**_CONV, "blocks": (1, 2, 1, 1)}
EFFICIENTNET = {
    **{"out_features": 5, "width": 8, "rows_width": 8, "head": 24},
    "rows": (
        (0, "separable", 1, 3, 1, 1, 8, 0.25),
        (1, "inverted", 2, 5, 2, 2, 16, 0.25),
        (2, "fused", 2, 3, 1, 2, 16),
        (3, "plain_residual", 2, 3, 1, 1, 16),
    ),
}
_MOBILENETV3 = (
    (0, "separable", 1, 3, 2, 1, 8, 0.25, "relu"),
    (1, "inverted", 1, 3, 1, 2, 16),
    (1, "inverted", 2, 5, 1, 3, 16, 0.25),
    (2, "plain", 1, 1, 1, 1, 24),
)
_MOBILENETV2 = (
    (0, "separable", 1, 3, 1, 1, 8),
    (1, "inverted", 2, 3, 2, 2, 16),
    (2, "inverted", 2, 5, 1, 2, 16),
)
#: {file: (model, options)}; files of transformers hold a config in place of them.
NETWORKS = {
    "vit_token": ("vit", VIT),
    "vit_mean": ("vit", {**VIT, "pool": "mean"}),
    "vit_augreg": ("vit", VIT),
    "vit_torchvision": ("vit", VIT),
    "vit_big_vision": ("vit", {**VIT, "class_position": False}),
    "gpt2": ("gpt", GPT),
    "vit_deit3": (
        "vit",
        {**_VIT, "layer_scale": 1e-6, "class_position": False, "out_features": 5},
    ),
    "vit_dinov2": ("vit", _BODY),
    "vit_dinov2_reg": ("vit", {**_BODY, "registers": 2, "class_position": False}),
    "vit_dinov2_giant": (
        "vit",
        {**_BODY, "gated": True, "nonlinearity": "silu", "mlp_ratio": 1},
    ),
    "vit_reg_gap": ("vit", {**_VIT, "pool": "mean", "registers": 2, "out_features": 5}),
    "vit_clip": (
        "vit",
        {
            **{**_VIT, "pre_norm": True, "patch_bias": False, "norm_eps": 1e-5},
            **{"nonlinearity": "quick_gelu", "out_features": 5},
        },
    ),
    "vit_siglip": ("vit", {**_VIT, "pool": "attention", "out_features": 0}),
    "vit_dinov3": ("vit", _DINOV3),
    "vit_dinov3_plus": ("vit", {**_DINOV3, "gated": True, "nonlinearity": "silu"}),
    "vit_eva": (
        "vit",
        {
            **{**_VIT, "pool": "mean", "class_token": True, "key_bias": False},
            "out_features": 5,
        },
    ),
    "resnet_basic": ("resnet18", RESNET),
    "resnet_bottleneck": ("resnet50", {**RESNET, "blocks": (2, 1, 1, 1)}),
    "resnet_cifar": ("resnet18", {**RESNET, "blocks": (1, 2, 1, 1), "stem": "cifar"}),
    "resnext": ("resnet50", {**_BOTTLENECK, "groups": 2, "width_per_group": 64}),
    "resnet_d_se": (
        "resnet50",
        {**_BOTTLENECK, "stem": "deep", "shortcut": "average", "squeeze": 1 / 16},
    ),
    "convnext": ("convnext_tiny", _CONVNEXT),
    "convnextv2": ("convnextv2_tiny", _CONVNEXT),
    "efficientnet": ("efficientnet_b0", EFFICIENTNET),
    "tf_efficientnet": ("tf_efficientnet_b0", EFFICIENTNET),
    "mobilenetv3": ("mobilenetv3_small_100", {**EFFICIENTNET, "rows": _MOBILENETV3}),
    "mobilenetv2": ("mobilenetv2_100", {**EFFICIENTNET, "rows": _MOBILENETV2}),
}
TRANSFORMERS = (
    *("llama", "smollm", "qwen2", "qwen3", "mixtral", "qwen3_moe", "hf_vit"),
    *("hf_dinov2", "hf_dinov2_swiglu", "hf_dinov2_reg", "hf_dinov3", "hf_clip"),
    *("hf_siglip", "hf_resnet", "hf_convnext", "hf_convnextv2"),
)


@functools.cache
def _file(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        # float16 halves a file, and every network computes with float32.
        return {
            key: array.astype(np.float32) if array.dtype == np.float16 else array
            for key, array in file.items()
        }


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights under the library's names, inputs and what it computes of them).

    Args:
      name: of the file, without its suffix.
    """
    arrays = dict(_file(name))
    data = {k: arrays.pop(k) for k in list(arrays) if k.startswith("golden/")}
    data = {key.removeprefix("golden/"): array for key, array in data.items()}
    if "images" in data and data["images"].shape[1] == 3:  # channels first
        data["images"] = data["images"].transpose(0, 2, 3, 1)
    return arrays, data


def abstract(name: str, **changes: object) -> nnx.Module:
    """A golden file's network in the zoo, without weights."""
    kind, options = NETWORKS.get(name) or identify(config_of(name), name)
    return registry.abstract(kind, **{**options, **changes})


def loaded(name: str, **changes: object) -> nnx.Module:
    """A golden file's network in the zoo."""
    model = abstract(name, **changes)
    foreign.fill(model, golden(name)[0])
    return model


def config_of(name: str) -> dict[str, object]:
    """The config.json of a network of transformers."""
    config = json.loads(str(golden(name)[1]["config"]))
    classes = {str(k): "x" for k in range(config.get("num_labels", 0))}
    return {**config, "id2label": classes} if classes else config


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
    write(folder / "model.safetensors", golden(name)[0])
    (folder / "config.json").write_text(json.dumps(config_of(name) | changes))
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
    unused = registry.record_of(model).unused(model, layout)
    assert all(unused.search(key) for key in weights.keys() - written.keys())
