"""Your own images: folders, .npz files, and data from Python."""

import os
import types

import numpy as np
import pytest
from PIL import Image

import mupax
from mupax.experiments import data
from mupax.experiments.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (40, 6, 5), np.uint8)
Y = np.arange(40) % 2


def write(path, size=(6, 5), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, **options)


def folder(root, counts, **options):
    """Images "split/class/k.png", a number for each "split/class"."""
    for place, count in counts.items():
        for k in range(count):
            write(root / place / f"{k}.png", **options)
    return f"images:{root}"


def test_a_folder_gives_classes_sizes_and_splits(tmp_path):
    name = folder(tmp_path, {"train/cat": 4, "train/dog": 4, "val/dog": 3})
    (tmp_path / "train/cat/.DS_Store").touch()
    (tmp_path / ".git").mkdir()
    opened = data.open_dataset(name)
    assert (opened.labels, opened.out_features) == (("cat", "dog"), 2)
    assert (opened.train_size, opened.test_size) == (8, 3)
    assert opened.input_shape == (6, 5, 3)
    assert opened.training_arrays()["label"].tolist() == [0] * 4 + [1] * 4
    pixels = np.asarray(Image.open(tmp_path / "train/cat/2.png"))
    np.testing.assert_array_equal(opened.training_arrays()["image"][2], pixels)
    grey = folder(tmp_path / "grey", {"a": 2, "b": 2}, mode="L")
    assert data.open_dataset(grey).input_shape == (6, 5, 1)


def test_links_that_lead_back_are_read_once(tmp_path):
    name = folder(tmp_path, {"train/a": 2, "train/b": 2, "test/a": 1, "test/b": 1})
    for k in range(3):
        (tmp_path / "train/a" / f"up{k}").symlink_to(".")
        (tmp_path / "train/b" / f"up{k}").symlink_to("../b")
    assert data.open_dataset(name).train_size == 4


def test_a_pipe_instead_of_arrays_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(UserError, match="it is not a regular file"):
        data.open_dataset(f"npz:{tmp_path / 'x.npz'}")


def test_a_pipe_instead_of_an_image_is_refused(tmp_path):
    name = folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a/1.png").unlink()
    os.mkfifo(tmp_path / "a/1.png")
    with pytest.raises(UserError, match=r"a/1\.png cannot .*it is not a regular file"):
        data.open_dataset(name)


def test_without_a_test_split_a_tenth_of_each_class_is_always_the_same(
    tmp_path, caplog
):
    name = folder(tmp_path, {"a": 20, "b": 30, "c": 2})
    first, second = data.open_dataset(name), data.open_dataset(name)
    assert "drawn with seed 0" in caplog.text
    held = [batch["label"] for batch in first.test(6)]
    assert np.bincount(np.concatenate(held)).tolist() == [2, 3, 1]
    assert first.fingerprint == second.fingerprint
    both = np.concatenate(
        [first.training_arrays()["image"], next(first.test(6))["image"]]
    )
    assert len(np.unique(both.reshape(len(both), -1), axis=0)) == 52


def test_an_image_is_read_as_it_looks(tmp_path):
    """Upright, with white for what is transparent, and all 16 bits."""
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, :4] = 255
    upright = {"exif": Image.Exif()}
    upright["exif"][0x0112] = 6  # the camera was turned
    half = np.dstack([np.zeros((8, 4, 3), np.uint8), np.full((8, 4), 0, np.uint8)])
    half[4:, :, 3] = 255
    deep = np.repeat([[65535], [0]], 4, axis=0).astype(np.uint16) * np.ones(
        4, np.uint16
    )
    for k in range(2):
        for name, image, options in (
            ("exif", Image.fromarray(wide), {**upright, "quality": 100}),
            (
                "cmyk",
                Image.fromarray(wide).convert("CMYK").rotate(-90, expand=True),
                {},
            ),
            ("alpha", Image.fromarray(half), {}),
            ("deep", Image.fromarray(deep), {}),
        ):
            (tmp_path / name).mkdir(exist_ok=True)
            kind = "png" if name in ("alpha", "deep") else "tif"
            kind = "jpg" if name == "exif" else kind
            image.save(tmp_path / name / f"{k}.{kind}", **options)
    opened = data.open_dataset(f"images:{tmp_path}")
    assert opened.input_shape == (8, 4, 3)
    for image in opened.training_arrays()["image"]:
        assert (image[:4] > 250).all()
        assert (image[4:] < 5).all()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"has no subfolders; put the images of each class"),
        ({"a": 3}, r"one class only"),
        ({"a": 3, "b": 0}, r"b holds no image"),
        ({"a": 3, "a ": 3}, r"two names of one class, 'a' and 'a '"),
        ({"train/a": 2, "train/b": 2, "test/c": 1}, r"no training image has class 'c'"),
        ({"a": 1, "b": 1}, r"too few images for a test split"),
    ],
)
def test_a_mistake_in_a_folder_is_named(tmp_path, counts, message):
    for place in counts:
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        data.open_dataset(folder(tmp_path, counts))


def test_a_file_that_is_no_image_is_named(tmp_path):
    name = folder(tmp_path, {"a": 3, "b": 3})
    whole = (tmp_path / "a/1.png").read_bytes()
    (tmp_path / "a/1.png").write_bytes(whole[: len(whole) // 2])
    opened = data.open_dataset(name)  # its header is whole
    with pytest.raises(UserError, match=r"a/1\.png cannot be read as an image"):
        opened.training_arrays()
    (tmp_path / "a/1.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"a/1\.png cannot be read as an image"):
        data.open_dataset(name)


def npz(path, **arrays):
    np.savez(path / "x.npz", **arrays)
    return data.open_dataset(f"npz:{path}/x.npz")


def test_arrays_of_every_common_form_are_the_same_dataset(tmp_path):
    expected = npz(tmp_path, x_train=X, y_train=Y, x_test=X[:9], y_test=Y[:9])
    assert expected.input_shape == (6, 5, 1)
    prints = {
        npz(tmp_path, **arrays).fingerprint
        for arrays in (
            {"train_images": X / 255, "train_labels": Y[:, None]}
            | {"test_images": np.float32(X[:9] / 255), "test_labels": Y[:9, None]},
            {"image_train": X.astype(float), "label_train": Y.astype(float)}
            | {"image_val": np.int64(X[:9, ..., None]), "label_val": Y[:9] == 1},
        )
    }
    assert prints == {expected.fingerprint}
    named = npz(tmp_path, x=X, y=np.array(["dog", "cat"])[Y])
    assert (named.labels, named.train_size, named.test_size) == (("cat", "dog"), 36, 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": Y + 1}, r"no training image has label 0"),
        ({"x": X, "y": 2 * Y}, r"no training image has label 1"),
        ({"x": X, "y": Y - 1}, r"without labels \(-1\)"),
        ({"x": X, "y": -2 * Y}, r"has label -2, and classes are 0\.\.0"),
        ({"x": X, "y": Y + 0.5}, r"not integers, e\.g\. 0\.5"),
        ({"x": X, "y": np.eye(2)[Y]}, r"argmax of one-hot"),
        ({"x": X, "y": Y[:7]}, r"40 images have 7 labels; give one"),
        ({"x": X, "y": 0 * Y}, r"one class only"),
        ({"x": np.where(X[0, 0, 0] == X, np.nan, X), "y": Y}, r"x holds .* NaN"),
        ({"x": X / 255 - 0.5, "y": Y}, r"from -0\.5 to 0\.5; give pixels of 0\.\.255"),
        ({"x": X / 254, "y": Y}, r"from 0 to 1\.004"),
        ({"x": X * np.uint16(257), "y": Y}, r"0 to 6\.55"),
        ({"x": X.reshape(40, 30), "y": Y}, r"shape \(40, 30\); images have shape"),
        ({"x": np.stack([X] * 3, 1), "y": Y}, r"shape \(40, 3, 6, 5\)"),
        ({"x": X.astype(object), "y": Y}, r"write numeric arrays"),
        ({"photos": X, "y": Y}, r"holds photos, y; name its arrays x and y"),
        ({"x": X, "image": X, "y": Y}, r"holds both x and image"),
        (
            {"x_train": X / 255, "y_train": Y, "x_test": X * 1.0, "y_test": Y},
            r"different ranges",
        ),
        (
            {"x_train": X, "y_train": Y, "x_test": X[:, 1:], "y_test": Y},
            r"shape \(6, 5, 1\) and test images \(5, 5, 1\)",
        ),
        (
            {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1},
            r"test: .* label 2",
        ),
    ],
)
def test_a_mistake_in_arrays_is_named(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        npz(tmp_path, **arrays)


def test_a_path_without_its_prefix_is_no_dataset(tmp_path, monkeypatch):
    folder(tmp_path / "mine", {"a": 1})
    monkeypatch.chdir(tmp_path)
    forms = r"images:DIRECTORY, npz:FILE, text:FILE"
    for name in ("mine", f"{tmp_path}/mine", "x.npz", "song.txt", "s3://b/a.jsonl"):
        with pytest.raises(UserError, match=f"no dataset '{name}'.*{forms}"):
            data.open_dataset(name, tmp_path)
    with pytest.raises(UserError, match=f"no dataset 'https://host/x'.*{forms}"):
        data.open_dataset("https://me:secret@host/x")
    for name in ("npz:none.npz", "images:none"):
        with pytest.raises(UserError, match=r"none"):
            data.open_dataset(name)
    (tmp_path / "x.npz").write_bytes(b"PK junk")
    with pytest.raises(UserError, match=r"x\.npz .*it is no \.npz file"):
        data.open_dataset("npz:x.npz")
    np.save("one.npy", X)
    with pytest.raises(UserError, match=r"np\.savez\('one\.npz', x_train"):
        data.open_dataset("npz:one.npy")


class ImageFeature:
    """The column type of Hugging Face, which is called Image."""

    def __init__(self, decode=True):
        self.decode = decode


ImageFeature.__name__ = "Image"


class Table:
    """A stand-in for a dataset of Hugging Face, of encoded images."""

    def __init__(self, folder, decode=True, rows=range(8)):
        names = types.SimpleNamespace(names=["cat", "dog"])
        self.features = {"img": ImageFeature(decode), "label": names}
        self._folder, self._rows = folder, rows

    def __len__(self):
        return len(self._rows)

    def select(self, rows):
        return Table(self._folder, self.features["img"].decode, rows)

    def with_format(self, kind):
        assert kind is None
        return self

    def cast_column(self, key, feature):
        assert (key, feature.decode) == ("img", False)
        return Table(self._folder, feature.decode)

    def __getitem__(self, key):
        if key == "label":
            return [k % 2 for k in range(8)]
        file = self._folder / "all" / f"{self._rows[key]}.png"
        assert not self.features["img"].decode
        if key % 2:
            return {"img": {"bytes": None, "path": str(file)}}
        return {"img": {"bytes": file.read_bytes(), "path": None}}


def test_data_from_python_are_the_same_in_every_form(tmp_path):
    folder(tmp_path, {"all": 8})
    images = [Image.open(tmp_path / f"all/{k}.png") for k in range(8)]
    x, y = np.stack([np.asarray(image) for image in images]), Y[:8]

    class Items:  # as a dataset of PyTorch
        __len__ = lambda self: 8  # noqa: E731

        def __getitem__(self, k):
            return x[k], int(y[k])

    forms = [
        (x, y),
        zip(x, y, strict=True),
        Items(),
        [(x[:5], y[:5]), {"image": x[5:], "label": y[5:]}],  # batches, as of a loader
        [{"image": i, "label": int(k)} for i, k in zip(images, y, strict=True)],
        Table(tmp_path),
        {"x": x, "y": y},
    ]
    for form in forms:
        data.register_dataset("mine", {"train": form, "test": (x, y)})
        opened = data.open_dataset("mine")
        arrays = opened.training_arrays()
        np.testing.assert_array_equal(arrays["image"], x)
        np.testing.assert_array_equal(arrays["label"], y)
        assert opened.input_shape == (6, 5, 3)
    data.register_dataset("mine", Table(tmp_path))
    assert data.open_dataset("mine").labels == ("cat", "dog")
    for form in (Table(tmp_path), opened, zip(x, y, strict=True)):
        np.testing.assert_array_equal(data.examples_of(form)["image"], x)
    assert data.examples_of({"x": x}) == {"x": x}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "is a int; give a pair"),
        ([], "is empty"),
        ([1], "example 0 is no pair"),
        ([(X[0], 0), (X[1, 1:], 1.5)], "not integers"),
        ([(X[0], np.eye(3)[0])], r"label of example 0 has shape \(3,\).*argmax"),
        ({"tain": (X, Y)}, "has the splits tain; name one of them 'train'"),
        ([(X[0] / 255, 0), (X[1, 1:] / 255, 1)], "different sizes must be uint8"),
    ],
)
def test_a_mistake_in_data_from_python_is_named(given, message):
    def opened():
        data.register_dataset("mine", given)
        return data.open_dataset("mine", image_size=4, test_split="train")

    with pytest.raises(UserError, match=message):
        opened()


def test_a_sweep_reads_loaders_and_refuses_several_splits(tmp_path):
    class Loader:
        def __iter__(self):
            return iter([(X[:30], Y[:30]), (X[30:], Y[30:])])

    np.testing.assert_array_equal(data.examples_of(Loader())["label"], Y)
    folder(tmp_path, {"all": 8})
    with pytest.raises(UserError, match=r"splits train, test; pass .*data\['train'\]"):
        data.examples_of({"train": Table(tmp_path), "test": Table(tmp_path)})


def test_a_model_is_trained_on_data_from_python(tmp_path):
    config = {"model": {"name": "mlp", "width": 8, "depth": 2}, "learning_rate": 0.1}
    config |= {"steps": 2, "batch_size": 8}
    splits = {"train": (X, Y), "test": (X, Y)}
    result = mupax.train(config, tmp_path / "run", data=splits)
    again = mupax.train(config, tmp_path / "run", data=splits)
    assert (again.curve, again.test_loss) == (result.curve, result.test_loss)
    with pytest.raises(UserError, match="examples of data have changed"):
        mupax.train(config, tmp_path / "run", data=splits | {"train": (X[::-1], Y)})
