"""Memory of a long run, in a minute; the hour is `python -m benchmarks.soak`."""

import pytest

from benchmarks.soak import soak


@pytest.mark.long
def test_memory_grows_by_no_more_than_what_orbax_keeps_of_a_checkpoint():
    points = soak(minutes=1, points=6, every=5)
    (first, before), (last, after) = points[2], points[-1]
    checkpoints = (last - first) / 5
    assert checkpoints > 40
    # 0.045 MiB each in the hour; a state that stayed behind would be 0.6.
    assert after - before < 0.3 * checkpoints
