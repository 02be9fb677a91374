"""Errors of finite width and depth: 1/N in variance, 1/L in bias."""

import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.theory import linear_joint
from papers import finite_size


def task(points=6, features=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(points, features)), rng.normal(size=points)


def linear(h):
    return h


def slope_error(seeds, sizes):
    """Of the exponent of a variance: √(2/(seeds - 1)) in its logarithm at each end."""
    return 2 / np.sqrt(seeds - 1) / np.log(sizes[-1] / sizes[0])


def test_linear_networks_scatter_around_their_exact_limit():
    # Four standard errors, below 0.04, at each of six points.
    x, y = task()
    trained = finite_size.train(
        x, y, widths=(128,), depths=(8,), activation=linear, steps=3, richness=1.5,
        learning_rate=0.3, seeds=24,
    )  # fmt: skip
    theory = linear_joint.dynamics(
        np.stack([x] * 4), np.stack([y] * 4), depth=8, learning_rate=0.3,
        richness=1.5, readin=True, readout=True,
    )  # fmt: skip
    outputs = trained.outputs[0, 0]
    error = outputs.std(axis=0, ddof=1) / np.sqrt(24)
    assert error.max() < 0.04
    miss = np.abs(outputs.mean(axis=0) - theory.outputs[3])
    np.testing.assert_array_less(miss, 4 * error)


def test_the_variance_falls_as_one_over_the_width_and_over_the_ensemble():
    x, y = task()
    widths = (16, 128)
    trained = finite_size.train(x, y, widths=widths, depths=(4,), seeds=64)
    error = slope_error(64, widths)
    assert error < 0.13
    assert abs(trained.width_law() + 1) < 3 * error
    # Four networks to an ensemble: a quarter, within three errors of 16 ensembles.
    ratio = trained.ensembled(4) / trained.variance
    np.testing.assert_allclose(ratio, 0.25, atol=3 * 0.25 * np.sqrt(2 / 15))


@pytest.mark.long
def test_the_variance_does_not_depend_on_depth():
    x, y = task()
    trained = finite_size.train(
        x, y, widths=(32, 128), depths=(4, 8, 16, 32), seeds=256
    )
    error = slope_error(256, trained.widths)
    assert abs(trained.width_law() + 1) < 3 * error
    np.testing.assert_allclose(
        trained.variance / trained.variance[:, -1:], 1, atol=3 * np.sqrt(2 * 2 / 255)
    )


@pytest.mark.long
def test_the_bias_falls_as_one_over_the_depth():
    # Within three standard errors, by resampling the networks.
    x, y = task()
    trained = finite_size.train(x, y, widths=(192,), depths=(4, 8, 16, 32), seeds=256)
    draw = np.random.default_rng(0)
    slopes = []
    for _ in range(100):
        chosen = trained.outputs[:, :, draw.integers(0, 256, 256)]
        again = finite_size.Errors(trained.widths, trained.depths, chosen)
        slopes.append(again.depth_law())
    error = np.std(slopes)
    assert error < 0.15
    assert abs(trained.depth_law() + 1) < 3 * error


def test_bad_input_is_refused():
    x, y = task()
    with pytest.raises(UserError, match="twice the one before"):
        finite_size.train(x, y, depths=(4, 12))
    with pytest.raises(UserError, match=r"1\.64e\+05 GiB of memory"):
        finite_size.train(x, y, widths=(64,), depths=(2**30,))
    errors = finite_size.Errors((8,), (2,), np.zeros((1, 1, 4, 1)))
    with pytest.raises(UserError, match="need 6 seeds"):
        errors.ensembled(3)
