"""Trains a small model on several meshes of 8 simulated devices, and counts.

    python tests/mesh_child.py MODEL

Prints as JSON, for each mesh: the losses of a few steps, and the collectives of the
compiled step as [kind, times, group, bytes]. Not a test: test_mesh.py starts it.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from ml_collections import ConfigDict

from mupax import zoo
from mupax.experiments.estimate.hlo import collectives
from mupax.experiments.run import loss
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.evaluate import place_batch
from mupax.experiments.run.mesh import make_mesh
from mupax.experiments.run.prepare import prepare

DEVICES, BATCH, STEPS = 8, 16, 4
MESHES = {
    "one": (1, 1, 1),
    "data": (8, 1, 1),
    "fsdp": (1, 8, 1),
    "tensor": (1, 1, 8),
    "all": (2, 2, 2),
}
MODELS = {
    "vit": {"width": 64, "depth": 3, "heads": 8, "patch_size": 4, "base_width": 32},
    "resmlp": {"width": 64, "depth": 3, "block_depth": 2, "layer_norm": True},
    "resnet18": {"stem": "cifar", "width": 8, "blocks": (2, 1)},
    "gpt": {"width": 64, "depth": 3, "heads": 8},
}


def config(model: str) -> ConfigDict:
    """A small run."""
    c = defaults()
    c.dataset = "fake:8x8x1:8"
    if model == "gpt":
        c.dataset = f"text:{__file__}"
        c.data = ConfigDict({"context": 16})
    c.model = ConfigDict({"name": model, **MODELS[model]})
    if "base_width" in c.model:
        c.base_width = c.model.base_width
        del c.model.base_width
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.01})
    c.learning_rate = 0.01
    c.batch_size = BATCH
    c.steps = STEPS
    c.log_every = 2
    return c


def main() -> None:
    """Runs all meshes."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model = sys.argv[1]
    by_model = {}
    for name, (data, fsdp, tensor) in MESHES.items():
        c = config(model)
        count = data * fsdp * tensor
        if count > 1:  # logits of two positions at a time
            loss._AT_ONCE = BATCH * 2 * 256 // count
        sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
        job = prepare(parse(c), make_mesh(sizes, jax.devices()[:count]))
        state = job.program.init_on_mesh(job.built.create)
        feed = job.dataset.train(BATCH, 0)
        sharding = zoo.batch_sharding(job.program.mesh)
        batch, hyper = job.dataset.spec(BATCH), job.program.hyper
        step = job.program.jit_step().lower(state, batch, hyper).compile()
        losses = []
        for _ in range(STEPS):
            state, (value, _) = step(state, place_batch(next(feed), sharding), hyper)
            losses.append(float(value))
        feed.close()
        by_model[name] = {
            "losses": losses,
            "collectives": [
                (c.kind, c.times, c.group, c.bytes)
                for c in collectives(step.as_text(), count)
            ],
        }
    json.dump(by_model, sys.stdout)


if __name__ == "__main__":
    main()
