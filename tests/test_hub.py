"""Pretrained weights from the hub: a local server answers as the hub does."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from goldens import RESNET, VIT, golden, loaded
from hub_server import COMMIT, OTHER_COMMIT, Hub, connected
from test_convert import convert

from mupax import zoo
from mupax.zoo.weights import saving

constants = pytest.importorskip("huggingface_hub.constants")

# A ViT-Ti made as small as the golden file's, whose number of classes is the config's.
SMALL = {k: v for k, v in VIT.items() if k != "out_features"}
VIT_ID = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
VIT_CONFIG = {"architecture": "vit_tiny_patch16_224", "num_classes": 5}


def as_bytes(weights: dict[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}
    )


def config(**content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with a ViT, to which the client's endpoint points; with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with connected(monkeypatch) as server:
        server.put(
            VIT_ID, config=config(**VIT_CONFIG), model=as_bytes(golden("vit_token")[0])
        )
        yield server


def read(source: str, **more: object) -> nnx.Module:
    return zoo.load_pretrained(source, **{**SMALL, **more})


def same(one: nnx.Module, other: nnx.Module) -> None:
    """Compare the weights of two models."""
    arrays = (saving.arrays_of(model) for model in (one, other))
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_an_id_alone_gives_the_network_of_its_library(hub):
    same(read(VIT_ID), loaded("vit_token"))
    assert ("HEAD", f"/{VIT_ID}/resolve/main/config.json") in hub.requests
    assert ("HEAD", f"/{VIT_ID}/resolve/main/model.safetensors") in hub.requests


def test_a_name_and_a_tagged_id(hub):
    name = "timm/resnet18.a1_in1k"
    hub.put(
        name,
        config=config(architecture="resnet18", num_classes=5),
        model=as_bytes(golden("resnet_basic")[0]),
    )
    options = {k: v for k, v in RESNET.items() if k != "out_features"}
    model = zoo.load_pretrained("resnet18", name, **options)
    assert model.plan["classes"].size == 5
    with pytest.raises(ValueError, match="holds a 'resnet18', not a 'resnet50'"):
        zoo.load_pretrained("resnet50", name, **options)


@pytest.mark.parametrize("architecture", ["ecaresnet50d", "resnet50_gn", "resnet27"])
def test_an_architecture_that_the_zoo_has_not_is_refused_before_its_weights(
    architecture, hub
):
    name = f"timm/{architecture}.a1_in1k"
    hub.put(name, config=config(architecture=architecture), model=b"not asked for")
    for given in ([name], ["resnet50", name]):
        with pytest.raises(ValueError, match=f"{architecture}.*no such model"):
            zoo.load_pretrained(*given)
    assert not [path for _, path in hub.requests if "safetensors" in path]


def test_sizes_come_from_the_config(hub):
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50}
    gpt = {"model_type": "gpt2", **sizes, "n_positions": 16}
    hub.put("someone/gpt", config=config(**gpt), model=as_bytes(golden("gpt2")[0]))
    same(zoo.load_pretrained("someone/gpt"), loaded("gpt2"))


def test_a_revision_is_read_by_name_commit_and_sign(hub):
    weights = {k: 2 * v for k, v in golden("vit_token")[0].items()}
    hub.put(VIT_ID, revision="v2", config=config(**VIT_CONFIG), model=as_bytes(weights))

    def bias(source: str) -> np.ndarray:
        return np.asarray(read(source).readin.bias[...])

    first = golden("vit_token")[0]["patch_embed.proj.bias"]
    np.testing.assert_array_equal(bias(VIT_ID), first)
    np.testing.assert_array_equal(bias(f"{VIT_ID}@{COMMIT}"), first)
    for second in (bias(f"{VIT_ID}@v2"), bias(f"hf-hub:{VIT_ID}@{OTHER_COMMIT}")):
        np.testing.assert_array_equal(second, 2 * first)
    with pytest.raises(ValueError, match=r"RevisionNotFound.*check its name, revision"):
        read(f"{VIT_ID}@v3")
    with pytest.raises(ValueError, match=f"'{VIT_ID}@v2'"):
        zoo.load_pretrained(VIT_ID, revision="v2")


def test_offline_the_cache_is_enough(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot be reached, and the cache"):
        read(VIT_ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    read(VIT_ID)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    read(VIT_ID)
    assert len(hub.requests) == asked


def test_a_repository_without_a_config_is_read_by_name_and_the_guess_said(
    hub, monkeypatch, caplog
):
    hub.put("someone/mine.v1", model=as_bytes(golden("vit_token")[0]))
    with pytest.raises(ValueError, match="does not state the architecture"):
        read("someone/mine.v1")
    zoo.load_pretrained("vit", "someone/mine.v1", **VIT)
    assert "assumed timm's vit" in caplog.text
    # The cache remembers that there is no config.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    zoo.load_pretrained("vit", "someone/mine.v1", **VIT)


def test_private_and_gated_repositories_take_a_token(hub, monkeypatch):
    hub.tokens[VIT_ID] = "hf_secret"
    with pytest.raises(ValueError, match="token") as refused:
        read(VIT_ID)
    hub.gated.add(VIT_ID)
    with pytest.raises(ValueError, match=r"GatedRepo.*terms on the hub"):
        read(VIT_ID)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    read(VIT_ID)
    assert "hf_secret" not in str(refused.value)


def test_what_is_not_there_is_said(hub):
    with pytest.raises(
        ValueError, match=r"is not a path on disk, .*RepositoryNotFound"
    ):
        read("timm/nothing.in1k")
    hub.put("someone/pickle", config=config(**VIT_CONFIG))
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        read("someone/pickle")
    with pytest.raises(ValueError, match=r"there is no file 'timm/weights\.pth'"):
        read("timm/weights.pth")


def test_a_directory_with_a_repository_s_files_is_read_as_one(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "config.json").write_bytes(config(architecture="resnet50_gn"))
    (folder / "model.safetensors").write_bytes(as_bytes(golden("vit_token")[0]))
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(ValueError, match="no such model"):
            zoo.load_pretrained("resnet50", source)
    (folder / "config.json").write_bytes(config(**VIT_CONFIG))
    assert zoo.load_pretrained(folder, **SMALL).plan["classes"].size == 5
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json' cannot be read"):
        zoo.load_pretrained(folder, **SMALL)


def test_without_the_extra_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hub\]'"):
        read(VIT_ID)


def test_the_command_reads_a_tagged_id(hub, tmp_path, capsys):
    flags = [f"--option={key}={value}" for key, value in SMALL.items()]
    out = tmp_path / "vit"
    assert convert(f"--source={VIT_ID}", f"--out={out}", *flags) == 0
    assert "vit_tiny_patch16_224" in capsys.readouterr().out
    assert zoo.load_pretrained(out).plan["classes"].size == 5
    again = [f"--source={VIT_ID}", f"--out={tmp_path / 'x'}", *flags]
    again[0] += "@nothing"
    assert convert(*again) == 2
    assert "RevisionNotFound" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_asks_the_endpoint_of_the_environment(hub: Hub, tmp_path):
    flags = [f"--option={key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "mupax", "convert", f"--source={VIT_ID}"]
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    subprocess.run(
        [*command, f"--out={tmp_path / 'vit'}", *flags],
        check=True,
        env={**os.environ, **places},
    )
    assert (tmp_path / "vit" / "config.json").is_file()


def test_weights_in_several_files_are_downloaded(hub):
    weights, data = golden("qwen3")
    keys = sorted(weights)
    parts = {"model-1.safetensors": keys[::2], "model-2.safetensors": keys[1::2]}
    listed = {key: name for name, held in parts.items() for key in held}
    files = {n: as_bytes({k: weights[k] for k in held}) for n, held in parts.items()}
    files["model.safetensors.index.json"] = config(weight_map=listed)
    hub.put("someone/large", config=str(data["config"]).encode(), **files)
    same(zoo.load_pretrained("someone/large"), loaded("qwen3"))


def test_the_files_of_a_saved_model_are_read(hub, tmp_path, monkeypatch):
    sizes = {"input_shape": (2, 2, 1), "out_features": 3, "width": 4, "depth": 1}
    model = zoo.create("resmlp", **sizes, rngs=nnx.Rngs(0))
    folder = zoo.save(model, tmp_path / "saved")
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = (path.relative_to(folder).as_posix() for path in files)
    content = dict(zip(names, (path.read_bytes() for path in files), strict=True))
    hub.put("me/mine", **content)
    again = zoo.load_pretrained("me/mine")
    image = jnp.ones((1, 2, 2, 1))
    np.testing.assert_array_equal(again(image), model(image))
    hub.put("me/mine", **{"weights.npz": b"altered"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"cannot be read: it is no \.npz file"):
        zoo.load_pretrained("me/mine")
