"""`explain`: print the scaling of every parameter before training."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..apply.transforms import missing_multipliers, resolve
from ..rules.multipliers import carried, family_of
from ..rules.optimizers import Rule, optimizer_rule
from ..rules.parametrizations import Parametrization
from ..rules.roles import ParamScale
from ..rules.training import SAME, TrainingScale
from ..scales.display import html_table
from ..scales.group import Module
from ..scales.paths import open_numbers
from ..scales.table import Scales

_HEAD = "path role base target init fwd lr eps wd family found".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Result of `explain`: `.rows` by path; print it for a table.

    Attributes:
      parametrization: the parametrization.
      optimizer: its name or family.
      depth: depth ratio M.
      rows: settings of each parameter, by path, as ratios to the base; of each segment
        where they differ, e.g. `"qkv[:, 0:64]"`.
      training: ratios of batch size and training length.
      modules: hyperparameters of groups of parameters, from `for_modules`.
      needs: what the model's attention or call needs to change, a sentence each.
      carried: parameters that carry a multiplier of the model, with # for numbers.

    Source: docs/rules.md derives every number.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> optim.explain(scales, "sgd").rows["in"].learning_rate
      4.0
    """

    parametrization: Parametrization
    optimizer: str
    depth: float
    rows: Mapping[str, Rule]
    training: TrainingScale = SAME
    modules: Mapping[str, Module] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    def __repr__(self) -> str:
        roles = collections.Counter(row.role for row in self.rows.values())
        counted = ", ".join(f"{count} {role}" for role, count in roles.items())
        return (
            f"<Explanation: {self.parametrization.name}, {self.optimizer}, "
            f"{len(self.rows)} parameters ({counted}); print it for the table>"
        )

    def __str__(self) -> str:
        table = [_HEAD, *self._table()]
        lines = _aligned(table)
        title, *notes = self._notes()
        if max(map(len, lines)) > _COLUMNS:
            same = [
                (i, column)
                for i, column in enumerate(zip(*table, strict=True))
                if column[0] in ("family", "found") and len(set(column[1:])) == 1
            ]
            if same:
                shared = ", ".join(f"{column[0]} {column[1]}" for _, column in same)
                notes.append(f"every parameter: {shared}")
                left_out = {i for i, _ in same}
                lines = _aligned(
                    [
                        [c for i, c in enumerate(row) if i not in left_out]
                        for row in table
                    ]
                )
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([title, "", *lines, "", *notes])

    def _repr_html_(self) -> str:
        title, *notes = self._notes()
        below = (line for note in notes for line in note.splitlines())
        return html_table(title, _HEAD, self._table(), below)

    def _table(self) -> list[list[str]]:
        """The cells of every row. Blocks whose cells are the same share one."""
        rows = [
            [
                path + (" *" if row.branch else ""),
                row.role,
                "x".join(map(str, row.base_shape)) or "()",
                "x".join(map(str, row.shape)) or "()",
                *(f"{x:.4g}" for x in (row.init_std, row.multiplier)),
                *(f"{x:.4g}" for x in (row.learning_rate, row.eps, row.weight_decay)),
                row.family,
                row.origin,
            ]
            for path, row in self.rows.items()
        ]
        return _collapsed(rows)

    def _notes(self) -> list[str]:
        """The title, and the notes below the table."""
        point = self.parametrization
        notes = [f"{point.name}, {self.optimizer}; every number is a ratio to the base"]
        told = any(r.branch and r.origin == "declared" for r in self.rows.values())
        if self.carried:
            notes.append(
                f"these carry factors of branches, logits or readout that {point.name} "
                f"needs and the model does not have: {', '.join(self.carried)}"
            )
        elif told and (self.depth != 1 or point.alpha):
            notes.append(
                "your model must multiply branches (*) by "
                f"{point.branch_multiplier(self.depth):.4g}·a (a·M^-{point.alpha:g}, "
                f"M = {self.depth:g})"
            )
        notes += self.needs
        if point.richness != 1:
            notes.append(f"the model divides its output by μ0 = {point.richness:g}")
        notes.append(f"init, fwd, lr, eps: {point.citation}")
        if point.scaled and self.optimizer != "adafactor":
            notes.append("wd: such that lr·wd is the same at every size")
        groups: dict[Module, list[str]] = {}
        for path, module in self.modules.items():
            groups.setdefault(module, []).append(path)
        for module, paths in groups.items():
            notes.append(f"{', '.join(paths)}: also times {_factors(module)}")
        notes += self.training.describe(family_of(self.optimizer).value)
        return notes


# A name that ends in a number: Linen's "Dense_1", or "0" of a list.
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)( \*)?")


def _collapsed(table: list[list[str]]) -> list[list[str]]:
    """Join rows whose first cells, the paths, differ only by the number of one name.

    Examples:
      >>> _collapsed([["b/0/w", "x"], ["b/1/w", "x"], ["b/2/w", "y"]])
      [['b/0-1/w', 'x'], ['b/2/w', 'y']]
      >>> _collapsed([["Dense_1/w *", "x"], ["Dense_2/w *", "x"]])
      [['Dense_1-2/w *', 'x']]
    """
    longest = max((path.count("/") + 1 for path, *_ in table), default=0)
    for at in reversed(range(longest)):
        numbers: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for path, *cells in table:
            parts, number = path.split("/"), []
            match = _NUMBERED.fullmatch(parts[at]) if at < len(parts) else None
            if match:
                parts[at], number = f"{match[1]}\0{match[3] or ''}", [int(match[2])]
            numbers.setdefault((tuple(parts), tuple(cells)), []).extend(number)
        table = [
            ["/".join(names).replace("\0", _range(found)), *cells]
            for (names, cells), found in numbers.items()
        ]
    return table


def _range(numbers: list[int]) -> str:
    """As few words as possible for numbers of blocks, e.g. "0-11" or "0,2-11"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if r[1:] else str(r[0]) for r in runs)


_COLUMNS = 100  # wider tables leave out columns that are the same in each row


def _aligned(table: list[list[str]]) -> list[str]:
    """Format the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
        for r in table
    ]


def _factors(module: Module) -> str:
    """List the factors of a group of parameters that differ from 1."""
    changed = {k: v for k, v in vars(module).items() if v != 1}
    return ", ".join(f"{name} {value:g}" for name, value in changed.items()) or "1"


def explain(
    scales: Scales,
    optimizer: str = "adam",
    *,
    consistent_rms: float | None = None,
    per_head: bool = False,
    split_fused: bool = True,
    partner: str | None = None,
) -> Explanation:
    """Tabulate the role, initial size and multipliers of every parameter.

    Whether an optimizer applies them is a question to `check_chain`.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      optimizer: its name, e.g. "adamw", or its family.
      consistent_rms, per_head, split_fused, partner: as in `optim.muon`, for
        optimizers of hidden matrices. The partner is a name, e.g. "lion".

    Returns:
      An `Explanation`: print it, or read `.rows[path]`.

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
      path  role    base  target  init  fwd  lr    eps   wd  family  found
      -----------------------------------------------------------------------
      in    input   8x4   8x16    1     1    1     0.25  1   adam    declared
      out   output  4x2   16x2    0.25  1    0.25  1     4   adam    declared
      <BLANKLINE>
      init, fwd, lr, eps: Yang et al. 2022, Tensor Programs V (arXiv:2203.03466), \
Table 3
      wd: such that lr·wd is the same at every size

    Source: docs/rules.md derives every number.
    """
    point = resolve(scales)
    options = {
        "consistent_rms": consistent_rms,
        "per_head": per_head,
        "split_fused": split_fused,
        "partner": partner,
    }
    rows = {
        name: row
        for path, scale in scales.items()
        for name, row in _rows(path, scale, point, optimizer, options).items()
    }
    missing = missing_multipliers(scales)
    return Explanation(
        point,
        optimizer,
        scales.depth,
        rows,
        scales.training,
        scales.modules,
        (missing,) if missing else (),
        tuple(
            dict.fromkeys(
                open_numbers(s.path)
                for s in scales.values()
                if any(carried(part, point) != 1 for part in s.parts)
            )
        ),
    )


def _rows(
    path: str,
    scale: ParamScale,
    point: Parametrization,
    optimizer: str,
    options: Mapping[str, Any],
) -> dict[str, Rule]:
    """The row of a parameter, or those of its segments if they differ."""
    fused = bool(scale.segments) and not options["split_fused"]
    options = {**options, "whole": scale if fused else None}
    rows = {
        label: optimizer_rule(optimizer, part, point, **options)
        for label, part in zip(scale.labels, scale.parts, strict=True)
    }
    numbers = [
        dataclasses.replace(row, shape=(), base_shape=(), origin="")
        for row in rows.values()
    ]
    if all(each == numbers[0] for each in numbers):
        first = next(iter(rows.values()))
        same = dataclasses.replace(
            first, base_shape=scale.base_shape, shape=scale.shape, origin=scale.origin
        )
        return {path: same}
    return rows
