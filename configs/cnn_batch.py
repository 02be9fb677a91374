"""Sweep the learning rate over batch sizes: a small CNN on CIFAR-10 with AdamW.

    mupax sweep --config cnn_batch --config.data_dir=DIR --workdir runs/batch
    mupax sweep --config cnn_batch --config.base_batch_size=64 --workdir runs/batch-rule

Runs at all batch sizes see the same number of examples. The first command keeps
hyperparameters fixed; the second one scales them by the rules of docs/rules.md,
section 8 (Malladi et al. 2022, arXiv:2205.10287). To sweep over training lengths, add
--config.sweep.equal_examples=False
--config.sweep.choices="(('steps', (400, 1600, 6400)),)" --config.base_examples=25600
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "cifar10"
    c.data.image_size = 16
    c.batch_size = 64
    c.steps = 400  # at batch size 64
    c.model = ConfigDict({"name": "cnn", "branch_multiplier": 1.0})
    c.model.width = 16
    c.model.depth = 6
    c.base_width = 16
    c.base_depth = 6
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 2.0**-7
    c.schedule.warmup = 40
    c.sweep.axes.learning_rate = "2**[-10:-4:1]"
    c.sweep.choices = (("batch_size", (16, 64, 256, 512)),)
    c.sweep.equal_examples = True
    c.sweep.seeds = 3
    c.sweep.average_last = 50
    return c
