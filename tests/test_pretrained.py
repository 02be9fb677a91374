"""Weights of other libraries: filled whole or not at all, and written back."""

import pathlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from mupax import zoo
from mupax.zoo import foreign, saving

GOLDEN = pathlib.Path(__file__).parent / "golden"
VIT = {
    "width": 24,
    "depth": 2,
    "heads": 3,
    "patch_size": 8,
    "input_shape": (32, 32, 3),
    "out_features": 5,
}
GPT = {
    "width": 24,
    "depth": 2,
    "heads": 3,
    "nonlinearity": "gelu_tanh",
    "norm_eps": 1e-5,
    "vocab_size": 50,
    "context": 16,
}
RESNET = {"width": 4, "depth": 1, "blocks": (2, 1, 1, 2), "out_features": 7}
CASES = {
    "vit_token": ("vit", VIT),
    "vit_mean": ("vit", {**VIT, "pool": "mean"}),
    "vit_torchvision": ("vit", VIT),
    "vit_augreg": ("vit", VIT),
    "vit_big_vision": ("vit", {**VIT, "class_position": False}),
    "gpt2": ("gpt", GPT),
    "resnet_basic": ("resnet18", RESNET),
}


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights under their own keys, inputs and logits)."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    if name.startswith("resnet"):
        weights = {k[7:]: v for k, v in arrays.items() if k.startswith("before/")}
        return weights, arrays
    data = {k: arrays.pop(k) for k in list(arrays) if k.startswith("golden/")}
    return arrays, {k.removeprefix("golden/"): v for k, v in data.items()}


def file_of(name: str, folder: pathlib.Path, **more: np.ndarray) -> pathlib.Path:
    """The file that its library would write."""
    weights = {**golden(name)[0], **more}
    if name in ("vit_augreg", "vit_big_vision"):
        np.savez(folder / "weights.npz", **weights)
        return folder / "weights.npz"
    path = folder / "weights.safetensors"
    safetensors.numpy.save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, path
    )
    return path


@pytest.mark.parametrize("name", ["vit_token", "vit_big_vision", "gpt2"])
def test_a_loaded_model_gives_the_logits_of_its_library(name, tmp_path):
    kind, options = CASES[name]
    model = zoo.load_pretrained(kind, file_of(name, tmp_path), **options)
    model.eval()
    data = golden(name)[1]
    logits = model(jnp.asarray(data["tokens" if name == "gpt2" else "images"]))
    apart = np.abs(np.asarray(logits) - data["logits"]).max()
    assert apart < 1e-5 * np.abs(data["logits"]).max()


@pytest.mark.parametrize("name", CASES)
def test_every_key_comes_back_from_an_export(name, tmp_path):
    kind, options = CASES[name]
    # Abstract: every leaf is filled, so none need be initialized first.
    model = nnx.eval_shape(lambda: zoo.create(kind, **options, rngs=nnx.Rngs(0)))
    weights = golden(name)[0]
    foreign.fill(model, foreign.read(file_of(name, tmp_path)))
    found = [n for n in foreign.layouts(model) if name.endswith(n)]
    back = foreign.export(model, *found)
    assert set(back) == set(weights)
    for key, array in weights.items():
        np.testing.assert_array_equal(back[key], array)


def test_a_pretrained_model_is_its_own_base(tmp_path):
    model = zoo.load_pretrained("vit", file_of("vit_token", tmp_path), **VIT)
    assert {s.width_in for s in zoo.scales(model).values()} == {1.0}
    assert model.plan.depth == 1.0


def test_another_number_of_classes_gets_a_new_head(tmp_path):
    path = file_of("vit_token", tmp_path)
    model = zoo.load_pretrained("vit", path, **{**VIT, "out_features": 3})
    arrays = saving.arrays_of(model)
    assert arrays["readout/kernel"].shape == (24, 3)
    proj = golden("vit_token")[0]["patch_embed.proj.bias"]
    np.testing.assert_array_equal(arrays["readin/bias"], proj)


def test_buffers_are_left_on_purpose_and_nothing_else_is(tmp_path):
    model = nnx.eval_shape(lambda: zoo.create("resnet18", **RESNET, rngs=nnx.Rngs(0)))
    weights = golden("resnet_basic")[0]
    buffer = {"bn1.num_batches_tracked": np.array(3)}
    assert foreign.fill(model, {**weights, **buffer}) == list(buffer)
    with pytest.raises(ValueError, match=r"holds 'extra\.weight'"):
        foreign.fill(model, {**weights, "extra.weight": np.ones(3)})


@pytest.mark.parametrize("fault", ["missing", "shape", "deeper"])
def test_what_does_not_fit_is_named_and_the_model_left_untouched(fault):
    options = {**VIT, "depth": 3} if fault == "deeper" else VIT
    model = zoo.create("vit", **options, rngs=nnx.Rngs(0))
    before = {k: np.asarray(v) for k, v in saving.arrays_of(model).items()}
    weights = golden("vit_token")[0]
    key = "blocks.1.mlp.fc2.weight"
    if fault == "missing":
        del weights[key]
    if fault == "shape":
        weights[key] = weights[key].T
    key = "blocks.2" if fault == "deeper" else key
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        foreign.fill(model, weights)
    for path, array in saving.arrays_of(model).items():
        np.testing.assert_array_equal(array, before[path])


def test_a_truncated_file_is_refused(tmp_path):
    path = file_of("vit_token", tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        zoo.load_pretrained("vit", path, **VIT)


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "exploded",))

    for name in ("weights.pth", "weights.npz"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(ValueError, match=r"safetensors|cannot be read"):
            zoo.load_pretrained("vit", tmp_path / name, **VIT)
    assert not (tmp_path / "exploded").exists()


def test_a_kind_that_has_no_names_elsewhere_is_refused(tmp_path):
    path = file_of("vit_token", tmp_path)
    with pytest.raises(ValueError, match="not for ResMLP"):
        zoo.load_pretrained("resmlp", path, width=8, depth=2)
