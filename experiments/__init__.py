"""Training, sweeps and reports; `mupax` on the command line is made of it.

| room | what it holds |
|---|---|
| `cli` | one module for each command |
| `run` | one run: config, model, schedule, loss, step, loop, checkpoints |
| `sweep` | many runs as one program; fits, verdicts, a sweep of your own model |
| `report` | sentences, pictures and the page |
| `data` | datasets |
| `estimate` | what `mupax plan` computes |
| `papers` | theory and figures of the papers |

The names below are those to use from Python; each room has more.
"""

import importlib
from typing import Any

# By name, where each stands. They are imported when they are asked for.
_NAMES = {
    "RunConfig": "run.config",
    "defaults": "run.config",
    "parse": "run.config",
    "evaluate": "run.fit",
    "fit": "run.fit",
    "load_weights": "run.checkpoints",
    "make_mesh": "run.mesh",
    "open_dataset": "data",
    "Verdict": "sweep.verdict",
    "UserError": "errors",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module = importlib.import_module(f".{_NAMES[name]}", __name__)
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
