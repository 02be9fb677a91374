"""Tune a small residual MLP (Tensor Programs VI), then train a large one.

    mupax transfer --config digits_resmlp --workdir runs/demo

An example is a pair of scikit-learn's scanned digits; its label is their sum. The
same config runs on other image datasets, e.g. single digits, or datasets that TFDS
has prepared:

    mupax transfer --config digits_resmlp --workdir runs/digits \
        --config.dataset=digits --config.label_smoothing=0.1
    mupax transfer --config digits_resmlp --workdir runs/mnist \
        --config.dataset=mnist --config.data_dir=/path/to/tensorflow_datasets
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """Sweep depths and widths of a small model, then train the large one."""
    c = defaults("sweep", "target")

    # Data.
    c.dataset = "digit_sums"  # or digits, mnist, fashion_mnist, cifar10
    c.batch_size = 64
    c.steps = 200

    # Model: x + a M^-alpha MS(relu(W x)), M = depth / base depth.
    c.model = ConfigDict()
    c.model.name = "resmlp"
    c.model.branch_multiplier = 0.5  # a, the best of 1/4, 1/2 and 1 at the base
    c.model.train_ends = True  # train the input and output layers too
    c.model.width = 64  # the base's
    c.model.depth = 8
    # Hidden weights have a learning rate of their own, whose factor is tuned at the
    # base (docs/howto/modules.md).
    c.modules = ConfigDict({"hidden": {"pattern": "role:hidden"}})
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-6.5  # near the base's optimum, without that factor
    c.schedule.name = "cosine"  # a constant rate gives Adam spikes in the final loss

    # Proxies: depths at the base width, widths at the base depth.
    c.sweep.depths = (4, 8, 16, 32, 64)
    c.sweep.widths = (32, 64, 128, 256)
    c.sweep.axes.learning_rate = "2**[-10:-6:0.5]"
    c.sweep.base_axes = ConfigDict({"hidden/learning_rate": "2**[0:4]"})
    c.sweep.seeds = 4
    c.sweep.average_last = 50  # the loss of a run: mean over its last steps
    c.sweep.parametrizations = ConfigDict(
        {"sp": {"name": "sp"}, "depth_mup": {"name": "depth_mup"}}
    )

    # The large model, at the base's optimal learning rate. For comparison, the base
    # model, and the large model in the standard parametrization.
    c.target.width = 256
    c.target.depth = 64
    c.target.steps = 600
    c.target.eval_every = 100
    c.target.save_every = 100
    c.target.compare = ("base", "sp")
    return c
