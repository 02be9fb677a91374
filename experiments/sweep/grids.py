"""Values of a hyperparameter: grids such as "2**[-12:-3:1]", and units of distance."""

import math
import re
from collections.abc import Iterable

from ..checks import shown
from ..errors import UserError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(
    rf"(?:(?P<one>1)-)?(?:(?P<base>{_NUMBER})\*\*)?"
    rf"\[(?P<first>{_NUMBER}):(?P<last>{_NUMBER})(?::(?P<step>{_NUMBER}))?\]"
)
_MOST = 10_000  # values of a grid
# Momenta are tuned by their distance from one.
_NEAR_ONE = ("momentum", "b1", "b2", "beta", "adam_b1", "adam_b2")
_LINEAR = ("warmup", "label_smoothing")


def parse(name: str, grid: str | Iterable[float]) -> tuple[float, ...]:
    """Parse the values of a grid; they are returned in rising order.

    Args:
      name: name of the hyperparameter, for error messages.
      grid: numbers, or a range that includes both ends: "[0:0.2:0.05]",
        "2**[-12:-3:1]", "1-2**[-8:-1:1]". The default step is 1.

    Raises:
      UserError: the grid is neither, or holds values outside the range of float32.

    Examples:
      >>> parse("learning_rate", "2**[-3:-1:1]")
      (0.125, 0.25, 0.5)
      >>> parse("b1", "1-2**[-3:-1]")
      (0.5, 0.75, 0.875)
      >>> parse("warmup", "[0:0.2:0.1]")
      (0.0, 0.1, 0.2)
    """
    if isinstance(grid, str):
        values = _range(name, grid)
    else:
        try:
            values = [float(x) for x in grid]
        except (TypeError, ValueError):
            raise UserError(_help(name, grid)) from None
    # Runs compute in float32, which rounds smaller values to zero.
    if not values or not all(x == 0 or 1e-37 <= abs(x) < 1e38 for x in values):
        raise UserError(_help(name, grid))
    if len(values) > _MOST:
        raise UserError(f"the grid of {name} has more than {_MOST} values; shorten it")
    if len(set(values)) < len(values):
        raise UserError(f"the grid of {name} is {shown(grid)}; it has a value twice")
    return tuple(sorted(values))


def _range(name: str, grid: str) -> list[float]:
    match = _RANGE.fullmatch(grid.replace(" ", ""))
    if match is None:
        raise UserError(_help(name, grid))
    first, last = float(match["first"]), float(match["last"])
    step = float(match["step"] or 1)
    base = None if match["base"] is None else float(match["base"])
    if step <= 0 or last < first or (base is not None and base <= 0):
        raise UserError(_help(name, grid))
    span = (last - first) / step
    if not span < _MOST:
        raise UserError(
            f"the grid of {name} is {shown(grid)}, which has more than {_MOST} values "
            "or values too large for a float; make it shorter, or its step larger"
        )
    # A rounding error must not remove the last value.
    count = math.floor(span + 1e-9) + 1
    values = [round(first + i * step, 12) for i in range(count)]
    if base is not None:
        try:
            values = [base**x for x in values]
        except OverflowError:
            raise UserError(
                f"the grid of {name} is {shown(grid)}, which holds values too large "
                "for a float; make its exponents smaller"
            ) from None
    return [1 - x for x in values] if match["one"] else values


def _help(name: str, grid: object) -> str:
    return (
        f"the grid of {name} is {shown(grid)}; write numbers, e.g. (0.1, 0.2), or a "
        "rising range that includes both ends, e.g. '2**[-12:-3:1]', '[0:0.2:0.05]' or "
        "'1-2**[-8:-1:1]'"
    )


def check_range(name: str, values: Iterable[float]) -> None:
    """Raise UserError for the first value that a hyperparameter cannot have."""
    share = unit(name) != "log2"
    for x in values:
        if not (0 <= x < 1 if share else x > 0):
            must = "at least 0 and less than 1" if share else "positive"
            raise UserError(f"the grid of {name} holds {x:g}, which must be {must}")


def unit(name: str) -> str:
    """The unit in which distances along a hyperparameter are measured.

    Returns:
      "log2": octaves; "log2(1-x)": octaves of the distance from one; or "linear".

    Examples:
      >>> unit("learning_rate"), unit("b2"), unit("warmup")
      ('log2', 'log2(1-x)', 'linear')
    """
    if name in _NEAR_ONE:
        return "log2(1-x)"
    return "linear" if name in _LINEAR else "log2"


def coordinate(name: str, value: float) -> float:
    """Convert a value to its `unit`; coordinates rise with the value.

    Examples:
      >>> coordinate("learning_rate", 0.25), coordinate("b1", 0.875)
      (-2.0, 3.0)
    """
    match unit(name):
        case "log2":
            return math.log2(value)
        case "log2(1-x)":
            return -math.log2(1 - value)
    return float(value)


def value(name: str, coordinate: float) -> float:
    """The inverse of `coordinate`.

    Examples:
      >>> value("b1", 3.0)
      0.875
    """
    match unit(name):
        case "log2":
            return 2.0**coordinate
        case "log2(1-x)":
            return 1 - 2.0**-coordinate
    return coordinate


_NOUNS = {
    "b1": "β1",
    "b2": "β2",
    "beta": "β",
    "eps": "ε",
    "richness": "richness μ0",
    "adam_b1": "Adam's β1",
    "adam_b2": "Adam's β2",
    "adam_weight_decay": "Adam's weight decay",
}


def noun(name: str) -> str:
    """The name of a hyperparameter in a sentence.

    Examples:
      >>> noun("learning_rate"), noun("b2")
      ('learning rate', 'β2')
    """
    return _NOUNS.get(name, name.replace("_", " "))


def text(name: str, coordinate: float) -> str:
    """The value at a coordinate, rounded.

    Examples:
      >>> text("learning_rate", -6.5), text("b1", 3.3), text("warmup", 0.1)
      ('0.011', '0.898', '0.1')
    """
    number = value(name, coordinate)
    if unit(name) == "log2(1-x)":
        # Enough digits to differ from 1.
        digits = max(2, round(0.3 * coordinate) + 2)
        return f"{number:.{digits}f}".rstrip("0").rstrip(".")
    return f"{number:.0f}" if 100 <= number < 1e5 else f"{number:.2g}"


def factor(name: str, change: float) -> str:
    """The distance of two values: a ratio, or a difference where the grid is linear.

    Returns:
      "unchanged" where the rounded ratio is one, or the rounded difference zero.

    Examples:
      >>> factor("learning_rate", -3.21), factor("warmup", 0.05), factor("b1", 0.001)
      ('9.25x', '0.05', 'unchanged')
    """
    if unit(name) == "linear":
        return f"{abs(change):.2g}" if abs(change) >= 5e-4 else "unchanged"
    ratio = f"{2 ** abs(change):.3g}"
    return "unchanged" if ratio == "1" else f"{ratio}x"


def moves(name: str, change: float) -> str:
    """A change of the best value as a verb: "grows 1.3x", "is unchanged".

    Examples:
      >>> moves("learning_rate", -3.21), moves("warmup", 0.05), moves("b1", 0.001)
      ('falls 9.25x', 'changes by +0.05', 'is unchanged')
    """
    moved = factor(name, change)
    if moved == "unchanged":
        return "is unchanged"
    if unit(name) == "linear":
        return f"changes by {change:+.2g}"
    verb = "grows" if change > 0 else "falls"
    return f"{verb} {moved}"


def signed(name: str, change: float) -> str:
    """A shift with its sign: in octaves, or in units where the grid is linear.

    Examples:
      >>> signed("learning_rate", -0.983), signed("warmup", 0.0512)
      ('−0.98', '+0.051')
    """
    text = f"{change:+.2g}" if unit(name) == "linear" else f"{change:+.2f}"
    return ("0.00" if float(text) == 0 else text).replace("-", "−")
