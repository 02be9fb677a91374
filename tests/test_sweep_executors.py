"""Jobs on other processes, several writers to one store, and what memory allows."""

import concurrent.futures
import dataclasses
import errno
import json
import multiprocessing
import pathlib
import re
import threading
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import sweep_toys

from mupax.experiments import cli, io, memory
from mupax.experiments.errors import UserError
from mupax.experiments.sweep import engine, training
from mupax.experiments.sweep.store import Record, Store
from mupax.experiments.sweep.training import writing

TASKS = [sweep_toys.task(depth=depth) for depth in (2, 4, 8)]


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.name == b.name
        np.testing.assert_array_equal(a.loss, b.loss)
        np.testing.assert_array_equal(a.curves, b.curves)


class Pool(concurrent.futures.Executor):
    """Tasks end as the test says."""

    def __init__(self, futures):
        self.futures = dict(zip((task.name for task in TASKS), futures, strict=True))

    def submit(self, run, task, *args):
        return self.futures[task.name]


def swept(folder, futures):
    training.run_all(TASKS, None, folder, engine.Limits(), Pool(futures))


def test_running_tasks_end_before_the_error_of_another_is_raised(tmp_path):
    bad, running, waiting = (concurrent.futures.Future() for _ in TASKS)
    running.set_running_or_notify_cancel()
    bad.set_exception(ValueError("out of memory"))
    threading.Timer(0.2, running.set_result, [None]).start()
    with pytest.raises(ValueError, match="out of memory"):
        swept(tmp_path, (bad, running, waiting))
    assert running.done()
    assert waiting.cancelled()


def test_a_worker_that_died_is_named_with_the_way_to_resume(tmp_path):
    futures = [concurrent.futures.Future() for _ in TASKS]
    for future in futures:  # a broken pool fails all of its tasks
        future.set_exception(BrokenProcessPool("killed"))
    with pytest.raises(UserError, match=r"a worker died .*killed.* resumes from them"):
        swept(tmp_path, futures)


def test_processes_that_would_hang_are_refused_with_those_that_do_not(tmp_path):
    fork = multiprocessing.get_context("fork")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool,
        pytest.raises(UserError, match=r"hang; pass executor=.*\('spawn'\)"),
    ):
        training.run_all(TASKS, None, tmp_path / "runs", engine.Limits(), pool)
    assert not (tmp_path / "runs").exists()


def test_a_worker_without_the_folder_of_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_SOON", 0.1)
    with pytest.raises(UserError, match="on a disk that all workers share"):
        training.run_task(TASKS[0], None, tmp_path / "elsewhere", engine.Limits())


def deadly(task, folder):
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    return sweep_toys.Deadly(**fields, mark=str(folder / "died"))


def runs_stored(folder, task):
    lines = (folder / "runs" / f"{task.name}.runs.jsonl").read_text().split("\n")
    found = [json.loads(line) for line in lines if line]
    return sorted((run["seed"], *run["at"]) for run in found)


@pytest.mark.long
def test_a_dask_worker_that_is_killed_costs_only_its_job(tmp_path):
    """By SIGKILL, when a third of the task is done; no run is done twice."""
    distributed = pytest.importorskip("distributed")
    point_by_point = engine.Limits(0.2, lanes=2)
    wanted = [
        engine.run(task, sweep_toys.stripes(), None, point_by_point) for task in TASKS
    ]
    tasks = [TASKS[0], deadly(TASKS[1], tmp_path), TASKS[2]]
    local = distributed.Client(n_workers=2, threads_per_worker=1)
    with local as client, client.get_executor() as pool:
        found = training.run_all(
            tasks, sweep_toys.stripes(), tmp_path / "runs", point_by_point, pool
        )
    same(found, wanted)
    assert (tmp_path / "died").exists()
    for task in tasks:
        rates = task.grid["learning_rate"]
        assert runs_stored(tmp_path, task) == [(s, x) for s in (0, 1) for x in rates]


def _write(folder, name, first):
    store = Store(folder)
    for i in range(200):
        run = {(first + i, (0.5,)): Record([0.1, *([0.25] * 40)])}
        store.add(name, "key", run)


@pytest.mark.long
def test_two_writers_do_not_corrupt_a_store(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        both = [pool.submit(_write, tmp_path, "task", first) for first in (0, 200)]
        for writer in both:
            writer.result()
    found = Store(tmp_path).runs("task", "key")
    assert {seed for seed, _ in found} == set(range(400))
    lines = (tmp_path / "task.runs.jsonl").read_text().split("\n")
    assert all(json.loads(line) for line in lines if line)


@pytest.fixture(scope="module")
def data():
    return sweep_toys.stripes()


@pytest.fixture(scope="module")
def whole(data):
    return engine.run(sweep_toys.task(), data)


def test_more_seeds_train_only_the_new_ones(tmp_path, data, monkeypatch):
    few, many = sweep_toys.task(seeds=1), sweep_toys.task(seeds=3)
    whole = engine.run(many, data)
    store = Store(tmp_path)
    engine.run(few, data, store)
    done = []
    add = Store.add
    monkeypatch.setattr(
        Store, "add", lambda self, *a: (done.extend(a[2]), add(self, *a))[1]
    )
    found = engine.run(many, data, store)
    assert {seed for seed, _ in done} == {1, 2}
    assert len(done) == 2 * len(many.grid["learning_rate"])
    np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-4)
    # And a chunk that holds fewer lanes than there are new seeds.
    alone = Store(tmp_path / "alone")
    engine.run(few, data, alone)
    found = engine.run(many, data, alone, engine.Limits(lanes=1))
    np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-4)


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_a_cpu_stores_runs_while_others_train(data, monkeypatch, seconds):
    """The first grid point alone; then as many as end in some seconds."""
    monkeypatch.setattr(engine, "_STORED", seconds)
    task, stored = sweep_toys.task(), []
    engine.prepare(task, data, on_runs=stored.append)(0.0)
    rates = len(task.grid["learning_rate"])
    chunks = [1] * rates if seconds == 0 else [1, rates - 1]
    assert stored == [0, *(task.seeds * points for points in chunks)]


def test_a_population_larger_than_memory_goes_in_chunks(data, whole, monkeypatch):
    # As on accelerators, where memory grows with the runs at once.
    monkeypatch.setattr(engine, "at_once", lambda: True)
    needed = []
    measure = memory.needed

    def counted(compiled):
        needed.append(measure(compiled))
        return needed[-1]

    monkeypatch.setattr(memory, "needed", counted)
    engine.run(sweep_toys.task(), data)
    # A point less than all of them.
    monkeypatch.setattr(memory, "available", lambda: 0.9 * needed[0])
    found = engine.run(sweep_toys.task(), data, None, engine.Limits(share=1.0))
    assert needed[-1] <= 0.9 * needed[0]
    np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-4)


def test_a_run_that_cannot_fit_is_refused_in_one_sentence(data, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000.0)
    with pytest.raises(UserError, match=r"does not fit into memory.*memory_share"):
        engine.run(sweep_toys.task(log2_lr=(-9.0,), seeds=1), data)


def test_a_full_disk_is_told_with_the_file_and_how_to_resume(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")  # names no file

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    said = (
        r"results.csv cannot be written: No space left on device; finished runs are "
        "kept, and the same command resumes"
    )
    with pytest.raises(UserError, match=said), writing(tmp_path):
        io.write_durably(tmp_path / "results.csv", "")


@pytest.mark.parametrize("command", ["sweep", "transfer"])
def test_a_dry_run_prints_the_cost_and_writes_nothing(command, tmp_path, capsys):
    words = ["--config=digits_resmlp", f"--workdir={tmp_path / 'run'}", "--dry_run"]
    words += ["--config.sweep.depths=(4,)", "--config.sweep.widths=(32,)"]
    words += ["--config.model.width=32", "--config.model.depth=4"]
    assert cli.main(["mupax", command, *words]) == 0
    told = capsys.readouterr().out
    # 9 learning rates, 4 seeds, 200 steps of 64 examples of 128 pixels and 19 sums. A
    # product of matrices takes 2 operations forward and 4 backward; 2 for the first.
    products = 4 * 32 * 32 + 32 * 19 + 128 * 32 * 2 / 3
    tera = 6 * products * 64 * 200 * 36 / 1e12
    assert re.search(rf"depth_mup-w32-d4 +36 +200 +{tera:.3g}", told)
    assert ("target-w256-d64" in told) is (command == "transfer")
    assert not list(tmp_path.iterdir())
