"""The direction of a valley of two hyperparameters."""

import dataclasses

import numpy as np
import pytest

from papers import valley
from tests.sweep_populations import population


def test_the_valleys_slope_is_that_of_its_long_axis():
    # log2 loss is 0.11 (x + y)² + 0.05 y² over ln 2: of its matrix ((.11, .11),
    # (.11, .16)) the weak eigenvector has slope -0.797.
    whole = population("depth_mup", 64, 8, pair=True, seeds=6)
    found = valley.slope(whole, ("learning_rate", "branch_multiplier"))
    assert found == pytest.approx(-0.797, abs=0.05)


def test_a_round_valley_has_no_slope():
    found = population("p", 64, 8, pair=True)
    x, y = np.meshgrid(
        np.log2(found.axes["learning_rate"]) + 6.5,
        np.log2(found.axes["branch_multiplier"]),
        indexing="ij",
    )
    round_one = dataclasses.replace(found, loss=np.exp2(0.2 * (x**2 + y**2))[None])
    assert valley.slope(round_one, ("learning_rate", "branch_multiplier")) is None
