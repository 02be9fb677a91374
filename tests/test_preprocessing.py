"""Preprocessing travels with weights: read, saved, and given to the data pipeline."""

import json
import math
import pathlib

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from goldens import VIT, golden
from PIL import Image

from mupax import zoo
from mupax.experiments import data
from mupax.experiments.data.augment import Transform
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build
from mupax.experiments.run.config import parse
from mupax.zoo.preprocessing import read_timm, read_transformers
from mupax.zoo.weights.pretrained import read_data_config

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
        ({"mean": (0.5,)}, "mean"),
        ({"size": 16}, r"size=16 must be \(height, width"),
        ({"size": (100_000, 8, 3)}, "from 1 to 32768"),
        ({"size": (True, 8, 3)}, "from 1 to 32768"),
        ({"std": (1e-320,) * 3}, r"std=.*from 1e-06 to 1e\+06"),
        ({"mean": (10**400, 0, 0)}, r"mean=\(1000"),
        ({"crop": 1e-300}, "crop=1e-300 must be a number from 0.01 to 1"),
        ({"labels": (1, 2)}, "must be a tuple of strings"),
        ({"mean": 0.5}, "mean=0.5 must be a tuple"),
        ({"mean": ("a",) * 3}, "one number for each of 3 channels"),
        ({"labels": "abc"}, "labels='abc' must be a tuple"),
        ({"crop": "a"}, "crop='a' must be a number"),
        ({"interpolation": "cubic"}, "interpolation='cubic' must be one of"),
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


BICUBIC = Image.Resampling.BICUBIC


def shorter_side(image, side, resample):
    """`Resize(int)` of torchvision, `get_resize_output_image_size` of transformers."""
    w, h = image.size
    long = int(side * max(w, h) / min(w, h))
    return image.resize((side, long) if w <= h else (long, side), resample)


def keep_ratio(image, size, longest, resample):
    """`ResizeKeepRatio` of timm, size (height, width)."""
    ratios = image.height / size[0], image.width / size[1]
    ratio = max(ratios) if longest else min(ratios)
    size = (max(round(n / ratio), 1) for n in image.size)
    return image.resize(tuple(size), resample)


def center_crop(image, size, rounded):
    """`CenterCrop` of torchvision, or `center_crop` of transformers."""
    spare = image.height - size[0], image.width - size[1]
    y, x = (round(n / 2.0) if rounded else n // 2 for n in spare)
    return image.crop((x, y, x + size[1], y + size[0]))


def pad(image, size, colour):
    spare = [max(size[0] - image.height, 0), max(size[1] - image.width, 0)]
    shape = image.height + spare[0], image.width + spare[1]
    canvas = np.empty((*shape, 3), np.uint8)
    canvas[:] = colour
    y, x = spare[0] // 2, spare[1] // 2
    canvas[y : y + image.height, x : x + image.width] = image
    return Image.fromarray(canvas)


def timm(mode, side=(32, 32), crop=0.9):
    """The config of timm, and what `transforms_imagenet_eval` does."""
    larger = tuple(math.floor(n / crop) for n in side)

    def prepare(image):
        if mode == "squash":
            image = image.resize(larger[::-1], BICUBIC)
        elif mode == "border":
            image = keep_ratio(image, larger, True, BICUBIC)
            image = pad(image, side, [round(255 * v) for v in CFG["mean"]])
        elif side[0] == side[1]:
            image = shorter_side(image, larger[0], BICUBIC)
        else:
            image = keep_ratio(image, larger, False, BICUBIC)
        return center_crop(image, side, True)

    size = {"input_size": [3, *side], "crop_pct": crop, "crop_mode": mode}
    return read_timm({"pretrained_cfg": {**CFG, **size}}), prepare


def transformers(processor, prepare):
    given = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    return read_transformers({}, {**given, **processor}), prepare


def clip(edge, cut):
    """Of CLIP, DINOv2, ResNet and MobileNet."""
    return transformers(
        {"size": {"shortest_edge": edge}, "crop_size": {"height": cut, "width": cut}},
        lambda im: center_crop(shorter_side(im, edge, BICUBIC), (cut, cut), False),
    )


def convnext(edge, crop):
    larger = int(edge / crop)
    return transformers(
        {"size": {"shortest_edge": edge}, "crop_pct": crop},
        lambda im: center_crop(shorter_side(im, larger, BICUBIC), (edge, edge), False),
    )


def exact(size, cut=None):
    """Of ViT and SigLIP, and with a crop of DeiT."""
    processor = {"size": dict(zip(("height", "width"), size, strict=True))}
    if cut is not None:
        processor |= {"do_center_crop": True, "crop_size": {"height": cut}}
    return transformers(
        processor,
        lambda im: center_crop(
            im.resize(size[::-1], BICUBIC), size if cut is None else (cut, cut), False
        ),
    )


@pytest.mark.parametrize(
    "case",
    [
        *(timm("center", crop=crop) for crop in (1.0, 0.95, 0.9, 0.875)),
        *(timm("squash", crop=crop) for crop in (1.0, 0.9)),
        *(timm("border", crop=crop) for crop in (1.0, 0.9)),
        *(timm(mode, (24, 40)) for mode in ("center", "squash", "border")),
        clip(32, 32),
        clip(37, 32),
        clip(49, 31),
        convnext(32, 0.875),
        convnext(31, 0.95),
        exact((32, 32)),
        exact((24, 40)),
        exact((37, 37), 32),
    ],
)
def test_images_are_prepared_as_by_the_library_of_the_weights(case):
    config, prepare = case
    transform = Transform((), config)
    random = np.random.default_rng(0)
    sides = [(64, 64), (50, 75), (101, 67), (333, 500), (32, 32), (31, 33), (3, 5)]
    sides += [(32, n) for n in (35, 37, 39)]  # an odd number is cut off
    sides += [(1, 1), (2, 50), (50, 2), (400, 30), (7, 900), (900, 7)]
    for height, width in [*sides, *random.integers(1, 200, (8, 2)).tolist()]:
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        ours = np.asarray(transform(image, ())).astype(int)
        np.testing.assert_array_equal(ours, np.asarray(prepare(image)))


@pytest.mark.parametrize(("cut", "edge"), [(224, 256), (224, 257), (518, 519), (7, 90)])
def test_a_crop_of_transformers_keeps_the_size_before_it(cut, edge):
    config, _ = clip(edge, cut)
    assert math.floor(config.size[0] / config.crop) == edge


@pytest.mark.parametrize(
    "processor",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 40, "width": 40}},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 16, "width": 24}},
        {"size": {"height": 32, "width": 40}, "crop_size": 16},
    ],
)
def test_a_crop_that_would_be_another_image_is_an_error(processor):
    with pytest.raises(ValueError, match=r"a crop of .* is not supported"):
        read_transformers({}, {"do_center_crop": True, **processor})


def test_the_pipeline_takes_a_mean_and_a_deviation():
    dataset = data.open_dataset("fake:8x8x3:5", mean=(0.5,) * 3, std=(0.25,) * 3)
    batch = next(dataset.test(4))
    inputs = np.asarray(dataset.normalize(batch)["image"])
    expected = (batch["image"] / 255 - 0.5) / 0.25
    np.testing.assert_allclose(inputs, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="std is None; set both, or neither"):
        data.open_dataset("fake:8x8x3:5", mean=(0.5,) * 3)
    with pytest.raises(UserError, match=r"std=.*from 1e-06 to 1e\+06"):
        data.open_dataset("fake:8x8x3:5", mean=(0.5,) * 3, std=(1e-40,) * 3)
    for mean in (7, (float("nan"),) * 3, "x", (0.5,)):
        with pytest.raises(UserError, match=r"must be (a tuple|one number for each)"):
            data.open_dataset("fake:8x8x3:5", mean=mean, std=(0.5,) * 3)
    with pytest.raises(UserError, match="crop_mode='border' pads images with their"):
        data.open_dataset("fake:8x8x3:5", crop_mode="border")
    padded = data.open_dataset(
        "fake:8x8x3:5",
        image_size=(8, 16),
        crop_mode="border",
        mean=(0.5, 0.25, 1.0),
        std=(0.25,) * 3,
    )
    pixels = next(padded.test(2))["image"]
    assert np.unique(pixels[:, :, :4], axis=2).tolist() == [[[[128, 64, 255]]] * 8] * 2
    assert np.unique(pixels[:, :, 4:12], axis=2).shape[2] == 8


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
