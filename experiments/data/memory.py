"""Memory that data would take, estimated before it is allocated."""

import math

from ..errors import UserError
from ..sweep.memory import host

_GIB = 2**30


def check(needed: float, what: str, remedy: str = "make it smaller") -> None:
    """Refuse what would take more than the free memory of this machine.

    Args:
      needed: bytes.
      what: what takes them, as the beginning of a sentence.
      remedy: what to change.

    Raises:
      UserError: there is not so much.

    >>> check(8.0, "A number")
    """
    free = host()
    if math.isfinite(free) and needed > free:
        raise UserError(
            f"{what} would take {needed / _GIB:.3g} GiB of memory, and "
            f"{free / _GIB:.3g} GiB are free; {remedy}"
        )
