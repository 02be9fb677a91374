"""Measure the free memory, and the memory that a program needs."""

import pathlib
from typing import Any

import jax

from .errors import UserError

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)

_GIB = 2**30


def available() -> float:
    """Free bytes of one device, or of a CPU device's share of the machine."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host() / jax.local_device_count()


def host() -> float:
    """Free bytes of the machine or container, within the limit of this process."""
    import psutil  # the base install lacks it

    free = float(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        try:
            left = int(pathlib.Path(limit).read_text()) - int(
                pathlib.Path(used).read_text()
            )
        except (OSError, ValueError):  # another system, or "max" (no limit)
            continue
        free = min(free, float(left))
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # not on all systems
        most, _ = process.rlimit(psutil.RLIMIT_AS)
        if most != psutil.RLIM_INFINITY:
            free = min(free, float(most - process.memory_info().vms))
    return max(0.0, free)


def ran_out(error: Exception) -> bool:
    """Whether a program failed for lack of memory."""
    names = "RESOURCE_EXHAUSTED", "Out of memory"
    return isinstance(error, MemoryError) or any(x in str(error) for x in names)


def needed(compiled: Any) -> float:
    """Bytes that a compiled program needs on one device; 0 if unknown."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return 0.0
    return float(
        sizes.temp_size_in_bytes
        + sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
    )


def check(needed: float, what: str, remedy: str, free: float | None = None) -> None:
    """Check that an allocation fits into the free memory.

    Args:
      needed: bytes.
      what: subject of the error's sentence.
      remedy: end of the error's sentence.
      free: free bytes; by default those of the machine.

    Examples:
      >>> check(8.0, "A number", "use fewer numbers")
    """
    free = host() if free is None else free
    if needed > free:
        raise UserError(
            f"{what} would take {needed / _GIB:.3g} GiB of memory, and "
            f"{free / _GIB:.3g} GiB are free; {remedy}"
        )
