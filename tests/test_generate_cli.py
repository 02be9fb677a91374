"""`mupax generate`: text in, its continuation out; tokenizers travel with models."""

import pytest
from commands import mupax, refused
from flax import nnx

from mupax import zoo
from mupax.experiments.data.text import open_text, open_tokenizer
from mupax.experiments.errors import UserError, visible
from mupax.experiments.generate import tokenizer_of
from mupax.experiments.run.build import build
from mupax.experiments.run.config import parse

tokenizers = pytest.importorskip("tokenizers")
SONG = "the sea was wide and the sky was grey and the gull was loud"
WORDS = SONG.split()
SIZES = {"width": 8, "depth": 1, "heads": 2, "context": 32}


@pytest.fixture
def song(tmp_path):
    """(a text, the tokenizer.json of its words, its number of tokens)."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *sorted(set(WORDS))])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    path = tmp_path / "words" / "tokenizer.json"
    tokenizer.save(str(path))
    text = tmp_path / "song.txt"
    text.write_text(" ".join(WORDS * 40))
    return text, path, len(vocabulary)


def save(folder, vocabulary, **files):
    model = zoo.create("llama", vocab_size=vocabulary, rngs=nnx.Rngs(0), **SIZES)
    names = {name.replace("_", "."): path for name, path in files.items()}
    zoo.save(model, folder, files=names)
    return model


def generate(folder, *flags):
    return mupax("generate", f"--model={folder}", *flags)


def test_a_run_on_words_generates_words(song, tmp_path, capsys):
    """The tokenizer is saved with the model, and found there."""
    text, path, vocabulary = song
    config = tmp_path / "config.py"
    config.write_text(f"""
from mupax.configs import text_gpt


def get_config():
    c = text_gpt.get_config()
    c.dataset = "text:{text}"
    c.data = {{"context": 8, "tokenizer": "{path.parent}"}}
    c.model = {{"name": "llama", "width": 8, "depth": 1, "heads": 2}}
    c.base_width = 8
    c.base_depth = 1
    c.batch_size = 8
    c.steps = 60
    c.learning_rate = 0.03
    c.schedule.warmup = 0
    return c
""")
    run = tmp_path / "run"
    assert mupax("train", f"--config={config}", f"--workdir={run}") == 0
    assert (run / "model" / "tokenizer.json").read_bytes() == path.read_bytes()
    capsys.readouterr()
    flags = ["--prompt=the sea was", "--tokens=5", "--temperature=0"]
    assert generate(run, *flags) == 0
    said = capsys.readouterr().out.split()
    assert said[:3] == ["the", "sea", "was"]
    assert len(said) == 8
    # The song says it 40 times.
    assert said[3] in ("wide", "grey", "loud")
    model = zoo.load_pretrained(run / "model")
    assert model.embedding.shape[0] == vocabulary


def test_bytes_are_what_a_vocabulary_of_256_without_a_tokenizer_means(tmp_path, capsys):
    save(tmp_path / "bytes", 256)
    assert generate(tmp_path / "bytes", "--prompt=né", "--tokens=4") == 0
    first = capsys.readouterr().out
    assert first.startswith("né")
    assert generate(tmp_path / "bytes", "--prompt=né", "--tokens=4", "--seed=1") == 0
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt="], "--prompt is missing"),
        (["--prompt=the", "--tokens=0"], "--tokens=0 must be 1 or more"),
        (["--prompt=the", f"--seed={2**64}"], "must be a whole number of 64 bits"),
        (["--prompt=the", "--bos"], "has no special tokens; leave it out"),
        (["--prompt=the", "--tokens=40"], "does not fit into context=32"),
        (["--prompt=the", "--top_k=100"], "top_k=100"),
        (["--prompt=the", "--top_p=1.5"], r"top_p=1.5 must lie in (0, 1]"),
        (["--prompt=the", "--eos=end"], "--eos=end must be the number of a token"),
        (["--prompt=the", "--eos=100"], "must be tokens in [0, "),
        (["--prompt=the", "--tokenizer="], "--tokenizer is empty; give a value"),
        (["--prompt=the", "--tokenizer=bytes"], "256 tokens, more than the"),
        (["--prompt=the", "--tokenizer=none.json"], "there is no tokenizer"),
    ],
)
def test_what_cannot_be_generated_is_one_sentence(song, tmp_path, capsys, flags, said):
    save(tmp_path / "model", song[2], tokenizer_json=song[1])
    assert said in refused(capsys, "generate", f"--model={tmp_path / 'model'}", *flags)


def test_a_model_without_a_tokenizer_needs_one(song, tmp_path, capsys):
    save(tmp_path / "model", song[2])
    said = refused(capsys, "generate", f"--model={tmp_path / 'model'}", "--prompt=the")
    assert "there is no tokenizer.json beside" in said
    assert "give --tokenizer" in said
    flags = ["--prompt=the", "--tokens=2", f"--tokenizer={song[1]}"]
    assert generate(tmp_path / "model", *flags) == 0


def test_text_stops_at_the_end_token_and_shows_what_a_terminal_would_obey(
    tmp_path, capsys
):
    save(tmp_path / "bytes", 256)
    flags = ["--prompt=\x1b[2J\n", "--tokens=9", "--temperature=0"]
    assert generate(tmp_path / "bytes", *flags) == 0
    whole = capsys.readouterr().out
    assert whole.startswith("\\x1b[2J\n")
    model = zoo.load_pretrained(tmp_path / "bytes")
    ids = zoo.generate(model, [list(b"\x1b[2J\n")], 9)[0, 5:].tolist()
    assert generate(tmp_path / "bytes", *flags, f"--eos={ids[4]},{ids[6]}") == 0
    assert capsys.readouterr().out == visible(
        (b"\x1b[2J\n" + bytes(ids[: ids.index(ids[4])])).decode(errors="replace")
        + "\n",
        keep="\n\t",
    )


def test_a_token_that_the_tokenizer_lacks_is_one_sentence(tmp_path, capsys):
    save(tmp_path / "model", 512)
    flags = ["--prompt=the", "--tokenizer=bytes", "--temperature=9", "--tokens=20"]
    said = refused(capsys, "generate", f"--model={tmp_path / 'model'}", *flags)
    assert "the tokenizer has only 256 tokens" in said


def test_the_tokenizer_is_of_the_same_revision_as_the_model(song, monkeypatch):
    asked = []

    def download(source, filename, **more):
        asked.append(source)
        return song[1]

    monkeypatch.setattr("mupax.zoo.weights.hub.download", download)
    model = zoo.create("llama", vocab_size=song[2], rngs=nnx.Rngs(0), **SIZES)
    tokenizer_of(model, "a/b@v2", None)
    assert asked == ["a/b@v2"]


def test_the_model_of_the_package_continues_a_play(capsys):
    assert generate("gpt_shakespeare", "--prompt=ROMEO:", "--tokens=3") == 0
    assert capsys.readouterr().out.startswith("ROMEO:\n")


def test_a_model_of_images_generates_no_text(capsys):
    said = refused(capsys, "generate", "--model=resmlp_digits", "--prompt=the")
    assert "takes images, not text" in said


def test_convert_carries_the_tokenizer(song, tmp_path):
    save(tmp_path / "model", song[2], tokenizer_json=song[1])
    args = [f"--source={tmp_path / 'model'}", f"--out={tmp_path / 'copy'}"]
    assert mupax("convert", *args) == 0
    assert (tmp_path / "copy" / "tokenizer.json").is_file()


def test_weights_with_more_tokens_than_their_tokenizer_are_tuned(song, tmp_path):
    text, path, vocabulary = song
    save(tmp_path / "model", vocabulary + 5)
    config = {
        "dataset": f"text:{text}",
        "data": {"context": 8, "tokenizer": str(path)},
        "model": {"name": "llama"},
        "init_from": str(tmp_path / "model"),
        "learning_rate": 0.1,
        "parametrization": {"name": "completep"},
    }
    built = build(parse(config))
    assert built.model.embedding.shape[0] == vocabulary + 5
    assert built.shapes == {"vocab_size": vocabulary + 5, "context": 32}
    long = {**config, "data": {"context": 33, "tokenizer": str(path)}}
    with pytest.raises(UserError, match="needs context=33, and the weights have 32"):
        build(parse(long))
    as_bytes = {**config, "data": {"context": 8, "tokenizer": "bytes"}}
    with pytest.raises(UserError, match="needs vocab_size=256"):
        build(parse(as_bytes))


def test_a_tokenizer_of_the_hub_is_found_by_its_id(song, tmp_path, monkeypatch):
    asked = []

    def download(source, filename, **more):
        asked.append((source, filename))
        return song[1]

    monkeypatch.setattr("mupax.zoo.weights.hub.download", download)
    assert open_tokenizer("someone/words").vocabulary == song[2]
    assert set(asked) == {("someone/words", "tokenizer.json")}
    dataset = open_text(song[0], context=8, tokenizer="someone/words")
    assert dataset.out_features == song[2]
    assert dataset.tokenizer == song[1]
