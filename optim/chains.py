"""What stands beside a scaling in an `optax.chain`: mistakes that train anyway.

A chain calls its links one after another, so that a link can see, on the call stack,
the chains it stands in. That is the one place from which the wrong order, the wrong
family or a scaling applied twice can be told. It is looked at in `init`, as early as
can be, and when `update` is traced: half of Optax's transforms share one `init`.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, MethodType
from typing import Any

from .rules import Family

MARK = "mupax_family"  # set on the functions of every scaling

Link = Callable[..., Any]

_ADAM = (
    "scale_by_acprop scale_by_adam scale_by_adamax scale_by_adan scale_by_ademamix "
    "scale_by_adopt scale_by_amsgrad scale_by_belief scale_by_factored_rms "
    "scale_by_lion scale_by_radam scale_by_rms scale_by_rprop scale_by_rss "
    "scale_by_sign scale_by_simplified_ademamix scale_by_sm3 scale_by_stddev "
    "scale_by_yogi"
)
_MAKERS = {
    **dict.fromkeys(_ADAM.split(), Family.ADAM),
    "scale_by_muon": Family.SPECTRAL,
    "scale_by_trust_ratio": Family.RELATIVE,
    "scale_by_param_block_norm": Family.RELATIVE,
    "scale_by_param_block_rms": Family.RELATIVE,
}
_PLAIN = (
    "adaptive_grad_clip add_noise apply_every centralize clip clip_by_block_rms "
    "clip_by_global_norm ema identity per_example_global_norm_clip scale "
    "scale_by_learning_rate scale_by_schedule scale_leaves trace zero_nans"
)
_WRAPPERS = "chain named_chain with_extra_args_support inject_hyperparams"
# What leaves an update proportional to the gradient.
_LINEAR = frozenset(f"{_PLAIN} {_WRAPPERS}".split())
_RATES = ("scale", "scale_by_learning_rate", "scale_by_schedule")
_DECAY = "add_decayed_weights"
# Inside inject_hyperparams there is only the name of what will be made.
_ALIASES = {
    "adam": ("scale_by_adam",),
    "adamw": ("scale_by_adam", _DECAY),
    "lamb": ("scale_by_adam", _DECAY, "scale_by_trust_ratio"),
    "lion": ("scale_by_lion", _DECAY),
    "muon": ("scale_by_muon", _DECAY),
    "nadam": ("scale_by_adam",),
    "nadamw": ("scale_by_adam", _DECAY),
    "rmsprop": ("scale_by_rms",),
    "sgd": ("identity",),
}


@dataclasses.dataclass
class _Level:
    """A chain that is running, which of its links runs, and what has been scaled."""

    links: tuple[Link, ...]
    running: int
    scaled: dict[int, frozenset[str]] = dataclasses.field(default_factory=dict)


class _Running(threading.local):
    levels: tuple[_Level, ...] = ()


_running = _Running()


def check_chain(paths: Iterable[str], family: Family, check_order: bool) -> None:
    """Raise where the chain that runs the caller would misuse its scaling.

    Args:
      paths: of the parameters that the caller scales, those masked out left out.
      family: the family that the scaling was made for.
      check_order: whether the chain right around it is a user's, not one of our
        optimizers; chains further out always are.

    Raises:
      ValueError: a scaling is applied twice, stands before the optimizer that would
        undo it, was made for another family, or would scale the weight decay.
    """
    levels = tuple(_levels(sys._getframe(1)))
    mine = frozenset(paths)
    for level in levels:
        _check_once(level, mine)
    _running.levels = levels
    theirs = levels if check_order else levels[1:]
    before = [link for level in theirs for link in level.links[: level.running]]
    after = [link for level in theirs for link in level.links[level.running + 1 :]]
    _check_neighbours(before, after, family, check_order)


def _levels(frame: FrameType | None) -> Iterator[_Level]:
    """The chains around a frame, innermost first."""
    callees: list[FrameType] = []
    while frame is not None:
        links = _links(frame)
        if links:
            where = [
                i
                for i, link in enumerate(links)
                if any(_runs(link, callee) for callee in callees[-2:])
            ]
            if where:
                known = (k for k in _running.levels if _same(k.links, links))
                level = next(known, _Level(links, where[0]))
                # Links run in order: what lies ahead was left by an earlier run.
                level.running = where[0]
                level.scaled = {i: p for i, p in level.scaled.items() if i < where[0]}
                if len(where) > 1:
                    raise ValueError(_TWICE)
                yield level
        callees.append(frame)
        frame = frame.f_back


def _links(frame: FrameType) -> tuple[Link, ...]:
    """The links of the chain that this frame runs, none if it runs no chain."""
    code, local = frame.f_code, frame.f_locals
    if "optax" not in code.co_filename:
        return ()
    field = {"init_fn": "init", "update_fn": "update"}.get(code.co_name)
    if field is None:
        return ()
    if isinstance(local.get("transforms"), list):  # optax.named_chain
        return tuple(getattr(tx, field) for _, tx in local["transforms"])
    return tuple(local.get(field + "_fns", ()))


def _runs(link: Link, frame: FrameType) -> bool:
    """Whether this frame is a call of this very function, closure and all."""
    function = link.__func__ if isinstance(link, MethodType) else link
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    if code is not frame.f_code:
        return False
    if isinstance(link, MethodType):
        return frame.f_locals.get(code.co_varnames[0]) is link.__self__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return all(
        frame.f_locals.get(name) is cell.cell_contents
        for name, cell in cells
        if _is_full(cell)
    )


def _same(links: tuple[Link, ...], others: tuple[Link, ...]) -> bool:
    return len(links) == len(others) and all(map(_is, links, others))


def _is(one: Any, other: Any) -> bool:
    return one is other


_TWICE = (
    "the updates are scaled by a parametrization twice in one optax.chain; mupax's "
    "optimizers scale already: drop scale_by_parametrization, or chain it with "
    "optax's own scale_by_... transforms"
)


def _check_once(level: _Level, mine: frozenset[str]) -> None:
    for paths in level.scaled.values():
        both = sorted(paths & mine)
        if both:
            raise ValueError(f"{_TWICE} (seen at {both[0]!r})")
    # Of one link, branches of a partition scale different parameters.
    level.scaled[level.running] = level.scaled.get(level.running, frozenset()) | mine


def _check_neighbours(
    before: list[Link], after: list[Link], family: Family, check_linear: bool
) -> None:
    # A link that holds a scaling of its own (for other parameters) is complete.
    before = [link for link in before if not _scales(link)]
    after = [link for link in after if not _scales(link)]
    names = [name for link in before for name, _ in _names(link)]
    makers = [n for link in before for n, masked in _names(link) if not masked]
    makers = [n for n in makers if n in _MAKERS]
    rest = [(n, masked) for link in after for n, masked in _names(link)]
    later = next((n for n, masked in rest if n in _MAKERS and not masked), None)
    if later is not None:
        raise ValueError(
            f"scale_by_parametrization stands before {later}, which undoes it; put it "
            f"after {later} and before the weight decay and the learning rate"
        )
    if _DECAY in names:
        raise ValueError(
            "scale_by_parametrization stands after add_decayed_weights (as inside "
            "optax.adamw) and would scale the weight decay; add the decay after it "
            "and before the learning rate, or use the optimizer of that name in "
            "mupax.optim"
        )
    if makers:
        expected = _family_of_all(makers)
        maker = next(n for n in reversed(makers) if _MAKERS[n] is expected)
        # Trust ratios and the like have no init by which to know them.
        hidden = family is Family.RELATIVE and any(map(_is_nameless, before))
        if family is not expected and not hidden:
            raise ValueError(
                f"the updates come from {maker}, whose family is {expected.value!r}, "
                f"and are scaled with family={family.value!r}; pass "
                f"family={expected.value!r}"
            )
    elif (
        check_linear
        and family is not Family.SGD
        and any(n in _RATES for n in [*names, *(n for n, _ in rest)])
        and _LINEAR.issuperset(names)
    ):
        raise ValueError(
            f"the updates are scaled with family={family.value!r}, but nothing before "
            "gives them that size: they are proportional to the gradient; pass "
            "family='sgd', or put the optimizer's scale_by_... transform first"
        )


def _family_of_all(makers: list[str]) -> Family:
    families = [_MAKERS[n] for n in makers]
    # What is relative to the weight takes any update and gives it its own size.
    return Family.RELATIVE if Family.RELATIVE in families else families[-1]


def _is_nameless(link: Link) -> bool:
    return any(f.__qualname__ == "init_empty_state" for f, _ in _inside(link))


def _scales(link: Link) -> bool:
    return any(hasattr(f, MARK) or _is_our_alias(f) for f, _ in _inside(link))


def _is_our_alias(function: FunctionType) -> bool:
    ours = function.__module__.startswith(__package__ or "mupax.optim")
    return ours and function.__name__ in _ALIASES


def _names(link: Link) -> Iterator[tuple[str, bool]]:
    """Makers of the transforms that a link holds, and whether under a mask."""
    for function, masked in _inside(link):
        name, _, inner = function.__qualname__.partition(".")
        if inner.rpartition(".")[2] in ("init_fn", "update_fn", "init", "update"):
            yield name, masked
        elif name in _ALIASES or name in _MAKERS or name == _DECAY:
            for part in _ALIASES.get(name, (name,)):
                yield part, masked


def _inside(
    thing: Any, masked: bool = False, depth: int = 16
) -> Iterator[tuple[FunctionType, bool]]:
    """A function, and all functions that its closure can reach."""
    if depth == 0:
        return
    inner: Iterable[Any] = ()
    if isinstance(thing, FunctionType):
        yield thing, masked
        masked |= thing.__qualname__.startswith(("masked.", "partition."))
        inner = [c.cell_contents for c in thing.__closure__ or () if _is_full(c)]
    elif isinstance(thing, MethodType):
        inner = vars(thing.__self__).values()
    elif isinstance(thing, tuple | list):
        inner = thing
    elif isinstance(thing, dict):
        inner = thing.values()
    for part in inner:
        yield from _inside(part, masked, depth - 1)


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
