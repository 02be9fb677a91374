"""`Plan`: the sizes of a model and of its base, by axis name.

Every parameter names its axes. The names determine its role (which axes grow, and by
how much) and hence its initialization and multipliers, and its sharding.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mupax import optim

LAYERS = "layers"  # the leading axis of stacked blocks


class Axis(NamedTuple):
    """One named axis: its size in the base and in this model."""

    base: int
    size: int
    grows: bool = False


class Frozen(nnx.Variable[Any]):
    """A variable for weights that are not trained.

    It is not an `nnx.Param`, so optimizers and `zoo.scales` leave it out.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=8, depth=2, train_ends=False,
      ...                    rngs=nnx.Rngs(0))
      >>> isinstance(model.readin.kernel, zoo.Frozen), len(zoo.scales(model))
      (True, 1)
    """


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes, parametrization and dtypes that all layers of one model share.

    Attributes:
      axes: the named axes, as (name, `Axis`) pairs, so that a plan can be hashed.
      parametrization: the parametrization.
      depth: depth ratio M = depth / base depth.
      branch_multiplier: a, in front of every residual branch at the base depth.
      dtype: of the computation.
      param_dtype: of the parameters.

    Source: Tensor Programs V, Table 3 (width); Tensor Programs VI, Definition 6.2
    (depth).

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=32, depth=8, base_width=16, base_depth=2,
      ...                    rngs=nnx.Rngs(0))
      >>> model.plan["embed"], model.plan.depth, model.plan.branch  # (8 / 2)^-½
      (Axis(base=16, size=32, grows=True), 4.0, 0.5)
    """

    axes: tuple[tuple[str, Axis], ...]
    parametrization: optim.Parametrization
    depth: float = 1.0
    branch_multiplier: float = 1.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __getitem__(self, name: str) -> Axis:
        return dict(self.axes)[name]

    def has(self, name: str) -> bool:
        """Whether there is an axis of this name."""
        return name in dict(self.axes)

    @property
    def branch(self) -> float:
        """The factor a·M^-alpha in front of each residual branch."""
        return self.parametrization.branch_multiplier(
            self.depth, a=self.branch_multiplier
        )

    @property
    def output(self) -> float:
        """The factor 1/μ0 of the model's output (Bordelon et al. eq. 1)."""
        return 1 / self.parametrization.richness

    @property
    def width(self) -> float:
        """Ratio of the width that the readout sums over, target over base."""
        axis = self["embed"]
        return axis.size / axis.base

    def readout_size(self, ratio: float) -> float:
        """Initial size of a readout over its base's, at this ratio of its fan-in."""
        scale = optim.ParamScale(
            "", optim.Role.OUTPUT, (), (), width_in=ratio, width_last=ratio
        )
        return self.parametrization.rows[scale.role].init.of(scale)

    def scale(
        self,
        names: Sequence[str],
        inputs: int,
        in_branch: bool,
        path: str = "",
        layers: tuple[int, int] | None = None,
        stacked: int = 0,
    ) -> optim.ParamScale:
        """Build the scale of a parameter with these axes.

        Args:
          names: its axes, without the axis of layers.
          inputs: number of fan-in axes, which follow the `stacked` ones.
          in_branch: whether it is in a residual branch.
          path: its path.
          layers: (number of layers of the base, of the target) if it is stacked.
          stacked: number of leading axes that count copies of one weight, e.g.
            experts: neither fan-in nor fan-out.
        """
        axes = [self[name] for name in names]
        lead = 0 if layers is None else 1
        if layers is not None:
            axes.insert(0, Axis(*layers))
        lead += stacked
        rank = len(axes)
        heads = [inputs > 0 and n in ("heads", "kv_heads") for n in names]
        one = [False] * (rank - len(heads)) + heads
        head_shape, base_head_shape = (
            tuple(1 if h else n for n, h in zip(sizes, one, strict=True))
            if any(heads)
            else ()
            for sizes in ([a.size for a in axes], [a.base for a in axes])
        )
        return dataclasses.replace(
            optim.param_scale(
                path,
                tuple(a.base for a in axes),
                tuple(a.size for a in axes),
                tuple(range(lead, lead + inputs)),
                tuple(range(lead + inputs, rank)),
                grows=frozenset(i for i, a in enumerate(axes) if a.grows),
            ),
            width_last=self.width,
            depth=self.depth,
            in_branch=in_branch,
            origin="axis names",
            head_shape=head_shape,
            base_head_shape=base_head_shape,
        )

    def param(
        self,
        key: Callable[[], jax.Array] | None,
        names: tuple[str, ...],
        *,
        inputs: int = 0,
        in_branch: bool = False,
        init: str = "fan_in",
        gain: float = 1.0,
        kind: type[nnx.Variable[Any]] = nnx.Param,
        stacked: int = 0,
    ) -> tuple[nnx.Variable[Any], float]:
        """Create a parameter and its forward multiplier.

        Args:
          key: function that returns a random key, e.g. `rngs.params`; None for "zeros"
            and "ones".
          names: its axes.
          inputs: number of fan-in axes, which come first.
          in_branch: whether it is in a residual branch.
          init: "fan_in" (normal, standard deviation gain/√fan_in at the base, and
            from there by the parametrization), "uniform" (of the same standard
            deviation), "normal" (of standard deviation gain), "zeros" or "ones" (times
            gain).
          gain: see `init`.
          kind: `nnx.Param`, or `Frozen`.
          stacked: see `scale`.

        Returns:
          (variable, multiplier).
        """
        scale = self.scale(names, inputs, in_branch, stacked=stacked)
        rule = optim.multipliers(scale, self.parametrization)
        shape, dtype = scale.shape, self.param_dtype
        if init in ("fan_in", "uniform", "normal"):
            assert key is not None, init
            fan_in = scale.base_shape[stacked : stacked + inputs]
            summed = 1 if init == "normal" else math.prod(fan_in)
            std = gain * summed**-0.5 * rule.init_std
            if init == "uniform":
                # A uniform variable on [-1, 1] has variance 1/3.
                std *= 3**0.5
                drawn = jax.random.uniform(key(), shape, dtype, -1, 1)
            else:
                drawn = jax.random.normal(key(), shape, dtype)
            # Without a barrier, XLA would merge std with a factor inside the draw, and
            # weights drawn inside and outside of jit would differ by rounding.
            value = std * jax.lax.optimization_barrier(drawn)
        else:
            # init_std contains the inverse of the gauge's forward multiplier.
            start = {"zeros": 0.0, "ones": gain * rule.init_std}[init]
            value = jnp.full(shape, start, dtype)
        variable = kind(value, axes=names, inputs=inputs, in_branch=in_branch)
        if stacked:
            variable.set_metadata(stacked=stacked)
        return variable, rule.forward


def times_width(width: int, multiple: float, name: str) -> int:
    """Compute the size of an axis that is a multiple of the width.

    Args:
      width: of the model or of its base.
      multiple: of the width; relative errors below 1e-9 are rounded away, e.g. of 5/3.
      name: of the axis or option, for the message.

    Raises:
      ValueError: the size is not whole, or below 1.

    Examples:
      >>> times_width(448, 1856 / 448, "axis 'mlp'")
      1856
    """
    size = width * multiple
    if not 1 <= size < math.inf or abs(size - round(size)) > 1e-9 * size:
        raise ValueError(
            f"{name} is {multiple:g} times the width, which gives {size:g}; choose "
            "widths for which it is a whole number, at least 1"
        )
    return round(size)


def scales(
    model: nnx.Module,
    *,
    batch: tuple[float, float] | None = None,
    examples: tuple[float, float] | None = None,
) -> optim.Scales:
    """Return the role and growth ratios of every parameter of a zoo model.

    Pass the result to an optimizer of `mupax.optim`.

    Args:
      model: a model of the zoo, possibly abstract (from `nnx.eval_shape`).
      batch: (base, target) batch size in examples; None if they are equal.
      examples: (base, target) number of examples of the whole training; None if they
        are equal. See `optim.TrainingScale` for the rules.

    Returns:
      `optim.Scales`, for the paths of `nnx.state(model, nnx.Param)`.

    Raises:
      ValueError: the model has no plan, a parameter is not of the zoo, or the target's
        batch is beyond the critical size.

    Source: Tensor Programs V, Table 8 (roles).

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=32, depth=4, base_width=16, base_depth=2,
      ...                    parametrization="depth_mup", rngs=nnx.Rngs(0))
      >>> for path, scale in zoo.scales(model).items():
      ...     print(path, scale.role.value, scale.shape, scale.depth)
      blocks/layers/0/kernel hidden (4, 32, 32) 2.0
      readin/kernel input (64, 32) 2.0
      readout/kernel output (32, 10) 2.0
    """
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{type(model).__name__} has no plan, so it is not a model of mupax.zoo; "
            "for other models use optim.infer_scales(base, target, inputs=(x,))"
        )
    by_path = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, metadata = "/".join(map(str, path)), variable.get_metadata()
        names = metadata.get("axes")
        if names is None:
            raise ValueError(
                f"parameter {name!r} is not one of the zoo's {type(model).__name__}, "
                "so its scale is unknown; for a model with new layers, e.g. nnx.LoRA, "
                "get the scales by optim.infer_scales(base, target, inputs=(x,))"
            )
        layers = None
        if len(variable.shape) == len(names) + 1:
            count = variable.shape[0]
            base = metadata.get("base_layers")
            layers = (base or round(count / plan.depth) or 1, count)
        by_path[name] = plan.scale(
            names,
            metadata["inputs"],
            metadata["in_branch"],
            name,
            layers,
            metadata.get("stacked", 0),
        )
    known = optim.Scales(by_path, plan.parametrization)
    return known.for_training(batch=batch, examples=examples)


def axis_names(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Return the axis names of every parameter, by path.

    Stacked parameters have "layers" as first axis.

    Args:
      model: a model of the zoo, possibly abstract (from `nnx.eval_shape`).

    Raises:
      ValueError: a parameter is not of the zoo, e.g. of an `nnx.LoRA`.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=32, depth=4, rngs=nnx.Rngs(0))
      >>> zoo.axis_names(model)["blocks/layers/0/kernel"]
      ('layers', 'embed', 'mlp')
    """
    by_path = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, names = "/".join(map(str, path)), variable.get_metadata().get("axes")
        if names is None:
            raise ValueError(
                f"parameter {name!r} is not one of the zoo and has no axis names"
            )
        lead = (LAYERS,) * (len(variable.shape) - len(names))
        by_path[name] = (*lead, *names)
    return by_path
