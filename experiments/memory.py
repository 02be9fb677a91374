"""How much memory there is for a program, and how much it needs."""

import math
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
    """Free bytes of one device; of a CPU, of the machine or container."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host() / jax.local_device_count()


def host() -> float:
    """Free bytes of the machine or container, or of what this process may take."""
    import psutil  # only here: the base install has no need of it

    free = float(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        try:
            left = int(pathlib.Path(limit).read_text()) - int(
                pathlib.Path(used).read_text()
            )
        except (OSError, ValueError):  # another kind of system, or "max"
            continue
        free = min(free, float(left))
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # not on every kind of system
        most, _ = process.rlimit(psutil.RLIMIT_AS)
        if most != psutil.RLIM_INFINITY:
            free = min(free, float(most - process.memory_info().vms))
    return max(0.0, free)


def ran_out(error: Exception) -> bool:
    """Whether a program died for want of memory; devices word it differently."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text


def needed(compiled: Any) -> float:
    """Bytes of one device that a compiled program needs; 0 where nothing tells."""
    found = compiled.memory_analysis()
    if found is None:
        return 0.0
    return float(
        found.temp_size_in_bytes
        + found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
    )


def check(needed: float, what: str, remedy: str = "make it smaller") -> None:
    """Refuse what would take more than the free memory of this machine.

    Args:
      needed: bytes.
      what: what takes them, as the beginning of a sentence.
      remedy: what to change.

    Raises:
      UserError: there is not so much.

    >>> check(8.0, "A number")
    """
    free = host()
    if math.isfinite(free) and needed > free:
        raise UserError(
            f"{what} would take {needed / _GIB:.3g} GiB of memory, and "
            f"{free / _GIB:.3g} GiB are free; {remedy}"
        )
