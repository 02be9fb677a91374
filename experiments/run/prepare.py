"""Prepare a run on a mesh, and check that it fits."""

import dataclasses
from typing import Any

import psutil
from jax.sharding import Mesh

from ..data import Dataset
from ..errors import UserError
from ..estimate.flops import count_flops
from ..estimate.hardware import peak_flops
from .build import Built, build, open_dataset
from .config import KEYS, RunConfig
from .loop import LoopOptions, check
from .mesh import bytes_per_device, make_mesh
from .program import Program


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run on a mesh, ready to start."""

    built: Built
    program: Program
    options: LoopOptions

    @property
    def config(self) -> RunConfig:
        return self.built.config

    @property
    def dataset(self) -> Dataset:
        return self.built.dataset

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state on each device."""
        return bytes_per_device(self.program.abstract, self.program.shardings)

    def check(self) -> None:
        """Check the batch size against the devices and the dataset."""
        check(self.options, self.program, self.dataset)

    def check_memory(self) -> None:
        """Check that the state fits into the memory of a device."""
        device = self.program.mesh.local_devices[0]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        limit = limit or psutil.virtual_memory().total
        if (needed := self.state_bytes) > limit:
            raise UserError(
                f"the model and its optimizer take {needed / 2**30:,.1f} GiB on each "
                f"device, which has {limit / 2**30:,.1f} GiB; make the model smaller, "
                "or use more devices along mesh.fsdp or mesh.tensor"
            )


def prepare(
    config: RunConfig, mesh: Mesh | None = None, *, stand_in: bool = False
) -> PreparedRun:
    """Prepare a run on a mesh. Computes and writes nothing.

    Args:
      config: of the run.
      mesh: replaces the config's mesh. Its devices need not exist here.
      stand_in: open `config.stand_in` if the dataset is not prepared.

    Raises:
      UserError: bad input; names the key.
    """
    mesh = mesh or make_mesh(config.mesh)
    built = build(config, open_dataset(config, stand_in=stand_in))
    program = Program(
        built.model,
        built.recipe,
        built.objective,
        mesh,
        hyper={"learning_rate": config.learning_rate},
        seed=config.seed,
        log_every=config.log_every,
        rules=config.plain()["sharding"],
    )
    peak = peak_flops(list(mesh.devices.flat))
    spec = built.dataset.spec(config.batch_size)
    keys = {field.name for field in dataclasses.fields(LoopOptions)} & set(KEYS)
    options = LoopOptions(
        **{key: getattr(config, key) for key in keys},
        flops=step_flops(program, spec) if peak else None,
        peak=peak,
    )
    return PreparedRun(built, program, options)


def step_flops(program: Program, batch: Any) -> float:
    """Floating-point operations of a step, over all devices."""
    return count_flops(program.step, program.abstract, batch, program.hyper)
