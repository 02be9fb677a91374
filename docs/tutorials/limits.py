# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Read a limit from the theory solvers
#
# Hyperparameters transfer because training converges to a limit as networks grow. The
# solvers in `mupax.experiments.theory` compute such limits. Install with `pip
# install '.[train]'`.

# %%
import matplotlib.pyplot as plt
import numpy as np

from mupax.experiments.theory import linear_sgd, plane, relu_mlp

# %% [markdown]
# ## Depth: a linear residual network under SGD
#
# At infinite width, a deep linear residual network with branch multiplier a/√L trains
# deterministically (Tensor Programs VI, Lemma 4.3). `train` solves it at a finite
# depth. `infinite_depth` extrapolates to the limit.

# %%
steps, batch = 8, 1
inputs = np.ones((steps, batch, 1))
targets = np.ones((steps, batch, 1))
limit = linear_sgd.infinite_depth(inputs, targets, learning_rate=0.2)

figure, axes = plt.subplots(figsize=(5, 3))
for depth in (2, 4, 16):
    run = linear_sgd.train(inputs, targets, depth, learning_rate=0.2)
    axes.plot(run.losses, marker=".", label=f"depth {depth}")
axes.plot(limit.losses.value, "k--", label="infinite depth")
axes.set(yscale="log", xlabel="step", ylabel="loss")
_ = axes.legend()

# %% [markdown]
# The loss of a deeper network is closer to the limit. How fast does it converge?

# %%
after_two = limit.outputs.value[2, 0, 0]
for depth in (8, 16, 32, 64):
    run = linear_sgd.train(inputs, targets, depth, learning_rate=0.2)
    gap = abs(run.outputs[2, 0, 0] - after_two)  # after two steps
    print(f"depth {depth:3}: {gap:.4f} away, times depth {gap * depth:.2f}")

# %% [markdown]
# The distance falls as 1/depth: the last column is nearly constant.
#
# ## Depth without residuals: learning rates fall as L^-3/2
#
# In a plain ReLU network, the squared change of the last preactivations after one
# step of SGD grows as η²L³ (Jelassi et al., eq. 1.1). So the largest learning rate
# with a bounded change falls as L^-3/2. `optim.parametrization("relu_mlp")` uses this
# rule.

# %%
depths = np.array([4, 8, 16, 32, 64, 128, 256])
rates = np.array([relu_mlp.maximal_learning_rate(10**6, int(d)) for d in depths])
exponent = relu_mlp.fit_power_law(depths[-4:], rates[-4:])
print(exponent)

figure, axes = plt.subplots(figsize=(5, 3))
axes.loglog(depths, rates, "o", label="solver")
axes.loglog(depths, 3**0.5 * depths**-1.5, "--", label="√3 L^(-3/2)")
axes.set(xlabel="depth", ylabel="largest learning rate")
_ = axes.legend()

# %% [markdown]
# ## The plane of parametrizations
#
# A parametrization of depth is a point (α, γ): branches are multiplied by L^-α and
# updates by L^-γ. Tensor Programs VI predicts for three points:

# %%
for name, alpha, gamma in (
    ("no depth scaling", 0.0, 0.0),
    ("Depth-μP", 0.5, 0.5),
    ("ODE, CompleteP", 1.0, 0.0),
):
    print(f"{name:17}", plane.predicted(alpha, gamma))

# %% [markdown]
# [The limits, computed](../theory.md) lists all solvers and what each was checked
# against. `papers/figures.md` shows their results.
