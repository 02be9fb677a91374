# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Load a pretrained ViT and fine-tune it
#
# The zoo reads weights of timm, torchvision, big_vision and transformers, from files
# or from the Hugging Face hub ([the zoo](../zoo.md#pretrained-weights)). So that you
# need no network, this tutorial first trains a small model and writes it in timm's
# layout. Install with `pip install '.[train,hub]'`.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from mupax import optim, zoo
from mupax.zoo.weights import foreign

digits = load_digits()
images = (digits.images.astype("float32") / 8 - 1)[..., None]
labels = digits.target
SIZES = {
    "width": 48,
    "depth": 3,
    "heads": 4,
    "patch_size": 2,
    "input_shape": (8, 8, 1),
}


@nnx.jit
def step(model, optimizer, images, labels):
    def loss(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def train(model, tx, images, labels, steps):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.train()
    for number in range(steps):
        rows = np.random.default_rng(number).integers(0, len(labels), 64)
        value = step(model, optimizer, images[rows], labels[rows])
    model.eval()
    return float(value)


def accuracy(model, images, labels):
    return float((model(jnp.asarray(images)).argmax(-1) == labels).mean())


# %% [markdown]
# ## Write a checkpoint in timm's layout
#
# Train a small ViT for 150 steps to classify the digits 0 to 6, and export its
# weights.

# %%
known = labels < 7
teacher = zoo.create("vit", **SIZES, out_features=7, rngs=nnx.Rngs(0))
tx = optim.adamw(2e-3, zoo.scales(teacher), weight_decay=0.01)
train(teacher, tx, images[known], labels[known], steps=150)
print(f"0 to 6: {accuracy(teacher, images[known], labels[known]):.1%} of what it saw")

file = pathlib.Path(tempfile.mkdtemp()) / "vit.safetensors"
save_file(foreign.export(teacher, "timm"), file)
print(*sorted(foreign.export(teacher, "timm"))[:4], "...", sep="\n")

# %% [markdown]
# ## Load the checkpoint
#
# A file of weights does not contain its architecture: pass the name and the options.
# A repository on the hub has a `config.json` with both, so
# `zoo.load_pretrained("timm/...")` is enough. Loading uses every key and fills every
# variable, or raises an error that names the key.

# %%
same = zoo.load_pretrained("vit", file, **SIZES, out_features=7)
same.eval()
gap = jnp.abs(same(images[:8]) - teacher(jnp.asarray(images[:8]))).max()
print(f"logits of the copy differ by at most {gap:.1e}")

# %% [markdown]
# ## Fine-tune
#
# With another `out_features`, the readout is initialized anew and all other weights
# stay. The model is its own base, so every multiplier is 1: tune the learning rate
# for this model as usual. The model trains on 60 examples of the digits 7, 8 and 9.

# %%
new = labels >= 7
rows = np.flatnonzero(new)
seen, held = rows[:60], rows[60:]


def fine_tune(model):
    tx = optim.adamw(5e-4, zoo.scales(model), weight_decay=0.01)
    train(model, tx, images[seen], labels[seen] - 7, steps=100)
    return accuracy(model, images[held], labels[held] - 7)


pretrained = zoo.load_pretrained("vit", file, **SIZES, out_features=3, rngs=nnx.Rngs(1))
print(f"pretrained:   {fine_tune(pretrained):.1%} of {len(held)} held-out images")
scratch = zoo.create("vit", **SIZES, out_features=3, rngs=nnx.Rngs(1))
print(f"from scratch: {fine_tune(scratch):.1%}")

# %% [markdown]
# ## Save
#
# `zoo.save` writes a directory with checksums, and `zoo.load_pretrained` reads it.
# `mupax convert` writes the layouts of other libraries.

# %%
zoo.save(pretrained, file.parent / "tuned")
again = zoo.load_pretrained(file.parent / "tuned")
again.eval()
print(
    jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((a == b).all()),
            nnx.state(again, nnx.Param),
            nnx.state(pretrained, nnx.Param),
        )
    )
)

# %% [markdown]
# The same with a real ViT on the command line, with checkpoints and evaluations:
#
# ```sh
# mupax convert --model vit_tiny_patch16_224 --source model.safetensors --out runs/vit
# mupax train --config finetune_vit --config.data_dir=DIR --config.init_from=runs/vit
# ```
