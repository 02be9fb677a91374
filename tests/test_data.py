"""Datasets: what is read is what was written, in an order that the seed fixes."""

import os

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp
from sklearn.datasets import load_digits

from mupax.experiments import data
from mupax.experiments.errors import UserError

needs_tfds = pytest.mark.skipif(
    "TFDS_DATA_DIR" not in os.environ,
    reason="TFDS_DATA_DIR is not set: there are no prepared datasets to read",
)


def toy(n: int) -> data.ImageData:
    """n training images, each of which tells its own index."""
    images = np.arange(n, dtype=np.uint8).reshape(n, 1, 1, 1)
    split = images, np.arange(n)
    return data.ImageData("toy", split, split, n)


# --- digits


def test_digits_are_those_of_scikit_learn_each_once():
    digits = data.load("digits")
    expected = load_digits()
    images = np.concatenate([digits.train_images, digits.test_images])
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    ours = sorted(zip(map(bytes, images), labels, strict=True))
    pixels = expected.images.astype(np.uint8)
    assert ours == sorted(zip(map(bytes, pixels), expected.target, strict=True))
    assert digits.train_images.shape == (1437, 8, 8, 1)
    assert digits.test_images.shape == (360, 8, 8, 1)
    assert (digits.train_images.dtype, digits.train_labels.dtype) == (
        np.uint8,
        np.int32,
    )


def test_digits_have_the_order_of_all_recorded_runs():
    digits = data.load("digits")
    assert digits.train_labels[:12].tolist() == [4, 7, 6, 0, 0, 8, 0, 6, 2, 8, 5, 0]
    assert digits.test_labels[:12].tolist() == [1, 4, 2, 3, 2, 9, 6, 4, 0, 8, 0, 0]


def test_digit_sums_are_pairs_of_digits_and_test_pairs_hold_no_training_image():
    digits, sums = (data.load(name) for name in ("digits", "digit_sums"))
    assert sums.train_images.shape == (20_000, 8, 16, 1)
    assert sums.num_classes == 19
    for split in ("train", "test"):
        single = getattr(digits, f"{split}_images")
        label = dict(
            zip(map(bytes, single), getattr(digits, f"{split}_labels"), strict=True)
        )
        images = getattr(sums, f"{split}_images")
        halves = images[:, :, :8], images[:, :, 8:]
        pairs = [[label[bytes(np.ascontiguousarray(x))] for x in h] for h in halves]
        np.testing.assert_array_equal(
            np.sum(pairs, 0), getattr(sums, f"{split}_labels")
        )


def test_digits_splits_hold_all_classes_in_the_same_proportions():
    digits = data.load("digits")
    train = np.bincount(digits.train_labels, minlength=10) / 1437
    test = np.bincount(digits.test_labels, minlength=10) / 360
    np.testing.assert_allclose(train, test, atol=1 / 360)


# --- other datasets


def test_an_unknown_dataset_is_answered_with_those_there_are():
    with pytest.raises(UserError, match=r"'svhn'.*digits, digit_sums, mnist"):
        data.load("svhn")


def test_a_missing_dataset_is_answered_with_how_to_prepare_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    places = f"{tmp_path}/shared or {tmp_path}/tensorflow_datasets; prepare it"
    for given, where in ((None, places), (tmp_path / "mine", f"{tmp_path}/mine")):
        with pytest.raises(UserError, match="download_and_prepare") as caught:
            data.load("mnist", given)
        assert where in str(caught.value)
        assert "\n" not in str(caught.value)


@needs_tfds
@pytest.mark.parametrize(
    ("name", "shape", "mean", "std"),
    [
        ("mnist", (60000, 28, 28, 1), [0.1307], [0.3081]),
        ("fashion_mnist", (60000, 28, 28, 1), [0.2860], [0.3530]),
        ("cifar10", (50000, 32, 32, 3), [0.491, 0.482, 0.447], [0.247, 0.243, 0.262]),
    ],
)
def test_prepared_datasets_have_their_published_statistics(name, shape, mean, std):
    images = data.load(name)
    assert images.train_images.shape == shape
    assert images.test_images.shape == (10000, *shape[1:])
    assert np.bincount(images.test_labels).min() > 800
    np.testing.assert_allclose(images.mean / 255, mean, atol=3e-3)
    np.testing.assert_allclose(images.std / 255, std, atol=3e-3)


# --- statistics


@hypothesis.settings(max_examples=20)  # each shape compiles
@hypothesis.given(
    stnp.arrays(np.uint8, stnp.array_shapes(min_dims=4, max_dims=4, max_side=5))
)
def test_normalized_training_images_have_mean_0_and_std_1(images):
    labels = np.zeros(len(images), np.int64)
    toy = data.ImageData("toy", (images, labels), (images, labels), 1)
    out = jax.jit(data.normalize)(images, toy.mean, toy.std)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.mean((0, 1, 2)), 0, atol=1e-3)
    constant = images.min((0, 1, 2)) == images.max((0, 1, 2))
    np.testing.assert_allclose(out.std((0, 1, 2)), np.where(constant, 0, 1), atol=1e-3)


def test_normalize_needs_no_implicit_promotion(strict_dtypes):
    images = np.full((2, 3, 3, 2), 7, np.uint8)
    out = data.normalize(images, np.float32([5, 7]), np.float32([2, 4]))
    np.testing.assert_array_equal(out[0, 0, 0], [1, 0])


# --- order

sizes = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@hypothesis.settings(max_examples=20)
@hypothesis.given(sizes=sizes, seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 12))
def test_sweeps_and_loops_see_the_same_examples_in_the_same_order(sizes, seed, steps):
    n, batch_size = sizes
    iterator = data.from_memory(toy(n)).train(batch_size, seed)
    seen = [next(iterator) for _ in range(steps)]
    iterator.close()
    indices = data.batch_indices(n, batch_size, seed, steps)
    assert indices.dtype == np.int32
    np.testing.assert_array_equal(np.stack([b["label"] for b in seen]), indices)
    np.testing.assert_array_equal(np.stack([b["image"].ravel() for b in seen]), indices)


@hypothesis.settings(max_examples=20)
@hypothesis.given(n=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_holds_every_example_once(n, seed):
    epochs = data.batch_indices(n, n, seed, 3)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(n), (3, 1)))


def test_epochs_and_seeds_differ_in_order():
    first, second = data.batch_indices(50, 50, 0, 2)
    assert (first != second).any()
    assert (first != data.batch_indices(50, 50, 1, 1)[0]).any()
