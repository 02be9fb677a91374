"""`python -m mupax` and the `mupax` command."""

import os
import pathlib
import sys


def main() -> int:
    """Run the command line, or say which extra it needs."""
    # A run that goes on, or the next of its kind, need not compile again.
    cache = pathlib.Path.home() / ".cache" / "mupax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
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


if __name__ == "__main__":
    sys.exit(main())
