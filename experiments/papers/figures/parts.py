"""The sweeps of which a figure is made: packaged configs and what is overridden."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from ...cli import flags
from ...errors import UserError
from ...report import SweepData
from .registry import Drawing, Request

_TEXT = "text:"


@dataclasses.dataclass(frozen=True)
class Part:
    """A sweep.

    Attributes:
      config: name of a packaged config.
      overrides: config keys and values, as typed after `--config.`.
      paper: further ones at the paper's sizes.
      name: of its folder in the figure's.
      edit: changes the config where no override can, as one that takes a key away.
    """

    config: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paper: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = "sweep"
    edit: Callable[[ConfigDict], None] | None = None

    def words(self, request: Request) -> list[str]:
        """The command line of `mupax sweep` that runs it, but for an `edit`."""
        given = dict(self.overrides)
        if request.paper:
            given |= self.paper
        if request.dataset:
            given["dataset"] = request.dataset
        if request.data_dir:
            given["data_dir"] = request.data_dir
        changes = [f"--config.{key}={value}" for key, value in given.items()]
        return ["sweep", "--config", self.config, *changes]

    def parsed(self, request: Request) -> ConfigDict:
        """The config.

        Raises:
          UserError: an override that means nothing, or text is needed and not named.
        """
        config = flags.parse(self.words(request)).config
        if self.edit:
            self.edit(config)
        if config.dataset.startswith(_TEXT) and not request.dataset:
            raise UserError(
                "this figure trains on a text file; name one: --dataset=text:FILE"
            )
        return config

    def train(self, request: Request) -> SweepData:
        """Sweep in a folder of its own; what is done there is not done again.

        Raises:
          UserError: the data is not there, or the folder holds another sweep.
        """
        from ...sweep import main  # it reads data, which theory does not

        command = ["mupax", *self.words(request)]
        folder = request.folder / self.name
        return main.run(self.parsed(request), str(folder), command)


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
        """Run what is missing, then draw."""
        from ...sweep.space import parse_sweep

        for part in self.parts:  # bad input is said before any work
            parse_sweep(part.parsed(request))
        return self.draw(*(part.train(request) for part in self.parts))
