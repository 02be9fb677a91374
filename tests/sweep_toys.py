"""What tests of sweeps share, importable by their worker processes."""

import dataclasses
import os
import pathlib
import signal

import numpy as np

from mupax import optim
from mupax.experiments import data as datasets
from mupax.experiments.sweeps import engine


def stripes() -> datasets.ImageData:
    """Four classes of 4 x 4 pixels, which differ in brightness."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 200).astype(np.int32)
    images = rng.integers(0, 64, (200, 4, 4, 1)) + 48 * labels[:, None, None, None]
    images = images.astype(np.uint8)
    split = slice(160), slice(160, None)
    train, test = ((images[s], labels[s]) for s in split)
    return datasets.ImageData.from_arrays("stripes", train, test, 4)


def job(**changes) -> engine.Job:
    """A job of six runs."""
    small = engine.Job(
        parametrization="depth_mup",
        point=optim.parametrization("depth_mup"),
        width=16,
        depth=4,
        model=(("name", "resmlp"),),
        base_width=8,
        base_depth=2,
        optimizer=(("name", "adam"),),
        log2_lr=(-9.0, -7.0, -5.0),
        seeds=2,
        steps=20,
        batch_size=16,
        average_last=5,
    )
    return dataclasses.replace(small, **changes)


@dataclasses.dataclass(frozen=True)
class Deadly(engine.Job):
    """A job that kills its worker the first time, once its first run is stored."""

    mark: str = ""

    def training(self, data: datasets.ImageData) -> engine.Training:
        """As a job's."""
        mark = pathlib.Path(self.mark)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training(data)
