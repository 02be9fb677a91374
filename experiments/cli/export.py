"""`mupax export`: the runs of a sweep as an Optuna study."""

from ..errors import UserError
from .command import Command
from .flags import Flag, parse_own

_FLAGS = (
    Flag("workdir", None, "run directory of a sweep or a transfer", str),
    Flag("optuna", None, "URL of the storage, e.g. sqlite:///sweep.db", str),
    Flag("study", "mupax", "name of the new study"),
)


def _run(argv: list[str]) -> None:
    _, flags = parse_own(argv, _FLAGS)
    if not flags["workdir"]:
        raise UserError("--workdir is missing; name the run directory of a sweep")
    if not flags["optuna"]:
        raise UserError(
            "--optuna is missing; give a storage, e.g. --optuna=sqlite:///sweep.db"
        )
    from ..sweep import export

    runs = export.copy_to_optuna(flags["workdir"], flags["optuna"], flags["study"])
    print(f"{runs} runs: study {flags['study']!r} in {flags['optuna']}")
    print(f"optuna-dashboard {flags['optuna']} shows them")


COMMAND = Command(
    "copy the runs of a sweep into an Optuna study, for optuna-dashboard",
    _run,
    _FLAGS,
    config=False,
    workdir=False,
)
