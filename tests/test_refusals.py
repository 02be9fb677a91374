"""Command lines that are wrong: one sentence each, before anything is written."""

import itertools

import pytest
from commands import HERE, TOY_CONFIG, TOY_TRAIN, refused

# {a key of the config and its value: what the sentence says}
TRAIN = {
    "learning_rat=1": "learning_rat",
    "learning_rate=-1.0": "learning_rate=-1.0 must be positive",
    "mesh.data=3": "does not fit 1 devices",
    "batch_size=33": "does not divide over 1 devices in 2 parts",
    "batch_size=3000": "more than the 1437 training examples",
    "dataset=imagenet2012": "prepare it once",
    "dataset=digts": "did you mean 'digits'",
    "model.name=resmpl": "'resmpl' is not in the zoo",
    "model.depth=0": "model.depth=0 must be a whole number, at least 1",
    "base_width=-1": "base_width is -1; it must be 1 or more",
    "base_width=1024": "is below base_width=1024",
    "optimizer.name=adamm": "must be one of sgd, adam",
    "schedule.name=cosin": "must be one of constant, cosine",
    "schedule.warmup=600": "must lie in 0 to 420 steps",
    "parametrization.name=mupp": "parametrization: ",
    "init_from=nowhere": "nowhere",
    "transfer_from=nowhere.json": "is not the summary.json",
    "steps=0": "steps is 0",
    "ema=1.5": "ema=1.5 must be positive and below 1",
    "profile=(5, 2)": "must be (first step, last step)",
    "wandb=mine": "needs its package",
    "mlflow=mine": "needs its package: pip install '.[mlflow]' in a clone of mupax",
    "augment=('flop',)": "there is no augmentation 'flop'",
    "target.width=32": "--config.target.width has no effect",
    "dataset=a\0b": "NUL byte",
}
TRANSFER = {
    "sweep.sedes=3": "no key sweep.sedes; its keys are",
    "sweep.sedes=4": "did you mean 'seeds'?",
    "nope=3": "no key 'nope'; docs/reference/config.md lists all keys\n",
    "sweep.axes.learning_rate=2**[-7:-6]": "at least three learning rates",
    "sweep.axes.learning_rate=2**[-5:-9]": "rising",
    "sweep.widths=(8,-16)": "a size in sweep.widths is -16",
    "sweep.widths=(8,0)": "it must be 1 or more",
    "sweep.widths=(16,32)": "lacks the base's 8",
    "target.parametrization=mup": "depth_mup, sp",
    "parametrization.name=mup": "add --config.sweep.parametrizations.mup.name=mup",
    "target.width=4": "target: model.width=4 is below base_width=8",
    "sweep.parametrizations.sp.name=spp": "nearest is 'sp'",
    "sweep.base_axes.momentun=(1,)": "has 'momentun', which is not a number",
    "sweep.axes.learning_rat=1": "has 'learning_rat', which is not a number",
    "sweep.average_last=31": "more than the 30 steps of a run",
    "optimizer.name=adm": "adam",
    "model.name=resmpl": "resmlp",
    "batch_size=100000": "batch",
    "sweep.seeds=two": "seeds",
    "dataset=imagenet_21k": "imagenet_21k",
}
EXPLAIN = {
    "optimizer=sgd": "--config.optimizer.name=sgd sets its name",
    "parametrization=mup": "--config.parametrization.name=mup",
    "model.dtype=bf16": "model.dtype='bf16' must be a floating-point",
    "model.remat=yes": "model.remat='yes' must be True or False or one",
    "model.branch_multiplier=0": "must be a positive number",
}
LINES = [
    *((["train", TOY_TRAIN, f"--config.{key}"], said) for key, said in TRAIN.items()),
    *(
        (["transfer", TOY_CONFIG, f"--config.{key}"], said)
        for key, said in TRANSFER.items()
    ),
    *(
        (["explain", TOY_TRAIN, f"--config.{key}"], said)
        for key, said in EXPLAIN.items()
    ),
    (["train", TOY_TRAIN, "--processes=2"], "--processes needs --distributed"),
    (["train", TOY_TRAIN, "--workdir="], "--workdir is empty"),
    (["train", TOY_TRAIN, "--workdir=a\0b"], "NUL byte"),
    (["train", "--config=a\0b"], "NUL byte"),
    (["train", f"--config={'x' * 5000}"], "too long"),
    (["transfer", f"--config={'x/' * 3000}y.py"], "too long"),
    (["transfer"], "digits_resmlp"),
    (["transfer", "--config", "digits_resnlp"], "digits_resmlp"),
    (["transfer", "--config=resmlp_sweep"], "set target.width and target.depth"),
    (["eval", TOY_CONFIG, "--config.target.width=32"], "target.width has no effect"),
    (["explain", TOY_TRAIN, "--steps=3"], "a key of the config is --config.steps=..."),
    (["coord-check", TOY_CONFIG, "--seeds=x"], "'x'"),
    (
        ["coord-check", TOY_TRAIN, "--tolerance=x"],
        "argument --tolerance: invalid float value: 'x'",
    ),
    (["coord_check"], "did you mean 'coord-check'?"),
    (["models", "zzz"], "no model is named 'zzz'"),
    (["models", "zz"], "`mupax models` lists all"),
    (["models", "resmpl*"], "did you mean 'resmlp'"),
    (["models", "res*", "vit"], "unexpected argument 'vit'"),
    (["train", f"--config={HERE}"], "is not a file"),
]


@pytest.mark.parametrize(("words", "said"), LINES, ids=itertools.count())
def test_a_wrong_line_is_one_sentence_and_nothing_is_written(
    words, said, tmp_path, capsys
):
    run = tmp_path / "run"
    if {TOY_TRAIN, TOY_CONFIG} & {*words}:
        words = [*words[:2], f"--config.data_dir={tmp_path}", *words[2:]]
    if words[0] in ("train", "transfer") and "workdir" not in " ".join(words):
        words = [*words, f"--workdir={run}"]
    assert said in refused(capsys, *words)
    assert not run.exists()


def test_a_missing_dataset_is_named_with_its_directory(tmp_path, capsys):
    words = ["--config.dataset=mnist", f"--config.data_dir={tmp_path}/nothing"]
    said = refused(capsys, "transfer", TOY_CONFIG, f"--workdir={tmp_path}/run", *words)
    assert "mnist" in said
    assert str(tmp_path / "nothing") in said


def test_an_unknown_flag_that_is_no_key_is_not_called_one(capsys):
    assert "--config" not in refused(capsys, "convert", "--zzz=1")
