"""The peak rates of accelerators, as their manufacturers state them."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """The limits of one accelerator.

    Attributes:
      name: as in a topology, e.g. "v5e".
      kinds: parts of JAX's `device_kind`, in lower case.
      flops: bf16 operations per second.
      memory: bytes of HBM.
      bandwidth: of the HBM, bytes per second.
      link: bytes per second that a collective along one axis sends from a chip: both
        directions of one axis of a TPU's torus, half of all NVLinks of a GPU.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    memory: float
    bandwidth: float
    link: float

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU; the others are GPUs."""
        return self.name.startswith("v")


_GIB = 2**30

_CHIPS = (
    # cloud.google.com/tpu/docs; link: jax-ml.github.io/scaling-book/tpus
    Chip("v4", ("v4",), 275e12, 32 * _GIB, 1.2e12, 9.0e10),
    Chip("v5e", ("v5 lite", "v5e"), 197e12, 16 * _GIB, 8.1e11, 9.0e10),
    Chip("v5p", ("v5p", "v5"), 459e12, 95 * _GIB, 2.8e12, 1.8e11),
    Chip("v6e", ("v6 lite", "v6e"), 918e12, 32 * _GIB, 1.6e12, 1.8e11),
    # nvidia.com/en-us/data-center
    Chip("a100", ("a100",), 312e12, 80e9, 2.0e12, 3.0e11),
    Chip("h100", ("h100",), 989e12, 80e9, 3.35e12, 4.5e11),
    Chip("h200", ("h200",), 989e12, 141e9, 4.8e12, 4.5e11),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Floating-point operations per second of all devices; None if unknown.

    Examples:
      >>> import jax
      >>> peak_flops(jax.devices("cpu")) is None
      True
    """
    chip = find_chip(devices[0].device_kind)
    return None if chip is None else chip.flops * len(devices)


def find_chip(kind: str) -> Chip | None:
    """The chip with this `device_kind` of JAX; None if unknown.

    Examples:
      >>> find_chip("TPU v5 lite").name
      'v5e'
    """
    for chip in CHIPS.values():
        if any(part in kind.lower() for part in chip.kinds):
            return chip
    return None
