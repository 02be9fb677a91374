"""The command line: the main job on a toy, its options and its lists."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from commands import TOY_CONFIG, mupax, refused
from patience import ended, wait_until

from mupax import optim, zoo
from mupax.experiments.cli import flags
from mupax.experiments.cli.models import HUB, model_sizes, sources_of
from mupax.experiments.errors import UserError
from mupax.experiments.run import workdir
from mupax.experiments.run.build import build, make_optimizer
from mupax.experiments.run.config import parse


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("tfds"))


@pytest.mark.long
def test_the_main_job_leaves_report_summary_and_checkpoint(tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    args = ["transfer", TOY_CONFIG, f"--workdir={run}", f"--config.data_dir={data_dir}"]
    assert mupax(*args) == 0
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    assert (run / "report.html").stat().st_size > 1000
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {
        "target",
        "transfer",
        "seconds",
        "runs",
        "verdicts",
        "baselines",
    }
    verdicts = summary["verdicts"]["learning_rate"]
    assert set(verdicts) == {"sp", "depth_mup"}
    assert verdicts["sp"]["depth"]["sizes"] == [2, 4]
    assert set(summary["target"]) == {
        "width",
        "depth",
        "log2_lr",
        "train_loss",
        "test_loss",
        "test_accuracy",
        "checkpoint",
    }
    assert set(summary["seconds"]) == {"sweep", "target", "baselines"}
    assert set(summary["baselines"]) == {"base", "sp"}
    assert summary["runs"] == 2 * 3 * 4 * 2
    assert pathlib.Path(summary["target"]["checkpoint"]).is_dir()

    # The same command again trains nothing twice, and says the same.
    assert mupax(*args) == 0
    assert json.loads((run / "summary.json").read_text()) == summary

    # Another experiment in its place is refused, and nothing is lost.
    capsys.readouterr()
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    message = refused(capsys, *args, "--config.sweep.seeds=3")
    assert "sweep.seeds (2, here 3)" in message
    assert "--workdir" in message
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}


@pytest.mark.long
def test_killed_at_any_point_it_goes_on_to_the_same_result(tmp_path, data_dir):
    """Stopped when the first cell, killed when the first checkpoint is there."""

    def start(run: pathlib.Path) -> subprocess.Popen:
        args = [
            "transfer",
            TOY_CONFIG,
            f"--workdir={run}",
            f"--config.data_dir={data_dir}",
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "mupax", *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    calm, killed = tmp_path / "calm", tmp_path / "killed"
    process = start(calm)
    ended(process)
    assert process.returncode == 0
    for sign, how, status in (
        ("**/runs/*.runs.jsonl", signal.SIGTERM, 130),
        ("target/checkpoints/*", signal.SIGKILL, -signal.SIGKILL),
    ):
        process = start(killed)
        wait_until(lambda sign=sign: any(killed.glob(sign)), process)
        process.send_signal(how)
        _, err = process.communicate()
        assert process.returncode == status
        if how == signal.SIGTERM:
            assert err.endswith("mupax: interrupted; run the same command to resume\n")
    process = start(killed)
    ended(process)
    assert process.returncode == 0
    results = [json.loads((d / "summary.json").read_text()) for d in (calm, killed)]
    for result in results:
        del result["seconds"], result["target"]["checkpoint"]
    assert results[0] == results[1]


def test_flags_set_any_key_of_a_target_as_a_file_does():
    words = ["target.model.width=96", "target.dataset=mnist"]
    argv = ["transfer", "--config=digits", *(f"--config.{word}" for word in words)]
    target = flags.parse(argv).config.target
    assert (target.model.width, target.dataset) == (96, "mnist")


def test_flags_set_options_that_the_config_leaves_out():
    words = ["model.remat=True", "optimizer.b1=0.8", "data.image_size=(4, 4)"]
    words += ["wandb=2024", "init_from=None"]
    argv = ["train", "--config=digits", *(f"--config.{word}" for word in words)]
    config = flags.parse(argv).config
    assert config.model.remat is True
    assert config.optimizer.b1 == 0.8
    assert config.data.image_size == (4, 4)
    assert (config.wandb, config.init_from) == ("2024", None)
    assert config.model.name == "resmlp"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.dephts=3", "resmlp has no option 'dephts'; the nearest is 'depth'"),
        ("optimizer.bb=3", "optimizer 'adam' has no option 'bb'; its options are b1"),
        ("schedule.nme=3", "schedule has no option 'nme'; its options are warmup"),
        ("data.image_sise=3", "data: got an unexpected keyword argument 'image_sise'"),
        ("parametrization.alpha=3", "keyword argument 'alpha'"),
        ("model.a.b=3", "resmlp has no option 'a'"),
        ("model.width.x=3", "no key model.width.x: model.width is a value, not a"),
        ("dataset.x=3", "dataset is a value, not a section; set all of it by --c"),
        ("augment[0]=3", "--config.augment.0. is not a key"),
        ("sweep.choices.x=3", "no effect on `mupax train`"),
        (
            "model.=3",
            "--config.model. is not a key; write e.g. --config.mod",
        ),
        ("mixup=1e-320", "mixup=1e-320 does not fit into float32; it must be 0, or"),
        ("optimizer.eps=1e39", "eps=1e.39 does not fit into float32"),
        ("keep_best=3.5", "keep_best is 3.5; it must be True or False"),
        ("sweep.base_axes.momentun=3", "no effect on `mupax train`"),
        ("model.out_features=5", "5, but digits gives 10; use other data, or leave"),
        ("model.input_shape=(4, 4, 1)", r"digits gives \(8, 8, 1\); set data.image"),
        ("model.base_width=5", "model.base_width has no effect.*; set base_width"),
        ("schedule.warmup=0.1", "schedule.warmup is 0.1; it must be a whole number"),
    ],
)
def test_an_option_that_does_not_exist_is_named(word, said):
    argv = ["train", "--config=digits", f"--config.{word}"]
    with pytest.raises(UserError, match=said):
        build(parse(flags.parse(argv).config))


def test_a_large_whole_number_of_an_optimizer_is_a_float(monkeypatch):
    """JAX cannot add 2^31 to float32."""
    words = ["train", "--config=digits", f"--config.optimizer.eps={2**31}"]
    config, seen = parse(flags.parse(words).config), {}
    monkeypatch.setattr(optim, "adam", lambda rate, scales, **given: seen.update(given))
    make_optimizer(config, None)
    assert type(seen["eps"]) is float


def test_a_directory_of_other_files_is_refused_and_kept(capsys, tmp_path, data_dir):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = refused(
        capsys,
        "transfer",
        TOY_CONFIG,
        f"--workdir={tmp_path}",
        f"--config.data_dir={data_dir}",
    )
    assert str(tmp_path) in message
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_directory_left_by_a_claim_that_was_killed_is_free(tmp_path):
    (tmp_path / ".experiment.json.x1y2").write_text("{")
    with workdir.claim(tmp_path, {"a": 1}):
        pass
    with pytest.raises(UserError, match=r"a \(1, here 2\)"):
        workdir.claim(tmp_path, {"a": 2}).__enter__()


def test_explain_prints_the_target_before_a_step_is_run(capsys, data_dir):
    assert mupax("explain", TOY_CONFIG, f"--config.data_dir={data_dir}") == 0
    out = capsys.readouterr().out
    assert "readout/kernel" in out
    assert "output" in out


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['ml_collections'] = None;"
        "sys.argv = ['mupax', 'transfer', '--config=digits'];"
        "from mupax.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ml_collections" in done.stderr
    assert "pip install '.[train]'" in done.stderr


def test_a_missing_extra_is_named_at_import():
    code = """
import sys
sys.modules["ml_collections"] = None
for module, name in (("mupax", "sweep"), ("mupax.experiments", "defaults")):
    try:
        exec(f"from {module} import {name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for name, said in zip(("sweep", "defaults"), done.stdout.splitlines(), strict=True):
        install = "pip install '.[train]' in a clone of mupax"
        assert f"{name} needs ml_collections: {install}" in said


def test_models_lists_the_zoo(capsys):
    assert mupax("models", "res*") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "25.6 M" in rows["resnet50"]
    assert "8.18 G" in rows["resnet50"]
    assert "timm/resnet50.*" in rows["resnet50"]
    assert "resmlp_digits" in rows["resmlp"]


def test_one_model_is_listed_with_every_source(capsys):
    assert mupax("models", "vit_base_patch16_224") == 0
    out = capsys.readouterr().out
    assert "86,567,656" in out
    assert "timm/deit_base_patch16_224.*" in out


def test_every_source_of_weights_is_of_a_model():
    models = zoo.list_models()
    sources = {name: sources_of(name) for name in models}
    assert any("SmolLM2" in text for text in sources["smollm2_135m"])
    assert set(HUB) <= set(models)
    assert set(model_sizes()) == set(models)


@pytest.mark.parametrize(
    ("command", "given"),
    [("sweep", None), ("transfer", None), ("sweep", "1")],
)
def test_a_sweep_has_a_device_of_every_core_and_keeps_what_it_compiled(
    command, given, tmp_path
):
    program = (
        "import sys; from mupax.__main__ import main, _cores; "
        f"sys.argv = ['mupax', '{command}', '--help']; main(); "
        "import jax; print(jax.local_device_count(), _cores(), "
        "jax.config.jax_compilation_cache_dir)"
    )
    env = {**os.environ, "HOME": str(tmp_path)}
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):
        env.pop(name, None)
    if given:
        env["JAX_NUM_CPU_DEVICES"] = given
    done = [sys.executable, "-c", program]
    out = subprocess.run(done, capture_output=True, check=True, text=True, env=env)
    devices, cores, cache = out.stdout.splitlines()[-1].split()
    assert devices == (given or cores)
    assert cache == str(tmp_path / ".cache" / "mupax")


def test_the_version_is_told(capsys):
    assert mupax("--version") == 0
    assert re.match(r"mupax \d+\.\d+\.\d+ \(jax \d", capsys.readouterr().out)


def test_explain_needs_no_imagenet(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert mupax("explain", "--config=imagenet_vit") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
