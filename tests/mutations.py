"""Damage to files, as disks, networks and people do it. Not a test.

    rng = random.Random(seed)
    path, kind = mutate_one(folder, rng)

Every kind changes the file; `mutated` draws again where chance would leave it alone.
The long tests take their seeds from MUPAX_SEED on, 1000 by default.
"""

import gc
import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest

Mutation = Callable[[bytes, random.Random], bytes | None]


def _flip_bit(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    place = rng.randrange(len(out))
    out[place] ^= 1 << rng.randrange(8)
    return bytes(out)


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(2, 20)):
        data = _flip_bit(data, rng)
    return data


def _set_byte(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _change_digit(data: bytes, rng: random.Random) -> bytes:
    """Another digit in the place of one: still valid, and wrong."""
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return _set_byte(data, rng)
    out = bytearray(data)
    out[rng.choice(places)] = rng.choice(b"0123456789")
    return bytes(out)


def _zeros(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    length = rng.randint(1, min(512, len(data) - start))
    return data[:start] + bytes(length) + data[start + length :]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _cut_out(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[rng.randint(start + 1, len(data)) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    """A piece twice, as an append that was tried again."""
    start = rng.randrange(len(data))
    end = rng.randint(start + 1, len(data))
    return data[:end] + data[start:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.randint(1, 40)) + data[place:]


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, max(1, min(len(data), 4096))))


def _nested(data: bytes, rng: random.Random) -> bytes:
    """JSON that is deeper than parsers go."""
    return b"[" * 100_000


def _other_json(data: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"{}", b"[]", b"null", b"3", b'"text"', b"{}\n{}\n", b"NaN"])


def _empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def _delete(data: bytes, rng: random.Random) -> None:
    return None


MUTATIONS: dict[str, Mutation] = {
    "flip a bit": _flip_bit,
    "flip bits": _flip_bits,
    "set a byte": _set_byte,
    "change a digit": _change_digit,
    "zeros": _zeros,
    "truncate": _truncate,
    "cut out": _cut_out,
    "double": _double,
    "insert": _insert,
    "noise": _noise,
    "nested": _nested,
    "other JSON": _other_json,
    "empty": _empty,
    "delete": _delete,
}


def mutated(data: bytes, rng: random.Random) -> tuple[bytes | None, str]:
    """Other content, and the kind of damage; None is a deleted file."""
    while True:
        kind = rng.choice(list(MUTATIONS))
        if not data and kind not in ("noise", "nested", "other JSON", "delete"):
            continue
        changed = MUTATIONS[kind](data, rng)
        if changed != data:
            return changed, kind


def mutate(path: pathlib.Path, rng: random.Random) -> str:
    """Damage a file; the kind of damage."""
    content, kind = mutated(path.read_bytes(), rng)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return kind


def mutate_one(folder: pathlib.Path, rng: random.Random) -> tuple[pathlib.Path, str]:
    """Damage one of the files below a folder; which, and the kind of damage."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    return path, mutate(path, rng)


FIRST = int(os.environ.get("MUPAX_SEED", "1000"))  # seed of the long tests


def seeds(few: int, several: int) -> list[Any]:
    """Seeds of a test, and of its long form: parameters for pytest."""
    later = range(FIRST, FIRST + several)
    return [range(few), pytest.param(later, marks=pytest.mark.long)]


def many(
    check: Callable[..., str], folder: pathlib.Path, seeds: range, *args: Any
) -> dict[str, int]:
    """Run a check under many seeds, each in a folder of its own.

    Args:
      check: takes a new folder, a seed and `args`; returns how it ended.
      folder: where the folders are made.
      seeds: of the checks.
      *args: for the check.

    Returns:
      How often it ended in which way; also printed.
    """
    counts: dict[str, int] = {}
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        try:
            end = check(place, seed, *args)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        counts[end] = counts.get(end, 0) + 1
        shutil.rmtree(place)
    gc.collect()  # what a failed read left complains here, and not in another test
    print(counts)
    return counts
