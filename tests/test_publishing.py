"""Models are uploaded to a stand-in of the hub, and read back."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hub_server import connected

from mupax import zoo

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch):
    with connected(monkeypatch) as server:
        yield server


@pytest.fixture
def model():
    return zoo.create(
        "resmlp",
        input_shape=(2, 2, 1),
        out_features=3,
        width=4,
        depth=1,
        rngs=nnx.Rngs(0),
    )


def test_an_uploaded_model_is_read_back(hub, model, tmp_path):
    address = zoo.push_to_hub(
        model, "me/mine", notes="Trained on nothing.", license="mit", token="writes"
    )
    assert address == f"{hub.url}/me/mine/commit/{'0123456789abcdef' * 2}01234567"
    assert hub.commits == ["me/mine"]
    assert hub.created["me/mine"].get("visibility") != "private"
    card = next(c for (_, _, name), c in hub.files.items() if name == "README.md")
    assert card.startswith(b"---\nlicense: mit\nlibrary_name: mupax\n")
    assert b"Trained on nothing." in card
    assert b"zoo.load_pretrained('resmlp', \"me/mine\")" in card
    read = zoo.load_pretrained("resmlp", "me/mine", cache_dir=tmp_path)
    image = jnp.ones((1, 2, 2, 1))
    np.testing.assert_array_equal(read(image), model(image))
    # Offline, from the cache.
    before = len(hub.requests)
    again = zoo.load_pretrained("me/mine", cache_dir=tmp_path, local_files_only=True)
    np.testing.assert_array_equal(again(image), model(image))
    assert len(hub.requests) == before


def test_a_directory_is_uploaded_with_its_own_card(hub, model, tmp_path):
    folder = zoo.save(model, tmp_path / "model", notes="From a run.")
    zoo.push_to_hub(folder, "me/run", private=True, token="writes")
    assert hub.created["me/run"]["visibility"] == "private"
    card = hub.files["me/run", next(iter(hub.files))[1], "README.md"]
    assert b"From a run." in card
    with pytest.raises(ValueError, match="has a model card already"):
        zoo.push_to_hub(folder, "me/run", notes="more")


def test_a_damaged_directory_is_not_uploaded(hub, model, tmp_path):
    folder = zoo.save(model, tmp_path / "model")
    (folder / "checksums.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        zoo.push_to_hub(folder, "me/run", token="writes")
    assert hub.requests == []


def test_what_the_hub_refuses_is_one_sentence(hub, model):
    hub.readers.add("reads")
    with pytest.raises(
        ValueError, match=r"'me/mine' cannot be uploaded.*a token that may"
    ):
        zoo.push_to_hub(model, "me/mine", token="reads")
    with pytest.raises(ValueError, match=r"RevisionNotFound.*check its name and"):
        zoo.push_to_hub(model, "me/mine", revision="draft", token="writes")
    for name in ("mine", "me/mine@main", "hf-hub:me/mine"):
        with pytest.raises(ValueError, match="write owner/name"):
            zoo.push_to_hub(model, name)
    assert hub.commits == []


def test_a_name_outside_of_the_repository_is_refused(hub, model, tmp_path):
    zoo.push_to_hub(model, "me/mine", token="writes")
    for content, said in (
        (b'{"../../escape": "0"}', r"lists '\.\./\.\./escape'"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        hub.put("me/mine", **{"checksums.json": content})
        with pytest.raises(ValueError, match=said):
            zoo.load_pretrained("me/mine", cache_dir=tmp_path / said[:6])


def test_offline_mode_is_said():
    code = (
        "from flax import nnx; from mupax import zoo\n"
        "m = zoo.create('resmlp', input_shape=(2, 2, 1), out_features=3, width=4,"
        " depth=1, rngs=nnx.Rngs(0))\n"
        "try: zoo.push_to_hub(m, 'me/mine')\n"
        "except ValueError as e: print(e)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "HF_HUB_OFFLINE" in told
