"""`python -m papers`: list the papers' figures, draw one, rewrite the pages."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from mupax.__main__ import cache_programs, use_cores
from mupax.experiments.cli import noise
from mupax.experiments.errors import Stopped, UserError

from . import catalogue, pages
from .request import SCALES, Request


def parser() -> argparse.ArgumentParser:
    """The arguments, which papers/figures.md explains."""
    top = argparse.ArgumentParser("python -m papers", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every figure of the four papers")
    commands.add_parser(
        "pages",
        help="rewrite papers/figures.md, papers/evidence.md and the pictures from "
        "the tables in papers/data",
    )
    figure = commands.add_parser(
        "figure",
        help="draw a figure, print its verdict; missing runs are trained. The same "
        "command resumes an interrupted figure",
    )
    figure.add_argument("id", help="name of a figure, e.g. tp6-9")
    figure.add_argument(
        "--scale",
        choices=SCALES,
        default="laptop",
        help="laptop (minutes on two cores), medium (hours of one core), long (the "
        "sizes of medium, the paper's number of steps), wide (wider models; only some "
        "figures have it) or paper; default: laptop",
    )
    figure.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs/figures"),
        help="folder of pictures and sweeps; default: runs/figures",
    )
    figure.add_argument(
        "--tables",
        type=pathlib.Path,
        help="folder of the tables; default: papers/data with --from_data, else data "
        "inside --workdir",
    )
    figure.add_argument(
        "--from_data", action="store_true", help="draw from tables, without training"
    )
    figure.add_argument(
        "--data_dir", help="TFDS directory, for figures that train on images"
    )
    figure.add_argument(
        "--dataset",
        help="dataset to use in place of the paper's, e.g. digits; text:FILE for "
        "transformers",
    )
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Returns:
      The exit status; 2 after bad input, with one sentence on stderr.
    """
    given = parser().parse_args(argv)
    try:
        if given.command == "list":
            catalogue.print_list()
        elif given.command == "pages":
            pages.write(catalogue.DATA.parent, catalogue.DATA)
        else:
            usual = catalogue.DATA if given.from_data else given.workdir / "data"
            request = Request(
                given.scale,
                given.workdir,
                given.data_dir,
                given.dataset,
                given.tables or usual,
                given.from_data,
            )
            print(catalogue.run(given.id, request))
    except UserError as error:
        print(f"papers: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt):
        print("papers: interrupted; run the same command to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    cache_programs()
    use_cores()
    noise.hide_late_writes()
    sys.exit(main(sys.argv[1:]))
