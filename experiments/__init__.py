"""Training, sweeps and reports, and the `mupax` command.

| folder | content |
|---|---|
| `cli` | one module per command |
| `run` | one run: config, model, schedule, loss, step, loop, checkpoints |
| `sweep` | many runs as one program; fits, verdicts, sweeps of your own model |
| `report` | sentences, plots and the page |
| `data` | datasets |
| `estimate` | the estimates of `mupax plan` |
| `theory` | solvers of the limits in the papers |

The names below are the public API.
"""

import importlib
from typing import Any

# The module of each name, which is imported at first use.
_NAMES = {
    "RunConfig": "run.config",
    "defaults": "run.config",
    "parse": "run.config",
    "evaluate": "run.fit",
    "fit": "run.fit",
    "load_weights": "run.checkpoints",
    "make_mesh": "run.mesh",
    "open_dataset": "data",
    "register_dataset": "data",
    "Verdict": "sweep.verdict",
    "UserError": "errors",
}
__all__ = list(_NAMES)


def load(module: str, name: str) -> Any:
    """Import a name from a module of this package.

    Args:
      module: path of the module, from this package.
      name: the name in it.

    Raises:
      ModuleNotFoundError: a package of the extra `train` is missing.
    """
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mupax"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install '.[train]' in a clone of mupax",
            name=error.name,
        ) from None


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return load(_NAMES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
