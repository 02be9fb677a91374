# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # From a laptop to a mesh, and a plan for a pod
#
# This tutorial trains the same model on differently split meshes of eight devices,
# and estimates what the training step needs on accelerators. The eight devices are
# simulated on the CPU. Install with `pip install '.[train]'`.

# %%
import json
import os
import subprocess
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from mupax import zoo

print(jax.devices())

# %% [markdown]
# ## How parameters are split
#
# Each parameter of a zoo model names its axes. The table `zoo.RULES` maps axis names
# to mesh axes. A mesh has the axes `data` (the batch), `fsdp` (the batch, and weights
# with their optimizer state) and `tensor` (heads, and the inside of each MLP).

# %%
AXES = ("data", "fsdp", "tensor")
mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
model = zoo.create(
    "vit",
    width=32,
    depth=2,
    heads=4,
    patch_size=2,
    input_shape=(8, 8, 1),
    rngs=nnx.Rngs(0),
)
for path, spec in list(zoo.partition_specs(model, mesh).items())[:6]:
    print(f"{path:34} {spec}")

# %% [markdown]
# ## The same losses on every mesh
#
# The mesh is part of the config of `mupax train`. These runs use the same command
# with different meshes. (On a single device, leave out the mesh.)

# %%
runs = tempfile.mkdtemp()


def mupax(*words):
    """What the command prints."""
    command = [sys.executable, "-m", "mupax", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def losses(*mesh):
    """The training losses of a short run."""
    folder = f"{runs}/{len(os.listdir(runs))}"
    steps = ("--config.steps=40", "--config.log_every=20")
    mupax("train", "--config=digits", f"--workdir={folder}", *steps, *mesh)
    with open(f"{folder}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [line["loss"] for line in lines if "loss" in line]


replicated = losses("--config.mesh.data=8")
split = losses("--config.mesh.data=2", "--config.mesh.fsdp=4")
print("data 8:        ", *(f"{value:.5f}" for value in replicated))
print("data 2, fsdp 4:", *(f"{value:.5f}" for value in split))
np.testing.assert_allclose(replicated, split, rtol=1e-4)

# %% [markdown]
# ## A plan for other machines
#
# `mupax plan` compiles the training step for a topology. It prints the memory per
# chip and its limit, the bytes that each kind of collective moves, and a lower bound
# on the time of a step. For GPUs it compiles for CPU devices, and the values are
# estimates. With `pip install '.[tpu]'`, it also compiles for TPU slices on a
# machine without TPUs, e.g. `--topology v5e:4x4,v6e:16x16`.

# %%
print(mupax("plan", "--config=digits", "--topology=gpu:8", "--config.model.width=1024"))

# %% [markdown]
# [From a laptop to a pod](../training.md) has the commands for Cloud TPU and Slurm,
# and explains what happens at preemption.
