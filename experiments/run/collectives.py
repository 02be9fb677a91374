"""What the processes of a run tell and send each other. All of them call these."""

import functools
import itertools
import json
import pathlib
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from .. import io
from .mesh import replicated

_DAY = 86_400_000  # milliseconds
_PIECE = 2**26  # bytes that are sent at once, which a device must have room for
_meetings = itertools.count()


def store() -> Any:
    """The key-value store of JAX's coordination service, which process 0 runs."""
    from jax._src import distributed  # JAX has no public name for it

    return distributed.global_state.client


def meet() -> None:
    """Wait for all processes, e.g. for process 0, which writes a file.

    Collectives would fail after 30 seconds on CPUs. If a process is gone, `joined` ends
    the others.
    """
    if jax.process_count() > 1:
        store().wait_at_barrier(f"mupax/meeting/{next(_meetings)}", _DAY)


def broadcast(value: Any) -> Any:
    """The value of process 0, which is JSON-ready. The others' values are not used."""
    if jax.process_count() == 1:
        return value
    meet()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    return json.loads(sent(np.resize(text, size)).tobytes())


def processes_without(folder: pathlib.Path) -> list[int]:
    """The processes that do not see a file that process 0 writes in a directory.

    A directory of the same name on another disk, e.g. of an earlier run, is detected.
    """
    if jax.process_count() == 1:
        return []
    sign = folder / f".shared.{broadcast(secrets.token_hex(6))}"
    first = jax.process_index() == 0
    try:
        if first:
            sign.touch()
        meet()
        seen = multihost_utils.process_allgather(np.bool_(io.appears(sign)))
        return np.flatnonzero(~np.asarray(seen)).tolist()
    finally:
        if first:
            sign.unlink(missing_ok=True)


def is_key(leaf: Any) -> bool:
    """Whether an array, abstract or not, holds random keys."""
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def as_key(words: jax.Array, like: Any) -> jax.Array:
    """The random keys of which these are the words."""
    impl = jax.random.key_impl(jnp.empty((), like.dtype))
    return jax.random.wrap_key_data(words, impl=impl)


def sent(array: np.ndarray) -> np.ndarray:
    """The array of process 0. The others give one of the same shape and dtype."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        # As bytes: sending adds zeros, and -0.0 + 0.0 is 0.0.
        out[piece] = multihost_utils.broadcast_one_to_all(flat[piece])
    return out.view(array.dtype).reshape(array.shape)


def scattered(values: Any, like: Any) -> Any:
    """Copy NumPy arrays of process 0 to the mesh, one at a time.

    Args:
      values: the arrays; for random keys, their words. Those of the other processes are
        not used.
      like: arrays or `jax.ShapeDtypeStruct`s with shardings.
    """

    def place(value: np.ndarray, leaf: Any) -> jax.Array:
        key = is_key(leaf)
        sharding = replicated(leaf.sharding.mesh) if key else leaf.sharding
        value = sent(value)
        array = jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index]
        )
        return as_key(array, leaf) if key else array

    meet()
    return jax.tree.map(place, values, like)


def gathered(tree: Any) -> Any:
    """Copy arrays to the main memory of process 0, one at a time; None in the others.

    A device needs room for the largest array. Random keys stay on the devices, and so
    do all arrays of a single process.
    """
    if jax.process_count() == 1:
        return tree

    def fetch(leaf: Any) -> Any:
        if is_key(leaf):
            return leaf.addressable_data(0)
        part = _replicate(leaf.sharding.mesh)(leaf).addressable_data(0)
        if jax.process_index() > 0:
            part.block_until_ready()  # before the next needs room
            return None
        return jax.device_get(part).view(leaf.dtype)

    return jax.tree.map(fetch, tree)


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    def bits(leaf: jax.Array) -> jax.Array:
        """Of numbers, their bits: gathering may add zeros, too."""
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")

    return jax.jit(bits, out_shardings=replicated(mesh))
