"""The training step of all runs.

A `Recipe` holds pure functions of (state, batch, hyperparameters, key). The trainer
compiles its step on a mesh (`program`). A sweep runs it for many values of the
hyperparameters (`mupax.experiments.sweep.program`). Both pass hyperparameters as
arguments, so that XLA rounds them in the same way.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

State = dict[str, Any]
Hyper = Mapping[str, Any]
Batch = Any


class Out(NamedTuple):
    """The outputs of a step besides the next state.

    Attributes:
      loss: training loss.
      plain: training loss without label smoothing, which can be compared between runs
        of different smoothing.
      grads: gradients.
      updates: added to the parameters.
    """

    loss: Array
    plain: Array
    grads: Any
    updates: Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The definition of a training step.

    Attributes:
      loss: maps (params, rest, batch, hyper, key) to (loss, (plain loss, rest)); see
        `Out`. `rest` holds other variables of the model, e.g. batch statistics.
      optimizer: maps (hyper, params, rest) to an optimizer.
      accumulate: number of parts of a batch, computed one after another.
      ema: decay of a moving average of the parameters, which evaluations then use.
    """

    loss: Callable[[Any, Any, Batch, Hyper, Any], tuple[Array, tuple[Array, Any]]]
    optimizer: Callable[[Hyper, Any, Any], optax.GradientTransformation]
    accumulate: int = 1
    ema: float | None = None

    def start(self, params: Any, rest: Any, hyper: Hyper) -> State:
        """The state before the first step."""
        state = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "rest": rest,
            "optimizer": self.optimizer(hyper, params, rest).init(params),
        }
        if self.ema is not None:
            state["ema"] = jax.tree.map(jnp.copy, params)
        return state

    def step(
        self, state: State, batch: Batch, hyper: Hyper, key: Key[Array, ""]
    ) -> tuple[State, Out]:
        """One training step.

        Args:
          state: from `start` or the step before.
          batch: a pytree of arrays with a leading axis of examples.
          hyper: hyperparameters by name.
          key: of the run; the step number is folded into it.
        """
        params, rest = state["params"], state["rest"]
        key = jax.random.fold_in(key, state["step"])
        loss, plain, rest, grads = self._gradients(params, rest, batch, hyper, key)
        tx = self.optimizer(hyper, params, rest)
        updates, optimizer = tx.update(grads, state["optimizer"], params)
        params = optax.apply_updates(params, updates)
        count = state["step"] + 1
        new = {"step": count, "params": params, "rest": rest, "optimizer": optimizer}
        if self.ema is not None:
            # A smaller decay in the first steps, as in TensorFlow and timm.
            decay = jnp.minimum(self.ema, (1.0 + count) / (10.0 + count))
            new["ema"] = optax.incremental_update(params, state["ema"], 1.0 - decay)
        return new, Out(loss, plain, grads, updates)

    def _gradients(
        self, params: Any, rest: Any, batch: Batch, hyper: Hyper, key: Key[Array, ""]
    ) -> tuple[Array, Array, Any, Any]:
        """Mean loss, mean plain loss, other variables and mean gradients."""

        def loss(params: Any, rest: Any, part: Batch, key: Any) -> Any:
            return self.loss(params, rest, part, hyper, key)

        grad = jax.value_and_grad(loss, has_aux=True)
        parts = self.accumulate
        if parts == 1:
            (value, (plain, rest)), grads = grad(params, rest, batch, key)
            return value, plain, rest, grads

        def split(x: Array) -> Array:
            # Every part has rows of each device, so that no row moves.
            return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

        def add(carry: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
            rest, sums = carry
            (value, (plain, rest)), more = grad(params, rest, *part)
            return (rest, jax.tree.map(jnp.add, sums, (value, plain, more))), None

        zeros = jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (rest, sums), _ = jax.lax.scan(
            add,
            (rest, zeros),
            (jax.tree.map(split, batch), jax.random.split(key, parts)),
        )
        value, plain, grads = jax.tree.map(lambda x: x / parts, sums)
        return value, plain, rest, grads
