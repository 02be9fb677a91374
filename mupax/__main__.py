"""`python -m mupax` and the `mupax` command."""

import sys


def main() -> int:
    """Run the command line, or say which extra it needs."""
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
