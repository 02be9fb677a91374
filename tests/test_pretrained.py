"""Weights of other libraries: filled whole or not at all, and written back."""

import json
import pathlib
import pickle
import re

import goldens
import jax
import numpy as np
import pytest
from goldens import VIT, golden, write

from mupax import zoo
from mupax.zoo.registry import abstract
from mupax.zoo.weights import foreign, saving


def file_of(name: str, folder: pathlib.Path, **more: np.ndarray) -> pathlib.Path:
    """The file that its library would write."""
    ending = "npz" if name in ("vit_augreg", "vit_big_vision") else "safetensors"
    return write(folder / f"weights.{ending}", {**golden(name)[0], **more})


def test_a_pretrained_model_is_its_own_base(tmp_path):
    model = zoo.load_pretrained("vit", file_of("vit_token", tmp_path), **VIT)
    assert {s.width_in for s in zoo.scales(model).values()} == {1.0}
    assert model.plan.depth == 1.0


def test_buffers_are_left_on_purpose_and_nothing_else_is(tmp_path):
    model = goldens.abstract("resnet_basic")
    weights = golden("resnet_basic")[0]
    buffer = {"bn1.num_batches_tracked": np.array(3)}
    assert foreign.fill(model, {**weights, **buffer}) == list(buffer)
    with pytest.raises(ValueError, match=r"holds 'extra\.weight'"):
        foreign.fill(model, {**weights, "extra.weight": np.ones(3)})


@pytest.mark.parametrize("fault", ["missing", "shape", "deeper"])
def test_what_does_not_fit_is_named_and_the_model_left_untouched(fault):
    options = {**VIT, "depth": 3} if fault == "deeper" else VIT
    model = goldens.drawn(abstract("vit", **options))
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
    with pytest.raises(ValueError, match="names for a ResMLP"):
        zoo.load_pretrained("resmlp", path, width=8, depth=2)


SMALL = {k: v for k, v in VIT.items() if k != "out_features"}
VECTOR = np.ones(24, np.float32)


@pytest.mark.parametrize("name", ["vit_token", "vit_torchvision", "vit_augreg"])
def test_a_file_without_a_head_gets_a_new_one_of_the_parametrization(name, tmp_path):
    weights = {k: v for k, v in golden(name)[0].items() if not k.startswith("head")}
    assert len(weights) < len(golden(name)[0])
    path = write(tmp_path / "backbone.safetensors", weights)
    with pytest.raises(ValueError, match=r"without a head.*pass out_features="):
        zoo.load_pretrained("vit", path, **SMALL)
    model = zoo.load_pretrained("vit", path, **SMALL, out_features=6)
    arrays = saving.arrays_of(model)
    # A readout at its own base: normal, with standard deviation 1/sqrt(24).
    kernel = np.asarray(arrays["readout/kernel"])
    assert kernel.shape == (24, 6)
    assert 0.7 < kernel.std() * 24**0.5 < 1.3
    assert not np.asarray(arrays["readout/bias"]).any()
    whole = zoo.load_pretrained("vit", file_of(name, tmp_path), **VIT)
    for key, array in saving.arrays_of(whole).items():
        if not key.startswith("readout/"):
            np.testing.assert_array_equal(arrays[key], array)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("vit_token", {"dist_token": (24,)}, "'dist_token', which this ViT does not"),
        ("vit_token", {"blocks.2.norm1.weight": (24,)}, "check the model's size and o"),
        ("resnet_basic", {"layer1.0.conv2.weight": (4, 1, 3, 3)}, "conv2.weight' has"),
    ],
)
def test_a_key_that_a_model_has_not_is_named(name, change, said):
    weights = golden(name)[0] | {k: np.ones(s, np.float32) for k, s in change.items()}
    with pytest.raises(ValueError, match=said):
        foreign.match(goldens.abstract(name), weights)


def pasted(message: str) -> list[dict[str, object]]:
    """The options that a message says to pass, evaluated; one dict per alternative."""
    said = message.rpartition("pass ")[2]
    found = re.findall(r"(?:\w+=(?:\([^)]*\)|'[^']*'|[^\s,;]+)(?:, (?=\w+=))?)+", said)
    return [eval(f"dict({text})") for text in found]


LLAMA = {"width": 24, "depth": 2, "heads": 2, "vocab_size": 11, "context": 8}
# (model, options of the file's network, options of the model).
MISFITS = [
    ("vit", {"class_position": False}, {}),
    ("vit", {}, {"class_position": False}),
    ("vit", {"out_features": 0}, {}),
    ("vit", {"input_shape": (64, 64, 3)}, {}),
    ("llama", {"tied": False}, {}),
    ("llama", {"head": False}, {"tied": False}),
    ("gpt", {}, {"tied": False}),
]


def test_every_option_that_an_error_names_is_a_remedy():
    """Pasted into the call, one after another, they load the file."""
    small = {"vit": VIT, "gpt": LLAMA, "llama": LLAMA}
    named = set()
    for name, theirs, ours in MISFITS:
        model = abstract(name, **{**small[name], **theirs})
        sources = foreign.exported_names(model).values()
        weights = {s.key: np.full(s.shape, i, "f") for i, s in enumerate(sources)}

        def misfit(options, name=name, weights=weights):
            more = {
                "new_head": "out_features" in options,
                "resize": "input_shape" in options,
            }
            try:
                foreign.match(abstract(name, **options), weights, **more)
            except ValueError as error:
                return str(error)

        left_out = ("out_features", "input_shape", "vocab_size", "context")
        ours = {k: v for k, v in small[name].items() if k not in left_out} | ours
        todo, steps = [ours], 0
        while todo:
            options = todo.pop()
            said = misfit(options)
            steps += 1
            if said is not None:
                remedies = pasted(said)
                assert remedies, said
                assert steps < 8, (said, options)
                named |= {key for remedy in remedies for key in remedy}
                todo += [{**options, **remedy} for remedy in remedies]
        assert steps > 1, (name, theirs, ours)
    sizes = {"out_features", "input_shape", "vocab_size", "context", "class_position"}
    assert named == {*sizes, "head", "tied"}


ENCODER = {**VIT, "depth": 1, "out_features": 2}
BASE, BOTH = {"out_features": 0}, {"pool": "token_and_mean"}
DINOV2 = {**ENCODER, "layer_scale": 1.0}
DINOV3 = {
    **{**DINOV2, **BASE, "registers": 2, "position": False, "rotary": True},
    "key_bias": False,
}
CLIP = {**ENCODER, "pre_norm": True, "patch_bias": False, "readout_bias": False}
DECODER = {**LLAMA, "depth": 1}
PYRAMID = {"width": 8, "blocks": (1, 1, 1, 1)}
# Cases of golden/layout_names.json: (model, options).
WRITTEN = {
    "vit": ("vit", ENCODER),
    "vit base": ("vit", {**ENCODER, **BASE}),
    "dinov2": ("vit", {**DINOV2, **BOTH}),
    "dinov2 base": ("vit", {**DINOV2, **BASE}),
    "dinov2 gated": ("vit", {**DINOV2, **BOTH, "gated": True}),
    "dinov2 registers": ("vit", {**DINOV2, **BOTH, "registers": 2}),
    "dinov2 registers base": ("vit", {**DINOV2, **BASE, "registers": 2}),
    "dinov3": ("vit", DINOV3),
    "dinov3 gated": ("vit", {**DINOV3, "gated": True}),
    "clip": ("vit", CLIP),
    "clip base": ("vit", {**CLIP, **BASE}),
    "siglip": ("vit", {**ENCODER, **BASE, "pool": "attention"}),
    "resnet": ("resnet18", PYRAMID),
    "convnext": ("convnext_tiny", PYRAMID),
    "convnextv2": ("convnextv2_tiny", PYRAMID),
    "gpt": ("gpt", DECODER),
    "gpt untied": ("gpt", {**DECODER, "tied": False}),
    "gpt base": ("gpt", {**DECODER, "head": False}),
    "llama": ("llama", DECODER),
    "llama untied": ("llama", {**DECODER, "tied": False}),
    "llama base": ("llama", {**DECODER, "head": False}),
    "qwen2": ("llama", {**DECODER, "qkv_bias": True}),
    "qwen3": ("llama", {**DECODER, "qk_norm": True}),
    "mixtral": ("llama", {**DECODER, "tied": False, "experts": 2}),
    "qwen3_moe": ("llama", {**DECODER, "tied": False, "experts": 2, "qk_norm": True}),
}


def test_exported_names_are_those_that_transformers_writes():
    golden = json.loads((goldens.GOLDEN / "layout_names.json").read_text())
    del golden["timm convnext"]
    assert golden.keys() == WRITTEN.keys()
    for case, (name, options) in WRITTEN.items():
        model = abstract(name, **options)
        layout = f"transformers_{case.split()[0]}" if name == "vit" else "transformers"
        names = {s.key for s in foreign.exported_names(model, layout).values()}
        if case in ("clip base", "siglip"):
            # Read with this prefix too, which older versions of transformers need.
            names = {name.removeprefix("vision_model.") for name in names}
        assert names == set(golden[case]), case


def test_a_convnext_is_written_with_the_kernels_that_timm_has_for_its_size():
    ranks = json.loads((goldens.GOLDEN / "layout_names.json").read_text())
    for name, rank in ranks["timm convnext"].items():
        names = foreign.exported_names(abstract(name, blocks=(1,)))
        assert len(names["stages/0/blocks/up/kernel", 0].shape) == rank, name


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("vit", "features.0.0.weight", "another network than ViT, or of a library"),
        ("llama", "base_model.model.q_proj.lora_A.weight", "with adapters merged"),
    ],
)
def test_a_file_of_another_format_is_named_with_what_to_do(name, key, said):
    with pytest.raises(ValueError, match=said) as refused:
        foreign.match(abstract(name, width=64, depth=1), {key: VECTOR})
    assert repr(key) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.gguf", "model.gguf.* convert it .* with the library that wrote it"),
        ("tf_model.h5", "tf_model.h5.* convert it .* with the library that wrote it"),
        ("model.npz", "pass '.*model.npz' and the name of its model"),
    ],
)
def test_a_directory_of_other_weights_says_what_to_do(tmp_path, name, said):
    """And no other file than a pickle is to be unpickled."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    file = tmp_path / name
    file.write_bytes(b"\0" * 99)
    with pytest.raises(ValueError, match=said):
        zoo.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"with the library that|is no \.npz file"):
        foreign.read(file)


def test_fp8_is_named(tmp_path):
    head = {"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(head).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(
        ValueError, match=r"fp8 .* quantized.* original weights in bfloat16"
    ):
        foreign.read(file)


def test_a_directory_of_pickled_weights_says_how_to_convert_them(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"no weights; add its model\.safetensors"):
        zoo.load_pretrained(tmp_path)
    for part in (1, 2):
        (tmp_path / f"pytorch_model-{part}-of-2.bin").write_bytes(b"")
    said = r"only 'pytorch_model-1-of-2\.bin': pickles can run.*model-2-of-2\.bin'\]"
    with pytest.raises(ValueError, match=said):
        zoo.load_pretrained(tmp_path)
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pass '.*open_clip_model\.safetensors'"):
        zoo.load_pretrained(tmp_path)


def test_positions_are_interpolated_only_if_a_size_is_asked_for(tmp_path):
    path = file_of("vit_token", tmp_path)
    usual = {k: v for k, v in VIT.items() if k != "input_shape"}
    model = zoo.load_pretrained("vit", path, **VIT)
    larger = zoo.load_pretrained("vit", path, **usual, input_shape=(48, 64, 3))
    assert larger.position.shape == (1 + 6 * 8, 24)
    images = jax.random.normal(jax.random.key(0), (2, 48, 64, 3))
    for each in (model, larger):
        each.eval()
    # The model of the file's own size interpolates when it is called.
    found = (goldens.run(each, images) for each in (model, larger))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
    other = goldens.abstract("vit_token", input_shape=(64, 64, 3))
    with pytest.raises(ValueError, match=r"32x32 pixels.*64x64.*pass input_shape"):
        foreign.match(other, golden("vit_token")[0])


def test_a_bare_file_says_which_architecture_was_assumed(tmp_path, caplog):
    zoo.load_pretrained("vit", file_of("vit_torchvision", tmp_path), **VIT)
    assert "assumed torchvision's vit" in caplog.text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    weights = golden("vit_token")[0]
    weights["norm.weight"] = weights["norm.weight"].copy()
    weights["norm.weight"][3] = bad
    model = goldens.abstract("vit_token")
    with pytest.raises(ValueError, match=r"'norm\.weight' holds NaN or infinity"):
        foreign.fill(model, weights)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file or directory '.*nowhere'"):
        zoo.load_pretrained(str(tmp_path / "nowhere"))
