"""SIGTERM in runs of several processes: all stop after the same step."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils

from mupax.experiments.run import stopping
from mupax.experiments.run.checkpoints import open_checkpoints


def test_checkpoints_do_not_ask_whether_to_stop(tmp_path, monkeypatch):
    """A thread of Orbax asked in process 0, about a step that had passed.

    JAX then took process 0 to be at that step. The others stopped at a step that it had
    passed: they waited in their last checkpoint, and it waited in its next step.
    """
    asked: list[int] = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with open_checkpoints(tmp_path) as files:
        files.save(7, {"w": jnp.ones(2)}, {})
        files.wait()
        assert files.latest() == 7
    assert asked == []


@pytest.mark.parametrize("steps", [(1, 2), (301, 302)])
def test_sigterm_before_the_first_step_stops_after_it(monkeypatch, steps):
    """Also that of a resumed run, whose steps have larger numbers."""
    after_none = 1  # JAX stops at the number after the largest that it was given

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(stopping, "_calls", itertools.count(1))
    monkeypatch.setattr(
        multihost_utils,
        "reached_preemption_sync_point",
        lambda number: number == after_none,
    )
    with stopping.stop_requests() as stop_now:
        assert [stop_now(step) for step in steps] == [True, False]
