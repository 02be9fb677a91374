"""mupax: hyperparameter transfer for JAX, across width and depth.

Tune a small model, and the same learning rate is right for the large one.

* `mupax.optim`: the rules of width and depth, and the Optax transforms that
  apply them to any JAX model.
* `mupax.zoo`: Flax NNX models that carry the rules.
* `mupax.coord_check`: do activations move alike at every size?
* `mupax.sweep`: where does the optimum of a model of yours go as it grows? It needs
  the packages of `mupax[train]`, as does all of `mupax.experiments`.
"""

from typing import TYPE_CHECKING, Any

from mupax import optim, zoo
from mupax.optim import coord_check

if TYPE_CHECKING:
    from mupax.experiments.sweep.api import sweep

__version__ = "0.1.0"
__all__ = ["__version__", "coord_check", "optim", "sweep", "zoo"]


def __getattr__(name: str) -> Any:
    # Importing it takes packages and time that a user of the transforms need not have.
    if name == "sweep":
        from mupax.experiments.sweep.api import sweep

        return sweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
