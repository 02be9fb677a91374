"""Tune small, train big: the residual MLP of Tensor Programs VI on digits.

    mupax transfer --config digits_resmlp --workdir runs/demo

The same config runs on other image datasets that TFDS has prepared:

    mupax transfer --config digits_resmlp --workdir runs/mnist \
        --config.dataset=mnist --config.data_dir=/path/to/tensorflow_datasets
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """Sweep depths and widths of a small model, then train the large one."""
    c = ConfigDict()

    # Data.
    c.dataset = "digits"  # or mnist, fashion_mnist, cifar10
    c.data_dir = config_dict.placeholder(str)  # None: TFDS_DATA_DIR, or TFDS's own
    c.batch_size = 64

    # Model: x + a M^-alpha MS(relu(W x)), M = depth / base depth.
    c.model = ConfigDict()
    c.model.name = "resmlp"
    c.model.branch_multiplier = 1.0  # a
    c.model.train_ends = True  # train the input and output layers too
    c.base = ConfigDict({"width": 64, "depth": 8})
    c.optimizer = ConfigDict({"name": "adam"})

    # Proxies: depths at the base width, widths at the base depth.
    c.sweep = ConfigDict()
    c.sweep.depths = (4, 8, 16, 32, 64)
    c.sweep.widths = (32, 64, 128, 256)
    c.sweep.log2_learning_rates = tuple(range(-13, -1))
    c.sweep.axes = ConfigDict()  # further ones, as {"branch_multiplier": "2**[-2:2]"}
    c.sweep.choices = ()  # what is no number, as (("schedule.name", ("constant",)),)
    c.sweep.tradeoff = ()  # deeper or wider? parameters, as (30_000, 120_000)
    c.sweep.memory_share = 0.5  # of the free memory; larger populations go in chunks
    c.sweep.seeds = 2
    c.sweep.steps = 200
    c.sweep.average_last = 50  # the loss of a run: mean over its last steps
    c.sweep.parametrizations = ConfigDict(
        {
            "sp": {"name": "sp"},
            "half_alpha": {"name": "residual", "alpha": 0.5, "gamma": 0.0},
            "depth_mup": {"name": "depth_mup"},
        }
    )

    # The large model, at the learning rate that the base model likes best.
    c.target = ConfigDict()
    c.target.parametrization = "depth_mup"
    c.target.width = 256
    c.target.depth = 64
    c.target.steps = 600
    c.target.seed = 0
    c.target.eval_every = 100
    c.target.save_every = 100
    return c
