"""The golden files: small networks of other libraries, which tests/golden writes."""

import pathlib

import numpy as np
from flax import nnx

from mupax.zoo.registry import record_of
from mupax.zoo.weights import foreign

GOLDEN = pathlib.Path(__file__).parent / "golden"


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights under the library's names, inputs and what it computes of them).

    Args:
      name: of the file, without its suffix.
    """
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    data = {k: arrays.pop(k) for k in list(arrays) if k.startswith("golden/")}
    return arrays, {k.removeprefix("golden/"): v for k, v in data.items()}


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, relative to the largest entry of theirs."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def check_export(model: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    """A model exports the weights that it was filled with, but for unused ones."""
    layout = foreign.names_of(model, weights).layout
    written = foreign.export(model, layout)
    for key, array in written.items():
        np.testing.assert_array_equal(array, weights[key], err_msg=key)
    unused = record_of(model).unused(model, layout)
    assert all(unused.search(key) for key in weights.keys() - written.keys())
