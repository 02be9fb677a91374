"""Take the runs of a sweep elsewhere: pandas and Optuna."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mupax.zoo.weights.files import open_regular

from .. import memory, remote
from ..errors import UserError, import_extra, reason

if TYPE_CHECKING:  # extras
    import optuna
    import pandas

# Columns of results.csv that are not hyperparameters.
_TEXT = ("parametrization",)


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the runs in a `results.csv`; the loss of a diverged run is None.

    Args:
      path: the file, or its run directory.

    Raises:
      UserError: there is no such file, or it is not a table of runs.
    """
    if remote.is_remote(path) and not str(path).endswith(".csv"):
        path = f"{os.fspath(path).rstrip('/')}/results.csv"
    path = remote.local(path)
    path = path / "results.csv" if path.is_dir() else path
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            memory.check(10 * size, f"The rows of {path}", "use a smaller table")
            text = io.TextIOWrapper(file, newline="")
            rows = list(csv.DictReader(text, restkey=""))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read ({reason(error)}); name the run directory of a "
            "sweep"
        ) from None
    known = {"parametrization", "loss", "seed"}
    if not rows or not known <= rows[0].keys() or any("" in row for row in rows):
        raise UserError(f"{path} is not a table of runs; `mupax sweep` writes one")
    return [{key: _parsed(key, value) for key, value in row.items()} for row in rows]


def _parsed(key: str, value: str | None) -> Any:
    if key in _TEXT or not value:
        return value or None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def dataframe(runs: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """The runs of a sweep as a pandas DataFrame, a row for each run.

    Args:
      runs: from `read_results` or `Population.rows`.

    Returns:
      Columns parametrization, width, depth, choices, hyperparameters, seed and loss;
      the loss is NaN where the run diverged.

    Raises:
      UserError: pandas is not installed.
    """
    pandas = import_extra("pandas", "pandas", "a table of runs")
    return pandas.DataFrame(list(runs)).astype({"loss": float})


def study(
    runs: Iterable[Mapping[str, Any]],
    *,
    name: str = "mupax",
    storage: str | None = None,
) -> "optuna.Study":
    """The runs of a sweep as an Optuna study, e.g. for optuna-dashboard.

    Each run is a trial. Its parameters are the hyperparameters and, where several were
    swept, width, depth, parametrization and choices. A run that diverged is a failed
    trial. The seed is an attribute of the trial.

    Args:
      runs: from `read_results` or `Population.rows`.
      name: the study's name; `storage` must have no study of this name.
      storage: URL of a database, e.g. "sqlite:///sweep.db"; None: in memory.

    Raises:
      UserError: Optuna is not installed, or the storage has a study of this name or
        cannot be used.
    """
    optuna = import_extra("optuna", "optuna", "a study")
    runs = list(runs)
    values = {
        key: list(dict.fromkeys(run[key] for run in runs if key in run))
        for key in dict.fromkeys(k for run in runs for k in run)
        if key not in ("loss", "seed")
    }
    swept = {k: _distribution(optuna, v) for k, v in values.items() if len(v) > 1}
    try:
        made = optuna.create_study(study_name=name, storage=storage)
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(
            f"{storage} has a study {name!r}; give another name, or remove that study"
        ) from None
    except Exception as error:  # of SQLAlchemy and of database drivers
        raise UserError(f"the storage {storage} cannot be used: {error}") from None
    state = optuna.trial.TrialState
    made.add_trials(
        optuna.trial.create_trial(
            state=state.FAIL if run["loss"] is None else state.COMPLETE,
            value=run["loss"],
            params={key: run[key] for key in swept if key in run},
            distributions={key: swept[key] for key in swept if key in run},
            user_attrs={"seed": run["seed"]},
        )
        for run in runs
    )
    return made


def _distribution(optuna: Any, values: list[Any]) -> Any:
    """An Optuna distribution that contains the values."""
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in values):
        return optuna.distributions.CategoricalDistribution(values)
    low, high = min(values), max(values)
    if all(isinstance(x, int) for x in values):
        return optuna.distributions.IntDistribution(low, high, log=low > 0)
    return optuna.distributions.FloatDistribution(low, high, log=low > 0)
