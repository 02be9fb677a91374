"""Strictness for every test: what JAX would let pass with a guess is an error here."""

import gc
import os
import tempfile

# Before jax is imported; a GPU or TPU run of the tests sets it itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from absl import flags

jax.config.update("jax_numpy_rank_promotion", "raise")

# Each worker has a core of its own. Otherwise libraries start a thread for each core,
# and the threads of one worker wait for those of another.
worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker is not None and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})

# A program that several tests of a worker, or the processes they start, have in common
# is compiled once. The folder is new, so no earlier session decides a test. Each worker
# has its own, because JAX does not write to this cache atomically.
if worker is None:
    programs = tempfile.TemporaryDirectory("-mupax", ignore_cleanup_errors=True)
    os.environ["MUPAX_TEST_PROGRAMS"] = programs.name
for option, value in (
    ("compilation_cache_dir", f"{os.environ['MUPAX_TEST_PROGRAMS']}/{worker}"),
    ("persistent_cache_min_compile_time_secs", 0.5),
):
    os.environ[f"JAX_{option.upper()}"] = str(value)
    jax.config.update(f"jax_{option}", value)

# The first example of a property compiles, which takes longer than the rest together.
# A run tries the same examples every time; --hypothesis-profile=explore tries new ones.
_profile = hypothesis.settings.register_profile
_profile("mupax", deadline=None, derandomize=True)
_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("mupax")

# Grain reads absl flags; pytest is no absl app, and parses none.
flags.FLAGS.mark_as_parsed()


def pytest_collection_finish():
    """Collect less garbage: tracing makes many small objects, and most stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture
def strict_dtypes():
    """No mixing of dtypes without a cast.

    Not for every test: Optax raises a float32 to an int32 power in Adam's bias
    correction, and strictness refuses that inside its code.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def optimized():
    """Compile a module's programs with the usual optimizations, as a user's run does.

    For claims about single bits: without them, the compiler rounds a product and a sum
    twice within one program, and once within another.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
