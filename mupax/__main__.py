"""`python -m mupax` and the `mupax` command."""

import os
import pathlib
import sys

import jax


def main() -> int:
    """Run the command line, or say which extra it needs."""
    # A run that goes on, or the next of its kind, need not compile again.
    cache = pathlib.Path.home() / ".cache" / "mupax"
    _default("compilation_cache_dir", str(cache))
    if sys.argv[1:2] and sys.argv[1] in ("sweep", "transfer", "figure"):
        # One device of a CPU leaves cores idle; the lanes of a sweep are shared by all.
        devices = "xla_force_host_platform_device_count"
        if devices not in os.environ.get("XLA_FLAGS", ""):
            _default("num_cpu_devices", _cores())
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


def _default(name: str, value: str | int) -> None:
    """Set one of JAX's options, unless the environment does; for its processes too."""
    variable = f"JAX_{name.upper()}"
    if variable not in os.environ:
        os.environ[variable] = str(value)
        jax.config.update(f"jax_{name}", value)


def _cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
