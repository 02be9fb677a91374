"""Sweeps of one's own model: what is kept in a folder is for the same data only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.experiments.sweep import api as own


def make_model(key, width, depth):
    return {"w": jax.random.normal(key, (2, width))}


def make_optimizer(model, width, depth, learning_rate=0.1):
    return optax.sgd(learning_rate)


def loss(model, batch):
    return jnp.mean((batch @ model["w"] - 1) ** 2)


def sweep(data, folder):
    return own.sweep(
        make_model,
        make_optimizer,
        loss,
        data,
        grid={"learning_rate": (0.01, 0.02, 0.04)},
        widths=(2, 4),
        depths=(1,),
        seeds=1,
        steps=4,
        batch_size=4,
        folder=folder,
    ).populations[0]


def test_other_data_in_the_same_folder_is_trained_on(tmp_path):
    ones = np.ones((8, 2), np.float32)
    first = sweep(ones, tmp_path)
    assert sweep(ones, tmp_path).seconds == first.seconds  # only read
    other = sweep(2 * ones, tmp_path)
    assert not np.allclose(other.loss, first.loss)
    np.testing.assert_array_equal(other.loss, sweep(2 * ones, None).loss)
