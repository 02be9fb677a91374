"""Fold a model's multipliers into its weights, for files of other libraries.

Such files cannot hold a branch multiplier or a scale of logits. Each multiplier is next
to a linear map, so it can be multiplied into that map's weights: the other library's
network then computes the same function.
"""

import math

from flax import nnx

from mupax import optim

from ..families.decoder import Decoder
from ..families.vit import ViT
from ..layers.attention import logit_scale
from ..plan import scales
from .convnet_layouts import ConvNet, branch_factor


def factors(model: nnx.Module) -> dict[str, float]:
    """Factors of the parameters in an equivalent network without multipliers.

    Args:
      model: a convolutional network, ViT, GPT or Llama, possibly abstract (from
        `nnx.eval_shape`).

    Returns:
      {path: factor}, without factors of one; empty for a model at its base size.

    Raises:
      ValueError: another kind of model; a multiplier of zero; or a tied readout without
        a norm before it, into which its factor could be folded.

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
        raise ValueError(
            f"no other library has a {type(model).__name__}; use a convolutional "
            "network, vit, gpt or llama"
        )
    point = model.plan.parametrization
    by_path = {}
    for path, scale in scales(model).items():
        factor = optim.multipliers(scale, point).forward * _around(model, path)
        if factor == 0:
            raise ValueError(
                f"{path!r} is multiplied by zero, which cannot be folded into weights; "
                "use a branch_multiplier other than zero"
            )
        # √d · 1/√d is one up to rounding.
        if not math.isclose(factor, 1, rel_tol=1e-12):
            by_path[path] = factor
    return by_path


def _around(model: ConvNet | ViT | Decoder, path: str) -> float:
    """The product of the multipliers outside of a parameter's own layer."""
    parts = path.split("/")
    if isinstance(model, Decoder) and model.readout is None and model.head:
        after = model.tied_multiplier * model.plan.output
        if model.norm is None and after != 1:
            raise ValueError(
                f"the logits of this tied readout are multiplied by {after:g}, which "
                "without layer_norm no network of transformers has; such a model can "
                "only be saved by zoo.save"
            )
        if parts[0] == "norm":
            return after
    if parts[0] == "readout":
        return model.plan.output
    if isinstance(model, ConvNet):
        return branch_factor(model, path)
    # With QK-norm, the factor must come after the norm.
    normed = isinstance(model, Decoder) and model.options.qk_norm
    reads = "query_norm" if normed else "query"
    owners = (["blocks", "attention"], ["attention_pool", "attention"])
    if parts[:2] in owners and parts[2] == reads:
        # Other libraries have 1/√d_head.
        return logit_scale(model.plan) * model.plan["head_dim"].size ** 0.5
    if parts[:3] in (["blocks", "attention", "out"], ["blocks", "mlp", "down"]):
        return model.plan.branch
    return 1.0
