"""What one program of the table is, and the right answer.

A program is a function of the width `n` (and the depth `L`, where it has one). It
returns the model and its inputs, and optionally the forward pass. The right answer maps
regular expressions, each of which matches whole paths, to

    I  sums over a fixed number, its outputs grow
    H  sums over a width, its outputs grow
    O  sums over a width, its outputs do not grow
    V  sums over nothing, has an entry of each unit
    F  nothing of it grows

and, where depth grows, "b" after the letter for a parameter inside residual branches,
"e" for one that ends a branch and carries its multiplier, "s" if some segments of it
do, then "a" if all layers share it, and "m" if it multiplies the stream itself in each
layer or is added to it. `carries` maps patterns to the factors of logits and readouts that parameters
carry; all others carry none. `asks` is the error of a program that cannot be read, and
`make(..., remedy=True)` follows its advice.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROLES = {"I": "input", "H": "hidden", "O": "output", "V": "vector", "F": "fixed"}


@dataclasses.dataclass(frozen=True)
class Program:
    """One row: `make(n)` or `make(n, L)`, and the letters of its parameters."""

    name: str
    make: Callable[..., tuple[Any, ...]]
    right: dict[str, str]
    deep: bool
    carries: dict[str, float]
    asks: str
    point: str = ""  # the name of the parametrization, where the table says it

    def models(
        self, width: int = 32, depth: int = 6, **remedy: bool
    ) -> tuple[Any, Any, tuple[Any, ...], Any]:
        """Base (of width 8 and depth 2), target, inputs, and `call`."""
        sizes = ((8, 2), (width, depth)) if self.deep else ((8,), (width,))
        small, large = (self.make(*each, **remedy) for each in sizes)
        if len(large) == 2:
            return small[0], large[0], large[1], None
        if isinstance(large[0], dict | list):
            return (small[2], small[0]), (large[2], large[0]), large[1], None
        return small[0], large[0], large[1], large[2]

    def letter(self, path: str) -> str:
        """The right answer for a path."""
        found = [v for k, v in self.right.items() if re.fullmatch(k, path)]
        assert len(found) == 1, (path, found)
        return found[0]

    def carried(self, path: str) -> float:
        """The right factor that a path carries."""
        found = [v for k, v in self.carries.items() if re.fullmatch(k, path)]
        return found[0] if found else 1.0


ALL: list[Program] = []


def program(
    right: dict[str, str],
    *,
    deep: bool = False,
    carries: dict[str, float] | None = None,
    asks: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program to the table."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        ALL.append(Program(make.__name__, make, right, deep, carries or {}, asks))
        return make

    return add


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """An input of numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """An input of tokens."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def zeros(**shapes: Any) -> dict[str, Any]:
    """Parameters of these shapes; nested where a value is a dictionary."""
    return {
        k: zeros(**v) if isinstance(v, dict) else jnp.zeros(v)
        for k, v in shapes.items()
    }


def layers(number: int, **shapes: Any) -> list[dict[str, Any]]:
    """A list of blocks with parameters of these shapes."""
    return [zeros(**shapes) for _ in range(number)]
