"""Strictness for every test: what JAX would let pass with a guess is an error here."""

import os

# Before jax is imported; a GPU or TPU run of the tests sets it itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from absl import flags

jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, which takes longer than the rest together.
hypothesis.settings.register_profile("mupax", deadline=None)
hypothesis.settings.load_profile("mupax")

# Grain reads absl flags; pytest is no absl app, and parses none.
flags.FLAGS.mark_as_parsed()


@pytest.fixture
def strict_dtypes():
    """No mixing of dtypes without a cast.

    Not for every test: Optax raises a float32 to an int32 power in Adam's bias
    correction, and strictness refuses that inside its code.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield
