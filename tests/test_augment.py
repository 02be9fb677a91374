"""Augmentations and mixing: what each is said to do, measured on images."""

import functools
import os
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from ml_collections import ConfigDict
from PIL import Image
from scipy import stats

from mupax.experiments.data import augment, mixing
from mupax.experiments.errors import UserError

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(
    # Smooth, so that resampling loses little.
    np.clip(
        128
        + 60 * np.sin(np.linspace(0, 5, 32))[:, None, None]
        + 50 * np.cos(np.linspace(0, 7, 32))[None, :, None]
        + np.array([0, 15, -20]),
        0,
        255,
    ).astype(np.uint8)
)


def change(*names, shape=(32, 32, 3), **options):
    config = augment.unnormalized(shape, **options)
    return augment.Transform(augment.parse(names), config)


def pixels(image):
    return np.asarray(image).astype(np.float64)


def draws(transform, n, seed=0):
    return np.random.default_rng(seed).random((n, transform.draws)).tolist()


# --- What a config may name.


def test_a_config_names_operations_as_strings_or_with_options():
    expected = (augment.Flip(), augment.Rotate(degrees=5))
    options = {"name": "rotate", "degrees": 5}
    assert augment.parse(("flip", options)) == expected
    assert augment.parse(["flip", ConfigDict(options)]) == expected
    assert augment.parse(["flip", options | {"degrees": np.int64(5)}]) == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("flop", r"no augmentation 'flop'; choose one of flip, rotate"),
        ({"degrees": 3}, r"no augmentation None"),
        ({"name": "rotate", "angle": 3}, r"'rotate' has no option 'angle'.*degrees"),
        ({"name": "random_resized_crop", "size": 3}, r"has no option 'size'"),
        ({"name": "flip", "probability": 2}, r"'flip': probability=2 must.*at most 1"),
        ({"name": "rotate", "degrees": "ten"}, r"'rotate'"),
        ({"name": "affine", "scale": [1.2, 0.8]}, r"low, high"),
        ({"name": "random_resized_crop", "scale": [0.5, 2]}, r"must not exceed 1"),
        (
            {"name": "random_resized_crop", "interpolation": "best"},
            r"bilinear, bicubic",
        ),
        ({"name": "rand_augment", "num": 0}, r"num is 0"),
        ({"name": "rand_augment", "magnitude": 31}, r"magnitude=31"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(entry, message):
    with pytest.raises(UserError, match=message) as caught:
        augment.parse([entry])
    assert "\n" not in str(caught.value)


def test_one_name_alone_is_not_taken_for_its_letters():
    with pytest.raises(UserError, match=r"\('flip',\)"):
        augment.parse("flip")


# --- Every operation.


@pytest.mark.parametrize("name", augment.OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_keeps_size_and_mode_and_is_fixed_by_its_draws(name, channels):
    transform = change(name, shape=(32, 32, channels))
    image = PHOTO.convert("L") if channels == 1 else PHOTO
    seen = set()
    for u in draws(transform, 20):
        first, again = transform(image, u), transform(image, u)
        assert (first.size, first.mode) == (image.size, image.mode)
        np.testing.assert_array_equal(pixels(first), pixels(again))
        seen.add(first.tobytes())
    assert len(seen) > 1


@hypothesis.settings(max_examples=50)
@hypothesis.given(data=st.data())
def test_any_draws_will_do(data):
    """The ends of [0, 1) too, and images of any shape."""
    transform = change("random_resized_crop", *augment.OPERATIONS, shape=(9, 7, 3))
    u = data.draw(
        st.lists(
            st.floats(0, 1, exclude_max=True),
            min_size=transform.draws,
            max_size=transform.draws,
        )
    )
    size = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    assert transform(PHOTO.resize(size), u).size == (7, 9)


# --- Geometry.


def test_flip_exchanges_left_and_right_for_its_share():
    transform = change({"name": "flip", "probability": 0.3})
    mirrored = pixels(PHOTO)[:, ::-1]
    flipped = [
        np.array_equal(pixels(transform(PHOTO, u)), mirrored)
        for u in draws(transform, 1000)
    ]
    assert abs(np.mean(flipped) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 1000)


@pytest.mark.parametrize("u", [0.0, 0.25, 0.9])
def test_rotate_is_pillows_rotation(u):
    """Pillow's own turns about the same centre, by the angle that is drawn."""
    rotated = change("rotate")(PHOTO, [u])
    expected = PHOTO.rotate(10 * (2 * u - 1), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(pixels(rotated), pixels(expected))


def test_middle_draws_leave_the_image_as_it_is():
    transform = change("rotate", {"name": "affine", "scale": [0.9, 1.1]})
    zoom_of_one = (1 / 1 - 0.9) / 0.2
    unchanged = transform(PHOTO, [0.5, zoom_of_one, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(pixels(unchanged), pixels(PHOTO), atol=1)


def test_affine_zooms_shears_and_shifts_as_far_as_it_is_told():
    """A ramp along each axis tells where the pixels of the middle come from."""
    y, x = np.mgrid[:32, :32].astype(np.uint8) * 4
    image = Image.fromarray(np.stack([x, y, x], axis=-1))
    op = augment.AffineMap(shear=45, scale=(0.5, 2), translate=0.25)
    one = (1 - 0.5) / 1.5
    rows, columns = np.mgrid[12:20, 12:20]
    for u, from_x, from_y in (
        ([1.0, 0.5, 0.5, 0.5], columns / 2 + 7.75, rows / 2 + 7.75),
        ([one, 1.0, 0.5, 0.5], columns + rows - 15.5, rows),
        ([one, 0.5, 1.0, 0.0], columns - 8, rows + 8),
    ):
        moved = pixels(op(image, u))[12:20, 12:20]
        np.testing.assert_allclose(moved[..., 0], 4 * from_x, atol=1)
        np.testing.assert_allclose(moved[..., 1], 4 * from_y, atol=1)


def test_pad_crop_shifts_by_up_to_its_margin_and_fills_with_black():
    transform = change({"name": "pad_crop", "pad": 2})
    padded = np.pad(pixels(PHOTO), ((2, 2), (2, 2), (0, 0)))
    windows = {
        padded[y : y + 32, x : x + 32].tobytes(): (y, x)
        for y in range(5)
        for x in range(5)
    }
    crops = {
        windows[pixels(transform(PHOTO, u)).tobytes()] for u in draws(transform, 400)
    }
    assert len(crops) == 25


def test_random_resized_crop_has_the_areas_and_shapes_it_is_told():
    op = augment.RandomResizedCrop(scale=(0.1, 0.4), ratio=(0.5, 2))
    boxes = np.array([op.box((200, 200), u) for u in RNG.random((4000, op.draws))])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes >= 0).all()
    assert (boxes <= 200).all()
    area, ratio = width * height / 200**2, width / height
    assert 0.1 <= area.min() < 0.11
    assert 0.39 < area.max() <= 0.4
    assert abs(area.mean() - 0.25) < 4 * 0.3 / np.sqrt(12 * 4000)
    assert abs(np.log(ratio).mean()) < 4 * np.log(4) / np.sqrt(12 * 4000)
    centre = (boxes[:, :2] + boxes[:, 2:]).mean(0) / 400
    np.testing.assert_allclose(centre, 0.5, atol=0.02)


def test_a_crop_that_never_fits_takes_the_most_of_the_middle():
    op = augment.RandomResizedCrop(scale=(1, 1))
    np.testing.assert_allclose(op.box((400, 30), [0.9] * op.draws), (180, 0, 220, 30))


def test_a_crop_shows_the_place_that_it_was_taken_from():
    """A ramp tells where its pixels come from."""
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256))
    image = Image.fromarray(np.stack([ramp, ramp.T, ramp], axis=-1))
    transform = change("random_resized_crop", shape=(32, 32, 3))
    for u in draws(transform, 20):
        left, upper, right, lower = transform.operations[0].box((256, 256), u)
        crop = pixels(transform(image, u))
        np.testing.assert_allclose(crop[..., 0].mean(), (left + right - 1) / 2, atol=1)
        np.testing.assert_allclose(crop[..., 1].mean(), (upper + lower - 1) / 2, atol=1)


# --- Size.


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_resizes_the_shorter_side_and_keeps_the_middle(interpolation):
    wide = PHOTO.resize((80, 40))
    options = {"crop": 0.875, "interpolation": interpolation}
    ours = change(shape=(28, 28, 3), **options)(wide, [])
    resized = wide.resize((64, 32), augment.FILTERS[interpolation])
    expected = resized.crop((18, 2, 46, 30))
    np.testing.assert_allclose(pixels(ours), pixels(expected), atol=2)


def test_grey_images_become_colour_and_colour_images_grey():
    assert change()(PHOTO.convert("L"), []).mode == "RGB"
    assert change(shape=(32, 32, 1))(PHOTO, []).mode == "L"


def test_an_image_of_the_right_size_is_left_alone():
    np.testing.assert_array_equal(pixels(change()(PHOTO, [])), pixels(PHOTO))


# --- Colour.


def jitter(u, image=PHOTO, **options):
    none = dict.fromkeys(("brightness", "contrast", "saturation"), 0)
    return pixels(augment.ColorJitter(**{**none, **options})(image, u))


def test_jitter_of_brightness_multiplies():
    """Pillow rounds down."""
    jittered = jitter([0.25, 0, 0], brightness=0.4)
    np.testing.assert_array_equal(jittered, np.floor(0.8 * pixels(PHOTO) + 1e-9))


def test_jitter_of_contrast_is_about_the_mean_grey():
    jittered = jitter([0, 0.0, 0], contrast=0.5)
    mean = pixels(PHOTO).mean((0, 1)) @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(jittered, 0.5 * pixels(PHOTO) + 0.5 * mean, atol=0.8)


def test_jitter_of_saturation_is_about_each_pixels_grey():
    jittered = jitter([0, 0, 0.0], saturation=1.0)
    grey = pixels(PHOTO) @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(jittered, np.stack([grey] * 3, -1), atol=0.51)


def test_jitter_clips():
    assert jitter([1.0, 0, 0], brightness=5).max() == 255


# --- RandAugment.


def test_rand_augment_has_fourteen_operations_of_growing_strength():
    """All but the three that know no strength move the image further at 30."""
    rough = Image.fromarray(RNG.integers(0, 256, (32, 32, 3), np.uint8))
    still, further = 0, 0
    for k in range(14):
        gaps = []
        for magnitude in (6, 30):
            op = augment.RandAugment(num=1, magnitude=magnitude)
            u = [(k + 0.5) / 14] * 8 + [0.7] * 8
            gaps.append(np.abs(pixels(op(rough, u)) - pixels(rough)).mean())
        still += gaps[1] == gaps[0]
        further += gaps[1] > gaps[0]
    assert (still, further) == (3, 11)


# --- Mixing.

CLASSES = 5
LABELS = jnp.arange(64) % CLASSES
ONE_HOT = jax.nn.one_hot(LABELS, CLASSES)


def grey_images(height=16, width=12):
    """Each image is its own number."""
    return jnp.broadcast_to(
        jnp.arange(64.0)[:, None, None, None], (64, height, width, 3)
    )


def partners(rows):
    return np.asarray(rows).reshape(-1, 2, *rows.shape[1:])[:, ::-1].reshape(rows.shape)


mixup = functools.partial(mixing.mix, mixup_alpha=0.8)
cutmix = functools.partial(mixing.mix, cutmix_alpha=1.0)
both = functools.partial(mixing.mix, mixup_alpha=0.8, cutmix_alpha=1.0)
MIXERS = {"mixup": mixup, "cutmix": cutmix, "both": both}


@pytest.mark.parametrize("name", MIXERS)
def test_mixed_labels_sum_to_one_and_are_the_share_of_the_pixels(name, strict_dtypes):
    """An image that is its number's grey tells its shares by its mean."""
    mixer = jax.jit(MIXERS[name])
    numbers = np.arange(64.0)
    for seed in range(5):
        images, labels = mixer(jax.random.key(seed), grey_images(), jnp.eye(64))
        np.testing.assert_allclose(labels.sum(-1), 1, rtol=1e-6)
        assert (np.asarray(labels) >= 0).all()
        share = np.diagonal(labels)
        expected = share * numbers + (1 - share) * partners(numbers)
        np.testing.assert_allclose(images.mean((1, 2, 3)), expected, rtol=1e-4)
        others = np.asarray(labels).copy()
        np.fill_diagonal(others, 0)
        np.testing.assert_array_equal(
            others.argmax(-1)[share < 1], partners(np.arange(64))[share < 1]
        )


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_mixup_blends_each_image_evenly_by_a_draw_from_beta(alpha):
    """Drawn anew for each row (Zhang et al. 2018, section 2)."""
    images = jnp.broadcast_to(grey_images(2, 2)[:, None], (64, 20, 2, 2, 3))
    images = images.reshape(-1, 2, 2, 3)
    labels = jnp.tile(jnp.array([[1.0, 0.0], [0.0, 1.0]]), (640, 1))
    mixer = jax.jit(functools.partial(mixing.mix, mixup_alpha=alpha))
    images, labels = mixer(jax.random.key(0), images, labels)
    np.testing.assert_allclose(images.std((1, 2, 3)), 0, atol=1e-4)
    shares = np.asarray(labels)[np.arange(1280), np.arange(1280) % 2]
    # With 1,280 draws of the right law, p falls below 1e-4 once in 10,000 seeds.
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 1e-4


def test_cutmix_replaces_one_box_and_nothing_else():
    images, labels = jax.jit(cutmix)(jax.random.key(3), grey_images(), ONE_HOT)
    numbers = np.arange(64)
    for row, number, partner in zip(images, numbers, partners(numbers), strict=True):
        foreign = np.asarray(row[..., 0]) == partner
        assert (np.asarray(row[..., 0])[~foreign] == number).all()
        high, wide = foreign.any(1).sum(), foreign.any(0).sum()
        assert foreign.sum() == high * wide
    assert (np.asarray(labels).max(-1) < 1).any()


def test_cutmix_takes_the_share_that_its_paper_expects():
    """λ is uniform; with a border of no thickness the area would be 1 - λ.

    The border cuts a box of side r to r (1 - r/4) on average in each dimension, so the
    expected area is E[r² (1 - r/4)²] with r² uniform: 1/2 - (1/2)(2/5) + (1/16)(1/3).
    """
    big = grey_images(64, 64)
    areas = []
    mixer = jax.jit(cutmix)
    for seed in range(60):
        _, labels = mixer(jax.random.key(seed), big, jnp.eye(64))
        areas.append(1 - np.diagonal(labels))
    expected = 1 / 2 - 1 / 5 + 1 / 48
    assert abs(np.mean(areas) - expected) < 0.02


def test_with_both_on_half_of_the_rows_are_cut():
    cut = []
    mixer = jax.jit(functools.partial(both, mixup_alpha=5.0))
    for seed in range(40):
        images, _ = mixer(jax.random.key(seed), grey_images(), ONE_HOT)
        rows = np.asarray(images)[..., 0].reshape(64, -1)
        cut += [len(np.unique(row)) == 2 for row in rows]
    # A few CutMix boxes are empty, which leaves a row of one grey.
    assert 0.44 < np.mean(cut) < 0.52


def test_mixing_on_a_mesh_moves_nothing_between_devices():
    child = (
        "import functools, jax, jax.numpy as jnp\n"
        "from jax.sharding import AxisType, NamedSharding, PartitionSpec\n"
        "from mupax.experiments.data import mixing\n"
        "mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))\n"
        "mixer = functools.partial(mixing.mix, mixup_alpha=0.8, cutmix_alpha=1.0)\n"
        "rows = NamedSharding(mesh, PartitionSpec('data'))\n"
        "program = jax.jit(mixer, in_shardings=(None, rows, rows),\n"
        "                  out_shardings=rows)\n"
        "arrays = jnp.zeros((64, 8, 8, 3)), jnp.zeros((64, 5))\n"
        "lowered = program.lower(jax.random.key(0), *arrays)\n"
        "print(lowered.compile().as_text())"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    text = subprocess.run(
        [sys.executable, "-c", child],
        env={**os.environ, **flags},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "num_partitions=8" in text
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup_alpha": 0.0, "cutmix_alpha": 0.0}, "one of them positive"),
        ({"mixup_alpha": -1.0}, "0 or more"),
    ],
)
def test_mixing_that_cannot_be_done_is_said_to(options, message):
    with pytest.raises(ValueError, match=message):
        mixing.mix(jax.random.key(0), grey_images(), ONE_HOT, **options)


def test_an_odd_batch_has_no_partners():
    with pytest.raises(ValueError, match="odd"):
        mixup(jax.random.key(0), grey_images()[:3], ONE_HOT[:3])
