"""Damaged files of models: each loads as it was saved, or is one clear sentence."""

import json
import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from flax import nnx
from goldens import abstract, golden
from test_pretrained import file_of

from mupax import optim, zoo
from mupax.zoo.weights import foreign, saving

QUICK, THOROUGH = 60, 350
COUNTS = [QUICK, pytest.param(THOROUGH, marks=pytest.mark.long)]


def mutate(content: bytes, chance: random.Random) -> bytes | None:
    """Content with one random damage; None for a file that is gone."""
    data = bytearray(content)
    at = chance.randrange(len(data)) if data else 0
    kind = chance.choice(["bit", "byte", "zeros", "cut", "more", "gone", "empty"])
    if kind == "gone":
        return None
    if not data or kind == "more":
        return bytes(data) + chance.randbytes(chance.randrange(1, 9))
    if kind == "bit":
        data[at] ^= 1 << chance.randrange(8)
    if kind == "byte":
        data[at] = (data[at] + chance.randrange(1, 256)) % 256
    if kind == "zeros":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    if kind == "cut":
        del data[at:]
    return b"" if kind == "empty" else bytes(data)


def outcome(load: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """What was loaded; None where one clear sentence refused it."""
    try:
        return load()
    except ValueError as error:
        said = str(error)
        assert "\n" not in said, said
        assert 20 < len(said) < 700, said
        return None


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    model = zoo.create("resmlp", width=8, depth=2, rngs=nnx.Rngs(0))
    return zoo.save(model, tmp_path_factory.mktemp("saved") / "mine")


def arrays(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(a) for path, a in saving.arrays_of(model).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("count", COUNTS)
def test_a_damaged_directory_of_ours_is_right_or_one_sentence(count, saved, tmp_path):
    chance = random.Random(count)
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    expected = arrays(saving.load(folder))
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    refused = 0
    for file in [*files, *chance.choices(files, k=count - len(files))]:
        before = file.read_bytes()
        after = mutate(before, chance)
        if after == before:
            continue
        file.unlink() if after is None else file.write_bytes(after)
        read = outcome(lambda: arrays(zoo.load_pretrained("resmlp", folder)))
        file.write_bytes(before)
        # What is not compared with a checksum is not read, e.g. the card.
        assert read is None or same(read, expected), file
        refused += read is None
    assert refused > count // 3
    assert same(arrays(saving.load(folder)), expected)


def test_a_damaged_directory_is_named_with_its_file_and_what_to_do(saved, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"width": 8', '"width": 9'))
    with pytest.raises(ValueError, match=r"config\.json .* changed .* copy it again"):
        saving.load(folder)
    shutil.copy(saved / "config.json", config)
    (folder / "weights.npz").unlink()
    os.mkfifo(folder / "weights.npz")  # reading it would never end
    for read in (saving.load, saving.verify):
        with pytest.raises(ValueError, match=r"weights in .*not a regular file.*copy"):
            read(folder)
    os.replace(shutil.copy(saved / "weights.npz", tmp_path), folder / "weights.npz")
    assert same(arrays(saving.load(folder)), arrays(saving.load(saved)))


def test_a_card_may_be_edited_and_a_directory_moved(saved, tmp_path):
    folder = tmp_path / "elsewhere"
    shutil.copytree(saved, folder)
    (folder / "README.md").write_text("Ours now.")
    assert same(arrays(saving.load(folder)), arrays(saving.load(saved)))


def refused(folder: pathlib.Path, **changes: object) -> str:
    """The sentence that refuses a directory whose config has other values."""
    config = json.loads((folder / "config.json").read_text())
    options = {**config["options"], **changes.pop("options", {})}
    config |= {"options": options, **changes}
    del config["crc"]
    config["crc"] = saving._checksum(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^[^\n]{30,700}$") as error:
        zoo.load_pretrained(folder)
    return str(error.value)


def rules(**fields: object) -> dict[str, object]:
    """A changed option: the parametrization, with other fields."""
    plain = vars(optim.parametrization("mup"))
    return {"options": {"parametrization": {"parametrization": plain | fields}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 1}, "no config of zoo.save in the format"),
        ({"model": 3}, "holds a model that this version cannot create"),
        ({"options": {"width": 2**62}}, "width holds a number beyond"),
        ({"options": {"base_width": 10**400}}, "base_width holds a number beyond"),
        ({"options": {"depth": 10**9}}, "GB of memory"),
        ({"options": {"depth": 3}}, r"cannot be read: .* has shape \(2, 8, 8\)"),
        ({"options": {"input_shape": ["n"]}}, "must be whole numbers"),
        ({"options": {"block_depth": 10**9}}, "block_depth=1000000000 must"),
        ({"options": {"parametrization": {"parametrization": []}}}, "cannot be read"),
        (rules(name=False), "name of a parametrization is False"),
        (rules(gauge={"output": ["x"]}), "an exponent of a parametrization is 'x'"),
        ({"options": {"dtype": {"dtype": 7}}}, "cannot be read"),
    ],
)
def test_a_value_that_no_config_may_have_is_one_sentence(
    changes, said, saved, tmp_path
):
    folder = tmp_path / "hostile"
    shutil.copytree(saved, folder)
    assert re.search(said, refused(folder, **changes))


def test_a_config_that_is_missing_a_pipe_or_nested_too_deeply_is_one_sentence(
    saved, tmp_path
):
    folder = tmp_path / "hostile"
    shutil.copytree(saved, folder)
    config = folder / "config.json"
    config.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*too deeply"):
        saving.load(folder)
    config.unlink()
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*No such file"):
        zoo.load_pretrained(folder)
    os.mkfifo(config)
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*regular file"):
        saving.load(folder)


def test_a_foreign_config_of_a_billion_layers_is_one_sentence(tmp_path):
    file = file_of("gpt2", tmp_path).rename(tmp_path / "model.safetensors")
    sizes = {"n_embd": 8, "n_head": 1, "vocab_size": 10, "n_positions": 8}
    config = {"model_type": "gpt2", "n_layer": 10**9, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="GB of memory"):
        zoo.load_pretrained(file.parent)


@pytest.mark.parametrize("count", COUNTS)
def test_a_damaged_safetensors_file_is_finite_or_one_sentence(count, tmp_path):
    """Such a file has no checksum: a flipped bit may go unseen, but not its effect."""
    chance = random.Random(count)
    file = file_of("vit_token", tmp_path)
    before = file.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    graph = abstract("vit_token")

    def load() -> dict[str, np.ndarray]:
        model = nnx.clone(graph)
        foreign.fill(model, foreign.read(file))
        return arrays(model)

    expected = load()
    refused = 0
    for i in range(count):
        # Half of the damage in the header, which is a small part of the file.
        part = before[:header] if i % 2 else before
        after = mutate(part, chance)
        if after is not None and i % 2:
            after = after + before[header:]
        file.unlink() if after is None else file.write_bytes(after)
        read = outcome(load)
        file.write_bytes(before)
        refused += read is None
        if read is not None:
            assert {k: a.shape for k, a in read.items()} == {
                k: a.shape for k, a in expected.items()
            }
            assert all(np.isfinite(a).all() for a in read.values())
    assert refused > count // 3


@pytest.mark.parametrize("count", COUNTS)
def test_a_damaged_npz_file_is_right_or_one_sentence(count, tmp_path):
    chance = random.Random(count)
    file = file_of("vit_big_vision", tmp_path)
    before = file.read_bytes()
    expected = dict(golden("vit_big_vision")[0])
    for _ in range(count):
        after = mutate(before, chance)
        file.unlink() if after is None else file.write_bytes(after)
        read = outcome(lambda: foreign.read(file))
        file.write_bytes(before)
        if read is None or same(read, expected):
            continue
        # A name in the archive may change, which no checksum of it covers.
        with pytest.raises(ValueError, match=r"the file lacks|holds"):
            foreign.match(abstract("vit_big_vision"), read)
