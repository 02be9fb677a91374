"""Batches for the trainer: the same at a step however it is reached, by whomever."""

import io
import itertools
import subprocess
import sys

import hypothesis
import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from hypothesis import strategies as st
from PIL import Image

from mupax.experiments import data
from mupax.experiments.data import pipeline
from mupax.experiments.errors import UserError

PHOTOS = 60  # in the training split; 20 in the test split


def photo(k, size=None, grey=False):
    """Image k: smooth, of its own colours and size."""
    rng = np.random.default_rng(k)
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    image = Image.fromarray(coarse).resize(size or rng.integers(20, 60, 2).tolist())
    return image.convert("L") if grey else image


def jpeg(image):
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    file.seek(0)
    return file


class MadePhotos(tfds.core.GeneratorBasedBuilder):
    """JPEG files of many sizes, of which every tenth is grey, and a test split."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = epath.Path(__file__)

    def _info(self):
        features = {
            "picture": tfds.features.Image(
                shape=(None, None, 3), encoding_format="jpeg"
            ),
            "kind": tfds.features.ClassLabel(num_classes=5),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("picture", "kind"),
        )

    def _split_generators(self, dl_manager):
        numbers = range(PHOTOS + 20)
        return {
            "train": self._generate_examples(numbers[:PHOTOS]),
            "test": self._generate_examples(numbers[PHOTOS:]),
        }

    def _generate_examples(self, numbers):
        for k in numbers:
            image = photo(k, grey=k % 10 == 0)
            yield k, {"picture": jpeg(image), "kind": k % 5}


def made(builder, directory):
    builder(data_dir=directory, file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A data directory that holds `made_photos`."""
    directory = tmp_path_factory.mktemp("tfds")
    made(MadePhotos, directory)
    return directory


# The augmentations of CIFAR-10 in Bordelon et al. (2024), App. A.
PAPER = ("flip", "rotate", "affine", "color_jitter")
CHANGES = ("random_resized_crop", "flip", "rotate", "color_jitter", "rand_augment")
KINDS = {
    "streamed": ("made_photos", {"image_size": 16, "augment": CHANGES}),
    "in memory": ("digits", {"augment": PAPER}),
    "in memory, as it is": ("digits", {}),
    "noise": ("fake:5x4x3:7", {}),
}


@pytest.fixture(params=KINDS)
def dataset(request, photos):
    name, options = KINDS[request.param]
    return data.open_dataset(name, photos, **options)


def take(iterator, n):
    batches = list(itertools.islice(iterator, n))
    iterator.close()
    return batches


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key])


def joined(parts):
    return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}


# --- What a dataset is.


def test_a_batch_is_what_the_spec_says(dataset):
    (batch,) = take(dataset.train(6, 0), 1)
    spec = dataset.spec(6)
    assert batch.keys() == spec.keys() == {"image", "label"}
    for key, value in batch.items():
        assert (value.shape, value.dtype) == (spec[key].shape, spec[key].dtype)
    assert spec["image"].shape[1:] == dataset.input_shape
    assert (dataset.kind, dataset.out_features > batch["label"].max()) == (
        "images",
        True,
    )


def test_images_keep_their_labels(photos):
    """Each image of the test split is recognised by its pixels."""
    options = {"image_size": 16, "crop": 1.0, "test_split": "test"}
    dataset = data.open_dataset("made_photos", photos, **options)
    batch = next(dataset.test(20))
    expected = {}
    for k in range(PHOTOS, PHOTOS + 20):
        image = photo(k, grey=k % 10 == 0).convert("RGB")
        width, height = (int(16 * n / min(image.size)) for n in image.size)
        small = image.resize((width, height), Image.Resampling.BILINEAR)
        x, y = round((width - 16) / 2), round((height - 16) / 2)
        expected[k] = np.asarray(small, float)[y : y + 16, x : x + 16]
    for image, label in zip(batch["image"], batch["label"], strict=True):
        gaps = {k: np.abs(image - other).mean() for k, other in expected.items()}
        nearest = min(gaps, key=gaps.get)
        assert nearest % 5 == label
        assert gaps.pop(nearest) < 6 < min(gaps.values())


def test_a_normalized_batch_has_mean_0_and_deviation_1(dataset):
    batch = next(dataset.test(dataset.test_size))
    out = jax.jit(dataset.normalize)(batch)
    assert out["image"].dtype == np.float32
    np.testing.assert_array_equal(out["label"], batch["label"])
    assert abs(out["image"].mean()) < 0.2
    assert abs(out["image"].std() - 1) < 0.2


def test_the_test_split_is_read_once_in_order_and_filled_up(photos):
    digits = data.open_dataset("digits")
    expected = digits.load_test(np.arange(360), np.empty((360, 0)))["label"]
    batches = list(digits.test(100))
    assert [b["image"].shape for b in batches] == [(100, 8, 8, 1)] * 4
    counts = np.concatenate([b["counts"] for b in batches])
    np.testing.assert_array_equal(counts, [1.0] * 360 + [0.0] * 40)
    assert counts.dtype == np.float32
    labels = np.concatenate([b["label"] for b in batches])
    np.testing.assert_array_equal(labels[:360], expected)


def test_the_test_parts_of_the_processes_make_up_the_whole(dataset):
    whole = dataset.test(8)
    parts = [dataset.test(8, process_index=r, process_count=4) for r in range(4)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert_same(batch, joined(shares))


def test_an_image_is_resized_to_the_size_that_is_asked_for(photos):
    for size, expected in ((16, (16, 16, 1)), ((12, 20), (12, 20, 1))):
        digits = data.open_dataset("digits", image_size=size)
        assert digits.input_shape == expected
        assert take(digits.train(2, 0), 1)[0]["image"].shape == (2, *expected)
        assert next(digits.test(2))["image"].shape == (2, *expected)


def test_fake_images_are_the_same_everywhere_and_differ_from_one_another():
    batches = [take(data.open_dataset("fake:6x5x3:4").train(64, 1), 1)[0] for _ in "ab"]
    assert_same(*batches)
    assert len({image.tobytes() for image in batches[0]["image"]}) == 64
    assert set(batches[0]["label"]) == set(range(4))


# --- Order.


def test_augmenting_changes_no_order(photos):
    plain, changed = (
        take(data.open_dataset("digits", augment=a).train(32, 5), 3)
        for a in ((), ("rotate",))
    )
    for one, other in zip(plain, changed, strict=True):
        np.testing.assert_array_equal(one["label"], other["label"])
        assert (one["image"] != other["image"]).any()


@pytest.mark.parametrize("step", [1, 5, 10])
def test_a_run_resumes_with_another_number_of_processes(dataset, step):
    """10 batches of 8 lie in the second epoch of the streamed dataset."""
    whole = take(dataset.train(8, 4), step + 3)
    for processes in (1, 4):
        parts = [
            take(
                dataset.train(
                    8, 4, start=step, process_index=rank, process_count=processes
                ),
                3,
            )
            for rank in range(processes)
        ]
        for expected, *shares in zip(whole[step:], *parts, strict=True):
            assert_same(expected, joined(shares))


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    n=st.integers(1, 40),
    processes=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 12),
)
def test_random_numbers_belong_to_the_place_in_the_run(n, processes, rows, seed, step):
    """Whatever the sizes: same numbers for the same example at the same step."""

    def load(indices, u):
        return {"index": indices, "u": u}

    def first(rank, count, start):
        hosts = pipeline.Hosts(rank, count)
        options = {"draws": 3, "hosts": hosts, "workers": pipeline.Workers(1)}
        return pipeline.iterate(n, load, rows * processes, seed, start=start, **options)

    whole = take(first(0, 1, 0), step + 1)[step]
    parts = [take(first(rank, processes, step), 1)[0] for rank in range(processes)]
    assert_same(whole, joined(parts))
    assert len(np.unique(whole["u"])) == 3 * rows * processes


@pytest.mark.long
def test_worker_processes_give_the_same_batches_and_go_on(photos, tmp_path):
    """In a process of its own: workers are started anew, and must find their module."""
    child = tmp_path / "child.py"
    child.write_text(
        "import sys\n"
        "from mupax.experiments import data\n"
        "if __name__ == '__main__':\n"
        "    def start(workers, step=0):\n"
        f"        options = {{'image_size': 16, 'augment': {CHANGES}}}\n"
        "        return data.open_dataset('made_photos', sys.argv[1], workers=workers,"
        " **options).train(8, 2, start=step)\n"
        "    here, there = start(0), start(2)\n"
        "    expected = [next(here) for _ in range(6)]\n"
        "    found = [next(there) for _ in range(3)]\n"
        "    later = start(1, 3)\n"
        "    found += [next(later) for _ in range(3)]\n"
        "    for a, b in zip(expected, found, strict=True):\n"
        "        assert (a['image'] == b['image']).all()\n"
        "        assert (a['label'] == b['label']).all()\n"
        "    for it in (here, there, later): it.close()\n"
        "    print('same')\n"
    )
    done = subprocess.run(
        [sys.executable, child, str(photos)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "same\n", done.stderr


# --- To the device.


def test_batches_are_placed_ahead_and_end_with_the_others(photos):
    dataset = data.open_dataset("digits")
    placed = []

    def place(batch):
        placed.append(batch)
        return jax.device_put(batch)

    inner = dataset.train(8, 0)
    batches = data.placed_ahead(inner, place, depth=3)
    for step, expected in enumerate(take(dataset.train(8, 0), 5)):
        batch = next(batches)
        assert isinstance(batch["image"], jax.Array)
        assert_same(batch, expected)
        assert len(placed) == step + 3
    batches.close()
    assert list(inner) == []


class MadeBroken(MadePhotos):
    """Image 3 of the training split breaks off, and image 4 is none."""

    def _generate_examples(self, numbers):
        for k in numbers:
            whole = jpeg(photo(k)).getvalue()
            broken = {3: whole[: len(whole) // 2], 4: b"no image"}.get(k, whole)
            yield k, {"picture": io.BytesIO(broken), "kind": k % 5}


def test_a_broken_image_is_named_and_not_passed_over(tmp_path):
    made(MadeBroken, tmp_path)
    dataset = data.open_dataset("made_broken", tmp_path, image_size=8)
    iterator = dataset.train(20, 0)
    with pytest.raises(UserError, match=r"Image \d+ of the split 'train' in"):
        list(itertools.islice(iterator, 3))
    iterator.close()


# --- Mistakes, each in one sentence.


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("made_photos", {}, r"different sizes; set data\.image_size, e\.g\. 224"),
        ("made_photos", {"image_size": (3, 0)}, r"image_size=\(3, 0, 1\)"),
        ("made_photos", {"image_size": 8, "crop": 2.0}, r"crop=2\.0 must be"),
        (
            "made_photos",
            {"image_size": 8, "interpolation": "best"},
            r"one of 'nearest', 'bilinear'",
        ),
        ("made_photos", {"image_size": 8, "test_split": "dev"}, r"'dev'.*train, test"),
        ("made_photos", {"image_size": 8, "augment": ("flop",)}, r"choose one of flip"),
        ("made_photos", {"image_size": 8, "context": 8}, r"context has no effect on"),
        ("digits", {"train_split": "train[:9%]"}, r"train_split has no effect"),
        ("digits", {"tokenizer": "t.json"}, r"tokenizer has no effect on digits"),
        ("digits", {"threads": 0}, r"threads is 0"),
        ("digits", {"workers": -1}, r"processes is -1"),
        ("fake:32x32:10", {}, r"fake:HEIGHTxWIDTHxCHANNELS:CLASSES"),
        ("fake:32x32x4:10", {}, r"1 or 3 channels"),
        (
            "imagenet_2012",
            {},
            r"no dataset 'imagenet_2012'; did you mean 'imagenet2012'",
        ),
        ("imagenet2012", {}, r"download_and_prepare.*ILSVRC2012_img_train\.tar"),
        ("svhn_cropped", {}, r"svhn_cropped.*download_and_prepare"),
    ],
)
def test_mistakes_are_answered_in_one_line(photos, name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        data.open_dataset(name, photos, **options)
    assert "\n" not in str(caught.value)


def test_batches_that_cannot_be_are_said_to(photos):
    digits = data.open_dataset("digits")
    with pytest.raises(UserError, match=r"7 does not divide over 2 processes"):
        digits.train(7, 0, process_index=0, process_count=2)
    with pytest.raises(UserError, match=r"7 does not divide over 2 processes"):
        digits.test(7, process_index=0, process_count=2)
    with pytest.raises(UserError, match=r"2000 is more than the 1437 training"):
        digits.train(2000, 0)
    with pytest.raises(UserError, match=r"seed is -1; it must lie in 0\.\.4294967295"):
        digits.train(2, -1)


class NoLabels(tfds.core.GeneratorBasedBuilder):
    """Numbers, and no images."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = epath.Path(__file__)

    def _info(self):
        features = {"number": tfds.features.Scalar(np.int64)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"number": 1}


def test_a_dataset_without_labelled_images_is_said_to_be(tmp_path):
    made(NoLabels, tmp_path)
    with pytest.raises(UserError, match="no Image feature 'image'; its features are n"):
        data.open_dataset("no_labels", tmp_path)


class MadeUnlabelled(MadePhotos):
    """A test split whose labels are secret."""

    def _split_generators(self, dl_manager):
        both = super()._split_generators(dl_manager)
        return {"train": both["train"], "test": self._secret(), "val": both["test"]}

    def _secret(self):
        for k in range(3):
            yield k, {"picture": jpeg(photo(k)), "kind": -1}


def test_a_split_without_labels_is_named_with_the_labelled_ones(tmp_path):
    made(MadeUnlabelled, tmp_path)
    with pytest.raises(
        UserError, match=r"'test' has .* labels.*\(there are train, val\)"
    ):
        data.open_dataset("made_unlabelled", tmp_path, image_size=8)
    opened = data.open_dataset(
        "made_unlabelled", tmp_path, image_size=8, test_split="val"
    )
    assert opened.test_size == 20
