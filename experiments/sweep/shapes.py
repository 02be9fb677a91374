"""Shapes of equal parameters, and the jobs that train them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ..errors import UserError
from ..run.build import build
from .space import SweepConfig
from .tasks import Job
from .tradeoff import EQUAL


def counter(job: Job, data: Any) -> Callable[[int, int], int]:
    """Trained weights of a job's model at another width and depth; nothing is built."""

    @functools.cache
    def count(width: int, depth: int) -> int:
        state = nnx.state(_abstract(job, data, width, depth), nnx.Param)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))

    return count


def target(config: SweepConfig, job: Job, data: Any) -> int | None:
    """Trained weights of the target; None where there is none that can be built."""
    if config.target_sizes is None:
        return None
    try:
        return counter(job, data)(*config.target_sizes)
    except UserError:
        return None


def _abstract(job: Job, data: Any, width: int, depth: int) -> Any:
    return build(job.config.sized(width, depth), job.dataset(data)).model


def unit(job: Job, data: Any) -> int:
    """The number that widths must be a multiple of: a divisor of the base's width."""
    base, depth = job.config.base_width or job.width, job.config.base_depth or job.depth
    for step in (n for n in range(1, base + 1) if base % n == 0):
        try:
            _abstract(job, data, base + step, depth)
            _abstract(job, data, step, depth)
        except UserError:
            continue
        return step
    return base


def pairs(config: SweepConfig, base: Job, data: Any) -> list[tuple[int, int]]:
    """The shapes of a trade-off, as (width, depth).

    Args:
      config: its `sweep.tradeoff` says which; of a number of parameters every depth
        of `sweep.depths` gets a width.
      base: any of its jobs.
      data: tells the sizes of input and output.

    Raises:
      UserError: a shape that cannot be built, or fewer than two for a budget.
    """
    asked = config.tradeoff
    found = [entry for entry in asked if isinstance(entry, tuple)]
    budgets = [entry for entry in asked if isinstance(entry, int)]
    if budgets:
        count, step = counter(base, data), unit(base, data)
        for budget in budgets:
            equal = shapes([budget], sorted(config.depths), count, step)
            if len(equal) < 2:
                least = min(count(step, depth) for depth in config.depths)
                raise UserError(
                    f"sweep.tradeoff asks for {budget} parameters, which {len(equal)} "
                    f"of sweep.depths can have, and two must; the smallest model has "
                    f"{least}"
                )
            found += equal
    for width, depth in found:
        try:
            _abstract(base, data, width, depth)
        except UserError as error:
            raise UserError(
                f"sweep.tradeoff: width {width} and depth {depth} cannot be built: "
                f"{error}"
            ) from None
    return list(dict.fromkeys(found))


def jobs(
    found: Sequence[tuple[int, int]], base: Job, hyper: Mapping[str, float]
) -> list[Job]:
    """The jobs of a trade-off: shapes trained with what the base likes best.

    Args:
      found: the shapes, as (width, depth).
      base: the base's job.
      hyper: the base's best value of every axis.
    """
    axes = tuple((name, (value,)) for name, value in hyper.items())
    return [
        dataclasses.replace(base.sized(width, depth), axes=axes)
        for width, depth in found
    ]


def shapes(
    budgets: Sequence[int],
    depths: Sequence[int],
    parameters: Callable[[int, int], int],
    unit: int = 1,
) -> list[tuple[int, int]]:
    """Widths that give each depth a number of parameters, as (width, depth).

    Args:
      budgets: numbers of parameters.
      depths: to be compared.
      parameters: trained weights of a width and a depth, rising with the width.
      unit: widths are multiples of it.

    Returns:
      The shapes whose count is within 15 % of a budget.

    Examples:
      >>> shapes([1000, 4000], [2, 10], lambda width, depth: depth * width**2)
      [(22, 2), (10, 10), (45, 2), (20, 10)]
    """
    found = []
    for budget in budgets:
        for depth in depths:
            widths = functools.partial(_count, parameters, unit, depth)
            below = unit * _last_below(widths, budget)
            around = [w for w in (below, below + unit) if w > 0]
            off = {w: abs(math.log(parameters(w, depth) / budget)) for w in around}
            best = min(off, key=lambda w: off[w])
            if off[best] <= math.log(1 + EQUAL):
                found.append((best, depth))
    return list(dict.fromkeys(found))


def _count(
    parameters: Callable[[int, int], int], unit: int, depth: int, units: int
) -> int:
    return parameters(units * unit, depth)


def _last_below(count: Callable[[int], int], budget: int) -> int:
    """The greatest n with count(n) <= budget, 0 where there is none."""
    high = 1
    while count(high) <= budget:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= budget else (low, middle)
    return low
