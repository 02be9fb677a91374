"""A run's training step and evaluation, compiled for a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mupax import zoo
from mupax.optim.scales.paths import flatten
from mupax.zoo.sharding import Rules

from .loss import Batch, Objective
from .mesh import put, replicated, state_shardings
from .step import Hyper, Recipe, State


class Program:
    """The training step and evaluation of a model on a mesh.

    Args:
      model: of the zoo or any other; abstract or not.
      recipe: defines the step.
      objective: defines the evaluation.
      mesh: of devices.
      hyper: hyperparameters that the recipe takes, by name.
      seed: of the random numbers of the steps.
      log_every: steps between those that measure norms.
      rules: changes to `zoo.RULES`.

    Attributes:
      abstract: shapes, dtypes and shardings of the state.
      shardings: of the state.
      parameters: number of parameters.
      norms: names of the norms that a logged step measures.

    Raises:
      UserError: this mesh cannot shard the model.
    """

    def __init__(
        self,
        model: nnx.Module,
        recipe: Recipe,
        objective: Objective,
        mesh: Mesh,
        *,
        hyper: Hyper | None = None,
        seed: int = 0,
        log_every: int = 1,
        rules: Rules | None = None,
    ):
        self.recipe, self.objective = recipe, objective
        self.mesh, self.rules = mesh, rules
        self.seed, self.log_every = seed, log_every
        self.hyper = {k: np.float32(value) for k, value in (hyper or {}).items()}
        model.eval()
        self._testing = nnx.graphdef(model)
        self._roles = _roles(model)
        params, rest = parts(model)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self._known_roles = sorted({*self._roles.values()})
        kinds = ("parameter_norm", "update_norm")
        by_role = [f"{kind}/{role}" for kind in kinds for role in self._known_roles]
        self.norms = ("gradient_norm", *by_role)
        abstract = jax.eval_shape(self.start, params, rest)
        self.shardings = state_shardings(abstract, model, mesh, rules)
        self.abstract = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            abstract,
            self.shardings,
        )

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
            model = nnx.merge(self._testing, weights, state["rest"], copy=True)
            return sums + self.objective.score(model, batch)

    def jit_step(self) -> Any:
        """`step`, compiled for the mesh. It donates the state."""
        everywhere = replicated(self.mesh)
        return jax.jit(
            self.step,
            donate_argnums=0,
            in_shardings=(self.shardings, zoo.batch_sharding(self.mesh), everywhere),
            out_shardings=(self.shardings, (everywhere, everywhere)),
        )

    def jit_score(self) -> Any:
        """`score`, compiled for the mesh."""
        everywhere = replicated(self.mesh)
        return jax.jit(
            self.score,
            in_shardings=(self.shardings, zoo.batch_sharding(self.mesh), everywhere),
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
        norms = [optax.tree.norm(grads)]
        for tree in (params, updates):
            for role in self._known_roles:
                leaves = [x for path, x in flatten(tree) if self._roles[path] == role]
                norms.append(optax.tree.norm(leaves))
        return jnp.stack([x.astype(jnp.float32) for x in norms])


def parts(model: nnx.Module) -> tuple[nnx.State, nnx.State]:
    """The parameters and the other variables of a model in training mode."""
    model.train()
    params, rest = nnx.state(model, nnx.Param, ...)
    return params, rest


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
    if isinstance(getattr(model, "plan", None), zoo.Plan):
        return {path: scale.role.value for path, scale in zoo.scales(model).items()}
    return {path: "all" for path, _ in flatten(nnx.state(model, nnx.Param))}
