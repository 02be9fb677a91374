"""LoRA: train low-rank adapters of linear layers.

An adapted layer computes x W + x A B, with A of shape (inputs, rank) and B of shape
(rank, outputs). B starts at zero. The rank is constant over widths, so A has the rules
of a readout and B those of an input layer: under μP with Adam, the learning rate of A
is 1/m of the base's, that of B is the base's. One step then changes x A and x A B by
entries of constant size at every width, as a step of a hidden layer does.

Source: Hu et al. 2021, arXiv:2106.09685; Hayou et al. 2024, arXiv:2402.12354 (the
learning rates).
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mupax import optim

from .family import Family
from .layers.basic import Dense, times
from .plan import Axis, Plan
from .sharding import weight

_RANK = "rank"


class CopiedDense(Dense):
    """A `Dense` layer with the parameters of another one.

    Args:
      layer: the other layer.
    """

    def __init__(self, layer: Dense):
        self.dtype, self.inputs = layer.dtype, layer.inputs
        self.kernel, self.multiplier = layer.kernel, layer.multiplier
        self.bias, self.bias_multiplier = layer.bias, layer.bias_multiplier


class LoRADense(CopiedDense):
    """A `Dense` layer with a low-rank adapter, y = x W (+ b) + x A B.

    Args:
      layer: the layer, whose parameters this one takes.
      plan: the model's plan, with the axis "rank".
      rngs: random state.
    """

    def __init__(self, layer: Dense, plan: Plan, *, rngs: nnx.Rngs):
        super().__init__(layer)
        metadata = layer.kernel.get_metadata()
        names, in_branch = metadata["axes"], metadata["in_branch"]
        copies = layer.kernel.shape[: len(layer.kernel.shape) - len(names)]
        reads, writes = names[: self.inputs], names[self.inputs :]
        parts = {
            "lora_a": ((*reads, _RANK), self.inputs),
            "lora_b": ((_RANK, *writes), 1),
        }
        made = {}
        for name, (axes, inputs) in parts.items():
            shape = (*copies, *(plan[axis].size for axis in axes))
            scale = plan.scale(axes, inputs, in_branch)
            forward = optim.multipliers(scale, plan.parametrization).forward
            value = jnp.zeros(shape, layer.kernel.dtype)
            if name == "lora_a":
                # x A has entries of size one, whatever the width.
                std = scale.fan_in**-0.5 / forward
                drawn = jax.random.normal(rngs.params(), shape, layer.kernel.dtype)
                value = std * drawn
            variable = nnx.LoRAParam(
                value, axes=axes, inputs=inputs, in_branch=in_branch
            )
            if "base_layers" in metadata:
                variable.set_metadata(base_layers=metadata["base_layers"])
            made[name] = variable, forward
        self.lora_a, first = made["lora_a"]
        self.lora_b, second = made["lora_b"]
        self.lora_multiplier = first * second

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        first, second = (weight(p, self.dtype) for p in (self.lora_a, self.lora_b))
        low = jnp.tensordot(x.astype(self.dtype), first, self.inputs)
        added = times(jnp.tensordot(low, second, 1), self.lora_multiplier)
        return super().__call__(x) + added

    def merged(self) -> Dense:
        """A layer without adapters that computes the same."""
        layer = CopiedDense(self)
        copies = self.lora_b.ndim - len(self.lora_b.get_metadata()["axes"])
        product = functools.partial(jnp.tensordot, axes=1)
        for _ in range(copies):
            product = jax.vmap(product)
        change = product(self.lora_a[...], self.lora_b[...])
        factor = self.lora_multiplier / self.multiplier
        value = self.kernel[...] + factor * change
        layer.kernel.set_value(value.astype(self.kernel.dtype))
        return layer


def add_lora(
    model: nnx.Module,
    rank: int,
    *,
    where: str = r"attention/(query|value)$",
    rngs: nnx.Rngs,
) -> None:
    """Add a low-rank adapter to linear layers of a zoo model, in place.

    The model computes the same until the adapters are trained. Their parameters are
    `nnx.LoRAParam`, so `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` trains them alone.

    Args:
      model: of the zoo.
      rank: r of each adapter; the same at every width.
      where: pattern of the paths of the layers, for `re.search`, e.g. "attention/|mlp/"
        for all layers of a transformer's blocks.
      rngs: random state.

    Raises:
      ValueError: the model is not of the zoo, the rank is not a positive whole number,
        the pattern matches no linear layer, or the model has adapters.

    Source: Hu et al. 2021, arXiv:2106.09685.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=32, depth=2, base_width=8, heads=2,
      ...                    rngs=nnx.Rngs(0))
      >>> zoo.add_lora(model, 4, where="mlp/up", rngs=nnx.Rngs(1))
      >>> for path, scale in zoo.scales(model).items():
      ...     if "lora" in path:
      ...         print(path, scale.role.value, scale.shape)
      blocks/mlp/up/lora_a output (2, 32, 4)
      blocks/mlp/up/lora_b input (2, 4, 128)
    """
    if not isinstance(model, Family):
        raise ValueError(
            f"{type(model).__name__} is not a model of mupax.zoo; for other models "
            "wrap layers by nnx.LoRA"
        )
    plan = model.plan
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r} must be a whole number, at least 1")
    if plan.has(_RANK):
        raise ValueError(
            f"this {type(model).__name__} has adapters of rank {plan[_RANK].size}; "
            "call zoo.merge_lora(model) before you add others"
        )
    layers = _layers(model, Dense)
    chosen = {path: layer for path, layer in layers.items() if re.search(where, path)}
    if not chosen:
        raise ValueError(
            f"where={where!r} matches no linear layer of this {type(model).__name__}; "
            f"it has {', '.join(layers)}"
        )
    model.plan = dataclasses.replace(plan, axes=(*plan.axes, (_RANK, Axis(rank, rank))))
    for path, layer in chosen.items():
        _replace(model, path, LoRADense(layer, model.plan, rngs=rngs))


def merge_lora(model: nnx.Module) -> None:
    """Add the adapters of `add_lora` to their kernels and remove them, in place.

    The model then computes the same without adapters, and can be written by `zoo.save`
    and `mupax convert`.

    Raises:
      ValueError: the model has no adapters of `add_lora`.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=16, depth=2, rngs=nnx.Rngs(0))
      >>> zoo.add_lora(model, 4, where="blocks", rngs=nnx.Rngs(1))
      >>> zoo.merge_lora(model)
      >>> list(zoo.scales(model))
      ['blocks/layers/0/kernel', 'readin/kernel', 'readout/kernel']
    """
    layers = _layers(model, LoRADense)
    if not layers or not isinstance(model, Family):
        raise ValueError(
            f"this {type(model).__name__} has no adapters of zoo.add_lora to merge"
        )
    for path, layer in layers.items():
        _replace(model, path, layer.merged())
    axes = tuple((name, axis) for name, axis in model.plan.axes if name != _RANK)
    model.plan = dataclasses.replace(model.plan, axes=axes)


def _layers(model: nnx.Module, kind: type[nnx.Module]) -> dict[str, Any]:
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, kind)
    }


def _replace(model: nnx.Module, path: str, layer: nnx.Module) -> None:
    *parents, last = path.split("/")
    owner: Any = model
    for name in parents:
        owner = owner[int(name)] if name.isdecimal() else getattr(owner, name)
    if last.isdecimal():
        owner[int(last)] = layer
    else:
        setattr(owner, last, layer)
