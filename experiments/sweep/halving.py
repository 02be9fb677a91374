"""Successive halving: which grid points of a population go on, and which stop.

After a quarter and after half of the steps only the best share of the points goes on.
What a fit needs goes on too: beside the best point, on either side along each axis,
that point of the neighbouring values which looked best. At the end the same is asked
again: a neighbour of the best that had been stopped goes on after all. So the fitted
optimum stands between points that were trained to the end wherever it is not at the
edge of the grid.
"""

import math

import numpy as np

POINTS = 40  # of a learning curve that is kept


def spans(steps: int) -> np.ndarray:
    """The step at which each span of a learning curve ends.

    Examples:
      >>> spans(50)[[0, 1, -1]].tolist()
      [2, 4, 50]
    """
    parts = np.array_split(np.arange(steps), min(POINTS, steps))
    return np.cumsum([len(part) for part in parts])


def rungs(steps: int) -> list[int]:
    """How many spans are over when points are compared: a quarter, then half.

    Examples:
      >>> rungs(200), rungs(6), rungs(1)
      ([10, 20], [1, 3], [])
    """
    count = len(spans(steps))
    return sorted({n for n in (count // 4, count // 2) if n})


def score(curves: np.ndarray, share: float) -> np.ndarray:
    """How points are compared: mean log loss of the last spans, over the seeds.

    Args:
      curves: shape (seeds, points, spans so far); NaN where a run diverged.
      share: of these spans, what is averaged, as at the end of a run.

    Returns:
      Of shape (points,); infinite where a seed diverged.
    """
    last = max(1, round(share * curves.shape[-1]))
    mean = curves[..., -last:].mean(axis=-1)
    log = np.log(np.maximum(mean, np.finfo(float).tiny)).mean(axis=0)
    return np.where(np.isnan(log), np.inf, log)


def survivors(
    scores: np.ndarray, going: np.ndarray, sizes: tuple[int, ...], factor: int
) -> np.ndarray:
    """Which points go on: the best one in `factor`, and what the fit needs.

    Args:
      scores: of all points, shape (points,); less is better.
      going: which points are compared.
      sizes: of the grid.
      factor: of the points compared one in so many goes on.

    Returns:
      Booleans, of the scores' shape.

    Examples:
      >>> scores = np.array([5.0, 4.0, 3.0, 1.0, 2.0, 6.0])
      >>> survivors(scores, np.ones(6, bool), (6,), 3).tolist()
      [False, False, True, True, True, False]
    """
    scores = np.where(going, scores, np.inf)
    order = np.argsort(scores, kind="stable")
    best = order[: math.ceil(going.sum() / factor)]
    found = np.zeros(len(scores), bool)
    found[best] = True
    if np.isfinite(scores[order[0]]):
        found[list(beside(int(order[0]), scores, sizes))] = True
    # What has diverged is known to its end.
    return found & going & np.isfinite(scores)


def beside(at: int, scores: np.ndarray, sizes: tuple[int, ...]) -> set[int]:
    """Of each axis' next value, on either side of a point, the point that is best.

    Args:
      at: the point.
      scores: of all points; less is better.
      sizes: of the grid.
    """
    table = scores.reshape(sizes)
    place = np.arange(len(scores)).reshape(sizes)
    where = np.unravel_index(at, sizes)
    found = set()
    for axis, size in enumerate(sizes):
        for near in (int(where[axis]) - 1, int(where[axis]) + 1):
            if 0 <= near < size:
                slab = np.take(table, near, axis).ravel()
                index = np.take(place, near, axis).ravel()
                found.add(int(index[slab.argmin()]))
    return found


def ranks(
    loss: np.ndarray, over: np.ndarray, reached: np.ndarray, scores: np.ndarray
) -> np.ndarray:
    """One order of all points: first what ended, then what came furthest.

    Args:
      loss: as `wanted` takes it.
      over: likewise.
      reached: how far each point came before it was stopped, or ended.
      scores: of each point, where it was last compared.

    Returns:
      The place of each; what has diverged comes last.
    """
    final = np.log(np.maximum(loss, np.finfo(float).tiny)).mean(axis=0)
    ended = ~np.isnan(final)
    tier = np.where(ended, -np.inf, np.where(over, np.inf, -reached))
    order = np.lexsort((np.where(ended, final, scores), tier))
    places = np.empty(len(order))
    places[order] = np.arange(len(order))
    return places


def wanted(
    loss: np.ndarray, over: np.ndarray, places: np.ndarray, sizes: tuple[int, ...]
) -> np.ndarray:
    """Which points must go on after all, for the optimum to stand between points.

    The neighbours of the best point, and of each seed's best, for the error of the
    fit is that of the seeds' fits.

    Args:
      loss: at the end, shape (seeds, points); NaN where a run diverged or stopped.
      over: which points have come to their end, or diverged in every seed.
      places: of all points, as `ranks` gives them.
      sizes: of the grid.

    Returns:
      Booleans; all False where nothing is missing.
    """
    found = np.zeros(len(places), bool)
    log = np.log(np.maximum(loss, np.finfo(float).tiny))
    rows = [row for row in (log.mean(axis=0), *log) if not np.isnan(row).all()]
    if not rows and not over.all():
        # All that went on has diverged: the best of what was stopped.
        found[np.where(over, np.inf, places).argmin()] = True
        return found
    for row in rows:
        found[list(beside(int(np.nanargmin(row)), places, sizes))] = True
    return found & ~over
