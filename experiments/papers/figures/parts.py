"""The sweeps of which a figure is made: packaged configs and what is overridden."""

import dataclasses
import datetime
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ...cli import flags
from ...errors import UserError
from ...report import SweepData
from . import tables
from .registry import Drawing, Request
from .tables import Table

_TEXT = "text:"
_TUNED = "branch_multiplier"


@dataclasses.dataclass(frozen=True)
class Part:
    """A sweep. Figures that need the same runs share it by its name.

    Attributes:
      config: name of a packaged config.
      name: of its folder and of its table.
      overrides: config keys and values, as typed after `--config.`.
      sizes: further overrides, by scale.
      edit: changes the config where no override can, e.g. removes a key.
      tuned: a sweep of the base over the learning rate and the block multiplier. Its
        best block multiplier is that of this sweep, as in Tensor Programs VI: tune
        the base, and scale from there.
      keys: the parametrizations that the figure is about; all by default.
      at_best: whether the figure is about the base's best block multiplier alone, of a
        sweep over several.
    """

    config: str
    name: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    edit: Callable[[ConfigDict], None] | None = None
    tuned: "Part | None" = None
    keys: tuple[str, ...] = ()
    at_best: bool = False

    def words(self, request: Request, multiplier: float | None = None) -> list[str]:
        """The command line of `mupax sweep` that runs it, but for an `edit`.

        Args:
          request: tells the scale and the data.
          multiplier: the base's best block multiplier, of a sweep that is tuned.
        """
        given = {**self.overrides, **self.sizes.get(request.scale, {})}
        if multiplier is not None:
            given[f"model.{_TUNED}"] = f"{multiplier:g}"
        if request.dataset:
            given["dataset"] = request.dataset
        if request.data_dir:
            given["data_dir"] = request.data_dir
        changes = [f"--config.{key}={value}" for key, value in given.items()]
        return ["sweep", "--config", self.config, *changes]

    def parsed(self, request: Request, multiplier: float | None = None) -> ConfigDict:
        """The config.

        Raises:
          UserError: an override that is not valid, or a text is needed and not named.
        """
        config = flags.parse(self.words(request, multiplier)).config
        if self.edit:
            self.edit(config)
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
          UserError: there is no such table.
        """
        path = self.path(request)
        table = tables.read(path)
        if table is None or not table.data.populations:
            raise UserError(
                f"there is no table {path}; leave --from_data out to train what it "
                "needs, or name another --tables or --scale"
            )
        return table

    def train(self, request: Request) -> Table:
        """Sweep what its table lacks, in a folder of its own, and write the table.

        Raises:
          UserError: the data is not there, or the folder holds another sweep.
        """
        from ...run.build import open_dataset  # these read data; theory does not
        from ...sweep import main as sweep
        from ...sweep.space import parse_sweep

        multiplier, folder = None, request.folder / request.scale / self.name
        if self.tuned is not None:
            base = self.tuned.train(request).data
            multiplier = base.populations[0].best()[_TUNED]
            folder = folder.with_name(f"{self.name}-a{multiplier:g}")
        config = self.parsed(request, multiplier)
        wanted = parse_sweep(config)
        known = tables.read(self.path(request))
        if known is not None and tables.same_settings(known, wanted.settings()):
            lacking = {
                one["parametrization"]
                for one in _populations(wanted)
                if not tables.covers(known, [one], wanted.seeds)
            }
            if not lacking:
                return known
            if set(wanted.parametrizations) != lacking:
                config.sweep.only = tuple(sorted(lacking))
        # Without the directory of the data, which is another one on each machine.
        portable = dataclasses.replace(request, data_dir=None)
        words = ["mupax", *self.words(portable, multiplier)]
        data = sweep.run(config, str(folder), words)
        epochs = None
        if not config.dataset.startswith(_TEXT):
            size = open_dataset(wanted.base).train_size
            epochs = round(wanted.base.steps * wanted.base.batch_size / size, 2)
        today = datetime.date.today().isoformat()
        facts = tables.facts(data, epochs=epochs, measured=today)
        return tables.add(self.path(request), data, facts)

    def is_complete(self, request: Request) -> bool:
        """Whether its table has every run that the figure is about, of any seeds."""
        from ...sweep.space import parse_sweep

        table = tables.read(self.path(request))
        if table is None:
            return False
        asked = dataclasses.replace(request, dataset=table.facts["dataset"])
        wanted = parse_sweep(self.parsed(asked))
        mine = [
            one
            for one in _populations(wanted)
            if not self.keys or one["parametrization"] in self.keys
        ]
        return tables.covers(table, mine, 1)

    def seen(self, table: Table) -> SweepData:
        """What the figure draws of a table."""
        data = tables.only(table.data, self.keys) if self.keys else table.data
        return tables.tuned(data, _TUNED) if self.at_best else data


def _populations(wanted: Any) -> Iterator[dict[str, Any]]:
    """What a `SweepConfig` asks for, as `tables.covers` takes it."""
    base = wanted.sizes
    shapes = {(base.width, depth) for depth in wanted.depths}
    shapes |= {(width, base.depth) for width in wanted.widths}
    for key, chosen, (width, depth) in itertools.product(
        wanted.parametrizations, wanted.choices, sorted(shapes)
    ):
        yield {
            "parametrization": key,
            "width": width,
            "depth": depth,
            "choices": chosen,
            "axes": wanted.axes,
        }


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """How a figure is drawn from sweeps.

    Attributes:
      parts: the sweeps, in the order in which `draw` takes them.
      draw: from what they found to panels and verdict.
    """

    parts: Sequence[Part]
    draw: Callable[..., Drawing]

    def __call__(self, request: Request) -> Drawing:
        """Train what is missing, or only read the tables, then draw."""
        from ...sweep.space import parse_sweep

        if request.from_data:
            read = [part.read(request) for part in self.parts]
        else:
            for part in self.parts:  # bad input is reported before any work
                parse_sweep(part.parsed(request))
            read = [part.train(request) for part in self.parts]
        drawing = self.draw(
            *(part.seen(table) for part, table in zip(self.parts, read, strict=True))
        )
        length = "; ".join(dict.fromkeys(table.length for table in read))
        return dataclasses.replace(drawing, length=length)
