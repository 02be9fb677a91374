"""The `mupax` command."""

import sys
from collections.abc import Callable

from .errors import Stopped, UserError


def transfer(argv: list[str]) -> None:
    """sweep learning rates on small models, train the large one, write a report"""
    from . import config as configs
    from . import transfer as job

    config, workdir, _ = configs.parse(argv)
    job.run(config, workdir, command=["mupax", *argv])


def sweep(argv: list[str]) -> None:
    """run many hyperparameters at several sizes; a table, and what transfers"""
    from . import config as configs
    from .sweep import job

    config, workdir, own = configs.parse(
        argv,
        {
            "executor": "here",
            "workers": 2,
            "scheduler": None,
            "stop_diverged": False,
            "halving": 0,
        },
    )
    job.run(
        config,
        workdir,
        command=["mupax", *argv],
        executor=own["executor"],
        workers=own["workers"],
        address=own["scheduler"],
        stop_diverged=own["stop_diverged"],
        halving=own["halving"],
    )


def train(argv: list[str]) -> None:
    """train one model, on one device or on thousands; killed, it goes on"""
    from . import config as configs
    from .run import job
    from .run import processes as distributed

    config, workdir, own = configs.parse(argv, {"dry_run": False, **distributed.FLAGS})
    with distributed.joined(own):
        job.run(config, workdir, command=["mupax", *argv], dry_run=own["dry_run"])


def evaluate(argv: list[str]) -> None:
    """score a checkpoint of a training run on the test split"""
    from . import config as configs
    from .run import job
    from .run import processes as distributed

    config, workdir, own = configs.parse(
        argv, {"checkpoint": "latest", **distributed.FLAGS}
    )
    with distributed.joined(own):
        job.evaluate(config, workdir, own["checkpoint"])


def plan(argv: list[str]) -> None:
    """what a training step needs of a TPU slice or GPUs: memory, links, time"""
    from . import config as configs
    from .estimate import plan as job

    config, _, own = configs.parse(argv, {"topology": "", "batch_sizes": ""})
    job.run(config, own["topology"], own["batch_sizes"])


def explain(argv: list[str]) -> None:
    """print how each parameter of a config's model is scaled"""
    from . import config as configs
    from . import transfer
    from .run import job as train

    config, *_ = configs.parse(argv)
    swept = "sweep" in config
    print(transfer.explain_target(config) if swept else train.explain(config))


def coord_check(argv: list[str]) -> None:
    """do activations move alike at every size? of a training config's model"""
    from . import config as configs
    from . import coord_check as job

    config, workdir, own = configs.parse(
        argv, {"widths": "", "depths": "", "seeds": 4, "rate": "", "tolerance": "0.15"}
    )
    try:
        rate = float(own["rate"]) if own["rate"] else None
        tolerance = float(own["tolerance"])
    except ValueError as error:
        raise UserError(f"--rate and --tolerance are numbers: {error}") from None
    job.run(
        config,
        workdir,
        widths=own["widths"],
        depths=own["depths"],
        learning_rate=rate,
        seeds=own["seeds"],
        tolerance=tolerance,
    )


def convert(argv: list[str]) -> None:
    """read weights of timm, torchvision, big_vision or transformers, and write them"""
    from . import convert as job

    job.run(argv)


def figure(argv: list[str]) -> None:
    """redraw a figure of the papers and check its claim; `figure list` names all"""
    from .papers import figures

    figures.run(argv)


def models(argv: list[str]) -> None:
    """list the models of the zoo; a pattern may follow, as 'res*'"""
    from mupax import zoo

    for name in zoo.list_models(*argv[1:2]):
        print(name)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "transfer": transfer,
    "sweep": sweep,
    "train": train,
    "eval": evaluate,
    "plan": plan,
    "explain": explain,
    "coord-check": coord_check,
    "convert": convert,
    "figure": figure,
    "models": models,
}


def main(argv: list[str]) -> int:
    """Run one command.

    Args:
      argv: as `sys.argv`.

    Returns:
      The exit status: 0, or 2 with one sentence on stderr for bad input.
    """
    name = argv[1] if len(argv) > 1 else "help"
    if name in ("help", "--help", "-h"):
        print(_help())
        return 0
    try:
        if name not in COMMANDS:
            raise UserError(
                f"there is no command {name!r}; commands are: {', '.join(COMMANDS)}"
            )
        if {"--help", "-h"} & set(argv[2:]):
            print(f"mupax {name}: {COMMANDS[name].__doc__}\n\n{_flags(name)}")
            return 0
        COMMANDS[name](argv[1:])
    except UserError as error:
        print(f"mupax: {error}", file=sys.stderr)
        return 2
    except Stopped as error:
        print(f"mupax: {error}; the same command goes on from here", file=sys.stderr)
        return 0
    except KeyboardInterrupt:
        print("mupax: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _help() -> str:
    rows = [f"  {name:<11} {f.__doc__}" for name, f in COMMANDS.items()]
    return "\n".join(
        [
            "mupax: hyperparameter transfer for JAX, across width and depth",
            "",
            "usage: mupax COMMAND --config NAME [--workdir DIR] [--config.KEY=V ...]",
            "       mupax COMMAND --help",
            "",
            *rows,
        ]
    )


def _flags(name: str) -> str:
    """The flags of a command: those of a config, or its own."""
    if name == "convert":
        from .convert import HELP

        return HELP
    if name == "figure":
        from .papers import figures

        return figures.HELP
    from .config import list_configs

    return (
        "  --config         a config file, or the name of a packaged config: "
        + ", ".join(list_configs())
        + "\n  --config.KEY=V   override a key of the config, as --config.sweep.seeds=4"
        "\n  --workdir        where to write; by default runs/<config>"
        + _OWN.get(name, "")
    )


_PROCESSES = """
  --distributed    this is one of several processes, which JAX finds by itself on
                   Cloud TPU, GKE, Slurm and MPI; elsewhere give also
  --coordinator    host:port where process 0 listens,
  --processes      how many there are, and
  --process        which of them this is, from 0"""

_OWN = {
    "coord-check": """
  --widths         as 64,128,256; by default the base's, twice and four times it
  --depths         likewise
  --rate           the learning rate; the config's own by default
  --seeds          how many initializations; 4 by default
  --tolerance      how far from zero a slope may surely be; 0.15 by default""",
    "sweep": """
  --executor       here (the default), local (processes), dask, slurm
  --workers        jobs at once, where they do not run here; 2 by default
  --scheduler      of Dask, as tcp://host:8786; a cluster of this machine by default
  --stop_diverged  do no more steps for a run that has diverged; on accelerators, where
                   every run of a chunk has
  --halving        as 2: one grid point in two goes on after a quarter of the steps,
                   one in two of these after half; by default all go on""",
    "train": """
  --dry_run        say what would be done, and do nothing"""
    + _PROCESSES,
    "plan": """
  --topology       machines, as v6e:16x16,v5p:4x4x4,gpu:8
  --batch_sizes    as 1024,4096; the config's own by default""",
    "eval": """
  --checkpoint     latest (the default), best, or a step"""
    + _PROCESSES,
}
