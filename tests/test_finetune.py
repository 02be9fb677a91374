"""Fine-tuning: another library's weights, converted, with a head of their own."""

import pathlib
import re
import shlex

import jax
import numpy as np
import pytest
from flax import nnx
from goldens import golden, run, write
from test_convert import convert, flags

from mupax import zoo
from mupax.experiments import cli
from mupax.experiments.run.build import build, open_dataset
from mupax.experiments.run.config import parse
from mupax.experiments.run.records import read

CONFIG = """
from mupax.configs import finetune_vit


def get_config():
    c = finetune_vit.get_config()
    c.dataset = "fake:32x32x3:7"
    c.data = {}
    c.model = {"name": "vit"}
    c.batch_size = 16
    c.steps = 3
    c.log_every = 1
    c.schedule.warmup = 0
    return c
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> pathlib.Path:
    """timm's small ViT of five classes, as a directory of ours."""
    folder = tmp_path_factory.mktemp("converted")
    source = write(folder / "timm.safetensors", golden("vit_token")[0])
    out = folder / "vit"
    assert convert(f"--source={source}", f"--out={out}", *flags("vit_token")) == 0
    return out


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    pairs = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in pairs}


def tune(folder: pathlib.Path, source: pathlib.Path, *more: str) -> int:
    config = folder / "config.py"
    config.write_text(CONFIG)
    args = [f"--config={config}", f"--workdir={folder}/run"]
    return cli.main(["mupax", "train", *args, f"--config.init_from={source}", *more])


def test_a_converted_model_is_tuned_with_a_new_head(tmp_path, converted):
    assert tune(tmp_path, converted) == 0
    before = weights(zoo.load_pretrained("vit", converted))
    after = weights(zoo.load_pretrained("vit", tmp_path / "run" / "model"))
    assert before["readout/kernel"].shape[-1] == 5
    assert after["readout/kernel"].shape[-1] == 7
    for path in before.keys() - {"readout/kernel", "readout/bias"}:
        # Three steps of Adam at a rate of 1e-4 at the most.
        moved = np.abs(after[path] - before[path]).max()
        assert 0 < moved < 1e-3, path
    assert len(read(tmp_path / "run")) == 4


def test_a_sweep_from_trained_weights_is_refused(tmp_path, converted, capsys):
    """Its runs started from random weights, without a word."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    words = ["mupax", "sweep", f"--config={config}", f"--workdir={tmp_path}/run"]
    assert cli.main([*words, f"--config.init_from={converted}"]) == 2
    assert "the runs of a sweep start from random ones" in capsys.readouterr().err


@pytest.mark.parametrize("factor", ["multiplier", "init_scale"])
def test_factors_of_random_weights_are_refused(factor, tmp_path, converted, capsys):
    groups = f"{{'head': {{'pattern': 'role:output', '{factor}': 2.0}}}}"
    assert tune(tmp_path, converted, f"--config.modules={groups}") == 2
    err = capsys.readouterr().err
    assert f"modules.head.{factor}=2.0 scales a random initialization" in err
    assert not (tmp_path / "run").exists()


def test_weights_whose_multipliers_would_change_are_refused(
    tmp_path, converted, capsys
):
    assert tune(tmp_path, converted, "--config.base_depth=1") == 2
    err = capsys.readouterr().err
    assert "a factor of 1 at 'every branch'" in err
    assert not (tmp_path / "run").exists()
    remedy = re.search(r"; pass (--.*)$", err, re.M)[1]
    assert tune(tmp_path, converted, "--config.base_depth=1", *shlex.split(remedy)) == 0


def test_the_options_that_a_misfit_names_make_the_weights_fit(tmp_path, capsys):
    sizes = {"width": 8, "depth": 4, "base_width": 4, "base_depth": 2}
    model = zoo.create(
        "resmlp", **sizes, input_shape=(16, 16, 3), out_features=7, rngs=nnx.Rngs(0)
    )
    zoo.save(model, tmp_path / "model")
    own = [
        "model={'name':'resmlp','width':16,'depth':2}",
        "model.branch_multiplier=2.0",
    ]
    words = [f"--config.{key}" for key in own]
    assert tune(tmp_path, tmp_path / "model", *words) == 2
    remedy = re.search(r"; pass (--.*)$", capsys.readouterr().err, re.M)[1]
    assert "data.image_size" in remedy
    assert tune(tmp_path, tmp_path / "model", *words, *shlex.split(remedy)) == 0


def test_another_image_size_interpolates_positions_as_the_model_does(
    tmp_path, converted
):
    """A model of 32 x 32 pixels is tuned on images of 48 x 48."""
    assert tune(tmp_path, converted, "--config.dataset=fake:48x48x3:7") == 0
    before = zoo.load_pretrained("vit", converted)
    resized = zoo.load_pretrained("vit", converted, input_shape=(48, 48, 3))
    after = zoo.load_pretrained("vit", tmp_path / "run" / "model")
    assert before.position.shape == (1 + 4 * 4, 24)
    assert after.position.shape == resized.position.shape == (1 + 6 * 6, 24)
    assert after.grid == (6, 6)
    moved = np.abs(np.asarray(after.position[...]) - np.asarray(resized.position[...]))
    assert 0 < moved.max() < 1e-3
    images = jax.random.normal(jax.random.key(0), (2, 48, 48, 3))
    for model in (before, resized):
        model.eval()
    found = (run(model, images) for model in (before, resized))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_images_that_patches_do_not_divide_are_refused(tmp_path, converted, capsys):
    assert tune(tmp_path, converted, "--config.dataset=fake:36x36x3:7") == 2
    assert "patches of 8 x 8 do not divide" in capsys.readouterr().err


def test_the_seed_draws_the_new_head(converted):
    heads = [built(converted, seed=seed).readout.kernel[...] for seed in (0, 1)]
    assert heads[0].shape == heads[1].shape
    assert not np.allclose(heads[0], heads[1])


def built(source: pathlib.Path, seed: int) -> nnx.Module:
    config = parse(
        {
            **{"dataset": "fake:32x32x3:7", "model": {"name": "vit"}},
            **{"batch_size": 16, "steps": 3, "learning_rate": 0.1},
            **{"init_from": str(source), "seed": seed},
        }
    )
    return build(config, open_dataset(config)).model


@pytest.mark.parametrize(
    ("flag", "said"),
    [("nonlinearity=relu", "nonlinearity='gelu'"), ("norm_eps=0.1", "norm_eps=1e-06")],
)
def test_an_option_that_changes_the_weights_function_is_refused(
    flag, said, tmp_path, converted, capsys
):
    assert tune(tmp_path, converted, f"--config.model.{flag}") == 2
    error = capsys.readouterr().err
    assert said in error
    assert "would change the function" in error
    assert tune(tmp_path, converted, "--config.model.dropout=0.1") == 0
