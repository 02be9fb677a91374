"""One run: config, model, schedule, loss, step, loop, checkpoints, records."""

from .checkpoints import load_weights, open_checkpoints, read_weights
from .fit import evaluate, fit
from .loop import LoopOptions, TrainResult, train
from .loss import Classification, NextToken
from .mesh import make_mesh
from .optimizer import build_optimizer
from .program import Program, make_program
from .schedule import make_schedule
from .step import Recipe

__all__ = [
    "Classification",
    "LoopOptions",
    "NextToken",
    "Program",
    "Recipe",
    "TrainResult",
    "build_optimizer",
    "evaluate",
    "fit",
    "load_weights",
    "make_mesh",
    "make_program",
    "make_schedule",
    "open_checkpoints",
    "read_weights",
    "train",
]
