"""Entry point of `python -m mupax` and the `mupax` command."""

import gc
import os
import pathlib
import signal
import sys

import jax


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does: files are uploaded, and a sentence says how to resume.

    A training saves a checkpoint first. A second signal ends the process at once.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def main() -> int:
    """Run the command line; if a package is missing, print the extra to install.

    Returns:
      The exit status.
    """
    gc.freeze()  # modules live to the end: collections need not visit them
    cache_programs()
    if sys.argv[1:2] and sys.argv[1] in ("sweep", "transfer"):
        use_cores()
    from mupax.experiments import cli
    from mupax.experiments.cli import noise

    gc.freeze()
    noise.hide_secrets()
    noise.hide_late_writes()
    noise.clean_records()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = cli.main(sys.argv)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mupax"):
            raise
        print(
            f"mupax: this command needs {error.name}, which is not part of the base "
            "install; install it with: pip install '.[train]' in a clone of mupax",
            file=sys.stderr,
        )
        return 2
    if status == 2:
        noise.hide_threads()
    return status


def cache_programs() -> None:
    """Keep compiled programs on disk: resumed and similar runs reuse them."""
    cache = pathlib.Path.home() / ".cache" / "mupax"
    _default("compilation_cache_dir", str(cache))


def use_cores() -> None:
    """Make a CPU device of each core: a sweep's runs are split over devices."""
    devices = "xla_force_host_platform_device_count"
    if devices not in os.environ.get("XLA_FLAGS", ""):
        _default("num_cpu_devices", _cores())


def _default(name: str, value: str | int) -> None:
    """Set a JAX option, also for subprocesses, unless the environment sets it."""
    variable = f"JAX_{name.upper()}"
    if variable not in os.environ:
        os.environ[variable] = str(value)
        jax.config.update(f"jax_{name}", value)


def _cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
