"""Fingerprints of a training and of its data: equal only for the same computation."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .tasks import Point, Training

# A call into Python that returns values. The Python code is not in the program.
_CALLBACK = re.compile(r"custom_call @\w*callback\w*\(.*->.*tensor<")


def of_training(
    training: Training, names: Iterable[str], batch_size: int
) -> str | None:
    """The fingerprint of a run's computation, apart from data, steps and seed.

    The initialization and one step are lowered to StableHLO. The text holds the values
    of all constants, and no source locations: a changed class, global, closure or
    config value changes the fingerprint if it changes the computation. Of a foreign
    function (`jax.ffi.ffi_call`), only the name is compared.

    Returns:
      The fingerprint, or None where the program calls back into Python
      (`jax.pure_callback`).
    """

    def whole(key: jax.Array, hyper: Any, batch: Any) -> Any:
        # The step uses the structure of the model that `init` builds.
        point = Point(hyper)
        state, fixed = training.init(key, point)
        return training.step(state, fixed, batch, point, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    hyper = {name: jax.ShapeDtypeStruct((), np.float32) for name in names}
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype),
        jax.tree.map(jnp.asarray, training.feed([0])[2]),
    )
    lowered = jax.jit(whole).lower(key, hyper, batch)
    text = lowered.as_text()
    if _CALLBACK.search(text) or "__elided__" in text:
        return None
    # JAX can pass constants as hidden arguments, which the text does not show.
    hidden = getattr(lowered._lowering, "const_args", ())
    return hashlib.sha256(f"{text}{of_arrays(hidden)}".encode()).hexdigest()[:16]


def of_arrays(tree: Any) -> str:
    """The fingerprint of the values, types and shapes of a tree's arrays.

    Raises:
      UserError: an array was deleted, e.g. by a jitted function that it was donated to.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise UserError(
                "an array of data was deleted: it was donated to a jitted function; "
                "pass a copy"
            )
        if isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            digest.update(str(jax.random.key_impl(leaf)).encode())
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{np.shape(leaf)}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]
