"""What would not fit in memory is refused before it is allocated."""

import os

from ...errors import UserError


def refuse_beyond_memory(
    bytes_needed: int, what: str, remedy: str, limit: int | None = None
) -> None:
    """Raise if tensors of this many bytes would not fit.

    Args:
      bytes_needed: what the tensors take together.
      what: the tensors and their sizes, for the sentence.
      remedy: what to make smaller.
      limit: bytes allowed; by default half of the machine's memory, since XLA
        holds inputs and outputs of a step at once.

    Raises:
      UserError: they would not fit; it names the number of bytes.

    Examples:
      >>> refuse_beyond_memory(8 * 10**3, "a thousand numbers", "take fewer")
    """
    if limit is None:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if bytes_needed > limit:
        raise UserError(
            f"{what} would take {bytes_needed} bytes, more than the {limit} that are "
            f"allowed here; {remedy}"
        )
