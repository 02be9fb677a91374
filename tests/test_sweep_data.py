"""A sweep on any data: text is next-token prediction, images may be made smaller."""

import dataclasses

import numpy as np
import pytest
from ml_collections import ConfigDict

from mupax.experiments import data as datasets
from mupax.experiments.cli.flags import list_configs, parse
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import model_shapes, open_dataset
from mupax.experiments.run.config import parse as parse_run
from mupax.experiments.run.config import plain
from mupax.experiments.sweep import command as sweep
from mupax.experiments.sweep import space, tasks

SONG = "".join(f"{k} green bottles, hanging on the wall;\n" for k in range(40))


@pytest.fixture(scope="module")
def song(tmp_path_factory):
    path = tmp_path_factory.mktemp("song") / "song.txt"
    path.write_text(SONG)
    return f"text:{path}"


def config(name: str, **sections) -> ConfigDict:
    return ConfigDict(
        {
            "dataset": name,
            "data": {"context": 8},
            "batch_size": 4,
            "model": {"name": "gpt", "head_dim": 4, "width": 8, "depth": 1},
            "optimizer": {"name": "adam"},
            "schedule": {"name": "constant"},
            "steps": 6,
            "sweep": {
                "depths": (1, 2),
                "widths": (8, 16),
                "axes": {"learning_rate": "2**[-8:-4:2]"},
                "seeds": 1,
                "average_last": 2,
                "parametrizations": {"depth_mup": {"name": "depth_mup"}},
            },
            **sections,
        }
    )


def test_a_text_is_held_window_by_window(song):
    dataset = datasets.open_dataset(song, context=8)
    tokens = dataset.training_arrays()["tokens"]
    text = np.frombuffer(SONG.encode(), np.uint8)
    np.testing.assert_array_equal(tokens[0], text[:9])
    np.testing.assert_array_equal(
        tokens[:, -1], text[8 : 9 * 8 * 40 : 8][: len(tokens)]
    )
    shapes = {"vocab_size": 256, "context": 8}
    assert model_shapes(dataset, "gpt") == shapes


def test_a_finished_sweep_builds_and_draws_nothing(song, tmp_path, monkeypatch, caplog):
    described = config(song, modules={"tables": {"pattern": "role:input"}})
    described.sweep.base_axes = ConfigDict({"tables/learning_rate": (1.0, 2.0)})
    given = described, str(tmp_path), ["mupax", "sweep"]
    first = sweep.run(*given)
    page = (tmp_path / "report.html").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "build", None)
        patch.setattr(tasks, "build", None)
        patch.setattr("mupax.experiments.report.page.report_page", None)
        assert sweep.run(*given).table == first.table
    assert not caplog.text
    (tmp_path / "report.html").unlink()  # is drawn again
    sweep.run(*given)
    assert (tmp_path / "report.html").read_bytes() == page


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("digits", {"context": 8}, "context has no effect on digits"),
        ("fake:8:16", {"contxt": 8}, "contxt"),
    ],
)
def test_options_that_mean_nothing_are_refused(name, options, said):
    with pytest.raises(UserError, match=said):
        open_dataset(parse_run({"dataset": name, "data": options, "learning_rate": 1}))


def test_images_are_held_at_the_size_that_is_asked_for():
    small = datasets.open_dataset("digits", image_size=4)
    whole = datasets.open_dataset("digits")
    arrays, full = small.training_arrays(), whole.training_arrays()
    assert arrays["image"].shape == (whole.train_size, 4, 4, 1)
    np.testing.assert_array_equal(arrays["label"], full["label"])
    # Averages of pixels have about the mean that the pixels have.
    np.testing.assert_allclose(small.statistics[0], whole.statistics[0], atol=0.5)


@pytest.mark.parametrize("name", list_configs())
def test_every_packaged_config_can_be_swept_at_its_base(name):
    given = parse(["sweep", f"--config={name}"])
    if name == "finetune_vit":  # a sweep does not start from trained weights
        with pytest.raises(UserError, match="init_from='runs/vit' starts a training"):
            space.parse_sweep(given.config)
        return
    tasks = space.tasks(space.parse_sweep(given.config))
    assert len({task.name for task in tasks}) == len(tasks)
    assert len(tasks) >= (6 if name.endswith("_sweep") else 1)
    assert given.workdir == f"runs/{name}-sweep"


@pytest.mark.parametrize("name", list_configs())
def test_every_packaged_config_can_be_trained(name):
    given = parse(["train", f"--config={name}"]).config
    assert parse_run(given).learning_rate > 0


def test_a_training_config_is_a_sweep_around_its_learning_rate():
    found = space.parse_sweep(parse(["sweep", "--config=digits"]).config)
    assert found.sizes == (64, 8)
    assert space.sizes_of(found.target) == (128, 16)
    np.testing.assert_allclose(
        np.log2(found.axes["learning_rate"]), np.arange(-12, -5), atol=1e-6
    )


def test_a_training_config_gets_the_section_that_is_overridden():
    words = ["--config=digits", "--config.sweep.seeds=4", "--config.target.width=256"]
    words += ["--config.sweep.axes.b1=(0.8,0.9)", "--config.batch_size=32"]
    found = space.parse_sweep(parse(["sweep", *words]).config)
    assert found.seeds == 4
    assert space.sizes_of(found.target) == (256, 16)
    assert found.axes["b1"] == (0.8, 0.9)
    assert found.base.batch_size == 32
    wrong = parse(["sweep", "--config=digits", "--config.sweep.sedes=4"]).config
    with pytest.raises(UserError, match="sedes"):
        space.parse_sweep(wrong)


def test_only_some_of_the_parametrizations_are_swept(song):
    def keys(only):
        some = config(song)
        some.sweep.parametrizations.sp = {"name": "sp"}
        some.sweep.only = only
        return list(space.parse_sweep(some).parametrizations)

    assert keys(()) == ["depth_mup", "sp"]
    assert keys(("sp",)) == ["sp"]
    with pytest.raises(UserError, match="its keys are depth_mup, sp"):
        keys(("mup",))


def test_a_report_is_about_a_parametrization_that_was_swept(song):
    def featured(**changes):
        some = config(song, **changes.pop("sections", {}))
        some.sweep.parametrizations.sp = {"name": "sp"}
        some.sweep.update(changes)
        return space.parse_sweep(some).featured

    own = {"parametrization": {"name": "depth_mup"}}
    assert featured(sections=own) == "depth_mup"
    assert featured(sections=own, only=("sp",)) == "sp"
    assert featured(sections={**own, "target": {"parametrization": "sp"}}) == "sp"
    # The family's own, completep, is not swept: the last one.
    assert featured() == "sp"
    with pytest.raises(UserError, match=r"'ode' is not among .* has depth_mup, sp"):
        featured(sections={"parametrization": {"name": "ode"}})


def test_a_target_says_only_what_differs(song):
    target = {"width": 16, "depth": 2, "steps": 9, "mesh": {"data": 1}, "ema": 0.9}
    found = space.parse_sweep(config(song, target=target))
    base, made = found.base, found.target
    changed = base.sized(16, 2)
    assert made == dataclasses.replace(
        changed,
        steps=9,
        ema=0.9,
        mesh={"data": 1, "fsdp": 1, "tensor": 1},
        base_batch_size=base.batch_size,  # its own would scale nothing
    )
    with pytest.raises(UserError, match="no key 'wdth'"):
        space.parse_sweep(config(song, target={"wdth": 16}))
    for key in ("base_width", "learning_rate", "optimizer"):
        with pytest.raises(UserError, match=f"target.{key}: .* from the sweep"):
            space.parse_sweep(config(song, target={key: 16}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sweep", 3, "sweep is 3; it must be a mapping"),
        ("data", "x", "data is 'x'; it must be a mapping"),
        ("steps", 2.5, "steps is 2.5; it must be a whole number"),
        ("steps", 10**30, "at most 2147483647"),
        ("batch_size", 2**40, "at most 2147483647"),
        ("clip_norm", "a", "clip_norm is 'a'; it must be a number"),
        ("mixup", float("nan"), "mixup=nan must be 0 or more"),
        ("dataset", "x" * 5000, "of 5000 characters"),
        ("sweep.parametrizations", "mup", "must be a mapping"),
        ("sweep.parametrizations", {"a/b": {"name": "mup"}}, "a key names files"),
        ("sweep.parametrizations", {"x" * 99: {"name": "mup"}}, "a key names files"),
        ("sweep.parametrizations", {"mup": "mup"}, "must be a mapping"),
        ("sweep.seeds", 10**9, "at most 10000"),
        ("sweep.widths", 8, "sweep.widths is 8; it must be a tuple"),
        ("sweep.widths", (8, 2**40), "at most 10000000"),
        ("steps", 2**31 - 1, "their order is held in memory"),
        ("model", {"name": "gpt", "width": 10**9, "depth": 1}, "at most 10000000"),
        ("sweep.memory_share", 2.0, "must be positive and at most 1"),
        ("sweep.axes", {"learning_rate": "1e308**[1:3:1]"}, "learning_rate"),
        ("sweep.axes", {"learning_rate": "[1e308:1.7e308:1]"}, "learning_rate"),
        ("sweep.axes", {"learning_rate": "[0.1:1:1e-9]"}, "learning_rate"),
        ("sweep.axes", {"learning_rate": "2**[-1e9:1e9:1]"}, "learning_rate"),
        ("sweep.axes", {"learning_rate": {"a": 1}}, "learning_rate"),
        ("sweep.choices", 5, "sweep.choices is 5"),
        ("sweep.choices", (("model.width", 5),), "sweep.choices is"),
        ("sweep.sedes", 3, "no key sweep.sedes"),
        ("base", {"width": 8}, "no key 'base'"),
        ("learning_rte", 0.1, "no key 'learning_rte'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence_that_names_the_key(
    key, value, said, song
):
    given = plain(config(song))
    part, _, name = key.partition(".")
    if name:
        given[part][name] = value
    else:
        given[part] = value
    with pytest.raises(UserError) as error:
        space.parse_sweep(given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
