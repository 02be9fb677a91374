"""`mupax search`: candidates are lanes, the search resumes, the best one transfers."""

import math

import pytest
import sweep_toys

from mupax.experiments import data as datasets
from mupax.experiments.errors import UserError
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.sweep import search, space
from mupax.experiments.sweep.store import Store

cma = pytest.importorskip("cma")


def config(**axes):
    c = defaults("sweep")
    c.model = {"name": "mlp", "width": 4, "depth": 2}
    c.modules = {"last": {"pattern": "readout"}}
    c.steps, c.batch_size, c.learning_rate = 8, 8, 0.01
    c.sweep.axes.learning_rate = (0.005, 0.02, 0.5)
    c.sweep.axes["last/learning_rate"] = (0.25, 8.0)
    for name, values in axes.items():
        c.sweep.axes[name] = values
    c.sweep.seeds = 1
    c.sweep.average_last = 2
    return c


def task_of(c):
    (task,) = space.tasks(space.parse_sweep(c))
    return task


def images():
    return datasets.from_memory(sweep_toys.stripes())


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    task = task_of(config())
    options = {"candidates": 4, "seed": 3}
    one = search.search(task, images(), rounds=3, store=Store(folder), **options)
    runs = len(Store(folder).runs(task.name, task.key))
    again = search.search(task, images(), rounds=3, store=Store(folder), **options)
    after = len(Store(folder).runs(task.name, task.key))
    return one, again, (runs, after)


def test_a_search_improves_on_its_start_and_stays_in_the_box(searched):
    one, *_ = searched
    assert len(one.candidates) == 12
    assert one.candidates[0].point == pytest.approx((0.01, 1.0))
    assert one.best.loss < one.candidates[0].loss
    assert all(math.isfinite(x) for x in one.fresh)
    for candidate in one.candidates:
        rate, factor = candidate.point
        assert 0.005 * 0.999 <= rate <= 0.5 * 1.001
        assert 0.25 * 0.999 <= factor <= 8.0 * 1.001


def test_the_same_search_trains_nothing_twice(searched):
    one, again, (runs, after) = searched
    assert again.candidates == one.candidates
    assert runs == after


def test_a_candidate_is_the_run_that_has_its_values(searched):
    one, *_ = searched
    from mupax.experiments.sweep import engine

    task = task_of(config())
    axes = {n: (x,) for n, x in zip(one.names, one.best.point, strict=True)}
    import dataclasses

    alone = engine.run(dataclasses.replace(task, grid=axes), images())
    assert float(alone.loss.ravel()[0]) == pytest.approx(one.best.loss, rel=1e-4)


def test_the_summary_transfers(searched, tmp_path):
    from mupax.experiments import io

    one, *_ = searched
    c = config()
    io.write_sealed(tmp_path / "s.json", search.summarize(space.parse_sweep(c), one))
    plain = {k: v for k, v in c.to_dict().items() if k != "sweep"}
    run = parse(plain | {"modules": {}, "transfer_from": str(tmp_path / "s.json")})
    assert run.learning_rate == one.values["learning_rate"]
    assert run.modules["last"]["learning_rate"] == one.values["last/learning_rate"]
    assert search.table(one).count("\n") == 13


def test_an_axis_of_one_value_is_an_error():
    task = task_of(config(weight_decay=(0.1,)))
    with pytest.raises(UserError, match="one value of weight_decay"):
        search.search(task, images())


def test_a_single_axis_is_an_error_before_anything_is_written(tmp_path):
    c = config()
    del c.sweep.axes["last/learning_rate"]
    with pytest.raises(UserError, match=r"learning_rate only.*`mupax sweep` finds"):
        search.run(c, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_wrong_flags_are_errors(tmp_path):
    for options, words in (
        ({"candidates": 2}, "--candidates=2 must be at least 4"),
        ({"rounds": 0}, "--rounds=0"),
        ({"radius": 0.0}, "--radius=0"),
    ):
        with pytest.raises(UserError, match=words):
            search.run(config(), str(tmp_path), **options)
