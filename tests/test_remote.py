"""Inputs in object storage are read through local copies; outputs are refused."""

import pathlib

import fsspec
import numpy as np
import pytest
from flax import nnx

from mupax import zoo
from mupax.experiments import cli, remote
from mupax.experiments import data as datasets
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build
from mupax.experiments.run.config import parse


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """An empty file system in memory, and an empty cache."""
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


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
    with pytest.raises(UserError, match=r"cannot be read \(connection reset\)"):
        remote.local("memory://b/data")
    assert list((tmp_path / "cache" / "remote").iterdir()) == []


def test_what_is_not_there_is_said(bucket):
    with pytest.raises(UserError, match="there is nothing at memory://b/none"):
        remote.local("memory://b/none")
    with pytest.raises(UserError, match="use gs:// or s3://"):
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
    read = build(config, datasets.from_memory(images())).model
    np.testing.assert_array_equal(read.readout.kernel[...], model.readout.kernel[...])
    assert config.init_from == "memory://b/model"


def images():
    pixels = np.arange(64 * 10, dtype=np.uint8).reshape(10, 8, 8, 1)
    split = pixels, np.arange(10)
    return datasets.ImageData.from_arrays("digits", split, split, 10)


@pytest.mark.parametrize("command", ["train", "sweep", "transfer"])
def test_a_run_directory_in_object_storage_is_refused(
    capsys, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    words = [command, "--config=digits_resmlp", "--workdir=gs://bucket/run"]
    assert cli.main(["mupax", *words]) == 2
    error = capsys.readouterr().err
    assert "--workdir=gs://bucket/run is in object storage" in error
    assert "gcloud storage cp -r" in error
    assert list(tmp_path.iterdir()) == []


def test_other_paths_that_are_written_or_mapped_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data_dir=s3://b/tfds is in object storage"):
        datasets.open_dataset("mnist", "s3://b/tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://b/tfds")
    with pytest.raises(UserError, match="TFDS_DATA_DIR=gs://b/tfds"):
        datasets.open_dataset("mnist")
    with pytest.raises(ValueError, match="'gs://b/model' is in object storage"):
        zoo.save(zoo.load_pretrained("resmlp_digits"), "gs://b/model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_s3_is_read_from_an_emulator(tmp_path, monkeypatch):
    """A server of moto, which answers as S3 does."""
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "cache"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    try:
        host, port = running.get_host_and_port()
        address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        system.pipe("bucket/song.txt", b"one")
        found = remote.local("s3://bucket/song.txt")
        assert found.read_bytes() == b"one"
        system.pipe("bucket/song.txt", b"other")
        assert remote.local("s3://bucket/song.txt").read_bytes() == b"other"
        assert pathlib.Path(found).read_bytes() == b"one"
        with pytest.raises(UserError, match="there is nothing at s3://bucket/none"):
            remote.local("s3://bucket/none")
    finally:
        running.stop()
