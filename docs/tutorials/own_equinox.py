# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own Equinox model
#
# The same steps as for [NNX](own_nnx.ipynb), with an Equinox module: explain,
# coordinate check, sweep, transfer. Install with `pip install '.[train]' equinox`.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from mupax import optim, sweep

BASE, TARGET = (32, 4), (128, 16)
digits = load_digits()
images = digits.data.astype("float32") / 16
data = (images[:1500], digits.target[:1500])
held_out = (images[1500:], digits.target[1500:])


# %%
class MyModel(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, width, depth, key):
        first, last, *keys = jax.random.split(key, depth + 2)
        self.embed = eqx.nn.Linear(64, width, key=first)
        self.blocks = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 10, key=last)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(jax.nn.relu(x))
        return self.head(x)


# %% [markdown]
# ## 1. Explain


# %%
def scales(width, depth):
    def build(w, d):
        return lambda: MyModel(w, d, jax.random.key(0))

    return optim.infer_scales(
        build(*BASE),
        build(width, depth),
        inputs=(images[0],),
        parametrization="depth_mup",
        delta=build(2 * BASE[0], BASE[1]),
    )


print(optim.explain(scales(64, 8), optimizer="adamw"))


# %% [markdown]
# `rescale_init` takes the module and returns a rescaled module. Fields that are not
# arrays stay unchanged.


# %%
def make_model(key, width, depth):
    model = MyModel(width, depth, key)
    return optim.rescale_init(model, scales(width, depth))


def make_optimizer(model, width, depth, learning_rate=2**-8):
    return optim.adam(learning_rate, scales(width, depth))


# %% [markdown]
# ## 2. Coordinate check


# %%
def outputs(model, batch):
    return jax.vmap(model)(batch)


check = optim.coord_check(
    lambda key, width: make_model(key, width, 4),
    lambda model, width: make_optimizer(model, width, 4),
    outputs,
    data[0][:64],
    widths=(64, 256),
    seeds=8,
)
print(check)


# %% [markdown]
# ## 3. Sweep


# %%
def loss(model, batch):
    logits = jax.vmap(model)(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


found = sweep(
    make_model,
    make_optimizer,
    loss,
    data,
    base=BASE,
    grid={"learning_rate": "2**[-9:-4:1]"},
    widths=(32, 64),
    depths=(4, 8),
    seeds=2,
    steps=80,
    progress=False,
)
found

# %% [markdown]
# ## 4. Transfer

# %%
model = make_model(jax.random.key(0), *TARGET)
tx = make_optimizer(model, *TARGET, **found.best)
state = tx.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def step(model, state, batch):
    value, grads = eqx.filter_value_and_grad(loss)(model, batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = tx.update(grads, state, params)
    return eqx.apply_updates(model, updates), state, value


for number in range(200):
    rows = np.random.default_rng(number).integers(0, len(data[1]), 64)
    model, state, value = step(model, state, (data[0][rows], data[1][rows]))

predicted = jax.vmap(model)(jnp.asarray(held_out[0])).argmax(-1)
correct = (predicted == held_out[1]).mean()
print(f"128 x 16: training loss {value:.3f}, test accuracy {correct:.1%}")
