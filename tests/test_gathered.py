"""Checkpoints that process 0 writes for all: the files are those of a shared disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.experiments.run import checkpoints, collectives, commands
from mupax.experiments.run.checkpoints import open_checkpoints, read_weights
from mupax.experiments.run.mesh import make_mesh, replicated

ODD = np.array([-0.0, np.nan, np.inf, -1e-40, 3.0], np.float32)


@pytest.fixture
def state():
    """Numbers whose bits an addition would change, and random keys."""
    tree = {
        "weights": {"kernel": ODD, "short": ODD.astype(jnp.bfloat16)},
        "step": np.int32(3),
        "on": np.array([True, False]),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    }
    return jax.device_put(tree, replicated(make_mesh(devices=jax.devices()[:1])))


def bits(tree):
    words = jax.tree.map(checkpoints._words, tree)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(words)]


def on_host(tree):
    return jax.tree.map(lambda leaf: np.asarray(checkpoints._words(leaf)), tree)


@pytest.mark.parametrize("writer", [False, True])
@pytest.mark.parametrize("reader", [False, True])
def test_a_checkpoint_is_read_with_or_without_a_shared_disk(
    tmp_path, state, writer, reader
):
    """True: process 0 writes or reads for all."""
    written = {"params": state["weights"], "rest": {"keys": state["keys"]}, **state}
    with open_checkpoints(tmp_path / "c", alone=writer) as files:
        # Of several processes, what process 0 gathers is NumPy arrays.
        files.save(3, on_host(written) if writer else written, {"seen": 5})
    with open_checkpoints(tmp_path / "c", alone=reader) as files:
        restored = files.restore(like=written)
    assert (restored.step, restored.progress) == (3, {"seen": 5})
    assert bits(restored.state) == bits(written)
    assert restored.state["keys"].dtype == state["keys"].dtype
    like = written["params"], written["rest"]
    weights = read_weights(tmp_path / "c" / "3", *like, alone=reader)
    assert bits(weights) == bits(like)


def test_a_reader_leaves_a_checkpoint_that_is_being_written(tmp_path, state):
    """`mupax eval` removed it while the run was training."""
    with open_checkpoints(tmp_path / "checkpoints") as files:
        files.save(3, state, {})
    part = tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp" / "metrics" / "metrics"
    part.parent.mkdir(parents=True)
    part.write_text('{"sco')
    assert commands._find_checkpoint(tmp_path, "latest") == 3
    assert part.read_text() == '{"sco'


def test_all_processes_restore_the_checkpoint_that_process_0_sees(
    tmp_path, state, monkeypatch
):
    with open_checkpoints(tmp_path) as files:
        for step in (3, 6):
            files.save(step, state, {"seen": step})
        files.wait()
        monkeypatch.setattr(checkpoints, "broadcast", lambda step: 3)
        assert files.restore(like=state).progress == {"seen": 3}


def test_gathering_keeps_every_bit(state):
    del state["keys"]
    for leaf in jax.tree.leaves(state):
        part = collectives._replicate(leaf.sharding.mesh)(leaf)
        found = jax.device_get(part).view(leaf.dtype)
        assert found.tobytes() == np.asarray(leaf).tobytes()


def test_what_is_sent_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(collectives, "_PIECE", 3)
    for array in (ODD, ODD.astype(jnp.bfloat16), np.int32(3), np.zeros((0, 2))):
        array = np.asarray(array)
        found = collectives.sent(array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
