"""Successive halving: what stops, what goes on, and that it is the same training."""

import csv
import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import sweep_toys
from hypothesis import given
from hypothesis import strategies as st

from mupax.experiments import cli
from mupax.experiments.errors import UserError
from mupax.experiments.sweep import engine, executors, halving, optima
from mupax.experiments.sweep.results import Population, table
from mupax.experiments.sweep.store import Store

# A grid whose best points lie in its middle, with one that diverges at its end.
RATES = (*(2.0**x for x in range(-9, 2)), 2.0**100)
JOB = sweep_toys.Line(rates=RATES)
HALVED = engine.Limits(halving=2, lanes=6)


@pytest.fixture(scope="module")
def data():
    return sweep_toys.points()


@pytest.fixture(scope="module")
def halved(data):
    return engine.run(JOB, data, None, HALVED)


@pytest.fixture(scope="module")
def whole(data):
    return engine.run(JOB, data)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_so_few_steps_that_there_is_nothing_to_halve(data, steps):
    short = dataclasses.replace(JOB, steps=steps, average_last=1)
    found = engine.run(short, data, None, HALVED)
    ended = found.stopped == 0
    np.testing.assert_array_equal(
        found.loss[ended],
        engine.run(short, data).loss[ended],
    )


def test_a_run_that_was_never_stopped_is_bit_for_bit_what_it_was(halved, whole):
    ended = halved.stopped == 0
    assert 2 * 4 <= ended.sum() <= 2 * 6
    np.testing.assert_array_equal(halved.loss[ended], whole.loss[ended])
    np.testing.assert_array_equal(halved.curves[ended], whole.curves[ended])


def test_a_stopped_run_keeps_its_curve_up_to_there_and_has_no_loss(halved, whole):
    stopped = halved.stopped
    assert {0, 10, 20} == set(stopped.ravel().tolist())
    for index in np.argwhere(stopped):
        at = tuple(int(i) for i in index)
        end = stopped[at]
        assert np.isnan(halved.loss[at])
        np.testing.assert_array_equal(halved.curves[at][:end], whole.curves[at][:end])
        assert np.isnan(halved.curves[at][end:]).all()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_in_chunks_of_its_own_size_it_is_the_same(data, halved, monkeypatch, backend):
    """A CPU takes all points at once; the way of accelerators is tried on it too."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = engine.run(JOB, data, None, engine.Limits(halving=2))
    np.testing.assert_array_equal(found.stopped, halved.stopped)
    np.testing.assert_allclose(found.loss, halved.loss, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_diverged_runs_are_given_up_either_way(data, monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    calm = engine.run(JOB, data)
    stopped = engine.run(JOB, data, None, engine.Limits(stop_diverged=True))
    np.testing.assert_allclose(stopped.loss, calm.loss, rtol=1e-4)
    assert np.isnan(stopped.loss[:, -1]).all()


def test_a_stopped_run_is_not_a_diverged_one(halved):
    cell = halved.cell()
    assert cell.diverged[:, -1].all()  # at 2^100
    assert not cell.diverged[:, :-1].any()
    rows = {(r["learning_rate"], r["seed"]): r for r in halved.rows()}
    assert rows[2.0**100, 0]["stopped_after"] is None
    assert rows[2.0**-9, 0]["stopped_after"] == 10
    assert rows[2.0**-9, 0]["loss"] is None
    assert ",10\n" in table([halved])
    again = Population.from_json(halved.to_json())
    np.testing.assert_array_equal(again.stopped, halved.stopped)


def test_the_fitted_optimum_is_that_of_all_runs(halved, whole):
    assert optima.optimum(halved.cell()) == optima.optimum(whole.cell())


def steps_done(monkeypatch):
    """Counts steps of runs, those of filled lanes too."""
    done = []
    call = engine.Chunks.__call__

    def counted(self, points, first, last, *rest, **options):
        done.append((len(points), first, last))
        return call(self, points, first, last, *rest, **options)

    monkeypatch.setattr(engine.Chunks, "__call__", counted)
    return done


def test_it_costs_half_the_steps_and_none_is_done_twice(data, monkeypatch):
    done = steps_done(monkeypatch)
    engine.run(JOB, data, None, HALVED)
    spent = sum(count * (last - first) for count, first, last in done)
    # 12 points for a quarter, 6 for a quarter, 3 for a half, and what the fits need.
    assert 12 * 10 + 6 * 10 + 3 * 20 <= spent <= 12 * 10 + 6 * 10 + 5 * 20
    assert {first for _, first, _ in done} == {0, 10, 20}


def test_states_that_do_not_fit_are_trained_anew(data, halved, monkeypatch):
    monkeypatch.setattr(engine.memory, "host", lambda: 0.0)
    monkeypatch.setattr(engine.memory, "available", lambda: 2.0**40)
    done = steps_done(monkeypatch)
    found = engine.run(JOB, data, None, HALVED)
    assert {first for _, first, _ in done} == {0}
    np.testing.assert_array_equal(found.loss, halved.loss)
    np.testing.assert_array_equal(found.stopped, halved.stopped)


class Killed(Exception):
    """In place of SIGKILL."""


@pytest.mark.parametrize("chunks", [1, 4, 6, 7])
def test_a_killed_one_goes_on_to_the_same_result(
    data, halved, tmp_path, monkeypatch, chunks
):
    store, left = Store(tmp_path), [chunks]
    add = Store.add

    def mortal(*arguments):
        add(*arguments)
        left[0] -= 1
        if not left[0]:
            raise Killed

    monkeypatch.setattr(Store, "add", mortal)
    with pytest.raises(Killed):
        engine.run(JOB, data, store, HALVED)
    done = steps_done(monkeypatch)
    found = engine.run(JOB, data, store, HALVED)
    np.testing.assert_array_equal(found.loss, halved.loss)
    np.testing.assert_array_equal(found.stopped, halved.stopped)
    first_rung = [count for count, _, last in done if last == 10]
    assert sum(first_rung) == max(0, 12 - 3 * chunks)


def test_halved_and_whole_sweeps_share_only_what_came_to_its_end(
    data, halved, tmp_path, monkeypatch
):
    def run(limits):
        return executors.run_all([JOB], data, tmp_path, limits, None)[0]

    assert run(HALVED).stopped.any()
    done = steps_done(monkeypatch)
    whole = run(engine.Limits(lanes=6))
    assert whole.stopped is None
    assert np.isfinite(whole.loss[:, :-1]).all()
    ended = ~(halved.stopped > 0).any(axis=0) & ~np.isnan(halved.loss).any(axis=0)
    assert sum(count for count, *_ in done) == len(RATES) - ended.sum()
    done.clear()
    again = run(HALVED)
    assert not done  # whole runs are known at every rung
    assert again.stopped is not None
    assert not again.stopped.any()


def test_all_lose_to_one_that_diverges_late_and_the_next_best_goes_on():
    over = np.array([False, True, False, False])
    loss = np.full((2, 4), np.nan)
    places = halving.ranks(loss, over, np.array([1, 4, 2, 1.0]), np.arange(4.0))
    assert halving.wanted(loss, over, places, (4,)).tolist() == [0, 0, 1, 0]


@given(
    seeds=st.integers(1, 3),
    sizes=st.sampled_from([(7,), (12,), (4, 5), (3, 3, 3)]),
    factor=st.integers(2, 4),
    start=st.integers(0, 1000),
)
def test_the_best_of_what_ended_has_ended_neighbours(seeds, sizes, factor, start):
    """On any losses: noise at the rungs and at the end, some of them diverging."""
    rng = np.random.default_rng(start)
    count = int(np.prod(sizes))
    final = np.where(rng.random((seeds, count)) < 0.1, np.nan, rng.random(count) + 0.1)
    final = final * (1 + 0.1 * rng.random((seeds, count)))
    going, scores, reached = (
        np.ones(count, bool),
        np.full(count, np.inf),
        np.ones(count),
    )
    for rung in (1, 2):
        scores[going], reached[going] = rng.random(going.sum()), rung
        going = halving.survivors(scores, going, sizes, factor)
    over = np.zeros(count, bool)
    while going.any():
        over |= going
        loss = np.where(over, final, np.nan)
        places = halving.ranks(loss, over, reached, scores)
        going = halving.wanted(loss, over, places, sizes)
    axes = {f"a{i}": [2.0**k for k in range(size)] for i, size in enumerate(sizes)}
    shape = (seeds, *sizes)
    found = Population(
        "n", "p", 8, 2, {}, axes, loss.reshape(shape), np.zeros((*shape, 1)), 0.0
    )
    if np.isnan(loss.mean(axis=0)).all():
        return
    for name, size in zip(axes, sizes, strict=True):
        y = np.log(found.cell(name).loss).mean(axis=0)
        best = int(np.nanargmin(y))
        ended = over.reshape(sizes).any(
            axis=tuple(i for i, other in enumerate(axes) if other != name)
        )
        assert ended[max(best - 1, 0) : min(best + 2, size)].all()


@pytest.mark.parametrize("factor", [1, -2])
def test_a_factor_that_halves_nothing_is_refused_in_one_sentence(factor):
    with pytest.raises(UserError, match=r"halving=-?\d must be a whole number"):
        engine.Limits(halving=factor)


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        (("name", "resmlp"),),
        (("name", "vit"), ("patch_size", 2), ("heads", 2), ("dropout", 0.3)),
    ],
)
def test_a_model_of_the_zoo_goes_on_bit_for_bit(model):
    """Dropout's random stream is part of what goes on, as Adam's moments are."""
    rates = tuple(range(-14, -2))
    job = sweep_toys.job(model=model, log2_lr=rates, depth=2, steps=16, average_last=4)
    part = engine.run(job, sweep_toys.stripes(), None, HALVED)
    full = engine.run(job, sweep_toys.stripes(), None, engine.Limits(lanes=6))
    ended = part.stopped == 0
    assert 2 * 3 <= ended.sum() <= 2 * 6
    np.testing.assert_array_equal(part.loss[ended], full.loss[ended])


@pytest.mark.long
def test_the_command_halves_and_the_table_tells_what_was_stopped(tmp_path, capsys):
    config = pathlib.Path(__file__).with_name("toy_config.py")
    run = tmp_path / "run"
    args = [
        "mupax",
        "sweep",
        f"--config={config}",
        f"--workdir={run}",
        f"--config.data_dir={tmp_path}",
        "--config.sweep.axes.learning_rate=2**[-12:-5]",
        "--config.sweep.parametrizations={'depth_mup': {'name': 'depth_mup'}}",
    ]
    assert cli.main([*args, "--halving=1"]) == 2
    assert "halving=1 must be a whole number" in capsys.readouterr().err
    assert not run.exists()
    assert cli.main([*args, "--halving=2"]) == 0
    with (run / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    stopped = {row["stopped_after"] for row in rows}
    # Of 30 steps a curve has 30 points: rungs are after 7 and 15.
    assert stopped == {"", "7", "15"}
    assert all(bool(row["loss"]) != bool(row["stopped_after"]) for row in rows)
