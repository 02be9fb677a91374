"""`mupax predict`: images in, labels and probabilities out."""

import dataclasses
import json
import struct
import zlib

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import mupax, refused
from flax import nnx
from goldens import repository
from PIL import Image

from mupax import zoo
from mupax.experiments import data
from mupax.experiments.errors import UserError
from mupax.experiments.loading import load_model
from mupax.experiments.predict import predict

LABELS = ("cat", "dog", "owl")
CONFIG = zoo.DataConfig(
    size=(8, 8, 3),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
    interpolation="bicubic",
    crop=0.5,
    labels=LABELS,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model that was saved with its preprocessing, and one without."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"input_shape": (8, 8, 3), "out_features": 3}
    model = zoo.create("resmlp", width=8, depth=1, rngs=nnx.Rngs(0), **shape)
    zoo.save(model, folder / "unknown")
    zoo.set_data_config(model, CONFIG)
    zoo.save(model, folder / "known")
    return folder


@pytest.fixture
def picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    path = tmp_path / "image.png"
    Image.fromarray(pixels).save(path)
    return path, pixels


def test_the_labels_and_probabilities_of_an_image(saved, picture, capsys):
    path, pixels = picture
    assert mupax("predict", f"--model={saved / 'known'}", "--top=2", path) == 0
    model = zoo.load_pretrained(saved / "known")
    # The center of the image has the size of the input: nothing is resampled.
    inputs = (pixels[4:12, 4:12] / 255 - CONFIG.mean) / CONFIG.std
    expected = np.asarray(jax.nn.softmax(model(jnp.asarray(inputs[None], jnp.float32))))
    order = np.argsort(-expected[0])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(path)
    assert [line.split()[1] for line in printed[1:]] == [LABELS[i] for i in order[:2]]
    rows = predict(model, [str(path)], top=9)[0]
    assert [row.number for row in rows] == order.tolist()
    ours = [row.probability for row in rows]
    np.testing.assert_allclose(ours, expected[0][order], rtol=1e-4)


def test_labels_cannot_command_the_terminal(saved, picture, tmp_path, capsys):
    model = zoo.load_pretrained(saved / "known")
    labels = tuple(f"\x1b[2J{k}\n  99.99%  \u202ecat\x9b" for k in range(len(LABELS)))
    zoo.set_data_config(model, dataclasses.replace(CONFIG, labels=labels))
    zoo.save(model, tmp_path / "forged")
    args = [f"--model={tmp_path / 'forged'}", "--top=1", str(picture[0])]
    assert mupax("predict", *args) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[1].endswith(r"\n  99.99%  \u202ecat\x9b")
    assert r"  \x1b[2J" in printed[1]
    # Messages quote contents of files, too.
    said = refused(capsys, "predict", "--model=\x1b]0;title\x07", "a.png")
    assert "\x1b" not in said


def test_an_image_in_object_storage_is_copied(saved, picture, capsys, monkeypatch):
    path, _ = picture
    monkeypatch.setenv("MUPAX_CACHE", str(path.parent / "cache"))
    fsspec.filesystem("memory").pipe("/b/x.png", path.read_bytes())
    words = ["predict", f"--model={saved / 'known'}", "--top=1"]
    shown = []
    for image in (str(path), "memory://b/x.png"):
        assert mupax(*words, image) == 0
        shown.append(capsys.readouterr().out.replace(image, ""))
    assert shown[0] == shown[1]
    said = refused(capsys, *words, "memory://b/none.png")
    assert "there is nothing at memory://b/none.png" in said


def test_grey_and_transparent_images_are_taken(saved, tmp_path):
    model = zoo.load_pretrained(saved / "known")
    for mode in ("L", "RGBA", "P", "1"):
        path = tmp_path / f"{mode}.png"
        Image.new(mode, (9, 20)).save(path)
        assert len(predict(model, [str(path)])[0]) == 3


def test_an_image_of_16_bits_is_the_same_as_one_of_8(saved, tmp_path):
    model = zoo.load_pretrained(saved / "known")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.png")
    eight, sixteen = predict(model, [str(tmp_path / f"{n}.png") for n in (8, 16)])
    assert eight == sixteen
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "32.tiff")
    with pytest.raises(UserError, match=r"32.tiff.*save it with 8 or 16 bits"):
        predict(model, [str(tmp_path / "32.tiff")])


def test_more_than_a_thousand_images_are_taken(saved, picture, capsys):
    images = [str(picture[0])] * 1001
    assert mupax("predict", f"--model={saved / 'known'}", *images) == 0
    assert capsys.readouterr().out.count(str(picture[0])) == 1001


@pytest.mark.parametrize(
    ("model", "image", "said"),
    [
        ("known", "none.png", "there is no image file"),
        ("known", "text.jpg", "cannot be read as an image"),
        ("known", "cut.png", "cannot be read as an image"),
        ("known", "large.png", "exceeds limit"),
        ("known", None, "no image is given"),
        ("nowhere/at/all", "image.png", "there is no model"),
        ("unknown", "image.png", "and zoo.save(model, DIR)"),
        ("text.jpg", "image.png", "text.jpg"),
        ("", "image.png", "--model is missing"),
    ],
)
def test_a_bad_path_is_one_sentence(saved, picture, model, image, said, capsys):
    folder = picture[0].parent
    (folder / "text.jpg").write_text("no image")
    whole = picture[0].read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    # The header says 60,000 x 60,000 pixels, which Pillow takes for an attack.
    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(b"IHDR" + size))
    (folder / "large.png").write_bytes(whole[:12] + b"IHDR" + size + check + whole[33:])
    source = saved / model if model in ("known", "unknown") else model
    images = [] if image is None else [str(folder / image)]
    assert said in refused(capsys, "predict", f"--model={source}", *images)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnt18", "the nearest is 'resnet18'"),
        ("vit", "mupax convert --model vit --option width=... --option depth=... --so"),
    ],
)
def test_a_file_of_weights_needs_a_name_with_sizes(
    name, said, picture, tmp_path, capsys
):
    (tmp_path / "w.safetensors").touch()
    words = [f"--model={tmp_path / 'w.safetensors'}", f"--name={name}", picture[0]]
    assert said in refused(capsys, "predict", *words)


def test_a_decoder_takes_no_images(picture, tmp_path, capsys):
    model = zoo.create("gpt", width=8, depth=1, heads=1, rngs=nnx.Rngs(0))
    zoo.save(model, tmp_path / "gpt")
    said = refused(capsys, "predict", f"--model={tmp_path / 'gpt'}", picture[0])
    assert "takes tokens, not images" in said


def test_features_are_no_probabilities(picture, tmp_path):
    sizes = {"width": 8, "depth": 1, "heads": 1, "patch_size": 4}
    model = zoo.create(
        "vit", **sizes, input_shape=(8, 8, 3), out_features=0, rngs=nnx.Rngs(0)
    )
    zoo.set_data_config(model, dataclasses.replace(CONFIG, labels=None))
    with pytest.raises(UserError, match=r"has no readout.*load_pretrained"):
        predict(model, [str(picture[0])])
    card = (zoo.save(model, tmp_path / "ours") / "README.md").read_text()
    assert "image-feature-extraction" in card
    assert "mupax predict" not in card


def clip_tower(folder, **changes):
    """A small image tower of CLIP as transformers saves it."""
    folder.mkdir()
    repository(folder, "hf_clip", **changes)
    processor = {"size": 12, "crop_size": 12}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_the_projection_of_a_clip_tower_is_no_probability(picture, tmp_path, capsys):
    tower = clip_tower(tmp_path / "clip")
    model = zoo.load_pretrained(tower)
    size = model.readout.kernel.shape[1]
    with pytest.raises(UserError, match=f"a CLIP: its {size} outputs are an embedding"):
        predict(model, [str(picture[0])])
    zoo.save(model, tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "image-feature-extraction" in card
    assert "mupax predict" not in card
    error = refused(capsys, "predict", f"--model={tmp_path / 'ours'}", picture[0])
    assert "embedding, not classes" in error
    assert "zoo.data_config(model)" in error
    # A new readout classifies.
    model = zoo.load_pretrained(tmp_path / "ours", out_features=size + 1)
    assert zoo.data_config(model).projection is None


def test_a_trained_run_classifies_as_it_was_tested(tmp_path, capsys):
    """The digits of the test split, written as images of 0..255."""
    workdir = tmp_path / "run"
    args = ["--config=digits", f"--workdir={workdir}", "--config.steps=30"]
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.json").write_text("{}")
    refused(capsys, "predict", f"--model={tmp_path / 'half'}", __file__)
    assert mupax("train", *args) == 0
    model = load_model(str(workdir))
    dataset = data.open_dataset("digits")
    assert not zoo.data_config(model).differences(dataset.data_config)
    batch = next(dataset.test(8))
    paths = []
    for i, image in enumerate(batch["image"][..., 0]):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(np.uint8(np.rint(image * (255 / 16)))).save(paths[-1])
    best = [rows[0] for rows in predict(model, paths)]
    expected = np.asarray(model(dataset.normalize(batch)["image"]).argmax(-1))
    assert [row.number for row in best] == expected.tolist()
    assert best[0].label == f"class {best[0].number}"
