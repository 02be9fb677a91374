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
from mupax.experiments.data.images import pixel_statistics
from mupax.experiments.errors import UserError

needs_tfds = pytest.mark.skipif(
    "TFDS_DATA_DIR" not in os.environ,
    reason="TFDS_DATA_DIR is not set: there are no prepared datasets to read",
)


def toy(n: int) -> data.Dataset:
    """n training images, each of which tells its own index."""
    images = np.arange(n, dtype=np.uint8).reshape(n, 1, 1, 1)
    split = images, np.arange(n)
    data.register_dataset("toy", {"train": split, "test": split})
    return data.open_dataset("toy")


# --- digits


def whole(name: str) -> tuple[data.dataset.Batch, data.dataset.Batch]:
    """Training and test images of a dataset in memory."""
    opened = data.open_dataset(name)
    (test,) = opened.test(opened.test_size)
    return opened.training_arrays(), test


def test_digits_are_those_of_scikit_learn_each_once():
    train, test = whole("digits")
    expected = load_digits()
    images = np.concatenate([train["image"], test["image"]])
    labels = np.concatenate([train["label"], test["label"]])
    ours = sorted(zip(map(bytes, images), labels, strict=True))
    pixels = expected.images.astype(np.uint8)
    assert ours == sorted(zip(map(bytes, pixels), expected.target, strict=True))
    assert train["image"].shape == (1437, 8, 8, 1)
    assert test["image"].shape == (360, 8, 8, 1)
    assert (train["image"].dtype, train["label"].dtype) == (np.uint8, np.int32)
    # Both splits hold all classes in the same proportions.
    shares = (
        np.bincount(x["label"], minlength=10) / len(x["label"]) for x in (train, test)
    )
    np.testing.assert_allclose(*shares, atol=1 / 360)


def test_digits_have_the_order_of_all_recorded_runs():
    train, test = whole("digits")
    assert train["label"][:12].tolist() == [4, 7, 6, 0, 0, 8, 0, 6, 2, 8, 5, 0]
    assert test["label"][:12].tolist() == [1, 4, 2, 3, 2, 9, 6, 4, 0, 8, 0, 0]


def test_digit_sums_are_pairs_of_digits_and_test_pairs_hold_no_training_image():
    for single, sums in zip(whole("digits"), whole("digit_sums"), strict=True):
        label = dict(zip(map(bytes, single["image"]), single["label"], strict=True))
        halves = sums["image"][:, :, :8], sums["image"][:, :, 8:]
        pairs = [[label[bytes(np.ascontiguousarray(x))] for x in h] for h in halves]
        np.testing.assert_array_equal(np.sum(pairs, 0), sums["label"])
    sums = data.open_dataset("digit_sums")
    assert (sums.train_size, sums.test_size, sums.out_features) == (20_000, 2_000, 19)
    assert sums.input_shape == (8, 16, 1)


# --- other datasets


def test_a_missing_dataset_is_answered_with_how_to_prepare_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    places = f"{tmp_path}/shared or {tmp_path}/tensorflow_datasets; prepare it"
    for given, where in ((None, places), (tmp_path / "mine", f"{tmp_path}/mine")):
        with pytest.raises(UserError, match="download_and_prepare") as caught:
            data.open_dataset("mnist", given)
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
    train, test = whole(name)
    assert train["image"].shape == shape
    assert test["image"].shape == (10000, *shape[1:])
    assert np.bincount(test["label"]).min() > 800
    measured = np.divide(data.open_dataset(name).statistics, 255)
    np.testing.assert_allclose(measured, [mean, std], atol=3e-3)


# --- statistics


@hypothesis.settings(max_examples=20)  # each shape compiles
@hypothesis.given(
    stnp.arrays(np.uint8, stnp.array_shapes(min_dims=4, max_dims=4, max_side=5))
)
def test_normalized_training_images_have_mean_0_and_std_1(images):
    out = jax.jit(data.normalize)(images, *pixel_statistics(images))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.mean((0, 1, 2)), 0, atol=1e-3)
    constant = images.min((0, 1, 2)) == images.max((0, 1, 2))
    np.testing.assert_allclose(out.std((0, 1, 2)), np.where(constant, 0, 1), atol=1e-3)


def test_normalize_needs_no_implicit_promotion(strict_dtypes):
    images = np.full((2, 3, 3, 2), 7, np.uint8)
    out = data.normalize(images, np.float32([5, 7]), np.float32([2, 4]))
    np.testing.assert_array_equal(out[0, 0, 0], [1, 0])


# --- order

sizes = st.integers(2, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@hypothesis.settings(max_examples=20)
@hypothesis.given(sizes=sizes, seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 12))
def test_sweeps_and_loops_see_the_same_examples_in_the_same_order(sizes, seed, steps):
    n, batch_size = sizes
    iterator = toy(n).train(batch_size, seed)
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
