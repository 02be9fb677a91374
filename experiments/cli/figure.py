"""`mupax figure`."""

import contextlib

from .. import remote
from ..checks import one_of
from ..errors import UserError
from .command import Command
from .flags import Flag, parse_own

FLAGS = (
    Flag(
        "scale",
        None,
        "laptop (the default: minutes on two cores), medium (hours of one core), long "
        "(the sizes of medium, the paper's number of steps), wide (wider models; only "
        "some figures have it) or paper",
    ),
    Flag(
        "workdir",
        "runs/figures",
        "where to write; default: runs/figures. The same command resumes an "
        "interrupted figure",
    ),
    Flag("tables", None, "folder of the tables; default: data inside --workdir"),
    Flag("from_data", False, "draw from existing tables, without training"),
    Flag("data_dir", None, "TFDS directory, for figures that train on images"),
    Flag(
        "dataset",
        None,
        "dataset to use in place of the paper's, e.g. digits; text:FILE for "
        "transformers",
    ),
)


def run(argv: list[str]) -> None:
    """List the figures, or draw one."""
    from ..papers import figures
    from ..run import mirror

    names, own = parse_own(argv, FLAGS, arguments=1)
    if not names:
        raise UserError(
            "the name of a figure is missing; give one, e.g. `mupax figure tp6-9`. "
            "`mupax figure list` lists them"
        )
    if (scale := own["scale"]) and names[0] in ("all", "list", "pages"):
        raise UserError(
            f"--scale={scale} has no effect on `mupax figure {names[0]}`, which takes "
            "the largest scale whose tables are complete; leave it out, or give the id "
            "of one figure"
        )
    scale = one_of(*figures.SCALES)("--scale", "laptop" if scale is None else scale)
    if not own["workdir"]:
        raise UserError("--workdir is empty; give a directory, or leave it out")
    with contextlib.ExitStack() as held:
        folder = held.enter_context(mirror.opened(own["workdir"]))
        tables = folder / "data"
        if own["tables"] and own["from_data"] and remote.is_remote(own["tables"]):
            tables = remote.local(own["tables"])
        elif own["tables"]:
            tables = held.enter_context(mirror.opened(own["tables"]))
        request = figures.Request(
            scale,
            folder,
            own["data_dir"],
            own["dataset"],
            tables,
            own["from_data"],
        )
        figures.run(names[0], request)


COMMAND = Command(
    "redraw a figure of the papers and check its claim; `figure list` lists them",
    run,
    FLAGS,
    config=False,
    arguments="""\
  list             every figure of the four papers
  ID               draw one, e.g. tp6-9; missing runs are trained
  all              every figure whose tables are complete, e.g. in --tables=docs/data
  pages            rewrite docs/figures.md and docs/evidence.md from docs/data""",
)
