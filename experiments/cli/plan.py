"""`mupax plan`."""

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "topology",
        "",
        "accelerators, e.g. v6e:16x16,v5p:4x4x4,gpu:8",
        required="give one or more, e.g. v6e:16x16,h100:8",
    ),
    Flag("batch_sizes", "", "e.g. 1024,4096; default: the config's batch size"),
)


def run(given: Parsed) -> None:
    """Compile the training step for each topology and print its needs."""
    from ..estimate import plan

    plan.run(given.config, given.flags["topology"], given.flags["batch_sizes"])


COMMAND = Command(
    "estimate memory, communication and time of a training step on TPUs or GPUs",
    run,
    FLAGS,
    workdir=False,
)
