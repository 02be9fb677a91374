"""Models as directories: what is saved comes back, what does not fit is refused."""

import json
import os
import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim, zoo
from mupax.experiments import data as datasets
from mupax.experiments import run as training
from mupax.zoo import registry
from mupax.zoo.weights import saving

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)


def build(**options) -> nnx.Module:
    sizes = {"width": 16, "depth": 4, "base_width": 8, "base_depth": 2}
    return zoo.create("resmlp", **{**sizes, **options}, rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    return saving.save(build(), tmp_path_factory.mktemp("models") / "mine")


def files(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_loading_compiles_no_initial_values(saved, monkeypatch):
    monkeypatch.setattr(registry, "_program", None)
    assert saving.load(saved)(jnp.array(X)).shape == (2, 10)
    with pytest.raises(AttributeError, match="NoneType"):
        saving.load(saved, out_features=3)  # a new head is drawn


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"branch_multiplier": np.float32(0.5), "train_ends": np.False_},
        {"dtype": jnp.bfloat16, "train_ends": False, "layer_norm": True},
        {"parametrization": optim.parametrization("completep", alpha=0.75, richness=2)},
        {"parametrization": optim.parametrization("mup", gauge="mean_field")},
    ],
    ids=["plain", "numpy", "bf16-frozen", "completep", "gauge"],
)
def test_a_saved_model_comes_back_from_its_directory_alone(tmp_path, options):
    model = build(**options)
    again = saving.load(saving.save(model, tmp_path / "it"))
    np.testing.assert_array_equal(
        *(jnp.float32(m(jnp.array(X))) for m in (model, again))
    )
    assert again.plan == model.plan
    # What comes back can be saved again.
    saving.save(again, tmp_path / "copy")


def test_the_card_of_a_run_has_metrics_settings_and_command(tmp_path):
    yaml = pytest.importorskip("yaml")
    training = zoo.Training(
        dataset="text:a: b",
        metrics={"accuracy": 0.875, "loss": 1 / 3},
        settings={"steps": 7, "seed": 3},
        source="timm/some@main",
        command="mupax train --config x",
    )
    notes = "Trained on nothing."
    folder = zoo.save(build(), tmp_path / "it", notes=notes, training=training)
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "mupax"
    for said in (
        *("resmlp", "depth_mup", "zoo.load_pretrained", notes),
        "    initial weights: timm/some@main",
        "    test accuracy: 0.875\n    test loss: 0.33333",
        "    steps: 7",
        "    command: mupax train --config x",
    ):
        assert said in text
    assert "Nothing is known" not in text


def test_a_card_holds_neither_html_nor_links_of_others_nor_folders_of_a_machine(
    tmp_path,
):
    training = zoo.Training(
        dataset="text:/home/me/a.txt",
        settings={
            "data_dir": "/home/me/data",
            "init": "gs://bucket/run|x",
            "other": "<script>x()</script> [a](javascript:b)\n# lines | `c` / d",
        },
        source="/home/me/<b>.npz",
        command="mupax convert --source='/home/me/my files/w.npz' --out s3://bucket/x\x1b",
    )
    text = (
        saving.save(build(), tmp_path / "it", training=training) / "README.md"
    ).read_text()
    assert "home" not in text
    assert "\x1b" not in text
    # In a block of code, of one line each.
    for line in (
        "initial weights: <b>.npz",
        "dataset: text:a.txt",
        "data_dir: data",
        "init: gs://bucket/run|x",
        "other: <script>x()</script> [a](javascript:b) # lines | `c` / d",
        "command: mupax convert --source=w.npz --out s3://bucket/x",
    ):
        assert f"\n    {line}\n" in text


def test_the_default_parametrization_is_written_out(tmp_path):
    path = saving.save(build(block_depth=2), tmp_path / "it")
    known = json.loads((path / "config.json").read_text())["options"]
    assert known["parametrization"] == "completep"
    assert saving.load(path).plan.parametrization.name == "completep(alpha=1)"


def test_another_number_of_classes_gets_a_new_head(saved):
    model = saving.load(saved, out_features=3)
    assert model(jnp.array(X)).shape == (2, 3)
    old, new = (saving.arrays_of(m) for m in (saving.load(saved), model))
    np.testing.assert_array_equal(old["readin/kernel"], new["readin/kernel"])


def test_what_is_there_is_not_overwritten(saved):
    before = files(saved)
    with pytest.raises(FileExistsError, match="choose another"):
        saving.save(build(), saved)
    assert files(saved) == before


def test_another_size_is_refused(saved):
    with pytest.raises(
        ValueError, match=r"blocks.*\(4, 16, 16\).*\(4, 32, 32\).*pass width=16$"
    ):
        saving.load(saved, width=32)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        saving.load(tmp_path)


def test_a_model_of_ones_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"zoo\.create"):
        saving.save(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / "it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_model_that_is_not_filled_whole_is_left_untouched(change):
    model = build()
    before = jax.device_get(saving.arrays_of(model))
    arrays = {path: np.zeros_like(array) for path, array in before.items()}
    if change == "missing":
        del arrays["readout/kernel"]
    elif change == "unknown":
        arrays["readout/bias"] = np.zeros(10)
    else:
        arrays["readout/kernel"] = np.zeros((16, 9))
    with pytest.raises(ValueError, match="readout"):
        saving.fill(model, arrays)
    for path, array in saving.arrays_of(model).items():
        np.testing.assert_array_equal(array, before[path])


needs_data = pytest.mark.skipif(
    "TFDS_DATA_DIR" not in os.environ,
    reason="TFDS_DATA_DIR is not set: there are no images to read",
)


@pytest.mark.parametrize(
    ("name", "dataset", "said"),
    [
        ("resmlp_digits", "digits", "{:.1%} of the test split right"),
        pytest.param(
            *("cnn_mnist", "mnist", "{:.2%} of the test split right"), marks=needs_data
        ),
        pytest.param(
            *("resmlp_fashion", "fashion_mnist", "accuracy {:.5g}"), marks=needs_data
        ),
    ],
)
def test_a_shipped_model_is_as_accurate_as_its_card_says(name, dataset, said):
    model = zoo.load_pretrained(name)
    _, accuracy = training.evaluate(model, datasets.open_dataset(dataset))
    card = pathlib.Path(zoo.__file__).parent / "checkpoints" / name / "README.md"
    assert said.format(accuracy) in card.read_text()


def test_the_shipped_gpt_has_read_shakespeare():
    model = zoo.load_pretrained("gpt_shakespeare")
    said = b"My lord, I do not know what you have heard of this."
    tokens = np.frombuffer(said, np.uint8)[None].astype(int)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    assert losses.mean() < 2.2  # of 5.5 nats for a byte of which nothing is known


def test_every_shipped_model_loads_offline_and_all_are_small():
    folder = pathlib.Path(zoo.__file__).parent / "checkpoints"
    for name in zoo.list_pretrained():
        model = zoo.load_pretrained(name)
        options = json.loads((folder / name / "config.json").read_text())["options"]
        if "input_shape" in options:
            images = np.zeros((2, *options["input_shape"]), np.float32)
            assert model(images).shape == (2, 10)
        else:
            assert model(np.zeros((2, 3), int)).shape == (2, 3, options["vocab_size"])
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 3_000_000


def test_a_model_is_loaded_by_the_name_it_was_saved_under(saved, tmp_path):
    assert zoo.load_pretrained("resmlp", saved).plan.depth == 2
    with pytest.raises(ValueError, match="holds a 'resmlp', not a 'vit'"):
        zoo.load_pretrained("vit", saved)
    with pytest.raises(ValueError, match="resmlp_digits"):
        zoo.load_pretrained("resmlp_mnist")
    with pytest.raises(ValueError, match="no directory"):
        zoo.load_pretrained("resmlp", tmp_path / "nothing")


def test_a_model_with_a_replaced_head_is_refused_before_anything_is_written(tmp_path):
    """Loading could not rebuild it, when the process that had the weights is gone."""
    for bias, said in ((True, "'readout/bias'"), (False, "'readout/kernel' has shape")):
        model = zoo.load_pretrained("resmlp_digits")
        model.readout = nnx.Linear(64, 3, use_bias=bias, rngs=nnx.Rngs(1))
        with pytest.raises(ValueError, match=f"{said}.*with out_features=") as error:
            zoo.save(model, tmp_path / "model")
        assert "could not rebuild" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_save_that_the_system_refuses_is_one_error_that_names_the_place(tmp_path):
    model = zoo.create("resmlp", width=16, depth=2, rngs=nnx.Rngs(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as error:
            zoo.save(model, tmp_path / "mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(tmp_path)
    assert not list(tmp_path.iterdir())
