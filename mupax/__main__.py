"""`python -m mupax` and the `mupax` command."""

import sys


def main() -> int:
    """Run the command line, or say which extra it needs."""
    try:
        from mupax.experiments import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mupax"):
            raise
        print(
            f"mupax: the command line needs {error.name}, which the base install "
            "leaves out; install it with: pip install 'mupax[train]'",
            file=sys.stderr,
        )
        return 2
    return cli.main(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
