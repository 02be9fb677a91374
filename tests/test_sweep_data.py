"""A sweep on any data: text is next-token prediction, images may be made smaller."""

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from mupax import optim, zoo
from mupax.experiments import data as datasets
from mupax.experiments import transfer
from mupax.experiments.cli.flags import list_configs, parse
from mupax.experiments.config import check_sweep, points
from mupax.experiments.errors import UserError
from mupax.experiments.report.gather import featured
from mupax.experiments.run.objective import NextToken
from mupax.experiments.sweep import engine
from mupax.experiments.sweep import job as sweep

SONG = "".join(f"{k} green bottles, hanging on the wall;\n" for k in range(40))


@pytest.fixture(scope="module")
def song(tmp_path_factory):
    path = tmp_path_factory.mktemp("song") / "song.txt"
    path.write_text(SONG)
    return f"text:{path}"


def config(name: str) -> ConfigDict:
    return ConfigDict(
        {
            "dataset": name,
            "data_dir": None,
            "data": {"context": 8},
            "batch_size": 4,
            "model": {"name": "gpt", "head_dim": 4},
            "base": {"width": 8, "depth": 1},
            "optimizer": {"name": "adam"},
            "sweep": {
                "depths": (1, 2),
                "widths": (8, 16),
                "axes": {"learning_rate": "2**[-8:-4:2]"},
                "seeds": 1,
                "steps": 6,
                "average_last": 2,
                "parametrizations": {"depth_mup": {"name": "depth_mup"}},
            },
        }
    )


def test_a_text_is_held_window_by_window(song):
    held = datasets.hold(song, None, {"context": 8})
    text = np.frombuffer(SONG.encode(), np.uint8)
    np.testing.assert_array_equal(held.tokens[0], text[:9])
    np.testing.assert_array_equal(
        held.tokens[:, -1], text[8 : 9 * 8 * 40 : 8][: len(held.tokens)]
    )
    assert held.model_options == {"vocab_size": 256, "context": 8}


def test_a_lane_on_text_is_the_training_that_a_plain_loop_does(song):
    (job, *_) = sweep.plans.jobs(
        config(song), {"depth_mup": optim.parametrization("depth_mup")}
    )
    held = datasets.hold(song, None, {"context": 8})
    lane = engine.run(job, held).curves[0, 1]
    key = jax.random.split(jax.random.key(0), 1)[0]
    rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))
    model = job.build(held, rngs)
    tx = nnx.Optimizer(
        model, optim.adam(2.0**-6, zoo.scales(model), job.point), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, tx, tokens):
        value, grads = nnx.value_and_grad(
            lambda m: NextToken().loss(m, {"tokens": tokens}, key)
        )(model)
        tx.update(model, grads)
        return value

    orders = datasets.batch_indices(len(held.tokens), 4, 0, job.steps)
    losses = [float(step(model, tx, held.tokens[rows])) for rows in orders]
    np.testing.assert_allclose(lane, losses, rtol=2e-5)


def test_sweep_runs_on_text(song, tmp_path):
    found = sweep.run(config(song), str(tmp_path / "run"), ["mupax", "sweep"])
    assert [(p.width, p.depth) for p in found] == [(8, 1), (8, 2), (16, 1)]
    assert all(np.isfinite(p.loss).all() for p in found)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("digits", {"context": 8}, "context means nothing for digits"),
        ("fake:8:16", {"contxt": 8}, "contxt"),
    ],
)
def test_options_that_mean_nothing_are_refused(name, options, said):
    with pytest.raises(UserError, match=said):
        datasets.hold(name, None, options)


def test_images_are_held_at_the_size_that_is_asked_for():
    small = datasets.hold("digits", None, {"image_size": 4})
    full = datasets.hold("digits")
    assert small.train_images.shape == (len(full.train_labels), 4, 4, 1)
    np.testing.assert_array_equal(small.test_labels, full.test_labels)
    # Averages of pixels have about the mean that the pixels have.
    np.testing.assert_allclose(small.mean, full.mean, atol=0.5)


@pytest.mark.parametrize("name", [n for n in list_configs() if n.endswith("_sweep")])
def test_a_packaged_sweep_can_be_planned(name):
    config = parse(["sweep", f"--config={name}"]).config
    check_sweep(config)
    jobs = sweep.plans.jobs(config, points(config))
    assert len({job.name for job in jobs}) == len(jobs) >= 12


def test_a_sweep_needs_two_sizes_of_something(song):
    alone = config(song)
    alone.sweep.depths = (1,)
    check_sweep(alone)
    alone.sweep.widths = (8,)
    with pytest.raises(UserError, match="one of them needs at least two sizes"):
        check_sweep(alone)


def test_only_some_of_the_parametrizations_are_swept(song):
    some = config(song)
    some.sweep.parametrizations.sp = {"name": "sp"}
    assert list(points(some)) == ["depth_mup", "sp"]
    some.sweep.only = ("sp",)
    assert list(points(some)) == ["sp"]
    some.sweep.only = ("mup",)
    with pytest.raises(UserError, match="there are depth_mup, sp"):
        points(some)


def test_a_report_is_about_a_parametrization_that_was_swept(song):
    some = config(song)
    some.sweep.parametrizations.sp = {"name": "sp"}
    assert featured(some) == "depth_mup"
    some.sweep.only = ("sp",)
    assert featured(some) == "sp"
    some.target = {"parametrization": "sp"}
    some.sweep.only = ()
    assert featured(some) == "sp"


def test_transfer_takes_images_at_the_size_that_is_asked_for_and_no_text(song):
    asked = config("digits")
    asked.data = {"image_size": 4}
    assert transfer._images(asked).train_images.shape[1:] == (4, 4, 1)
    with pytest.raises(UserError, match="is text; use `mupax sweep`"):
        transfer._images(config(song))
