"""One run: config, model, schedule, loss, step, loop, checkpoints, records."""

from .checkpoints import load_weights, open_checkpoints
from .fit import evaluate, fit
from .loop import TrainResult, train

__all__ = [
    "TrainResult",
    "evaluate",
    "fit",
    "load_weights",
    "open_checkpoints",
    "train",
]
