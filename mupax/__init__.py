"""mupax: hyperparameter transfer for JAX, across width and depth.

Tune a small model, and the same learning rate is right for the large one.

* `mupax.optim`: the rules of width and depth, and the Optax transforms that
  apply them to any JAX model.
* `mupax.zoo`: Flax NNX models that carry the rules.
"""

from mupax import optim, zoo

__version__ = "0.1.0"
__all__ = ["__version__", "optim", "zoo"]
