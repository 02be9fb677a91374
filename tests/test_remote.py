"""Inputs in object storage are read through local copies."""

import errno
import logging
import sys

import fsspec
import numpy as np
import object_stores
import pytest
import safetensors.numpy
from flax import nnx
from test_fuzz_data import Tiny

from mupax import zoo
from mupax.experiments import cli, convert, loading
from mupax.experiments import data as datasets
from mupax.experiments.cli import flags, noise
from mupax.experiments.run.build import build
from mupax.experiments.run.config import parse
from mupax.zoo.weights import remote


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """An empty file system in memory, and an empty cache."""
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")

    def clear():
        system.store.clear()
        system.pseudo_dirs[:] = [""]

    clear()
    yield system
    clear()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied", "/cache/remote"),
    ],
)
def test_an_error_of_the_local_disk_does_not_blame_the_bucket(
    bucket, monkeypatch, error
):
    bucket.pipe("/b/song.txt", b"one")

    def fail(*_):
        raise error

    monkeypatch.setattr(type(bucket), "get_file", fail)
    with pytest.raises(
        remote.RemoteError, match=r"make room on this machine.*MUPAX_CACHE"
    ):
        remote.local("memory://b/song.txt")


def test_a_file_is_copied_once_and_again_when_it_changed(bucket, monkeypatch):
    bucket.pipe("/b/song.txt", b"one")
    first = remote.local("memory://b/song.txt")
    assert (first.name, first.read_bytes()) == ("song.txt", b"one")
    copies = []
    real = type(bucket).get_file
    monkeypatch.setattr(
        type(bucket), "get_file", lambda *a, **k: copies.append(a) or real(*a, **k)
    )
    assert remote.local("memory://b/song.txt") == first
    assert copies == []
    bucket.pipe("/b/song.txt", b"other")
    assert remote.local("memory://b/song.txt").read_bytes() == b"other"
    assert len(copies) == 1


def test_a_directory_is_copied_whole(bucket):
    bucket.pipe({"/b/data/x.txt": b"x", "/b/data/deep/y.txt": b"y"})
    folder = remote.local("memory://b/data/")
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert (folder.name, found) == ("data", {"x.txt", "deep/y.txt"})


def test_a_download_that_fails_leaves_nothing(bucket, monkeypatch, tmp_path):
    bucket.pipe({"/b/data/x.txt": b"x", "/b/data/y.txt": b"y"})
    real = type(bucket).get_file

    def fail(self, source, target, **more):
        if source.endswith("y.txt"):
            raise OSError("connection reset")
        return real(self, source, target, **more)

    monkeypatch.setattr(type(bucket), "get_file", fail)
    with pytest.raises(
        remote.RemoteError, match=r"cannot be read \(connection reset\)"
    ):
        remote.local("memory://b/data")
    assert list((tmp_path / "cache" / "remote").iterdir()) == []


def test_what_is_not_there_is_said(bucket):
    with pytest.raises(remote.RemoteError, match="there is nothing at memory://b/none"):
        remote.local("memory://b/none")
    with pytest.raises(remote.RemoteError, match="use gs:// or s3://"):
        remote.local("nosuch://b/none")


def test_text_weights_and_transfer_are_read(bucket, tmp_path):
    bucket.pipe("/b/song.txt", b"green bottles on the wall; " * 40)
    text = datasets.open_dataset("text:memory://b/song.txt", context=8)
    assert text.train_size > 50
    model = zoo.create(
        "resmlp",
        input_shape=(8, 8, 1),
        out_features=10,
        width=8,
        depth=1,
        rngs=nnx.Rngs(0),
    )
    folder = zoo.save(model, tmp_path / "model")
    bucket.put(str(folder), "/b/model", recursive=True)
    config = parse(
        {
            "dataset": "digits",
            "learning_rate": 0.1,
            "model": {"name": "resmlp"},
            "init_from": "memory://b/model",
        }
    )
    read = build(config, images()).model
    np.testing.assert_array_equal(read.readout.kernel[...], model.readout.kernel[...])
    assert config.init_from == "memory://b/model"


def images():
    pixels = np.arange(64 * 10, dtype=np.uint8).reshape(10, 8, 8, 1)
    split = pixels, np.arange(10)
    datasets.register_dataset("ten", {"train": split, "test": split})
    return datasets.open_dataset("ten")


def test_messages_name_addresses_and_not_their_local_copies(bucket, capsys):
    bucket.pipe_file("/bucket/summary.json", b"no JSON")
    words = ["--config=digits", "--config.transfer_from=memory://bucket/summary.json"]
    assert cli.main(["mupax", "explain", *words]) == 2
    assert "'memory://bucket/summary.json' is not the summary" in capsys.readouterr()[1]


@pytest.mark.parametrize("words", [("train", "--workdir"), ("convert", "--out")])
def test_an_address_that_can_only_be_read_is_refused(words, capsys):
    name, flag = words
    source = "--config=digits" if name == "train" else "--source=resnet18"
    assert cli.main(["mupax", name, source, f"{flag}=http://localhost:1/run"]) == 2
    assert "http://localhost:1/run can only be read; write to" in capsys.readouterr()[1]


def test_a_config_is_read(bucket, capsys):
    text = "from ml_collections import ConfigDict\nget_config = ConfigDict\n"
    bucket.pipe("/b/mine.py", text.encode())
    found = flags.parse(["train", "--config=memory://b/mine.py"])
    assert (found.config.to_dict(), found.workdir) == ({}, "runs/mine")
    assert cli.main(["mupax", "train", "--config=memory://b/none.py"]) == 2
    assert "there is nothing at memory://b/none.py" in capsys.readouterr().err


def test_prepared_datasets_are_copied(bucket, tmp_path, monkeypatch):
    made = Tiny(data_dir=tmp_path / "tfds", file_format="array_record")
    made.download_and_prepare()
    bucket.put(f"{tmp_path}/tfds/tiny/", "/b/tfds/tiny", recursive=True)
    bucket.pipe("/b/tfds/large/1.0.0/large.array_record", b"not copied")
    places = (tmp_path / "tfds", "memory://b/tfds")
    expected, found = (
        datasets.open_dataset("tiny", x).training_arrays() for x in places
    )
    np.testing.assert_array_equal(found["image"], expected["image"])
    monkeypatch.setenv("TFDS_DATA_DIR", "memory://b/tfds/")
    assert datasets.open_dataset("tiny").train_size == expected["label"].size
    assert not list(tmp_path.rglob("large.array_record"))
    with pytest.raises(
        remote.RemoteError, match="there is nothing at memory://b/tfds/cifar10"
    ):
        datasets.open_dataset("cifar10", "memory://b/tfds")


def test_models_of_runs_are_read_and_converted(bucket, tmp_path):
    model = zoo.load_pretrained("resmlp_digits")
    bucket.put(str(zoo.save(model, tmp_path / "model")), "/b/run/model", recursive=True)
    bucket.pipe("/b/run/checkpoints/3/state", b"not copied")
    for source in ("memory://b/run", "memory://b/run/model/"):
        read = loading.load_model(source)
        np.testing.assert_array_equal(
            read.readout.kernel[...], model.readout.kernel[...]
        )
    assert not list((tmp_path / "cache").rglob("checkpoints"))
    convert.run("memory://b/run/model", str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "config.json").is_file()
    with pytest.raises(remote.RemoteError, match="there is nothing at memory://b/none"):
        loading.load_model("memory://b/none")


def logits(model):
    return np.asarray(model(np.ones((2, 8, 8, 1), np.float32)))


def test_models_are_saved_and_loaded(bucket, tmp_path):
    model = zoo.load_pretrained("resmlp_digits")
    assert zoo.save(model, "memory://b/mine/") == "memory://b/mine"
    for given in (("memory://b/mine",), ("resmlp", "memory://b/mine")):
        read = zoo.load_pretrained(*given)
        np.testing.assert_array_equal(logits(read), logits(model))
    assert zoo.data_config(read) == zoo.data_config(model)
    assert not list(tmp_path.glob("cache/uploads/*"))
    with pytest.raises(FileExistsError, match="memory://b/mine is there already"):
        zoo.save(model, "memory://b/mine")
    bucket.pipe("/b/mine/weights.npz", b"altered")
    with pytest.raises(ValueError, match=r"weights in memory://b/mine cannot be read"):
        zoo.load_pretrained("memory://b/mine")


def test_models_are_converted_to_object_storage(bucket, capsys, monkeypatch):
    model = zoo.load_pretrained("resmlp_digits")
    zoo.save(model, "memory://b/mine")
    convert.run("memory://b/mine", "memory://b/copy")
    assert "memory://b/mine -> memory://b/copy: resmlp" in capsys.readouterr().out
    card = bucket.cat("/b/copy/README.md").decode()
    assert "mupax convert --source memory://b/mine --out memory://b/copy" in card
    read = zoo.load_pretrained("memory://b/copy")
    np.testing.assert_array_equal(logits(read), logits(model))
    monkeypatch.setattr(convert.foreign, "export", lambda *_: {"x": np.ones(3)})
    monkeypatch.setattr(convert.foreign, "factors", lambda _: [])
    convert.run("memory://b/mine", "memory://b/mine.safetensors", layout="timm")
    np.testing.assert_array_equal(
        safetensors.numpy.load(bucket.cat("/b/mine.safetensors"))["x"], np.ones(3)
    )
    for source, out in (("none", "copy"), ("none", "mine.safetensors")):
        with pytest.raises(FileExistsError, match=f"memory://b/{out} is there already"):
            convert.run(f"memory://b/{source}", f"memory://b/{out}")


def test_an_upload_that_fails_is_undone_and_the_model_kept(bucket, monkeypatch):
    model = zoo.load_pretrained("resmlp_digits")
    with monkeypatch.context() as broken:

        def fail(self, source, target, **more):
            if target.endswith("config.json"):
                raise PermissionError("Access Denied")
            return real(self, source, target, **more)

        real = type(bucket).put_file
        broken.setattr(type(bucket), "put_file", fail)
        words = r"memory://b/mine cannot be written \(Access Denied\).*the files are in"
        with pytest.raises(ValueError, match=words) as refused:
            zoo.save(model, "memory://b/mine")
    assert bucket.find("/b/mine") == []
    kept = str(refused.value).rpartition("the files are in ")[2]
    np.testing.assert_array_equal(logits(zoo.load_pretrained(kept)), logits(model))


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_emulators_hold_models(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "cache"))
    with object_stores.opened(kind) as address:
        model = zoo.load_pretrained("resmlp_digits")
        zoo.save(model, f"{address}/deep/mine")
        read = zoo.load_pretrained(f"{address}/deep/mine")
        np.testing.assert_array_equal(logits(read), logits(model))
        with pytest.raises(FileExistsError, match=f"{address}/deep/mine is there"):
            zoo.save(model, f"{address}/deep/mine")


@pytest.mark.parametrize(("kind", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_without_its_package_the_extra_is_named(monkeypatch, kind, extra):
    package = {"s3": "s3fs", "gs": "gcsfs"}[kind]
    monkeypatch.setitem(sys.modules, package, None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, kind, raising=False)
    with pytest.raises(ValueError, match=rf"pip install '.\[{extra}\]'"):
        zoo.load_pretrained(f"{kind}://bucket/model")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=rf"pip install '.\[{extra}\]'"):
        zoo.save(zoo.load_pretrained("resmlp_digits"), f"{kind}://bucket/model")


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_emulators_keep_every_byte(kind):
    with object_stores.opened(kind) as address:
        system = fsspec.filesystem(kind)
        for data in (b"one\r", b"one\n", b"one\r\n", b"one\r\r", b"\n\rone", b"\r"):
            system.pipe_file(f"{address}/song", data)
            assert system.cat_file(f"{address}/song") == data


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_emulators_are_read(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "cache"))
    with object_stores.opened(kind) as address:
        system = fsspec.filesystem(kind)
        system.pipe_file(f"{address}/song.txt", b"one")
        found = remote.local(f"{address}/song.txt")
        assert found.read_bytes() == b"one"
        system.pipe_file(f"{address}/song.txt", b"other")
        assert remote.local(f"{address}/song.txt").read_bytes() == b"other"
        assert found.read_bytes() == b"one"
        with pytest.raises(
            remote.RemoteError, match=f"there is nothing at {address}/none"
        ):
            remote.local(f"{address}/none")


def test_secrets_of_addresses_are_neither_written_nor_printed(bucket, tmp_path, capsys):
    # The path in this file system contains the user.
    bucket.pipe(
        "/me:PASSWORD@b/song.txt?sig=SIGNED", b"green bottles on the wall; " * 9
    )
    dataset = "--config.dataset=text:memory://me:PASSWORD@b/song.txt?sig=SIGNED"
    words = ["mupax", "train", "--config=gpt_sweep", dataset]
    sizes = ("model.width=16", "model.depth=1", "data.context=8")
    sizes += ("steps=1", "batch_size=2", "learning_rate=0.1", "tensorboard=True")
    words += [f"--config.{x}" for x in (*sizes, "schedule.warmup=0")]
    run = tmp_path / "run"
    assert cli.main([*words, f"--workdir={run}"]) == 0
    # A newer signature resumes the run.
    newer = [word.replace("SIGNED", "NEWER") for word in words]
    bucket.pipe("/me:PASSWORD@b/song.txt?sig=NEWER", b"green bottles on the wall; " * 9)
    assert cli.main([*newer, f"--workdir={run}"]) == 0
    assert cli.main([*words, "--config.steps=2", f"--workdir={run}"]) == 2
    assert cli.main([*words, "--workdir=s3:/LOGIN:PASS/WORD@b?x=SIGNED"]) == 2
    shown = capsys.readouterr()
    assert "leave them out, and run `aws configure`" in shown.err
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert b"text:memory://b/song.txt" in files[run / "model" / "README.md"]
    assert b"text:memory://b/song.txt" in files[run / "experiment.json"]
    names = " ".join(map(str, files))
    for text in (*files.values(), names.encode(), *(x.encode() for x in shown)):
        for secret in (b"PASS", b"WORD", b"SIGNED", b"NEWER", b"LOGIN"):
            assert secret not in text


def test_log_records_of_other_packages_lose_secrets():
    before = logging.getLogRecordFactory()
    try:
        noise.clean_records()
        given = "%s failed", ("http://me:PASSWORD@proxy:3128/x\x1b[2J",)
        record = logging.getLogRecordFactory()("hub", 30, "hub.py", 1, *given, None)
    finally:
        logging.setLogRecordFactory(before)
    assert record.getMessage() == "http://proxy:3128/x\\x1b[2J failed"
