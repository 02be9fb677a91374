"""`mupax convert`: the files of other libraries to directories of ours, and back."""

import pathlib
import shutil
import subprocess
import sys

import commands
import jax
import numpy as np
import pytest
from commands import mupax
from goldens import NETWORKS, abstract, golden, loaded, write

from mupax import zoo
from mupax.zoo.weights import foreign, saving

# Golden file: the layout, the ending of the file.
CASES = {
    "vit_token": ("timm", ".safetensors"),
    "vit_mean": ("timm", ".safetensors"),
    "vit_augreg": ("augreg", ".npz"),
    "vit_torchvision": ("torchvision", ".safetensors"),
    "vit_big_vision": ("big_vision", ".npz"),
    "gpt2": ("transformers", ".safetensors"),
    "resnet_basic": ("timm", ".safetensors"),
}


def flags(name: str) -> list[str]:
    """The model of a golden file, and its options, as flags."""
    model, options = NETWORKS[name]
    return [f"--model={model}", *(f"--option={k}={v}" for k, v in options.items())]


def convert(*args: object) -> int:
    return mupax("convert", *args)


def refused(capsys, folder: pathlib.Path, *args: object) -> str:
    """The one sentence of a refusal, which leaves the folder as it was."""

    def listing() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    before = listing()
    err = commands.refused(capsys, "convert", *args)
    assert listing() == before
    return err


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> pathlib.Path:
    """A small ViT as a directory of ours."""
    folder = tmp_path_factory.mktemp("ours")
    source = write(folder / "vit.safetensors", golden("vit_token")[0])
    assert (
        convert(f"--source={source}", f"--out={folder}/vit", *flags("vit_token")) == 0
    )
    return folder / "vit"


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_every_bit_is_the_same(name, tmp_path, capsys):
    (layout, ending), (model, _) = CASES[name], NETWORKS[name]
    weights = golden(name)[0]
    source = write(tmp_path / f"weights{ending}", weights)
    assert convert(f"--source={source}", f"--out={tmp_path}/ours", *flags(name)) == 0
    count = sum(array.size for array in weights.values())
    assert f"{model}, {count:,} values" in capsys.readouterr().out

    ours, theirs = (
        saving.arrays_of(m)
        for m in (zoo.load_pretrained(model, tmp_path / "ours"), loaded(name))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)

    back = tmp_path / f"back{ending}"
    assert (
        convert(f"--source={tmp_path}/ours", f"--out={back}", f"--layout={layout}") == 0
    )
    assert f"names of {layout}" in capsys.readouterr().out
    arrays = foreign.read(back)
    assert set(arrays) == set(weights)
    for key, array in weights.items():
        assert arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(arrays[key], array)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [source.name, "ours", back.name]
    )


def test_the_command_stands_alone(ours, tmp_path):
    out = tmp_path / "new" / "vit.npz"
    command = [sys.executable, "-m", "mupax", "convert", f"--source={ours}"]
    done = subprocess.run([*command, f"--out={out}"], check=True, capture_output=True)
    assert done.stderr == b""
    arrays = foreign.read(out)
    for key, array in golden("vit_token")[0].items():
        np.testing.assert_array_equal(arrays[key], array)


def test_a_run_and_a_model_of_the_package_are_sources(ours, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ours, run / "model")
    assert convert(f"--source={run}", f"--out={tmp_path}/vit.npz") == 0
    assert convert("--source=resmlp_digits", f"--out={tmp_path}/digits") == 0
    assert zoo.load_pretrained(tmp_path / "digits").plan["classes"].size == 10


def test_one_library_s_file_becomes_another_s(tmp_path):
    source = write(tmp_path / "timm.safetensors", golden("vit_token")[0])
    out = tmp_path / "torchvision.safetensors"
    args = flags("vit_token")
    assert (
        convert(f"--source={source}", f"--out={out}", "--layout=torchvision", *args)
        == 0
    )
    assert set(foreign.read(out)) == set(golden("vit_torchvision")[0])


def test_a_file_stays_in_the_layout_of_its_source(tmp_path, capsys):
    names = golden("vit_torchvision")[0]
    source = write(tmp_path / "source.safetensors", names)
    out = tmp_path / "out.safetensors"
    assert convert(f"--source={source}", f"--out={out}", *flags("vit_torchvision")) == 0
    assert "names of torchvision" in capsys.readouterr().out
    assert foreign.read(out).keys() == names.keys()


def test_a_remedy_is_printed_as_a_flag_that_can_be_pasted(tmp_path, capsys):
    source = write(tmp_path / "weights.safetensors", golden("vit_token")[0])
    args = [f"--source={source}", f"--out={tmp_path}/out", *flags("vit_token")]
    said = refused(capsys, tmp_path, *args, "--option=class_position=False")
    _, _, remedy = said.rpartition("pass ")
    assert remedy == "--option class_position=True\n"
    assert convert(*args, *remedy.split()) == 0


def test_what_is_left_unused_is_said(tmp_path, capsys):
    buffer = {"bn1.num_batches_tracked": np.array(3)}
    weights = {**golden("resnet_basic")[0], **buffer}
    source = write(tmp_path / "weights.safetensors", weights)
    args = [f"--source={source}", *flags("resnet_basic")]
    assert convert(*args, f"--out={tmp_path}/whole") == 0
    said = capsys.readouterr().out
    assert "1 keys: bn1.num_batches_tracked" in said

    args = [a.replace("out_features=5", "out_features=3") for a in args]
    assert convert(*args, f"--out={tmp_path}/new") == 0
    assert (
        "3 keys: bn1.num_batches_tracked, fc.bias, fc.weight" in capsys.readouterr().out
    )
    model = zoo.load_pretrained("resnet18", tmp_path / "new")
    assert saving.arrays_of(model)["readout/kernel"].shape == (32, 3)


def test_a_new_head_of_a_directory_is_drawn_from_the_seed(ours, tmp_path):
    heads = []
    for seed in (0, 1):
        out = tmp_path / f"seed{seed}"
        assert (
            convert(
                f"--source={ours}",
                f"--out={out}",
                "--option=out_features=3",
                f"--seed={seed}",
            )
            == 0
        )
        model = zoo.load_pretrained("vit", out)
        heads.append(np.asarray(saving.arrays_of(model)["readout/kernel"]))
    assert heads[0].shape == (24, 3)
    assert (heads[0] != heads[1]).any()


def test_an_existing_output_stays(ours, tmp_path, capsys):
    out = tmp_path / "there.safetensors"
    out.write_text("mine")
    assert "exists already" in refused(
        capsys, tmp_path, f"--source={ours}", f"--out={out}"
    )
    assert out.read_text() == "mine"
    assert "exists already" in refused(
        capsys, ours, f"--source={ours}", f"--out={ours}"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out=x.npz", "--layout=tim"], "layout='tim' must be one of timm"),
        (["--out=x", "--layout=timm"], "for files"),
        (["--out=x.pt"], ".pt files are not written"),
        (["--out=x.npz", "--model=resnet18"], "holds a 'vit', not a 'resnet18'"),
        (["--out=x.npz", "--model=vitt"], "nearest is 'vit'"),
        (["--out=x", "--option=width=48"], "has shape"),
        (["--out=x", "--option=widht=32"], "nearest is 'width'"),
        (["--out=x", "--option=width"], "KEY=VALUE"),
        (["--out=x", "--option=dtype=float33"], "no such dtype"),
        (["--out=x", "--option=out_features=3", "--option=out_features=4"], "twice"),
        (["--out=x.npz", "--option=param_dtype=bfloat16"], "cannot hold bfloat16"),
        (["--out=x", "--sorce=y"], "sorce"),
        (["--out=x", "more"], "unexpected argument 'more'"),
        ([], "--out is missing"),
    ],
)
def test_a_wrong_flag_is_named(args, said, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, tmp_path, f"--source={ours}", *args)


@pytest.mark.parametrize("fault", ["missing", "no model", "int8"])
def test_a_wrong_file_is_named_and_nothing_written(fault, tmp_path, capsys):
    weights = golden("vit_token")[0]
    source = tmp_path / "weights.safetensors"
    args = flags("vit_token")
    said = "there is no model"
    if fault == "int8":
        key, said = "head.weight", "'head.weight' holds int8"
        weights[key] = weights[key].astype(np.int8)
    if fault != "missing":
        write(source, weights)
    if fault == "no model":
        args, said = [], "--model is missing"
    assert said in refused(
        capsys, tmp_path, f"--source={source}", f"--out={tmp_path}/x", *args
    )


def test_the_embedding_repeated_as_the_readout_is_left_and_another_is_not():
    weights = golden("gpt2")[0]
    model = abstract("gpt2")
    again = weights["transformer.wte.weight"]
    assert foreign.fill(model, {**weights, "lm_head.weight": again}) == [
        "lm_head.weight"
    ]
    with pytest.raises(ValueError, match="lm_head"):
        foreign.fill(model, {**weights, "lm_head.weight": again + 1})
