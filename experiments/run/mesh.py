"""The mesh of a run, and the sharding of its state."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mupax import zoo
from mupax.optim.scales.paths import map_with_paths
from mupax.zoo.sharding import MESH_AXES, Rules

from ..errors import UserError


def make_mesh(
    sizes: Mapping[str, int] | None = None, devices: list[Any] | None = None
) -> Mesh:
    """A mesh of devices.

    Args:
      sizes: number of devices along "data", "fsdp" and "tensor". Missing axes have size
        1; -1 stands for the remaining devices. By default all devices along "data".
      devices: by default `jax.devices()`.

    Raises:
      UserError: unknown axes, or sizes whose product is not the number of devices.

    Examples:
      >>> dict(make_mesh({"data": -1, "tensor": 1}).shape)
      {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else devices
    requested = {"data": -1} if sizes is None else dict(sizes)
    for axis, size in requested.items():
        if axis not in MESH_AXES:
            raise UserError(
                f"mesh.{axis} is not known; the axes are {', '.join(MESH_AXES)}"
            )
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not is_int or (size < 1 and size != -1):
            raise UserError(
                f"mesh.{axis}={size!r} must be a number of devices, or -1 for the "
                "remaining devices"
            )
    shape = [requested.get(axis, 1) for axis in MESH_AXES]
    known = math.prod(size for size in shape if size > 0)
    if shape.count(-1) > 1:
        raise UserError("only one axis of the mesh can be -1 (the remaining devices)")
    remains, over = divmod(len(devices), known)
    if over or (-1 not in shape and remains != 1):
        text = ", ".join(f"{axis}={size}" for axis, size in requested.items())
        raise UserError(
            f"a mesh of {text} does not fit {len(devices)} devices: the product "
            "of the sizes must be their number; -1 stands for the remaining devices"
        )
    shape = [remains if size == -1 else size for size in shape]
    kinds = (AxisType.Auto,) * len(shape)
    if devices[0] in jax.devices() and len(devices) == jax.device_count():
        # make_mesh puts neighbours of the mesh on devices that are close together.
        return jax.make_mesh(shape, MESH_AXES, axis_types=kinds)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=kinds)


def check_batch(batch_size: int, mesh: Mesh, accumulate: int = 1) -> None:
    """Raise UserError if the mesh cannot divide a batch."""
    devices = mesh.shape["data"] * mesh.shape.get("fsdp", 1)
    parts = devices * accumulate
    if batch_size % parts:
        above = math.ceil(batch_size / parts) * parts
        over = f" in {accumulate} parts (accumulate)" if accumulate > 1 else ""
        raise UserError(
            f"batch_size {batch_size} does not divide over {devices} devices{over}; "
            f"use a multiple of {parts}, such as {above}."
        )


def batch_share(batch_size: int, mesh: Mesh) -> tuple[int, int]:
    """The part of a batch that this process reads: (index, count), as contiguous rows.

    Processes that hold different parts of the weights for the same examples read the
    same rows.

    Raises:
      UserError: the rows of this process are not contiguous on this mesh.
    """
    indices = zoo.batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    rows = {
        row
        for part in indices.values()
        if part is not None
        for row in range(*part[0].indices(batch_size))
    }
    first, number = min(rows), len(rows)
    if max(rows) - first + 1 != number or first % number or batch_size % number:
        raise UserError(
            "on this mesh the rows of a process are not contiguous in the batch; "
            "choose mesh.fsdp and mesh.tensor so that their product divides, or is a "
            "multiple of, the number of devices per process"
        )
    return first // number, batch_size // number


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(
    state: Any,
    model: nnx.Module,
    mesh: Mesh,
    rules: Rules | None = None,
) -> Any:
    """The sharding of each array of a training state, abstract or not.

    An array whose path ends with a parameter's path, and which has the parameter's
    shape, e.g. a moment of Adam, is sharded like the parameter. Other arrays are
    replicated. `rules` are changes to `zoo.RULES`.

    Raises:
      UserError: this mesh cannot shard the model.
    """
    try:
        specs = zoo.partition_specs(model, mesh, rules)
    except ValueError as error:
        raise UserError(str(error)) from None
    shapes = {
        "/".join(map(str, path)): tuple(variable.shape)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }

    def place(path: str, leaf: Any) -> NamedSharding:
        parts = path.split("/")
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            if name in specs and shapes[name] == tuple(leaf.shape):
                return NamedSharding(mesh, specs[name])
        return replicated(mesh)

    return map_with_paths(place, state)


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes of arrays, abstract or not, on each device."""
    leaves, places = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, places, strict=True)
    )


def put(tree: Any, shardings: Any) -> Any:
    """Copies arrays to their shardings. The copy may be donated."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings, may_alias=False)
    # device_put cannot reach the devices of other processes; a program can.
    copy = jax.jit(lambda t: jax.tree.map(jax.numpy.copy, t), out_shardings=shardings)
    return copy(tree)
