"""The fewest and smallest factors that make given numbers one."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

Row = tuple[Mapping[str, float], float]  # powers of factors, and a logarithm
FREE = 1e-2  # logarithms beside zero
_VALUE = 4.0  # cost of a number that had better be one, beside that of a factor


class UnsolvedError(Exception):
    """There are no such factors: `row` does not follow, and lacks `lacking`."""

    def __init__(self, row: int, lacking: float):
        super().__init__()
        self.row, self.lacking = row, lacking


def solve(
    rows: Sequence[Row], values: Sequence[Row], costs: Mapping[str, float]
) -> dict[str, float]:
    """The logarithms of factors.

    Args:
      rows: products of powers of factors and of a number, which must be one.
      values: those that had better be one, too.
      costs: of each factor other than one; all others are one.

    Raises:
      UnsolvedError: there are no such factors.

    Examples:
      >>> logits = {"q": 1.0, "k": 1.0}, 1.0  # 1 is the logarithm of their number
      >>> solve([logits, ({"k": 1.0}, 0.0)], [], {"q": 1.0, "k": 1.0})
      {'q': -1.0}
    """
    if all(abs(known) < FREE for _, known in rows):
        return {}
    rows = [({k: x for k, x in of.items() if k in costs}, y) for of, y in rows]
    basis = _independent(rows)
    names = [x for x in costs if any(x in of for of, _ in basis)]
    at = {name: i for i, name in enumerate(names)}
    every = Counter((tuple(sorted(of.items())), round(y, 12)) for of, y in values)
    soft = [(dict(of), y) for of, y in sorted(every)]
    prices = [_VALUE * every[x] for x in sorted(every)]
    matrix = np.zeros((len(basis) + len(soft), len(names) + len(soft)))
    for i, (of, _) in enumerate((*basis, *soft)):
        for name in of.keys() & at.keys():
            matrix[i, at[name]] = of[name]
        if i >= len(basis):
            matrix[i, len(names) + i - len(basis)] = -1
    from scipy.optimize import linprog

    right = np.array([-known for _, known in (*basis, *soft)])
    cost = np.array([*(costs[x] for x in names), *prices])
    found = linprog(
        np.concatenate([cost, cost]),
        A_eq=np.concatenate([matrix, -matrix], 1),
        b_eq=right,
        method="highs-ds",
    )
    result = np.subtract(*np.split(found.x, 2))
    # Once more without what is zero, as the tolerance of the first result is 1e-7.
    some = np.abs(result) > FREE
    result[some] = np.linalg.lstsq(matrix[:, some], right)[0]
    pairs = zip(names, result, strict=False)
    return {name: float(x) for name, x in pairs if abs(x) > FREE}


def _independent(rows: Sequence[Row]) -> list[Row]:
    """Rows that do not follow from others."""
    solved: dict[str, Row] = {}
    basis: list[Row] = []
    # Those that lack nothing first, so that one which lacks something is to blame.
    for i in sorted(range(len(rows)), key=lambda i: abs(rows[i][1]) >= FREE):
        of, known = rows[i][0], rows[i][1] if abs(rows[i][1]) >= FREE else 0.0
        rest, lacking = dict(of), known
        while pivots := rest.keys() & solved.keys():
            name = min(pivots)
            other, constant = solved[name]
            lacking -= rest[name] * constant
            rest = _less(rest, other, rest[name])
        if not rest and abs(lacking) > 2 * FREE:
            raise UnsolvedError(i, lacking)
        if not rest:
            continue
        basis.append((of, known))
        name = max(rest, key=lambda x: (abs(rest[x]), x))
        power = rest[name]
        new = {x: y / power for x, y in rest.items()}
        for each in [x for x, (row, _) in solved.items() if name in row]:
            row, constant = solved[each]
            less = _less(row, new, row[name])
            solved[each] = less, constant - row[name] * lacking / power
        solved[name] = new, lacking / power
    return basis


def _less(
    row: Mapping[str, float], other: Mapping[str, float], times: float
) -> dict[str, float]:
    """A row less a multiple of another."""
    names = row.keys() | other.keys()
    each = {x: row.get(x, 0.0) - times * other.get(x, 0.0) for x in names}
    return {x: y for x, y in each.items() if abs(y) > 1e-7}
