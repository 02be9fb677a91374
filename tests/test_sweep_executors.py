"""Jobs on other processes, several writers to one store, and what memory allows."""

import concurrent.futures
import dataclasses
import errno
import json
import multiprocessing
import pathlib
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
import sweep_toys
import toy_config

from mupax.experiments import cli, io, memory
from mupax.experiments.errors import UserError
from mupax.experiments.sweep import command, engine, executors
from mupax.experiments.sweep.description import writing
from mupax.experiments.sweep.store import Record, Store

TASKS = [sweep_toys.task(depth=depth) for depth in (2, 4, 8)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What this process finds by itself."""
    folder = tmp_path_factory.mktemp("here")
    return executors.run_all(TASKS, sweep_toys.stripes(), folder, engine.Limits(), None)


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.name == b.name
        np.testing.assert_array_equal(a.loss, b.loss)
        np.testing.assert_array_equal(a.curves, b.curves)


def on(name, folder, tasks=TASKS, limits=None):
    limits = limits or engine.Limits(0.2)
    with executors.opened(name, 2, folder) as pool:
        return executors.run_all(
            tasks, sweep_toys.stripes(), folder / "runs", limits, pool
        )


@pytest.mark.long
def test_two_processes_find_what_one_finds(tmp_path, here):
    same(on("local", tmp_path), here)


@pytest.mark.long
def test_dask_finds_the_same(tmp_path, here):
    pytest.importorskip("distributed")
    same(on("dask", tmp_path), here)


@pytest.mark.long
def test_submitit_finds_the_same(tmp_path, here, monkeypatch):
    submitit = pytest.importorskip("submitit")
    auto = submitit.AutoExecutor
    monkeypatch.setattr(
        submitit, "AutoExecutor", lambda folder, cluster: auto(folder, cluster="local")
    )
    same(on("slurm", tmp_path), here)
    assert len(list((tmp_path / "slurm").glob("*_result.pkl"))) == len(TASKS)


class OnAnotherDisk(concurrent.futures.ThreadPoolExecutor):
    """Its workers see another directory under the name of the caller's."""

    def __init__(self, disk):
        super().__init__(1)
        self.disk = disk

    def submit(self, run, task, data, sign, known, limits):
        here = self.disk / pathlib.Path(sign).name
        return super().submit(run, task, data, str(here), known, limits)


def test_a_sign_is_found_again(tmp_path):
    """By a job that starts late, or by the next sweep of the folder."""
    sign = executors._sign(tmp_path)
    assert executors._sign(tmp_path) == sign


def test_workers_on_another_disk_send_their_runs(tmp_path, monkeypatch):
    """And know those that the caller has, so that no run is trained twice."""
    monkeypatch.setattr(executors, "_SOON", 0.1)
    data, folder, other = sweep_toys.stripes(), tmp_path / "runs", tmp_path / "other"
    other.mkdir()
    task = TASKS[0]
    wanted = engine.run(task, data, None, engine.Limits())
    file = folder / f"{task.name}.runs.jsonl"
    for lost in (0, 2, 0):
        if file.exists():
            lines = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join(lines[: len(lines) - lost]))
        (population,) = executors.run_all(
            [task], data, folder, engine.Limits(), OnAnotherDisk(other)
        )
        rates = task.grid["learning_rate"]
        assert runs_stored(tmp_path, task) == [(s, x) for s in (0, 1) for x in rates]
        assert list(other.iterdir()) == []
    same([population], [wanted])


def test_a_task_that_fails_costs_no_runs_of_the_others(tmp_path):
    """The runs of a worker on another disk come when its task ends."""
    futures = {task.name: concurrent.futures.Future() for task in TASKS}
    bad, running, waiting = (futures[task.name] for task in TASKS)
    running.set_running_or_notify_cancel()
    bad.set_exception(ValueError("out of memory"))
    end = threading.Timer(0.2, running.set_result, [(None, b"a run\n")])

    class Pool(concurrent.futures.Executor):
        def submit(self, run, task, *args):
            return futures[task.name]

    end.start()
    with pytest.raises(ValueError, match="out of memory"):
        executors.run_all(TASKS, None, tmp_path, engine.Limits(), Pool())
    (file,) = tmp_path.glob("*.runs.jsonl")
    assert file.name.startswith(TASKS[1].name)
    assert file.read_bytes().strip() == b"a run"
    assert waiting.cancelled()


def test_tasks_that_fail_and_are_cancelled_at_once_are_told_apart(tmp_path):
    """As when Dask's scheduler is lost."""
    futures = {task.name: concurrent.futures.Future() for task in TASKS}
    bad, *others = (futures[task.name] for task in TASKS)
    bad.set_exception(ValueError("out of memory"))
    for other in others:
        other.cancel()
        other.set_running_or_notify_cancel()

    class Pool(concurrent.futures.Executor):
        def submit(self, run, task, *args):
            return futures[task.name]

    with pytest.raises((ValueError, concurrent.futures.CancelledError)):
        executors.run_all(TASKS, None, tmp_path, engine.Limits(), Pool())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"executor": "dask", "scheduler": "tpc://host:1"}, "--scheduler=tpc://host:1"),
        ({"executor": "slurm"}, "srun"),
        ({"scheduler": "tcp://host:1"}, "add --executor=dask"),
    ],
)
def test_an_executor_that_cannot_be_used_leaves_no_run(tmp_path, flags, said):
    """And no stored settings, which another config would contradict."""
    pytest.importorskip("distributed")
    pytest.importorskip("submitit")
    with pytest.raises(UserError, match=said):
        command.run(toy_config.get_config(), tmp_path / "run", [], **flags)
    assert not (tmp_path / "run").exists()


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
    pytest.importorskip("distributed")
    point_by_point = engine.Limits(0.2, lanes=2)
    wanted = [
        engine.run(task, sweep_toys.stripes(), None, point_by_point) for task in TASKS
    ]
    tasks = [TASKS[0], deadly(TASKS[1], tmp_path), TASKS[2]]
    same(on("dask", tmp_path, tasks, point_by_point), wanted)
    assert (tmp_path / "died").exists()
    for task in tasks:
        rates = task.grid["learning_rate"]
        assert runs_stored(tmp_path, task) == [(s, x) for s in (0, 1) for x in rates]


@pytest.mark.long
def test_a_local_worker_that_is_killed_is_said_and_the_next_call_goes_on(tmp_path):
    point_by_point = engine.Limits(0.2, lanes=2)
    task = deadly(TASKS[1], tmp_path)
    with pytest.raises(UserError, match=r"a worker died \(.*resumes from"):
        on("local", tmp_path, [task], point_by_point)
    assert len(runs_stored(tmp_path, task)) == 2
    wanted = engine.run(TASKS[1], sweep_toys.stripes(), None, point_by_point)
    same(on("local", tmp_path, [task], point_by_point), [wanted])
    assert len(runs_stored(tmp_path, task)) == 6


def test_a_missing_package_is_said_in_one_sentence(tmp_path, monkeypatch):
    for name, module in (("dask", "distributed"), ("slurm", "submitit")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with (
            pytest.raises(UserError, match=f"pip install '..{name}.'"),
            executors.opened(name, 1, tmp_path),
        ):
            pass


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


def test_a_worker_sends_all_its_runs_while_others_write(tmp_path):
    """Half a line, which another process is writing, is not sent to the worker."""
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    runs = [{(seed, (0.5,)): Record([0.1, 0.2])} for seed in range(3)]
    here.add("task", "key", runs[0])
    with (tmp_path / "here" / "task.runs.jsonl").open("a") as file:
        file.write('{"key": "key", "seed": 3, "at": [0.')
    known = here.content("task")
    there.append("task", known)
    there.add("task", "key", runs[1])
    there.add("task", "key", runs[2])
    here.append("task", there.content("task")[len(known) :])
    assert here.runs("task", "key") == runs[0] | runs[1] | runs[2]
    assert here.runs("task", "another key") == {}


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


ORPHAN = """
import os, pathlib, sys, time
from mupax.experiments.sweep import executors
if __name__ == "__main__":
    with executors.opened("local", 1, pathlib.Path(".")) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX's signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_opened_them(number, tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    child = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    worker = psutil.Process(int(child.stdout.readline()))
    child.send_signal(number)
    assert child.wait() == -number
    child.stdout.close()
    assert psutil.wait_procs([worker], timeout=30)[1] == []
    with child.stderr:
        assert b"leaked" not in child.stderr.read()


SLOW = """
import sys, time
from mupax.experiments import cli
from mupax.experiments.cli.command import COMMANDS
COMMANDS["sweep"] = lambda argv: print("begun", flush=True) or time.sleep(600)
cli.main(["mupax", "sweep"])
"""


def test_sigterm_ends_a_sweep_with_a_sentence_that_says_how_to_resume():
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate()
    assert child.returncode == 143
    assert said.splitlines()[-1] == (
        "mupax: stopped by SIGTERM; finished runs are kept, and the same command "
        "resumes from them"
    )


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
