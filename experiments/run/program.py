"""A run's training step and evaluation, compiled for a mesh."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mupax import zoo
from mupax.optim.paths import flatten
from mupax.zoo.sharding import Rules

from .loss import Batch, Objective
from .mesh import put, replicated, state_shardings
from .step import Hyper, Recipe, State


@dataclasses.dataclass(frozen=True)
class Program:
    """The training step and evaluation of a model on a mesh.

    Attributes:
      recipe: defines the step.
      objective: defines the evaluation.
      hyper: hyperparameters that the step takes as arguments.
      seed: of the random numbers of the steps.
      log_every: steps between those that measure norms.
      testing: structure of the model in evaluation mode.
      mesh: of devices.
      rules: changes to `zoo.RULES`.
      roles: role of each parameter, by path.
      abstract: shapes and dtypes of the state.
      shardings: of the state.
    """

    recipe: Recipe
    objective: Objective
    hyper: Hyper
    seed: int
    log_every: int
    testing: nnx.GraphDef
    mesh: Mesh
    rules: Rules | None
    roles: Mapping[str, str]
    abstract: State = dataclasses.field(default_factory=dict)
    shardings: State = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract["params"]))

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of the norms that a logged step measures."""
        roles = sorted(set(self.roles.values()))
        kinds = ("parameter_norm", "update_norm")
        return ("gradient_norm", *(f"{k}/{role}" for k in kinds for role in roles))

    def step(
        self, state: State, batch: Batch, hyper: Hyper
    ) -> tuple[State, tuple[Array, Array]]:
        """Returns the next state, the loss, and the norms (zero if not logged)."""
        with zoo.use_mesh(self.mesh, self.rules):
            key = jax.random.key(self.seed)
            new, out = self.recipe.step(state, batch, hyper, key)
            norms = jax.lax.cond(
                new["step"] % self.log_every == 0,
                lambda: self._measure(new["params"], out.updates, out.grads),
                lambda: jnp.zeros(len(self.norms)),
            )
        return new, (out.loss, norms)

    def score(
        self, state: State, batch: Batch, sums: Float[Array, " 3"]
    ) -> Float[Array, " 3"]:
        """Adds the loss, correct predictions and count of a test batch to `sums`."""
        weights = state.get("ema", state["params"])
        with zoo.use_mesh(self.mesh, self.rules):
            model = nnx.merge(self.testing, weights, state["rest"], copy=True)
            return sums + self.objective.score(model, batch)

    def jit_step(self) -> Any:
        """`step`, compiled for the mesh. It donates the state."""
        batch = zoo.batch_sharding(self.mesh)
        everywhere = replicated(self.mesh)
        return jax.jit(
            self.step,
            donate_argnums=0,
            in_shardings=(self.shardings, batch, everywhere),
            out_shardings=(self.shardings, (everywhere, everywhere)),
        )

    def jit_score(self) -> Any:
        """`score`, compiled for the mesh."""
        batch = zoo.batch_sharding(self.mesh)
        everywhere = replicated(self.mesh)
        return jax.jit(
            self.score,
            in_shardings=(self.shardings, batch, everywhere),
            out_shardings=everywhere,
        )

    def start(self, params: nnx.State, rest: nnx.State) -> State:
        """The initial state. May be traced."""
        return self.recipe.start(params, rest, self.hyper)

    def start_on_mesh(self, model: nnx.Module) -> State:
        """The initial state of a model whose weights exist, copied to the mesh."""
        params, rest = parts(model)
        params = put(params, self.shardings["params"])
        rest = put(rest, self.shardings["rest"])
        return jax.jit(self.start, out_shardings=self.shardings)(params, rest)

    def init_on_mesh(self, create: Callable[[], nnx.Module]) -> State:
        """The initial state. Each device creates only its own part."""

        def init() -> State:
            with zoo.use_mesh(self.mesh, self.rules):
                return self.start(*parts(create()))

        return jax.jit(init, out_shardings=self.shardings)()

    def _measure(
        self, params: nnx.State, updates: nnx.State, grads: nnx.State
    ) -> Float[Array, " norms"]:
        """Norms of all gradients, and of parameters and updates by role."""
        roles = sorted(set(self.roles.values()))
        norms = [optax.tree.norm(grads)]
        for tree in (params, updates):
            for role in roles:
                leaves = [x for path, x in flatten(tree) if self.roles[path] == role]
                norms.append(optax.tree.norm(leaves))
        return jnp.stack([x.astype(jnp.float32) for x in norms])


def parts(model: nnx.Module) -> tuple[nnx.State, nnx.State]:
    """The parameters and the other variables of a model in training mode."""
    model.train()
    params, rest = nnx.state(model, nnx.Param, ...)
    return params, rest


def make_program(
    model: nnx.Module,
    recipe: Recipe,
    objective: Objective,
    mesh: Mesh,
    *,
    hyper: Hyper | None = None,
    seed: int = 0,
    log_every: int = 1,
    rules: Rules | None = None,
) -> Program:
    """Build the program of a model.

    Args:
      model: of the zoo or any other; abstract or not.
      recipe: defines the step.
      objective: defines the evaluation.
      mesh: of devices.
      hyper: hyperparameters that the recipe takes, by name.
      seed: of the random numbers of the steps.
      log_every: steps between those that measure norms.
      rules: changes to `zoo.RULES`.

    Raises:
      UserError: this mesh cannot shard the model.
    """
    model.eval()
    testing = nnx.graphdef(model)
    variables = parts(model)
    program = Program(
        recipe,
        objective,
        {name: np.float32(value) for name, value in (hyper or {}).items()},
        seed,
        log_every,
        testing,
        mesh,
        rules,
        _roles(model),
    )
    abstract = jax.eval_shape(program.start, *variables)
    shardings = state_shardings(abstract, model, mesh, rules)
    return dataclasses.replace(program, abstract=abstract, shardings=shardings)


def recipe_of(
    model: nnx.Module,
    objective: Objective,
    tx: optax.GradientTransformation,
    **options: Any,
) -> Recipe:
    """The recipe of a model with a given optimizer; `options` are fields of Recipe."""
    model.train()
    graph = nnx.graphdef(model)

    def loss(params: Any, rest: Any, batch: Batch, hyper: Hyper, key: Any) -> Any:
        return loss_of(graph, objective, params, rest, batch, key)

    return Recipe(loss, lambda hyper, params, rest: tx, **options)


def loss_of(
    graph: nnx.GraphDef,
    objective: Objective,
    params: Any,
    rest: Any,
    batch: Batch,
    key: Any,
) -> tuple[Array, tuple[Array, Any]]:
    """The loss of a model, as `Recipe.loss` returns it."""
    # A copy, because the gradient's trace changes batch statistics.
    model = nnx.merge(graph, params, rest, copy=True)
    value, plain = objective.loss(model, batch, key)
    return value, (plain, nnx.state(model, nnx.Not(nnx.Param)))


def _roles(model: nnx.Module) -> dict[str, str]:
    """The role of each parameter; "all" for models outside the zoo."""
    params = nnx.state(model, nnx.Param)
    if not isinstance(getattr(model, "plan", None), zoo.Plan):
        return {path: "all" for path, _ in flatten(params)}
    return {path: scale.role.value for path, scale in zoo.scales(model).items()}
