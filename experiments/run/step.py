"""The training step: one program, from a state and a batch to the next state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from mupax import zoo
from mupax.optim.paths import flatten
from mupax.zoo.sharding import Rules

from .mesh import replicated, state_shardings
from .objective import Batch, Objective

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides what a step computes.

    Attributes:
      tx: the optimizer, with its learning rate.
      objective: what it minimizes.
      seed: of all that is random in a step.
      accumulate: parts that a batch is computed in, one after another.
      ema: decay of the moving average of the weights, which is then what is
        evaluated; None for none.
      log_every: steps between those that measure norms.
    """

    tx: optax.GradientTransformation
    objective: Objective
    seed: int = 0
    accumulate: int = 1
    ema: float | None = None
    log_every: int = 1


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's training and evaluation on a mesh, ready to be compiled.

    Attributes:
      recipe: what a step computes.
      training: the model's structure while it trains.
      testing: and while it is evaluated.
      mesh: the devices.
      rules: changes to `zoo.RULES`.
      abstract: shapes and dtypes of the state.
      shardings: where its arrays lie.
      norms: names of what `measure` measures.
    """

    recipe: Recipe
    training: nnx.GraphDef
    testing: nnx.GraphDef
    mesh: Mesh
    rules: Rules | None
    abstract: State
    shardings: State
    roles: Mapping[str, str]

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms that a logged step measures."""
        roles = sorted(set(self.roles.values()))
        kinds = ("parameter_norm", "update_norm")
        return ("gradient_norm", *(f"{k}/{role}" for k in kinds for role in roles))

    def step(self, state: State, batch: Batch) -> tuple[State, tuple[Array, Array]]:
        """The next state, the loss, and the norms, which are zero unless logged."""
        recipe = self.recipe
        key = jax.random.fold_in(jax.random.key(recipe.seed), state["step"])
        with zoo.use_mesh(self.mesh, self.rules):
            loss, rest, grads = self._gradients(state, batch, key)
            updates, optimizer = recipe.tx.update(
                grads, state["optimizer"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
            count = state["step"] + 1
            new = {
                "step": count,
                "params": params,
                "rest": rest,
                "optimizer": optimizer,
            }
            if recipe.ema is not None:
                new["ema"] = _average(state["ema"], params, recipe.ema, count)
            norms = jax.lax.cond(
                count % recipe.log_every == 0,
                lambda: self._measure(params, updates, grads),
                lambda: jnp.zeros(len(self.norms)),
            )
        return new, (loss, norms)

    def score(
        self, state: State, batch: Batch, sums: Float[Array, " 3"]
    ) -> Float[Array, " 3"]:
        """Sums of loss, hits and count, a test batch added to those before."""
        weights = state.get("ema", state["params"])
        with zoo.use_mesh(self.mesh, self.rules):
            model = nnx.merge(self.testing, weights, state["rest"], copy=True)
            return sums + self.recipe.objective.score(model, batch)

    def jit_step(self) -> Any:
        """`step`, compiled for the mesh; it takes the state's memory for the next."""
        batch = zoo.batch_sharding(self.mesh)
        every = replicated(self.mesh)
        return jax.jit(
            self.step,
            donate_argnums=0,
            in_shardings=(self.shardings, batch),
            out_shardings=(self.shardings, (every, every)),
        )

    def jit_score(self) -> Any:
        """`score`, compiled for the mesh."""
        batch = zoo.batch_sharding(self.mesh)
        every = replicated(self.mesh)
        return jax.jit(
            self.score,
            in_shardings=(self.shardings, batch, every),
            out_shardings=every,
        )

    def start(self, params: nnx.State, rest: nnx.State) -> State:
        """The state of a model that has not been trained; traced or not."""
        state = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "rest": rest,
            "optimizer": self.recipe.tx.init(params),
        }
        if self.recipe.ema is not None:
            state["ema"] = jax.tree.map(jnp.copy, params)
        return state

    def _gradients(
        self, state: State, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Array, nnx.State, nnx.State]:
        """Mean loss, the variables that changed, and the mean gradient."""

        def loss_fn(
            params: nnx.State, rest: nnx.State, part: Batch, key: Key[Array, ""]
        ) -> tuple[Array, nnx.State]:
            model = nnx.merge(self.training, params, rest, copy=True)
            loss = self.recipe.objective.loss(model, part, key)
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        grad = jax.value_and_grad(loss_fn, has_aux=True)
        parts = self.recipe.accumulate
        if parts == 1:
            (loss, rest), grads = grad(state["params"], state["rest"], batch, key)
            return loss, rest, grads

        def split(x: Array) -> Array:
            # Every part takes some rows of each device: none of them moves.
            return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

        def add(carry: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
            rest, loss, grads = carry
            (one, rest), more = grad(state["params"], rest, part[0], part[1])
            return (rest, loss + one, jax.tree.map(jnp.add, grads, more)), None

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        (rest, loss, grads), _ = jax.lax.scan(
            add,
            (state["rest"], jnp.zeros(()), zeros),
            (jax.tree.map(split, batch), jax.random.split(key, parts)),
        )
        return loss / parts, rest, jax.tree.map(lambda g: g / parts, grads)

    def _measure(
        self, params: nnx.State, updates: nnx.State, grads: nnx.State
    ) -> Float[Array, " norms"]:
        """Root of the sum of squares, of all gradients and of each role."""
        roles = sorted(set(self.roles.values()))
        found = [optax.tree.norm(grads)]
        for tree in (params, updates):
            for role in roles:
                leaves = [x for path, x in flatten(tree) if self.roles[path] == role]
                found.append(optax.tree.norm(leaves))
        return jnp.stack([x.astype(jnp.float32) for x in found])


def make_program(
    model: nnx.Module,
    recipe: Recipe,
    mesh: Mesh,
    rules: Rules | None = None,
) -> Program:
    """The program of a model.

    Args:
      model: of the zoo or any other, or its abstract twin from `nnx.eval_shape`.
      recipe: what a step computes.
      mesh: the devices.
      rules: changes to `zoo.RULES`.

    Raises:
      UserError: a model that this mesh cannot split.
    """
    model.eval()
    testing = nnx.graphdef(model)
    model.train()
    training, *variables = nnx.split(model, nnx.Param, ...)
    program = Program(recipe, training, testing, mesh, rules, {}, {}, _roles(model))
    abstract = jax.eval_shape(program.start, *variables)
    shardings = state_shardings(abstract, model, mesh, rules)
    return dataclasses.replace(program, abstract=abstract, shardings=shardings)


def init_on_mesh(program: Program, create: Callable[[], nnx.Module]) -> State:
    """The first state, each device making only its own part of it."""

    def init() -> State:
        with zoo.use_mesh(program.mesh, program.rules):
            model = create()
            model.train()
            params, rest = nnx.state(model, nnx.Param, ...)
            return program.start(params, rest)

    return jax.jit(init, out_shardings=program.shardings)()


def _average(
    ema: nnx.State, params: nnx.State, decay: float, count: Array
) -> nnx.State:
    # Less of the past at first, when there is little of it, as in TensorFlow and timm.
    share = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
    return optax.incremental_update(params, ema, 1.0 - share)


def _roles(model: nnx.Module) -> dict[str, str]:
    """The role of each parameter; "all" where the model does not tell."""
    params = nnx.state(model, nnx.Param)
    if not isinstance(getattr(model, "plan", None), zoo.Plan):
        return {path: "all" for path, _ in flatten(params)}
    return {path: scale.role.value for path, scale in zoo.scales(model).items()}
