# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A Linen model with your own optimizer chain
#
# You have Linen code and an optimizer that you wrote as an `optax.chain`. You keep
# both and add two transforms to the chain. `optim.check_chain` then checks the chain
# before you train. Install with `pip install . scikit-learn`.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from mupax import optim

digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target)


class MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, name="embed")(x))
        x = nn.relu(nn.Dense(self.width, name="hidden")(x))
        return nn.Dense(10, name="head")(x)


def init(width, key=None):
    """The parameters, without the outer "params"."""
    key = jax.random.key(0) if key is None else key
    return MLP(width).init(key, jnp.zeros((1, 64)))["params"]


# %% [markdown]
# ## The chain without mupax


# %%
def old_chain(learning_rate):
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(learning_rate),
    )


# %% [markdown]
# ## The chain with mupax
#
# `optim.chain` is `optax.chain` with checks of the order. `normalize_gradients` keeps
# the ratio of Adam's eps to the gradients constant. `scale_by_parametrization` comes
# directly after the transform that computes the update, so before the weight decay.

# %%
BASE, TARGET = 64, 512
scales = optim.infer_scales(MLP(BASE), MLP(TARGET), inputs=(images[:1],))


def new_chain(learning_rate, scales):
    return optim.chain(
        optax.clip_by_global_norm(1.0),
        optim.normalize_gradients(scales),
        optax.scale_by_adam(),
        optim.scale_by_parametrization(scales, family="adam"),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(learning_rate),
    )


print(optim.explain(scales, optimizer="adam"))

# %% [markdown]
# `check_chain` runs an optimizer on known gradients. Every update of the new chain has
# the right size. For the old chain, it raises an error:

# %%
try:
    print(optim.check_chain(new_chain(1e-2, scales), scales))
    optim.check_chain(old_chain(1e-2), scales)
except ValueError as error:
    print(error)

# %% [markdown]
# A wrong order is an error when you build the chain:

# %%
try:
    optim.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-4),
        optim.scale_by_parametrization(scales, family="adam"),
    )
except ValueError as error:
    print(error)


# %% [markdown]
# ## Train base and target at one learning rate


# %%
def train(width, learning_rate, chain, steps=150):
    params = init(width, jax.random.key(1))
    if width != BASE:
        params = optim.rescale_init(params, scales)
    tx = chain(learning_rate)
    state = tx.init(params)

    def loss(params, rows):
        logits = MLP(width).apply({"params": params}, images[rows])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, labels[rows]
        ).mean()

    @jax.jit
    def step(params, state, rows):
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for number in range(steps):
        rows = np.random.default_rng(number).integers(0, len(images), 64)
        params, state, value = step(params, state, rows)
        losses.append(float(value))
    return np.mean(losses[-20:])


at_base = optim.infer_scales(
    MLP(BASE), MLP(BASE), delta=MLP(2 * BASE), inputs=(images[:1],)
)
for rate in (2.0**-8, 2.0**-6, 2.0**-4):
    small = train(BASE, rate, lambda r: new_chain(r, at_base))
    large = train(TARGET, rate, lambda r: new_chain(r, scales))
    plain = train(TARGET, rate, old_chain)
    print(f"2^{np.log2(rate):.0f}  width 64: {small:.4f}  512: {large:.4f}", end="  ")
    print(f"512, old chain: {plain:.4f}")

# %% [markdown]
# With the new chain, the best of the three learning rates is the same at both widths.
# With the old chain, the best learning rate of the wide model is smaller, 2^-8. The
# sweep at width 64 does not show this, so you would have to tune the wide model.
