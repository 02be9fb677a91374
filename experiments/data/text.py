"""Text as windows of tokens: bytes, or tokens of a Hugging Face tokenizer."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mupax.zoo.weights import hub, remote
from mupax.zoo.weights.files import read_bytes

from .. import memory
from ..checks import whole
from ..errors import UserError, import_extra, reason
from .dataset import Batch, Dataset
from .pipeline import Workers

_BYTES = 256
_TOKENIZER = "tokenizer.json"
_LARGEST = 2**30  # bytes of it
_TEST_SHARE = 10  # one window in ten, if there is no test file
_ENCODED = 64  # bytes of memory that a tokenizer takes for a byte of text, about


class Bytes:
    """The bytes of a file, which are read when they are taken.

    Not a memory map: if the file were truncated, it would end the process by SIGBUS.
    Nor an open file: a directory may have more of them than a process may open.
    """

    def __init__(self, path: pathlib.Path):
        """The file must not change: reading raises an error if it did."""
        self._path, self._known = path, _version(path.stat())

    def __len__(self) -> int:
        return self._known[0]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        try:
            with self._path.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), stop - start, start)
                version = _version(os.fstat(file.fileno()))
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {reason(error)}") from error
        if version != self._known:
            raise UserError(
                f"{self._path} was changed while it was open; restore it, and run the "
                "same command to resume"
            )
        return np.frombuffer(content, np.uint8)


def _version(status: os.stat_result) -> tuple[int, int]:
    """Size, and time of the last change, of a file."""
    return status.st_size, status.st_mtime_ns


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Windows of context + 1 tokens. The last token of a window starts the next one.

    Every token except the first is predicted once. No window crosses files; the rest of
    each file is dropped.

    Attributes:
      files: the tokens of each file.
      context: tokens that a model reads at once.
      start: first window, counted over all files.
      stop: the window after the last.
    """

    files: Sequence[np.ndarray | Bytes]
    context: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """The index of each file's first window."""
        counts = [window_count([file], self.context) for file in self.files]
        return np.cumsum([0, *counts[:-1]])

    def __call__(self, indices: np.ndarray, _: np.ndarray) -> Batch:
        """The windows of these indices: "tokens", int32 (b, context + 1)."""
        window = indices + self.start
        file_numbers = np.searchsorted(self._firsts, window, side="right") - 1
        first = (window - self._firsts[file_numbers]) * self.context
        out = np.empty((len(indices), self.context + 1), np.int32)
        for row, file, start in zip(out, file_numbers, first, strict=True):
            row[...] = self.files[file][start : start + self.context + 1]
        return {"tokens": out}


def window_count(files: Sequence[np.ndarray | Bytes], context: int) -> int:
    """The number of windows of context + 1 tokens in the tokens of files."""
    return sum(max(0, len(tokens) - 1) // context for tokens in files)


def open_text(
    path: str | os.PathLike[str],
    *,
    context: int,
    tokenizer: str | os.PathLike[str] = "bytes",
    test_path: str | os.PathLike[str] | None = None,
    workers: Workers | None = None,
) -> Dataset:
    """Open text as a dataset.

    Args:
      path: a file, or a directory of *.txt files, which are read in the order of their
        names. They must not change while the dataset is open. Bytes are read window by
        window; a tokenizer reads the whole text. Text is read as it is: line ends stay,
        and no special tokens are added.
      context: tokens that a model reads at once.
      tokenizer: see `open_tokenizer`.
      test_path: test text; by default the last tenth of the windows of `path`.
      workers: prepare batches.

    Raises:
      UserError: a file is missing, not UTF-8 or too short, or the tokenizer does not
        load.
    """
    whole()("context", context)
    if not os.fspath(path):
        raise UserError('"text:" lacks a path; give text:FILE or text:DIRECTORY')
    if test_path is not None and not os.fspath(test_path):
        raise UserError("test_path is empty; give a file or directory, or leave it out")
    opened = open_tokenizer(tokenizer)
    files = [_tokens(text, opened) for text in _files(path)]
    total = window_count(files, context)
    if test_path is None:
        if total < 2:
            raise UserError(
                f"{path} holds {total} windows of {context + 1} tokens, which is too "
                "few to train and test on; "
                + ("make context smaller." if any(map(len, files)) else "it is empty.")
            )
        cut = total - max(1, total // _TEST_SHARE)
        train = Windows(files, context, 0, cut)
        test = Windows(files, context, cut, total)
    else:
        test_files = [_tokens(text, opened) for text in _files(test_path)]
        train = Windows(files, context, 0, total)
        test = Windows(test_files, context, 0, window_count(test_files, context))
        for place, windows in ((path, train), (test_path, test)):
            if not len(windows):
                raise UserError(
                    f"{place} is shorter than one window of {context + 1} tokens; make "
                    "context smaller."
                )
    name = f"text:{os.fspath(path)}"
    return _dataset(name, opened, train, test, workers or Workers())


def _dataset(
    name: str, tokenizer: "Tokenizer", train: Windows, test: Windows, workers: Workers
) -> Dataset:
    return Dataset(
        name=name,
        kind="text",
        out_features=tokenizer.vocabulary,
        input_shape=(train.context,),
        train_size=len(train),
        test_size=len(test),
        load_train=train,
        load_plain=train,
        load_test=test,
        workers=workers,
        decode=tokenizer.decode,
        tokenizer=tokenizer.file,
        read=tuple(functools.partial(x, _=np.empty(0)) for x in (train, test)),
    )


_FAKE = 100  # windows of random tokens, repeated 100 times


def is_fake_text(name: str) -> bool:
    """Whether a name is that of random tokens, e.g. "fake:2048:50304"."""
    kind, *sizes = name.split(":")
    return kind == "fake" and len(sizes) == 2 and all(map(str.isdigit, sizes))


def fake_text(name: str, workers: Workers) -> Dataset:
    """Random tokens, for estimates and benchmarks.

    Args:
      name: "fake:CONTEXT:VOCABULARY".
      workers: prepare batches.
    """
    context, vocabulary = map(int, name.split(":")[1:])
    if min(context, vocabulary) < 1:
        raise UserError(f"{name!r}: context and vocabulary must be 1 or more.")
    if vocabulary >= 2**31:
        raise UserError(f"{name!r}: vocabulary must be less than 2^31.")
    memory.check(4 * _FAKE * context, f"{name!r}", "make context smaller")
    rng = np.random.default_rng(0)
    files = [rng.integers(0, vocabulary, (_FAKE * context + 1,), np.int32)] * _FAKE
    total = _FAKE * _FAKE
    cut = total - total // _TEST_SHARE
    train, test = Windows(files, context, 0, cut), Windows(files, context, cut, total)
    numbers = Tokenizer(
        vocabulary,
        encode=lambda text, _: list(map(int, text.split())),
        decode=lambda ids: " ".join(map(str, ids)),
    )
    return _dataset(name, numbers, train, test, workers)


def _files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    place = remote.local(path)
    try:
        paths = sorted(place.glob("*.txt")) if place.is_dir() else [place]
        if files := [file for file in paths if file.is_file()]:
            for file in files:
                file.open("rb").close()
            return files
        folder = place.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UserError(f"{str(place)!r} cannot be read: {error}.") from error
    what = (
        f"{place} holds no *.txt file" if folder else f"there is no text file {place}"
    )
    raise UserError(f"{what}; check the path")


class Tokenizer(NamedTuple):
    """Text as tokens, and back.

    Attributes:
      vocabulary: number of tokens.
      encode: maps text to tokens; True as its second argument puts the special tokens
        of the beginning before them.
      decode: maps tokens to text; special tokens are shown.
      file: its tokenizer.json; None for bytes.
    """

    vocabulary: int
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int] | np.ndarray], str]
    file: pathlib.Path | None = None


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer by name.

    The normalizer, pre-tokenizer and vocabulary of a tokenizer.json apply. Its
    truncation, padding and BPE dropout do not: they would drop, add or change tokens.

    Args:
      name: "bytes"; the path of a Hugging Face tokenizer.json, or of a directory that
        holds one, e.g. of a trained model; or the id of a repository on the hub, e.g.
        "HuggingFaceTB/SmolLM2-135M".

    Raises:
      UserError: there is no such tokenizer, or it cannot be read.
    """
    if name == "bytes":
        return Tokenizer(
            _BYTES,
            encode=lambda text, _: list(text.encode()),
            decode=lambda t: bytes(np.asarray(t, np.uint8)).decode(errors="replace"),
        )
    if not os.fspath(name):
        raise UserError(
            'tokenizer is empty; give "bytes", the path of a tokenizer.json, or the id '
            "of a repository on the hub"
        )
    file = _tokenizer_file(name)
    tokenizers = import_extra("tokenizers", "text", f"reading {file}")
    with _working(file):
        loaded = tokenizers.Tokenizer.from_buffer(read_bytes(file, _LARGEST))
        loaded.no_truncation()
        loaded.no_padding()
        if hasattr(loaded.model, "dropout"):
            loaded.model.dropout = None
        # The number of tokens may be smaller, if ids have gaps.
        vocabulary = 1 + max(loaded.get_vocab().values(), default=-1)
    if vocabulary < 1:
        raise UserError(f"the tokenizer {name} has no tokens")

    def encode(text: str, special: bool) -> list[int]:
        with _working(file):
            found = loaded.encode(text, add_special_tokens=special)
        if not special:
            return found.ids
        # Special tokens of the end would end the text.
        added = found.special_tokens_mask
        last = max((i for i, new in enumerate(added) if not new), default=-1)
        return found.ids[: last + 1]

    def decode(tokens: Sequence[int] | np.ndarray) -> str:
        ids = [int(token) for token in tokens]
        return loaded.decode(ids, skip_special_tokens=False)

    return Tokenizer(vocabulary, encode, decode, file)


def _tokenizer_file(name: str | os.PathLike[str]) -> pathlib.Path:
    path = remote.local(name)
    if path.is_dir():
        path = path / _TOKENIZER
    if not path.is_file() and hub.is_id(name) and path.suffix != ".json":
        try:
            file = hub.download(str(name), _TOKENIZER)
        except ValueError as error:
            raise UserError(f"The tokenizer {name}: {error}.") from None
        assert file is not None
        return file
    if not path.is_file():
        raise UserError(
            f'there is no tokenizer {path}; give "bytes", the path of a '
            "tokenizer.json, or the id of a repository on the hub"
        )
    return path


def _tokens(path: pathlib.Path, tokenizer: Tokenizer) -> np.ndarray | Bytes:
    """The tokens of a text file; without a tokenizer, its bytes, read later."""
    if tokenizer.file is None:
        return Bytes(path)
    memory.check(
        _ENCODED * path.stat().st_size,
        f"The tokens of {path}",
        "use a smaller text, or bytes",
    )
    try:
        # `read_text` would change line ends.
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error}); convert it, or use bytes"
        ) from error
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    return np.array(tokenizer.encode(text, False), dtype)


@contextlib.contextmanager
def _working(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors of a tokenizer into a UserError."""
    try:
        yield
    except BaseException as error:
        # The library also raises PanicException, which is not an Exception.
        if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
            raise
        raise UserError(
            f"{os.fspath(path)} cannot be used as a tokenizer ({reason(error)}); give "
            "another tokenizer.json"
        ) from error
