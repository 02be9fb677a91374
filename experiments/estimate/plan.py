"""The job of `mupax plan`: the real training step, compiled for machines elsewhere."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable

import jax
import numpy as np
import rich.console
import rich.table
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ..errors import UserError
from ..run import job as train
from ..run.config import parse
from ..run.mesh import make_mesh
from .hardware import CHIPS, Chip
from .hlo import COLLECTIVES, collectives

_SIMULATED = 4096  # CPU devices in the place of GPUs


@dataclasses.dataclass(frozen=True)
class Topology:
    """Accelerators that need not be here.

    Attributes:
      name: as it was asked for, "v6e:16x16" or "h100:8".
      chip: what each of them is.
      devices: JAX's descriptions of them; of a GPU, CPU devices that stand in.
      compiled: whether their own compiler is here.
    """

    name: str
    chip: Chip
    devices: list[jax.Device]
    compiled: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a training step needs of each device, and how long it takes at least.

    Bytes are those of one device. Read off the compiled program are `state`, `peak`
    and `sent`, and counted in the traced one is `flops`; times are estimates.

    Attributes:
      topology: the devices.
      batch_size: examples in a step.
      parameters: of the model, in all.
      weights: bytes of parameters.
      optimizer: bytes of all other state.
      activations: bytes of temporary memory at its fullest.
      peak: bytes of everything at its fullest.
      flops: of a step, over all devices.
      sent: bytes that a device sends in a step, by kind of collective.
    """

    topology: Topology
    batch_size: int
    parameters: int
    weights: int
    optimizer: int
    activations: int
    peak: int
    flops: float
    sent: dict[str, float]

    @property
    def fits(self) -> bool:
        """Whether the peak is below the chip's memory."""
        return self.peak <= self.topology.chip.memory

    @property
    def times(self) -> dict[str, float]:
        """Seconds that arithmetic, memory and links each need at their peaks.

        Memory is a lower bound: state is read and written once, and what is temporary
        written and read once.
        """
        chip = self.topology.chip
        traffic = 2 * (self.weights + self.optimizer + self.activations)
        return {
            "arithmetic": self.flops / len(self.topology.devices) / chip.flops,
            "memory": traffic / chip.bandwidth,
            "links": sum(self.sent.values()) / chip.link,
        }

    @property
    def seconds(self) -> float:
        """The roofline: the largest of the times."""
        return max(self.times.values())

    @property
    def bound(self) -> str:
        """Which of the times is the largest."""
        return max(self.times, key=lambda name: self.times[name])


def run(config: ConfigDict, names: str, batches: str = "") -> list[Estimate]:
    """Print what a config's training step needs of each of some machines.

    Args:
      config: of a training run.
      names: topologies, separated by commas.
      batches: batch sizes, separated by commas; the config's own by default.

    Raises:
      UserError: an unknown topology, or one that the model or batch does not suit.
    """
    if not names:
        raise UserError(
            "--topology is missing; give one or more, as v6e:16x16,h100:8 (chips: "
            f"{', '.join(CHIPS)})"
        )
    sizes = [_whole(b, "--batch_sizes") for b in batches.split(",")] if batches else []
    found = []
    for topology in topologies(names.split(",")):
        for size in sizes or [config.batch_size]:
            with config.unlocked():
                config.batch_size = size
            found.append(estimate(config, topology))
    show(found, config)
    return found


def topologies(names: Iterable[str]) -> list[Topology]:
    """Descriptions of machines by name.

    Args:
      names: "chip:shape", the shape being that of a TPU slice, or a number of GPUs.

    Raises:
      UserError: an unknown chip or shape, or TPUs without their compiler.
    """
    names = list(names)
    parsed = []
    for name in names:
        chip, colon, shape = name.partition(":")
        chip = {"gpu": "h100"}.get(chip, chip)
        if chip not in CHIPS or not colon:
            raise UserError(
                f"topology {name!r} is not known; write chip:shape, as v6e:16x16 or "
                f"gpu:8, with a chip of {', '.join(CHIPS)}"
            )
        parsed.append((name, CHIPS[chip], shape))
    gpus = [_whole(shape, name) for name, chip, shape in parsed if not _is_tpu(chip)]
    if max(gpus, default=0) > _SIMULATED:
        raise UserError(
            f"{max(gpus)} GPUs are more than can be simulated here; give at most "
            f"{_SIMULATED}"
        )
    stand_ins = _cpu_devices(max(gpus, default=1))
    return [
        _slice(name, chip, shape)
        if _is_tpu(chip)
        else Topology(name, chip, stand_ins[: int(shape)], False)
        for name, chip, shape in parsed
    ]


def estimate(config: ConfigDict, topology: Topology) -> Estimate:
    """Compile a config's training step for a machine, and read off what it needs.

    Raises:
      UserError: a mesh or batch that does not suit it, or a program that its compiler
        refuses, as for want of memory.
    """
    run = parse(config)
    mesh: Mesh = make_mesh(run.mesh, topology.devices)
    job = train.prepare(run, mesh, stand_in=True)
    train.check_job(job)
    program = job.program
    batch = job.dataset.spec(job.plan.batch_size)
    lowered = program.jit_step().lower(program.abstract, batch, program.hyper)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{topology.name}: the step does not compile ({reason}); try more devices "
            "along fsdp or tensor, model.remat=True, or accumulate"
        ) from None
    memory = compiled.memory_analysis()
    count = len(topology.devices)
    sent: dict[str, float] = dict.fromkeys(COLLECTIVES, 0.0)
    for collective in collectives(compiled.as_text(), count):
        sent[collective.kind] += collective.sent
    weights = _bytes_each(program, "params")
    state = memory.argument_size_in_bytes
    return Estimate(
        topology=topology,
        batch_size=job.plan.batch_size,
        parameters=sum(x.size for x in jax.tree.leaves(program.abstract["params"])),
        weights=weights,
        optimizer=max(state - weights - _batch_bytes(batch, mesh), 0),
        activations=memory.temp_size_in_bytes,
        peak=state
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        flops=train.flops(program, batch),
        sent=sent,
    )


def show(found: list[Estimate], config: ConfigDict) -> None:
    """A table, one column a machine."""
    console = rich.console.Console()
    table = rich.table.Table(title=f"{config.model.name}, a step of training")
    table.add_column("")
    for e in found:
        table.add_column(f"{e.topology.name}\nbatch {e.batch_size:,}", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("devices", [f"{len(e.topology.devices):,}" for e in found]),
        ("mesh", [_mesh_text(config, e) for e in found]),
        ("parameters", [f"{e.parameters:,}" for e in found]),
        ("weights, each", [_size(e.weights) for e in found]),
        ("optimizer and rest, each", [_size(e.optimizer) for e in found]),
        ("temporary, each", [_size(e.activations) for e in found]),
        ("peak, each", [_size(e.peak) for e in found]),
        ("memory of the chip", [_size(e.topology.chip.memory) for e in found]),
        ("fits", ["yes" if e.fits else "NO" for e in found]),
        ("TFLOP a step, all", [f"{e.flops / 1e12:,.3g}" for e in found]),
        *(
            (f"sent by {kind}", [_size(e.sent[kind]) for e in found])
            for kind in COLLECTIVES
            if any(e.sent[kind] for e in found)
        ),
        *(
            (f"{name}, estimate", [_time(e.times[name]) for e in found])
            for name in ("arithmetic", "memory", "links")
        ),
        ("step at least, estimate", [_time(e.seconds) for e in found]),
        ("largest term", [e.bound for e in found]),
        (
            "examples/s at most",
            [f"{e.batch_size / e.seconds:,.0f}" for e in found],
        ),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    compiled = [e.topology.name for e in found if e.topology.compiled]
    others = [e.topology.name for e in found if not e.topology.compiled]
    if compiled:
        console.print(
            f"{', '.join(compiled)}: memory and bytes sent are those of the program "
            "that the TPU compiler made."
        )
    if others:
        console.print(
            f"{', '.join(others)}: no GPU compiler is used; memory and bytes sent are "
            "those of the same program compiled for as many CPU devices, an estimate."
        )
    console.print(
        "Times are rooflines at the chips' stated peaks, each term alone: a real step "
        "is slower."
    )


def _is_tpu(chip: Chip) -> bool:
    return chip.name.startswith("v")


def _slice(name: str, chip: Chip, shape: str) -> Topology:
    """A TPU slice, by device: a chip of v4 may be two of them."""
    devices = _tpus(name)
    chips = math.prod(map(int, shape.split("x")))
    share = chips / len(devices)
    each = dataclasses.replace(
        chip,
        flops=share * chip.flops,
        memory=share * chip.memory,
        bandwidth=share * chip.bandwidth,
        link=share * chip.link,
    )
    return Topology(name, each, devices, True)


def _tpus(name: str) -> list[jax.Device]:
    from jax.experimental import topologies as described

    # Without it libtpu asks a server of the cloud, which is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return list(
            described.get_topology_desc(platform="tpu", topology_name=name).devices
        )
    except Exception as error:  # of libtpu, or for want of it
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"topology {name!r} cannot be described ({reason}); it needs "
            "pip install 'mupax[tpu]', and a shape that this chip comes in, as "
            "v5e:4x8, v6e:16x16, v4:2x2x4, v5p:8x8x16"
        ) from None


def _cpu_devices(count: int) -> list[jax.Device]:
    """As many CPU devices, if JAX has not been started with fewer."""
    # It may run already, with what it was given.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"{count} devices cannot be simulated here, only {len(devices)}; unset "
            "XLA_FLAGS, or start the command anew"
        )
    return devices


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12 or int(text) < 1:
        raise UserError(
            f"{name[:40]}: {text[:40]!r} must be a whole number, at least 1 and below "
            "10^12"
        )
    return int(text)


def _bytes_each(program: train.Program, part: str) -> int:
    leaves = jax.tree.leaves(program.abstract[part])
    shardings = jax.tree.leaves(program.shardings[part])
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def _batch_bytes(batch: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    return sum(x.size * x.dtype.itemsize for x in batch.values()) // shares


def _mesh_text(config: ConfigDict, e: Estimate) -> str:
    shape = make_mesh(parse(config).mesh, e.topology.devices).shape
    return ", ".join(f"{a} {n}" for a, n in shape.items() if n > 1) or "1"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
        count /= 1024
    raise AssertionError


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"
