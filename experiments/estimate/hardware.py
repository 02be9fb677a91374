"""What accelerators can do at most, as their makers state it."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """The limits of one accelerator.

    Attributes:
      name: as in a topology, "v5e".
      kinds: what JAX calls it, in lower case, as a part of `device_kind`.
      flops: bf16 multiplications and additions a second.
      memory: bytes of HBM.
      bandwidth: of the HBM, bytes a second.
      link: bytes a second that a collective along one axis moves out of a chip: both
        directions of one axis of the torus of a TPU, half of all NVLinks of a GPU.
      source: where the numbers stand.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    memory: float
    bandwidth: float
    link: float
    source: str


_TPU = "cloud.google.com/tpu/docs/{}; link: jax-ml.github.io/scaling-book/tpus"
_GPU = "nvidia.com/en-us/data-center/{}"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", ("v4",), 275e12, 32 * 2**30, 1.2e12, 9.0e10, _TPU.format("v4")),
        Chip(
            "v5e",
            ("v5 lite", "v5e"),
            197e12,
            16 * 2**30,
            8.1e11,
            9.0e10,
            _TPU.format("v5e"),
        ),
        Chip(
            "v5p", ("v5p", "v5"), 459e12, 95 * 2**30, 2.8e12, 1.8e11, _TPU.format("v5p")
        ),
        Chip(
            "v6e",
            ("v6 lite", "v6e"),
            918e12,
            32 * 2**30,
            1.6e12,
            1.8e11,
            _TPU.format("v6e"),
        ),
        Chip("a100", ("a100",), 312e12, 80e9, 2.0e12, 3.0e11, _GPU.format("a100")),
        Chip("h100", ("h100",), 989e12, 80e9, 3.35e12, 4.5e11, _GPU.format("h100")),
        Chip("h200", ("h200",), 989e12, 141e9, 4.8e12, 4.5e11, _GPU.format("h200")),
    )
}


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Operations a second of all devices together; None where they are not known.

    Examples:
      >>> import jax
      >>> peak_flops(jax.devices("cpu")) is None
      True
    """
    chip = find_chip(devices[0].device_kind)
    return None if chip is None else chip.flops * len(devices)


def find_chip(kind: str) -> Chip | None:
    """The chip that JAX calls `kind`.

    Examples:
      >>> find_chip("TPU v5 lite").name
      'v5e'
    """
    for chip in CHIPS.values():
        if any(part in kind.lower() for part in chip.kinds):
            return chip
    return None
