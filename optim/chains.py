"""What stands beside a scaling in an `optax.chain`: mistakes that train anyway.

A chain calls the `init` of its links one after another, so that a link's `init` can
see, on the call stack, the chain it stands in. That is the one moment at which the
wrong order, the wrong family or a scaling applied twice can be told.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

from .rules import Family

MARK = "mupax_family"  # set on the init function of every scaling

_ADAM = (
    "scale_by_adabelief scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad "
    "scale_by_belief scale_by_lion scale_by_novograd scale_by_radam scale_by_rms "
    "scale_by_rss scale_by_sign scale_by_stddev scale_by_yogi scale_by_factored_rms"
)
_MAKERS = {
    **dict.fromkeys(_ADAM.split(), Family.ADAM),
    "scale_by_muon": Family.SPECTRAL,
    "scale_by_trust_ratio": Family.RELATIVE,
    "scale_by_param_block_rms": Family.RELATIVE,
}


def check_chain(init: Callable[..., Any], family: Family, check_order: bool) -> None:
    """Raise where the chain that runs this `init` would misuse its scaling.

    Args:
      init: the scaling's own init function, which carries `MARK`.
      family: the family that the scaling was made for.
      check_order: whether the chain right around it is a user's, not one of our
        optimizers; chains further out always are.

    Raises:
      ValueError: a scaling is applied twice, stands before the optimizer that would
        undo it, was made for another family, or would scale the weight decay.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        links = _links(frame)
        if links:
            _check_once(links, init)
            if check_order:
                _check_neighbours(links, init, family)
            check_order = True
        frame = frame.f_back


def _links(frame: FrameType) -> tuple[Callable[..., Any], ...]:
    code = frame.f_code
    if code.co_name != "init_fn" or "optax" not in code.co_filename:
        return ()
    return tuple(frame.f_locals.get("init_fns", ()))


def _check_once(links: tuple[Callable[..., Any], ...], init: Any) -> None:
    scaled = [link for link in links if any(hasattr(f, MARK) for f in _inside(link))]
    mine = any(init in _inside(link) for link in links)
    if len(scaled) + (not mine) > 1:
        raise ValueError(
            "the updates are scaled by a parametrization twice in one optax.chain; "
            "mupax's optimizers scale already: drop scale_by_parametrization, or "
            "chain it with optax's own scale_by_... transforms"
        )


def _check_neighbours(
    links: tuple[Callable[..., Any], ...], init: Any, family: Family
) -> None:
    where = next((i for i, link in enumerate(links) if init in _inside(link)), None)
    if where is None:
        return
    before = [name for link in links[:where] for name in _names(link)]
    after = [name for link in links[where + 1 :] for name in _names(link)]
    makers = [_MAKERS[n] for n in before if n in _MAKERS]
    later = next((n for n in after if n in _MAKERS), None)
    if later is not None and not makers:
        raise ValueError(
            f"scale_by_parametrization stands before {later}, which undoes it; put it "
            f"after {later} and before the weight decay and the learning rate"
        )
    if "add_decayed_weights" in before:
        raise ValueError(
            "scale_by_parametrization stands after add_decayed_weights (as inside "
            "optax.adamw) and would scale the weight decay; put it before, or use "
            "the optimizer of that name in mupax.optim"
        )
    if makers and family not in makers:
        expected = Family.RELATIVE if Family.RELATIVE in makers else makers[-1]
        maker = next(n for n in reversed(before) if _MAKERS.get(n) is expected)
        raise ValueError(
            f"the updates come from {maker}, whose family is {expected.value!r}, and "
            f"are scaled with family={family.value!r}; pass "
            f"family={expected.value!r}"
        )


def _names(link: Callable[..., Any]) -> Iterator[str]:
    for function in _inside(link):
        yield function.__qualname__.split(".")[0]


def _inside(thing: Any, depth: int = 8) -> list[FunctionType]:
    """A function, and all functions that its closure can reach."""
    if depth == 0:
        return []
    if isinstance(thing, FunctionType):
        cells = [c.cell_contents for c in thing.__closure__ or () if _is_full(c)]
        return [thing] + [f for c in cells for f in _inside(c, depth - 1)]
    if isinstance(thing, tuple | list):
        return [f for t in thing for f in _inside(t, depth - 1)]
    if isinstance(thing, dict):
        return [f for t in thing.values() for f in _inside(t, depth - 1)]
    return []


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
