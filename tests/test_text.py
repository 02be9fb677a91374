"""Text: every token is predicted once, by windows whose order the seed fixes."""

import itertools
import json
import os
import pathlib
import resource
import sys

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from mupax.experiments import data
from mupax.experiments.data import text
from mupax.experiments.data.text import open_tokenizer
from mupax.experiments.errors import UserError

SONG = "".join(f"{k} green bottles, hanging on the wall;\n" for k in range(120))


@pytest.fixture
def song(tmp_path):
    path = tmp_path / "song.txt"
    path.write_text(SONG)
    return path


def open_song(path, context=16, **options):
    return data.open_dataset(f"text:{path}", context=context, **options)


def windows(dataset):
    """All windows, the training split's sorted by where they stand in the song."""
    train = itertools.islice(dataset.train(1, 0), dataset.train_size)
    test = dataset.test(1)
    return [[b["tokens"][0] for b in split] for split in (train, test)]


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    context=st.integers(1, 9),
)
def test_every_token_but_the_first_of_a_file_is_predicted_once(lengths, context):
    """Up to what is left at a file's end, and never across files."""
    starts = itertools.accumulate([0, *lengths[:-1]])
    files = [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    total = text.window_count(files, context)
    windows = text.Windows(files, context, 0, total)(np.arange(total), None)["tokens"]
    assert windows.shape == (total, context + 1)
    np.testing.assert_array_equal(np.diff(windows, axis=1), 1)
    expected = []
    for file in files:
        whole = (max(len(file), 1) - 1) // context * context
        expected += file[1 : whole + 1].tolist()
    assert windows[:, 1:].ravel().tolist() == expected


def test_bytes_are_those_of_the_file(song):
    dataset = open_song(song)
    assert (dataset.kind, dataset.out_features, dataset.input_shape) == (
        "text",
        256,
        (16,),
    )
    total = (len(SONG) - 1) // 16
    assert dataset.test_size == total // 10
    assert dataset.train_size == total - total // 10
    train, test = windows(dataset)
    starts = [SONG.encode().find(bytes(w.astype(np.uint8))) for w in train]
    assert min(starts) >= 0
    written = "".join(dataset.decode(w[1:]) for w in test)
    assert SONG[1 : total * 16 + 1].endswith(written)


def test_no_training_window_reaches_into_the_test_text(tmp_path):
    """But for the token that the first test window begins with."""
    path = tmp_path / "counting.txt"
    path.write_bytes(bytes(range(256)))
    train, test = windows(open_song(path, context=5))
    assert max(w.max() for w in train) == min(w.min() for w in test)


def test_a_batch_is_what_the_spec_says_and_normalize_leaves_it(song):
    dataset = open_song(song)
    iterator = dataset.train(4, 0)
    batch, spec = next(iterator), dataset.spec(4)["tokens"]
    iterator.close()
    assert batch["tokens"].shape == spec.shape == (4, 17)
    assert batch["tokens"].dtype == spec.dtype == np.int32
    out = jax.jit(dataset.normalize)(batch)
    np.testing.assert_array_equal(out["tokens"], batch["tokens"])


def test_the_test_text_is_filled_up_and_counted(song):
    dataset = open_song(song)
    batches = list(dataset.test(4))
    counts = np.concatenate([b["counts"] for b in batches])
    assert counts.sum() == dataset.test_size < len(counts) == 4 * len(batches)
    assert {b["tokens"].shape for b in batches} == {(4, 17)}


def test_a_test_file_leaves_the_training_text_whole(song, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 2)
    dataset = open_song(song, test_path=other)
    assert dataset.train_size == (len(SONG) - 1) // 16
    _, test = windows(dataset)
    assert dataset.decode(test[0]) == "ABCDEFGHIJKLMNOPQ"


def test_the_files_of_a_directory_are_read_in_the_order_of_their_names(tmp_path):
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("c.md", "c")):
        (tmp_path / name).write_text(letter * 101)
    (tmp_path / "empty.txt").write_text("")
    dataset = open_song(tmp_path, context=10)
    assert (dataset.train_size, dataset.test_size) == (18, 2)
    _, test = windows(dataset)
    assert {dataset.decode(w) for w in test} == {"b" * 11}


# --- Tokenizers.


@pytest.fixture
def tokenizer(tmp_path):
    """Words, as a tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted(set(SONG.replace(",", " ,").replace(";", " ;").split()))
    vocabulary = {word: k for k, word in enumerate(["[UNK]", *words])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(os.fspath(path))
    return path, vocabulary


def test_a_tokenizer_gives_its_tokens_and_its_vocabulary(song, tokenizer):
    path, vocabulary = tokenizer
    dataset = open_song(song, tokenizer=path)
    assert dataset.out_features == len(vocabulary)
    _, test = windows(dataset)
    assert dataset.decode(test[0][:3]) in SONG.replace(",", " ,").replace(";", " ;")
    assert max(w.max() for w in test) < len(vocabulary)


def test_settings_of_a_tokenizer_lose_no_text(song, tmp_path):
    """Truncation, padding, dropout, and special tokens around each text."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: k for k, token in enumerate(["a", "b", "\n", "\r", "ab"])}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("a", "b")], dropout=0.5)
    )
    made.add_special_tokens(["<s>", "</s>", "<pad>"])
    first, last, pad = (made.token_to_id(token) for token in ("<s>", "</s>", "<pad>"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", last)]
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.enable_truncation(7)
    made.enable_padding(length=16, pad_id=pad, pad_token="<pad>")
    path = tmp_path / "tokenizer.json"
    made.save(os.fspath(path))
    text = tmp_path / "a.txt"
    text.write_bytes(b"ab\r\n" * 1000)
    read = open_song(text, context=10, tokenizer=path).load_train.files[0]
    np.testing.assert_array_equal(read, np.tile([4, 3, 2], 1000))
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("ab", True) == [first, 4]
    assert tokenizer.decode([first, 4, last]) == "<s>ab</s>"


def test_a_missing_package_is_named(song, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install '.\[text\]'"):
        open_song(song, tokenizer=tmp_path / "tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_said_to_be(song, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match="cannot be used as a tokenizer"):
        open_song(song, tokenizer=path)


def test_text_that_is_not_utf8_is_said_to_be(tmp_path, tokenizer):
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1") * 100)
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8"):
        open_song(path, tokenizer=tokenizer[0])


# --- Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": None}, r"is text; set data.context"),
        ({"context": 0}, r"context is 0"),
        ({"context": 100_000}, r"too few to train and test on; make context smaller"),
        ({"tokenizer": ""}, r'tokenizer is empty; give "bytes"'),
        ({"test_path": ""}, r"test_path is empty; give a file or directory"),
        ({"tokenizer": "gpt2"}, r'no tokenizer gpt2; give "bytes", the path'),
        ({"test_path": "/nowhere.txt"}, r"no text file /nowhere\.txt"),
        ({"image_size": 32}, r"image_size has no effect"),
        ({"augment": ("flip",)}, r"augment has no effect"),
        ({"workers": 2}, r"workers has no effect"),
        ({"test_split": "test"}, r"test_split has no effect"),
    ],
)
def test_mistakes_are_answered_in_one_line(song, options, message):
    with pytest.raises(UserError, match=message) as caught:
        open_song(song, **options)
    assert "\n" not in str(caught.value)


def test_a_text_without_a_path_is_refused():
    with pytest.raises(UserError, match='"text:" lacks a path; give text:FILE'):
        data.open_dataset("text:", context=16)


def test_texts_that_are_not_there_are_said_not_to_be(tmp_path, song):
    with pytest.raises(UserError, match=r"no text file .*absent\.txt"):
        open_song(tmp_path / "absent.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder holds no \*\.txt file"):
        open_song(tmp_path / "folder")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"train and test on; it is empty"):
        open_song(tmp_path / "empty.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(UserError, match=r"short\.txt is shorter than one window of 17"):
        open_song(song, test_path=tmp_path / "short.txt")


# --- Large files.


def test_bytes_are_read_window_by_window(tmp_path):
    """A gigabyte of holes opens at once."""
    path = tmp_path / "large.txt"
    with pathlib.Path(path).open("wb") as file:
        file.truncate(2**30)
    dataset = open_song(path, context=1024)
    assert dataset.train_size + dataset.test_size == 2**20 - 1
    iterator = dataset.train(2, 0)
    assert next(iterator)["tokens"].sum() == 0
    iterator.close()


@pytest.mark.parametrize("changed", [SONG[:100], SONG * 9, SONG.upper()])
def test_a_file_that_changes_while_it_is_read_is_an_error_that_names_it(song, changed):
    path = pathlib.Path(song)
    dataset = open_song(path)
    path.unlink()  # replaced, as editors and `mv` do
    path.write_text(changed)
    batches = dataset.train(4, 0)
    with pytest.raises(UserError, match=f"{path} was changed .* to resume"):
        list(itertools.islice(batches, 10))
    batches.close()


def test_a_directory_may_have_more_texts_than_a_process_may_open(tmp_path):
    for i in range(99):
        (tmp_path / f"{i}.txt").write_text(SONG)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 50, hard))
    try:
        batches = open_song(tmp_path).train(64, 0)
        assert len(list(itertools.islice(batches, 10))) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    batches.close()


def test_a_text_that_is_deleted_while_it_is_read_is_an_error_that_names_it(song):
    batches = open_song(song).train(4, 0)
    pathlib.Path(song).unlink()
    with pytest.raises(UserError, match=f"{song} cannot be read: No such file"):
        list(itertools.islice(batches, 10))
    batches.close()


def test_a_text_whose_tokens_do_not_fit_into_memory_is_refused(tmp_path, tokenizer):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"large\.txt would take .* GiB of memory"):
        open_song(path, tokenizer=tokenizer[0])
