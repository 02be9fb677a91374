"""Preprocessing travels with weights: read, saved, and given to the data pipeline."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from PIL import Image
from test_convert import VIT, golden

from mupax import zoo
from mupax.experiments import data
from mupax.experiments.data.augment import Transform
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build
from mupax.experiments.run.config import parse
from mupax.zoo.preprocessing import read_timm, read_transformers
from mupax.zoo.pretrained import read_data_config

CFG = {
    "input_size": [3, 16, 16],
    "mean": [0.5, 0.4, 0.3],
    "std": [0.1, 0.2, 0.3],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
}
CONFIG = zoo.DataConfig(
    size=(16, 16, 3),
    mean=(0.5, 0.4, 0.3),
    std=(0.1, 0.2, 0.3),
    interpolation="bicubic",
    crop=0.9,
)


def repository(folder, **changes):
    """A repository of timm with the golden file's ViT."""
    folder.mkdir()
    weights, _ = golden("vit_token")
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5}
    (folder / "config.json").write_text(
        json.dumps({**config, "pretrained_cfg": CFG, **changes})
    )
    return folder


def load(folder, **more):
    options = {k: v for k, v in VIT.items() if k != "out_features"}
    return zoo.load_pretrained(folder, **{**options, **more})


def test_the_preprocessing_of_timm_travels_through_our_own_saving(tmp_path):
    names = ["n1", "n2", "n3", "n4", "n5"]
    folder = repository(
        tmp_path / "timm", label_names=names, label_descriptions={"n1": "tench"}
    )
    model = load(folder)
    config = zoo.data_config(model)
    side = VIT["input_shape"][0]
    assert config.labels == ("tench", *names[1:])
    assert config.size == (side, side, 3)
    assert not CONFIG.differences(
        zoo.DataConfig(**{**vars(config), "size": CONFIG.size})
    )
    zoo.save(model, tmp_path / "ours")
    assert zoo.data_config(zoo.load_pretrained(tmp_path / "ours")) == config
    assert read_data_config(tmp_path / "ours") == config
    # With other classes the names would be wrong.
    other = zoo.load_pretrained(tmp_path / "ours", out_features=7)
    assert zoo.data_config(other).labels is None


def test_a_repository_of_transformers_states_preprocessing_and_labels(tmp_path):
    with np.load(pathlib.Path(__file__).parent / "golden" / "hf_vit.npz") as file:
        arrays = dict(file)
    config = json.loads(str(arrays["golden/config"]))
    names = [f"name {i}" for i in range(len(config["id2label"]))]
    config["id2label"] = dict(enumerate(names))
    weights = {k: v for k, v in arrays.items() if not k.startswith("golden/")}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    side = config["image_size"]
    processor = {"size": side, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    known = zoo.data_config(zoo.load_pretrained(tmp_path))
    assert known.labels == tuple(names)
    assert known.size == (side, side, 3)
    assert (known.crop_mode, known.std) == ("squash", (0.25,) * 3)
    assert read_data_config(tmp_path) == known


def test_a_model_of_unknown_preprocessing_is_said(tmp_path):
    model = zoo.create("vit", width=16, depth=1, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"is not known, .*zoo\.set_data_config"):
        zoo.data_config(model)
    grey = zoo.DataConfig(size=(32, 32, 1), mean=(0.5,), std=(0.5,))
    with pytest.raises(ValueError, match="1 channels, but the model has 3"):
        zoo.set_data_config(model, grey)
    with pytest.raises(ValueError, match=r"must be a zoo\.DataConfig"):
        zoo.set_data_config(model, CONFIG.to_json())
    with pytest.raises(ValueError, match="2 labels, but the model has 10"):
        zoo.set_data_config(
            model, zoo.DataConfig(**{**vars(CONFIG), "labels": ("a", "b")})
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": (0, 4, 3)}, "size"),
        ({"mean": (0.5,)}, "mean"),
        ({"std": (0.1, 0.0, 0.1)}, "std"),
        ({"size": 16}, "size=16 must be a tuple"),
        ({"mean": 0.5}, "mean=0.5 must be a tuple"),
        ({"mean": ("a",) * 3}, "one number for each of 3 channels"),
        ({"labels": "abc"}, "labels='abc' must be a tuple"),
        ({"crop": 0.0}, "crop"),
        ({"crop": "a"}, "crop='a' must lie in"),
        ({"interpolation": "cubic"}, "interpolation='cubic' must be one of"),
        ({"crop_mode": "middle"}, "crop_mode"),
        ({"projection": 0}, "projection=0 must be a whole number"),
        ({"projection": 2, "labels": ("a", "b")}, "a projection or has labels"),
    ],
)
def test_a_value_out_of_range_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        zoo.DataConfig(**{**vars(CONFIG), **change})


@pytest.mark.parametrize(
    ("architecture", "tag", "classes", "projection"),
    [
        ("vit_base_patch16_clip_224", "openai", 512, 512),
        ("convnext_base", "clip_laion2b", 640, 640),
        ("vit_base_patch16_clip_224", "openai_ft_in1k", 1000, None),
        ("vit_base_patch16_224", "augreg_in21k", 512, None),
    ],
)
def test_timm_writes_a_clip_projection_as_classes(
    architecture, tag, classes, projection
):
    config = {"architecture": architecture, "num_classes": classes}
    given = {**config, "pretrained_cfg": {**CFG, "tag": tag}}
    assert read_timm(given).projection == projection
    names = [str(i) for i in range(classes)]
    assert read_timm({**given, "label_names": names}).projection is None


def test_lists_are_taken_as_tuples():
    lists = {key: [*vars(CONFIG)[key]] for key in ("size", "mean", "std")}
    assert zoo.DataConfig(**{**vars(CONFIG), **lists}) == CONFIG


def test_a_damaged_preprocessing_leaves_the_weights_usable(tmp_path, caplog):
    broken = {**CFG, "std": [0, 0, 0]}
    model = load(repository(tmp_path / "timm", pretrained_cfg=broken))
    assert "the preprocessing of" in caplog.text
    with pytest.raises(ValueError, match="is not known"):
        zoo.data_config(model)


def test_a_timm_config_without_preprocessing_states_none():
    assert read_timm({"architecture": "resnet50", "num_classes": 10}) is None


@pytest.mark.parametrize(
    ("processor", "size", "crop", "mode"),
    [
        # ViT: both sides are resized.
        ({"size": {"height": 224, "width": 224}}, (224, 224), 1.0, "squash"),
        ({"size": 224}, (224, 224), 1.0, "squash"),
        # ResNet, ConvNeXt: cut out of a larger image.
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 224), 0.875, None),
        ({"size": {"shortest_edge": 384}, "crop_pct": 1.0}, (384, 384), 1.0, "squash"),
        # CLIP, DINOv2: resized by the shorter side, then cropped.
        (
            {
                "size": {"shortest_edge": 256},
                "crop_size": {"height": 224, "width": 224},
                "do_center_crop": True,
            },
            (224, 224),
            0.875,
            "center",
        ),
    ],
)
def test_preprocessors_of_transformers_are_read(processor, size, crop, mode):
    given = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}
    read = read_transformers({}, {**given, **processor})
    assert (read.size[:2], read.crop) == (size, crop)
    assert read.crop_mode == (mode or "center")
    assert read.interpolation == "bicubic"
    assert (read.mean, read.std, read.labels) == ((0.5,) * 3, (0.25,) * 3, None)


def test_made_up_labels_of_transformers_are_none():
    processor = {"size": {"height": 8, "width": 8}}
    table = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    assert read_transformers(table, processor).labels is None
    named = {"id2label": {"1": "dog", "0": "cat"}}
    assert read_transformers(named, processor).labels == ("cat", "dog")


# --- The pipeline ---


def test_squashing_keeps_all_of_an_image_and_a_crop_its_center():
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 6:] = 255  # the last quarter, which a square in the center lacks
    image = Image.fromarray(pixels)
    squashed = Transform((), (4, 4, 3), crop_mode="squash", resample="nearest")
    assert np.asarray(squashed(image, ()))[0, :, 0].tolist() == [0, 0, 0, 255]
    center = Transform((), (4, 4, 3), resample="nearest")
    assert np.asarray(center(image, ())).max() == 0


def test_a_crop_of_images_of_the_same_size_is_not_left_out():
    pixels = np.zeros((8, 8), np.uint8)
    pixels[2:6, 2:6] = 255
    image = Image.fromarray(pixels)
    half = Transform((), (8, 8, 1), crop=0.5, resample="nearest")
    assert np.asarray(half(image, ())).min() == 255


def test_the_pipeline_takes_a_mean_and_a_deviation():
    dataset = data.open_dataset("fake:8x8x3:5", mean=(0.5,) * 3, std=(0.25,) * 3)
    batch = next(dataset.test(4))
    inputs = np.asarray(dataset.normalize(batch)["image"])
    expected = (batch["image"] / 255 - 0.5) / 0.25
    np.testing.assert_allclose(inputs, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="std is None; set both mean and std"):
        data.open_dataset("fake:8x8x3:5", mean=(0.5,) * 3)
    with pytest.raises(UserError, match="crop_mode='border'"):
        data.open_dataset("fake:8x8x3:5", crop_mode="border")


def run_config(source, **changes):
    shapes = ("input_shape", "out_features")
    return {
        "dataset": "fake:24x24x3:5",
        "model": {"name": "vit", **{k: v for k, v in VIT.items() if k not in shapes}},
        "init_from": str(source),
        "learning_rate": 0.1,
        **changes,
    }


def test_a_run_takes_the_preprocessing_of_its_weights_or_says_what_differs(
    tmp_path, caplog
):
    options = {k: v for k, v in VIT.items() if k != "out_features"}
    model = zoo.load_pretrained("vit", repository(tmp_path / "timm"), **options)
    zoo.save(model, tmp_path / "ours")
    side = VIT["input_shape"][0]
    same = build(parse(run_config(tmp_path / "ours", preprocessing="weights")))
    assert same.dataset.input_shape == (side, side, 3)
    assert not same.dataset.data_config.differences(
        zoo.DataConfig(**{**vars(CONFIG), "size": (side, side, 3)})
    )
    assert "are not prepared as the weights" not in caplog.text
    build(parse(run_config(tmp_path / "ours")))
    assert "are not prepared as the weights" in caplog.text
    assert "interpolation bilinear (not bicubic)" in caplog.text
    assert "mean (0.5, 0.5, 0.5) (not (0.5, 0.4, 0.3))" in caplog.text


def test_preprocessing_of_weights_needs_weights_that_state_it(tmp_path):
    with pytest.raises(UserError, match="needs weights: set init_from"):
        parse(run_config("x", init_from=None, preprocessing="weights"))
    zoo.save(
        zoo.create("vit", **VIT, rngs=nnx.Rngs(0)), tmp_path / "none", notes="untrained"
    )
    config = run_config(tmp_path / "none", preprocessing="weights")
    with pytest.raises(UserError, match="weights that record their preprocessing"):
        build(parse(config))
    with pytest.raises(UserError, match="must be one of dataset, weights"):
        parse(run_config("x", preprocessing="own"))


def test_shipped_models_state_the_preprocessing_of_their_data():
    digits = data.open_dataset("digits")
    config = zoo.data_config(zoo.load_pretrained("resmlp_digits"))
    assert not config.differences(digits.data_config)
    assert digits.white == 16
    assert zoo.data_config(zoo.load_pretrained("cnn_mnist")).size == (28, 28, 1)
