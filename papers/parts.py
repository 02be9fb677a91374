"""The sweeps of a figure: packaged configs with overrides."""

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping

from ml_collections import ConfigDict

from mupax.experiments.cli import flags
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import open_dataset
from mupax.experiments.sweep import command as sweep
from mupax.experiments.sweep import space
from mupax.experiments.sweep.results import key_of
from mupax.experiments.sweep.statistics import AXES
from mupax.experiments.sweep.tasks import ZooTask

from . import tables
from .request import Request
from .sizes import at_scale
from .tables import Table

_TEXT = "text:"
_TUNED = "branch_multiplier"


@dataclasses.dataclass(frozen=True)
class Part:
    """A sweep. Figures that need the same runs share it by its name.

    Attributes:
      config: name of a packaged config.
      name: name of its folder and of its table.
      overrides: config keys and values, as typed after `--config.`.
      sizes: further overrides, by scale.
      tuned: a sweep over the learning rate and the block multiplier. This sweep uses
        the block multiplier that is best at its base, as in Tensor Programs VI.
      keys: the parametrizations that the figure is about, of one choice
        ("mup, model.norm=batch") or of all ("mup"); everything by default.
    """

    config: str
    name: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    tuned: "Part | None" = None
    keys: tuple[str, ...] = ()

    def about(self, *keys: str) -> "Part":
        """The same sweep, for a figure about some of its runs; see `keys`."""
        return dataclasses.replace(self, keys=keys)

    def words(self, request: Request, multiplier: float | None = None) -> list[str]:
        """The command line of `mupax sweep` that runs it.

        Args:
          request: gives the scale and the data.
          multiplier: the base's best block multiplier, of a sweep that is tuned.
        """
        overrides = {**self.overrides, **at_scale(self.sizes, request.scale)}
        if multiplier is not None:
            overrides[f"model.{_TUNED}"] = f"{multiplier:g}"
        if request.dataset:
            overrides["dataset"] = request.dataset
        if request.data_dir:
            overrides["data_dir"] = request.data_dir
        changes = [f"--config.{key}={value}" for key, value in overrides.items()]
        return ["sweep", "--config", self.config, *changes]

    def parsed(self, request: Request, multiplier: float | None = None) -> ConfigDict:
        """The config.

        Raises:
          UserError: an override that is not valid, or a text is needed and not named.
        """
        config = flags.parse(self.words(request, multiplier)).config
        if config.dataset.startswith(_TEXT) and not request.dataset:
            raise UserError(
                "this figure trains on a text file; name one: --dataset=text:FILE"
            )
        return config

    def path(self, request: Request) -> pathlib.Path:
        """The file of its table."""
        return request.tables / request.scale / f"{self.name}.csv"

    def read(self, request: Request) -> Table:
        """Its table, without training.

        Raises:
          UserError: there is no such table, or it has no runs of a parametrization that
            the figure is about.
        """
        path = self.path(request)
        table = tables.read(path)
        remedy = (
            "leave --from_data out to train what is missing, or name another --tables "
            "or --scale"
        )
        if table is None or not table.data.populations:
            raise UserError(f"there is no table {path}; {remedy}")
        needed = {
            key_of(task.parametrization, task.choices)
            for task in self._needed(table, request)
        }
        if lacking := sorted(needed - {p.key() for p in table.data.populations}):
            missing = ", ".join(f'"{key}"' for key in lacking)
            raise UserError(f"{path} has no runs of {missing}; {remedy}")
        return table

    def train(self, request: Request) -> Table:
        """Train the runs that the figure needs and the table lacks, and add them.

        Raises:
          UserError: the data is not there, or the folder holds another sweep.
        """
        multiplier, folder = None, request.folder / request.scale / self.name
        if self.tuned is not None:
            base = self.tuned.train(request).data
            (alone,) = (p for p in base.populations if p.sizes == base.base)
            multiplier = alone.best()[_TUNED]
            folder = folder.with_name(f"{self.name}-a{multiplier:g}")
        config = self.parsed(request, multiplier)
        parsed = space.parse_sweep(config)
        known = tables.read(self.path(request))
        if known is not None and not tables.same_settings(known, parsed.settings()):
            known = None
        tasks = self._tasks(parsed)
        held = [tables.seeds_of(known, task) if known else 0 for task in tasks]
        lacking = [t for t, n in zip(tasks, held, strict=True) if n < parsed.seeds]
        if known is not None and not lacking:
            return known
        only = {task.parametrization for task in lacking}
        if only != set(parsed.parametrizations):
            config.sweep.only = tuple(sorted(only))
        config.sweep.choices = tuple(
            (key, tuple(v for v in values if any(t.choices[key] == v for t in lacking)))
            for key, values in config.sweep.choices
        )
        for key in AXES:  # a sweep has its base's size too
            sizes = {getattr(parsed.sizes, key), *(getattr(t, key) for t in lacking)}
            config.sweep[f"{key}s"] = tuple(sorted(sizes))
        first = min(held)
        if first:  # the sweep trains later seeds of them all
            config.seed += first
            config.sweep.seeds -= first
            folder = folder.with_name(f"{folder.name}-seed{first}")
        # The directory of the data differs between machines.
        portable = dataclasses.replace(request, data_dir=None)
        words = ["mupax", *self.words(portable, multiplier)]
        data = sweep.run(config, str(folder), words)
        assert data is not None  # it is for a dry run
        data = tables.of_tasks(data, lacking)
        if known is not None and first:
            data = tables.after(known, data, first)
        epochs = None
        if not config.dataset.startswith(_TEXT):
            examples = parsed.base.steps * parsed.base.batch_size
            epochs = round(examples / open_dataset(parsed.base).train_size, 2)
        today = datetime.date.today().isoformat()
        settings = {**data.settings, "config": parsed.settings()}
        whole = dataclasses.replace(data, featured=parsed.featured, settings=settings)
        facts = tables.facts(whole, epochs=epochs, measured=today)
        return tables.add(self.path(request), data, facts)

    def is_complete(self, request: Request) -> bool:
        """Whether its table has every run that the figure is about, of any seeds."""
        table = tables.read(self.path(request))
        if table is None:
            return False
        return tables.covers(table, self._needed(table, request), 1)

    def shown(self, table: Table) -> Table:
        """The runs of a table that the figure draws."""
        data = tables.only(table.data, self.keys) if self.keys else table.data
        return dataclasses.replace(table, data=data)

    def _needed(self, table: Table, request: Request) -> list[ZooTask]:
        """The tasks that the figure is about, on the table's dataset."""
        request = dataclasses.replace(
            request, dataset=table.facts["settings"]["dataset"]
        )
        return self._tasks(space.parse_sweep(self.parsed(request)))

    def _tasks(self, config: space.SweepConfig) -> list[ZooTask]:
        """The tasks that the figure is about."""
        tasks = space.tasks(config)
        return [t for t in tasks if not self.keys or tables.is_among(self.keys, t)]
