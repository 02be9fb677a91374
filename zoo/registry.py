"""Models by name: `create`, `list_models`."""

import difflib
import fnmatch
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from flax import nnx

M = TypeVar("M", bound=type[nnx.Module])

# Not an attribute: a model's static parts are compared whenever it is traced.
_RECIPES: weakref.WeakKeyDictionary[nnx.Module, tuple[str, dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
_MODELS: dict[str, tuple[type[nnx.Module], dict[str, Any]]] = {}


def register(name: str, **defaults: Any) -> Callable[[M], M]:
    """Class decorator: put a model into the zoo, with defaults of its own."""

    def add(model: M) -> M:
        _MODELS[name] = (model, defaults)
        return model

    return add


def create(name: str, **overrides: Any) -> nnx.Module:
    """A model of the zoo.

    Args:
      name: one of `list_models()`.
      **overrides: `width`, `depth`, `base_width`, `base_depth`, `parametrization`,
        `branch_multiplier`, `rngs`, and the model's own options.

    Returns:
      An `nnx.Module` that maps a batch of inputs to logits.

    Raises:
      ValueError: an unknown model or option; the message names the nearest.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=256, depth=64, base_width=64, base_depth=8,
      ...                    parametrization="depth_mup", rngs=nnx.Rngs(0))
      >>> model.plan.branch  # (64 / 8)^-½
      0.3535533905932738
      >>> zoo.create("resmpl", width=8, depth=2, rngs=nnx.Rngs(0))
      Traceback (most recent call last):
      ...
      ValueError: unknown model 'resmpl'; the nearest is 'resmlp'
    """
    if name not in _MODELS:
        raise ValueError(
            f"unknown model {name!r}; the nearest is {_near(name, _MODELS)}"
        )
    model, defaults = _MODELS[name]
    options = list(inspect.signature(model.__init__).parameters)[1:]
    for key in overrides:
        if key not in options:
            raise ValueError(
                f"{name} has no option {key!r}; the nearest is {_near(key, options)}"
            )
    for key in ("width", "depth", "rngs"):
        if key not in overrides and key not in defaults:
            raise ValueError(f"{name} needs {key}=...")
    made = model(**{**defaults, **overrides})
    _RECIPES[made] = (name, {k: v for k, v in overrides.items() if k != "rngs"})
    return made


def recipe(model: nnx.Module) -> tuple[str, dict[str, Any]]:
    """The name and options that `create` made a model from.

    Raises:
      ValueError: a model that `create` did not make, or a copy of one.
    """
    if model not in _RECIPES:
        raise ValueError(
            f"this {type(model).__name__} was not made by zoo.create, which remembers "
            "how to make it again; create it there"
        )
    return _RECIPES[model]


def list_models(pattern: str = "*") -> list[str]:
    """Names of the zoo's models, those that match a shell pattern.

    Examples:
      >>> from mupax import zoo
      >>> zoo.list_models("resm*")
      ['resmlp']
    """
    return sorted(fnmatch.filter(_MODELS, pattern))


def _near(name: str, known: Any) -> str:
    return repr(difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0])
