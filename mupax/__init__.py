"""mupax: hyperparameter transfer for JAX, across width and depth.

Tune a small model, and use the same learning rate for the large one.

* `mupax.optim`: scaling rules over width and depth, and the Optax transforms that
  apply them to any JAX model.
* `mupax.zoo`: Flax NNX models with matching initialization and multipliers.
* `mupax.coord_check`: check that activations change by the same amount at every size.
* `mupax.sweep`: measure how the optimal hyperparameters of your own model change with
  its size. It needs the packages of the extra `train`, as all of `mupax.experiments`.
* `mupax.train`: train a model of the zoo, also on data from Python.
"""

from typing import TYPE_CHECKING, Any

from mupax import optim, zoo
from mupax.optim import coord_check

if TYPE_CHECKING:
    from mupax.experiments.run.commands import train_here as train
    from mupax.experiments.sweep.api import sweep

__version__ = "0.1.0"
__all__ = ["__version__", "coord_check", "optim", "sweep", "train", "zoo"]


def __getattr__(name: str) -> Any:
    # Imported lazily: it needs packages and time that users of the transforms lack.
    lazy = {"sweep": ("sweep.api", "sweep"), "train": ("run.commands", "train_here")}
    if name in lazy:
        from mupax import experiments

        return experiments.load(*lazy[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
