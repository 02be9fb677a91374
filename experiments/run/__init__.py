"""The trainer: mesh, step, loop, evaluation, checkpoints, records."""

from .checkpoints import load_weights, open_checkpoints, read_weights
from .fit import evaluate, fit
from .loop import Plan, TrainResult, train
from .mesh import make_mesh
from .objective import Classification, NextToken
from .optimizer import build_optimizer, make_schedule
from .program import Program, make_program
from .step import Recipe

__all__ = [
    "Classification",
    "NextToken",
    "Plan",
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
