"""`explain`: print the scaling of every parameter before training."""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..apply.transforms import missing_multipliers, resolve
from ..rules.multipliers import Multipliers, carried, of_parts
from ..rules.roles import ParamScale, Role
from ..scales.paths import open_numbers
from ..scales.table import Scales

_HEAD = "path role base target init fwd lr eps wd family found".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Result of `explain`, which has an example; print it for a table.

    Attributes:
      scales: of the model, with its parametrization.
      optimizer: its name or family.
      rows: settings of each parameter, by path, as ratios to the base; of each segment
        where they differ, e.g. `"qkv[:, 0:64]"`.
    """

    scales: Scales
    optimizer: str
    rows: Mapping[str, Multipliers]

    def __repr__(self) -> str:
        roles = collections.Counter(scale.role for scale in self._parts.values())
        counted = ", ".join(f"{count} {role}" for role, count in roles.items())
        return (
            f"<Explanation: {resolve(self.scales).name}, {self.optimizer}, "
            f"{len(self.rows)} parameters ({counted}); print it for the table>"
        )

    @property
    def _parts(self) -> dict[str, ParamScale]:
        """The parameter or segment of each row."""
        parts: dict[str, ParamScale] = {}
        for scale in self.scales.values():
            parts |= zip(scale.labels, scale.parts, strict=True)
        parts |= self.scales
        return {name: parts[name] for name in self.rows}

    def __str__(self) -> str:
        title, *notes = self._notes()
        legend = self._legend()
        columns = list(zip(_HEAD, *self._table(), strict=True))
        # The last two are often the same for every parameter.
        alike = [c for c in columns[-2:] if len(set(c[1:])) == 1]
        columns = [c for c in columns if c not in alike]
        if alike:
            said = ", ".join(f"{name} {cell}" for name, cell, *_ in alike)
            notes.insert(0, f"every parameter: {said}")
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([title, "", *lines, "", *legend, *notes])

    def _table(self) -> list[tuple[str, ...]]:
        """The cells of every row. Rows that differ in numbers of blocks share one."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for path, scale in self._parts.items():
            row, shapes = self.rows[path], (scale.base_shape, scale.shape)
            numbers = row.init_std, row.forward, row.learning_rate, row.eps
            cells = (
                scale.role,
                *("x".join(map(str, shape)) or "()" for shape in shapes),
                *(f"{x:.4g}" for x in (*numbers, row.weight_decay)),
                *(row.family, scale.origin),
            )
            name = path + (" *" if scale.in_branch else "")
            alike.setdefault((_NUMBERS.sub("#", name), *cells), []).append(name)
        kinds = collections.Counter(
            name for (name, *_), names in alike.items() if len(names) > 1
        )
        # "#" stands for the numbers of all blocks, unless other rows have some of them.
        return [
            (name if len(names) > 1 and kinds[name] == 1 else _shared(names), *cells)
            for (name, *cells), names in alike.items()
        ]

    def _legend(self) -> list[str]:
        """What the columns mean, and the marks that appear."""
        parts = self._parts.values()
        marks = {
            "*: in a residual branch": any(part.in_branch for part in parts),
            "fixed: no axis grows (it is trained)": any(
                part.role == Role.FIXED for part in parts
            ),
        }
        return [
            "init: initial size, fwd: factor in the forward pass, lr: learning rate, "
            "eps: ε, wd: weight decay",
            *filter(None, ["; ".join(mark for mark, on in marks.items() if on)]),
        ]

    def _notes(self) -> list[str]:
        """The title, and the notes below the table."""
        scales, point = self.scales, resolve(self.scales)
        notes = [f"{point.name}, {self.optimizer}; every number is a ratio to the base"]

        def having(where: Callable[[ParamScale], Any]) -> str:
            found = (s for s in scales.values() if any(map(where, s.parts)))
            return ", ".join(dict.fromkeys(open_numbers(s.path) for s in found))

        def stream(depth: float) -> str:
            return having(lambda s: s.in_branch and s.depth == depth)

        depths = {s.depth for w in scales.values() for s in w.parts if s.in_branch}
        if len(depths) > 1:
            notes.append(
                "residual streams get deeper by different factors M: "
                + "; ".join(f"{m:g} ({stream(m)})" for m in sorted(depths))
            )
        if shared := having(lambda s: s.shared != 1):
            notes.append(f"shared by layers, whose gradients add up: {shared}")
        if on_stream := having(lambda s: s.on_stream):
            notes.append(
                "on the stream itself in each layer, so that changes add up: "
                + on_stream
            )
        told = having(lambda s: s.in_branch and s.origin == "declared")
        if carry := having(lambda s: carried(s, point) != 1):
            notes.append(
                f"these carry factors of branches, logits or readout that {point.name} "
                f"needs and the model does not have: {carry}"
            )
        elif told and (scales.depth != 1 or point.alpha):
            notes.append(
                "your model must multiply branches (*) by "
                f"{point.branch_multiplier(scales.depth):.4g}·a (a·M^-{point.alpha:g}, "
                f"M = {scales.depth:g})"
            )
        if missing := missing_multipliers(scales):
            notes.append(missing)
        if point.richness != 1:
            notes.append(f"the model divides its output by μ0 = {point.richness:g}")
        notes.append(f"init, fwd, lr, eps: {point.citation}")
        if point.scaled and self.optimizer != "adafactor":
            notes.append("wd: such that lr·wd is the same at every size")
        for path, module in scales.modules.items():
            factors = [f"{name} {x:g}" for name, x in vars(module).items() if x != 1]
            if factors:
                notes.append(f"{open_numbers(path)}: also times {', '.join(factors)}")
        return [*dict.fromkeys(notes), *scales.training.describe()]


# Numbers of blocks: those that end a name, as in Linen's "Dense_1/kernel".
_NUMBERS = re.compile(r"\d+(?=/)")


def _shared(names: list[str]) -> str:
    """One name for names that differ in numbers of blocks: b/0/w, b/2/w: b/0,2/w."""
    each = zip(*map(_NUMBERS.findall, names), strict=True)
    return _NUMBERS.sub(lambda _: ",".join(dict.fromkeys(next(each))), names[0])


def explain(scales: Scales, optimizer: str = "adam", **options: Any) -> Explanation:
    """Tabulate the role, initial size and multipliers of every parameter.

    Whether an optimizer applies them is a question to `check_chain`.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      optimizer: its name, e.g. "adamw", or its family.
      **options: as in `optim.multipliers`, for optimizers of hidden matrices.

    Raises:
      ValueError: unknown parametrization or optimizer, or depth that the
        parametrization cannot act on.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> print(optim.explain(scales, optimizer="adamw"))
      mup, adamw; every number is a ratio to the base
      <BLANKLINE>
      path  role    base  target  init  fwd  lr    eps   wd
      -----------------------------------------------------
      in    input   8x4   8x16    1     1    1     0.25  1
      out   output  4x2   16x2    0.25  1    0.25  1     4
      <BLANKLINE>
      init: initial size, fwd: factor in the forward pass, lr: learning rate, eps: ε, \
wd: weight decay
      every parameter: family adam, found declared
      init, fwd, lr, eps: Yang et al. 2022, Tensor Programs V (arXiv:2203.03466), \
Table 3
      wd: such that lr·wd is the same at every size

    Source: docs/rules.md derives every number.
    """
    point = resolve(scales)
    rows: dict[str, Multipliers] = {}
    for scale in scales.values():
        each = of_parts(scale, point, optimizer, **options)
        first, *rest = each.values()
        roles = {part.role for part in scale.parts}
        is_one = len(roles) == 1 and all(row == first for row in rest)
        rows |= {scale.path: first} if is_one else each
    return Explanation(scales, optimizer, rows)
