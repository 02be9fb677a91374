"""Text as windows of tokens: bytes, or the pieces of a Hugging Face tokenizer."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Array, Int32

from .. import memory
from ..errors import UserError
from .pipeline import Hosts, Workers, check_batch, iterate, run_through

Batch = dict[str, np.ndarray]

_BYTES = 256
_TEST_SHARE = 10  # one window in so many, where no test file is given


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Windows of context + 1 tokens, whose last is the next one's first.

    So every token but the first is predicted once. No window crosses from one file
    into another, and what is left over at a file's end is dropped.

    Attributes:
      files: the tokens of each file.
      context: tokens that a model sees at once.
      start: the first window, counted over all files.
      stop: the window after the last.
    """

    files: Sequence[np.ndarray]
    context: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """The number of each file's first window."""
        counts = [window_count(file, self.context) for file in self.files]
        return np.cumsum([0, *counts[:-1]])

    def __call__(self, indices: np.ndarray, _: np.ndarray) -> Batch:
        """The windows of these numbers: "tokens", int32 (b, context + 1)."""
        window = indices + self.start
        which = np.searchsorted(self._firsts, window, side="right") - 1
        first = (window - self._firsts[which]) * self.context
        out = np.empty((len(indices), self.context + 1), np.int32)
        for row, file, at in zip(out, which, first, strict=True):
            row[...] = self.files[file][at : at + self.context + 1]
        return {"tokens": out}


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """The training windows of a text.

    Attributes:
      name: as it was asked for.
      tokens: shape (windows, context + 1).
      num_classes: size of the vocabulary.
    """

    name: str
    tokens: Int32[np.ndarray, "windows tokens"]
    num_classes: int

    @property
    def examples(self) -> tuple[np.ndarray, ...]:
        """The windows."""
        return (self.tokens,)

    @property
    def model_options(self) -> dict[str, Any]:
        """Vocabulary and context."""
        return {"vocab_size": self.num_classes, "context": self.tokens.shape[1] - 1}

    def inputs(self, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        """All tokens but the last, and all but the first."""
        return batch[0][:, :-1], batch[0][:, 1:]


@dataclasses.dataclass(frozen=True, eq=False)
class TextDataset:
    """Windows of text: "tokens", int32 (b, context + 1), for `data.Dataset`.

    Attributes:
      name: as it was asked for.
      out_features: size of the vocabulary.
      input_shape: (context,).
      decode: tokens to text.
      kind: "text".
    """

    name: str
    out_features: int
    input_shape: tuple[int]
    decode: Callable[[Sequence[int] | np.ndarray], str]
    _train: Windows
    _test: Windows
    _workers: Workers
    kind: str = "text"

    @property
    def train_size(self) -> int:
        return len(self._train)

    @property
    def test_size(self) -> int:
        return len(self._test)

    def spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """As `Dataset.spec`."""
        shape = (batch_size, self.input_shape[0] + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}

    def train(
        self,
        batch_size: int,
        seed: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> grain.DatasetIterator[Batch]:
        """As `Dataset.train`."""
        check_batch(batch_size, self.train_size, self.name)
        return iterate(
            self.train_size,
            self._train,
            batch_size,
            seed,
            hosts=Hosts.of(process_index, process_count),
            workers=self._workers,
        )

    def test(
        self,
        batch_size: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> Iterator[Batch]:
        """As `Dataset.test`."""
        return run_through(
            self.test_size,
            self._test,
            batch_size,
            hosts=Hosts.of(process_index, process_count),
            workers=self._workers,
        )

    def whole(self) -> TextData:
        """The training split in memory, in the order of the text.

        Raises:
          UserError: it does not fit.
        """
        memory.check(
            4 * self.train_size * (self.input_shape[0] + 1),
            f"The windows of {self.name}",
            "take less text",
        )
        every = np.arange(self.train_size)
        tokens = self._train(every, np.empty((self.train_size, 0)))["tokens"]
        return TextData(self.name, tokens, self.out_features)

    def normalize(self, batch: dict[str, Array]) -> dict[str, Array]:
        """The batch as it is."""
        return batch


def window_count(tokens: np.ndarray, context: int) -> int:
    """How many windows of context + 1 tokens a file holds."""
    return max(0, len(tokens) - 1) // context


def open_text(
    path: str | os.PathLike[str],
    *,
    context: int,
    tokenizer: str | os.PathLike[str] = "bytes",
    test_path: str | os.PathLike[str] | None = None,
    workers: Workers | None = None,
) -> TextDataset:
    """Text as a dataset.

    Args:
      path: a file, or a directory whose *.txt files are read in the order of their
        names. Bytes are mapped into memory, and not read; other tokens are made of
        the whole text at once.
      context: tokens that a model sees at once.
      tokenizer: "bytes", or a tokenizer.json of Hugging Face.
      test_path: test text; None: the last tenth of the windows of `path`.
      workers: what prepares batches.

    Raises:
      UserError: a file that is not there, is not UTF-8 or is too short, or a
        tokenizer that does not load.
    """
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise UserError(f"context is {context!r}; it must be an integer, 1 or more.")
    vocabulary, encode, decode = _tokenizer(tokenizer)
    files = [encode(file) for file in _files(path)]
    total = _total(files, context)
    if test_path is None:
        if total < 2:
            raise UserError(
                f"{path} holds {total} windows of {context + 1} tokens, which is too "
                "few to train and test on; make context smaller."
            )
        cut = total - max(1, total // _TEST_SHARE)
        train = Windows(files, context, 0, cut)
        test = Windows(files, context, cut, total)
    else:
        others = [encode(file) for file in _files(test_path)]
        train = Windows(files, context, 0, total)
        test = Windows(others, context, 0, _total(others, context))
        for place, windows in ((path, train), (test_path, test)):
            if not len(windows):
                raise UserError(
                    f"{place} is shorter than one window of {context + 1} tokens; make "
                    "context smaller."
                )
    return TextDataset(
        name=f"text:{os.fspath(path)}",
        out_features=vocabulary,
        input_shape=(context,),
        decode=decode,
        _train=train,
        _test=test,
        _workers=workers or Workers(),
    )


_FAKE = 100  # windows of noise, repeated as often; a tenth of all to test


def is_fake_text(name: str) -> bool:
    """Whether a name is that of noise of tokens, as "fake:2048:50304"."""
    kind, *sizes = name.split(":")
    return kind == "fake" and len(sizes) == 2 and all(map(str.isdigit, sizes))


def fake_text(name: str, workers: Workers) -> TextDataset:
    """Tokens drawn at random, for plans and benchmarks.

    Args:
      name: "fake:CONTEXT:VOCABULARY".
      workers: what prepares batches.

    Raises:
      UserError: a size that is not positive.
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
    return TextDataset(
        name=name,
        out_features=vocabulary,
        input_shape=(context,),
        decode=lambda ids: " ".join(map(str, ids)),
        _train=Windows(files, context, 0, cut),
        _test=Windows(files, context, cut, total),
        _workers=workers,
    )


def _total(files: Sequence[np.ndarray], context: int) -> int:
    return sum(window_count(file, context) for file in files)


def _files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    place = pathlib.Path(path).expanduser()
    try:
        found = sorted(place.glob("*.txt")) if place.is_dir() else [place]
        files = [file for file in found if file.is_file()]
        if files:
            for file in files:
                file.open("rb").close()
            return files
        folder = place.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UserError(f"{str(place)!r} cannot be read: {error}.") from error
    raise UserError(
        f"{place} holds no *.txt file." if folder else f"There is no text file {place}."
    )


Encode = Callable[[pathlib.Path], np.ndarray]
Decode = Callable[[Sequence[int] | np.ndarray], str]


def _tokenizer(name: str | os.PathLike[str]) -> tuple[int, Encode, Decode]:
    """(size of the vocabulary, file to tokens, tokens to text)."""
    if name == "bytes":
        return _BYTES, _map_bytes, _text_of_bytes
    found = _load_tokenizer(pathlib.Path(name).expanduser())
    with _working(name):
        # Not the number of tokens: there may be gaps between them.
        vocabulary = 1 + max(found.get_vocab().values(), default=-1)
    if vocabulary < 1:
        raise UserError(f"The tokenizer {name} has no tokens.")
    dtype = np.min_scalar_type(vocabulary - 1)

    def encode(path: pathlib.Path) -> np.ndarray:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text ({error}); convert it, or use bytes."
            ) from error
        with _working(name):
            ids = found.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype)

    return vocabulary, encode, lambda t: found.decode([int(i) for i in t])


def _text_of_bytes(tokens: Sequence[int] | np.ndarray) -> str:
    return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")


def _map_bytes(path: pathlib.Path) -> np.ndarray:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _load_tokenizer(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise UserError(
            f'There is no tokenizer {path}; write "bytes", or the path of a '
            "tokenizer.json."
        )
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"To read {path} install tokenizers: pip install 'mupax[text]'."
        ) from error
    with _working(path):
        return tokenizers.Tokenizer.from_file(os.fspath(path))


@contextlib.contextmanager
def _working(path: str | os.PathLike[str]) -> Iterator[None]:
    """One sentence for whatever a tokenizer raises.

    Raises:
      UserError: the tokenizer is damaged, or none.
    """
    try:
        yield
    except BaseException as error:
        # It raises Exception itself, and its panics are no Exceptions.
        if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
            raise
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"{os.fspath(path)} is not a tokenizer.json that works: {said}."
        ) from error
