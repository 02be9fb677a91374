# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own NNX model
#
# You tune a small model of your own, and train a larger one with the hyperparameters
# of the small one. Five steps: explain, coordinate check, sweep, verdict, transfer.
# It needs `pip install 'mupax[train]'` and no network, and takes about a minute on a
# CPU.

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
# A residual network. The one thing that only the model can do is to multiply its
# residual branches by `branch_multiplier(depth / base depth)`. What a branch adds
# must have mean zero over its units, or the means of all blocks add up; hence `h -
# h.mean`.


# %%
class MyModel(nnx.Module):
    def __init__(self, width, depth, rngs):
        rules = optim.parametrization("depth_mup")
        self.branch = rules.branch_multiplier(depth / BASE[1])
        self.embed = nnx.Linear(64, width, rngs=rngs)
        self.blocks = nnx.List(
            nnx.Linear(width, width, rngs=rngs) for _ in range(depth)
        )
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            h = nnx.relu(block(x))
            x = x + self.branch * (h - h.mean(-1, keepdims=True))
        return self.head(x)


# %% [markdown]
# ## 1. Explain
#
# `infer_scales` compares the shapes of a base and a target, without making either.
# `branch` is a regular expression for the parameters of the residual blocks. `delta`
# is a third model whose widths all differ from the base's: it tells which axes grow
# where the target cannot, as when the target *is* the base.


# %%
def scales(width, depth):
    def build(w, d):
        return lambda: MyModel(w, d, nnx.Rngs(0))

    return optim.infer_scales(
        build(*BASE),
        build(width, depth),
        depth=(BASE[1], depth),
        branch="blocks",
        delta=build(2 * BASE[0], BASE[1]),
    )


setup = optim.explain(scales(64, 5), "depth_mup", "adam")
setup

# %% [markdown]
# Every number is a ratio to the base: the head of a model of twice the width starts
# at half the size, and has half the learning rate.
#
# The next two functions are all that the other steps need. `rescale_init` measures
# the initial sizes of both models, and rescales what does not fit.


# %%
def make_model(key, width, depth):
    model = MyModel(width, depth, nnx.Rngs(key))
    params = optim.rescale_init(
        nnx.state(model, nnx.Param),
        scales(width, depth),
        "depth_mup",
        base=lambda: MyModel(*BASE, nnx.Rngs(0)),
    )
    nnx.update(model, params)
    return model


def make_optimizer(model, width, depth, learning_rate=2**-8):
    return optim.adam(learning_rate, scales(width, depth), "depth_mup")


# %% [markdown]
# ## 2. Coordinate check
#
# A few steps at several sizes. Under a right setup every activation changes by the
# same amount at every size: the slope of log |Δ activation| against log size is zero.

# %%
batch = data[0][:64], data[1][:64]
check = optim.coord_check(
    lambda key, width: make_model(key, width, 4),
    lambda model, width: make_optimizer(model, width, 4),
    batch=batch,
    widths=(64, 128, 256),
    seeds=4,
)
check

# %% [markdown]
# The same check finds a mistake. Here the optimizer is plain Adam, whose learning
# rate is the same for all parameters:

# %%
wrong = optim.coord_check(
    lambda key, width: make_model(key, width, 4),
    optax.adam(2**-8),
    batch=batch,
    widths=(64, 128, 256),
    seeds=4,
)
wrong

# %% [markdown]
# ## 3. Sweep
#
# Learning rates and seeds are an axis of one compiled program for each shape.


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
    grid={"learning_rate": "2**[-11:-6:1]"},
    widths=(32, 64),
    depths=(4, 8),
    seeds=2,
    steps=80,
    progress=False,
)
found

# %% [markdown]
# Two seeds and 80 steps are too few for the verdict to be sure, and it says so. What
# helps at once is the last column: the loss that the larger model gives up with the
# best learning rate of the base, beside its standard error over seeds. The picture
# shows the runs:

# %%
figure, axes = plt.subplots(figsize=(5, 3))
for population in found.populations:
    cell = population.cell("learning_rate")
    mean = np.exp(np.log(cell.loss).mean(axis=0))  # over seeds
    label = f"{population.width} x {population.depth}"
    axes.plot(2**cell.log2_lr, mean, marker="o", label=label)
axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="training loss")
axes.legend(title="width x depth")

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
# - [Tune small, train big](../tune.md): several hyperparameters, schedules, results
#   that are kept and resumed, and whether the target itself agrees.
# - [Read the coordinate check](../howto/coordinate_check.md).
# - [What to tune](../howto/hyperparameters.md).
