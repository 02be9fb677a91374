"""`optim.chain`: detect mis-ordered optax chains, which would fail silently.

Each link is classified: transforms of this package carry a mark, and Optax's are known
by the name of the function that creates them. If a link hides others, e.g.
`optax.adamw` or `optax.masked`, the chain is run on known gradients when it is
initialized (`check_chain`).
"""

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

from ..apply.links import SCALING, STATES, ChainWarning, Kind, Link, describe, mark
from ..rules.multipliers import Family
from .chain_check import OTHER_TREE, Unchecked, climbing, inspect_chain
from .probing import acting

# These clip each parameter alone.
_CLIPS_ALONE = ("clip", "clip_by_block_rms")


def chain(*transforms: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` that raises on a wrong order, which would train but transfer worse.

    Args:
      *transforms: as in `optax.chain`.

    Returns:
      The result of `optax.chain`, with the same state. If a link holds other
      transforms (`optax.adamw`, `optax.masked`, `optax.partition`, ...) or is not one
      of Optax's, `init` runs the chain on known gradients once, as `check_chain` does.
      That takes about a second. It is skipped if hyperparameters are traced values.

    Raises:
      ValueError: updates are scaled twice, before the transform that gives them their
        size, or for another family; weight decay or clipping is on the wrong side of
        the scaling; weight decay makes weights grow; a learning rate has no effect, or
        turns the updates of an optimizer of this package around; factors of
        `scale_by_path` have no effect, or scale the weight decay, or weight decay
        changes the parameters that they freeze;
        gradients are normalized twice, too late, for SGD, or by other scales, or each
        parameter's are clipped before that; no rule
        is known for the optimizer. `init` raises as `check_chain` does.

    Warns:
      ChainWarning: an eps that the gradients are not normalized for; clipped gradients
        of SGD, or of each parameter before an optimizer of this package; clipping by
        the ratio of gradient and weight; two weight decays; added noise; an optimizer
        that finds its own step size; at `init`, a chain without a scaling.

    Source: the order of docs/chains.md.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> scaling = optim.scale_by_parametrization(scales, "mup", family="adam")
      >>> tx = optim.chain(
      ...     optax.clip_by_global_norm(1.0), optim.normalize_gradients(scales, "mup"),
      ...     optax.scale_by_adam(), scaling, optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(0.1))
      >>> optim.chain(scaling, optax.scale_by_lion())
      Traceback (most recent call last):
      ...
      ValueError: scale_by_parametrization (link 0) is before scale_by_lion (link 1), \
which undoes it; put it after scale_by_lion, and before weight decay and learning rate
    """
    if not transforms:
        raise ValueError("optim.chain needs at least one transform")
    links = [describe(tx) for tx in transforms]
    pairs = zip(transforms, links, strict=True)
    plain = optax.chain(*(link.plain or tx for tx, link in pairs))
    flat = tuple(_flat(links))
    check_links(flat)
    whole = Link("chain", Kind.LINEAR, inner=flat, plain=plain)
    hidden = any(link.kind is Kind.HIDDEN for link in flat)
    scaling = next((link for link in flat if link.kind is Kind.SCALING), None)
    # The part of a larger chain has its optimizer outside of it.
    unmade = (
        scaling is not None
        and scaling.name == SCALING
        and scaling.family is not Family.SGD
        and not any(link.kind is Kind.MAKER for link in flat)
    )
    if not hidden and scaling is not None and not unmade:
        return mark(optax.GradientTransformationExtraArgs(*plain), whole)
    checked: set[Any] = set()

    def init(params: optax.Params) -> optax.OptState:
        structure = jax.tree.structure(params)
        if structure not in checked:
            if hidden:
                with _explained_trees():
                    _check_running(plain, params)
            else:
                # SAM holds two optimizers, which cannot run without a second gradient.
                sam = any(link.name == "sam" for link in flat)
                said = _NO_RULE.format("sam") if sam else _UNSCALED
                said = _UNMADE if unmade else said
                warnings.warn(said, ChainWarning, stacklevel=2)
            checked.add(structure)
        return plain.init(params)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        with _explained_trees():
            return plain.update(updates, state, params, **more)

    return mark(optax.GradientTransformationExtraArgs(init, update), whole)


@contextlib.contextmanager
def _explained_trees() -> Iterator[None]:
    """Turn JAX's error for a tree of masks or labels into one sentence."""
    try:
        yield
    except ValueError as error:
        if "pytree structure error" not in str(error):
            raise
        raise ValueError(OTHER_TREE) from error


def _flat(links: Any) -> Iterator[Link]:
    for link in links:
        yield from link.inner or (link,)


def check_links(links: tuple[Link, ...]) -> None:
    """Raise a `ValueError` if links are in a wrong order; see `chain`."""
    named = [f"{link.name} (link {i})" for i, link in enumerate(links)]

    def places(*kinds: Kind) -> list[int]:
        return [i for i, link in enumerate(links) if link.kind in kinds]

    scalings, makers = places(Kind.SCALING), places(Kind.MAKER)
    _check_groups(links, named)
    if not scalings:
        _check_normalizing(links, named)
        return
    if len(scalings) > 1:
        one, two = scalings[:2]
        raise ValueError(
            f"{named[one]} and {named[two]} both scale the updates, so they are "
            "scaled twice; optimizers of mupax.optim already scale: drop "
            "scale_by_parametrization, or chain it with Optax's own scale_by_... "
            "transforms"
        )
    at = scalings[0]
    for later in makers:
        if later > at:
            raise ValueError(
                f"{named[at]} is before {named[later]}, which undoes it; put it after "
                f"{links[later].name}, and before weight decay and learning rate"
            )
    for i in places(Kind.DECAY):
        if i < at:
            raise ValueError(
                f"{named[at]} is after {named[i]} and would scale the weight decay; "
                + _decay_after(links[at])
            )
    _check_signs(links, named)
    _check_direction(links, named, at)
    _check_factors(links, named)
    for link in links:
        if link.kind is Kind.CURVATURE:
            raise ValueError(_NO_RULE.format(link.name))
    for i in places(Kind.CLIP):
        if i > at:
            alone = links[i].name in _CLIPS_ALONE and places(Kind.NORMALIZING)
            where = "right after normalize_gradients" if alone else "first in the chain"
            raise ValueError(
                f"{named[i]} is after {named[at]} and changes the ratios between "
                f"parameters and between sizes; put it {where}, where it clips "
                "gradients"
            )
    _check_normalizing(links, named)
    _check_same(links, named)
    _check_family(links, named, at)
    _check_rules(links)


def _check_groups(links: tuple[Link, ...], named: list[str]) -> None:
    """Raise a `ValueError` for a scale_by_path that has another effect elsewhere."""
    for i, link in enumerate(links):
        if link.kind is Kind.FREEZING:
            later = [j for j in range(i + 1, len(links)) if _adds_decay(links[j])]
            if later:
                raise ValueError(
                    f"{named[i]} freezes parameters, and {named[later[0]]} after it "
                    "still decays them; put it last in the chain"
                )
        if link.kind is not Kind.GROUPS:
            continue
        for j, other in enumerate(links):
            alias = other.kind is Kind.SCALING and other.name != SCALING
            if alias and j > i and other.family is not Family.SGD:
                raise ValueError(
                    f"{named[i]} is before {named[j]}, which divides by the size of "
                    "the gradients, so its factors have no effect; give the optimizer "
                    "scales of optim.for_modules in its place"
                )
            if alias and j < i and other.decays:
                raise ValueError(
                    f"{named[i]} is after {named[j]} and would scale its weight decay, "
                    "too; give the optimizer scales of optim.for_modules in its place"
                )
            keeps = other.name.startswith("scale_by_param_block")
            if other.kind is Kind.MAKER and not keeps and j > i:
                raise ValueError(
                    f"{named[i]} is before {named[j]}, which divides by the size of "
                    "the gradients, so its factors have no effect; put it after "
                    "scale_by_parametrization, and before weight decay"
                )
            if other.kind is Kind.DECAY and j < i:
                raise ValueError(
                    f"{named[i]} is after {named[j]} and would scale the weight decay; "
                    "put it before the decay"
                )


def _adds_decay(link: Link) -> bool:
    return link.kind is Kind.DECAY or link.decays


def _decay_after(scaling: Link) -> str:
    """How to put weight decay behind the scaling."""
    if scaling.name == SCALING:
        return "put the decay after it, and before the learning rate"
    if scaling.family is Family.SGD:
        return (
            "in place of both, chain optax.trace(momentum), "
            "optim.scale_by_parametrization(scales, family='sgd'), the decay, and "
            "optax.scale_by_learning_rate(...)"
        )
    return "use optim.adamw(..., weight_decay=...) or the like in place of both"


def _check_signs(links: tuple[Link, ...], named: list[str]) -> None:
    """Raise a `ValueError` if weight decay makes weights grow."""
    for i, link in enumerate(links):
        before = math.prod(other.sign for other in links[:i])
        if link.kind is not Kind.DECAY or link.sign * before >= 0:
            continue
        if before > 0:
            raise ValueError(
                f"{named[i]} has a negative decay, which makes weights grow; make it "
                "positive: the learning rate after it has the minus"
            )
        minus = next(j for j in range(i - 1, -1, -1) if links[j].sign < 0)
        remedy = "put it before the learning rate"
        if links[minus].kind is Kind.SCALING:
            remedy = _decay_after(links[minus])
        raise ValueError(
            f"{named[i]} is after {named[minus]}, which has the minus of the learning "
            f"rate, so the decay makes weights grow; {remedy}. A decay that does not "
            "follow the learning rate is negative there"
        )


def _check_direction(links: tuple[Link, ...], named: list[str], at: int) -> None:
    """Raise a `ValueError` if a minus after an optimizer of ours cancels its own."""
    # A decay adds to the updates; its coefficient is no factor of them.
    signs = {
        i: link.sign
        for i, link in enumerate(links)
        if i > at and link.kind is not Kind.DECAY
    }
    if links[at].name == SCALING or math.prod(signs.values()) >= 0:
        return
    minus = next(i for i, sign in signs.items() if sign < 0)
    raise ValueError(
        f"{named[minus]} is after {named[at]}, which already has the minus of the "
        "learning rate, so the updates raise the loss; drop it: the optimizer takes "
        f"the learning rate. To maximize, put optax.scale(-1.0) before {named[at]}"
    )


def _check_factors(links: tuple[Link, ...], named: list[str]) -> None:
    """Raise a `ValueError` for a learning rate whose effect a later link removes."""
    for i, link in enumerate(links):
        rate = link.name in ("scale_by_schedule", "reduce_on_plateau")
        # optax.scale may also undo a loss scaling, or turn the gradients around.
        if not rate and not (link.name == "scale" and -1 < link.factor < 0):
            continue
        for j, later in enumerate(links[i + 1 :], i + 1):
            # These multiply the update by a norm of the parameters.
            keeps = later.name.startswith("scale_by_param_block")
            sets = later.kind is Kind.MAKER and not keeps
            alias = later.kind is Kind.SCALING and later.name != SCALING
            if sets or (alias and later.family is not Family.SGD):
                raise ValueError(
                    f"{named[i]} is before {named[j]}, which divides by the size of "
                    f"the gradients, so a factor before it has no effect; put "
                    f"{link.name} last in the chain"
                )


def _check_same(links: tuple[Link, ...], named: list[str]) -> None:
    """Raise a `ValueError` if the scaling and the normalization do not fit together."""
    made = [i for i, link in enumerate(links) if isinstance(link.scales, Mapping)]
    for i, j in itertools.combinations(made, 2):
        one, two = links[i], links[j]
        shared = one.scales.keys() & two.scales.keys()
        if not one.point.same_rules(two.point):
            raise ValueError(
                f"{named[i]} has the parametrization {one.point.label}, and {named[j]} "
                f"has {two.point.label}; give both the same"
            )
        for path in sorted(shared):
            if one.scales[path] != two.scales[path]:
                raise ValueError(
                    f"{named[i]} and {named[j]} have different scales of {path!r}; "
                    "make the scales once, and give them to both"
                )


def _check_normalizing(links: tuple[Link, ...], named: list[str]) -> None:
    places = [i for i, link in enumerate(links) if link.kind is Kind.NORMALIZING]
    own = [i for i, link in enumerate(links) if link.normalizes]
    if len(places) > 1 or (places and own):
        one, two = (places + own)[:2]
        raise ValueError(
            f"{named[one]} and {named[two]} both normalize the gradients, so they are "
            "normalized twice; use one normalize_gradients, and none with an "
            "optimizer of mupax.optim, which has its own"
        )
    for i in places:
        for j, link in enumerate(links):
            if link.kind is Kind.SCALING and link.family is Family.SGD:
                raise ValueError(
                    f"{named[i]} changes the size of SGD's updates; drop it: only "
                    "optimizers with an eps need it"
                )
            if j < i and link.kind in (Kind.MAKER, Kind.SCALING):
                raise ValueError(
                    f"{named[i]} is after {named[j]}, so it acts on updates instead of "
                    f"gradients; put it before {link.name}"
                )
            alone = link.name in _CLIPS_ALONE
            if j > i and link.kind is Kind.CLIP and not alone:
                raise ValueError(
                    f"{named[j]} is after {named[i]}, so it clips gradients whose "
                    f"sizes have changed; put {link.name} before normalize_gradients"
                )
            if j < i and alone:
                raise ValueError(
                    f"{named[j]} is before {named[i]}, so it compares each parameter's "
                    "gradient, whose size changes with width and depth, with a fixed "
                    f"number; put {link.name} after normalize_gradients, where "
                    "gradients have the base's size"
                )


def _check_family(links: tuple[Link, ...], named: list[str], at: int) -> None:
    family, before = links[at].family, links[:at]
    if any(link.kind in (Kind.HIDDEN, Kind.OWN_STEP) for link in links):
        return  # checked when the chain runs
    makers = [link for link in before if link.kind is Kind.MAKER]
    if makers:
        # A trust ratio takes any update and sets its size, so it decides.
        relative = [m for m in makers if m.family is Family.RELATIVE]
        maker = (relative or makers)[-1]
        if maker.family is not None and family is not maker.family:
            raise ValueError(
                f"the updates come from {maker.name}, whose family is "
                f"{maker.family.value!r}, but are scaled for "
                f"family={str(family)!r}; pass family={maker.family.value!r}"
            )
        normalized = any(link.kind is Kind.NORMALIZING for link in before)
        eps = [link.name for link in makers if link.has_eps]
        if eps and not normalized:
            warnings.warn(
                f"{eps[0]} adds its eps to gradients whose size changes "
                "with width and depth; put optim.normalize_gradients(scales) before "
                f"{eps[0]}",
                ChainWarning,
                stacklevel=4,
            )
    elif before and family is not Family.SGD and links[at].name == SCALING:
        raise ValueError(
            f"{named[at]} is for family={str(family)!r}, but no optimizer is before "
            "it: the updates are proportional to the gradient; pass "
            "family='sgd', or put the optimizer's scale_by_... transform before it"
        )


def _check_rules(links: tuple[Link, ...]) -> None:
    by_gradient = any(
        link.kind is Kind.SCALING and link.family is Family.SGD for link in links
    )
    own = next((link.name for link in links if link.normalizes), "")
    decays = [link.name for link in links if _adds_decay(link)]
    if len(decays) > 1:
        said = _TWO_DECAYS.format(decays[0], decays[1])
        warnings.warn(said, ChainWarning, stacklevel=4)
    for link in links:
        if link.kind is Kind.CLIP and by_gradient:
            warnings.warn(_CLIPS_SGD.format(link.name), ChainWarning, stacklevel=4)
        elif link.name in _CLIPS_ALONE and own:
            said = _CLIPS_EACH.format(link.name, own)
            warnings.warn(said, ChainWarning, stacklevel=4)
        elif link.name == "adaptive_grad_clip":
            said = _CLIPS_RATIO.format(link.name)
            warnings.warn(said, ChainWarning, stacklevel=4)
        if link.kind is Kind.OWN_STEP:
            warnings.warn(_OWN_STEP.format(link.name), ChainWarning, stacklevel=4)
        if link.kind is Kind.NOISE:
            warnings.warn(_NOISE.format(link.name), ChainWarning, stacklevel=4)


_NO_RULE = (
    "{} uses curvature, a line search or a second gradient, and no rule is known for "
    "its step over width and depth; use an optimizer of mupax.optim"
)
_CLIPS_SGD = (
    "{} compares gradients with a fixed number, but their norm changes with width and "
    "depth, and the updates of SGD are proportional to them, so that it changes the "
    "step by another factor at each size; tune its threshold again at the target, "
    "leave it out, or use Adam, whose updates do not depend on the gradients' size"
)
_CLIPS_EACH = (
    "{0} compares each parameter's gradient, whose size changes with width and depth, "
    "with a fixed number; put it between optim.normalize_gradients and Optax's own "
    "scale_by_... transform in place of {1}, or use optax.clip_by_global_norm"
)
_CLIPS_RATIO = (
    "{} compares the norm of each unit's gradient with that of its weights, and their "
    "ratio changes with width and depth; use optax.clip_by_global_norm"
)
_TWO_DECAYS = "{} and {} both decay the weights, so that they decay twice; drop one"
_NOISE = (
    "{} adds noise whose size does not follow the gradients, and no rule is known for "
    "it over width and depth; tune it again at the target, or leave it out"
)
_UNSCALED = (
    "no link of optim.chain scales the updates, so that the parametrization has no "
    "effect on them: put optim.scale_by_parametrization after the transform that makes "
    "the update. A chain that is not meant to be scaled, or is a part of a larger one, "
    "is an optax.chain"
)
_UNMADE = (
    "scale_by_parametrization is for an adaptive family, but no optimizer is in this "
    "optim.chain: pass family='sgd', or put the optimizer's scale_by_... transform "
    "before it. A part of a larger chain is an optax.chain"
)
_LOOKAHEAD = (
    "optim.chain cannot check what is inside of optax.lookahead; put optim.chain "
    "inside of it: optax.lookahead(optim.chain(...), ...)"
)
_OWN_STEP = (
    "{} finds its own step size from all parameters together, and no rule is known for "
    "it over width and depth; its optimum may move more with scaled updates than "
    "without: tune it again at the target, or use an optimizer of mupax.optim"
)


def _check_running(tx: Any, params: Any) -> None:
    """Run a chain that has hidden links on known gradients, and raise for problems."""
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(x, "shape") for x in leaves):
        return  # a placeholder of optax.tree.map_params
    if isinstance(params, optax.LookaheadParams):
        warnings.warn(_LOOKAHEAD, ChainWarning, stacklevel=3)
        return
    try:
        scaling, twice = acting(tx, params)
    except TypeError:
        return  # `update` needs an extra argument that is not known here
    if scaling is None:
        warnings.warn(_UNSCALED, ChainWarning, stacklevel=3)
        return
    if twice:
        raise ValueError(
            f"the updates of {twice!r} are scaled twice; optimizers of mupax.optim "
            "already scale: drop scale_by_parametrization, or chain it with Optax's "
            "own scale_by_... transforms"
        )
    for name in sorted(_state_types(jax.eval_shape(tx.init, params))):
        if STATES.get(name) is Kind.CURVATURE:
            raise ValueError(_NO_RULE.format(name))
        if STATES.get(name) is Kind.OWN_STEP:
            warnings.warn(_OWN_STEP.format(name), ChainWarning, stacklevel=3)
    try:
        inspection = inspect_chain(tx, scaling.scales, scaling.point, params=params)
    except Unchecked as error:
        if not error.traced:
            text = f"optim.chain could not check this chain: {error}"
            warnings.warn(text, ChainWarning, stacklevel=3)
        return
    if not inspection.passed:
        raise ValueError("\n".join(inspection.problems))
    hints = (*inspection.hints, *climbing(inspection))
    if hints:
        warnings.warn("\n".join(hints), ChainWarning, stacklevel=3)


def _state_types(state: Any) -> set[str]:
    """Type names of all states inside a state."""
    kinds: set[str] = set()

    def visit(part: Any) -> bool:
        kinds.add(type(part).__name__)
        return False

    jax.tree.leaves(state, is_leaf=visit)
    return kinds
