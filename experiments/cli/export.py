"""`mupax export`: the runs of a sweep as an Optuna study."""

from mupax.zoo.addresses import public

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "workdir",
        "",
        "run directory of a sweep or a transfer",
        required="give the run directory of a sweep",
    ),
    Flag(
        "optuna",
        "",
        "URL of the storage, e.g. sqlite:///sweep.db",
        required="give a storage, e.g. --optuna=sqlite:///sweep.db",
    ),
    Flag("study", "mupax", "name of the new study"),
)


def run(given: Parsed) -> None:
    """Copy the runs, and say how to see them. Prints no secrets of the storage."""
    from ..sweep import export

    flags = given.flags
    runs = export.read_results(flags["workdir"])
    export.study(runs, name=flags["study"], storage=flags["optuna"])
    storage = public(flags["optuna"])
    print(f"{len(runs)} runs: study {flags['study']!r} in {storage}")
    if storage == flags["optuna"]:
        print(f"optuna-dashboard {storage} shows them")
    else:
        print("optuna-dashboard with the same storage shows them")


COMMAND = Command(
    "copy the runs of a sweep into an Optuna study, for optuna-dashboard",
    run,
    FLAGS,
    config=False,
)
