# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own NNX model
#
# Tune a small model, and train a larger one with its hyperparameters, in four steps:
# explain, coordinate check, sweep, transfer. This takes about a minute
# on a CPU and needs no network. Install with `pip install '.[train]'`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from mupax import optim, sweep

BASE, TARGET = (32, 4), (128, 16)  # width and depth: tuned there, trained here
digits = load_digits()
images = digits.data.astype("float32") / 16
data = (images[:1500], digits.target[:1500])
held_out = (images[1500:], digits.target[1500:])

# %% [markdown]
# ## The model
#
# A residual network. Its branches end in a linear layer, which carries the branch's
# multiplier (depth / base depth)^-½ in its initial size and learning rate. So the model
# knows nothing of mupax. The constant ½ is the same at every depth.


# %%
class MyModel(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.embed = nnx.Linear(64, width, rngs=rngs)
        self.blocks = nnx.List(
            nnx.Linear(width, width, rngs=rngs) for _ in range(depth)
        )
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + 0.5 * block(nnx.relu(x))
        return self.head(x)


# %% [markdown]
# ## 1. Explain
#
# `infer_scales` traces the forward passes of a base and a target; it computes nothing.
# `delta` is a third model whose widths all differ from the base. It shows which axes
# grow if the target has the widths of the base.


# %%
def scales(width, depth):
    def build(w, d):
        return lambda: MyModel(w, d, nnx.Rngs(0))

    return optim.infer_scales(
        build(*BASE),
        build(width, depth),
        inputs=(images[:1],),
        parametrization="depth_mup",
        delta=build(2 * BASE[0], BASE[1]),
    )


setup = optim.explain(scales(64, 8), optimizer="adam")
print(setup)

# %% [markdown]
# Every number is a ratio to the base: the head of a model with twice the width has
# half the initial size and half the learning rate.
#
# The other steps need only the next two functions. `rescale_init` measures the
# initial sizes of both models and rescales the weights that do not follow the rules.


# %%
def make_model(key, width, depth):
    model = MyModel(width, depth, nnx.Rngs(key))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, optim.rescale_init(params, scales(width, depth)))
    return model


def make_optimizer(model, width, depth, learning_rate=2**-8):
    return optim.adam(learning_rate, scales(width, depth))


# %% [markdown]
# ## 2. Coordinate check
#
# The check trains a few steps at several sizes. Under a correct setup, every
# activation changes by the same amount at every size: the slope of log |Δ activation|
# against log size is zero.

# %%
batch = data[0][:64], data[1][:64]
check = optim.coord_check(
    lambda key, width: make_model(key, width, 4),
    lambda model, width: make_optimizer(model, width, 4),
    batch=batch,
    widths=(64, 256),
    seeds=4,
)
print(check)

# %% [markdown]
# And over depth:

# %%
deep = optim.coord_check(
    lambda key, depth: make_model(key, 64, depth),
    lambda model, depth: make_optimizer(model, 64, depth),
    batch=batch,
    depths=(8, 32),
    seeds=8,
)
print(deep)

# %% [markdown]
# The check finds mistakes. Here the optimizer is plain Adam, with the same learning
# rate for all parameters:

# %%
wrong = optim.coord_check(
    lambda key, width: make_model(key, width, 4),
    optax.adam(2**-8),
    batch=batch,
    widths=(64, 256),
    seeds=4,
)
print(wrong)

# %% [markdown]
# ## 3. Sweep
#
# For each shape, all learning rates and seeds train in one compiled program.


# %%
def loss(model, batch):
    logits = model(batch[0])
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
# Two seeds and 80 steps are too few for a certain verdict. The verdict shows the
# cost: the share of the loss that the larger model loses with the base's best
# learning rate. The figure shows the runs:

# %%
figure, axes = plt.subplots(figsize=(5, 3))
for population in found.populations:
    cell = population.cell("learning_rate")
    mean = np.exp(np.log(cell.loss).mean(axis=0))  # over seeds
    label = f"{population.width} x {population.depth}"
    axes.plot(2**cell.log2_lr, mean, marker="o", label=label)
axes.loglog(base=2)
axes.set(xlabel="learning rate", ylabel="training loss")
_ = axes.legend(title="width x depth")

# %% [markdown]
# ## 4. Transfer
#
# The target is 4 times as wide and 4 times as deep. It is trained once, with the
# base's best learning rate.

# %%
model = make_model(jax.random.key(0), *TARGET)
tx = make_optimizer(model, *TARGET, **found.best)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, batch):
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value


for number in range(200):
    rows = np.random.default_rng(number).integers(0, len(data[1]), 64)
    value = step(model, optimizer, (data[0][rows], data[1][rows]))

correct = (model(held_out[0]).argmax(-1) == held_out[1]).mean()
print(f"learning rate {found.best['learning_rate']:.2g}, found at 32 x 4")
print(f"128 x 16: training loss {value:.3f}, test accuracy {correct:.1%}")

# %% [markdown]
# ## What next
#
# - [Tune small, train big](../tune.md): several hyperparameters, schedules, stored
#   results, and sweeps at the target's size.
# - [Read the coordinate check](../howto/coordinate_check.md).
# - [What to tune](../tune.md#what-to-tune).
