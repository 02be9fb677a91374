"""A model's multipliers as factors of its weights.

Files of other libraries have no place for a branch multiplier or a scale of logits.
Every one of them stands before or behind a linear map, and can be multiplied into its
weights: what is written so computes what the model computes.
"""

import math

from flax import nnx

from mupax import optim

from .attention import logit_scale
from .convnet_layouts import ConvNet, branch_factor
from .decoder import Decoder
from .plan import scales
from .vit import ViT


def factors(model: nnx.Module) -> dict[str, float]:
    """What each parameter is to be multiplied by in a network without multipliers.

    Args:
      model: a convolutional network, ViT, GPT or Llama, or its abstract twin from
        `nnx.eval_shape`.

    Returns:
      By path, those that are not one: none for a model at its base size.

    Raises:
      ValueError: another kind of model, a multiplier of zero, or a tied readout
        without a norm before it, whose factor has no place.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> from mupax.zoo.folding import factors
      >>> model = zoo.create("vit", width=32, depth=4, base_width=8, base_depth=1,
      ...                    heads=2, rngs=nnx.Rngs(0))
      >>> for path, factor in factors(model).items():
      ...     print(path, factor)  # a·M^-1 = ¼, and √(4/16) for 1/d_head
      blocks/attention/out/bias 0.25
      blocks/attention/out/kernel 0.25
      blocks/attention/query/bias 0.5
      blocks/attention/query/kernel 0.5
      blocks/mlp/down/bias 0.25
      blocks/mlp/down/kernel 0.25
    """
    if not isinstance(model, ConvNet | ViT | Decoder):
        raise ValueError(f"a {type(model).__name__} has no twin in other libraries")
    point = model.plan.parametrization
    by_path = {}
    for path, scale in scales(model).items():
        factor = optim.multipliers(scale, point).forward * _around(model, path)
        if factor == 0:
            raise ValueError(
                f"{path!r} is multiplied by zero, which no weights of another "
                "library can say; give a branch_multiplier that is not zero"
            )
        # √d · 1/√d is one but for rounding.
        if not math.isclose(factor, 1, rel_tol=1e-12):
            by_path[path] = factor
    return by_path


def _around(model: ConvNet | ViT | Decoder, path: str) -> float:
    """The factors that stand outside of a parameter's own layer."""
    parts = path.split("/")
    if isinstance(model, Decoder) and model.readout is None:
        after = model.tied_multiplier * model.plan.output
        if model.norm is None and after != 1:
            raise ValueError(
                f"the logits of this tied readout are multiplied by {after:g}, and "
                "without layer_norm no weights can hold that; use tied=False"
            )
        if parts[0] == "norm":
            return after
    if parts[0] == "readout":
        return model.plan.output
    if isinstance(model, ConvNet):
        return branch_factor(model, path)
    # A norm forgets a factor in front of it.
    normed = isinstance(model, Decoder) and model.options.qk_norm
    reads = "query_norm" if normed else "query"
    owners = (["blocks", "attention"], ["attention_pool", "attention"])
    if parts[:2] in owners and parts[2] == reads:
        # Theirs is 1/√d_head.
        return logit_scale(model.plan) * model.plan["head_dim"].size ** 0.5
    if parts[:3] in (["blocks", "attention", "out"], ["blocks", "mlp", "down"]):
        return model.plan.branch
    return 1.0
