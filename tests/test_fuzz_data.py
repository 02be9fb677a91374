"""Damage to prepared data: what is read is right, or one sentence names the file."""

import io
import json
import logging
import os
import random
import shutil

import mutations
import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image

from mupax.experiments import data, memory
from mupax.experiments.errors import UserError

SEED = int(os.environ.get("MUPAX_FUZZ_SEED", "0"))
CLASSES = 5


def _examples(split, size):
    """Images of class k that no other number has, from the number alone."""
    for k in range(40 if split == "train" else 10):
        rng = np.random.default_rng([k, split == "train"])
        pixels = rng.integers(0, 256, size, np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        file.seek(0)
        yield k, {"image": file, "label": k % CLASSES}


class _Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    code_path = epath.Path(__file__)
    size = (6, 5)
    features = tfds.features.ClassLabel(num_classes=CLASSES)

    def _info(self):
        shape = (*self.size, 1)
        features = {
            "image": tfds.features.Image(shape=shape, encoding_format="png"),
            "label": self.features,
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {name: _examples(name, self.size) for name in ("train", "test")}

    def _generate_examples(self):
        raise AssertionError("the fixture `prepared` writes the examples")


class Mnist(_Tiny, skip_registration=True):
    """One of the names that are held in memory."""

    name = "mnist"


class TinyNamed(_Tiny, skip_registration=True):
    """Read as it is needed; its classes have names."""

    name = "tiny_named"
    features = tfds.features.ClassLabel(names=list("abcde"))


class TinyPlain(_Tiny, skip_registration=True):
    """Read as it is needed; of its classes only the number is known."""

    name = "tiny_plain"


NAMES = ("mnist", "tiny_named", "tiny_plain")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    for builder in (Mnist, TinyNamed, TinyPlain):
        made = builder(data_dir=directory, file_format="array_record")
        made.download_and_prepare()
    return directory


def read(name, directory):
    """All that a sweep and a trainer would see."""
    if name == "mnist":
        loaded = data.load(name, directory)
        train = loaded.train_images, loaded.train_labels
        return [*train, loaded.test_images, loaded.test_labels, loaded.num_classes]
    dataset = data.open_dataset(name, directory)
    n = dataset.test_size
    splits = (
        dataset.training_arrays(),
        dataset.load_test(np.arange(n), np.empty((n, 0))),
    )
    arrays = [split[key] for split in splits for key in ("image", "label")]
    return [*arrays, dataset.out_features]


@pytest.fixture(scope="module")
def wanted(prepared):
    return {name: read(name, prepared) for name in NAMES}


def attempt(name, directory):
    """(what is read, None), or (None, the sentence)."""
    try:
        return read(name, directory), None
    except UserError as error:
        return None, str(error)


def outcome(name, directory, wanted, caplog, what):
    """Right, or a sentence that names the file; anything else fails.

    Where metadata does not fit the records, either may be named.
    """
    caplog.clear()
    arrays, error = attempt(name, directory)
    if error:
        assert str(directory) in error, (what, error)
        assert "\n" not in error, (what, error)
        return "sentence"
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    if warned:
        assert str(directory) in warned[0].getMessage()
        return "sentence"
    for mine, theirs in zip(arrays, wanted[name], strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=str(what))
    return "right"


def fuzz(prepared, wanted, tmp_path, caplog, count, seed):
    rng = random.Random(seed)
    outcomes = {"right": 0, "sentence": 0}
    for number in range(count):
        name = rng.choice(NAMES)
        place = tmp_path / str(number)
        shutil.copytree(prepared / name, place / name)
        path, kind = mutations.mutate_one(place, rng)
        what = (seed, number, path.name, kind)
        metadata = path.suffix in (".json", ".txt")
        kind_of_outcome = outcome(name, place, wanted, caplog, what)
        outcomes[kind_of_outcome] += 1
        if kind_of_outcome == "sentence" and not metadata:
            assert path.name in attempt(name, place)[1], what
        shutil.rmtree(place)
    print(f"prepared data, seed {seed}, {count} mutations: {outcomes}")
    return outcomes


def test_damaged_data_is_right_or_said(prepared, wanted, tmp_path, caplog):
    outcomes = fuzz(prepared, wanted, tmp_path, caplog, 60, SEED)
    assert outcomes["sentence"] > 30


@pytest.mark.long
def test_400_mutations_of_prepared_data_change_nothing_silently(
    prepared, wanted, tmp_path, caplog
):
    outcomes = fuzz(prepared, wanted, tmp_path, caplog, 400, SEED + 1)
    assert outcomes["sentence"] > 200


# --- The damage that is known to be read in silence otherwise.


def edited(prepared, tmp_path, name, file, change):
    shutil.copytree(prepared / name, tmp_path / name)
    path = tmp_path / name / "1.0.0" / file
    content = path.read_text()
    assert change(content) != content
    path.write_text(change(content))
    return path


def replaced(key, old, new):
    return lambda text: text.replace(f'"{key}": "{old}"', f'"{key}": "{new}"')


# 50 is more than 40 records can tell from classes that have no example, which may be
# meant where the dataset is not one of the known ones.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count)
        for name in NAMES
        for count in (1, 4, 6, 50)
        if (name, count) != ("tiny_plain", 50)
    ],
)
def test_another_number_of_classes_is_not_silent(
    prepared, wanted, tmp_path, caplog, name, count
):
    change = replaced("numClasses", CLASSES, count)
    edited(prepared, tmp_path, name, "features.json", change)
    assert outcome(name, tmp_path, wanted, caplog, (name, count)) == "sentence"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [39, 41, 0])
def test_another_number_of_records_is_said(prepared, tmp_path, name, count):
    change = lambda text: text.replace('"40"', f'"{count}"')  # noqa: E731
    path = edited(prepared, tmp_path, name, "dataset_info.json", change)
    with pytest.raises(UserError) as caught:
        read(name, tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_another_size_of_images_is_said(prepared, tmp_path, name):
    """Which a trainer would resize to."""
    change = lambda text: text.replace('"6"', '"60"')  # noqa: E731
    path = edited(prepared, tmp_path, name, "features.json", change)
    with pytest.raises(UserError, match=r"a record has \(6, 5, 1\)") as caught:
        read(name, tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_records_that_is_missing_or_cut_is_named(prepared, tmp_path, name):
    shutil.copytree(prepared / name, tmp_path / name)
    (path,) = (tmp_path / name / "1.0.0").glob("*train*")
    path.write_bytes(path.read_bytes()[: 2**16 + 10])
    with pytest.raises(UserError, match=r"is damaged") as caught:
        read(name, tmp_path)
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"is missing") as caught:
        read(name, tmp_path)
    assert str(path) in str(caught.value)


def test_a_flipped_bit_in_a_record_is_named_when_it_is_read(prepared, tmp_path):
    """By the trainer too, from a thread of its pipeline."""
    shutil.copytree(prepared / "tiny_plain", tmp_path / "tiny_plain")
    dataset = data.open_dataset("tiny_plain", tmp_path)
    (path,) = (tmp_path / "tiny_plain" / "1.0.0").glob("*test*")
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT")
    content[place + 6] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match="hash mismatch") as caught:
        list(dataset.test(5))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("file", ["features.json", "dataset_info.json"])
@pytest.mark.parametrize("name", ["tiny_plain", "digits"])
def test_metadata_that_is_missing_is_named_and_the_remedy_works(
    prepared, tmp_path, name, file
):
    if name == "digits":
        data.prepare_digits(tmp_path)
    else:
        shutil.copytree(prepared / name, tmp_path / name)
    path = tmp_path / name / "1.0.0" / file
    path.unlink()
    with pytest.raises(UserError) as caught:
        data.open_dataset(name, tmp_path)
    assert f"{path} is missing; remove {path.parent}" in str(caught.value)
    if name == "digits":
        shutil.rmtree(path.parent)
        assert data.load(name, tmp_path).num_classes == 10


def test_metadata_is_read_once_its_permission_is_there(prepared, tmp_path):
    shutil.copytree(prepared / "tiny_plain", tmp_path / "tiny_plain")
    path = tmp_path / "tiny_plain" / "1.0.0" / "features.json"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads every file")
    with pytest.raises(UserError, match=r"features\.json"):
        read("tiny_plain", tmp_path)


# --- Text.


def text_outcome(path, tokenizer):
    try:
        dataset = data.open_dataset(f"text:{path}", context=8, tokenizer=tokenizer)
        tokens = dataset.training_arrays()["tokens"]
    except UserError as error:
        return str(error)
    assert tokens.min() >= 0
    assert tokens.max() < dataset.out_features
    return ""


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_a_damaged_tokenizer_gives_tokens_of_its_vocabulary_or_a_sentence(
    tmp_path, count
):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    vocabulary = {word: k for k, word in enumerate(["[UNK]", *words])}
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path, song = tmp_path / "tokenizer.json", tmp_path / "song.txt"
    made.save(str(path))
    song.write_text(" ".join(words * 40))
    whole, rng = path.read_bytes(), random.Random(SEED)
    for _ in range(count):
        path.write_bytes(whole)
        kind = mutations.mutate(path, rng)
        said = text_outcome(song, path)
        assert "\n" not in said, kind
        assert not said or str(tmp_path) in said, (kind, said)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_text_is_text_or_a_sentence(tmp_path, seed):
    path = tmp_path / "song.txt"
    path.write_text("ten green bottles\n" * 50)
    mutations.mutate(path, random.Random(seed))
    said = text_outcome(path, "bytes")
    assert not said or str(path) in said


@pytest.mark.parametrize(
    "name",
    [p + n for p in ("", "text:", "images:", "npz:") for n in ("a\0b", "n" * 5000)],
)
def test_names_that_no_file_can_have_are_said(name, tmp_path):
    with pytest.raises(UserError) as caught:
        data.open_dataset(
            name, tmp_path, context=8 if name.startswith("text:") else None
        )
    assert "\n" not in str(caught.value)


def test_a_directory_of_data_that_no_system_has_is_said():
    with pytest.raises(UserError):
        data.open_dataset("mnist", "a\0b")


# --- Numbers that no memory holds: nothing is allocated.

HUGE = {
    "images": lambda: data.open_dataset("digits", image_size=2**15).training_arrays(),
    "a side": lambda: data.open_dataset("digits", image_size=10**12),
    "a side of text": lambda: data.open_dataset("digits", image_size="224"),
    "a fractional side": lambda: data.open_dataset("digits", image_size=2.5),
    "noise": lambda: data.open_dataset("fake:9999999x9999999x3:10"),
    "noise beyond integers": lambda: data.open_dataset(f"fake:{10**30}x1x1:10"),
    "classes": lambda: data.open_dataset(f"fake:8x8x1:{10**12}"),
    "context": lambda: data.open_dataset(f"fake:{10**13}:100"),
    "vocabulary": lambda: data.open_dataset(f"fake:16:{10**12}"),
    "steps": lambda: data.batch_indices(100, 64, 0, 10**13),
    "a batch": lambda: data.open_dataset("fake:10000x10000x3:10").train(9_000, 0),
    "threads": lambda: data.open_dataset("fake:8x8x1:10", threads=10**9),
    "workers": lambda: data.open_dataset("fake:8x8x1:10", workers=10**9),
}


@pytest.mark.parametrize("what", HUGE)
def test_numbers_too_large_are_refused_before_they_are_allocated(
    what, monkeypatch, tmp_path
):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(memory, "host", lambda: 16.0 * 2**30)
    with pytest.raises(UserError) as caught:
        HUGE[what]()
    assert "\n" not in str(caught.value)


def test_what_fits_is_not_refused(monkeypatch):
    monkeypatch.setattr(memory, "host", lambda: 2.0**30)
    assert data.open_dataset("fake:224x224x3:1000").spec(64)
    with pytest.raises(UserError, match=r"would take .* GiB of memory, and 1 GiB are"):
        data.open_dataset("fake:8192x8192x3:10").training_arrays()


def test_the_files_of_the_metadata_are_json_that_tfds_wrote(prepared):
    """So that the edits above change what they say they change."""
    features = json.loads((prepared / "mnist/1.0.0/features.json").read_text())
    label = features["featuresDict"]["features"]["label"]["classLabel"]
    assert label == {"numClasses": str(CLASSES)}
