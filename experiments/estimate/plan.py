"""`mupax plan`: compile the training step for TPUs or GPUs that are not here."""

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping

import jax
import rich.console
import rich.filesize
import rich.table
from absl import logging
from ml_collections import ConfigDict

from mupax import zoo

from .. import memory
from ..errors import UserError, reason
from ..run.config import parse
from ..run.mesh import bytes_per_device, make_mesh
from ..run.prepare import prepare, step_flops
from .hardware import CHIPS, Chip
from .hlo import COLLECTIVES, collectives

_SIMULATED = 4096  # the largest number of GPUs, which CPU devices replace


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of accelerators.

    Attributes:
      name: as given by the user, e.g. "v6e:16x16" or "h100:8".
      chip: type of each accelerator.
      devices: JAX devices: descriptions of TPUs, or CPU devices in place of GPUs.
    """

    name: str
    chip: Chip
    devices: list[jax.Device]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory, communication and minimal time of a training step.

    Bytes are per device and come from the compiled program. `flops` is counted in the
    traced program. Times are estimates.

    Attributes:
      topology: the devices.
      batch_size: examples per step.
      mesh: number of devices along each axis.
      parameters: number of parameters of the model.
      weights: bytes of parameters.
      optimizer: bytes of all other state.
      activations: peak bytes of temporary memory.
      peak: peak bytes of all memory.
      flops: floating-point operations per step, over all devices.
      sent: bytes that a device sends per step, by kind of collective.
    """

    topology: Topology
    batch_size: int
    mesh: Mapping[str, int]
    parameters: int
    weights: int
    optimizer: int
    activations: int
    peak: int
    flops: float
    sent: dict[str, float]

    @property
    def times(self) -> dict[str, float]:
        """Seconds that arithmetic, memory and links need at their peak rates.

        The time of the memory is a lower bound: state and temporary memory are each
        read and written once.
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
        """The largest of the times (roofline)."""
        return max(self.times.values())


def run(config: ConfigDict, names: str, batches: str) -> None:
    """Print the estimates of a config's training step for several topologies.

    Args:
      config: a training config.
      names: topologies, separated by commas.
      batches: batch sizes, separated by commas; if empty, the config's.

    Raises:
      UserError: an unknown topology, or one whose devices cannot divide the model or
        the batch.
    """
    sizes = [_whole(b, "--batch_sizes") for b in batches.split(",")] if batches else []
    estimates = []
    for topology in topologies(names.split(",")):
        for size in sizes or [config.batch_size]:
            with config.unlocked():
                config.batch_size = size
            estimates.append(estimate(config, topology))
    show(estimates, config.model.name)


def topologies(names: Iterable[str]) -> list[Topology]:
    """Topologies by name.

    Args:
      names: "chip:shape" with the shape of a TPU slice, or "chip:number" for GPUs.

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
                f"topology {name!r} is not known; write chip:shape, e.g. v6e:16x16 or "
                f"gpu:8, with a chip of {', '.join(CHIPS)}"
            )
        parsed.append((name, CHIPS[chip], shape))
    tpus = [name for name, chip, _ in parsed if chip.is_tpu]
    if tpus and importlib.util.find_spec("libtpu") is None:
        needed = (
            f"{', '.join(tpus)} needs the compiler for TPUs: pip install '.[tpu]' in a "
            "clone of mupax"
        )
        parsed = [one for one in parsed if not one[1].is_tpu]
        if not parsed:
            raise UserError(needed)
        logging.warning("%s; the other topologies follow", needed)
    gpus = [_whole(shape, name) for name, chip, shape in parsed if not chip.is_tpu]
    if max(gpus, default=0) > _SIMULATED:
        raise UserError(
            f"{max(gpus)} GPUs are more than can be simulated here; give at most "
            f"{_SIMULATED}"
        )
    stand_ins = _cpu_devices(max(gpus, default=1))
    return [
        _slice(name, chip, shape)
        if chip.is_tpu
        else Topology(name, chip, stand_ins[: int(shape)])
        for name, chip, shape in parsed
    ]


def estimate(config: ConfigDict, topology: Topology) -> Estimate:
    """Compile a config's training step for a topology.

    Raises:
      UserError: the mesh or batch does not suit the topology, or the program does not
        compile, e.g. for lack of memory.
    """
    run = parse(config)
    mesh = make_mesh(run.mesh, topology.devices)
    prepared = prepare(run, mesh, stand_in=True)
    prepared.check()
    program = prepared.program
    batch = prepared.dataset.spec(run.batch_size)
    lowered = program.jit_step().lower(program.abstract, batch, program.hyper)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"{topology.name}: the step does not compile ({reason(error, 300)}); try "
            "more devices along fsdp or tensor, model.remat=full, or accumulate"
        ) from None
    sent: dict[str, float] = dict.fromkeys(COLLECTIVES, 0.0)
    for collective in collectives(compiled.as_text(), mesh.size):
        sent[collective.kind] += collective.sent
    weights = bytes_per_device(program.abstract["params"], program.shardings["params"])
    of_batch = bytes_per_device(batch, [zoo.batch_sharding(mesh)] * len(batch))
    sizes = compiled.memory_analysis()
    return Estimate(
        topology=topology,
        batch_size=run.batch_size,
        mesh=mesh.shape,
        parameters=program.parameters,
        weights=weights,
        optimizer=max(sizes.argument_size_in_bytes - weights - of_batch, 0),
        activations=sizes.temp_size_in_bytes,
        peak=int(memory.needed(compiled)),
        flops=step_flops(program, batch),
        sent=sent,
    )


def show(estimates: list[Estimate], model: str) -> None:
    """Print a table with one column per estimate."""
    console = rich.console.Console()
    table = rich.table.Table(title=f"{model}, a step of training")
    table.add_column("")
    for e in estimates:
        table.add_column(f"{e.topology.name}\nbatch {e.batch_size:,}", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("chip", [e.topology.chip.name for e in estimates]),
        ("devices", [f"{len(e.topology.devices):,}" for e in estimates]),
        ("mesh", [_mesh_text(e.mesh) for e in estimates]),
        ("parameters", [f"{e.parameters:,}" for e in estimates]),
        ("weights, each", [_size(e.weights) for e in estimates]),
        ("optimizer and rest, each", [_size(e.optimizer) for e in estimates]),
        ("temporary, each", [_size(e.activations) for e in estimates]),
        ("peak, each", [_size(e.peak) for e in estimates]),
        ("memory of the chip", [_size(e.topology.chip.memory) for e in estimates]),
        (
            "fits",
            ["yes" if e.peak <= e.topology.chip.memory else "NO" for e in estimates],
        ),
        ("TFLOP a step, all", [f"{e.flops / 1e12:,.3g}" for e in estimates]),
        *(
            (f"sent by {kind}", [_size(e.sent[kind]) for e in estimates])
            for kind in COLLECTIVES
            if any(e.sent[kind] for e in estimates)
        ),
        *(
            (f"{name}, estimate", [_time(e.times[name]) for e in estimates])
            for name in ("arithmetic", "memory", "links")
        ),
        ("step at least, estimate", [_time(e.seconds) for e in estimates]),
        ("largest term", [max(e.times, key=e.times.__getitem__) for e in estimates]),
        ("examples/s at most", [f"{e.batch_size / e.seconds:,.0f}" for e in estimates]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    compiled = [e.topology.name for e in estimates if e.topology.chip.is_tpu]
    simulated = [e.topology.name for e in estimates if not e.topology.chip.is_tpu]
    if compiled:
        console.print(
            f"{', '.join(compiled)}: memory and bytes sent come from a program that "
            "the TPU compiler built."
        )
    if simulated:
        console.print(
            f"{', '.join(simulated)}: memory and bytes sent are estimates, from the "
            "same program compiled for as many CPU devices."
        )
    console.print(
        "Times are lower bounds at the chips' peak rates; a real step is slower."
    )


def _slice(name: str, chip: Chip, shape: str) -> Topology:
    """A TPU slice. A chip may have several devices, which share its limits."""
    from jax.experimental import topologies as described

    # Otherwise libtpu waits for a metadata server that exists only on Google Cloud.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        found = described.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # libtpu raises various errors, or is missing
        raise UserError(
            f"topology {name!r} cannot be described ({reason(error)}); it needs "
            "an existing shape of this chip, e.g. v5e:4x8, v6e:16x16, v4:2x2x4 or "
            "v5p:8x8x16"
        ) from None
    devices = list(found.devices)
    chips = math.prod(map(int, shape.split("x")))
    share = chips / len(devices)
    each = dataclasses.replace(
        chip,
        flops=share * chip.flops,
        memory=share * chip.memory,
        bandwidth=share * chip.bandwidth,
        link=share * chip.link,
    )
    return Topology(name, each, devices)


def _cpu_devices(count: int) -> list[jax.Device]:
    """CPU devices that stand for GPUs."""
    # Raises an error if JAX is initialized already.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"{count} devices cannot be simulated, because JAX started with "
            f"{len(devices)}; unset XLA_FLAGS, or start a new process"
        )
    return devices


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12 or int(text) < 1:
        raise UserError(
            f"{name[:40]}: {text[:40]!r} must be a whole number, at least 1 and below "
            "10^12"
        )
    return int(text)


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "1"


def _size(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    size, unit = rich.filesize.pick_unit_and_suffix(int(count), units, 1024)
    number = count / size
    return f"{number:,.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"
