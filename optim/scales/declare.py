"""Declared axes: what the user says of parameters, where no program tells it."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .paths import open_numbers
from .patterns import Pattern

_LAYERS = "layers"  # the name of an axis whose size is a number of layers
_HEADS = "heads"  # the name of an axis that counts heads of attention
_NAMES = re.compile(r"\w+")
_FORMS = (
    "'in -> out' for a kernel, 'out <- in' for one that stores its outputs first, 'd' "
    "for a bias or gain, 'vocab: d' for a table of which rows are looked up, and "
    "'layers: in -> out' or 'experts: in -> out' for stacked copies"
)


@dataclasses.dataclass(frozen=True)
class AxesOf:
    """The axes of one parameter."""

    in_axes: tuple[int, ...]  # that are summed over; for a table, those of its entries
    out_axes: tuple[int, ...]  # that index outputs, or entries of a vector
    copies: tuple[int, ...]  # that count copies, e.g. layers or experts
    layers: int | None  # that counts layers
    table: bool  # whether `in_axes` counts the entries of a table
    insists: bool  # whether the declaration holds even if the program says otherwise
    text: str  # the declaration
    heads: int | None = None  # that counts heads of attention

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.in_axes) + len(self.out_axes) + len(self.copies)

    def head_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of one head; () if no axis is called `heads`."""
        if self.heads is None or not self.in_axes:
            return ()
        return tuple(1 if a == self.heads else n for a, n in enumerate(shape))


class Declarations:
    """Declared axes of parameters, for `infer_scales(..., axes=...)`.

    Needed only where no forward pass tells them: without `inputs`, for every
    parameter; with `inputs`, for those that enter an operation that cannot be read.

    Args:
      axes: {regular expression: names of axes, in the order of the array}. The first
        expression that is found in a parameter's path counts. The axes left of an arrow
        are summed over: "in -> out", "h w in -> out"; with the outputs first, "out <-
        in". A bias or gain is "d", a table whose rows are looked up "vocab: d". Copies
        stand before a colon: "experts: in -> out", "layers: -> d" for a stacked bias.
        `layers` counts the depth, `heads` the heads of a kernel: "d -> heads size". A
        final "!" says that you are sure, if the program seems to say something else.
      branches: regular expression of the parameters inside residual branches, whose
        model multiplies its branches itself. Not needed with `inputs`.

    A plain mapping is the same as `declare(mapping)`.

    Raises:
      ValueError: an expression is wrong, or a declaration cannot be parsed.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def net(n, layers):
      ...     return {"embed": jnp.ones((100, n)), "up": jnp.ones((layers, n, n)),
      ...             "gain": jnp.ones((layers, n)), "head": jnp.ones((n, 10))}
      >>> axes = optim.declare({
      ...     "embed": "vocab: d", "up": "layers: d -> f",
      ...     "gain": "layers: -> d", "head": "d -> classes"}, branches="up|gain")
      >>> scales = optim.infer_scales(net(64, 2), net(256, 8), axes=axes,
      ...                             parametrization="depth_mup")
      >>> scales
      Scales(embed: input, gain: vector, head: output, up: hidden)
      >>> scales["up"].width_in, scales["up"].depth
      (4.0, 4.0)

    Source: roles as in Tensor Programs V, Table 8.
    """

    def __init__(self, axes: Mapping[str, str], *, branches: str | None = None):
        if not isinstance(axes, Mapping):
            raise ValueError(
                f"axes={axes!r} must be {{regular expression: names of axes}}; write "
                f"{_FORMS}"
            )
        self._axes = [(Pattern("axes", p), parsed(p, a)) for p, a in axes.items()]
        self._branches = Pattern("branches", branches)

    def __bool__(self) -> bool:
        return bool(self._axes)

    def axes(self, path: str, shape: tuple[int, ...]) -> AxesOf | None:
        """The axes of a parameter, by the first pattern that matches its path.

        Raises:
          ValueError: the declaration has another number of axes than the parameter.
        """
        found = next((a for p, a in self._axes if p.matches(path)), None)
        if found is not None and found.rank != len(shape):
            raise ValueError(
                f"{path!r} has the shape {shape}, but {found.text!r} names "
                f"{found.rank} axes; write one name for each of its {len(shape)} axes"
            )
        return found

    def in_branch(self, path: str) -> bool:
        """Whether the parameter is declared to be inside a residual branch."""
        return self._branches.matches(path)

    def check(self, paths: Iterable[str]) -> None:
        """Raise a `ValueError` if a pattern decides for no parameter."""
        paths = list(paths)
        for pattern in (*(p for p, _ in self._axes), self._branches):
            if not pattern.hit and (late := [p for p in paths if pattern.matches(p)]):
                raise ValueError(
                    f"axes={pattern.expression!r} decides for no parameter: an earlier "
                    f"expression already matches {late[0]!r}; put this one before it"
                )
            pattern.check(paths)

    def depth(
        self, small: Mapping[str, tuple[int, ...]], large: Mapping[str, tuple[int, ...]]
    ) -> float:
        """The ratio of the numbers of layers, by lists and by axes called `layers`.

        Raises:
          ValueError: the layers of two parameters grow by different ratios.
        """
        before, after = self._count(small), self._count(large)
        ratios = {
            name: after[name] / before[name]
            for name in after
            if before.get(name) and after[name] != before[name]
        }
        if len(set(ratios.values())) > 1:
            one, *rest = ratios
            other = next(name for name in rest if ratios[name] != ratios[one])
            raise ValueError(
                f"the number of layers like {one!r} grows {ratios[one]:g}x and that of "
                f"{other!r} {ratios[other]:g}x; use one ratio for all, or pass "
                "inputs=(x,), so that the residual additions are counted"
            )
        return next(iter(ratios.values()), 1.0)

    def _count(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for path, shape in shapes.items():
            axes, name = self.axes(path, shape), open_numbers(path)
            layers = 1 if axes is None or axes.layers is None else shape[axes.layers]
            counts[name] = counts.get(name, 0) + layers
        return counts


declare = Declarations


def declared(axes: "Mapping[str, str] | Declarations | None") -> Declarations:
    """The declarations that an argument `axes` stands for."""
    return axes if isinstance(axes, Declarations) else Declarations(axes or {})


def parsed(pattern: str, text: Any) -> AxesOf:
    """Parse the declaration of one pattern, or path."""
    wrong = f"axes={{{pattern!r}: {text!r}}} cannot be read; write {_FORMS}"
    if not isinstance(text, str):
        raise ValueError(wrong)
    *lead, rest = (part.split() for part in text.removesuffix("!").split(":"))
    index = [word for part in lead for word in part]
    arrows = [word for word in rest if word in ("->", "<-")]
    words = [word for word in (*index, *rest) if word not in arrows]
    readable = all(map(_NAMES.fullmatch, words)) and all(lead)
    if len(lead) > 2 or len(arrows) > 1 or not readable:
        raise ValueError(wrong)
    if _HEADS in index:
        raise ValueError(
            f"axes={{{pattern!r}: {text!r}}}: heads are outputs or inputs of a kernel, "
            "not copies of it; write 'd -> heads size' or 'heads size -> d', and "
            "optim.muon(..., per_head=True)"
        )
    split = rest.index(arrows[0]) if arrows else 0
    first = tuple(range(len(index), len(index) + split))
    last = tuple(range(len(index) + split, len(words)))
    into, out = (last, first) if arrows == ["<-"] else (first, last)
    table = bool(lead) and not arrows
    copies = len(index) - len(lead[-1]) if table else len(index)
    return AxesOf(
        in_axes=tuple(range(copies, len(index))) if table else into,
        out_axes=out,
        copies=tuple(range(copies)),
        layers=index.index(_LAYERS) if _LAYERS in index[:copies] else None,
        table=table,
        insists=text.endswith("!"),
        text=text,
        heads=words.index(_HEADS) if _HEADS in words else None,
    )
