"""Damaged and impossible data are one sentence, and nothing is read in silence."""

import io
import re
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image

from mupax.experiments import data, memory
from mupax.experiments.errors import UserError

CLASSES = 5


def _examples(split):
    """Images of class k that no other number has, from the number alone."""
    for k in range(40 if split == "train" else 10):
        rng = np.random.default_rng([k, split == "train"])
        pixels = rng.integers(0, 256, (6, 5), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        file.seek(0)
        yield k, {"image": file, "label": k % CLASSES}


class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Small images, which are kept in memory."""

    name = "tiny"
    VERSION = tfds.core.Version("1.0.0")
    code_path = epath.Path(__file__)

    def _info(self):
        shape = (6, 5, 1)
        features = {
            "image": tfds.features.Image(shape=shape, encoding_format="png"),
            "label": tfds.features.ClassLabel(num_classes=CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {name: _examples(name) for name in ("train", "test")}

    def _generate_examples(self):
        raise AssertionError("the fixture `prepared` writes the examples")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    Tiny(data_dir=directory, file_format="array_record").download_and_prepare()
    return directory


@pytest.fixture
def copied(prepared, tmp_path):
    """The folder of a dataset's version, to damage."""
    shutil.copytree(prepared / "tiny", tmp_path / "tiny")
    return tmp_path / "tiny" / "1.0.0"


def read(folder):
    """All that a trainer and a sweep would read."""
    dataset = data.open_dataset(folder.parent.name, folder.parents[1])
    return dataset.training_arrays(), list(dataset.test(5))


def refused(folder):
    """The one sentence with which a trainer and a sweep refuse a dataset."""
    with pytest.raises(UserError) as caught:
        read(folder)
    assert str(folder.parents[1]) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("cut", [0, 10, 2**16 + 10, None])
def test_a_file_of_records_that_is_missing_or_cut_is_one_sentence(copied, cut):
    (path,) = copied.glob("*train*")
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])
    assert f"{copied} is damaged" in refused(copied)


def test_a_flipped_bit_in_a_record_is_one_sentence(copied):
    """By the trainer too, from a thread of its pipeline."""
    (path,) = copied.glob("*test*")
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 6] ^= 4
    path.write_bytes(content)
    assert re.search("is damaged .*hash mismatch.*; remove it and", refused(copied))


@pytest.mark.parametrize("file", ["features.json", "dataset_info.json"])
def test_damaged_metadata_is_one_sentence(copied, file):
    path = copied / file
    path.write_bytes(path.read_bytes()[:50])
    assert "prepare it again" in refused(copied)


def test_a_label_beyond_the_classes_is_one_sentence(copied):
    path = copied / "features.json"
    text = path.read_text()
    assert f'"numClasses": "{CLASSES}"' in text
    path.write_text(text.replace(f'"{CLASSES}"', '"2"'))
    assert "it has 2 classes, and a record has label" in refused(copied)


def test_files_that_need_tensorflow_are_said_to(copied):
    info = copied / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    for file in copied.glob("*array_record*"):
        file.rename(copied / file.name.replace("array_record", "tfrecord"))
    assert "is not in ArrayRecord files; prepare it in another" in refused(copied)


# --- Text.


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-9],
        lambda whole: b"\xff" + whole,
        lambda whole: b"[" * 100_000,  # deeper than parsers go
        lambda whole: whole.replace(b'"two": 2', b'"two": -1'),
        lambda whole: whole.replace(b'"two": 2', b'"two": 99'),
        lambda whole: whole.replace(b"WordLevel", b"Unigram"),
    ],
)
def test_a_damaged_tokenizer_gives_tokens_of_its_vocabulary_or_a_sentence(
    tmp_path, damage
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
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    try:
        dataset = data.open_dataset(f"text:{song}", context=8, tokenizer=path)
    except UserError as error:
        said = str(error)
    else:
        said, tokens = "", dataset.training_arrays()["tokens"]
        assert 0 <= tokens.min() <= tokens.max() < dataset.out_features
    assert "\n" not in said
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
