"""Fine-tune a converted ViT-Ti on CIFAR-10, its images enlarged to 224 x 224.

    mupax convert --model vit_tiny_patch16_224 --source model.safetensors --out runs/vit
    mupax train --config finetune_vit --config.data_dir=DIR --config.init_from=runs/vit

`model.safetensors` is timm's file; `--source` also accepts the id of a repository on
the Hugging Face hub. All weights are loaded except the head, which is new and has ten
classes. Learning rates are relative to the model's own size. With another image size,
e.g. `--config.data.image_size=128`, positions are interpolated; it must be a multiple
of 16. Tested with a small ViT in timm's format (tests/test_finetune.py), not with
downloaded weights. Model: Dosovitskiy et al. 2020 (arXiv:2010.11929).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "cifar10"
    c.data = ConfigDict({"image_size": 224})
    c.augment = ("flip",)
    c.model = ConfigDict({"name": "vit_tiny_patch16_224", "remat": "full"})
    c.init_from = "runs/vit"
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.01})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 1e-4
    c.schedule.warmup = 100
    c.clip_norm = 1.0
    c.batch_size = 64
    c.steps = 2_000
    c.log_every = 20
    c.eval_every = 500
    c.save_every = 500
    return c
