"""The golden files: small networks of other libraries, which tests/golden writes."""

import pathlib

import numpy as np

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
