"""Regular expressions from the user, each of which must match some parameter."""

import difflib
import re
from collections.abc import Iterable

from .paths import open_numbers


class Pattern:
    """A regular expression, searched in parameter paths; None matches nothing."""

    def __init__(self, name: str, expression: str | None):
        self.name, self.expression = name, expression
        self.hit = False
        if expression is not None and not isinstance(expression, str):
            raise ValueError(
                f"{name}={expression!r} must be a regular expression, e.g. "
                "'blocks|norm' for paths with either word"
            )
        try:
            self._regex = None if expression is None else re.compile(expression)
        except re.error as error:
            raise ValueError(
                f"{name}={expression!r} is not a regular expression: {error}"
            ) from None

    def matches(self, path: str) -> bool:
        """Whether the expression is found in this path."""
        hit = self._regex is not None and self._regex.search(path) is not None
        self.hit |= hit
        return hit

    def check(self, paths: Iterable[str]) -> None:
        """Raise a `ValueError` with similar paths if no path has matched so far."""
        if self.expression is None or self.hit:
            return
        words = re.sub(r"[^\w/]+", " ", self.expression).strip()

        def alike(path: str) -> float:
            names = (path, *path.split("/"))
            return max(difflib.SequenceMatcher(None, words, n).ratio() for n in names)

        near = ", ".join(map(repr, sorted(paths, key=alike, reverse=True)[:6]))
        raise ValueError(
            f"{self.name}={self.expression!r} matches no parameter path; similar "
            f"paths are {near}"
        )


def pattern(*paths: str) -> str:
    """An anchored regular expression that matches these paths.

    Several paths that differ in numbers only are matched by one `\\d+`.

    Examples:
      >>> print(pattern("blocks/0/w", "blocks/1/w", "out.w"))
      ^(blocks/\\d+/w|out\\.w)$
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(open_numbers(path), []).append(path)
    shown = [
        re.escape(group[0])
        if len(group) == 1
        else re.escape(key).replace(r"\#", r"\d+")
        for key, group in groups.items()
    ]
    return f"^{shown[0]}$" if len(shown) == 1 else f"^({'|'.join(shown)})$"
