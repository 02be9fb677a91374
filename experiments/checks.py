"""Checks of single config values. Their errors name the key and the allowed values."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from .errors import UserError, nearest, short

Check = Callable[[str, Any], Any]

MOST = 2**31 - 1  # largest C int
LARGEST = 10_000_000  # largest width or depth of a model
_LONGEST = 1000  # characters of a name


def shown(value: Any) -> str:
    """A value as an error message quotes it, shortened to 80 characters."""
    return short(repr(value), 80)


def whole(least: int = 1, most: int = MOST) -> Check:
    """Check for an int within bounds."""

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise UserError(f"{key} is {shown(value)}; it must be a whole number")
        converted = int(value)
        if not least <= converted <= most:
            bounds = f"{least} or more" if converted < least else f"at most {most}"
            raise UserError(f"{key} is {shown(value)}; it must be {bounds}")
        return converted

    return check


def number(
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
) -> Check:
    """Check for a number of float32; `above` and `below` exclude the bounds."""

    def check(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise UserError(f"{key} is {shown(value)}; it must be a number")
        try:
            converted = float(value)
        except OverflowError:
            converted = math.inf
        inside = low < converted if above else low <= converted
        inside &= converted < high if below else converted <= high
        if not (inside and math.isfinite(converted)):
            bounds = "positive" if above and low == 0 else f"{low:g} or more"
            if math.isfinite(high):
                bounds += f" and below {high:g}" if below else f" and at most {high:g}"
            elif math.isinf(converted):
                bounds = "a finite number"
            raise UserError(f"{key}={shown(value)} must be {bounds}")
        if converted and not 1e-37 <= abs(converted) <= 1e38:
            raise UserError(
                f"{key}={shown(value)} does not fit into float32; it must be 0, or "
                "from 1e-37 to 1e38"
            )
        return converted

    return check


def text(key: str, value: Any) -> str:
    """Check for a string that a file system could store."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise UserError(f"{key} is {shown(value)}; it must be a non-empty string")
    if len(value) > _LONGEST:
        raise UserError(
            f"{key} is {shown(value)}, of {len(value)} characters; at most "
            f"{_LONGEST} are allowed"
        )
    return value


def one_of(*names: str) -> Check:
    """Check for one of several names."""

    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise UserError(
                f"{key}={shown(value)} must be one of {', '.join(names)}"
                f"{nearest(str(value), names)}"
            )
        return value

    return check


def flag(key: str, value: Any) -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{key} is {shown(value)}; it must be True or False")
    return value


def options(key: str, value: Any) -> dict[str, Any]:
    """Check for a mapping from names to values."""
    # A ConfigDict is no Mapping, and its package is an extra.
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise UserError(
            f"{key} is {shown(value)}; it must be a mapping from option to value, set "
            f"as {key}.option=value"
        )
    return dict(value)


def several(key: str, value: Any) -> tuple[Any, ...]:
    """Check for a sequence."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{key} is {shown(value)}; it must be a tuple, e.g. ('flip',)")
    return tuple(value)


def texts(key: str, value: Any) -> tuple[str, ...]:
    """Check for a sequence of strings."""
    return tuple(text(f"a value in {key}", item) for item in several(key, value))


def optional(check: Check) -> Check:
    """Check for None or a value that another check accepts."""
    return lambda key, value: None if value is None else check(key, value)
