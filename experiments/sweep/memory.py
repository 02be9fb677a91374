"""How much memory there is for a program, and how much it needs."""

import math
import pathlib
from typing import Any

import jax

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available() -> float:
    """Free bytes of one device; of a CPU, of the machine or container."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host() / jax.local_device_count()


def host() -> float:
    """Free bytes of the machine or container, or of what this process may take."""
    free = float("inf")
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = 1024.0 * int(fields["MemAvailable"].split()[0])
    for limit, used in _CGROUPS:
        try:
            left = int(pathlib.Path(limit).read_text()) - int(
                pathlib.Path(used).read_text()
            )
        except (OSError, ValueError):  # another kind of system, or "max"
            continue
        free = min(free, float(left))
    return max(0.0, min(free, _limited()))


def _limited() -> float:
    """Bytes of address space that the system lets this process take yet."""
    try:
        import resource  # of POSIX systems only
    except ModuleNotFoundError:
        return math.inf
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = pathlib.Path("/proc/self/statm")
    if most == resource.RLIM_INFINITY or not pages.exists():
        return math.inf
    return float(most - int(pages.read_text().split()[0]) * resource.getpagesize())


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
