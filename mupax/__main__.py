"""`python -m mupax` and the `mupax` command."""

import os
import pathlib
import sys


def main() -> int:
    """Run the command line, or say which extra it needs."""
    # A run that goes on, or the next of its kind, need not compile again.
    cache = pathlib.Path.home() / ".cache" / "mupax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    if sys.argv[1:2] and sys.argv[1] in ("sweep", "transfer", "figure"):
        # One device of a CPU leaves cores idle; the lanes of a sweep are shared by all.
        devices = "xla_force_host_platform_device_count"
        if devices not in os.environ.get("XLA_FLAGS", ""):
            os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(_cores()))
    from mupax.experiments import cli

    try:
        return cli.main(sys.argv)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mupax"):
            raise
        print(
            f"mupax: this command needs {error.name}, which the base install leaves "
            "out; install it with: pip install 'mupax[train]'",
            file=sys.stderr,
        )
        return 2


def _cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
