"""The data of a report: a sweep's runs and verdicts, and the target's curve."""

import dataclasses
import functools
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import mupax

from ..data.text import is_fake_text
from ..sweep import statistics
from ..sweep.results import Population, Sizes, log2, table
from ..sweep.statistics import AXES, OTHER, Axis
from ..sweep.transfers import TRAININGS, transfers, verdicts
from ..sweep.verdict import Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The target or a baseline, trained with the base's best hyperparameters."""

    sizes: Sizes
    learning_rate: float  # before scaling
    train_loss: float | None = None  # at the end; None if it diverged
    test_accuracy: float | None = None  # at the end
    evals: Sequence[tuple[int, float, float]]  # (step, test loss, test accuracy)
    model: str = ""  # path of the saved model
    seconds: float = 0.0
    parameters: int = 0  # their number
    # "base" for the model of the base's size; the key of its parametrization for a
    # model of the target's size; None for the target.
    baseline: str | None = None

    @property
    def test_loss(self) -> float | None:
        """At the end; None if it was not evaluated."""
        return self.evals[-1][1] if self.evals else None

    def scores(self, *, by_loss: bool) -> np.ndarray:
        """(step, test accuracy or test loss) where finite, shape (count, 2)."""
        points = np.array([(e[0], e[1 if by_loss else 2]) for e in self.evals], float)
        points = points.reshape(-1, 2)
        return points[np.isfinite(points[:, 1])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepData:
    """The results of a sweep or a transfer."""

    base: Sizes  # where the axes cross
    labels: Mapping[str, str]  # names of parametrizations, by key, in reading order
    featured: str  # key of the parametrization that the headline is about
    steps: int  # of each run
    settings: Mapping[str, Any]  # nested plain data: config, versions, devices
    subject: str  # what was trained, in a few words
    command: str = ""  # the command line that makes this report again
    populations: Sequence[Population] = ()  # all runs; none before they are trained
    trained: Trained | None = None  # the target of a transfer
    compared: Sequence[Trained] = ()  # its baselines
    tuning_runs: int = 0  # that tuned factors of groups at the base, before the sweep

    @functools.cached_property
    def transfers(self) -> list[Transfer]:
        """Every verdict, in the order of `names` and `keys`."""
        config = self.settings.get("config", {})
        batch_size = config.get("base_batch_size") or config.get("batch_size")
        examples = config.get("base_examples")
        steps = examples // batch_size if examples else self.steps
        tuned = {"batch_size": batch_size, "steps": steps}
        return transfers(self._ordered, self.base, tuned)

    def along_axis(self, name: str, axis: Axis) -> list[Transfer]:
        """The verdicts of one hyperparameter along one axis, by parametrization."""
        return [t for t in self.transfers if (t.name, t.axis) == (name, axis)]

    @property
    def shown(self) -> list[Transfer]:
        """The verdicts of the table: along axes of several sizes, if there are any."""
        several_sizes = [t for t in self.transfers if t.sizes[1:]]
        return several_sizes or [t for t in self.transfers if t.axis in self.axes]

    @functools.cached_property
    def verdicts(self) -> dict[str, Any]:
        """All verdicts as JSON-ready data; see `sweep.transfers.verdicts`."""
        return verdicts(self.transfers)

    @property
    def text(self) -> bool:
        """Whether the models predict text, whose measure is the loss."""
        name = str(self.settings.get("config", {}).get("dataset", ""))
        return name.startswith("text:") or is_fake_text(name)

    @property
    def by_loss(self) -> bool:
        """Whether the target is judged by its test loss, not by its accuracy."""
        return self.text or (
            self.trained is not None and self.trained.test_accuracy is None
        )

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(p.loss.size for p in self.populations)

    @property
    def table(self) -> str:
        """Every run as a line of CSV."""
        return table(self.populations)

    @functools.cached_property
    def names(self) -> list[str]:
        """The hyperparameters with several values."""
        return list(self.verdicts)

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """Labels of the parametrizations with their choices, in reading order."""
        return {p.key(): self._label(p) for p in self._ordered}

    @functools.cached_property
    def all_labels(self) -> dict[str, str]:
        """Labels of all verdicts: `keys`, also without the choices of `TRAININGS`."""
        return {
            p.key(without): self._label(p, without)
            for p in self.populations
            for without in ("", *TRAININGS)
        }

    def _label(self, population: Population, without: str = "") -> str:
        label = self.labels.get(population.parametrization)
        words = [label or population.parametrization]
        words += [
            f"{_short(k)} {v}" for k, v in population.choices.items() if k != without
        ]
        return ", ".join(words)

    @property
    def _ordered(self) -> list[Population]:
        """The populations in the order of `labels`."""
        place = {key: i for i, key in enumerate(self.labels)}
        return sorted(
            self.populations, key=lambda p: place.get(p.parametrization, len(place))
        )

    @functools.cached_property
    def main(self) -> str:
        """The featured key; of several choices, the one of least loss at the base."""
        return self._best.key()

    @functools.cached_property
    def mains(self) -> set[str]:
        """Keys of the featured verdicts: `main`, also without `TRAININGS` choices."""
        return {self._best.key(choice) for choice in ("", *TRAININGS)}

    @functools.cached_property
    def _best(self) -> Population:
        bases = [p for p in self.populations if p.sizes == self.base]
        featured = (p for p in bases if p.parametrization == self.featured)
        return min(featured, key=least)

    def of(self, key: str) -> list[Population]:
        """The populations of one key."""
        return [p for p in self.populations if p.key() == key]

    def at_base(self, key: str) -> Population:
        """The population where the axes cross."""
        return next(p for p in self.of(key) if p.sizes == self.base)

    def along(self, key: str, axis: Axis) -> list[Population]:
        """The populations of one key along an axis, smallest first."""
        return statistics.along(self.populations, key, axis, self.base)

    def sizes(self, axis: Axis) -> list[int]:
        """All sizes along an axis, over all parametrizations."""
        along = (p for key in self.keys for p in self.along(key, axis))
        return sorted({getattr(p, axis) for p in along})

    def held(self, axis: Axis) -> str:
        """The size that is fixed along an axis, e.g. "width 64" for depth."""
        return f"{OTHER[axis]} {getattr(self.base, OTHER[axis])}"

    @functools.cached_property
    def axes(self) -> list[Axis]:
        """The axes with several sizes; depth if there are none."""
        return [axis for axis in AXES if len(self.sizes(axis)) > 1] or ["depth"]


def least(population: Population) -> float:
    """Least loss over grid points at which every seed trained; infinite if none did."""
    mean = log2(population.loss).mean(axis=0)
    return math.inf if np.isnan(mean).all() else float(2 ** np.nanmin(mean))


def _short(key: str) -> str:
    part, _, name = key.rpartition(".")
    return part if name == "name" else name.replace("_", " ")


def finite(value: Any) -> float | None:
    """A number as float; None if it is None, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


def machine() -> dict[str, Any]:
    """Versions and devices."""
    return {
        "mupax": mupax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{jax.local_device_count()} x {jax.devices()[0].device_kind}",
    }
